"""Models that would be trained wrongly are found when they are loaded, whatever the cause."""

import inspect
import json
import shutil
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_caption.captioners import self_check
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.captioners.policy import Policy
from rl_caption.captioners.vlm_families import VisionLanguageFamily
from rl_caption.scst.rollout import sampling_noise
from tests.zoo.families import photo_rows, save_vlm, tiny_vlm

NAMES = ["image-0", "image-1", "image-2"]
LORA = {"r": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": None}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    families = ("llava", "qwen2_5_vl", "gemma3", "smolvlm")
    return {name: save_vlm(name, tmp_path_factory.mktemp(name)) for name in families}


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv(self_check.FOLDER, str(tmp_path / "checks"))


def forget(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "checks")


def planted(monkeypatch, owner: Any, name: str, change: Any) -> None:
    """Let a method return ``change(result)``, or call ``change`` if it takes the method, too."""
    original = getattr(owner, name)

    def changed(*arguments: Any, **options: Any) -> Any:
        return change(original(*arguments, **options))

    monkeypatch.setattr(owner, name, changed)


def test_positions_of_captions_that_are_wrong_cost_the_shared_prefix(
    folders, monkeypatch
):
    planted(
        monkeypatch,
        VisionLanguageFamily,
        "begin",
        lambda result: (result[0], replace(result[1], position=result[1].position + 7)),
    )
    assert load_captioner(folders["qwen2_5_vl"]).policy.mode.prefix == "none"


def test_what_no_way_computes_is_refused_with_its_number(folders, monkeypatch):
    planted(monkeypatch, self_check._Check, "_forced", lambda result: result * 1.1)
    with pytest.raises(CaptionerError, match=r"llava.*differ by up to \d.*nats"):
        load_captioner(folders["llava"])


def test_inputs_that_hold_indices_into_their_row_cost_the_batch(folders, monkeypatch):
    """As Molmo 2's ``image_token_pooling``: right for the first row of a batch alone."""
    planted(
        monkeypatch,
        Policy,
        "read_images",
        lambda result: {
            name: [value[0] for _ in value]
            if isinstance(value, tuple | list)
            else value
            for name, value in result.items()
        },
    )
    assert load_captioner(folders["qwen2_5_vl"]).policy.mode.features is False


def test_visual_tokens_of_another_layout_cost_the_batch_or_the_features(
    folders, monkeypatch
):
    def reversed_rows(rows: Any) -> Any:
        return {
            name: value[::-1] if isinstance(value, list) else value
            for name, value in rows.items()
        }

    from rl_caption.captioners import policy

    planted(monkeypatch, policy, "join_features", reversed_rows)
    assert load_captioner(folders["qwen2_5_vl"]).policy.mode.features is False


def test_windows_far_longer_than_the_captions_of_the_check_are_crossed(
    folders, monkeypatch, tmp_path
):
    from transformers.models.gemma3 import modeling_gemma3

    folder = Path(shutil.copytree(folders["gemma3"], tmp_path / "gemma3"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["sliding_window"] = 400
    (folder / "config.json").write_text(json.dumps(config))
    assert load_captioner(folder).policy.mode.prefix == "batch"
    forget(tmp_path)
    original = modeling_gemma3.sliding_window_overlay

    def forgetful(window: int) -> Any:
        scores = any(frame.function == "_scored" for frame in inspect.stack())
        return original(400 if scores else window)

    monkeypatch.setattr(modeling_gemma3, "sliding_window_overlay", forgetful)
    with pytest.raises(CaptionerError, match="gemma3"):
        load_captioner(folder)


def test_what_is_frozen_follows_from_what_visual_tokens_are_made_of(
    folders, monkeypatch, tmp_path
):
    """Visual tokens that are read from the text's table of words are trained with it."""
    captioner = load_captioner(folders["llava"])
    names = captioner.policy.visual_names
    assert any("vision_tower" in name for name in names)
    assert any("projector" in name for name in names)
    assert not any("language_model" in name for name in names)
    forget(tmp_path)
    tower = type(captioner.policy.model.base_model)
    original = tower.get_image_features

    @wraps(original)
    def from_words(self: Any, *arguments: Any, **options: Any) -> Any:
        output = original(self, *arguments, **options)
        words = self.get_input_embeddings().weight
        output.pooler_output = [
            tokens.detach().sigmoid()[:, : words.shape[0]] @ words[: tokens.shape[1]]
            for tokens in output.pooler_output
        ]
        return output

    monkeypatch.setattr(tower, "get_image_features", from_words)
    captioner = load_captioner(folders["llava"])
    captioner.adapt(None, None, False)
    assert any("embed_tokens" in name for name in captioner.policy.visual_names)
    assert captioner.policy.trains_images()
    assert not captioner.policy.keeps_tokens()


def test_adapters_are_checked_with_factors_that_do_something(folders, monkeypatch):
    pytest.importorskip("peft")
    from peft.tuners.lora import Linear

    captioner = load_captioner(folders["llava"])
    forward = Linear.forward

    def only_in_training(self: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return (
            forward(self, x, **options)
            if torch.is_grad_enabled()
            else self.base_layer(x)
        )

    monkeypatch.setattr(Linear, "forward", only_in_training)
    with pytest.raises(CaptionerError, match="llava"):
        captioner.adapt(None, LORA, False)
    for name, value in captioner.policy.named_parameters():
        assert "lora_B" not in name or not value.any(), "they are put back"


def test_keys_and_values_may_differ_in_width():
    from transformers.cache_utils import Cache

    from rl_caption.captioners.packed import PreallocatedLayer

    cache = Cache(layer_class_to_replicate=partial(PreallocatedLayer, 3))
    for length in (2, 1, 2):
        keys, values = torch.rand(2, 1, length, 5), torch.rand(2, 1, length, 3)
        found = cache.update(keys, values, 0)
        assert [tensor.shape[-1] for tensor in found] == [5, 3]
        assert torch.equal(found[1][:, :, -length:], values)


DECODINGS = [
    Decoding(num_samples=2, with_greedy=True, temperature=1.3, max_new_tokens=6),
    Decoding(num_samples=3, top_k=5, max_new_tokens=6),
    Decoding(
        num_samples=2, with_greedy=True, top_p=0.7, temperature=0.8, max_new_tokens=6
    ),
    Decoding(num_samples=2, with_greedy=True, no_repeat_ngram_size=1, max_new_tokens=6),
    Decoding(num_samples=2, with_greedy=True, block_trigrams=2.0, max_new_tokens=9),
    Decoding(max_new_tokens=6),
    Decoding(num_beams=3, num_return_sequences=2, max_new_tokens=5),
]


@pytest.mark.parametrize(
    "decoding", DECODINGS, ids=lambda decoding: decoding.describe()
)
def test_the_models_own_generate_draws_the_tokens_that_our_decode_draws(
    folders, decoding
):
    captioner = load_captioner(folders["smolvlm"], prompt="a photo of")
    captioner.policy.eval()
    inputs = captioner.preprocess(photo_rows())
    noise = None
    if decoding.num_samples:
        noise = sampling_noise(
            1, 0, NAMES, decoding.num_samples, decoding.max_new_tokens
        )
    expected = captioner.generate(captioner.policy, inputs, decoding, noise)
    captioner.policy.mode = replace(captioner.policy.mode, prefix="none")
    state = torch.get_rng_state()
    found = captioner.generate(captioner.policy, inputs, decoding, noise)
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state), "no random number but ours"


@pytest.mark.parametrize("prefix", ["rows", "none"])
def test_slower_ways_score_as_the_fastest_does(folders, prefix):
    captioner = load_captioner(folders["smolvlm"], prompt="a photo of")
    captioner.policy.eval()
    inputs = captioner.preprocess(photo_rows())
    ids = torch.tensor([[[15, 16, 17], [15, 18, 19]]]).repeat(3, 1, 1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1], mask[0, 1, 2] = False, False
    expected = [
        captioner.token_logits(captioner.policy, inputs, ids, m) for m in (None, mask)
    ]
    captioner.policy.mode = replace(captioner.policy.mode, prefix=prefix)
    found = [
        captioner.token_logits(captioner.policy, inputs, ids, m) for m in (None, mask)
    ]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_rows_that_cannot_be_joined_are_read_one_by_one(folders):
    captioner = load_captioner(folders["smolvlm"], prompt="a photo of")
    captioner.policy.eval()
    inputs = captioner.preprocess(photo_rows())
    ids = torch.tensor([[[15, 16, 17], [15, 18, 19]]]).repeat(3, 1, 1)
    expected = captioner.token_logits(captioner.policy, inputs, ids)
    assert captioner.policy.joins(inputs)
    inputs["images"].value[1]["unlike_the_others"] = torch.zeros(1, 3)
    assert not captioner.policy.joins(inputs)
    captioner.policy.image_inputs |= {"unlike_the_others"}
    planted_forward = captioner.policy.model.base_model.get_image_features
    captioner.policy.model.base_model.get_image_features = partial(
        lambda read, unlike_the_others=None, **options: read(**options), planted_forward
    )
    assert torch.allclose(
        captioner.token_logits(captioner.policy, inputs, ids), expected, atol=1e-4
    )


def test_a_verdict_is_remembered_for_the_same_model_alone(folders, monkeypatch):
    runs: list[int] = []
    planted(
        monkeypatch, self_check._Check, "run", lambda result: runs.append(1) or result
    )
    for _ in range(2):
        first = load_captioner(folders["llava"])
    assert len(runs) == 1
    assert first.policy.visual_names
    load_captioner(folders["llava"], dtype="bfloat16")
    load_captioner(folders["llava"], prompt="another prompt")
    assert len(runs) == 3


def test_a_resumed_run_keeps_its_mode(folders):
    captioner = load_captioner(folders["llava"])
    mode = {**captioner.mode, "prefix": "rows"}
    captioner.mode = mode
    assert captioner.policy.mode.prefix == "rows"
    assert captioner.mode == mode


def test_parameters_that_no_caption_depends_on_are_frozen(tmp_path):
    captioner = tiny_vlm("llava", tmp_path / "llava")
    frozen = [
        name
        for name, p in captioner.policy.model.named_parameters()
        if not p.requires_grad
    ]
    assert frozen
    assert all("post_layernorm" in name for name in frozen)
