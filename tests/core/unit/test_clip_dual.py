"""Dual encoders made of pretrained parts."""

import json
import shutil

import pytest
import torch

from rewards.base import RewardError
from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.dual import DualConfig, PretrainedDual
from rewards.clip.specs import Specs
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
    config = DualConfig(image, text, embed_dim=8, hidden=10, **changes)
    return PretrainedDual(config).eval()


def test_text_embeddings_do_not_depend_on_padding_and_pool_what_they_say(text_encoder):
    dual = made(text_encoder)
    encoder = dual.text_encoder
    ids = encoder.tokenize(TEXTS, 77)
    together, states = dual.text_features(ids), encoder(ids)
    for row, text in enumerate(TEXTS):
        alone = encoder.tokenize([text], 77)
        length = int(encoder.lengths(ids)[row])
        assert length == alone.shape[1]
        assert torch.allclose(dual.text_features(alone)[0], together[row], atol=1e-6)
        mean = states[row, :length].mean(dim=0)
        assert torch.allclose(mean, together[row], atol=1e-6)
    first = made(text_encoder, pool="first").text_features(ids)
    assert torch.equal(first, states[:, 0])


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


def test_specs_counts_tokens_as_the_text_encoder_does(tmp_path, text_encoder):
    made(text_encoder, context_length=6).save_pretrained(tmp_path)
    trust([IMAGE])
    reward = Specs(str(tmp_path))
    row = {"image": [noise_image(1)]}
    # four words; more tokens of CLIP's BPE
    assert reward(None, ["a heptagonal paraboloid rotates"], **row)
    with pytest.raises(RewardError, match=r"reads 6 tokens, .* has 7"):
        reward(None, ["a red circle and squares"], **row)


def test_only_what_is_trained_drops_out(text_encoder):
    dual = made(text_encoder).requires_grad_(True)
    dual.image_encoder.requires_grad_(False)
    dual.train()
    assert not dual.image_encoder.training
    assert dual.text_encoder.training
    assert dual.image_head.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": "x"}, "hidden"),
        ({"pool": "max"}, "max"),
        ({"image": "tests.encoders_for_tests:Missing"}, "Missing"),
    ],
)
def test_a_wrong_folder_is_refused(tmp_path, text_encoder, change, message):
    made(text_encoder).save_pretrained(tmp_path)
    trust([IMAGE, "tests.encoders_for_tests:Missing"])
    usual = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(usual | change))
    with pytest.raises(ValueError, match=message):
        load_frozen_encoder(str(tmp_path))
