"""Models that would be trained wrongly are found when they are loaded, whatever the cause."""

import inspect
import json
import shutil
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_caption.captioners import policy, self_check
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.captioners.policy import Mode, Policy
from rl_caption.captioners.vlm_families import VisionLanguageFamily
from rl_caption.programs import train
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import captions_of, logits_of, near, token_ids
from tests.zoo.families import photo_rows, save_vlm, tiny_vlm

NAMES = ["image-0", "image-1", "image-2"]
LORA = {
    "r": 2,
    "alpha": 4.0,
    "dropout": 0.0,
    "target_modules": None,
}


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
    def shifted(result: Any) -> Any:
        logits, state = result
        return logits, replace(state, position=state.position + 7)

    planted(monkeypatch, VisionLanguageFamily, "begin", shifted)
    assert load_captioner(folders["qwen2_5_vl"]).policy.mode.prefix == "none"


def test_what_no_way_computes_is_refused_with_its_number(folders, monkeypatch):
    planted(
        monkeypatch,
        self_check._Check,
        "_force_captions",
        lambda result: result * 1.1,
    )
    with pytest.raises(CaptionerError, match=r"llava.*differ by up to \d.*nats"):
        load_captioner(folders["llava"])


def test_inputs_that_hold_indices_into_their_row_cost_the_batch(folders, monkeypatch):
    """As Molmo 2's ``image_token_pooling``: right for the first row of a batch alone."""

    def of_the_first(tokens: Any) -> Any:
        is_list = isinstance(tokens, tuple | list)
        return [tokens[0] for _ in tokens] if is_list else tokens

    def changed(result: Any) -> Any:
        return {name: of_the_first(tokens) for name, tokens in result.items()}

    planted(monkeypatch, Policy, "read_images", changed)
    assert load_captioner(folders["qwen2_5_vl"]).policy.mode.features is False


def test_visual_tokens_of_another_layout_cost_the_batch_or_the_features(
    folders, monkeypatch
):
    def reversed_rows(rows: Any) -> Any:
        return {
            name: value[::-1] if isinstance(value, list) else value
            for name, value in rows.items()
        }

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
        scores = any(frame.function == "_score_batch" for frame in inspect.stack())
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
        if torch.is_grad_enabled():
            return forward(self, x, **options)
        return self.base_layer(x)

    monkeypatch.setattr(Linear, "forward", only_in_training)
    with pytest.raises(CaptionerError, match="llava"):
        captioner.adapt(None, LORA, False)
    for name, value in captioner.policy.named_parameters():
        assert "lora_B" not in name or not value.any(), "they are put back"


GREEDY_TOO = Decoding(num_samples=2, with_greedy=True, max_new_tokens=6)
DECODINGS = [
    GREEDY_TOO.replace(temperature=1.3),
    Decoding(num_samples=3, top_k=5, max_new_tokens=6),
    GREEDY_TOO.replace(top_p=0.7, temperature=0.8),
    GREEDY_TOO.replace(no_repeat_ngram_size=1),
    GREEDY_TOO.replace(block_trigrams=2.0, max_new_tokens=9),
    Decoding(max_new_tokens=6),
    Decoding(num_beams=3, num_return_sequences=2, max_new_tokens=5),
]
IDS = token_ids("15 16 17", "15 18 19")


@pytest.fixture
def smolvlm(folders):
    captioner = load_captioner(folders["smolvlm"], prompt="a photo of")
    captioner.policy.eval()
    return captioner, captioner.preprocess(photo_rows())


def slow(captioner, prefix):
    captioner.policy.mode = captioner.policy.mode._replace(prefix=prefix)


@pytest.mark.parametrize("decoding", DECODINGS, ids=Decoding.describe)
def test_the_models_own_generate_draws_the_tokens_that_our_decode_draws(
    smolvlm, decoding
):
    captioner, inputs = smolvlm
    count = decoding.num_samples
    length = decoding.max_new_tokens
    noise = sampling_noise(1, 0, NAMES, count, length) if count else None
    expected = captions_of(captioner, inputs, decoding, noise)
    slow(captioner, "none")
    state = torch.get_rng_state()
    assert torch.equal(captions_of(captioner, inputs, decoding, noise), expected)
    assert torch.equal(torch.get_rng_state(), state), "no random number but ours"


@pytest.mark.parametrize("prefix", ["rows", "none"])
def test_slower_ways_score_as_the_fastest_does(smolvlm, prefix):
    captioner, inputs = smolvlm
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[1] = False
    mask[0, 1, 2] = False
    expected = logits_of(captioner, inputs, IDS)
    slow(captioner, prefix)
    assert near(logits_of(captioner, inputs, IDS), expected)
    found = logits_of(captioner, inputs, IDS, mask)
    assert near(found, expected[mask])


def test_rows_that_cannot_be_joined_are_read_one_by_one(smolvlm):
    captioner, inputs = smolvlm
    policy = captioner.policy
    expected = logits_of(captioner, inputs, IDS)
    assert policy.joins(inputs)
    inputs["images"].value[1]["unlike_the_others"] = torch.zeros(1, 3)
    assert not policy.joins(inputs)
    policy.image_inputs |= {"unlike_the_others"}
    base = policy.model.base_model
    base.get_image_features = partial(
        lambda read, unlike_the_others=None, **options: read(**options),
        base.get_image_features,
    )
    assert near(logits_of(captioner, inputs, IDS), expected)


def test_a_verdict_is_remembered_for_the_same_model_alone(folders, monkeypatch):
    runs: list[Any] = []
    count = lambda result: runs.append(1) or result  # noqa: E731
    planted(monkeypatch, self_check._Check, "run", count)
    for _ in range(2):
        first = load_captioner(folders["llava"])
    assert len(runs) == 1
    assert first.policy.visual_names
    load_captioner(folders["llava"], dtype="bfloat16")
    load_captioner(folders["llava"], prompt="another prompt")
    assert len(runs) == 3


def test_a_resumed_run_keeps_its_mode(folders, monkeypatch):
    captioner = load_captioner(folders["llava"])
    notes = {train.MODE: ["rows", True, False]}
    monkeypatch.setattr(
        train,
        "read_state",
        lambda _: SimpleNamespace(notes=notes),
    )
    assert train.share_mode(SimpleNamespace(checkpoint="here"), captioner) == notes
    assert captioner.policy.mode == Mode("rows", True, False)


def test_parameters_that_no_caption_depends_on_are_frozen(tmp_path):
    captioner = tiny_vlm("llava", tmp_path / "llava")
    parameters = captioner.policy.model.named_parameters()
    frozen = [name for name, p in parameters if not p.requires_grad]
    assert frozen
    assert all("post_layernorm" in name for name in frozen)
