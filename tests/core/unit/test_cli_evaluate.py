"""The evaluation program: which images it takes, rewards as metrics, what it imports,
refuses and says.
"""

import hashlib
import json
import logging
import math
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from rewards.base import RewardError
from rewards.clip.l_clipscore import LClipScore
from rewards.files import load_json
from rl_caption.captioners.loading import weights_hash
from rl_caption.config.build import build_data
from rl_caption.config.commands import (
    EvaluateConfig,
)
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json
from rl_caption.evaluation import EvaluationError
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.programs import evaluate as program
from rl_caption.programs.evaluate import (
    compare_systems,
    evaluate_split,
    score_captions,
)
from rl_caption.runtime.errors import ConfigError
from tests.captioners_for_tests import tiny_captioner, tiny_rows
from tests.captions_for_tests import CAPTIONS, REFERENCES
from tests.clip_for_tests import tiny_student
from tests.report_for_tests import DATA, write_run

SPLITS = ("train", "val", "test", "test")
KARPATHY = {"images": []}
for split, (key, texts) in zip(SPLITS, REFERENCES.items(), strict=True):
    sentences = [{"raw": text} for text in texts]
    image = {"cocoid": int(key), "filename": f"{key}.jpg", "split": split}
    KARPATHY["images"].append(image | {"sentences": sentences})


class Failing:
    """A reward that fails."""

    __name__, columns, bounds, signature = "failing", frozenset(), (0.0, 1.0), "failing"

    def __call__(self, prompts, completions, **columns):
        raise RewardError("no score today")


class Asking(Failing):
    """A reward of a column that rows of photos lack."""

    columns = frozenset({"questions"})


def predictions(captions=CAPTIONS, key="image_id"):
    return [{key: image_id, "caption": text} for image_id, text in captions.items()]


@pytest.fixture
def files(tmp_path):
    """Captions by two systems and their references."""
    contents = {
        "a": predictions(),
        "b": predictions({key: f"{text} there" for key, text in CAPTIONS.items()}),
        "references": REFERENCES,
        "karpathy": KARPATHY,
    }
    paths = {"out": str(tmp_path / "out")}
    for name, content in contents.items():
        paths[name] = str(tmp_path / f"{name}.json")
        write_json(paths[name], content)
    return paths


def configured(files, **changes):
    options = {key: files[key] for key in ("references", "out")}
    options |= {"predictions": files["a"], "metrics": ["rouge", "cider"]}
    return chosen(options | {"tokenizer": "python", "bootstrap": 2} | changes)


def scored(config):
    evaluate_split(config)
    scores = load_json(Path(config.out) / "scores.json")
    return scores["n"], scores["metrics"]


def warning(caplog):
    (found,) = [
        record.message for record in caplog.records if record.levelno == logging.WARNING
    ]
    return found


def test_files_are_evaluated_without_torch(files):
    sources = ["--references", files["references"]]
    evaluate = ["evaluate", *sources, "--metrics", "cider", "--out", files["out"]]
    calls = [
        [*evaluate, "--predictions", files["a"]],
        [*evaluate, "--compare", files["a"], files["b"]],
        ["score", "--reward", "cider", "--captions", files["a"], *sources],
    ]
    code = (
        "import sys; from rl_caption.cli.main import main\n"
        f"print([main(words) for words in {calls!r}])\n"
        "print({'torch', 'transformers', 'accelerate'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-2:] == ["[0, 0, 0]", "set()"], done.stderr


# which images


def test_a_split_of_the_references_selects_the_images(files, caplog):
    found = scored(configured(files, references=files["karpathy"]))
    assert "2 captions" in warning(caplog)
    named = configured(files, references=files["karpathy"], split="test")
    assert found == scored(named)
    own = {key: CAPTIONS[key] for key in ("3", "4")}
    write_json(files["a"], predictions(own))
    write_json(files["b"], {key: REFERENCES[key] for key in own})
    assert found == scored(configured(files, references=files["b"]))
    assert found[0] == 2
    with pytest.raises(EvaluationError, match=r"a\.json.*karpathy\.json.*--split"):
        score_captions(configured(files, references=files["karpathy"], split="train"))
    with pytest.raises(DataError, match="'test'"):
        score_captions(configured(files, split="test"))
    caplog.clear()
    score_captions(configured(files))
    assert "a.json has no caption of 2 images" in warning(caplog)


# formats


# rewards as metrics

REFERENCE_IDS = [row["image_id"] for row in tiny_rows()]
OWN = {
    "image-0": "a red circle",
    "image-2": "a dog runs on the tracks",
    "image-1": "squares",
}


@pytest.fixture
def folder(tmp_path):
    """Four images of a test split, captions of three of them, a file of references, a
    captioner and a student.
    """
    rows = tiny_rows()
    with (tmp_path / "data.jsonl").open("w") as file:
        for row in rows:
            row["image"].resize((40, 36)).save(tmp_path / f"{row['image_id']}.png")
            line = row | {"image": f"{row['image_id']}.png"}
            file.write(json.dumps(line | {"split": "test"}) + "\n")
    write_json(
        tmp_path / "references.json",
        {row["image_id"]: row["references"] for row in rows},
    )
    write_json(tmp_path / "captions.json", predictions(OWN))
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, tmp_path / "model")
    tiny_student(tmp_path / "student")
    return tmp_path


def with_judges(folder, **changes):
    config = EvaluateConfig(
        predictions=str(folder / "captions.json"),
        data=DataConfig(format="jsonl", path=str(folder / "data.jsonl")),
        metrics=["cider"],
        tokenizer="python",
        judges={
            "L-CLIPS": JudgeConfig(
                target="l_clipscore", kwargs={"backbone": str(folder / "student")}
            )
        },
        out=str(folder / "out"),
    )
    return changed(config, **changes)


def changed(config, **changes):
    """The configuration with other values, of which None leaves a key out."""
    return chosen(dict(config) | changes)


def chosen(options):
    """A configuration with the options that are not None."""
    options = {key: value for key, value in options.items() if value is not None}
    return EvaluateConfig(**options)


def test_a_judge_is_a_metric_with_its_range_and_signature(folder):
    judges = with_judges(folder).judges | {"rouge_l": JudgeConfig()}
    table = evaluate_split(with_judges(folder, judges=judges))
    reward = LClipScore(folder / "student")
    # One caption at a time, opened here: neither batches nor the rows' order may matter.
    alone = []
    for name, text in OWN.items():
        image = Image.open(folder / f"{name}.png")
        alone += reward(None, [text], image=[image])
    written = load_json(folder / "out/scores.json")
    mean = written["metrics"]["judge/L-CLIPS"]
    assert mean == pytest.approx(math.fsum(alone) / 3, rel=1e-6)
    assert mean > 0
    assert 0 < written["metrics"]["judge/rouge_l"] < 1
    assert f"+judge/L-CLIPS[{reward.signature}]+judge/rouge_l[" in written["signature"]
    assert "ids:3 of 4" in written["signature"]
    low, high = written["intervals"]["judge/L-CLIPS"]
    assert min(alone) - 1e-6 <= low <= mean <= high <= max(alone) + 1e-6
    assert f"| captions | 3 | {mean:.4f} [" in table
    assert "intervals: 95 %" in table


def refuse(*_, **__):
    raise AssertionError("this takes long, and the mistake could be known")


MODEL = {"predictions": None, "model": "model"}
MISTAKES = [
    (MODEL | {"judges": {"rogue_l": JudgeConfig()}}, ConfigError, r"^judges\.rogue_l"),
    (
        {"data": DataConfig(format="jsonl", path="data.jsonl", image_root="elsewhere")},
        EvaluationError,
        r"^judges\.L-CLIPS.*and 3 of 3.*split 'test'.*'.*image-0.png'",
    ),
    (
        MODEL | {"data": DataConfig(format="jsonl", path="bare.jsonl")},
        EvaluationError,
        r"1 of 1.*\['image-0.png'\]",
    ),
    (
        MODEL | {"judges": {"qa": JudgeConfig(target=f"{__name__}:Asking")}},
        EvaluationError,
        r"^judges\.qa.*\['questions'\]",
    ),
    ({"tokenizer": "java", "metrics": "cider"}, EvaluationError, "tokenizer 'java'"),
    ({"metrics": "cider,blue"}, EvaluationError, r"\['blue'\]"),
]


@pytest.mark.parametrize(
    "sources",
    [
        {"model": "m", "predictions": "p"},
        {"predictions": "p", "compare": ["a", "b"]},
        {"compare": ["a"]},
        {"model": "m", "references": "r"},
    ],
)
def test_captions_and_references_come_from_one_place(sources):
    with pytest.raises(ValueError, match=r"expected a captioner|references are set"):
        EvaluateConfig(**sources)


def test_mistakes_are_found_before_anything_is_scored_or_loaded(folder, monkeypatch):
    monkeypatch.setattr(program, "evaluate_captions", refuse)
    monkeypatch.setattr(program, "_decode", refuse)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "")  # no Java
    Path("bare.jsonl").write_text(
        '{"image": "image-0.png", "references": [], "split": "test"}'
    )
    for changes, error, words in MISTAKES:
        with pytest.raises(error, match=words):
            score_captions(with_judges(folder, **changes))


def test_decoded_captions_outlive_a_failure(folder):
    out = folder / "out"
    out.mkdir()
    (out / "scores.json").write_text("{}")
    judges = {"mine": JudgeConfig(target=f"{__name__}:Failing")}
    model = str(folder / "model")
    with pytest.raises(RewardError, match=r"judges\.mine"):
        evaluate_split(
            with_judges(folder, predictions=None, model=model, judges=judges)
        )
    assert len(load_json(out / "predictions.json")) == 4
    assert not (out / "scores.json").exists(), "of other captions"


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda text: f"{text} </s>", "4 of 18 texts"),
        (lambda text: unicodedata.normalize("NFD", f"{text} café"), "4 of 18 texts"),
        (lambda text: f"{text} <3 [blue] #1 # 2 a < b > c | d café", None),
    ],
)
def test_captions_that_cost_scores_by_their_form_are_counted_and_named(
    change, count, files, caplog
):
    references = {key: [*texts, "un café"] for key, texts in REFERENCES.items()}
    write_json(files["references"], references)
    captions = {key: change(text) for key, text in CAPTIONS.items()}
    write_json(files["a"], predictions(captions))
    evaluate_split(configured(files))
    if count is None:
        assert not caplog.records
    else:
        assert count in warning(caplog)
        assert "caption of image '1'" in warning(caplog)


def settings_in(folder):
    return load_json(folder / "settings.json")  # type: ignore[no-any-return]


def test_evaluations_record_whose_captions_they_are_of(folder):
    def evaluated(out, **changes):
        own = {"judges": {}, "metrics": ["rouge"], "bootstrap": 0} | changes
        evaluate_split(with_judges(folder, out=str(folder / out), **own))
        return settings_in(folder / out)

    def digest(file):
        return hashlib.sha256((folder / file).read_bytes()).hexdigest()

    weights = weights_hash(folder / "model")
    found = evaluated("out", predictions=None, model=str(folder / "model"))
    assert found["weights"] == weights
    assert found["predictions"] == digest("out/predictions.json")
    found = evaluated("file")
    assert found["predictions"] == digest("captions.json")
    assert "weights" not in found
    # Captions that another evaluation decoded keep their model, until the file is changed.
    decoded = {"predictions": str(folder / "out")}
    assert evaluated("again", **decoded)["weights"] == weights
    (folder / "out/predictions.json").write_text((folder / "captions.json").read_text())
    assert "weights" not in evaluated("again", **decoded)


def test_a_comparison_leaves_nothing_of_other_captions(folder):
    config = with_judges(folder, judges={}, metrics=["rouge"], bootstrap=2)
    evaluate_split(config)
    files = [str(folder / "captions.json"), str(folder / "dogs.json")]
    write_json(files[1], predictions(dict.fromkeys(OWN, "a dog")))
    compare_systems(changed(config, predictions=None, compare=files))
    assert settings_in(folder / "out/captions")["split"] == "test"
    assert not (folder / "out/scores.json").exists()
    assert (folder / "out/comparison.json").exists()
    evaluate_split(config)
    assert (folder / "out/scores.json").exists()
    assert not (folder / "out/comparison.json").exists()


def test_folders_are_compared_on_the_data_that_they_name(folder):
    config = with_judges(folder, judges={}, metrics=["rouge"], bootstrap=2)
    model, pair = (
        str(folder / "model"),
        [str(folder / name) for name in ("e.xe", "e.rl")],
    )
    evaluate_split(changed(config, predictions=None, model=model, out=pair[0]))
    captions = predictions(dict.fromkeys(REFERENCE_IDS, "a dog"))
    write_json(folder / "captions.json", captions)
    evaluate_split(changed(config, out=pair[1]))
    options = {"metrics": ["rouge"], "bootstrap": 2, "out": str(folder / "out")}
    compared = EvaluateConfig(compare=pair, **options)
    compare_systems(compared)
    systems = load_json(folder / "out/comparison.json")["systems"]
    assert systems == ["e.xe", "e.rl"]
    assert settings_in(folder / "out/e.xe")["weights"] == weights_hash(model)
    assert load_json(folder / "out/e.rl/scores.json")["metrics"] == scored(config)[1]
    settings = settings_in(folder / "e.rl")
    for change, key in (
        ({"split": "val"}, "split"),
        ({"data": settings["data"] | {"kwargs": {"seed": 1}}}, "kwargs"),
    ):
        write_json(folder / "e.rl/settings.json", settings | change)
        with pytest.raises(ConfigError, match=rf"\({key}\)"):
            compare_systems(compared)
    received = settings["data"] | {"target": "os:system", "format": "karpathy"}
    for name in pair:
        write_json(f"{name}/settings.json", settings | {"data": received})
    with pytest.raises(ConfigError, match="os:system"):
        compare_systems(compared)


@pytest.mark.parametrize("asked", [None, "val"])
def test_runs_are_compared_on_a_split_that_chose_nothing_or_it_is_said(
    asked, tmp_path, caplog
):
    data = DATA | {"tokenizer": "ptb"}
    runs = [write_run(tmp_path / name, data=data) for name in ("first", "second")]
    for seed, run in enumerate(runs):
        captioner = tiny_captioner(seed)
        captioner.save_pretrained(captioner.policy, run / "export/best")
    config = EvaluateConfig(
        compare=list(map(str, runs)),
        split=asked,
        metrics=["rouge"],
        tokenizer="python",
        bootstrap=2,
        out=str(tmp_path / "out"),
    )
    compare_systems(config)
    assert ("chose its best model" in caplog.text) == (asked == "val")
    settings = settings_in(tmp_path / "out/first")
    assert settings["split"] == (asked or "test")
    assert settings["weights"] == weights_hash(runs[0] / "export/best")
    stored = load_json(tmp_path / "out/first/predictions.json")
    rows = build_data(DataConfig(**DATA))[asked or "test"]  # type: ignore[arg-type]
    assert {row["image_id"] for row in stored} == {row["image_id"] for row in rows}
