"""PAC-S and RefPAC-S, and checkpoints in the form of the released ones, against updates
added by hand in open_clip.
"""

import open_clip
import pytest
import torch

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.clipscore import ClipScore
from rewards.clip.encoder import RELEASED
from rewards.clip.pac import PacScore, RefPacScore
from rl_caption.cli.main import run_program
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import (
    ARCHITECTURE,
    TINY,
    low_rank_weights,
    noise_image,
    tiny_checkpoint,
    weights,
)
from tests.training_for_tests import write_stage

CAPTIONS = ["a cat", "two dogs play", "a red bus"]
IMAGES = [noise_image(seed) for seed in (1, 2, 3)]
LAYOUTS = ("openai", "open_clip", "module", "archive", "half")
IN_PROJ = "visual.transformer.resblocks.0.attn.in_proj_weight"
OPENAI = "openai"
LAION = "laion2b_s32b_b82k"
HALF = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Where the files are; the tiny architecture has the tags that ViT-L/14 has in open_clip."""
    place = tmp_path_factory.mktemp("pac")
    tiny_checkpoint(place)
    tags = open_clip.pretrained._PRETRAINED
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tags, ARCHITECTURE, tags["ViT-L-14"])
        yield place


def saved(state, path):
    torch.save({"state_dict": state, "epoch": 3}, path)
    return str(path)


def backbone_of(state, path, tag=OPENAI):
    return load_frozen_encoder(ARCHITECTURE, saved(state, path), tuned_from=tag)


class ByHand:
    """open_clip's model in float64 with W + 0.25 B A in place of W wherever a state has
    factors A and B.
    """

    def __init__(self, state, tag=OPENAI):
        merged = {k: value.double() for k, value in state.items() if "lora_" not in k}
        for key, weight in merged.items():
            separate = key.endswith("in_proj_weight")
            factor = f"{key}_" if separate else key.removesuffix("weight")
            if f"{factor}lora_A" in state and ".mlp." not in key:
                a, b = (state[f"{factor}lora_{name}"].double() for name in "AB")
                merged[key] = weight + 0.25 * (b @ a).reshape(weight.shape)
        model = open_clip.CLIP(**TINY, quick_gelu=tag == OPENAI).double().eval()
        model.load_state_dict(merged)
        self.model = model.requires_grad_(False)
        options = {"mean": HALF, "std": HALF} if tag == LAION else {}
        self.transform = open_clip.image_transform(32, is_train=False, **options)

    def embeddings(self):
        pixels = torch.stack([self.transform(image) for image in IMAGES])
        images = self.model.encode_image(pixels.double(), normalize=True)
        ids = open_clip.tokenize(CAPTIONS)
        return torch.cat([images, self.model.encode_text(ids, normalize=True)])


def embeddings(backbone):
    images = backbone.encode_images(IMAGES)
    return torch.cat([images, backbone.encode_texts(CAPTIONS)]).double()


@pytest.mark.parametrize(
    ("tag", "layout"),
    [(LAION, "openai"), *((OPENAI, layout) for layout in LAYOUTS)],
)
def test_embeddings_of_a_checkpoint_equal_those_by_hand(folder, tag, layout):
    state = {key: value.half().float() for key, value in weights().items()}
    expected = ByHand(state, tag).embeddings()
    if layout == "open_clip":
        for key in [*state]:
            if not key.startswith(("visual", "logit")):
                state[f"text.{key}"] = state.pop(key)
    elif layout == "module":
        state = {f"module.{key}": value for key, value in state.items()}
    elif layout == "archive":
        for key in ("input_resolution", "context_length", "vocab_size"):
            state[key] = torch.tensor(77)
    elif layout == "half":
        state = {key: value.half() for key, value in state.items()}
    found = embeddings(backbone_of(state, folder / f"{layout}.pth", tag))
    assert torch.allclose(found, expected, atol=2e-6)


def test_low_rank_updates_equal_those_added_by_hand(folder):
    state = low_rank_weights()
    found = embeddings(backbone_of(state, folder / "low_rank.pth"))
    assert torch.allclose(found, ByHand(state).embeddings(), atol=2e-6)
    moved = (found - ByHand(weights()).embeddings()).abs().amax(dim=1)
    assert (moved > 1e-2).all(), "every row is another one"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ln_final.bias": None}, r"broken\.pth.*1 missing: ln_final\.bias"),
        ({f"{IN_PROJ}_lora_B": None}, rf"{IN_PROJ}: a factor"),
        ({f"{IN_PROJ}_lora_A": torch.zeros(4, 9)}, rf"{IN_PROJ}: shape"),
    ],
)
def test_files_that_do_not_fit_are_named(folder, change, message):
    state = low_rank_weights() | change
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        backbone_of(state, folder / "broken.pth")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {
                "backbone": "ViT-B-32",
                "pretrained": "no/such.pth",
            },
            "no/such.pth",
        ),
        (
            {
                "backbone": ARCHITECTURE,
                "pretrained": "mine.pth",
            },
            "'tuned_from'",
        ),
        (
            {
                "tuned_from": "openai",
                "pretrained": "mine.pth",
            },
            "'backbone'",
        ),
    ],
)
def test_a_checkpoint_is_never_replaced_by_other_weights(
    folder, monkeypatch, arguments, message
):
    monkeypatch.chdir(folder)
    saved(weights(), folder / "mine.pth")
    with pytest.raises(ValueError, match=message):
        RefPacScore(**arguments)


def test_released_files_are_known_by_name_to_every_score(folder, monkeypatch):
    """The architecture alone would run it with GELU and CLIP's mean: other numbers, and
    nothing would say so.
    """
    for architecture, tag in RELEASED.values():
        assert open_clip.get_pretrained_cfg(architecture, tag)
    monkeypatch.setitem(RELEASED, "released.pth", (ARCHITECTURE, LAION))
    path = saved(weights(), folder / "released.pth")
    expected = ByHand(weights(), LAION).embeddings()
    pac = PacScore(pretrained=path)
    for reward in (pac, ClipScore(ARCHITECTURE, path)):
        found = embeddings(reward.backbone.encoder)
        assert torch.allclose(found, expected, atol=2e-6)
        assert f"fp32,tuned from {LAION},prefix" in reward.signature


def test_a_missing_checkpoint_is_found_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", str(write_stage("coco", "pac", tmp_path / "pac.yaml"))]
    arguments += ["--model.init", str(tmp_path)]
    missing = r"reward\.terms\.ref_pac_s\.kwargs\.pretrained: 'checkpoints/clip_ViT-B-32\.pth'"
    with pytest.raises(ConfigError, match=missing):
        run_program("scst", arguments)
    judges = '{"other": {"target": "pac_s", "kwargs": {"pretrained": "a.pt"}}}'
    missing = r"monitor\.judges\.other\.kwargs\.pretrained: 'a\.pt'"
    with pytest.raises(ConfigError, match=missing):
        run_program("scst", [*arguments, "--monitor.judges", judges])
