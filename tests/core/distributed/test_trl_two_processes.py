"""``grpo_vlm`` in two processes: one run, one model, and each decodes its share of the captions."""

import json
from pathlib import Path

import pytest

from rl_caption.data.base import Row
from tests.training_for_tests import lines, run_two
from tests.vlm_for_tests import grpo_config, six_images, tiny_qwen2_vl, vlm_captions

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    tiny_qwen2_vl(tmp_path / "qwen2_vl")
    six_images(tmp_path)
    folder = tmp_path / "two"
    main, other = run_two(grpo_config(tmp_path, folder, **{"train.num_processes": 2}), folder, "grpo_vlm")
    assert main.code == other.code == 0, f"{main.output}\n{other.output}"
    assert "step 2/2  cider " in main.output
    assert "step " not in other.output
    assert [line["step"] for line in lines(folder)] == [1, 2]
    assert (folder / "checkpoints/checkpoint-2/rng_state_1.pth").is_file()

    rows: list[Row] = [{"image_id": str(i), "image": str(tmp_path / f"{i}.png"), "references": []} for i in (4, 5)]
    captions = vlm_captions(folder / "export/last", rows)
    predictions = json.loads((folder / "eval/test/predictions.json").read_text())
    assert {str(row["image_id"]): row["caption"] for row in predictions} == captions, "both have the weights"
