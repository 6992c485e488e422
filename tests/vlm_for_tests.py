"""Images, a configuration and a reward for runs of TRL."""

import json
import math

from tests.clip_for_tests import noise_image
from tests.training_for_tests import changed

RECORDER = "tests.vlm_for_tests:Recorder"


def six_images(folder):
    """Write images and ``data.jsonl``, four to train on and two to test on; one row has
    its own prompt.
    """
    rows = []
    for number in range(6):
        noise_image(number).save(folder / f"{number}.png")
        split = "train" if number < 4 else "test"
        references = [f"a red circle {number}", "two small stars ."]
        rows.append(
            {
                "image": f"{number}.png",
                "image_id": number,
                "references": references,
                "split": split,
            }
        )
    rows[0]["prompt"] = "what do you see ?"
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def grpo_config(folder, run, **changes):
    """LoRA on the model ``qwen2_vl`` and the data in ``folder``; ``changes`` are dotted keys."""
    lora = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj"]}
    config = {
        "model": {
            "init": str(folder / "qwen2_vl"),
            "prompt": "describe this image",
            "lora": lora,
        },
        "data": {"format": "jsonl", "path": str(folder / "data.jsonl")},
        "reward": {
            "terms": {
                "cider": {"weight": 1.0},
                "words": {"weight": 0.1, "target": RECORDER},
            }
        },
        "trl": {
            "max_steps": 2,
            "num_generations": 2,
            "max_completion_length": 6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
            "beta": 0.0,
            "seed": 0,
            "bf16": False,
            "save_steps": 1,
            "logging_steps": 1,
        },
        "train": {"threads": 1},
        "run": {"dir": str(run)},
    }
    return changed(config, changes)


class Recorder:
    """Reward that scores captions by their number of words and records its calls; NaN
    where asked to break.
    """

    __name__ = "recorder"
    columns = frozenset({"image", "references"})
    bounds = (0.0, math.inf)
    signature = "recorder"
    calls = []

    def __init__(self, needs=None):
        self.columns = self.columns | ({needs} if needs else set())

    def __call__(self, prompts, completions, **columns):
        self.calls.append({"prompts": prompts, "completions": completions, **columns})
        return [float(len(own[-1]["content"].split())) for own in completions]
