"""Damaged and foreign files of saved models: one error that names the folder, or the model as it was; nothing else."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rewards.clip.student import LCLIP, LCLIPConfig
from rl_caption.captioners.config import ModelConfig
from rl_caption.captioners.loading import load_captioner
from rl_caption.config.build import ConfigError, build_captioner
from rl_caption.errors import expected_errors
from rl_caption.reward_models.distillation import build_dual
from rl_caption.training.checkpoint import seal
from tests.captioners_for_tests import REFERENCES, tiny_captioner, tiny_rows
from tests.hf_models_for_tests import save_model

Damage = Callable[[Path], None]
TINY_STUDENT = LCLIPConfig(
    embed_dim=8, image_size=16, patch_size=8, image_width=8, image_heads=2, image_blocks=1, vocab_size=16,
    context_length=8, text_width=8, text_heads=2, text_blocks=1, embedding_rank=4,
)  # fmt: skip
WEIGHTS = "model.safetensors"
FILES = {
    "scratch": ("config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS),
    "blip": ("config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json", WEIGHTS),
    "student": ("config.json", WEIGHTS),
}
KEYS = {
    "scratch": ("model_type", "vocab_size", "d_model", "num_heads", "decoder_layers", "image_size", "eos_token_id"),
    "blip": ("model_type", "text_config", "vision_config"),
    "student": ("model_type", "embed_dim", "image_heads", "text_blocks", "patch_size", "context_length"),
}
"""Keys of ``config.json`` on which the model depends."""
SECTIONS = ("text_config.hidden_size", "text_config.num_attention_heads", "text_config.vocab_size")
SECTIONS += ("vision_config.image_size", "text_config.sep_token_id")
VALUES = (None, "x", [], {}, True, -1, 10**9, 1.5)
OTHER = {"scratch": "blip", "blip": "scratch", "student": "blip"}
LAYERS = {"scratch": "decoder_layers", "blip": "text_config.num_hidden_layers", "student": "text_blocks"}


def edited(file: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes())) and None


def truncated(file: str, share: float) -> Damage:
    return edited(file, lambda content: content[: int(share * len(content))])


def flipped(file: str, seed: int, header: bool) -> Damage:
    """One bit; of the first 64 bytes, with ``header``."""

    def flip(content: bytes) -> bytes:
        changed, draw = bytearray(content), random.Random(f"{file}{seed}")
        changed[draw.randrange(64 if header else len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)

    return edited(file, flip)


def written(file: str, content: bytes) -> Damage:
    return edited(file, lambda _: content)


def removed(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def value(key: str, new: Any, file: str = "config.json") -> Damage:
    """A value of a JSON file replaced; removed, where ``new`` is ``...``."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        *sections, last = key.split(".")
        place = content
        for section in sections:
            place = place[section]
        del place[last]
        if new is not ...:
            place[last] = new
        (folder / file).write_text(json.dumps(content))

    return damage


def last_tensor(change: Callable[[Tensor], Tensor | None]) -> Damage:
    """The last tensor of the weights replaced, or removed, where ``change`` gives None."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        name = max(weights)
        new = change(weights.pop(name))
        save_file(weights if new is None else {**weights, name: new}, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def pickled(folder: Path) -> None:
    """The weights as a pickle that would run code."""
    (folder / WEIGHTS).unlink()
    torch.save({"a": Path("x")}, folder / "pytorch_model.bin")


def foreign(file: str, kind: str) -> Damage:
    """The file of that name of another kind of model."""

    def damage(folder: Path) -> None:
        shutil.copy(folder.parent / "whole" / OTHER[kind] / file, folder / file)

    return damage


def damages(kind: str) -> Iterator[tuple[str, Damage, bool]]:
    """What is done to a folder, by name, and whether the folder has a manifest."""
    few = kind == "blip"  # it takes longest to load
    for file in FILES[kind]:
        for share in (0.0, 0.5) if few else (0.0, 0.02, 0.5, 0.99):
            yield f"{file} cut to {share:.0%}", truncated(file, share), False
        for seed in range(1 if few else 3):
            yield f"{file} with bit {seed} flipped", flipped(file, seed, header=False), True
        yield f"{file} removed", removed(file), False
        yield f"{file} of noise", written(file, random.Random(file).randbytes(3000)), False
        if file != "processor_config.json":  # the one of BLIP alone
            yield f"{file} of another model", foreign(file, kind), False
    for seed in range(2 if few else 6):
        yield f"header of weights with bit {seed} flipped", flipped(WEIGHTS, seed, header=True), few
    for file in (file for file in FILES[kind] if file.endswith(".json")):
        for content in ("[]", "{}") if few else ("[]", "null", "3", '"x"', "{}", '{"model_type": 3}', "[" * 4000):
            yield f"{file} is {content[:20]}", written(file, content.encode()), False
    for key in (*KEYS[kind], *(SECTIONS if kind == "blip" else ())):
        for new in (None, -1, 10**9) if few else VALUES:
            yield f"{key} is {new!r}", value(key, new), False
        yield f"{key} removed", value(key, ...), few
    yield "a million layers", value(LAYERS[kind], 10**6), False
    for name, damage in {
        "NaN": last_tensor(lambda tensor: tensor.index_fill(0, torch.tensor([0]), float("nan"))),
        "infinity": last_tensor(lambda tensor: tensor.index_fill(0, torch.tensor([0]), float("inf"))),
        "integers": last_tensor(lambda tensor: tensor.int()),
        "truth values": last_tensor(lambda tensor: tensor > 0),
        "another shape": last_tensor(lambda tensor: torch.ones(3, 5)),
        "one tensor less": last_tensor(lambda tensor: None),
        "pickled weights": pickled,
    }.items():
        yield name, damage, False


CASES = [(kind, *case) for kind in FILES for case in damages(kind)]


def load(kind: str, folder: Path) -> tuple[Any, ...]:
    """The model's outputs for fixed inputs, and its words."""
    if kind == "student":
        student = build_dual(str(folder), {}, {}, TINY_STUDENT.embed_dim).eval()
        ids = torch.tensor([[1, 4, 15, 0, 0]])
        return student.encode_image(torch.ones(1, 3, 16, 16)), student.encode_text(ids)
    captioner = load_captioner(folder)
    captioner.policy.eval()
    ids = torch.tensor([[[5, 6, 7]]]).repeat(2, 1, 1)
    logits = captioner.token_logits(captioner.policy, captioner.preprocess(tiny_rows(2)), ids)
    return logits, captioner.encode(["a red circle"], 9), captioner.decode(ids[0]), captioner.eos_token_id


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole model of each kind, without manifests, as others make them."""
    folder = tmp_path_factory.mktemp("models")
    scratch = tiny_captioner()
    scratch.save_pretrained(scratch.policy, folder / "whole" / "scratch")
    save_model("blip", folder / "whole" / "blip")
    torch.manual_seed(0)
    LCLIP(TINY_STUDENT).save_pretrained(folder / "whole" / "student")
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, tuple[Any, ...]]:
    with torch.no_grad():
        return {kind: load(kind, models / "whole" / kind) for kind in FILES}


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "damage", "sealed"),
    [(kind, damage, sealed) for kind, _, damage, sealed in CASES],
    ids=[f"{kind}: {name}" for kind, name, *_ in CASES],
)
def test_a_damaged_model_is_refused_by_name_or_is_the_same(
    kind: str, damage: Damage, sealed: bool, models: Path, expected: dict[str, tuple[Any, ...]]
) -> None:
    folder = models / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(models / "whole" / kind, folder)
    if sealed:
        seal(folder)
    damage(folder)
    found, message = expected[kind], str(folder)
    try:
        found = load(kind, folder)
    except expected_errors() as error:
        message = str(error)
    assert str(folder) in message
    for one, other in zip(found, expected[kind], strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize(("kind", "file"), [(kind, file) for kind, files in FILES.items() for file in (*files, None)])
def test_what_is_missing_from_an_export_is_named(
    kind: str, file: str | None, models: Path, expected: dict[str, tuple[Any, ...]]
) -> None:
    folder = models / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(models / "whole" / kind, folder)
    seal(folder)
    if file is None:
        with torch.no_grad():
            assert torch.equal(load(kind, folder)[0], expected[kind][0])
        return
    (folder / file).unlink()
    with pytest.raises(expected_errors(), match=re.escape(file)):
        load(kind, folder)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ({"decoder_layers": 10**6}, "decoder_layers is 1000000"),
        ({"d_model": 2**40}, f"d_model is {2**40}"),
        ({"d_model": 2**16, "ffn_dim": 2**20, "encoder_layers": 200}, "GiB of memory"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"num_heads": "eight"}, "num_heads is 'eight'"),
        ({"d_modle": 64}, "d_modle"),
        ({"vocab_size": 9}, "vocab_size"),
    ],
)
def test_shapes_that_cannot_be_are_refused_before_they_are_made(shape: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=r"^model: ") as raised:
        build_captioner(ModelConfig(min_count=1, kwargs=shape), REFERENCES, cache_mb=0)
    assert part in str(raised.value)
