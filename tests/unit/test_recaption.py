"""Recaptioning and positives: rows that keep what they had, parts that go on, descriptions, drawings, a tiny VLM."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_caption.config.programs import PositivesConfig, RecaptionConfig, RecaptionerConfig, TextToImageConfig
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError, Row, Splits, load_image
from rl_caption.data.formats import build_data
from rl_caption.data.scenes import ScenesData
from rl_caption.data.scenes.oracle import oracle
from rl_caption.errors import ConfigError
from rl_caption.programs.recaption import make_positives, recaption
from rl_caption.programs.recaptioners import SceneRecaptioner, VisionLanguageRecaptioner
from rl_caption.reward_models.batch import check_positives
from tests.captioners_for_tests import tiny_captioner, tiny_rows
from tests.training_for_tests import DATA
from tests.vlm_for_tests import tiny_qwen2_vl

SCENES = DataConfig(**DATA)


class Counting:
    """Says which image it sees; counts its rows."""

    signature = "counting"
    seen = 0
    stop_at = 10**9

    def __call__(self, rows: Sequence[Row]) -> list[str]:
        if Counting.seen >= Counting.stop_at:
            raise KeyboardInterrupt
        Counting.seen += len(rows)
        return [f"A long caption of {row['image_id']}." for row in rows]


def config(out: Path, target: str = f"{__name__}:Counting", **changed: Any) -> RecaptionConfig:
    kwargs = changed.pop("kwargs", {})
    return RecaptionConfig(SCENES, recaptioner=RecaptionerConfig(target, kwargs), out=str(out), part_rows=3, **changed)


def test_old_and_new_captions_are_a_data_set(tmp_path: Path) -> None:
    table = recaption(config(tmp_path / "out"))
    assert "| before |" in table
    assert "| after |" in table
    old = build_data(SCENES)
    made = DataConfig(format="jsonl", path=str(tmp_path / "out/captions.jsonl"), long_captions=False)
    new = build_data(made)
    assert [row["references"] for row in new.split("train")] == [row["references"] for row in old.split("train")]
    assert [row["long_reference"] for row in new.split("train")] == [
        f"A long caption of {row['image_id']}." for row in old.split("train")
    ]
    assert [row["long_reference"] for row in new.split("val")] == [row["long_reference"] for row in old.split("val")]
    assert Path(str(new.split("val")[0]["image"])).is_file()
    long = build_data(DataConfig(format="jsonl", path=made.path, long_captions=True)).split("train")[0]
    assert long["references"] == [f"A long caption of {long['image_id']}."]


def test_a_stopped_run_goes_on_and_workers_share_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    recaption(config(whole))
    rows = len(build_data(SCENES).split("train"))
    monkeypatch.setattr(Counting, "seen", 0)
    monkeypatch.setattr(Counting, "stop_at", 3)
    with pytest.raises(KeyboardInterrupt):
        recaption(config(out))
    monkeypatch.setattr(Counting, "stop_at", 10**9)
    recaption(config(out, worker="1/2"))
    recaption(config(out))
    assert Counting.seen == rows
    lines, expected = ((folder / "captions.jsonl").read_text().replace(str(folder), "") for folder in (out, whole))
    assert lines == expected
    with pytest.raises(ConfigError, match="recaptioner was"):
        recaption(config(out, "scenes"))


def test_parts_by_other_weights_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    asked = {"target": "captioner", "kwargs": {"model": str(model), "max_new_tokens": 4}}
    for seed in (0, 0):
        captioner = tiny_captioner(seed, image_size=32)
        captioner.save_pretrained(captioner.policy, model)
        recaption(config(out, **asked))
    captioner = tiny_captioner(1, image_size=32)
    captioner.save_pretrained(captioner.policy, model)
    with pytest.raises(ConfigError, match="recaptioner was"):
        recaption(config(out, **asked))


class Numbered(Splits):
    """Images in memory, with the same ids in both splits."""

    def __init__(self) -> None:
        images = [row["image"] for row in tiny_rows(8)]
        rows = [{"image_id": str(index % 4), "image": image, "references": ["a"]} for index, image in enumerate(images)]
        super().__init__({"train": rows[:4], "val": rows[4:]}, "memory")


def test_splits_with_the_same_ids_do_not_mix(tmp_path: Path) -> None:
    captioner = tiny_captioner(0)
    captioner.save_pretrained(captioner.policy, tmp_path / "model")
    kwargs = {"model": str(tmp_path / "model"), "num_samples": 1, "max_new_tokens": 8, "seed": 1}
    data = DataConfig(target=f"{__name__}:Numbered")
    found = {}
    for splits in (["train"], ["train", "val"]):
        out = tmp_path / "-".join(splits)
        asked = RecaptionConfig(data, splits, recaptioner=RecaptionerConfig("captioner", kwargs), out=str(out))
        recaption(asked)
        new = build_data(DataConfig(format="jsonl", path=str(out / "captions.jsonl")))
        found[len(splits)] = [row["long_reference"] for row in new.split("train")]
        for split in ("train", "val"):
            for row, old in zip(new.split(split), Numbered().split(split), strict=True):
                assert load_image(row["image"]).tobytes() == load_image(old["image"]).tobytes()
    assert found[1] == found[2]


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changed, message in (
        ({"splits": ["training"]}, "splits has"),
        ({"target": "scene"}, "recaptioner.target"),
        ({"target": "scenes", "kwargs": {"keep": 0}}, "keep is 0"),
        ({"target": "scenes", "kwargs": {"kept": 1}}, "kwargs.kept is no option of scenes"),
        ({"language_model": str(tmp_path)}, "language_model"),
        ({"target": "vision_language", "kwargs": {"name": "x", "prompt": "{title}"}}, "title"),
    ):
        with pytest.raises(ConfigError, match=message):
            recaption(config(tmp_path / "out", **changed))
    videos = replace(config(tmp_path / "out"), data=DataConfig("moving_scenes", kwargs={"num_train": 2}))
    with pytest.raises(ConfigError, match="are videos"):
        recaption(videos)
    monkeypatch.setattr(Counting, "__call__", lambda self, rows: [["one", "another"]] * len(rows))
    with pytest.raises(DataError, match="counting wrote 2 captions of an image: recaption takes one"):
        recaption(config(tmp_path / "out"))
    monkeypatch.setattr(Counting, "__call__", lambda self, rows: [" "] * len(rows))
    with pytest.raises(DataError, match="no caption of train"):
        recaption(config(tmp_path / "out"))


def test_descriptions_of_scenes_are_true_thinned_or_wrong() -> None:
    rows = ScenesData(num_train=30, num_val=0, num_test=0, num_unseen=0).split("train")
    exact, thin, wrong = (SceneRecaptioner(*options)(rows) for options in ((1, 0), (0.4, 0), (1, 1)))
    for row, caption in zip(rows, exact, strict=True):
        assert oracle(caption, row["scene"]).f1 == 1
    assert sum(map(len, thin)) < 0.6 * sum(map(len, exact))
    assert all(oracle(caption, row["scene"]).precision == 1 for row, caption in zip(rows, thin, strict=True))
    precision = [oracle(caption, row["scene"]).precision for row, caption in zip(rows, wrong, strict=True)]
    assert sum(precision) / len(precision) < 0.7
    with pytest.raises(DataError, match="no generated scene"):
        SceneRecaptioner()([{"image_id": "1", "image": "a.png", "references": []}])


def test_a_vision_language_model_answers_in_batches(tmp_path: Path) -> None:
    folder = tiny_qwen2_vl(tmp_path / "vlm")
    rows = build_data(SCENES).split("train")[:3]
    prompt = "describe this image {caption}"
    alone = VisionLanguageRecaptioner(str(folder), prompt, max_new_tokens=5, batch_size=1, dtype="float32")(rows)
    together = VisionLanguageRecaptioner(str(folder), prompt, max_new_tokens=5, batch_size=3, dtype="float32")(rows)
    assert together == alone
    assert [len(own) for own in alone] == [1, 1, 1]
    several = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5, "dtype": "float32"}
    beams = VisionLanguageRecaptioner(str(folder), prompt, **several)
    assert [len(own) for own in beams(rows)] == [2, 2, 2]
    assert beams.signature != VisionLanguageRecaptioner(str(folder), prompt, max_new_tokens=5).signature
    with pytest.raises(ConfigError, match="num_return_sequences is 2: expected 1 to num_beams, 1"):
        VisionLanguageRecaptioner(str(folder), num_return_sequences=2)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        VisionLanguageRecaptioner(str(tmp_path / "absent"))


class Two(Counting):
    """Two captions of each image, and a blank one."""

    def __call__(self, rows: Sequence[Row]) -> list[list[str]]:  # type: ignore[override]
        return [[caption, " ", f"Once more: {caption}"] for caption in super().__call__(rows)]


class Painter:
    """An image of a caption, as large as the caption is long; counts them, and stops at a given one."""

    signature = "painter"
    made = 0
    stop_at = 10**9

    def __call__(self, captions: Sequence[str]) -> list[Image.Image]:
        Painter.made += len(captions)
        if Painter.made > Painter.stop_at:
            raise KeyboardInterrupt
        return [Image.new("RGB", (len(caption), 8)) for caption in captions]


def positives(out: Path, captions: str | None = f"{__name__}:Two", images: str | None = None, **changed: Any) -> Any:
    painter = TextToImageConfig(images, batch_size=2, captions=changed.pop("of", "all"))
    own = {"captions": RecaptionerConfig(captions), "images": painter, "out": str(out), "part_rows": 5}
    return PositivesConfig(changed.pop("data", SCENES), **own, **changed)


def test_positives_are_rows_for_pac_s(tmp_path: Path) -> None:
    table = make_positives(positives(tmp_path, images=f"{__name__}:Painter", splits=["train", "val"]))
    assert "| references | 190 |" in table
    assert "| positive_captions | 76 |" in table
    old = build_data(SCENES)
    for split in ("train", "val"):
        rows = build_data(DataConfig(format="jsonl", path=str(tmp_path / "positives.jsonl"))).split(split)
        assert [row["references"] for row in rows] == [row["references"] for row in old.split(split)]
        check_positives(rows, ["image", "text"], "random", split=split)
        for row in rows:
            text = f"A long caption of {row['image_id']}."
            assert row["positive_captions"] == [text, f"Once more: {text}"], "a blank caption is none"
            sizes = [load_image(image).width for image in row["positive_images"]]
            assert sizes == [len(caption) for caption in row["references"]], "image k is of reference k"


def test_images_that_are_there_are_not_made_again_and_captions_come_before_or_after(tmp_path, monkeypatch):
    painter, out = f"{__name__}:Painter", tmp_path / "out"
    make_positives(positives(tmp_path / "captions"))
    data = DataConfig(format="jsonl", path=str(tmp_path / "captions/positives.jsonl"))
    again = partial(positives, out, None, painter, data=data, of="first")
    monkeypatch.setattr(Painter, "made", 0)
    monkeypatch.setattr(Painter, "stop_at", 7)
    with pytest.raises(KeyboardInterrupt):
        make_positives(again())
    made = Painter.made - 2  # the two that it was stopped at
    monkeypatch.setattr(Painter, "made", 0)
    monkeypatch.setattr(Painter, "stop_at", 10**9)
    make_positives(again(worker="1/2"))
    make_positives(again())
    assert Painter.made + made == 32
    train = build_data(DataConfig(format="jsonl", path=str(out / "positives.jsonl"))).split("train")
    check_positives(train, ["image", "text"], "first")
    with pytest.raises(ConfigError, match="images was 'painter of first references', is 'painter of all"):
        make_positives(positives(out, None, painter, data=data))
    file = Path(str(data.path))
    whole = file.read_text()
    for old, new in (("red", "blue"), ("A long caption", "A short caption")):  # a reference, a positive caption
        file.write_text(whole.replace(old, new))
        with pytest.raises(ConfigError, match="captions_before was"):
            make_positives(again())


def test_positives_need_something_that_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changed, message in (
        ({"captions": None}, "neither captions.target nor images.target is set"),
        ({"captions": "captionner"}, "captions.target is 'captionner'"),
        ({"images": "scene"}, "images: text_to_image scene"),
        ({"worker": "2/2"}, "worker is '2/2'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_positives(positives(tmp_path / "out", **changed))
    monkeypatch.setattr(Painter, "__call__", lambda self, captions: [])
    with pytest.raises(DataError, match="painter made 0 images of 2 captions"):
        make_positives(positives(tmp_path / "out", None, f"{__name__}:Painter"))
