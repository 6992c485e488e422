"""Images that a captioner's own processor refuses: found by size before anything is trained or
written.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from rl_caption.captioners.loading import load_captioner
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError, LazyImage, Row
from rl_caption.data.formats import build_data
from rl_caption.data.refused import PASSED, refused_rows, usable_rows
from tests.clip_for_tests import noise_image
from tests.hf_models_for_tests import save_model
from tests.training_for_tests import Ended, changed, run, run_arguments, run_two
from tests.vlm_for_tests import grpo_config, tiny_qwen2_vl

ALONE = SimpleNamespace(is_main_process=True, num_processes=1)
LONG = (4200, 20)


@dataclass(frozen=True)
class Blank:
    """A black image that is drawn when it is used."""

    width: int
    height: int

    def render(self) -> Image.Image:
        return Image.new("RGB", (self.width, self.height))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-VL, and photos in three splits: in each one that is 210 times as wide as high."""
    folder = tmp_path_factory.mktemp("refused")
    tiny_qwen2_vl(folder / "qwen2_vl")
    rows = []
    for number in range(12):
        split = ("train", "val", "test")[min(number // 4, 2)]
        image = Image.new("RGB", LONG) if number % 4 == 3 else noise_image(number)
        image.putpixel((0, 0), (number, 0, 0))
        image.save(folder / f"{number}.png")
        rows.append(
            {"image": f"{number}.png", "references": [f"a red circle {number}"], "split": split}
        )
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def configuration(program: str, folder: Path, run: Path, **changes: Any) -> dict[str, Any]:
    common = {
        "data": {"format": "jsonl", "path": str(folder / "data.jsonl")},
        "train": {
            "max_steps": 2,
            "batch_size": 2,
            "lr": 0.001,
            "threads": 1,
            "mixed_precision": "no",
        },
        "run": {"dir": str(run), "log_every": 1},
    }
    if program == "grpo_vlm":
        return grpo_config(folder, run, **changes)
    if program == "evaluate":
        config = {"model": str(folder / "qwen2_vl"), "data": common["data"], "out": str(run)}
        config |= {"metrics": ["cider"], "tokenizer": "python", "decode": {"max_new_tokens": 4}}
        return changed(config, changes)
    model = {
        "name": "huggingface",
        "init": str(folder / "qwen2_vl"),
        "prompt": "describe this image",
    }
    config = common | {"model": model}
    if program == "scst":
        config |= {
            "rollout": {"num_samples": 2, "max_new_tokens": 4},
            "reward": {"terms": {"cider": {}}},
        }
    else:
        config["train"]["max_target_tokens"] = 8
    return changed(config, changes)


def run_program(program: str, folder: Path, out: Path, on_bad: str) -> Ended:
    if program == "caption":
        words = ["caption", "--model", str(folder / "qwen2_vl"), "--on_bad", on_bad, str(folder)]
        return run_arguments(words, out.with_suffix(".log"))
    return run(configuration(program, folder, out, **{"data.on_bad": on_bad}), out, program)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["scst", "xe", "grpo_vlm", "evaluate", "caption"])
def test_programs_name_refused_images_before_work_or_leave_them_out(
    folder: Path, tmp_path: Path, program: str
) -> None:
    failed = run_program(program, folder, tmp_path / "fail", "fail")
    assert failed.code == 1
    assert "Traceback" not in failed.output
    names = {"evaluate": ["11.png"], "grpo_vlm": ["3.png", "11.png"], "caption": ["3.png", "7.png"]}
    for name in names.get(program, ["3.png", "7.png"]):
        assert name in failed.output
    assert "4200 x 20 pixels" in failed.output
    assert not (tmp_path / "fail" / "export").exists()
    skipped = run_program(program, folder, tmp_path / "skip", "skip")
    assert skipped.code == 0, skipped.output
    assert "4200 x 20 pixels" in skipped.output
    if program == "evaluate":
        assert json.loads((tmp_path / "skip" / "scores.json").read_text())["n"] == 3
    if program == "caption":
        assert sum(line.startswith(str(folder)) for line in skipped.output.splitlines()) == 9


@pytest.mark.slow
def test_two_processes_agree_on_what_is_left_out(folder: Path, tmp_path: Path) -> None:
    changes = {"train.num_processes": 2, "model.name": "huggingface"}
    for on_bad, code in (("fail", 1), ("skip", 0)):
        out = tmp_path / on_bad
        config = configuration("xe", folder, out, **changes | {"data.on_bad": on_bad})
        ended = run_two(config, out, "xe")
        assert [one.code for one in ended] == [code, code], ended
        assert "4200 x 20 pixels" in ended[0].output
    assert (tmp_path / "skip" / "export" / "last").is_dir()


@pytest.fixture(scope="module")
def captioner(folder: Path) -> Any:
    return load_captioner(str(folder / "qwen2_vl"))


def rows_of(images: Sequence[Any]) -> list[Row]:
    return [
        {"image_id": str(number), "image": image, "references": ["a dog"]}
        for number, image in enumerate(images)
    ]


def test_images_in_any_source_are_found_without_being_decoded(
    folder: Path, tmp_path: Path, captioner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    good, bad = ((folder / name).read_bytes() for name in ("0.png", "3.png"))
    table = {"image": [{"bytes": good}, {"bytes": bad}], "references": [["a"], ["b"]]}
    stored = datasets.Dataset.from_dict(table).cast_column("image", datasets.Image())
    stored.to_parquet(tmp_path / "train.parquet")
    sources = {
        "files": rows_of([folder / "0.png", str(folder / "3.png")]),
        "bytes": rows_of([LazyImage("a", good), LazyImage("b", bad)]),
        "in memory": rows_of([noise_image(0), Image.new("RGB", LONG)]),
        "drawn": rows_of([Blank(32, 32), Blank(*LONG)]),
        "frames": rows_of([[Blank(32, 32)], [Blank(32, 32), Blank(*LONG)]]),
        "parquet": build_data(DataConfig(format="hub", path=str(tmp_path / "train.parquet"))).split(
            "train"
        ),
    }
    room = captioner.cache_memory
    for name, rows in sources.items():
        (index,) = refused_rows(rows, captioner.try_row)
        assert index == 1, name
    assert captioner.cache_memory == room, "blank images are not kept"


def test_each_refused_row_is_named_and_unreadable_ones_too(
    folder: Path, tmp_path: Path, captioner: Any
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    paths = [folder / "0.png", folder / "3.png", tmp_path / "broken.png", folder / "7.png"]
    found = refused_rows(rows_of(paths), captioner.try_row)
    assert list(found) == [1, 2, 3]
    for index in found:
        assert paths[index].name in found[index]
    splits = {"train": rows_of(paths[:2]), "val": rows_of(paths)}
    kept = usable_rows(splits, captioner, "skip", ALONE)
    assert [row["image_id"] for row in kept["train"]] == ["0"]
    with pytest.raises(DataError, match=r"4 images that the captioner cannot read: train .*3\.png"):
        usable_rows(splits, captioner, "fail", ALONE)
    with pytest.raises(DataError, match="cannot read"):
        usable_rows({"train": rows_of(paths[1:])}, captioner, "skip", ALONE)


def test_prompts_that_leave_no_room_are_found(captioner: Any) -> None:
    rows = rows_of([Blank(32, 32)] * 3)
    rows[2]["prompt"] = "describe this image " * 300
    assert list(refused_rows(rows, captioner.try_row)) == [2]


@pytest.mark.parametrize("family", ["blip", "vit_gpt2"])
def test_other_families_take_long_images(family: str, tmp_path: Path) -> None:
    captioner = load_captioner(str(save_model(family, tmp_path / family)))
    assert not refused_rows(rows_of([Blank(*LONG), Blank(1, 1), Blank(32, 32)]), captioner.try_row)


def test_the_time_does_not_grow_with_the_number_of_sizes() -> None:
    tried = []

    def try_row(row: Row) -> None:
        image: Any = row["image"]
        tried.append(image)
        if image.width > 200 * image.height or image.height < 3:
            raise DataError(f"image {row['image_id']!r} is too long")

    sizes = [(100 + number % 997, 90 + number // 7) for number in range(20_000)]
    sizes += [(5000, 20), (300, 2), (30, 1)]
    started = time.monotonic()
    found = refused_rows(rows_of([Blank(*size) for size in sizes]), try_row)
    assert list(found) == [20_000, 20_001, 20_002]
    assert len(tried) < 5 * PASSED
    assert time.monotonic() - started < 20
