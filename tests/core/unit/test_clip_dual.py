"""Dual encoders made of pretrained parts."""

import shutil

import pytest
import torch

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.dual import DualConfig, PretrainedDual
from rewards.trust import trust
from tests.clip_for_tests import noise_image
from tests.encoders_for_tests import save_text_encoder

IMAGE = "tests.encoders_for_tests:TinyImageEncoder"
TEXTS = ["a red circle", "two blue squares left of a green triangle .", "no shape"]


@pytest.fixture(scope="module")
def text_encoder(tmp_path_factory):
    return save_text_encoder(tmp_path_factory.mktemp("text"))


def made(text, image=IMAGE, **changes):
    torch.manual_seed(1)
    config = DualConfig(
        image,
        text,
        embed_dim=8,
        hidden=10,
        **changes,
    )
    return PretrainedDual(config).eval()


def test_text_embeddings_pool_the_states_of_tokens(text_encoder):
    dual = made(text_encoder)
    encoder = dual.text_encoder
    ids = encoder.tokenize(TEXTS, 77)
    states = encoder(ids)
    found = dual.text_features(ids)
    for row, length in enumerate(encoder.lengths(ids).tolist()):
        mean = states[row, :length].mean(dim=0)
        assert torch.allclose(mean, found[row], atol=1e-6)


@torch.no_grad()
def test_a_saved_dual_is_a_reward_and_needs_none_of_its_sources(tmp_path):
    source = tmp_path / "source"
    folder = tmp_path / "dual"
    dual = made(save_text_encoder(source))
    dual.save_pretrained(folder)
    shutil.rmtree(source)
    trust([IMAGE])
    photo = noise_image(1)
    backbone = load_frozen_encoder(str(folder))
    grid = dual.image_encoder(dual.preprocessing(photo)[None])
    image = dual.image_head(grid.mean(dim=(1, 2)))
    texts = dual.encode_text(dual.text_encoder.tokenize(TEXTS, 77))
    found = backbone.encode_images([photo], normalize=False)
    assert torch.allclose(found, image, atol=1e-6)
    found = backbone.encode_texts(TEXTS, normalize=False)
    assert torch.allclose(found, texts, atol=1e-6)
    dual.text_head.linear.bias[0] += 1
    dual.save_pretrained(folder)
    assert load_frozen_encoder(str(folder)).fingerprint != backbone.fingerprint


def test_only_what_is_trained_drops_out(text_encoder):
    dual = made(text_encoder).requires_grad_(True)
    dual.image_encoder.requires_grad_(False)
    dual.train()
    assert not dual.image_encoder.training
    assert dual.text_encoder.training
    assert dual.image_head.training
