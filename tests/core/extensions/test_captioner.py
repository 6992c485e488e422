"""A captioner from outside: a class in a file of one's own, and its name in the
configuration (docs/captioners.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rewards.files import load_json
from rewards.trust import trust
from rl_caption.captioners.base import Captioner, CaptionerError
from rl_caption.captioners.config import Decoding, NewModelConfig
from rl_caption.captioners.loading import load_captioner
from rl_caption.captioners.tokens import caption_mask, forbid
from rl_caption.config.schema import XeConfig
from rl_caption.data.base import Row, load_image
from rl_caption.data.files import write_json
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import REFERENCES, sample_slowly, tiny_rows
from tests.training_for_tests import (
    DATA,
    checked_run,
    lines,
    run,
    scst_config,
    weights,
    xe_config,
)

NAME = "tests.core.extensions.test_captioner:GruCaptioner"
PAD, EOS = 0, 1


class Gru(nn.Module):
    """Mean colours of a 4 x 4 grid start a GRU over the words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.image, self.words = nn.Linear(48, width), nn.Embedding(words, width)
        self.gru, self.logits = (
            nn.GRU(width, width, batch_first=True),
            nn.Linear(width, words),
        )

    def forward(self, colours: Tensor, token_ids: Tensor) -> Tensor:
        """Logits [B, K, L, V] of ``token_ids`` [B, K, L], from ``colours`` [B, 48]."""
        flat = token_ids.flatten(0, 1)
        before = torch.cat([torch.full_like(flat[:, :1], EOS), flat[:, :-1]], dim=1)
        start = (
            self.image(colours).repeat_interleave(token_ids.shape[1], 0).unsqueeze(0)
        )
        states, _ = self.gru(self.words(before), start)
        return self.logits(states).unflatten(0, token_ids.shape[:2])


class GruCaptioner(Captioner):
    eos_token_id, pad_token_id, forbidden = EOS, PAD, (PAD,)

    def __init__(self, words: list[str], width: int) -> None:
        self.words, self.width, self.policy = words, width, Gru(len(words) + 2, width)

    @classmethod
    def from_scratch(
        cls,
        references: Sequence[list[str]],
        width: Annotated[int, Field(ge=1, le=1024)] = 8,
    ) -> GruCaptioner:
        texts = [text for own in references for text in own]
        return cls(sorted(set(" ".join(texts).split())), width)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> GruCaptioner:
        config = load_json(Path(path) / "config.json")
        captioner = cls(config["words"], config["width"])
        captioner.policy.load_state_dict(load_file(Path(path) / "model.safetensors"))
        return captioner

    def save_pretrained(self, policy: nn.Module, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        config = {"model_type": NAME, "words": self.words, "width": self.width}
        write_json(path / "config.json", config)
        save_file(policy.state_dict(), path / "model.safetensors")

    def preprocess(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        images = [
            np.asarray(load_image(row["image"]).resize((4, 4)), dtype=np.float32)
            for row in rows
        ]
        return {"colours": torch.from_numpy(np.stack(images)).flatten(1) / 255}

    def encode(
        self, texts: Sequence[str], max_tokens: int, row: Row | None = None
    ) -> list[list[int]]:
        known = {word: number + 2 for number, word in enumerate(self.words)}
        return [
            [*(known[word] for word in text.split() if word in known), EOS][:max_tokens]
            for text in texts
        ]

    def decode(self, token_ids: Tensor) -> list[str]:
        return [
            " ".join(self.words[number - 2] for number in ids if number > EOS)
            for ids in token_ids.tolist()
        ]

    def token_logits(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        token_ids: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        logits = forbid(model(**inputs, token_ids=token_ids), self.forbidden)
        return logits if mask is None else logits[mask]


def tiny(seed: int = 0) -> GruCaptioner:
    torch.manual_seed(seed)
    captioner = GruCaptioner.from_scratch(REFERENCES, width=16)
    with torch.no_grad():
        captioner.policy.logits.weight.mul_(4)
    captioner.policy.eval()
    return captioner


def test_the_programs_train_export_and_evaluate_it(tmp_path):
    start, folder = tmp_path / "xe", tmp_path / "scst"
    two, model = {"train.max_steps": 2}, {"target": NAME, "kwargs": {"width": 12}}
    checked_run(xe_config(start, model=model, **two), start)
    export, untrusted = start / "export/best", tmp_path / "untrusted"
    ended = run(scst_config(untrusted, export), untrusted, "scst")
    assert ended.code == 1
    assert NAME in ended.output, "its config.json alone runs nothing"
    scst = scst_config(folder, export, **two, **{"model.target": NAME})
    checked_run(scst, folder, "scst")
    logged = [line for line in lines(folder) if "reward/total" in line]
    assert [line["step"] for line in logged] == [1, 2]
    before, after = weights(export), weights(folder / "checkpoints/step-00000002")
    assert not any(torch.equal(before[name], after[name]) for name in before)
    out = tmp_path / "evaluation"
    config = {"model": str(folder / "export/best"), "trust": [NAME], "data": DATA}
    config |= {"split": "val", "metrics": ["cider"], "tokenizer": "python"}
    config |= {"decode": {"max_new_tokens": 8}, "out": str(out)}
    checked_run(config, out, "evaluate")
    best = load_json(folder / "result.json")["best_step"]
    validated = (folder / "eval" / f"step-{best:08d}" / "predictions.json").read_text()
    assert load_json(out / "predictions.json") == json.loads(validated)


@torch.no_grad()
def test_captions_without_a_cache_are_those_of_each_caption_alone():
    captioner = tiny()
    inputs, noise = (
        captioner.preprocess(tiny_rows(3)),
        sampling_noise(0, 0, ["a", "b", "c"], 4, 8),
    )
    decoding = Decoding(
        num_samples=4, with_greedy=True, max_new_tokens=8, temperature=1.3
    )
    tokens = captioner.generate(captioner.policy, inputs, decoding, noise)
    mask = caption_mask(tokens, EOS)
    assert not mask.all(), "the case must hold a caption that ends early"

    def next_logits(one, ids):
        return captioner.token_logits(
            captioner.policy, one, torch.tensor([[[*ids, PAD]]])
        )[0, 0, -1]

    expected, _ = sample_slowly(captioner, inputs, noise, 1.3, next_logits)
    assert torch.equal(tokens[:, :4], expected[..., : tokens.shape[-1]])
    greedy = captioner.token_logits(captioner.policy, inputs, tokens[:, 4:]).argmax(-1)
    assert torch.equal(greedy[mask[:, 4:]], tokens[:, 4:][mask[:, 4:]])


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (
            {"target": "tests.core.extensions.test_captioner:Gru"},
            "expected a class that inherits from",
        ),
        ({"target": NAME, "kwargs": {"widht": 3}}, "takes width: got an unexpected"),
        ({"target": NAME, "kwargs": {"width": 0}}, "model.kwargs.width is 0"),
    ],
)
def test_what_cannot_be_used_is_refused_before_any_work(model, part):
    with pytest.raises(ValueError) as refused:
        XeConfig(model=NewModelConfig(**model))
    assert part in str(refused.value)


def test_what_a_saved_one_cannot_be_is_named(tmp_path):
    captioner = tiny()
    captioner.save_pretrained(captioner.policy, tmp_path)
    trust([NAME])
    with pytest.raises(CaptionerError, match=re.escape(str(tmp_path))):
        load_captioner(tmp_path, prompt="a photo of")
