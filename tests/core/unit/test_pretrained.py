"""Encoders by name: their grids, pixels and states are those of their libraries; which weights are
open.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    ConvNextConfig,
    ConvNextImageProcessor,
    ConvNextModel,
    Dinov2Config,
    Dinov2Model,
    ResNetConfig,
    ResNetModel,
    RobertaConfig,
    RobertaModel,
    ViTImageProcessor,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

import rewards.base
import rewards.options
from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import (
    ImageEncoder,
    TextEncoder,
    example_output,
    load_part,
    open_blocks,
    preprocessing_from,
)
from rewards.model_files import fingerprint
from tests.clip_for_tests import ARCHITECTURE, noise_image, tiny_checkpoint
from tests.encoders_for_tests import SIDE, TOWER, VISION, save_vit
from tests.zoo.language_models import bert_tokenizer

OWN = "tests.encoders_for_tests:MeanColours"
CAPTIONS = ["a man", "a dog on the grass", "a"]
CROP = {"height": SIDE, "width": SIDE}


def save_clip(folder: Path) -> str:
    """CLIP pads with its end of text: so does this tokenizer."""
    tokenizer = bert_tokenizer()
    tokenizer.pad_token = tokenizer.sep_token
    ids = {
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 3,
        "vocab_size": len(tokenizer),
    }
    text = {**TOWER, **ids, "max_position_embeddings": 12, "initializer_range": 0.3}
    CLIPModel(
        CLIPConfig(vision_config=VISION, text_config=text, projection_dim=8)
    ).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=CROP).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return f"transformers:{folder}"


def save_text(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    bert_tokenizer().save_pretrained(folder)
    return f"transformers:{folder}"


def save_bert(folder: Path) -> str:
    shape = {
        **TOWER,
        "vocab_size": len(bert_tokenizer()),
        "max_position_embeddings": 12,
        "initializer_range": 0.3,
    }
    return save_text(folder, BertModel(BertConfig(**shape), add_pooling_layer=False))


def save_roberta(folder: Path) -> str:
    """Its positions start after that of padding."""
    shape = {
        **TOWER,
        "vocab_size": len(bert_tokenizer()),
        "max_position_embeddings": 13,
        "initializer_range": 0.3,
    }
    return save_text(folder, RobertaModel(RobertaConfig(**shape, pad_token_id=0)))


def images(count: int = 2, side: int = SIDE) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@torch.no_grad()
def test_a_vit_without_its_class_token_row_by_row(tmp_path):
    encoder = load_part(ImageEncoder, save_vit(tmp_path))
    assert not encoder.training
    grid, states = (
        encoder(images()),
        ViTModel.from_pretrained(tmp_path)(images()).last_hidden_state,
    )
    torch.testing.assert_close(grid, states[:, 1:].reshape(2, 4, 4, 16))
    assert example_output(encoder).shape == (1, 4, 4, 16)
    assert example_output(load_part(ImageEncoder, OWN, {"gain": 2.0})).shape[-1] == 3
    ViTModel.from_pretrained(tmp_path).half().save_pretrained(tmp_path)
    for pretrained in (True, False):
        halves = load_part(
            ImageEncoder, f"transformers:{tmp_path}", pretrained=pretrained
        )
        assert {each.dtype for each in halves.parameters()} == {torch.float32}


@torch.no_grad()
def test_convolutional_networks_of_transformers(tmp_path):
    sizes: Any = {"hidden_sizes": [8, 16], "depths": [1, 1]}
    ConvNextImageProcessor(size={"shortest_edge": SIDE}).save_pretrained(tmp_path)
    models: Any = (
        ResNetModel(ResNetConfig(embedding_size=8, layer_type="basic", **sizes)),
        ConvNextModel(ConvNextConfig(num_stages=2, **sizes)),
    )
    for model in models:
        model.save_pretrained(tmp_path)
        encoder = load_part(ImageEncoder, f"transformers:{tmp_path}")
        found = model.eval()(images()).last_hidden_state
        torch.testing.assert_close(encoder(images()), found.permute(0, 2, 3, 1))
        opened = open_blocks(encoder, 1)
        assert opened
        assert all(each.startswith("model.encoder.stages.1.") for each in opened), (
            "the norm is of the pooled states"
        )


@torch.no_grad()
def test_the_towers_of_a_clip_of_transformers(tmp_path):
    name = save_clip(tmp_path)
    clip = CLIPModel.from_pretrained(tmp_path).eval()
    found = load_part(ImageEncoder, name)(images())
    states = clip.vision_model(images()).last_hidden_state
    torch.testing.assert_close(found.flatten(1, 2), states[:, 1:])
    encoder = load_part(TextEncoder, name)
    ids = encoder.tokenize(["a man"], 12)
    torch.testing.assert_close(encoder(ids), clip.text_model(ids).last_hidden_state)


@torch.no_grad()
def test_the_image_tower_of_open_clip(tmp_path):
    name = f"open_clip:{ARCHITECTURE}/{tiny_checkpoint(tmp_path)}"
    image, clip = load_part(ImageEncoder, name), open_clip.create_model(ARCHITECTURE)
    clip.load_state_dict(torch.load(tmp_path / "seed0.pt"))
    kept: dict[str, Tensor] = {}
    clip.visual.ln_post.register_forward_hook(
        lambda module, inputs, output: kept.update(image=output)
    )
    clip.eval().encode_image(images())
    torch.testing.assert_close(image(images()).flatten(1, 2), kept["image"][:, 1:])


def test_an_architecture_of_open_clip_at_another_size_with_random_weights():
    cfg = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}
    encoder = load_part(
        ImageEncoder, "open_clip:RN50", {"vision_cfg": cfg}, pretrained=False
    )
    assert (encoder.preprocessing.size, example_output(encoder).shape) == (
        32,
        (1, 1, 1, 256),
    )
    opened = open_blocks(encoder, None)
    encoder(torch.rand(2, 3, 32, 32)).sum().backward()
    assert opened == [
        name for name, each in encoder.named_parameters() if each.grad is not None
    ]


@torch.no_grad()
@pytest.mark.parametrize("save", [save_clip, save_bert, save_roberta])
def test_states_of_a_text_do_not_depend_on_padding(tmp_path, save):
    encoder = load_part(TextEncoder, save(tmp_path))
    assert encoder.context_length == 12
    ids = encoder.tokenize(CAPTIONS, 12)
    states = encoder(ids)
    assert encoder.lengths(ids).tolist() == [4, 7, 3], (
        "start and end are tokens, also where padding is the end"
    )
    for row, caption in enumerate(CAPTIONS):
        alone = encoder.tokenize([caption], 12)
        assert alone.shape[1] == encoder.lengths(ids)[row]
        torch.testing.assert_close(
            states[row, : alone.shape[1]], encoder(alone)[0], rtol=1e-4, atol=1e-5
        )
    assert encoder.tokenize(["a man " * 20], 6).shape == (1, 6)
    assert encoder(encoder.tokenize(["a man " * 20], encoder.context_length)).shape == (
        1,
        12,
        16,
    )
    assert example_output(encoder).shape[-1] == 16


@pytest.mark.parametrize(
    ("processor", "options"),
    [
        ("ViTImageProcessor", {"size": CROP}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 32}}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
        ("BitImageProcessor", {"size": {"shortest_edge": 37}, "crop_size": CROP}),
        ("SiglipImageProcessor", {"size": CROP}),
    ],
)
def test_pixels_are_those_of_the_image_processor(tmp_path, processor, options):
    getattr(transformers, processor)(**options).save_pretrained(tmp_path)
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    ours = preprocessing_from(theirs.to_dict())
    for size in (
        (50, 37),
        (37, 50),
        (33, 35),
        (20, 99),
        (40, 32),
    ):  # odd and even margins of the crop
        image = noise_image(2, size)
        np.testing.assert_array_equal(
            ours(image).numpy(), np.asarray(theirs(image)["pixel_values"][0])
        )


def test_an_image_processor_that_does_something_else_is_refused():
    usual, found = (
        {"size": CROP, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        (SIDE, (0.5,) * 3),
    )
    assert preprocessing_from(usual) == Preprocessing(
        *found, (0.5,) * 3, "bicubic", "squash", True
    )
    others: Any = (
        {"do_pad": True},
        {"resample": 1},
        {"rescale_factor": 1.0},
        {"size": {"height": 32, "width": 40}},
    )
    for changed in (*others, {"size": {"longest_edge": 32}}):
        with pytest.raises(ValueError, match="image processor"):
            preprocessing_from(usual | changed)


def test_a_pooler_that_a_file_lacks_is_no_part_of_the_encoder(tmp_path):
    name = save_vit(tmp_path, pooler=False)
    first, second = (
        fingerprint(load_part(ImageEncoder, name).state_dict()) for _ in range(2)
    )
    assert first == second
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(key for key in weights if "layer.1." in key)
    save_file(
        {key: value for key, value in weights.items() if key != lost},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match=re.escape("layers.1.")):
        load_part(ImageEncoder, name)


def test_the_last_blocks_are_open_and_what_follows(tmp_path):
    encoder = load_part(ImageEncoder, save_vit(tmp_path))
    every = [name for name, _ in encoder.named_parameters()]
    last_two = [
        name for name in every if re.search(r"layers\.[12]\.|^model\.layernorm\.", name)
    ]
    assert open_blocks(encoder, 2) == last_two
    assert [
        name for name, each in encoder.named_parameters() if each.requires_grad
    ] == last_two
    read = [name for name in every if ".pooler." not in name]
    assert (open_blocks(encoder, 0), open_blocks(encoder, None)) == ([], read)
    assert len(read) == len(every) - 2
    with pytest.raises(ValueError, match="3 blocks"):
        open_blocks(encoder, 4)


def test_blocks_of_a_large_vocabulary_or_shared(tmp_path):
    bert = BertModel(BertConfig(**TOWER, vocab_size=20_000), add_pooling_layer=False)
    albert = AlbertModel(
        AlbertConfig(**TOWER, vocab_size=len(bert_tokenizer()), embedding_size=8)
    )
    texts = (
        load_part(TextEncoder, save_text(tmp_path / name, own))
        for name, own in (("b", bert), ("a", albert))
    )
    starts = ("model.encoder.layer.2.", "model.encoder.")
    for model, start in zip(texts, starts, strict=True):
        opened = open_blocks(model, 1)
        assert opened
        assert all(name.startswith(start) for name in opened)


def test_what_the_output_does_not_depend_on_stays_frozen(tmp_path):
    """DINOv2's mask token, and the norm of CLIP's pooled state: several processes would wait for
    their gradients.
    """
    vision = {key: value for key, value in VISION.items() if key != "intermediate_size"}
    Dinov2Model(Dinov2Config(**vision)).save_pretrained(tmp_path / "dino")
    ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(
        tmp_path / "dino"
    )
    for name in (f"transformers:{tmp_path / 'dino'}", save_clip(tmp_path / "clip")):
        for blocks in (None, 1):
            encoder = load_part(ImageEncoder, name)
            opened = open_blocks(encoder, blocks)
            encoder(images()).sum().backward()
            assert opened == [
                name
                for name, each in encoder.named_parameters()
                if each.grad is not None
            ]


def test_what_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    bert, vit = save_bert(tmp_path / "bert"), save_vit(tmp_path / "vit")
    missing = (
        "vit",
        "open_clip:ViT-B-32",
        "no_such_module:Encoder",
        "torch.nn:Identity",
        bert,
    )
    for name in missing:
        with pytest.raises(ValueError, match=re.escape(repr(name))):
            load_part(ImageEncoder, name)
    with pytest.raises(ValueError, match="ViTModel"):
        load_part(TextEncoder, vit)
    with pytest.raises(ValueError, match="gain"):
        load_part(ImageEncoder, vit, {"gain": 1.0})
    ViTMAEModel(ViTMAEConfig(**VISION)).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="ViTMAEModel"):
        load_part(ImageEncoder, vit)
    monkeypatch.setattr(rewards.base, "TARGETS", {})
    monkeypatch.setattr(rewards.options, "TARGETS", rewards.base.TARGETS)
    load_part(ImageEncoder, OWN)
    assert OWN in rewards.base.TARGETS["tests.encoders_for_tests"]
