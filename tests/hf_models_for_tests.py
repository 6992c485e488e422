"""Tiny models of Transformers with random weights, saved and loaded as real ones are:
folder in, captioner out.
"""

import copy
import shutil

import torch
from huggingface_hub import constants
from transformers import (
    AutoTokenizer,
)

from rl_caption.captioners.config import Decoding
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.tokens import caption_mask
from rl_caption.runtime.engines import dropout_off
from rl_caption.scst.objectives import token_logprobs
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import NAMES, captions_of, logits_of, near
from tests.zoo import encoder_decoders

ENCODER_DECODERS = ("blip", "vit_gpt2", "vit_bert", "florence2")
PLAIN_PROMPTS = ("git", "blip2", "instructblip")
FAMILIES = (*ENCODER_DECODERS, *PLAIN_PROMPTS)


def save_model(family, folder, seed=0):
    """Write the tiny model of a family, also of vision-language models, to ``folder``;
    return the folder.
    """
    if family not in FAMILIES:
        from tests.zoo.families import save_vlm

        return save_vlm(family, folder, seed)
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    getattr(encoder_decoders, f"save_{family}")(folder)
    return folder


def put_on_hub(name, model, hub, monkeypatch):
    """Put a model into a cache of the hub under ``name``, and go offline."""
    cache = hub / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, cache / "snapshots" / "0123abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def tiny_hf_captioner(family, folder, prompt="", seed=0):
    """The family's tiny model, saved and loaded, without dropout."""
    captioner = HuggingFaceCaptioner.from_pretrained(
        save_model(family, folder, seed), prompt=prompt
    )
    captioner.policy.eval()
    return captioner


def assert_close_gradients(found, expected, tolerance=1e-4):
    """Assert equal gradients, relative to each parameter's largest. The gradient of a
    bias of keys is only rounding error.
    """
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for value in expected.values())
    for name, value in expected.items():
        scale = max(value.abs().max(), 1e-2 * largest)
        assert (found[name] - value).abs().max() <= tolerance * scale, name


def with_template(folder, template):
    """Give a saved language model's tokenizer a chat template; return the folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def gradients(policy):
    parameters = policy.named_parameters()
    found = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
    policy.zero_grad()
    return found


def assert_recomputing_changes_nothing(captioner, inputs, ids, share):
    """Assert that captions, scores and gradients without dropout stay the same in
    training mode and with recomputed activations, and that recomputing keeps at most
    ``share`` of the tensors.
    """
    plain = copy.deepcopy(captioner)
    plain.policy.zero_grad()
    plain.adapt(
        frozen=[],
        lora=None,
        checkpointed=False,
    )
    saving = copy.deepcopy(plain)
    saving.adapt(
        frozen=[],
        lora=None,
        checkpointed=True,
    )
    saving = copy.deepcopy(saving)  # as the reference policy is
    assert plain.policy.state_dict().keys() == saving.policy.state_dict().keys()
    noise = sampling_noise(1, 0, NAMES, 2, 6)
    decoding = Decoding(num_samples=2, with_greedy=True, max_new_tokens=6)

    def measured(one):
        kept = []
        samples = captions_of(one, inputs, decoding, noise)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        ):
            logits = logits_of(one, inputs, ids)
            token_logprobs(logits, ids).sum().backward()
        return samples, logits.detach(), gradients(one.policy), len(kept)

    samples, logits, gradient, count = measured(plain)
    for changed in (plain, saving):
        for module in changed.policy.train().modules():
            if isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.5
        with dropout_off(changed.policy):
            found = measured(changed)
        assert torch.equal(found[0], samples)
        assert near(found[1], logits)
        assert_close_gradients(found[2], gradient, 1e-3)
        with torch.no_grad():
            noisy = logits_of(changed, inputs, ids)
        assert not near(noisy, logits, 1e-2), "dropout"
    assert found[3] < count * share, "the layers' activations are not kept"


def assert_texts_survive(captioner):
    """Assert that encoded texts end with EOS and are decoded to themselves; return
    their ids.
    """
    texts = ["a small dog", "two squares\non a  green field"]
    encoded = captioner.encode(texts, 40)
    end = captioner.eos_token_id
    assert all(ids[-1] == end and end not in ids[:-1] for ids in encoded)
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in encoded],
        batch_first=True,
        padding_value=captioner.pad_token_id,
    )
    assert captioner.decode(padded) == ["a small dog", "two squares on a green field"]
    assert captioner.encode(texts[:1], 2) == [encoded[0][:2]]
    return encoded


def assert_draws_and_scores(
    captioner,
    given,
    noise,
    expected,
    scores,
):
    """Assert that two samples at temperature 1.3 are ``expected``, and that teacher
    forcing gives their ``scores``.
    """
    limit = noise.shape[-1]
    decoding = Decoding(
        num_samples=2, with_greedy=True, temperature=1.3, max_new_tokens=limit
    )
    tokens = captions_of(captioner, given, decoding, noise)[:, :2]
    length = tokens.shape[-1]
    assert torch.equal(tokens, expected[..., :length])
    mask = caption_mask(tokens, captioner.eos_token_id)
    assert mask[:, 0].sum(-1).tolist() == [1, 2, 3], "of different lengths in one batch"
    assert (tokens[~mask] == captioner.pad_token_id).all()
    logits = logits_of(captioner, given, tokens)
    rescored = token_logprobs(logits, tokens, 1.3)[mask]
    assert near(rescored, scores[..., :length][mask])
    some = logits_of(captioner, given, tokens, mask)
    assert near(token_logprobs(some, tokens[mask], 1.3), rescored)
    assert not set(tokens[mask].tolist()) & {*captioner.forbidden}


def assert_gradients_of_one_at_a_time(
    captioner,
    batches,
    ids,
    mask,
    expected,
):
    """Assert that ``expected``, log-probabilities of captions one by one, and their
    gradient equal the values of ``batches``, and of shared prefixes.
    """
    policy = captioner.policy
    weights = torch.linspace(
        -1,
        2,
        int(mask.sum()),
    )
    policy.zero_grad()
    (expected * weights).sum().backward()
    gradient = gradients(policy)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained <= gradient.keys(), (
        "processes that train together would wait for the missing gradients"
    )
    found = [(logits_of(captioner, one, ids, mask), None) for one in batches]
    shared, row = captioner.prefix_logits(
        policy,
        batches[0],
        ids,
        mask,
    )
    assert len(shared) < len(expected)
    for logits, rows in (*found, (shared, row)):
        logprobs = token_logprobs(logits, ids[mask], 1.0, rows)
        assert near(logprobs, expected)
        (logprobs * weights).sum().backward()
        assert_close_gradients(gradients(policy), gradient, 2e-3)
