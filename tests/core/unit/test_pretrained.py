"""Encoders by name: their grids, pixels and states are those of their libraries; which
weights are open.
"""

import re

import numpy as np
import open_clip
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPImageProcessorPil,
    CLIPModel,
    ConvNextConfig,
    ConvNextImageProcessor,
    ConvNextModel,
    Dinov2Config,
    Dinov2Model,
    RobertaConfig,
    RobertaModel,
    ViTImageProcessor,
    ViTImageProcessorPil,
    ViTMAEConfig,
    ViTMAEModel,
    ViTModel,
)

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


WORDS = {
    **TOWER,
    "vocab_size": len(bert_tokenizer()),
    "max_position_embeddings": 12,
    "initializer_range": 0.3,
}


def save_clip(folder):
    """CLIP pads with its end of text: so does this tokenizer."""
    tokenizer = bert_tokenizer()
    tokenizer.pad_token = tokenizer.sep_token
    ids = {
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 3,
    }
    text = {**WORDS, **ids}
    config = CLIPConfig(vision_config=VISION, text_config=text, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)
    processor = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=CROP)
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"transformers:{folder}"


def images(count=2, side=SIDE):
    return torch.randn(
        count,
        3,
        side,
        side,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


TEXT_MODELS = {
    "bert": lambda: BertModel(BertConfig(**WORDS), add_pooling_layer=False),
    # positions start after that of padding
    "roberta": lambda: RobertaModel(
        RobertaConfig(**WORDS | {"max_position_embeddings": 13}, pad_token_id=0)
    ),
}


def save_text(folder, name):
    """Save a text model with its tokenizer; return its name as an encoder."""
    if name == "clip":
        return save_clip(folder)
    TEXT_MODELS[name]().save_pretrained(folder)
    bert_tokenizer().save_pretrained(folder)
    return f"transformers:{folder}"


@torch.no_grad()
def test_a_vit_without_its_class_token_row_by_row(tmp_path):
    name = save_vit(tmp_path)
    encoder = load_part(ImageEncoder, name)
    assert not encoder.training
    vit = ViTModel.from_pretrained(tmp_path)
    states = vit(images()).last_hidden_state[:, 1:]
    torch.testing.assert_close(encoder(images()), states.reshape(2, 4, 4, 16))
    assert example_output(load_part(ImageEncoder, OWN, {"gain": 2.0})).shape[-1] == 3
    vit.half().save_pretrained(tmp_path)
    for pretrained in (True, False):
        halves = load_part(ImageEncoder, name, pretrained=pretrained)
        assert {each.dtype for each in halves.parameters()} == {torch.float32}


@torch.no_grad()
def test_a_convolutional_network_of_transformers(tmp_path):
    config = ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1])
    model = ConvNextModel(config).eval()
    model.save_pretrained(tmp_path)
    ConvNextImageProcessor(size={"shortest_edge": SIDE}).save_pretrained(tmp_path)
    encoder = load_part(ImageEncoder, f"transformers:{tmp_path}")
    found = model(images()).last_hidden_state
    torch.testing.assert_close(encoder(images()), found.permute(0, 2, 3, 1))
    opened = open_blocks(encoder, 1)
    assert opened
    # the norm is of the pooled states
    assert all(each.startswith("model.encoder.stages.1.") for each in opened)


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
    image = load_part(ImageEncoder, name)
    clip = open_clip.create_model(ARCHITECTURE)
    clip.load_state_dict(torch.load(tmp_path / "seed0.pt"))
    kept = []
    clip.visual.ln_post.register_forward_hook(lambda *call: kept.append(call[-1]))
    clip.eval().encode_image(images())
    torch.testing.assert_close(image(images()).flatten(1, 2), kept[0][:, 1:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["clip", "bert", "roberta"])
def test_states_of_a_text_do_not_depend_on_padding(tmp_path, name):
    encoder = load_part(TextEncoder, save_text(tmp_path, name))
    assert encoder.context_length == 12
    ids = encoder.tokenize(CAPTIONS, 12)
    states, lengths = encoder(ids), encoder.lengths(ids).tolist()
    # start and end are tokens, also where padding is the end
    assert lengths == [4, 7, 3]
    for row, caption in enumerate(CAPTIONS):
        alone = encoder(encoder.tokenize([caption], 12))[0]
        own = states[row, : lengths[row]]
        torch.testing.assert_close(own, alone, rtol=1e-4, atol=1e-5)
    long = ["a man " * 20]
    assert encoder(encoder.tokenize(long, 12)).shape == (1, 12, 16)


@pytest.mark.parametrize(
    ("processor", "options"),
    [
        ("ViTImageProcessor", {"size": CROP}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 32}}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
        (
            "BitImageProcessor",
            {
                "size": {"shortest_edge": 37},
                "crop_size": CROP,
            },
        ),
        ("SiglipImageProcessor", {"size": CROP}),
    ],
)
def test_pixels_are_those_of_the_image_processor(tmp_path, processor, options):
    getattr(transformers, processor)(**options).save_pretrained(tmp_path)
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    ours = preprocessing_from(theirs)
    # odd and even margins of the crop
    for size in ((50, 37), (37, 50), (33, 35), (20, 99), (40, 32)):
        image = noise_image(2, size)
        expected = theirs(image)["pixel_values"][0]
        np.testing.assert_array_equal(ours(image).numpy(), expected)


def test_an_image_processor_without_a_square_output_is_refused():
    processor = ViTImageProcessorPil(size={"height": 32, "width": 40})
    with pytest.raises(ValueError, match="no square"):
        preprocessing_from(processor)


@pytest.mark.parametrize("off", ["do_normalize", "do_rescale"])
def test_steps_of_an_image_processor_may_be_off(off):
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=CROP)
    setattr(processor, off, False)
    image = noise_image(2)
    expected = torch.tensor(processor(image)["pixel_values"][0]).float()
    torch.testing.assert_close(preprocessing_from(processor)(image), expected)


def test_a_pooler_that_a_file_lacks_is_no_part_of_the_encoder(tmp_path):
    name = save_vit(tmp_path, pooler=False)
    file = tmp_path / "model.safetensors"
    states = [load_part(ImageEncoder, name).state_dict() for _ in range(2)]
    assert fingerprint(states[0]) == fingerprint(states[1])
    weights = load_file(file)
    del weights[next(key for key in weights if "layer.1." in key)]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape("layers.1.")):
        load_part(ImageEncoder, name)


def test_the_last_blocks_are_open_and_what_follows(tmp_path):
    encoder = load_part(ImageEncoder, save_vit(tmp_path))
    every = [name for name, _ in encoder.named_parameters()]
    last = re.compile(r"layers\.[12]\.|^model\.layernorm\.")
    expected = [name for name in every if last.search(name)]
    assert open_blocks(encoder, 2) == expected
    read = [name for name in every if ".pooler." not in name]
    assert (open_blocks(encoder, 0), open_blocks(encoder, None)) == ([], read)
    with pytest.raises(ValueError, match="3 blocks"):
        open_blocks(encoder, 4)


@pytest.mark.parametrize(("kind", "blocks"), [("dino", None), ("clip", 1)])
def test_what_the_output_does_not_depend_on_stays_frozen(tmp_path, kind, blocks):
    """DINOv2's mask token, and the norm of CLIP's pooled state: several processes would
    wait for their gradients.
    """
    name = f"transformers:{tmp_path}"
    if kind == "dino":
        sizes = {key: VISION[key] for key in VISION if key != "intermediate_size"}
        Dinov2Model(Dinov2Config(**sizes)).save_pretrained(tmp_path)
        ViTImageProcessor(size=CROP).save_pretrained(tmp_path)
    else:
        save_clip(tmp_path)
    encoder = load_part(ImageEncoder, name)
    opened = open_blocks(encoder, blocks)
    encoder(images()).sum().backward()
    learnt = [n for n, each in encoder.named_parameters() if each.grad is not None]
    assert opened == learnt


def test_what_cannot_be_loaded_is_named(tmp_path):
    bert = save_text(tmp_path / "bert", "bert")
    vit = save_vit(tmp_path / "vit")
    with pytest.raises(ValueError, match=re.escape(repr(bert))):
        load_part(ImageEncoder, bert)
    ViTMAEModel(ViTMAEConfig(**VISION)).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="ViTMAEModel"):
        load_part(ImageEncoder, vit)


def test_the_blocks_of_a_text_encoder_are_its_layers(tmp_path):
    opened = open_blocks(load_part(TextEncoder, save_text(tmp_path, "bert")), 1)
    assert opened
    assert all(each.startswith("model.encoder.layer.2.") for each in opened)
