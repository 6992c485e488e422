"""ms-swift: two GRPO steps of a tiny vision-language model with ``ServedReward`` as a plugin."""

# /// script
# dependencies = [
#     "ms-swift==4.6.0", "msgspec", "qwen-vl-utils", "torch>=2.11,<2.14", "torchvision",
# ]
# [tool.engine]
# serve = true
# vlm = true
# ///

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rl_caption.integrations.swift import ServedReward
from tests.engines.report import FOLDER, cases, scored

PLUGIN = """
from swift.rewards import ORM, orms
from swift.template.templates.qwen import Qwen2VLTemplate
from tests.engines.ms_swift import ReportedReward

orms["rl_caption"] = type("RLCaption", (ReportedReward, ORM), {})
Qwen2VLTemplate.image_token_id = 5  # of the tiny vocabulary
"""
UNWRITTEN = [1, 3, 4, 5, 6]
"""Ids of tokens of images and of message starts, which are not to be sampled."""


class ReportedReward(ServedReward):
    """A ``ServedReward`` that reports every call."""

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[float]:
        scores = super().__call__(completions, **columns)
        scored(
            "`swift rlhf --rlhf_type grpo`, Qwen2-VL",
            completions,
            scores,
            references=columns["references"],
            image=[images[0]["path"] for images in columns["images"]],
            finished=[reason != "length" for reason in columns["finish_reason"]],
        )
        return scores


def main() -> None:
    """Train for two steps."""
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>describe this image"}],
            "images": [row["image"]],
            "references": row["references"],
        }
        for row in cases()
    ]
    (FOLDER / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (FOLDER / "plugin.py").write_text(PLUGIN)
    settings = FOLDER / "qwen2_vl/generation_config.json"
    generation = json.loads(settings.read_text()) | {
        "suppress_tokens": UNWRITTEN,
        "top_k": 0,
    }
    generation.pop("bad_words_ids", None)
    settings.write_text(json.dumps(generation))
    options = {
        "rlhf_type": "grpo",
        "model": FOLDER / "qwen2_vl",
        "model_type": "qwen2_vl",
        "template": "qwen2_vl",
        "dataset": FOLDER / "rows.jsonl",
        "external_plugins": FOLDER / "plugin.py",
        "reward_funcs": "rl_caption",
        "output_dir": FOLDER / "run",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "attn_impl": "eager",
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "beta": 0,
        "split_dataset_ratio": 0,
        "load_from_cache_file": "false",
        "dataloader_num_workers": 0,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "use_hf": "true",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    subprocess.run([sys.executable, "-m", "swift.cli.rlhf", *words], check=True)


if __name__ == "__main__":
    main()
