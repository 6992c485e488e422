"""What must hold for every vision-language model between sampling, scoring, decoding and saving."""

import copy
import itertools
import json
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.huggingface import SETTINGS
from rl_caption.captioners.loading import load_captioner
from rl_caption.captioners.policy import Nested
from rl_caption.captioners.tokens import caption_mask, forbid
from rl_caption.captioners.vlm_families import as_messages, with_images
from rl_caption.data.base import DataError
from rl_caption.data.loader import Collate
from rl_caption.runtime.errors import ConfigError
from rl_caption.scst.objectives import build_objective, token_logprobs
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import (
    captions_of,
    logits_of,
    near,
    sample_slowly,
    token_ids,
)
from tests.hf_models_for_tests import (
    PLAIN_PROMPTS,
    assert_close_gradients,
    assert_draws_and_scores,
    assert_gradients_of_one_at_a_time,
    assert_recomputing_changes_nothing,
    assert_texts_survive,
    gradients,
    tiny_hf_captioner,
)
from tests.steps_for_tests import batches_of, gradient, scst_task
from tests.zoo.families import VLM_FAMILIES, photo_rows, save_vlm, tiny_vlm

K = 3
L = 6
FAST = ("qwen2_5_vl", "paligemma", "git", "blip2")
NAMES = ["image-0", "image-1", "image-2"]
CAPTION_TYPES = {"paligemma": 1}
"""``model_type`` -> ``token_type_ids`` of captions in a pass over prompt and caption,
where they are not 0.
"""
IDS = token_ids("15 16 17 18", "15 16 19 19", "15 16 17 18", "15 16 10 10")


@pytest.fixture(
    scope="module",
    params=[
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in (*VLM_FAMILIES, *PLAIN_PROMPTS)
    ],
)
def case(request, tmp_path_factory):
    """A captioner; inputs of images of different sizes, two of them with prompts of
    their own; and of each alone.
    """
    return loaded(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """As ``case``, of a model with M-RoPE."""
    return loaded("qwen2_5_vl", tmp_path_factory)


def tower_of(captioner):
    towers = ("visual", "vision_tower", "vision_model", "image_encoder")
    modules = captioner.policy.model.named_modules()
    return next(module for name, module in modules if name.endswith(towers))


def loaded(family, tmp_path_factory):
    make = tiny_hf_captioner if family in PLAIN_PROMPTS else tiny_vlm
    captioner = make(
        family,
        tmp_path_factory.mktemp("model") / family,
        "a photo of",
    )
    alone = [captioner.preprocess([row]) for row in photo_rows()]
    return captioner, captioner.preprocess(photo_rows()), alone


def apart(one, other):
    """Largest difference of logits; 0.05 or more is a fault."""
    return (one - other).abs().max()


def whole_logits(captioner, alone, ids, caption_type=None):
    """Transformers' own forward pass over one prompt and a caption, without cache or
    positions: logits [T, V] from which the tokens are drawn, and those after the last.
    """
    if caption_type is None:
        caption_type = CAPTION_TYPES.get(captioner.family.name, 0)
    ids = torch.as_tensor(ids, dtype=torch.long)
    inputs = captioner.policy.arguments(alone)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], ids[None]], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
        margin = (0, len(ids))
        inputs[name] = nn.functional.pad(
            inputs[name],
            margin,
            value=caption_type,
        )
    output = captioner.policy.model(**inputs, use_cache=False)
    return output.logits[0, -len(ids) - 1 :]


@torch.no_grad()
def test_samples_are_transformers_own_and_teacher_forcing_gives_the_scores_they_were_sampled_with(
    case,
):
    captioner, inputs, alone = case
    noise = sampling_noise(2, 0, NAMES, 2, L)
    expected, scores = sample_slowly(
        captioner,
        {"image": torch.arange(3)},
        noise,
        1.3,
        lambda one, ids: whole_logits(captioner, alone[int(one["image"])], ids)[-1],
        ending=True,
    )
    for given in (inputs, captioner.image_states(captioner.policy, inputs)):
        assert_draws_and_scores(captioner, given, noise, expected, scores)


@torch.no_grad()
def test_greedy_captions_and_beams_are_those_of_transformers_processor_and_generate(
    case,
):
    captioner, inputs, _ = case
    rows = photo_rows()
    if not captioner.family.chat_prompts and captioner.family.name != "paligemma":
        for row in rows:
            row.pop("prompt", None)  # the processors of these models pad wrongly
        inputs = captioner.preprocess(rows)
    batch = processors_own(captioner, rows)
    given = captioner.policy.arguments(inputs)
    assert batch.keys() == given.keys()
    assert all(torch.equal(value, given[name]) for name, value in batch.items())
    settings = {
        "max_new_tokens": L,
        "eos_token_id": captioner.eos_token_id,
        "pad_token_id": captioner.pad_token_id,
    }
    model = AutoModelForImageTextToText.from_pretrained(captioner.name)
    model.generation_config = GenerationConfig()
    length = inputs["input_ids"].shape[1]
    greedy = GenerationConfig(suppress_tokens=list(captioner.forbidden), **settings)
    generated = model.generate(**batch, generation_config=greedy)[:, length:]
    ours = captions_of(captioner, inputs, Decoding(max_new_tokens=L))[:, 0]
    assert torch.equal(ours, generated[:, : ours.shape[1]])
    assert len(ours.unique(dim=0)) > 1
    # In a beam search Transformers keeps forbidden tokens out only after their share of the
    # probability is counted.
    text = model.get_submodule(captioner.family.text_model)
    text.register_forward_hook(
        lambda _, args, output: setattr(
            output, "logits", forbid(output.logits, captioner.forbidden)
        )
    )
    beams: dict[str, Any] = {
        "num_beams": 4,
        "num_return_sequences": 3,
        "length_penalty": 0.5,
    }
    scores = {"output_scores": True, "return_dict_in_generate": True}
    options = GenerationConfig(**settings, **beams, **scores)
    generated = model.generate(**batch, generation_config=options)
    decoding = Decoding(max_new_tokens=L, **beams)
    ours = captioner.generate_with_scores(captioner.policy, inputs, decoding)
    ids = ours.token_ids.flatten(0, 1)
    mask = caption_mask(ids, captioner.eos_token_id)
    theirs = generated.sequences[:, length : length + ids.shape[1]]
    assert torch.equal(ids[mask], theirs[mask])
    assert near(ours.scores.flatten(), generated.sequences_scores)


def processors_own(captioner, rows):
    """The batch that Transformers' processor makes of prompts and images."""
    name = captioner.family.name
    images = [row["image"] for row in rows]
    how = {"return_tensors": "pt"}
    if captioner.family.chat_prompts:
        processor = AutoProcessor.from_pretrained(captioner.name, padding_side="left")
        return processor.apply_chat_template(
            [asked(captioner, row) for row in rows],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            processor_kwargs={"padding": True},
            **how,
        )
    texts = [row.get("prompt") or captioner.prompt for row in rows]
    if name == "paligemma":
        processor = AutoProcessor.from_pretrained(captioner.name, padding_side="left")
        texts = ["<image>" + text for text in texts]
        images = [[image] for image in images]
        batch = processor(
            text=texts,
            images=images,
            padding=True,
            **how,
        )
        return {name: value for name, value in batch.items() if name != "labels"}
    processor = AutoProcessor.from_pretrained(captioner.name, backend="pil")
    batch = processor(text=texts, images=images, **how)
    if name == "git":  # which ends a text with [SEP]
        batch |= {key: batch[key][:, :-1] for key in ("input_ids", "attention_mask")}
        batch.pop("token_type_ids", None)
    return batch


def asked(captioner, row):
    return with_images(as_messages(captioner.prompt, row.get("prompt")), [row["image"]])


def test_captions_at_once_and_with_states_that_are_kept_have_the_gradient_of_one_at_a_time(
    case,
):
    captioner, inputs, alone = case
    policy = captioner.policy
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[:, 3, 3:] = False
    logprobs = []
    for image, caption in itertools.product(range(3), range(4)):
        ids = IDS[image, caption]
        logits = whole_logits(captioner, alone[image], ids)[:-1].clone()
        logits[:, list(captioner.forbidden)] = -torch.inf
        of_tokens = logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
        logprobs.append(of_tokens[mask[image, caption]])
    states = captioner.image_states(policy, inputs)
    given = any("pixel_values" in row for row in states["images"].value)
    assert given != policy.takes_features
    batches = [inputs, states]
    assert_gradients_of_one_at_a_time(
        captioner, batches, IDS, mask, torch.cat(logprobs)
    )


def test_recomputed_activations_and_dropout_that_is_off_change_nothing(case):
    captioner, inputs, _ = case
    assert_recomputing_changes_nothing(captioner, inputs, IDS, 0.6)


@torch.no_grad()
def test_an_image_is_encoded_once_for_all_captions_and_with_states_once_a_step(case):
    captioner, inputs, _ = copy.deepcopy(case)
    for name, parameter in captioner.policy.model.base_model.named_parameters():
        parameter.requires_grad_(name.startswith(("language_model", "text_model")))
    calls = []
    tower_of(captioner).register_forward_hook(lambda *_: calls.append(1))
    noise = sampling_noise(1, 0, NAMES, K, L)
    policy = captioner.policy
    again = 0 if policy.takes_features else 3
    sampling = Decoding(num_samples=K, with_greedy=True, max_new_tokens=L)
    states = captioner.image_states(policy, inputs)
    for given, expected in ((inputs, 3), (states, again)):
        calls.clear()
        tokens = captions_of(captioner, given, sampling, noise)
        logits_of(captioner, given, tokens)
        captions_of(
            captioner,
            given,
            Decoding(num_beams=3, max_new_tokens=L),
        )
        assert len(calls) == expected


@torch.no_grad()
def test_save_and_load_keep_every_bit_and_transformers_alone_loads_the_folder(
    case, tmp_path
):
    captioner, inputs, _ = case
    captioner.save_pretrained(captioner.policy, tmp_path)
    again = load_captioner(tmp_path)
    assert type(again) is type(captioner)
    again.policy.eval()
    assert json.loads((tmp_path / SETTINGS).read_text()) == {"prompt": "a photo of"}
    prepared = again.policy.arguments(again.preprocess(photo_rows()))
    given = captioner.policy.arguments(inputs)
    assert prepared.keys() == given.keys()
    assert all(torch.equal(value, given[name]) for name, value in prepared.items())
    scores = [logits_of(one, inputs, IDS) for one in (captioner, again)]
    assert torch.equal(*scores)
    _, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(AutoProcessor.from_pretrained(tmp_path)) is type(captioner.processor)
    one, other = map(GenerationConfig.from_pretrained, (captioner.name, tmp_path))
    assert one.to_dict() == other.to_dict()


def test_texts_survive_encoding_and_decoding(case):
    captioner, _, _ = case
    texts = ["a small dog", "two squares\non a  green field"]
    encoded = assert_texts_survive(captioner)
    starting = copy.copy(captioner)  # many tokenizers begin each text with a token
    starting.tokenizer = copy.deepcopy(captioner.tokenizer)
    (end,) = starting.tokenizer.convert_ids_to_tokens([captioner.eos_token_id])
    starting.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, captioner.eos_token_id)]
    )
    assert starting.encode(texts, 40) == encoded, "captions go on after the prompt"
    image = getattr(
        captioner.policy.config,
        "image_token_id",
        captioner.forbidden[0],
    )
    (special,) = captioner.tokenizer.convert_ids_to_tokens([image])
    (ids,) = captioner.encode([f"a {special} dog {end} dog"], 40)
    assert image in captioner.forbidden
    assert image not in ids
    assert ids.index(captioner.eos_token_id) == len(ids) - 1, "they are words"
    if captioner.family.chat_prompts:  # the answer as the template has it, with its end
        messages = asked(captioner, {"image": photo_rows()[0]["image"]})
        answer = {"role": "assistant", "content": [{"type": "text", "text": texts[0]}]}
        write = captioner.processor.apply_chat_template
        whole = write([*messages, answer], tokenize=False)
        start = write(messages, tokenize=False, add_generation_prompt=True)
        whole, start = captioner.processor.tokenizer([whole, start])["input_ids"]
        assert whole[len(start) : len(start) + len(encoded[0])] == encoded[0]


# The silent traps: what is left out changes log-probabilities and raises nothing.


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "omitted"),
    [
        ("qwen2_5_vl", "mm_token_type_ids"),
        ("gemma3", "token_type_ids"),
        ("paligemma", "token_type_ids"),
    ],
)
def test_inputs_that_models_silently_do_without_are_passed(family, omitted, tmp_path):
    captioner = tiny_vlm(family, tmp_path / family)
    alone = captioner.preprocess(photo_rows()[:1])
    ids = IDS[0, 0]
    without = {name: value for name, value in alone.items() if name != omitted}
    expected = whole_logits(captioner, alone, ids)
    assert apart(whole_logits(captioner, without, ids), expected) > 0.05
    inputs = captioner.preprocess(photo_rows())
    without = {name: value for name, value in inputs.items() if name != omitted}
    if family == "qwen2_5_vl":
        with pytest.raises(TypeError, match="mm_token_type_ids"):
            logits_of(captioner, without, IDS)
    else:
        scores = logits_of(captioner, inputs, IDS)
        assert apart(logits_of(captioner, without, IDS), scores) > 0.05


@torch.no_grad()
def test_tokens_of_a_caption_do_not_see_those_after_them(tmp_path):
    captioner = tiny_vlm("paligemma", tmp_path / "paligemma")
    alone = captioner.preprocess(photo_rows()[:1])
    ids = IDS[:1, :2]
    assert ids[0, 0, :2].equal(ids[0, 1, :2])
    one, other = (whole_logits(captioner, alone, own, caption_type=0) for own in ids[0])
    assert apart(one[:3], other[:3]) > 0.05, "the trap: with a prompt's type they do"
    scores = captioner.policy(**alone, token_ids=ids)[0]
    assert near(scores[0, :3], scores[1, :3], 1e-5)
    expected = whole_logits(captioner, alone, ids[0, 0])[:-1]
    assert near(scores[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_the_padding_of_an_image_is_not_read(family, tmp_path):
    captioner = tiny_vlm(family, tmp_path / family)
    alone = captioner.preprocess(photo_rows()[1:2])
    ids = IDS[:1, :1]
    (images,) = alone["images"].value
    # Processors of a batch make such masks of images of several sizes.
    images["pixel_attention_mask"][:, :, 16:] = 0
    expected = whole_logits(captioner, alone, ids[0, 0])[:-1]
    unmasked = {name: images[name] for name in images.keys() - {"pixel_attention_mask"}}
    without = {**alone, "images": Nested([unmasked])}
    silent = whole_logits(captioner, without, ids[0, 0])[:-1]
    assert apart(silent, expected) > 0.05
    captioner.policy.requires_grad_(False)
    states = captioner.image_states(captioner.policy, alone)
    assert "pooler_output" in states["features"].value
    for inputs in (alone, states):
        found = captioner.policy(**inputs, token_ids=ids)[0, 0]
        assert near(found, expected)


@torch.no_grad()
def test_nothing_depends_on_the_batch_that_the_module_saw_last(qwen):
    captioner, inputs, alone = qwen
    expected = logits_of(captioner, inputs, IDS)
    logits, state = captioner.policy(**inputs, max_tokens=L)
    captioner.policy.model(**captioner.policy.arguments(alone[1]))
    assert captioner.policy.model.model.rope_deltas.shape[0] == 1
    following = captioner.family.read(captioner.policy, state, IDS[:, 0, :1])[:, -1]
    both = torch.stack([logits, following], dim=1)
    assert near(both[:, :, 10:40], expected[:, 0, :2, 10:40])
    assert torch.equal(logits_of(captioner, inputs, IDS), expected)


def test_a_prompt_may_be_messages_with_the_image_at_its_place(qwen, tmp_path):
    captioner, _, _ = qwen
    content = [
        {"type": "text", "text": "a photo of"},
        {"type": "image"},
        {"type": "text", "text": "in one sentence"},
    ]
    prompt = [
        {"role": "system", "content": "a dog"},
        {"role": "user", "content": content},
    ]
    talking = load_captioner(captioner.name, prompt=prompt)
    rows = photo_rows()
    own, second, _ = captioner.tokenizer.batch_decode(
        talking.preprocess(rows)["input_ids"]
    )
    order = ["a dog", "a photo of", "<|image_pad|>", "in one sentence"]
    places = [own.index(text) for text in order]
    assert places == sorted(places)
    # A row's text stands in place of the user's last.
    assert rows[1]["prompt"] in second
    assert "in one sentence" not in second
    talking.save_pretrained(talking.policy, tmp_path)
    assert load_captioner(tmp_path).prompt == prompt


@torch.no_grad()
def test_frames_of_a_video_are_several_images(case):
    captioner, _, _ = case
    first, second, third = (row["image"] for row in photo_rows())
    rows = [
        photo_rows()[0] | {"image": frames}
        for frames in ([first, second], [second, third])
    ]
    if captioner.family.name in ("git", "blip-2", "instructblip"):
        with pytest.raises(DataError, match="image-0"):
            captioner.preprocess(rows)
        return
    inputs = captioner.preprocess(rows)
    scores = captioner.policy(**inputs, token_ids=IDS[:2])
    for number, row in enumerate(rows):
        alone = captioner.preprocess([row])
        expected = whole_logits(captioner, alone, IDS[number, 1])[:-1]
        assert near(scores[number, 1], expected)
    swapped = captioner.preprocess([rows[0] | {"image": [second, first]}])
    swapped = captioner.policy(**swapped, token_ids=IDS[:1])
    assert apart(swapped[0, 1], scores[0, 1]) > 0.01, "frames have an order"


def test_what_cannot_be_trained_exactly_is_refused_with_its_reason(qwen, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.augment"):
        Collate(qwen[0], augmentations=["horizontal"])
    folder = save_vlm("qwen3_vl", tmp_path / "qwen3_vl")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CaptionerError, match="chat template"):
        load_captioner(folder)


def test_a_step_is_the_same_in_micro_batches(qwen):
    captioner = copy.deepcopy(qwen[0])
    captioner.adapt([], None, False)
    task = scst_task(
        captioner,
        advantage="greedy",
        objective=build_objective("dico", {}),
        xe_weight=0.1,
        num_samples=3,
        ref_policy=copy.deepcopy(captioner.policy).eval().requires_grad_(False),
    )
    whole, split = (
        gradient(captioner, task, batches_of(captioner, 3, size, photo_rows()))
        for size in (3, 1)
    )
    assert_close_gradients(split, whole, 1e-3)


def frozen_vlm(captioner, **options):
    """The model of ``captioner`` with only its text trained, and a list to which every
    pass of its tower is added.
    """
    frozen = load_captioner(
        captioner.name, **{"cache_bytes": 2**20, "prompt": "a photo of", **options}
    )
    frozen.adapt([], None, False)
    for tensor in frozen.policy._visual_parameters():
        tensor.requires_grad_(False)
    passes = []
    tower_of(frozen).register_forward_hook(lambda *_: passes.append(1))
    return frozen, passes


def scored(captioner, rows):
    """Logits and gradients of a step on rows, through the passes of self-critical
    training and of cross-entropy.
    """
    states = captioner.image_states(captioner.policy, captioner.preprocess(rows))
    logits = logits_of(captioner, states, IDS)
    direct = logits_of(captioner, captioner.preprocess(rows), IDS)
    assert torch.equal(logits, direct)
    token_logprobs(direct, IDS).sum().backward()
    inputs = captioner.preprocess(rows)
    captions = captions_of(captioner, inputs, Decoding(max_new_tokens=L))
    return [direct.detach(), captions, *gradients(captioner.policy).values()]


def test_visual_tokens_of_a_frozen_tower_are_kept_and_change_no_bit(case):
    captioner, inputs, _ = case
    if not captioner.policy.takes_features:
        pytest.skip("takes no visual tokens")
    rows = photo_rows()
    plain, passes = frozen_vlm(captioner, cache_bytes=0)
    expected = scored(plain, rows)
    assert len(passes) == 9, "a row at a time, in each of the three passes"
    of_batch = logits_of(captioner, inputs, IDS).detach()
    assert near(expected[0], of_batch)
    cached, passes = frozen_vlm(captioner)
    for epoch in range(3):
        assert all(map(torch.equal, scored(cached, rows), expected))
        assert len(passes) == 3, f"epoch {epoch}: once for each image"
    used = 2**20 - cached.policy.kept.room
    other = rows[1]["image"].transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    mixed = [rows[0], rows[1] | {"image": other, "image_id": "new"}, rows[2]]
    expected_of_mixed = scored(plain, mixed)
    assert all(map(torch.equal, scored(cached, mixed), expected_of_mixed))
    assert len(passes) == 4, "two are kept, one is not"
    little, passes = frozen_vlm(captioner, cache_bytes=used - 1)
    for _ in range(2):
        assert all(map(torch.equal, scored(little, rows), expected))
    assert len(passes) == 3 + 5, "all but one fit"


@torch.no_grad()
def test_visual_tokens_in_memory_are_those_of_their_precision_and_weights(qwen):
    frozen, passes = frozen_vlm(qwen[0])
    rows = photo_rows()
    with torch.autocast("cpu", torch.bfloat16):
        states = frozen.image_states(frozen.policy, inputs := frozen.preprocess(rows))
    kinds = {leaf.dtype for leaf in tree_leaves(states["features"].value)}
    assert kinds == {torch.bfloat16}
    expected = frozen.image_states(frozen.policy, inputs)
    assert len(passes) == 6
    for tensor in frozen.policy._visual_parameters():
        tensor.mul_(1.5)
    after = frozen.image_states(frozen.policy, frozen.preprocess(rows))
    assert len(passes) == 9
    first, other = (
        one["features"].value[0]["pooler_output"][0] for one in (after, expected)
    )
    assert not torch.equal(first, other)
    reference = copy.deepcopy(frozen.policy)
    assert reference.kept is frozen.policy.kept


@pytest.mark.parametrize(
    "lora", [None, {"r": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": ["qkv"]}]
)
def test_visual_tokens_that_change_in_training_are_not_kept(qwen, lora):
    captioner = load_captioner(
        qwen[0].name,
        cache_bytes=2**20,
        prompt="a photo of",
    )
    captioner.adapt(
        [] if lora is None else None,
        lora,
        False,
    )
    assert captioner.preprocess(photo_rows())["images"].keys is None


def test_an_image_of_more_tokens_than_positions_is_refused_by_its_row(qwen):
    captioner = copy.copy(qwen[0])
    captioner.longest_prompt = 10
    with pytest.raises(DataError, match="image-0"):
        captioner.preprocess(photo_rows())
