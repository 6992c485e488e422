"""verl: ``RewardLoopManager`` with Ray workers scores responses by ``ServedRewardManager``."""

# /// script
# dependencies = ["verl==0.9.1", "torch>=2.11,<2.14"]
# [tool.engine]
# serve = true
# ///

import os
from pathlib import Path

import hydra
import numpy as np
import ray
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopManager

from tests.engines.report import FOLDER, cases, scored

LENGTH = 16


def write_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of words, saved in the folder ``tokenizer``."""
    words = sorted({word for text in texts for word in text.split()})
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>"
    )
    tokenizer.save_pretrained(FOLDER / "tokenizer")
    return tokenizer


def main() -> None:
    """Score each case once finished and once cut off."""
    rows = cases()
    tokenizer = write_tokenizer([row["caption"] for row in rows])
    responses, mask, finished = [], [], []
    for row in rows:
        ids = tokenizer(row["caption"], add_special_tokens=False)["input_ids"]
        for ended in (True, False):
            length = len(ids) + ended
            responses.append((ids + [1] * ended + [0] * LENGTH)[:LENGTH])
            mask.append([1] * (1 + length) + [0] * (LENGTH - length))
            finished.append(ended)
    doubled = [row for row in rows for _ in range(2)]
    images = [f"photos/{Path(row['image']).name}" for row in doubled]
    references = [row["references"] for row in doubled]
    info = [
        {"index": index, "image": image, "references": np.array(texts, dtype=object)}
        for index, (image, texts) in enumerate(zip(images, references, strict=True))
    ]
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.ones(len(doubled), 1, dtype=torch.long),
            "responses": torch.tensor(responses),
            "attention_mask": torch.tensor(mask),
        },
        non_tensors={
            "data_source": np.array(["captions"] * len(doubled), dtype=object),
            "reward_model": np.array(
                [{"ground_truth": ""}] * len(doubled), dtype=object
            ),
            "extra_info": np.array(info, dtype=object),
        },
    )
    overrides = [
        f"actor_rollout_ref.model.path={FOLDER / 'tokenizer'}",
        "reward.num_workers=2",
        "reward.reward_manager.source=importlib",
        "reward.reward_manager.name=ServedRewardManager",
        "reward.reward_manager.module.path=pkg://rl_caption.integrations.verl",
        f"+reward.custom_reward_function.reward_kwargs.url={os.environ['RL_CAPTION_URL']}",
    ]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides)
    ray.init(num_cpus=2, include_dashboard=False)
    result = RewardLoopManager(config).compute_rm_score(data)
    ray.shutdown()
    scores = result.batch["rm_scores"].sum(dim=1).tolist()
    captions = [row["caption"] for row in doubled]
    columns = {"references": references, "image": [row["image"] for row in doubled]}
    scored(
        "`RewardLoopManager`, 2 Ray workers",
        captions,
        scores,
        **columns,
        finished=finished,
    )


if __name__ == "__main__":
    main()
