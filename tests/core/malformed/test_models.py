"""Damaged and foreign files of saved models: one error that names the folder, or the model as it was; nothing else."""

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
from rl_caption.captioners.config import NewModelConfig
from rl_caption.captioners.loading import load_captioner
from rl_caption.config.build import ConfigError, build_captioner
from rl_caption.reward_models.students import build_dual
from rl_caption.runtime.errors import EXPECTED
from rl_caption.training.checkpoint import seal
from tests.captioners_for_tests import REFERENCES, tiny_captioner, tiny_rows
from tests.hf_models_for_tests import save_model

pytestmark = pytest.mark.slow

Damage = Callable[[Path], None]
TINY_STUDENT = LCLIPConfig(
    embed_dim=8, image_size=16, patch_size=8, image_width=8, image_heads=2, image_blocks=1, vocab_size=16,
    context_length=8, text_width=8, text_heads=2, text_blocks=1, embedding_rank=4,
)  # fmt: skip
WEIGHTS = "model.safetensors"
FILES = {
    "scratch": ("config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS),
    "blip": (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "processor_config.json",
        WEIGHTS,
    ),
    "student": ("config.json", WEIGHTS),
}
KEYS = {
    "scratch": (
        "model_type",
        "vocab_size",
        "d_model",
        "num_heads",
        "decoder_layers",
        "image_size",
        "eos_token_id",
    ),
    "blip": (
        *(
            "model_type",
            "text_config",
            "vision_config",
            "text_config.hidden_size",
            "text_config.num_attention_heads",
        ),
        *("text_config.vocab_size", "vision_config.image_size", "text_config.sep_token_id"),
    ),
    "student": (
        "model_type",
        "embed_dim",
        "image_heads",
        "text_blocks",
        "patch_size",
        "context_length",
    ),
}
VALUES = (None, "x", [], -1, 10**9, 1.5)
OTHER = {"scratch": "blip", "blip": "scratch", "student": "blip"}
LAYERS = {
    "scratch": "decoder_layers",
    "blip": "text_config.num_hidden_layers",
    "student": "text_blocks",
}


def edited(file: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes())) and None


def flipped(seed: int, most: int | None = None) -> Callable[[bytes], bytes]:
    """Change one bit, of the first ``most`` bytes."""

    def flip(content: bytes) -> bytes:
        changed, draw = bytearray(content), random.Random(seed)
        changed[draw.randrange(most or len(changed))] ^= 1 << draw.randrange(8)
        return bytes(changed)

    return flip


def value(key: str, new: Any) -> Damage:
    """A value of ``config.json`` replaced; removed, where ``new`` is ``...``."""

    def change(content: bytes) -> bytes:
        place = whole = json.loads(content)
        *sections, last = key.split(".")
        for section in sections:
            place = place[section]
        del place[last]
        if new is not ...:
            place[last] = new
        return json.dumps(whole).encode()

    return edited("config.json", change)


def last_tensor(change: Callable[[Tensor], Tensor | None]) -> Damage:
    """The last tensor of the weights replaced, or removed, where ``change`` gives None."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        name = max(weights)
        weights[name] = change(weights[name])
        left = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(left, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def pickled(folder: Path) -> None:
    """The weights as a pickle that would run code."""
    (folder / WEIGHTS).unlink()
    torch.save({"a": Path("x")}, folder / "pytorch_model.bin")


def damages(kind: str) -> Iterator[tuple[str, Damage, bool]]:
    """What is done to a folder, by name, and whether the folder has a manifest."""
    few = kind == "blip"  # it takes longest to load
    for file in FILES[kind]:
        for share in (0.0, 0.5) if few else (0.0, 0.5, 0.99):
            cut = edited(file, lambda content, share=share: content[: int(share * len(content))])
            yield f"{file} cut to {share:.0%}", cut, False
        yield f"{file} with a flipped bit", edited(file, flipped(1)), True
        yield f"{file} removed", lambda folder, file=file: (folder / file).unlink(), False
        yield f"{file} of noise", edited(file, lambda _: random.Random(0).randbytes(3000)), False
        if file != "processor_config.json":  # the one of BLIP alone
            other = Path("..") / "whole" / OTHER[kind] / file
            yield (
                f"{file} of another model",
                lambda folder, f=file, o=other: shutil.copy(folder / o, folder / f),
                False,
            )
        if file.endswith(".json"):
            for content in (
                ("[]", "{}") if few else ("[]", "null", "{}", '{"model_type": 3}', "[" * 4000)
            ):
                yield (
                    f"{file} is {content[:20]}",
                    edited(file, lambda _, new=content: new.encode()),
                    False,
                )
    for seed in range(2 if few else 4):
        yield f"header of weights with bit {seed} flipped", edited(WEIGHTS, flipped(seed, 64)), few
    for key in KEYS[kind]:
        for new in (None, -1, 10**9) if few else VALUES:
            yield f"{key} is {new!r}", value(key, new), False
        yield f"{key} removed", value(key, ...), few
    yield "a million layers", value(LAYERS[kind], 10**6), False
    yield (
        "NaN",
        last_tensor(lambda tensor: tensor.index_fill(0, torch.tensor([0]), float("nan"))),
        False,
    )
    yield (
        "infinity",
        last_tensor(lambda tensor: tensor.index_fill(0, torch.tensor([0]), float("inf"))),
        False,
    )
    yield "integers", last_tensor(lambda tensor: tensor.int()), False
    yield "another shape", last_tensor(lambda tensor: torch.ones(3, 5)), False
    yield "one tensor less", last_tensor(lambda tensor: None), False
    yield "pickled weights", pickled, False


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
    return (
        logits,
        captioner.encode(["a red circle"], 9),
        captioner.decode(ids[0]),
        captioner.eos_token_id,
    )


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


def damaged(models: Path, kind: str, sealed: bool) -> Path:
    """A copy, to be damaged, of a whole model."""
    folder = models / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(models / "whole" / kind, folder)
    if sealed:
        seal(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "damage", "sealed"),
    [
        pytest.param(kind, damage, sealed, id=f"{kind}: {name}")
        for kind in FILES
        for name, damage, sealed in [*damages(kind), ("nothing", lambda folder: None, True)]
    ],
)
def test_a_damaged_model_is_refused_by_name_or_is_the_same(kind, damage, sealed, models, expected):
    folder = damaged(models, kind, sealed)
    damage(folder)
    found, message = expected[kind], str(folder)
    try:
        found = load(kind, folder)
    except EXPECTED as error:
        message = str(error)
    assert str(folder) in message
    for one, other in zip(found, expected[kind], strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("kind", FILES)
def test_what_is_missing_from_an_export_is_named(kind: str, models: Path) -> None:
    for file in FILES[kind]:
        folder = damaged(models, kind, sealed=True)
        (folder / file).unlink()
        with pytest.raises(EXPECTED, match=re.escape(file)):
            load(kind, folder)


def test_shapes_that_cannot_be_are_refused_before_they_are_made() -> None:
    for shape, part in (
        ({"decoder_layers": 10**6}, "decoder_layers is 1000000"),
        ({"d_model": 2**40}, f"d_model is {2**40}"),
        ({"d_model": 2**16, "ffn_dim": 2**20, "encoder_layers": 2}, "GiB"),
        ({"dropout": float("nan")}, "dropout.* nan"),
        ({"d_modle": 64}, "d_modle"),
        ({"vocab_size": 9}, "vocab_size"),
    ):
        with pytest.raises(ConfigError, match=rf"^model: .*{part}"):
            build_captioner(NewModelConfig(min_count=1, kwargs=shape), REFERENCES, cache_mb=0)
