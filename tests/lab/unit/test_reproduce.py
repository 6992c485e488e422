"""reproduce: the published tables against the papers' own sums, and tables that are
measured on tiny data.
"""

from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

from rewards.clip.backbone import load_encoder
from rewards.clip.encoder import EncoderOptions
from rewards.files import load_json
from rl_caption.cli.main import main
from rl_caption.data.files import write_json
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.evaluation.zero_shot import (
    CIFAR_PROMPTS,
    labelled_images,
    zero_shot_accuracy,
)
from rl_caption.lab.meta_evaluation.sets import SETS
from rl_caption.lab.reproduce.program import as_markdown
from rl_caption.lab.reproduce.tables import (
    FOLDER,
    PAPERS,
    Cell,
    data_sets,
    load_paper,
)
from rl_caption.runtime.options import check_options
from tests.clip_for_tests import noise_image, tiny_student
from tests.judgement_sets_for_tests import BUILDERS

GOLDEN = load_json(Path(__file__).parents[1] / "golden" / "published_tables.json")[
    "tables"
]
TABLES = [table for name in PAPERS for table in load_paper(name).tables.values()]
NAMES = [f"{table.paper} {table.key}" for table in TABLES]


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return tiny_student(tmp_path_factory.mktemp("student"))


def made(out, command, *more):
    """Row and column -> cell of a table that the command line makes."""
    assert main(["reproduce", *command.split(), *more, "--out", str(out)]) == 0
    cells = load_json(out / "reproduce.json")["cells"]
    return {(cell["row"], cell["column"]): cell for cell in cells}


def test_every_table_has_the_numbers_and_sums_of_the_paper():
    assert sorted(GOLDEN) == sorted(NAMES)
    assert len(GOLDEN) == 40
    for name, table in zip(NAMES, TABLES, strict=True):
        expected = GOLDEN[name]
        total = sum(cell.published for cell in table.cells)
        assert len(table.cells) == expected["values"], name
        assert total == Decimal(expected["sum"]), name
        if "columns" in expected:
            sums = defaultdict(Decimal)
            for cell in table.cells:
                sums[cell.column] += cell.published
            file = FOLDER / f"{table.paper}.yaml"
            columns = yaml.safe_load(file.read_text())["tables"][table.key]["columns"]
            found = [sums[column] for column in columns]
            assert found == list(map(Decimal, expected["columns"])), name


@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_what_measures_a_table_exists(table):
    for cell in table.cells:
        how = cell.how
        if "set" in how:
            options = how.get("options", {})
            check_options(
                SETS[how["set"]],
                1,
                how["set"],
                options,
                "set",
            )
        assert how["data"] in {None, *data_sets()}, cell
        assert how.get("model") in {None, *table.models}, cell
        assert {"name", "reward", "model", "captions", "why"} & how.keys(), cell


def test_the_command_line(tmp_path, capsys, student):
    data = tmp_path / "sets" / "pascal"
    data.mkdir(parents=True)
    BUILDERS["pascal50s"](data)
    command = f"pac_s 4 --data {data.parent} --rows CIDEr CLIP-S PAC-S --partial"
    cells = made(tmp_path / "out", command)
    shown = capsys.readouterr().out
    assert shown.strip() == (tmp_path / "out" / "reproduce.md").read_text().strip()
    assert 0 <= cells["CIDEr", "Mean"]["measured"] <= 100
    assert cells["PAC-S", "Mean"]["measured"] is None
    assert "--model 'pac=BACKBONE'" in cells["PAC-S", "Mean"]["reason"]
    # Images are not there: a model that is given does not help, and is not needed for the rest.
    cells = made(tmp_path / "out", f"{command} --model clip={student}")
    assert "images" in cells["CLIP-S", "Mean"]["reason"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["pac", "1"], "'pac'"),
        (["pac_s", "1"], "Flickr8k.token.txt"),
        (["pac_s", "1", "--model", "other=x"], "other"),
        (["pac_s", "1", "--rows", "CIDER"], "CIDER"),
    ],
)
def test_what_is_missing_is_said_before_any_work(tmp_path, capsys, words, named):
    with pytest.raises(SystemExit):
        main(
            ["reproduce", *(word.replace("{folder}", str(tmp_path)) for word in words)]
        )
    assert named in capsys.readouterr().err


def test_differences_are_of_the_printed_digits():
    cell = Cell("CIDEr", "Expert tau_c", Decimal("43.9"), {}, 43.891)
    assert str(cell.difference) == "0.0"
    other = Cell("METEOR", "CF tau_b", Decimal("22.2"), {}, 22.269)
    text = as_markdown(TABLES[0]._replace(cells=[cell, other]))
    assert "| METEOR | CF tau_b | 22.2 | 22.3 | +0.1 |" in text
    assert "1 of 2 measured values are the published ones" in text


def test_released_scores_of_icc(shared_data, tmp_path):
    cells = made(tmp_path, f"icc 5 --data {shared_data / 'concreteness'}")
    for name in ("Pearson", "Spearman", "tau"):
        cell = cells["After Distillation", name]
        assert round(cell["measured"], 2) == cell["published"]


def test_zero_shot_classification(tmp_path, student):
    for number, name in enumerate(("fire_truck", "cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(2):
            file = tmp_path / "photos" / name / f"{index}.png"
            noise_image(10 * number + index).save(file)
    encoder = load_encoder(EncoderOptions(str(student), device="cpu"))
    names, images, labels = labelled_images(tmp_path / "photos")
    assert (names, labels) == (["cat", "dog", "fire truck"], [0, 0, 1, 1, 2, 2])
    rows = []
    for name in names:
        prompts = encoder.embed_texts([text.format(name) for text in CIFAR_PROMPTS])
        rows.append(prompts.mean(axis=0) / np.linalg.norm(prompts.mean(axis=0)))
    guesses = np.argmax(encoder.embed_images(images) @ np.transpose(rows), axis=1)
    command = f"specs 3 --data cifar10={tmp_path / 'photos'} --model clip={student}"
    cells = made(tmp_path / "out", command)
    expected = 100 * np.mean(guesses == labels)
    assert cells["CLIP", "CIFAR-10"]["measured"] == pytest.approx(expected)
    spy = Mock(wraps=encoder)
    zero_shot_accuracy(spy, tmp_path / "photos", "imagenet")
    assert len(spy.embed_texts.call_args.args[0]) == 3 * 80
    assert "urban1k" in cells["CLIP", "Urban-1k T2I"]["reason"]


def test_retrieval_and_size_of_a_model(tmp_path, student):
    folder = tmp_path / "urban"
    texts = [f"a street with {number} cars and a red bus" for number in range(4)]
    for name in ("image", "caption"):
        (folder / name).mkdir(parents=True)
    for number, text in enumerate(texts):
        noise_image(number).save(folder / "image" / f"{number}.jpg")
        (folder / "caption" / f"{number}.txt").write_text(f"{text}\nMore.")
    cells = made(tmp_path / "out", f"specs 3 --data {tmp_path} --model spec={student}")
    encoder = load_encoder(EncoderOptions(str(student), device="cpu"))
    files = [folder / "image" / f"{number}.jpg" for number in range(4)]
    embeddings = encoder.embed_images(files), encoder.embed_texts(texts)
    recall = retrieval_recall(*embeddings, range(4))
    measured = cells["SPEC", "Urban-1k I2T"]["measured"]
    assert measured == pytest.approx(100 * recall["i2t_r1"])
    cells = made(tmp_path / "size", f"l_clipscore I --model l_clip={student}")
    parameters = sum(weight.numel() for weight in encoder.encoder.model.parameters())
    assert cells["WP+MD", "parameters"]["measured"] == parameters


def test_specificity_rates_are_those_of_the_released_code(tmp_path, student):
    folder = tmp_path / "dci"
    for name in ("complete", "photos"):
        (folder / name).mkdir(parents=True)
    captions = [
        "A man in a red coat walks a small dog. The dog carries a stick. A bus waits behind them.",
        "Two children play with a yellow ball. A fence stands on the left. Clouds hang over the "
        "hill.",
        "A boat lies on a grey lake. A woman sits on the shore. Trees grow around the water.",
    ]
    names = [f"{number}.json" for number in range(len(captions))]
    for number, text in enumerate(captions):
        noise_image(number).save(folder / "photos" / f"{number}.jpg")
        note = {"image": f"{number}.jpg", "summaries": {"base": [text]}}
        write_json(folder / "complete" / names[number], note)
    write_json(folder / "splits.json", {"test": names})
    command = f"specs 1 --data {tmp_path} --model spec={student}"
    cells = made(tmp_path / "out", command)
    positive = cells["SPEC", "Positive"]["measured"]
    negative = cells["SPEC", "Negative"]["measured"]
    assert 0 <= min(positive, negative) <= max(positive, negative) <= 100
    average = cells["SPEC", "Average"]["measured"]
    assert average == pytest.approx((positive + negative) / 2)
