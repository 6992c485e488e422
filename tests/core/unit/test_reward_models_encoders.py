"""open_clip models that are trained: built, loaded, stretched, tuned in parts, and
exported as rewards.
"""

import copy
import json

import open_clip
import pytest
import torch
from open_clip import SimpleTokenizer
from torch import nn

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.checkpoints import stretch_positions
from rl_caption.config.reward_models import PartConfig
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
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import noise_image
from tests.encoders_for_tests import save_text_encoder
from tests.reward_models_for_tests import CLIP, config_of

OWN = "tests.encoders_for_tests:TinyImageEncoder"

# An archive tells its shapes by its weights, with heads of 64.
WIDE = CLIP | {
    "vision_cfg": CLIP["vision_cfg"]
    | {
        "width": 64,
        "head_width": 64,
    },
    "text_cfg": CLIP["text_cfg"] | {"width": 64, "heads": 1},
}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A model with random weights, its shape, and the folder where it is saved."""
    torch.manual_seed(0)
    model, shape = random_clip(None, CLIP | {"quick_gelu": True})
    folder = tmp_path_factory.mktemp("clip")
    save_clip(model, shape, folder)
    return model.eval(), shape, folder


def as_archive(clip, path):
    """Save the weights as OpenAI released theirs: a TorchScript archive, whose
    activation its loader knows.
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


def known_to_open_clip(folder, name, shape):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(shape))
    open_clip.add_model_config(folder / f"{name}.json")
    return name


@pytest.mark.parametrize(
    ("source", "quick"), [("archive", False), ("file", False), ("file", True)]
)
def test_a_fine_tuned_model_keeps_its_activation(tmp_path, source, quick):
    torch.manual_seed(0)
    name = f"test-{source}-{quick}"
    known_to_open_clip(tmp_path, name, WIDE | {"quick_gelu": quick})
    clip, _ = random_clip(None, WIDE | {"quick_gelu": True})
    file = str(tmp_path / "weights.pt")
    if source == "archive":
        as_archive(clip, file)
    else:
        torch.save(clip.state_dict(), file)
    model, shape = pretrained_clip(name, file)
    save_clip(model, shape, tmp_path / "export")
    before = load_frozen_encoder(name, file)
    after = load_frozen_encoder(str(tmp_path / "export"))
    assert after.preprocessing == before.preprocessing
    for encode, given in (("encode_images", noise_image(2)), ("encode_texts", "a dog")):
        found, expected = (getattr(each, encode)([given]) for each in (after, before))
        assert torch.allclose(found, expected, atol=1e-6)
    assert shape["quick_gelu"] is (quick or source == "archive")


def test_an_archive_of_another_architecture_is_refused(tmp_path):
    deeper = WIDE | {"text_cfg": WIDE["text_cfg"] | {"layers": 2}}
    known_to_open_clip(tmp_path, "test-two-layers", deeper)
    path = as_archive(random_clip(None, WIDE)[0], tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=r"model\.init.*'test-two-layers'"):
        pretrained_clip("test-two-layers", path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: random_clip("ViT-B-33", {}), "model.name is 'ViT-B-33'"),
        (lambda f: pretrained_clip(None, str(f)), r"open_clip_config.json"),
    ],
)
def test_a_model_that_cannot_be_built_or_tuned_is_named(tmp_path, make, message):
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_a_stretched_model_is_exported_and_loads_again(clip, tmp_path):
    short, _, folder = clip
    long, shape = pretrained_clip(None, str(folder), 104, 4)
    save_clip(long, shape, tmp_path)
    again, shape_again = pretrained_clip(None, str(tmp_path))
    assert (again.context_length, shape_again) == (104, shape)
    expected = stretch_positions(short.positional_embedding, 4, 5)
    assert torch.equal(again.positional_embedding, expected)
    with pytest.raises(ConfigError, match=r"model\.context_length"):
        pretrained_clip(None, str(folder), 100, 4)


def test_frozen_positions_stay_as_they_are():
    torch.manual_seed(3)
    network = trained_clip(random_clip(None, CLIP)[0], frozen_positions=4)
    table = network.model.positional_embedding
    name = "model.positional_embedding"
    assert not config_of(train={"freeze_positions": 4}).decays(name, table)
    assert config_of().decays(name, table)
    ids = torch.randint(1, 49000, (4, 9))
    ids[:, 8] = 49407
    inputs = {"image": torch.randn(4, 3, 32, 32), "text": ids}
    contrastive(network(inputs), {})[0].backward()
    moved = (table.grad != 0).any(dim=1)
    assert moved[:9].tolist() == [False] * 4 + [True] * 5, "all that a text reaches"


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
    after = network.state_dict()
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert moved
    assert all(name.startswith("model.image_encoder.stages.2.1.") for name in moved)


def test_low_rank_updates_start_at_nothing_and_are_exported_merged(clip, tmp_path):
    plain, shape, _ = clip
    tuned = copy.deepcopy(plain)
    train_only(tuned, "lora", rank=2, alpha=1.0)
    images = torch.randn(3, 3, 32, 32)
    ids = SimpleTokenizer(context_length=24)(["a", "b c", "d"])
    assert torch.equal(tuned.encode_image(images), plain.encode_image(images))
    trained = {n: value for n, value in tuned.named_parameters() if value.requires_grad}
    for name, value in trained.items():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(value, std=0.1)
    state = merged_state(tuned)
    old = plain.state_dict()

    def factors(name):
        return (trained[f"{name}.parametrizations.weight.0.lora_{x}"] for x in "ab")

    key = "transformer.resblocks.0.mlp.c_fc"
    a, b = factors(key)
    expected = old[f"{key}.weight"] + 0.5 * b @ a
    assert torch.allclose(state[f"{key}.weight"], expected, atol=1e-7)
    assert state.keys() == old.keys()
    # The kernel of the patches as the released files have it: A [rank k, 3 k] and B [k D, rank k]
    # (docs/papers.md).
    shapes = [factor.shape for factor in factors("visual.conv1")]
    assert shapes == [(2 * 16, 3 * 16), (16 * 32, 2 * 16)]
    save_clip(tuned, shape, tmp_path)
    again = load_frozen_encoder(str(tmp_path)).model
    for graph in (True, False):  # without one, attention takes another way
        with torch.set_grad_enabled(graph):
            found = again.encode_image(images), again.encode_text(ids)
            own = tuned.encode_image(images), tuned.encode_text(ids)
        for one, other in zip(found, own, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
