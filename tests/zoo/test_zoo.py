"""Tiny models of every family with a builder are loaded and exact, or refused."""

import pytest
import torch

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.loading import load_captioner
from rl_caption.captioners.policy import collate
from rl_caption.captioners.self_check import TOLERANCE
from tests.zoo.builders import ZOO, make
from tests.zoo.families import photo_rows

PLAIN = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "internvl_mamba")
"""Families with a state in layers that captions of an image cannot share."""
BY_ROWS = ("molmo2", "perception_lm")
"""Families whose inputs hold indices into their row, or whose images cannot be padded."""
REFUSED = {
    "got_ocr2": "Nested images",  # its processor takes no list of images
    "llama4": "generate",  # its processor makes pixels of another type than the weights
}
SIZES = {"step3p7": ((32, 32), (200, 100), (90, 190))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_a_model_is_exact_or_refused(name, tmp_path):
    folder = make(name, tmp_path / name)
    if name in REFUSED:
        with pytest.raises(CaptionerError, match=REFUSED[name]):
            load_captioner(folder, prompt="a photo of")
        return
    captioner = load_captioner(folder, prompt="a photo of")
    policy = captioner.policy.eval()
    expected = "none" if name in PLAIN else "rows" if name in BY_ROWS else "batch"
    assert policy.mode.prefix == expected
    rows = photo_rows()
    for row, size in zip(
        rows, SIZES.get(name.removesuffix("_crops_first"), ()), strict=False
    ):
        row["image"] = row["image"].resize(size)
    barred = {*captioner.forbidden, captioner.eos_token_id}
    free = [i for i in range(policy.conventions.vocab_size) if i not in barred]
    ids = torch.tensor([[free[1:8:3], free[2:5]]] * 3)
    inputs = captioner.preprocess(rows)
    scores = policy(**inputs, token_ids=ids).log_softmax(-1)
    for number, row in enumerate(rows):
        alone = collate([captioner.prepare(row)], captioner.pad_token_id)
        own = plain_logits(captioner, alone, ids[number])
        gap = (scores[number] - own.log_softmax(-1)).abs().max()
        assert gap < TOLERANCE, f"row {number}: {gap}"
    scores.gather(-1, ids.unsqueeze(-1)).sum().backward()
    missing = {
        n for n, p in policy.named_parameters() if p.requires_grad and p.grad is None
    }
    assert not {n for n in missing if ".experts." not in n}
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters())


@torch.no_grad()
def plain_logits(captioner, alone, captions):
    """Logits [K, L, V] of the model's own pass over prompt and caption, without a cache."""
    row = captioner.policy.arguments(alone)
    shape, logits = row["input_ids"].shape, []
    ones = {"attention_mask"}
    if captioner.family.name == "paligemma":  # whose captions do not see ahead
        ones.add("token_type_ids")
    for ids in captions:
        whole = dict(row, input_ids=torch.cat([row["input_ids"], ids[None]], 1))
        for key, value in row.items():
            if key != "input_ids" and value.shape == shape:
                kind = 1 if key in ones else 0
                whole[key] = torch.nn.functional.pad(value, (0, len(ids)), value=kind)
        output = captioner.policy.model(**whole, use_cache=False).logits
        logits.append(output[0, shape[1] - 1 : -1])
    return torch.stack(logits)
