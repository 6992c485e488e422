"""``grpo_vlm`` in two processes: one run, one model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl_caption.captioners.loading import load_captioner
from tests.training_for_tests import ENGINES, lines, run_together, run_two
from tests.vlm_for_tests import grpo_config, six_images
from tests.zoo.vision_language import tiny_qwen2_vl

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_two_processes_train_one_model(tmp_path):
    tiny_qwen2_vl(tmp_path / "qwen2_vl")
    six_images(tmp_path)
    folder = tmp_path / "two"
    main, other = run_two(
        grpo_config(tmp_path, folder, **{"train.num_processes": 2}), folder, "grpo_vlm"
    )
    assert main.code == other.code == 0, f"{main.output}\n{other.output}"
    assert "step 2/2 " in main.output
    assert "step " not in other.output
    assert [line["step"] for line in lines(folder)] == [1, 2]
    assert (folder / "checkpoints/checkpoint-2/rng_state_1.pth").is_file()
    exported(folder)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The exported weights, which a captioner reads."""
    load_captioner(folder / "export/last")
    return load_file(folder / "export/last/model.safetensors")


@pytest.mark.parametrize(
    "lora", [None, {"r": 4, "target_modules": ["q_proj", "gate_proj"]}]
)
def test_zero3_exports_the_weights_of_plain_processes_resumed_or_not(tmp_path, lora):
    tiny_qwen2_vl(tmp_path / "qwen2_vl")
    six_images(tmp_path)
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
    }  # spread the small ones too
    settings = dict.fromkeys(
        (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        ),
        "auto",
    )
    (tmp_path / "zero3.json").write_text(
        json.dumps({"zero_optimization": zero, **settings})
    )
    zero3 = ENGINES["zero3"] | {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "zero3.json")
    }
    options = {"model.lora": lora, "trl.learning_rate": 0.001}

    def run(name: str, engine: dict[str, str]) -> dict[str, torch.Tensor]:
        config = grpo_config(tmp_path, tmp_path / name, **options)
        for process in run_together(
            2, config, tmp_path / name, "grpo_vlm", engine=engine
        ):
            assert process.code == 0, process.output
        return exported(tmp_path / name)

    start, plain, sharded = (
        load_file(tmp_path / "qwen2_vl/model.safetensors"),
        run("plain", {}),
        run("zero3", zero3),
    )
    assert max((plain[name] - start[name]).abs().max() for name in start) > 1e-4, (
        "two steps of 0.001"
    )
    torch.testing.assert_close(sharded, plain, rtol=0, atol=5e-6)
    folder = tmp_path / "zero3"
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "export")
    torch.testing.assert_close(
        run("zero3", zero3), sharded, rtol=0, atol=0
    )  # of the last checkpoint
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoints/checkpoint-2")
    torch.testing.assert_close(run("zero3", zero3), sharded, rtol=0, atol=5e-6)
    assert [line["step"] for line in lines(folder)] == [1, 2]
