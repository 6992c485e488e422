"""PAC-S and RefPAC-S, and checkpoints in the form of the released ones, against updates added by
hand in open_clip.
"""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from torch import Tensor

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.encoder import RELEASED
from rewards.clip.pac import PacScore, RefPacScore
from rewards.registry import build
from rl_caption.cli.main import run_program
from rl_caption.config.build import ConfigError
from tests.clip_for_tests import (
    ARCHITECTURE,
    TINY,
    low_rank_weights,
    noise_image,
    tiny_checkpoint,
    weights,
)
from tests.training_for_tests import write_stage

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
CAPTIONS = ["a cat", "two dogs play", "a red bus"]
IMAGES = [noise_image(seed) for seed in (1, 2, 3)]
PREFIX = "A photo depicts "
LAYOUTS = ("openai", "open_clip", "module", "archive", "half")
IN_PROJ = "visual.transformer.resblocks.0.attn.in_proj_weight"
XLM = "xlm-roberta-base-ViT-B-32"
MEANS = {"openai": [0.48145466, 0.4578275, 0.40821073], "laion2b_s32b_b82k": [0.5] * 3}
STDS = {"openai": [0.26862954, 0.26130258, 0.27577711], "laion2b_s32b_b82k": [0.5] * 3}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Where the files are; the tiny architecture has the tags that ViT-L/14 has in open_clip."""
    place = tmp_path_factory.mktemp("pac")
    tiny_checkpoint(place)
    tags = open_clip.pretrained._PRETRAINED
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tags, ARCHITECTURE, tags["ViT-L-14"])
        yield place


def saved(state: dict[str, Tensor], path: Path) -> str:
    torch.save({"state_dict": state, "epoch": 3}, path)
    return str(path)


def backbone_of(
    state: dict[str, Tensor], path: Path, tag: str = "openai", **more: Any
) -> Any:
    return load_frozen_encoder(ARCHITECTURE, saved(state, path), tuned_from=tag, **more)


class ByHand:
    """open_clip's model in float64 with W + 0.25 B A in place of W wherever a state has factors A
    and B.
    """

    def __init__(self, state: dict[str, Tensor], tag: str = "openai") -> None:
        merged = {
            key: value.double() for key, value in state.items() if "lora_" not in key
        }
        for key, weight in merged.items():
            factor = (
                f"{key}_"
                if key.endswith("in_proj_weight")
                else key.removesuffix("weight")
            ) + "lora_"
            if f"{factor}A" in state and ".mlp." not in key:
                product = state[f"{factor}B"].double() @ state[f"{factor}A"].double()
                merged[key] = weight + 0.25 * product.reshape(weight.shape)
        model = open_clip.CLIP(**TINY, quick_gelu=tag == "openai")  # type: ignore[arg-type]
        self.model = model.double().requires_grad_(False).eval()
        self.model.load_state_dict(merged)
        self.transform = open_clip.image_transform(
            32, is_train=False, mean=MEANS[tag], std=STDS[tag]
        )

    def image(self, image: Any) -> Tensor:
        return self.model.encode_image(
            self.transform(image)[None].double(), normalize=True
        )[0]

    def text(self, text: str) -> Tensor:
        return self.model.encode_text(open_clip.tokenize([text]), normalize=True)[0]

    def embeddings(self) -> Tensor:
        return torch.stack([*map(self.image, IMAGES), *map(self.text, CAPTIONS)])


def embeddings(backbone: Any) -> Tensor:
    return torch.cat(
        [backbone.encode_images(IMAGES), backbone.encode_texts(CAPTIONS)]
    ).double()


@pytest.mark.parametrize(
    ("tag", "layouts"), [("openai", LAYOUTS), ("laion2b_s32b_b82k", LAYOUTS[:1])]
)
def test_embeddings_of_a_checkpoint_equal_those_by_hand(folder, tag, layouts):
    state = {key: value.half().float() for key, value in weights().items()}
    text = (
        "transformer.",
        "token_embedding.",
        "positional_embedding",
        "ln_final.",
        "text_projection",
    )
    stored = {
        "openai": state,
        "open_clip": {
            f"text.{key}" if key.startswith(text) else key: value
            for key, value in state.items()
        },
        "module": {f"module.{key}": value for key, value in state.items()},
        "archive": state
        | {"input_resolution": torch.tensor(32), "context_length": torch.tensor(77)},
        "half": {key: value.half() for key, value in state.items()},
    }
    expected = ByHand(state, tag).embeddings()
    for layout in layouts:
        found = embeddings(backbone_of(stored[layout], folder / f"{layout}.pth", tag))
        assert torch.allclose(found, expected, atol=2e-6), layout


def test_the_score_has_the_prefix_of_clipscore_and_twice_the_cosine(
    folder,
):
    arguments: Any = {
        "backbone": ARCHITECTURE,
        "pretrained": saved(weights(), folder / "a.pth"),
        "tuned_from": "openai",
    }
    by_hand = ByHand(weights())
    cosines = [
        by_hand.text(PREFIX + text) @ by_hand.image(image)
        for text, image in zip(CAPTIONS, IMAGES, strict=True)
    ]
    assert min(cosines) > 0, "a row that scores 0 shows nothing"
    assert PacScore(**arguments)(None, CAPTIONS, image=IMAGES) == pytest.approx(
        [2 * float(c) for c in cosines], abs=2e-6
    )


def test_low_rank_updates_equal_those_added_by_hand(folder):
    state = low_rank_weights()
    block = "visual.transformer.resblocks.0"
    factors = {
        "visual.conv1.lora_A",
        f"{IN_PROJ}_lora_B",
        f"{block}.attn.out_proj.lora_A",
        f"{block}.mlp.c_fc.lora_A",
    }
    assert factors < state.keys()
    backbone = backbone_of(state, folder / "low_rank.pth")
    assert "tuned from openai" in backbone.signature
    found = embeddings(backbone)
    assert torch.allclose(found, ByHand(state).embeddings(), atol=2e-6)
    assert ((found - ByHand(weights()).embeddings()).abs().amax(dim=1) > 1e-2).all(), (
        "every row is another one"
    )


def test_files_that_do_not_fit_are_named(folder):
    changes: list[tuple[dict[str, Any], str]] = [
        ({"ln_final.bias": None}, r"broken\.pth.*1 missing: ln_final\.bias"),
        ({"visual.head": torch.zeros(2)}, r"1 unexpected: visual\.head"),
        ({"visual.proj": torch.zeros(3)}, r"visual\.proj \[3\], not \[64, 16\]"),
        ({f"{IN_PROJ}_lora_B": None}, rf"{IN_PROJ}: a factor"),
        ({"visual.conv1.weight": None}, r"visual\.conv1\.weight"),
        (
            {f"{IN_PROJ}_lora_A": torch.zeros(4, 9)},
            r"A is \[4, 9\] and B \[192, 4\] for a weight \[192, 64\]$",
        ),
        ({"epoch": Path("x")}, r"broken\.pth"),
    ]
    for change, message in changes:
        state = {
            name: value
            for name, value in (low_rank_weights() | change).items()
            if value is not None
        }
        with pytest.raises(ValueError, match=message):
            backbone_of(state, folder / "broken.pth")


def test_a_checkpoint_is_never_replaced_by_other_weights(folder, tmp_path):
    path = saved(weights(), folder / "mine.pth")
    for arguments, message in (
        ({}, "'pretrained' is"),
        ({"backbone": "ViT-B-32", "pretrained": "no/such.pth"}, "'no/such.pth'"),
        ({"backbone": ARCHITECTURE, "pretrained": path}, r"mine\.pth.*'tuned_from'"),
        ({"tuned_from": "openai", "pretrained": path}, r"mine\.pth.*'backbone'"),
        (
            {"backbone": ARCHITECTURE, "pretrained": path, "tuned_from": "opnai"},
            r"'opnai'.*\(openai, .*laion2b_s32b",
        ),
        ({"backbone": str(tmp_path), "tuned_from": "openai"}, "'pretrained'"),
    ):
        with pytest.raises(ValueError, match=message):
            RefPacScore(**arguments)  # type: ignore[arg-type]


def test_released_files_are_known_by_name(folder, monkeypatch):
    for name, (architecture, tag) in RELEASED.items():
        assert open_clip.get_pretrained_cfg(architecture, tag), (
            f"{name}: open_clip has no {architecture} of {tag}"
        )
    monkeypatch.setitem(RELEASED, "clip_ViT-B-32.pth", (ARCHITECTURE, "openai"))
    path = saved(weights(), folder / "clip_ViT-B-32.pth")
    reward = PacScore(pretrained=path)
    assert torch.allclose(
        embeddings(reward.backbone.encoder), ByHand(weights()).embeddings(), atol=2e-6
    )
    assert reward.signature == (
        f"pac_s[{ARCHITECTURE}/clip_ViT-B-32.pth,{reward.backbone.encoder.fingerprint[:12]},"
        "fp32,tuned from openai,prefix='A photo depicts ',w2]"
    )
    again = RefPacScore(pretrained=path, tuned_from="laion2b_s32b_b82k", truncate=False)
    assert again.signature.endswith(
        "fp32,tuned from laion2b_s32b_b82k,no truncation,prefix='A photo depicts ',w2,clipped "
        "references]"
    )


def test_a_released_file_is_known_to_every_score(folder, monkeypatch):
    """The architecture alone would run it with GELU and CLIP's mean: other numbers, and nothing
    would say so.
    """
    monkeypatch.setitem(RELEASED, "released.pth", (ARCHITECTURE, "laion2b_s32b_b82k"))
    path = saved(weights(), folder / "released.pth")
    expected = load_frozen_encoder(ARCHITECTURE, path, tuned_from="laion2b_s32b_b82k")
    found: Any = build("clipscore", backbone=ARCHITECTURE, pretrained=path)
    assert found.backbone.encoder.fingerprint == expected.fingerprint
    assert "tuned from laion2b_s32b_b82k" in found.signature


def test_a_missing_checkpoint_is_found_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--config", str(write_stage("coco", "pac", tmp_path / "pac.yaml"))]
    missing = r"reward\.terms\.ref_pac_s\.kwargs\.pretrained: 'checkpoints/clip_ViT-B-32\.pth'"
    with pytest.raises(ConfigError, match=missing):
        run_program("scst", arguments)
    judges = '{"other": {"target": "pac_s", "kwargs": {"pretrained": "a.pt"}}}'
    with pytest.raises(
        ConfigError, match=r"monitor\.judges\.other\.kwargs\.pretrained: 'a\.pt'"
    ):
        run_program("scst", [*arguments, "--monitor.judges", judges])
