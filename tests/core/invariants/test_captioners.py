"""What must hold between sampling, scoring, decoding and saving, whatever the weights."""

import json
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.cache_utils import Cache, DynamicCache

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.modeling import Attention
from rl_caption.captioners.packed import PreallocatedLayer
from rl_caption.captioners.tokens import caption_mask, sample_tokens, unique_prefixes
from rl_caption.captioners.transformer import TransformerCaptioner, build_vocabulary
from rl_caption.runtime.types import CaptionBatch
from rl_caption.scst.objectives import token_logprobs
from rl_caption.scst.rollout import sample_captions, sampling_noise
from tests.captioners_for_tests import (
    REFERENCES,
    region_inputs,
    sample_slowly,
    tiny_captioner,
    tiny_rows,
)
from tests.hf_models_for_tests import FAMILIES, tiny_hf_captioner
from tests.zoo.language_models import PROMPT


@pytest.fixture(params=["pixels", "regions"])
def case(request):
    captioner = tiny_captioner(input_kind=request.param)
    inputs = (
        captioner.preprocess(tiny_rows(3))
        if request.param == "pixels"
        else region_inputs()
    )
    return captioner, inputs


@pytest.fixture(scope="module", params=["pixels", "regions", *FAMILIES])
def any_case(request, tmp_path_factory):
    if request.param in FAMILIES:
        captioner = tiny_hf_captioner(
            request.param, tmp_path_factory.mktemp("model"), PROMPT
        )
    else:
        captioner = tiny_captioner(input_kind=request.param)
    return (
        captioner,
        region_inputs()
        if request.param == "regions"
        else captioner.preprocess(tiny_rows(3)),
    )


def test_a_prefix_stands_for_all_captions_that_begin_with_it():
    ids = [[[5, 6, 2, 0], [5, 2, 0, 0], [5, 6, 2, 0], [5, 6, 7, 2]], [[5, 6, 2, 0]] * 4]
    ids.append(
        [[5, 6, 7, 2], [8, 6, 7, 2], [5, 6, 7, 2], [5, 9, 7, 2]]
    )  # later words alike, earlier ones not
    ids = torch.tensor(ids)
    first, node = unique_prefixes(ids, caption_mask(ids, 2))
    expected = [
        [[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]],
        [[1, 1, 1, 0]] + [[0] * 4] * 3,
    ]
    expected.append([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1]])
    assert torch.equal(first, torch.tensor(expected, dtype=torch.bool))
    assert node[0].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert node[1].tolist() == [[4, 5, 6, 0]] * 4, "those of another image are others"
    assert node[2].tolist() == [
        [7, 8, 9, 10],
        [7, 11, 12, 13],
        [7, 8, 9, 10],
        [7, 8, 14, 15],
    ]


def test_each_rate_of_dropout_is_that_of_its_own_layers():
    policy = tiny_captioner(
        input_kind="regions", dropout=0.1, feature_dropout=0.5
    ).policy
    rates = {
        name: module.p
        for name, module in policy.named_modules()
        if isinstance(module, torch.nn.Dropout)
    }
    assert rates.pop("encoder.embedding.dropout") == 0.5
    assert len(rates) > 6
    assert set(rates.values()) == {0.1}
    assert {
        module.dropout for module in policy.modules() if isinstance(module, Attention)
    } == {0.1}


def test_dropout_is_drawn_wherever_the_transformer_has_it():
    """Of attention, whose dropout is no module of its own, too."""
    policy, inputs = (
        tiny_captioner(dropout=0.5).policy,
        tiny_captioner().preprocess(tiny_rows(1)),
    )
    drawn = Counter()
    for name, module in policy.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda *_, name=name: drawn.update([name]))
    ids = torch.tensor([[policy.config.bos_token_id, 5, 6]])
    policy.train()(**inputs, decoder_input_ids=ids)
    layers = [f"encoder.layers.0.{name}" for name in ("dropout", "dropout", "ffn.2")]
    layers += [
        f"layers.{n}.{name}"
        for n in (0, 1)
        for name in ("dropout", "dropout", "dropout", "ffn.2")
    ]
    assert drawn == Counter([*layers, "encoder.dropout", "embedding_dropout"])
    for module in policy.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    one, other = (policy(**inputs, decoder_input_ids=ids).logits for _ in range(2))
    assert not torch.allclose(one, other, atol=1e-3)


def test_embeddings_and_pixels_are_those_of_the_definition():
    captioner = tiny_captioner()
    policy, width = captioner.policy, captioner.policy.config.d_model
    tokens, embedded = torch.tensor([5, 6, 5, 7]), []
    policy.layers[0].register_forward_pre_hook(
        lambda layer, arguments: embedded.append(arguments[0])
    )
    inputs = captioner.preprocess(tiny_rows(1))
    policy(**inputs, decoder_input_ids=tokens[None])
    expected = (
        policy.token_embedding.weight[tokens] + policy.position_embedding.weight[:4]
    ) * width**0.5
    assert torch.allclose(embedded[0], expected)
    assert 0.01 < policy.encoder.embedding.position.std() < 0.03
    photo = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (40, 24, 3), dtype=np.uint8)
    )
    square = np.asarray(
        photo.resize((16, 16), Image.Resampling.BICUBIC), dtype=np.float64
    )
    (found,) = tiny_captioner().preprocess(
        [{"image_id": "a", "image": photo, "references": []}]
    )["pixel_values"]
    assert np.allclose(found.numpy(), square.transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)


def gradients(policy, logprobs):
    policy.zero_grad()
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    return logprobs.detach(), [p.grad.clone() for p in policy.parameters()]


def test_padding_and_shared_prefixes_are_not_computed_and_change_nothing(case):
    captioner, inputs = case
    policy = captioner.policy
    torch.manual_seed(3)
    ids = torch.randint(5, 12, (3, 4, 6))
    for caption, length in enumerate((1, 6, 3, 4)):
        ids[:, caption, length - 1 :] = 0
        ids[:, caption, length - 1] = 2 if length < 6 else 5
    mask = caption_mask(ids, 2)
    ids[:, 1, :3] = ids[:, 3, :3]
    ids[:, 2, :2] = ids[:, 3, :2]
    ids[1, 3] = ids[1, 1].where(mask[1, 3], 0)  # cut off where the other goes on
    computed = []
    hook = policy.lm_head.register_forward_hook(
        lambda module, args, out: computed.append(out.shape[:-1].numel())
    )
    everything = gradients(
        policy, token_logprobs(captioner.token_logits(policy, inputs, ids), ids)[mask]
    )
    packed = gradients(
        policy,
        token_logprobs(captioner.token_logits(policy, inputs, ids, mask), ids[mask]),
    )
    logits, row = captioner.prefix_logits(policy, inputs, ids, mask)
    shared = gradients(policy, token_logprobs(logits, ids[mask], 1.0, row))
    hook.remove()
    assert computed == [72, int(mask.sum()), int(unique_prefixes(ids, mask)[0].sum())]
    assert computed[2] < computed[1] == len(row)
    for found in (packed, shared):
        assert torch.allclose(found[0], everything[0], atol=1e-5)
        for one, other in zip(found[1], everything[1], strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.5, 0.7])
def test_a_row_is_decoded_for_each_different_prefix_that_has_not_ended_and_rescoring_gives_the_sampling_scores(
    case, monkeypatch, temperature
):
    captioner, inputs = case
    captioner.policy.norm.bias.add_(
        3 * captioner.policy.lm_head.weight[captioner.eos_token_id]
    )  # captions do end
    decoding = Decoding(
        num_samples=6, with_greedy=True, max_new_tokens=16, temperature=temperature
    )
    noise = sampling_noise(0, 0, ["a", "b", "c"], 6, 16)

    def decode(leaving):
        monkeypatch.setattr("rl_caption.captioners.decoding.COMPACT_AT", leaving)
        rows = []
        hook = captioner.policy.lm_head.register_forward_hook(
            lambda module, args, out: rows.append(len(out.squeeze(1)))
        )
        tokens = captioner.generate(captioner.policy, inputs, decoding, noise)
        hook.remove()
        return tokens, rows

    tokens, rows = decode(0.0)
    mask = caption_mask(tokens, captioner.eos_token_id)
    going_on = [3]
    for length in range(1, tokens.shape[-1]):
        of = [
            (image, tuple(ids))
            for image in range(3)
            for ids in tokens[image, mask[image, :, length], :length].tolist()
        ]
        going_on.append(len(set(of)))
    assert rows == going_on
    assert rows[1] < 21, "some captions begin alike"
    assert rows[-1] < max(rows), "and some end before others"

    def next_logits(one, ids):
        return captioner.policy(
            **one, decoder_input_ids=torch.tensor([[captioner.bos_token_id, *ids]])
        ).logits[0, -1]

    expected, scores = sample_slowly(captioner, inputs, noise, temperature, next_logits)
    samples, mask = tokens[:, :6], mask[:, :6]
    assert torch.equal(samples, expected[..., : tokens.shape[-1]])
    logits = captioner.token_logits(captioner.policy, inputs, samples)
    rescored = token_logprobs(logits, samples, temperature)
    assert torch.allclose(
        rescored[mask], scores[..., : tokens.shape[-1]][mask], atol=2e-5
    )
    fewer_moves, more_rows = decode(1 / 2)
    assert torch.equal(fewer_moves, tokens)
    assert sum(more_rows) > sum(rows)


def test_with_dropout_equal_beginnings_are_decoded_apart():
    captioner = tiny_captioner(dropout=0.5)
    inputs = captioner.preprocess(tiny_rows(3))
    decoding = Decoding(
        num_samples=40, with_greedy=False, temperature=1e-4, max_new_tokens=8
    )
    noise = sampling_noise(0, 0, ["a", "b", "c"], 40, 8)
    captioner.policy.train()
    noisy = captioner.generate(captioner.policy, inputs, decoding, noise)
    captioner.policy.eval()
    still = captioner.generate(captioner.policy, inputs, decoding, noise)
    different = [
        [len(image.unique(dim=0)) for image in tokens] for tokens in (noisy, still)
    ]
    assert different[1] == [1, 1, 1]
    assert min(different[0]) > 5


def test_a_cache_with_room_holds_what_transformers_own_holds():
    torch.manual_seed(0)
    roomy, plain = (
        Cache(layer_class_to_replicate=partial(PreallocatedLayer, 3)),
        DynamicCache(),
    )  # room for fewer tokens than come
    for tokens, chosen in ((2, None), (1, [0, 2, 3]), (1, None), (2, [1, 1, 0])):
        keys, values = torch.randn(
            2, 4 if roomy.get_seq_length() < 3 else 3, 2, tokens, 5
        )
        for one, other in zip(
            roomy.update(keys, values, 0), plain.update(keys, values, 0), strict=True
        ):
            assert torch.equal(one, other)
        if chosen is not None:
            for cache in (roomy, plain):
                cache.batch_select_indices(torch.tensor(chosen))


@torch.no_grad()
def test_greedy_is_the_arg_max_of_teacher_forcing_and_beams_find_captions_at_least_as_likely(
    any_case,
):
    captioner, inputs = any_case
    noise = sampling_noise(1, 0, ["a", "b", "c"], 2, 6)
    greedy = captioner.generate(
        captioner.policy,
        inputs,
        Decoding(num_samples=2, with_greedy=True, max_new_tokens=6),
        noise,
    )[:, 2:]
    decoding = Decoding(num_beams=8, max_new_tokens=6, length_penalty=0.0)
    beam = captioner.generate(captioner.policy, inputs, decoding, None)
    totals = []
    for ids in (greedy, beam):
        logits, mask = (
            captioner.token_logits(captioner.policy, inputs, ids),
            caption_mask(ids, captioner.eos_token_id),
        )
        totals.append((token_logprobs(logits, ids) * mask).sum(-1))
        if ids is greedy:
            assert torch.equal(logits.argmax(-1)[mask], ids[mask])
    assert (totals[1] >= totals[0] - 1e-4).all()
    alike = captioner.token_logits(
        captioner.policy, inputs, torch.tensor([[[5, 6, 7]]]).repeat(3, 1, 1)
    )
    assert (alike[0] - alike[1]).abs().max() > 1e-3, "the image matters"


def test_samples_of_an_image_do_not_depend_on_the_batch_around_it(any_case):
    captioner, inputs = any_case
    rows, decoding = (
        tiny_rows(3),
        Decoding(num_samples=4, with_greedy=True, max_new_tokens=6),
    )

    def texts(chosen):
        of_batch = torch.arange(3)[chosen]
        batch = CaptionBatch(
            rows[chosen], {name: tensor[of_batch] for name, tensor in inputs.items()}
        )
        rollout = sample_captions(
            captioner, captioner.policy, batch, decoding, seed=7, step=3
        )
        return dict(zip(batch.image_ids, rollout.texts, strict=True))

    whole = texts(slice(None))
    assert whole == {**texts(slice(1, None)), **texts(slice(1))}
    assert len({tuple(samples) for samples in whole.values()}) > 1


@torch.no_grad()
def test_sampling_follows_the_full_distribution():
    """Chi-squared of 50,000 draws against the softmax, over all tokens."""
    torch.manual_seed(0)
    logits = torch.randn(1, 30)
    noise = sampling_noise(3, 0, ["x"], 50_000, 1).squeeze(-1)
    counts = torch.bincount(sample_tokens(logits, noise, 1.3)[0], minlength=30)
    expected = (logits[0] / 1.3).softmax(-1) * 50_000
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 58.3, "99.9 % quantile of chi-squared with 29 degrees of freedom"


def test_noise_differs_by_seed_step_image_and_sample():
    noise = sampling_noise(0, 0, ["a", "b"], 2, 5)
    assert noise.dtype == torch.float32
    assert ((noise >= 0) & (noise < 1)).all()
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0, 0], noise[0, 1])
    assert not torch.equal(noise, sampling_noise(1, 0, ["a", "b"], 2, 5))
    assert not torch.equal(noise, sampling_noise(0, 1, ["a", "b"], 2, 5))
    assert torch.equal(noise.flip(0), sampling_noise(0, 0, ["b", "a"], 2, 5))


@torch.no_grad()
def test_padded_regions_change_nothing():
    captioner, inputs = tiny_captioner(input_kind="regions"), region_inputs()
    ids = torch.tensor([[[5, 6, 7]]]).repeat(3, 1, 1)
    noisy = dict(
        inputs,
        region_features=inputs["region_features"]
        + 100 * ~inputs["region_mask"].unsqueeze(-1),
    )
    plain = captioner.token_logits(captioner.policy, inputs, ids)
    assert torch.allclose(
        plain, captioner.token_logits(captioner.policy, noisy, ids), atol=1e-5
    )
    assert not torch.allclose(
        plain,
        captioner.token_logits(
            captioner.policy,
            {**noisy, "region_mask": torch.ones_like(inputs["region_mask"])},
            ids,
        ),
        atol=1e-3,
    )


@torch.no_grad()
def test_save_and_load_keep_every_bit(case, tmp_path):
    captioner, inputs = case
    captioner.save_pretrained(captioner.policy, tmp_path)
    loaded = TransformerCaptioner.from_pretrained(tmp_path)
    loaded.policy.eval()
    assert {p.name for p in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    ids = torch.tensor([[[5, 6, 7], [8, 2, 0]]]).repeat(3, 1, 1)
    before = captioner.token_logits(captioner.policy, inputs, ids)
    assert torch.equal(before, loaded.token_logits(loaded.policy, inputs, ids))
    assert loaded.encode(["A red dog!"], 9) == captioner.encode(["A red dog!"], 9)


def test_words_survive_encoding_and_decoding_which_joins_them_as_the_tokenizer_does():
    captioner = tiny_captioner()
    (ids,) = captioner.encode(["A red circle, on a grey field."], 16)
    assert captioner.decode(torch.tensor([ids])) == ["a red circle on a grey field"]
    assert ids[-1] == captioner.eos_token_id
    (cut,) = captioner.encode([REFERENCES[0][0]], 4)
    assert len(cut) == 4
    assert captioner.eos_token_id not in cut
    ids = torch.randint(
        0, len(captioner.tokenizer), (50, 9), generator=torch.Generator().manual_seed(0)
    )
    expected = captioner.tokenizer.batch_decode(
        ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert captioner.decode(ids) == expected


def test_names_of_special_tokens_in_references_are_no_further_words():
    tokenizer = build_vocabulary([["a <unk> dog <eos>", "a <pad> cat"]], min_count=1)
    assert sorted(tokenizer.get_vocab().values()) == list(range(7))
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4]) == [
        "<pad>",
        "<bos>",
        "<eos>",
        "<unk>",
        "a",
    ]
    assert tokenizer("a <unk> dog", add_special_tokens=False)["input_ids"] == [4, 3, 6]
    with pytest.raises(ValueError, match="1 times"):
        build_vocabulary([["<unk>"]], min_count=1)


def test_a_configuration_that_lacks_a_key_is_refused(tmp_path):
    captioner = tiny_captioner(image_size=24)
    captioner.save_pretrained(captioner.policy, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("d_model")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CaptionerError, match="d_model"):
        TransformerCaptioner.from_pretrained(tmp_path)
