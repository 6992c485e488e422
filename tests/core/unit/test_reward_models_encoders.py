"""open_clip models that are trained: built, loaded, stretched, tuned in parts, and exported as
rewards.
"""

import copy
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from accelerate import Accelerator
from open_clip import SimpleTokenizer
from torch import Tensor, nn

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.checkpoints import stretch_positions
from rl_caption.config.reward_models import PartConfig
from rl_caption.reward_models.batch import PairBatch
from rl_caption.reward_models.clip_models import ClipModelConfig, pretrained_dual
from rl_caption.reward_models.contrastive import contrastive
from rl_caption.reward_models.encoders import (
    TrainedEncoder,
    merged_state,
    pretrained_clip,
    random_clip,
    save_clip,
    train_only,
    trained_clip,
)
from rl_caption.reward_models.task import EmbeddingTask
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import noise_image
from tests.encoders_for_tests import save_text_encoder
from tests.reward_models_for_tests import CLIP, config_of

OWN = "tests.encoders_for_tests:TinyImageEncoder"

# An archive tells its shapes by its weights, with heads of 64.
WIDE: Any = CLIP | {
    "vision_cfg": CLIP["vision_cfg"] | {"width": 64, "head_width": 64},
    "text_cfg": CLIP["text_cfg"] | {"width": 64, "heads": 1},
}


def rows(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A model with random weights, its shape, and the folder where it is saved."""
    torch.manual_seed(0)
    model, shape = random_clip(None, CLIP | {"quick_gelu": True})
    folder = tmp_path_factory.mktemp("clip")
    save_clip(model, shape, folder)
    return model.eval(), shape, folder


@torch.no_grad()
def test_a_contrastive_model_comes_back_as_a_reward(
    clip,
):
    model, shape, folder = clip
    backbone = load_frozen_encoder(str(folder))
    picture, ids = noise_image(2), torch.tensor([[49406, 320, 1929, 49407]])
    mine = trained_clip(model)(
        {"image": backbone.preprocessing(picture)[None], "text": ids}
    )
    assert torch.allclose(
        backbone.encode_images([picture], normalize=False), mine["image"], atol=1e-5
    )
    assert torch.allclose(
        backbone.encode_texts(["a dog"], normalize=False), mine["text"], atol=1e-5
    )
    back, shape_again, preprocessing = pretrained_clip(None, str(folder))
    assert (shape_again, preprocessing) == (shape, backbone.preprocessing)
    assert all(
        torch.equal(value, model.state_dict()[name])
        for name, value in back.state_dict().items()
    )
    assert all(value.requires_grad for value in back.parameters())


def as_archive(clip: Any, path: Path) -> str:
    """Save the weights as OpenAI released theirs: a TorchScript archive, whose activation its
    loader knows.
    """
    holder = nn.Module()
    for name, value in clip.state_dict().items():
        *owners, last = name.split(".")
        inner = holder
        for owner in owners:
            if not hasattr(inner, owner):
                inner.add_module(owner, nn.Module())
            inner = inner.get_submodule(owner)
        inner.register_buffer(last, value)
    for name in ("input_resolution", "context_length", "vocab_size"):
        holder.register_buffer(name, torch.tensor(0))
    torch.jit.script(holder).save(str(path))
    return str(path)


def known_to_open_clip(folder: Path, name: str, shape: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(shape))
    open_clip.add_model_config(folder / f"{name}.json")
    return name


@pytest.mark.parametrize(
    "source", ["archive", "plain file", "plain file of a quickgelu architecture"]
)
def test_a_fine_tuned_model_keeps_its_activation(tmp_path, source):
    torch.manual_seed(0)
    quick = source.endswith("quickgelu architecture")
    name = known_to_open_clip(
        tmp_path / "names",
        f"test-{source.replace(' ', '-')}",
        WIDE | {"quick_gelu": quick},
    )
    clip, _ = random_clip(None, WIDE | {"quick_gelu": True})
    file = tmp_path / "weights.pt"
    if source == "archive":
        as_archive(clip, file)
    else:
        torch.save(clip.state_dict(), file)
    model, shape_found, preprocessing = pretrained_clip(name, str(file))
    save_clip(model, shape_found, tmp_path / "export")
    picture, before = noise_image(2), load_frozen_encoder(name, str(file))
    after = load_frozen_encoder(str(tmp_path / "export"))
    assert after.preprocessing == preprocessing
    assert torch.allclose(
        after.encode_images([picture]), before.encode_images([picture]), atol=1e-6
    )
    assert torch.allclose(
        after.encode_texts(["a dog"]), before.encode_texts(["a dog"]), atol=1e-6
    )
    assert shape_found["quick_gelu"] is (source != "plain file")


def test_an_archive_of_another_architecture_is_refused(tmp_path):
    name = known_to_open_clip(
        tmp_path / "names",
        "test-two-layers",
        WIDE | {"text_cfg": WIDE["text_cfg"] | {"layers": 2}},
    )
    path = as_archive(random_clip(None, WIDE)[0], tmp_path / "weights.pt")
    with pytest.raises(
        ConfigError, match=r"model\.init.*with model\.name 'test-two-layers'"
    ):
        pretrained_clip(name, path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: random_clip("ViT-B-33", {}), "model.name is 'ViT-B-33'"),
        (lambda f: random_clip("ViT-B-16-SigLIP", {}), "timm_model_name"),
        (lambda f: random_clip("coca_ViT-B-32", {}), "multimodal_cfg"),
        (lambda f: pretrained_clip(None, str(f)), r"open_clip_config.json"),
    ],
)
def test_a_model_that_cannot_be_built_or_tuned_is_named(tmp_path, make, message):
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_a_stretched_model_is_exported_and_loads_again(clip, tmp_path):
    short, _, folder = clip
    long, long_shape, _ = pretrained_clip(None, str(folder), 104, 4)
    assert long_shape["text_cfg"]["context_length"] == 104
    save_clip(long, long_shape, tmp_path / "long")
    backbone: Any = load_frozen_encoder(str(tmp_path / "long"))
    assert backbone.context_length == 104
    assert torch.equal(
        backbone.model.positional_embedding,
        stretch_positions(short.positional_embedding, 4, 5),
    )
    again, again_shape, _ = pretrained_clip(None, str(tmp_path / "long"))
    assert (again.context_length, again_shape) == (104, long_shape)
    with pytest.raises(
        ConfigError,
        match=r"model\.context_length, .*: context_length = 100: 24 positions",
    ):
        pretrained_clip(None, str(folder), 100, 4)


def test_frozen_positions_stay_as_they_are():
    torch.manual_seed(3)
    network = trained_clip(random_clip(None, CLIP)[0], frozen_positions=4)
    table: Any = network.model.positional_embedding
    before = table.detach().clone()
    decays = config_of(train={"freeze_positions": 4}).decays
    assert not decays("model.positional_embedding", table)
    assert config_of().decays("model.positional_embedding", table)
    optimizer = torch.optim.AdamW([{"params": [table], "weight_decay": 0.0}], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 49000, (4, 9), generator=generator)
    ids[:, 8] = 49407
    rows: Any = [{"image_id": str(index)} for index in range(4)]
    batch = PairBatch(
        rows,
        {"image": torch.randn(4, 3, 32, 32, generator=generator), "text": ids},
        ["a"] * 4,
    )
    next(
        EmbeddingTask(Accelerator(cpu=True), network, contrastive).training_step(
            [batch], 0
        )
    )
    optimizer.step()
    assert torch.equal(table[:4], before[:4])
    assert (table[4:9] != before[4:9]).any(dim=1).all(), (
        "all others that a text reaches"
    )


def test_batch_norm_of_frozen_blocks_keeps_its_statistics(tmp_path):
    model = ClipModelConfig(
        kwargs={"embed_dim": 8},
        image=PartConfig(encoder=OWN, train_blocks=1),
        text=PartConfig(encoder=save_text_encoder(tmp_path)),
    )
    dual = pretrained_dual(model)
    encode = {"image": dual.encode_image, "text": dual.encode_text}
    network = TrainedEncoder(dual, encode, 100.0).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network({"image": torch.randn(4, 3, 32, 32)})
    moved = {
        name
        for name, value in network.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert moved
    assert all(name.startswith("model.image_encoder.stages.2.1.") for name in moved), (
        "the block that is open"
    )


def test_low_rank_updates_start_at_nothing_and_are_exported_merged(clip, tmp_path):
    plain, shape, _ = clip
    tuned = copy.deepcopy(plain)
    train_only(tuned, "lora", rank=2, alpha=1.0)
    images, ids = (
        rows(3, 3 * 32 * 32, 0).view(3, 3, 32, 32),
        SimpleTokenizer(context_length=24)(["a", "b c", "d"]),
    )
    assert torch.equal(tuned.encode_image(images), plain.encode_image(images))
    trained = {
        name: value for name, value in tuned.named_parameters() if value.requires_grad
    }
    with torch.no_grad():
        for index, (name, value) in enumerate(trained.items()):
            if name.endswith("lora_b"):
                value.copy_(rows(*value.shape, index) / 30)
    state = merged_state(tuned)
    key = "transformer.resblocks.0.mlp.c_fc"
    a, b = (trained[f"{key}.parametrizations.weight.0.lora_{part}"] for part in "ab")
    expected = plain.get_parameter(f"{key}.weight") + 0.5 * b @ a
    assert torch.allclose(state[f"{key}.weight"], expected, atol=1e-7)
    assert state.keys() == plain.state_dict().keys()
    changed = {
        name
        for name, value in plain.state_dict().items()
        if not torch.equal(state[name], value)
    }
    blocks = (
        "attn.in_proj_weight",
        "attn.out_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    )
    towers = ("transformer.resblocks.0", "visual.transformer.resblocks.0")
    assert changed == {f"{tower}.{name}" for tower in towers for name in blocks} | {
        "visual.conv1.weight"
    }
    # The kernel of the patches as the released files have it: A [rank k, 3 k] and B [k D, rank k]
    # (docs/papers.md).
    shapes = [
        trained[f"visual.conv1.parametrizations.weight.0.lora_{part}"].shape
        for part in "ab"
    ]
    assert shapes == [(2 * 16, 3 * 16), (16 * 32, 2 * 16)]
    save_clip(tuned, shape, tmp_path)
    again: Any = load_frozen_encoder(str(tmp_path)).model
    for graph in (True, False):  # without one, attention takes another way
        with torch.set_grad_enabled(graph):
            assert torch.allclose(
                again.encode_image(images), tuned.encode_image(images), atol=1e-5
            )
            assert torch.allclose(
                again.encode_text(ids), tuned.encode_text(ids), atol=1e-5
            )
    assert not torch.allclose(
        again.encode_image(images), plain.encode_image(images), atol=1e-2
    )
