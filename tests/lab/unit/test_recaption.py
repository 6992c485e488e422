"""Recaptioning and positives: rows that keep what they had, parts that go on,
descriptions, drawings, a tiny VLM.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError, load_image
from rl_caption.data.formats import build_data
from rl_caption.data.negatives import ColumnNegatives
from rl_caption.lab.config import (
    PositivesConfig,
    RecaptionConfig,
    RecaptionerConfig,
    TextToImageConfig,
    WriteNegativesConfig,
)
from rl_caption.lab.recaption import make_positives, recaption, write_negatives
from rl_caption.lab.recaptioners import (
    PROMPTS,
    CaptionerRecaptioner,
    LanguageModelWriter,
)
from rl_caption.reward_models.pac import check_positives
from rl_caption.runtime.errors import ConfigError
from tests.captioners_for_tests import tiny_captioner, tiny_rows
from tests.interruptions_for_tests import interrupted
from tests.training_for_tests import DATA
from tests.zoo.vision_language import tiny_qwen2_vl

SCENES = DataConfig(**DATA)


class Counting:
    """Says which image it sees; counts its rows."""

    signature = "counting"
    seen = 0

    def __call__(self, rows):
        Counting.seen += len(rows)
        return [f"A long caption of {row['image_id']}." for row in rows]


def config(out, target=f"{__name__}:Counting", **changed):
    kwargs = changed.pop("kwargs", {})
    return RecaptionConfig(
        data=SCENES,
        recaptioner=RecaptionerConfig(target=target, kwargs=kwargs),
        out=str(out),
        part_rows=3,
        **changed,
    )


def rows_of(file, split, **options):
    return build_data(
        DataConfig(
            format="jsonl",
            path=str(file),
            **options,
        )
    )[split]


def test_old_and_new_captions_are_a_data_set_also_of_a_run_that_was_stopped(
    tmp_path, monkeypatch
):
    whole, out = tmp_path / "whole", tmp_path / "out"
    table = recaption(config(whole))
    assert "| before |" in table
    assert "| after |" in table
    old, made = build_data(SCENES), whole / "captions.jsonl"
    rows = rows_of(made, "train", long_captions=False)
    for row, known in zip(rows, old["train"], strict=True):
        assert row["references"] == known["references"]
        assert row["long_reference"] == f"A long caption of {row['image_id']}."
    rows = rows_of(made, "val", long_captions=False)
    for row, known in zip(rows, old["val"], strict=True):
        assert row["long_reference"] == known["long_reference"]
        assert Path(str(row["image"])).is_file()

    monkeypatch.setattr(Counting, "seen", 0)
    with interrupted(Counting, "__call__", after=1):
        recaption(config(out))
    recaption(config(out, worker="1/2"))
    recaption(config(out))
    assert Counting.seen == len(old["train"])
    written = (out / "captions.jsonl").read_text().replace(str(out), str(whole))
    assert written == made.read_text()
    with pytest.raises(ConfigError, match="recaptioner was"):
        recaption(config(out, "scenes"))


def same_ids(seed: int = 0):
    """Images in memory, with the same ids in both splits."""
    for number, row in enumerate(tiny_rows(8)):
        split = "train" if number < 4 else "val"
        yield {**row, "image_id": str(number % 4), "split": split}


def test_splits_with_the_same_ids_do_not_mix_and_other_weights_do_not_go_on(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"

    def recaptioned(seed):
        captioner = tiny_captioner(seed)
        captioner.save_pretrained(captioner.policy, model)
        kwargs = {"model": str(model), "max_new_tokens": 8}
        data = DataConfig(target=f"{__name__}:same_ids")
        writer = RecaptionerConfig(kwargs=kwargs)
        options = {"splits": ["train", "val"], "out": str(out)}
        recaption(RecaptionConfig(data=data, recaptioner=writer, **options))

    recaptioned(0)
    lines = rows_of(out / "captions.jsonl", "train")
    lines = [*lines, *rows_of(out / "captions.jsonl", "val")]
    for line, known in zip(lines, same_ids(), strict=True):
        image, expected = load_image(line["image"]), load_image(known["image"])
        assert image.tobytes() == expected.tobytes()
    with pytest.raises(ConfigError, match="recaptioner was"):
        recaptioned(1)


def test_a_vision_language_model_answers_prompts_in_batches(tmp_path):
    folder = str(tiny_qwen2_vl(tmp_path / "vlm"))
    rows = build_data(SCENES)["train"][:3]
    asked = CaptionerRecaptioner(folder, "A page: {prompt}, {caption}", batch_size=3)
    alone = CaptionerRecaptioner(folder, "A page: {prompt}, {caption}", batch_size=1)
    told = []
    prepare = asked.captioner.prepare
    asked.captioner.prepare = lambda row: told.append(row["prompt"]) or prepare(row)
    together = asked(rows)
    assert list(map(len, together)) == [1, 1, 1]
    assert alone(rows) == together
    assert told == [f"A page: , {row['references'][0]}" for row in rows]
    beams = CaptionerRecaptioner(folder, "guided", num_beams=3, num_return_sequences=2)
    assert list(map(len, beams(rows))) == [2, 2, 2]


class Two(Counting):
    """Two captions of each image, and a blank one."""

    def __call__(self, rows):  # type: ignore[override]
        return [
            [caption, " ", f"Once more: {caption}"]
            for caption in super().__call__(rows)
        ]


class Painter:
    """An image of a caption, as large as the caption is long; counts them."""

    signature = "painter"
    made = 0

    def __call__(self, captions):
        Painter.made += len(captions)
        return [Image.new("RGB", (len(caption), 8)) for caption in captions]


def positives(out, captions=f"{__name__}:Two", images=None, of="all", **changed):
    painter = TextToImageConfig(target=images, batch_size=2, captions=of)
    values = {
        "data": SCENES,
        "part_rows": 5,
        "out": str(out),
    } | changed
    writer = RecaptionerConfig(target=captions)
    return PositivesConfig(captions=writer, images=painter, **values)


def test_positives_are_rows_for_pac_s(tmp_path):
    splits = ["train", "val"]
    table = make_positives(
        positives(tmp_path, images=f"{__name__}:Painter", splits=splits)
    )
    assert "| references | 190 |" in table
    assert "| positive_captions | 76 |" in table
    old = build_data(SCENES)
    for split in splits:
        rows = rows_of(tmp_path / "positives.jsonl", split)
        check_positives(rows, ["image", "text"], "random", split=split)
        for row, known in zip(rows, old[split], strict=True):
            assert row["references"] == known["references"]
            text = f"A long caption of {row['image_id']}."
            assert row["positive_captions"] == [text, f"Once more: {text}"]
            widths = [load_image(image).width for image in row["positive_images"]]
            assert widths == list(map(len, row["references"])), "k is of reference k"


def test_images_that_are_there_are_not_made_again_and_captions_come_before_or_after(
    tmp_path, monkeypatch
):
    painter, out = f"{__name__}:Painter", tmp_path / "out"
    make_positives(positives(tmp_path / "captions"))
    data = DataConfig(format="jsonl", path=str(tmp_path / "captions/positives.jsonl"))
    again = partial(
        positives,
        out,
        None,
        painter,
        data=data,
        of="first",
    )
    monkeypatch.setattr(Painter, "made", 0)
    with interrupted(Painter, "__call__", after=4):  # in the second part
        make_positives(again())
    make_positives(again(worker="1/2"))
    make_positives(again())
    assert Painter.made == 32
    check_positives(
        rows_of(out / "positives.jsonl", "train"), ["image", "text"], "first"
    )
    with pytest.raises(ConfigError, match="images was"):
        make_positives(positives(out, None, painter, data=data))


# --- negatives ----------------------------------------------------------------------------------


class Swapping:
    """Writes each caption in reverse, blank, as it is, and with one word more."""

    signature = "swapping"

    def __call__(self, captions):
        return [
            [
                " ".join(reversed(text.split())),
                " ",
                text.upper(),
                f"{text}  not",
            ]
            for text in captions
        ]


def test_false_captions_are_a_column_beside_their_references(tmp_path):
    writer = RecaptionerConfig(target=f"{__name__}:Swapping")
    options = {"writer": writer, "part_rows": 3, "out": str(tmp_path)}
    table = write_negatives(WriteNegativesConfig(data=SCENES, **options))
    assert "| negatives |" in table
    for row, known in zip(
        rows_of(tmp_path / "negatives.jsonl", "train"),
        build_data(SCENES)["train"],
        strict=True,
    ):
        assert row["references"] == known["references"]
        assert row["negatives"] == [
            [" ".join(reversed(t.split())), f"{t} not"] for t in known["references"]
        ]
        source = ColumnNegatives()
        drawn = source(
            row,
            row["references"][0],
            np.random.default_rng(0),
        )
        assert sorted(text for _, text in drawn) == sorted(row["negatives"][0])


class Answering:
    """A language model that answers with the last caption of the prompt, and more lines."""

    signature = "answering"

    def write(self, questions, max_new_tokens):
        self.prompts = [question.text for question in questions]
        last = [text.rpartition("Caption: ")[2] for text in self.prompts]
        return [f" False: no {text.partition(chr(10))[0]}\nmore" for text in last]


def test_a_language_model_is_shown_examples_and_answers_with_a_line():
    model = Answering()
    writer = LanguageModelWriter(model=model, max_new_tokens=4)
    written = writer(["a cat on\na mat", "a dog"])
    assert written == [["no a cat on a mat"] * 2, ["no a dog"] * 2]
    for pairs, prompt in zip(
        PROMPTS["negatives"].values(), model.prompts, strict=False
    ):
        assert all(
            f"Caption: {true}\nFalse: {false}\n" in prompt for true, false in pairs
        )
        assert prompt.endswith("Caption: a cat on a mat\nFalse:")


def test_a_part_without_all_its_rows_is_named_and_loses_none(tmp_path):
    recaption(config(tmp_path))
    written = (tmp_path / "captions.jsonl").read_bytes()
    part = sorted((tmp_path / "parts").glob("*.jsonl"))[0]
    part.write_text('{"image_id": "x"}\n')
    with pytest.raises(DataError, match=part.name):
        recaption(config(tmp_path))
    assert (tmp_path / "captions.jsonl").read_bytes() == written
