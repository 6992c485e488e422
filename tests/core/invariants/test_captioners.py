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
from rl_caption.captioners.decoding import select_rows
from rl_caption.captioners.modeling import Attention
from rl_caption.captioners.packed import PreallocatedLayer
from rl_caption.captioners.tokens import caption_mask, unique_prefixes
from rl_caption.captioners.transformer import TransformerCaptioner, build_vocabulary
from rl_caption.runtime.types import CaptionBatch
from rl_caption.scst.objectives import token_logprobs
from rl_caption.scst.rollout import sample_captions, sampling_noise
from tests.captioners_for_tests import (
    NAMES,
    REFERENCES,
    captions_of,
    logits_of,
    near,
    region_inputs,
    sample_slowly,
    tiny_captioner,
    tiny_rows,
    token_ids,
)
from tests.hf_models_for_tests import FAMILIES, tiny_hf_captioner
from tests.zoo.language_models import PROMPT


def tiny_case(kind):
    captioner = tiny_captioner(input_kind=kind)
    if kind == "regions":
        return captioner, region_inputs()
    return captioner, captioner.preprocess(tiny_rows(3))


@pytest.fixture(params=["pixels", "regions"])
def case(request):
    return tiny_case(request.param)


@pytest.fixture(scope="module", params=["pixels", "regions", *FAMILIES])
def any_case(request, tmp_path_factory):
    if request.param not in FAMILIES:
        return tiny_case(request.param)
    folder = tmp_path_factory.mktemp("model")
    captioner = tiny_hf_captioner(request.param, folder, PROMPT)
    return captioner, captioner.preprocess(tiny_rows(3))


def test_a_prefix_stands_for_all_captions_that_begin_with_it():
    images = [
        token_ids("5 6 2 0", "5 2 0 0", "5 6 2 0", "5 6 7 2", images=1),
        token_ids("5 6 2 0", "5 6 2 0", "5 6 2 0", "5 6 2 0", images=1),
        # Later words alike, earlier ones not.
        token_ids("5 6 7 2", "8 6 7 2", "5 6 7 2", "5 9 7 2", images=1),
    ]
    expected = [
        token_ids("1 1 1 0", "0 0 0 0", "0 0 0 0", "0 0 0 1", images=1),
        token_ids("1 1 1 0", "0 0 0 0", "0 0 0 0", "0 0 0 0", images=1),
        token_ids("1 1 1 1", "0 1 1 1", "0 0 0 0", "0 0 1 1", images=1),
    ]
    nodes = [  # those of another image are others
        token_ids("0 1 2 0", "0 1 0 0", "0 1 2 0", "0 1 2 3", images=1),
        token_ids("4 5 6 0", "4 5 6 0", "4 5 6 0", "4 5 6 0", images=1),
        token_ids("7 8 9 10", "7 11 12 13", "7 8 9 10", "7 8 14 15", images=1),
    ]
    ids = torch.cat(images)
    first, node = unique_prefixes(ids, caption_mask(ids, 2))
    assert torch.equal(first.long(), torch.cat(expected))
    assert torch.equal(node, torch.cat(nodes))


def test_each_rate_of_dropout_is_that_of_its_own_layers():
    captioner = tiny_captioner(input_kind="regions", dropout=0.1, feature_dropout=0.5)
    modules = dict(captioner.policy.named_modules())
    assert modules.pop("encoder.embedding.dropout").p == 0.5
    kinds = (torch.nn.Dropout, Attention)
    layers = [layer for layer in modules.values() if isinstance(layer, kinds)]
    assert len(layers) > 11
    assert {getattr(layer, "p", None) or layer.dropout for layer in layers} == {0.1}


def test_dropout_is_drawn_wherever_the_transformer_has_it():
    """Of attention, whose dropout is no module of its own, too."""
    captioner = tiny_captioner(dropout=0.5)
    policy = captioner.policy
    inputs = captioner.preprocess(tiny_rows(1))
    modules = dict(policy.named_modules())
    dropouts = {n: m for n, m in modules.items() if isinstance(m, torch.nn.Dropout)}
    drawn = Counter()
    for name, module in dropouts.items():
        module.register_forward_hook(lambda *_, name=name: drawn.update([name]))
    ids = torch.tensor([[policy.config.bos_token_id, 5, 6]])
    policy.train()(**inputs, decoder_input_ids=ids)
    times = {
        "encoder.dropout": 1,
        "embedding_dropout": 1,
        "encoder.layers.0.dropout": 2,
    }
    times |= {f"layers.{n}.dropout": 3 for n in (0, 1)}
    layers = ("encoder.layers.0", "layers.0", "layers.1")
    assert drawn == Counter({**times, **{f"{name}.ffn.2": 1 for name in layers}})
    for module in dropouts.values():
        module.p = 0.0
    one, other = (policy(**inputs, decoder_input_ids=ids).logits for _ in range(2))
    assert not near(one, other, 1e-3)


def test_embeddings_and_pixels_are_those_of_the_definition():
    captioner = tiny_captioner()
    policy = captioner.policy
    tokens = torch.tensor([5, 6, 5, 7])
    embedded = []
    policy.layers[0].register_forward_pre_hook(
        lambda layer, arguments: embedded.append(arguments[0])
    )
    policy(**captioner.preprocess(tiny_rows(1)), decoder_input_ids=tokens[None])
    words = policy.token_embedding.weight[tokens]
    places = policy.position_embedding.weight[:4]
    expected = (words + places) * policy.config.d_model**0.5
    assert torch.allclose(embedded[0], expected)
    assert 0.01 < policy.encoder.embedding.position.std() < 0.03
    pixels = np.random.default_rng(0).integers(
        0,
        256,
        (40, 24, 3),
        dtype=np.uint8,
    )
    photo = Image.fromarray(pixels)
    square = np.asarray(photo.resize((16, 16), Image.Resampling.BICUBIC), np.float64)
    row = {"image_id": "a", "image": photo, "references": []}
    found = captioner.preprocess([row])["pixel_values"][0].numpy()
    assert np.allclose(found, square.transpose(2, 0, 1) / 127.5 - 1, atol=1e-6)


def gradients(policy, logprobs):
    policy.zero_grad()
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    return logprobs.detach(), [p.grad.clone() for p in policy.parameters()]


def test_padding_and_shared_prefixes_are_not_computed_and_change_nothing(case):
    captioner, inputs = case
    policy = captioner.policy
    torch.manual_seed(3)
    ids = torch.randint(
        5,
        12,
        (3, 4, 6),
    )
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
    everything = logits_of(captioner, inputs, ids)
    everything = gradients(policy, token_logprobs(everything, ids)[mask])
    packed = logits_of(captioner, inputs, ids, mask)
    packed = gradients(policy, token_logprobs(packed, ids[mask]))
    logits, row = captioner.prefix_logits(policy, inputs, ids, mask)
    shared = gradients(policy, token_logprobs(logits, ids[mask], 1.0, row))
    hook.remove()
    assert computed == [72, int(mask.sum()), int(unique_prefixes(ids, mask)[0].sum())]
    assert computed[2] < computed[1] == len(row)
    for found in (packed, shared):
        assert near(found[0], everything[0], 1e-5)
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
    noise = sampling_noise(0, 0, NAMES, 6, 16)

    def decode(leaving):
        monkeypatch.setattr("rl_caption.captioners.decoding.COMPACT_AT", leaving)
        rows = []
        hook = captioner.policy.lm_head.register_forward_hook(
            lambda module, args, out: rows.append(len(out.squeeze(1)))
        )
        tokens = captions_of(captioner, inputs, decoding, noise)
        hook.remove()
        return tokens, rows

    tokens, rows = decode(0.0)
    mask = caption_mask(tokens, captioner.eos_token_id)
    going_on = [3]
    for length in range(1, tokens.shape[-1]):
        prefixes = set()
        for image in range(3):
            open_ones = tokens[image, mask[image, :, length], :length]
            prefixes |= {(image, *ids) for ids in open_ones.tolist()}
        going_on.append(len(prefixes))
    assert rows == going_on
    assert rows[1] < 21, "some captions begin alike"
    assert rows[-1] < max(rows), "and some end before others"

    def next_logits(one, ids):
        ids = torch.tensor([[captioner.bos_token_id, *ids]])
        return captioner.policy(**one, decoder_input_ids=ids).logits[0, -1]

    expected, scores = sample_slowly(captioner, inputs, noise, temperature, next_logits)
    samples, mask = tokens[:, :6], mask[:, :6]
    length = tokens.shape[-1]
    assert torch.equal(samples, expected[..., :length])
    logits = logits_of(captioner, inputs, samples)
    rescored = token_logprobs(logits, samples, temperature)[mask]
    assert near(rescored, scores[..., :length][mask], 2e-5)
    fewer_moves, more_rows = decode(1 / 2)
    assert torch.equal(fewer_moves, tokens)
    assert sum(more_rows) > sum(rows)


def test_with_dropout_equal_beginnings_are_decoded_apart():
    captioner = tiny_captioner(dropout=0.5)
    inputs = captioner.preprocess(tiny_rows(3))
    decoding = Decoding(num_samples=40, temperature=1e-4, max_new_tokens=8)
    noise = sampling_noise(0, 0, NAMES, 40, 8)
    still = captions_of(captioner, inputs, decoding, noise)
    captioner.policy.train()
    noisy = captions_of(captioner, inputs, decoding, noise)
    assert [len(image.unique(dim=0)) for image in still] == [1, 1, 1]
    assert min(len(image.unique(dim=0)) for image in noisy) > 5


def test_a_cache_with_room_holds_what_transformers_own_holds():
    """Keys and values may differ in width, and more tokens come than there is room for."""
    torch.manual_seed(0)
    roomy = Cache(layer_class_to_replicate=partial(PreallocatedLayer, 3))
    plain = DynamicCache()
    rows = 4
    for tokens, chosen in ((2, None), (1, [0, 2, 3]), (1, None), (2, [1, 1, 0])):
        added = [torch.randn(rows, 2, tokens, width) for width in (5, 3)]
        found, expected = (cache.update(*added, 0) for cache in (roomy, plain))
        assert all(map(torch.equal, found, expected))
        if chosen is not None:
            rows = len(chosen)
            for cache in (roomy, plain):
                cache.batch_select_indices(torch.tensor(chosen))


@torch.no_grad()
def test_greedy_is_the_arg_max_of_teacher_forcing_and_beams_find_captions_at_least_as_likely(
    any_case,
):
    captioner, inputs = any_case
    noise = sampling_noise(1, 0, NAMES, 2, 6)
    sampling = Decoding(num_samples=2, with_greedy=True, max_new_tokens=6)
    beams = Decoding(num_beams=8, max_new_tokens=6, length_penalty=0.0)
    greedy = captions_of(captioner, inputs, sampling, noise)[:, 2:]
    totals = []
    for ids in (greedy, captions_of(captioner, inputs, beams)):
        logits = logits_of(captioner, inputs, ids)
        mask = caption_mask(ids, captioner.eos_token_id)
        totals.append((token_logprobs(logits, ids) * mask).sum(-1))
        if ids is greedy:
            assert torch.equal(logits.argmax(-1)[mask], ids[mask])
    assert (totals[1] >= totals[0] - 1e-4).all()
    alike = logits_of(captioner, inputs, token_ids("5 6 7"))
    assert (alike[0] - alike[1]).abs().max() > 1e-3, "the image matters"


def test_samples_of_an_image_do_not_depend_on_the_batch_around_it(any_case):
    captioner, inputs = any_case
    rows = tiny_rows(3)
    decoding = Decoding(num_samples=4, with_greedy=True, max_new_tokens=6)

    def texts(*chosen):
        some = select_rows(inputs, torch.tensor(chosen))
        batch = CaptionBatch([rows[image] for image in chosen], some)
        rollout = sample_captions(
            captioner, captioner.policy, batch, decoding, seed=7, step=3
        )
        ended = (rollout.token_ids == captioner.eos_token_id).any(-1)
        assert torch.equal(rollout.finished, ended)
        return dict(zip(batch.image_ids, rollout.texts, strict=True))

    whole = texts(0, 1, 2)
    assert whole == {**texts(1, 2), **texts(0)}
    assert len({tuple(samples) for samples in whole.values()}) > 1


def test_noise_differs_by_seed_step_image_and_sample():
    noise = sampling_noise(
        0,
        0,
        ["a", "b"],
        2,
        5,
    )
    assert noise.dtype == torch.float32
    assert ((noise >= 0) & (noise < 1)).all()
    others = [sampling_noise(*key, ["a", "b"], 2, 5) for key in ((1, 0), (0, 1))]
    rows = [row for one in (noise, *others) for row in one.flatten(0, 1).tolist()]
    assert len({tuple(row) for row in rows}) == 12
    assert torch.equal(noise.flip(0), sampling_noise(0, 0, ["b", "a"], 2, 5))


@torch.no_grad()
def test_padded_regions_change_nothing():
    captioner, inputs = tiny_case("regions")
    ids = token_ids("5 6 7")
    mask = inputs["region_mask"]
    features = inputs["region_features"] + 100 * ~mask.unsqueeze(-1)
    noisy = {"region_features": features, "region_mask": mask}
    plain = logits_of(captioner, inputs, ids)
    assert near(plain, logits_of(captioner, noisy, ids), 1e-5)
    noisy["region_mask"] = torch.ones_like(mask)
    assert not near(plain, logits_of(captioner, noisy, ids), 1e-3)


@torch.no_grad()
def test_save_and_load_keep_every_bit(case, tmp_path):
    captioner, inputs = case
    captioner.save_pretrained(captioner.policy, tmp_path)
    loaded = TransformerCaptioner.from_pretrained(tmp_path)
    loaded.policy.eval()
    ids = token_ids("5 6 7", "8 2 0")
    before = logits_of(captioner, inputs, ids)
    assert torch.equal(before, logits_of(loaded, inputs, ids))
    assert loaded.encode(["A red dog!"], 9) == captioner.encode(["A red dog!"], 9)


def test_words_survive_encoding_and_decoding_which_joins_them_as_the_tokenizer_does():
    captioner = tiny_captioner()
    (ids,) = captioner.encode(["A red circle, on a grey field."], 16)
    assert captioner.decode(torch.tensor([ids])) == ["a red circle on a grey field"]
    assert ids[-1] == captioner.eos_token_id
    (cut,) = captioner.encode([REFERENCES[0][0]], 4)
    assert len(cut) == 4
    assert captioner.eos_token_id not in cut
    ids = torch.arange(len(captioner.tokenizer)).unsqueeze(0)
    expected = captioner.tokenizer.batch_decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert captioner.decode(ids) == expected


def test_names_of_special_tokens_in_references_are_no_further_words():
    tokenizer = build_vocabulary([["a <unk> dog <eos>", "a <pad> cat"]], min_count=1)
    assert sorted(tokenizer.get_vocab().values()) == list(range(7))
    first = tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 4])
    assert first == ["<pad>", "<bos>", "<eos>", "<unk>", "a"]
    assert tokenizer("a <unk> dog", add_special_tokens=False)["input_ids"] == [4, 3, 6]


def test_a_configuration_that_lacks_a_key_is_refused(tmp_path):
    captioner = tiny_captioner(image_size=24)
    captioner.save_pretrained(captioner.policy, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("d_model")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CaptionerError, match="d_model"):
        TransformerCaptioner.from_pretrained(tmp_path)
