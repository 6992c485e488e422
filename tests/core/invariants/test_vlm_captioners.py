"""What must hold for every vision-language model between sampling, scoring, decoding and saving."""

import copy
import itertools
import json
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.huggingface import SETTINGS
from rl_caption.captioners.loading import load_captioner
from rl_caption.captioners.packed import PromptLayer
from rl_caption.captioners.policy import Nested
from rl_caption.captioners.tokens import caption_mask, forbid
from rl_caption.captioners.vlm_families import as_messages, with_images
from rl_caption.data.base import DataError
from rl_caption.data.loader import Collate
from rl_caption.runtime.errors import ConfigError
from rl_caption.scst.objectives import build_objective, token_logprobs
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import sample_slowly
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

K, L = 3, 6
FAST = ("qwen2_5_vl", "paligemma", "git", "blip2")
NAMES = ["image-0", "image-1", "image-2"]
CAPTION_TYPES = {"paligemma": 1}
"""``model_type`` -> ``token_type_ids`` of captions in a pass over prompt and caption, where they
are not 0.
"""
IDS = torch.tensor(
    [[[15, 16, 17, 18], [15, 16, 19, 19], [15, 16, 17, 18], [15, 16, 10, 10]]]
).repeat(3, 1, 1)


@pytest.fixture(
    scope="module",
    params=[
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in (*VLM_FAMILIES, *PLAIN_PROMPTS)
    ],
)
def case(request, tmp_path_factory):
    """A captioner; inputs of images of different sizes, two of them with prompts of their own; and
    of each alone.
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
    captioner = make(family, tmp_path_factory.mktemp("model") / family, "a photo of")
    return (
        captioner,
        captioner.preprocess(photo_rows()),
        [captioner.preprocess([row]) for row in photo_rows()],
    )


def whole_logits(captioner, alone, ids, caption_type=None):
    """Transformers' own forward pass over one prompt and a caption, without cache or positions:
    logits [1 + T, V].
    """
    if caption_type is None:
        caption_type = CAPTION_TYPES.get(captioner.family.name, 0)
    alone = captioner.policy.arguments(alone)
    caption = torch.tensor([ids], dtype=torch.long)
    inputs = dict(alone, input_ids=torch.cat([alone["input_ids"], caption], 1))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.nn.functional.pad(
                inputs[name], (0, len(ids)), value=caption_type
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
    rows, processor = (
        photo_rows(),
        AutoProcessor.from_pretrained(captioner.name, padding_side="left"),
    )
    name = captioner.family.name
    if name == "paligemma":
        texts = ["<image>" + (row.get("prompt") or captioner.prompt) for row in rows]
        batch = processor(
            text=texts,
            images=[[row["image"]] for row in rows],
            return_tensors="pt",
            padding=True,
        )
    elif not captioner.family.chat_prompts:  # whose processors pad wrongly
        for row in rows:
            row.pop("prompt", None)
        inputs = captioner.preprocess(rows)
        processor = AutoProcessor.from_pretrained(captioner.name, backend="pil")
        batch = processor(
            text=[captioner.prompt] * 3,
            images=[row["image"] for row in rows],
            return_tensors="pt",
        )
        if name == "git":  # which ends a text with [SEP]
            batch = {key: batch[key][:, :-1] for key in inputs if key != "images"} | {
                "pixel_values": batch["pixel_values"]
            }
    else:
        asked = [
            with_images(
                as_messages(captioner.prompt, row.get("prompt")), [row["image"]]
            )
            for row in rows
        ]
        template = {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": True,
            "return_tensors": "pt",
        }
        batch = processor.apply_chat_template(
            asked, **template, processor_kwargs={"padding": True}
        )
    batch = {name: value for name, value in batch.items() if name != "labels"}
    ours = captioner.policy.arguments(inputs)
    assert batch.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in batch.items())
    forbidden = captioner.forbidden
    settings = {
        "do_sample": False,
        "suppress_tokens": list(forbidden),
        "eos_token_id": captioner.eos_token_id,
        "pad_token_id": captioner.pad_token_id,
    }
    model, length = (
        AutoModelForImageTextToText.from_pretrained(captioner.name),
        inputs["input_ids"].shape[1],
    )
    model.generation_config = GenerationConfig()
    generated = model.generate(
        **batch, generation_config=GenerationConfig(**settings, max_new_tokens=L)
    )[:, length:]
    ours = captioner.generate(captioner.policy, inputs, Decoding(max_new_tokens=L))[
        :, 0
    ]
    assert torch.equal(ours, generated[:, : ours.shape[1]])
    assert len({tuple(ids) for ids in ours.tolist()}) > 1
    # In a beam search Transformers keeps forbidden tokens out only after their share of the
    # probability is counted.
    model.get_submodule(captioner.family.text_model).register_forward_hook(
        lambda _, args, output: setattr(
            output, "logits", forbid(output.logits, forbidden)
        )
    )
    beams: dict[str, Any] = {
        "num_beams": 4,
        "num_return_sequences": 3,
        "length_penalty": 0.5,
        "max_new_tokens": L,
    }
    options = {
        **settings,
        **beams,
        "output_scores": True,
        "return_dict_in_generate": True,
        "suppress_tokens": None,
    }
    generated = model.generate(**batch, generation_config=GenerationConfig(**options))
    ours = captioner.generate_with_scores(captioner.policy, inputs, Decoding(**beams))
    ids = ours.token_ids.flatten(0, 1)
    mask = caption_mask(ids, captioner.eos_token_id)
    assert torch.equal(
        ids[mask], generated.sequences[:, length : length + ids.shape[1]][mask]
    )
    assert torch.allclose(ours.scores.flatten(), generated.sequences_scores, atol=1e-4)


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
        logits = whole_logits(captioner, alone[image], ids.tolist())[:-1].clone()
        logits[:, list(captioner.forbidden)] = -torch.inf
        logprobs.append(
            logits.log_softmax(-1)
            .gather(1, ids.unsqueeze(1))
            .squeeze(1)[mask[image, caption]]
        )
    states = captioner.image_states(policy, inputs)
    given = any("pixel_values" in row for row in states["images"].value)
    assert given != policy.takes_features
    assert_gradients_of_one_at_a_time(
        captioner, [inputs, states], IDS, mask, torch.cat(logprobs)
    )


def test_recomputed_activations_and_dropout_that_is_off_change_nothing(case):
    captioner, inputs, _ = case
    assert_recomputing_changes_nothing(captioner, inputs, IDS, 0.6)


@torch.no_grad()
def test_an_image_is_encoded_once_for_all_captions_and_with_states_once_a_step(case):
    captioner, inputs, _ = copy.deepcopy(case)
    for name, parameter in captioner.policy.model.base_model.named_parameters():
        parameter.requires_grad_(name.startswith(("language_model", "text_model")))
    tower = tower_of(captioner)
    calls = []
    hook = tower.register_forward_hook(lambda *_: calls.append(1))
    noise, policy = sampling_noise(1, 0, NAMES, K, L), captioner.policy
    again = 0 if policy.takes_features else 3
    for given, expected in (
        (inputs, 3),
        (captioner.image_states(policy, inputs), again),
    ):
        calls.clear()
        tokens = captioner.generate(
            policy,
            given,
            Decoding(num_samples=K, with_greedy=True, max_new_tokens=L),
            noise,
        )
        captioner.token_logits(policy, given, tokens)
        captioner.generate(policy, given, Decoding(num_beams=3, max_new_tokens=L), None)
        assert len(calls) == expected
    hook.remove()


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
    prepared = again.preprocess(photo_rows())
    prepared, given = (
        one.policy.arguments(x) for one, x in ((again, prepared), (captioner, inputs))
    )
    assert prepared.keys() == given.keys()
    assert all(torch.equal(value, given[name]) for name, value in prepared.items())
    scores = [one.token_logits(one.policy, inputs, IDS) for one in (captioner, again)]
    assert torch.equal(*scores)
    _, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(AutoProcessor.from_pretrained(tmp_path)) is type(captioner.processor)
    settings = [
        GenerationConfig.from_pretrained(folder).to_dict()
        for folder in (captioner.name, tmp_path)
    ]
    assert settings[0] == settings[1]


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
    image = getattr(captioner.policy.config, "image_token_id", captioner.forbidden[0])
    specials = captioner.tokenizer.convert_ids_to_tokens(
        [image, captioner.eos_token_id]
    )
    (ids,) = captioner.encode([f"a {' dog '.join(specials)} dog"], 40)
    assert image in captioner.forbidden
    assert image not in ids
    assert ids.index(captioner.eos_token_id) == len(ids) - 1, (
        "special tokens in a text are words"
    )
    if captioner.family.chat_prompts:  # the answer as the template has it, with its end
        asked = with_images(
            as_messages(captioner.prompt, None), [photo_rows()[0]["image"]]
        )
        answer = {"role": "assistant", "content": [{"type": "text", "text": texts[0]}]}
        tokenizer = captioner.processor.tokenizer
        whole = tokenizer(
            captioner.processor.apply_chat_template([*asked, answer], tokenize=False)
        )["input_ids"]
        start = captioner.processor.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        start = tokenizer(start)["input_ids"]
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
    alone, ids = captioner.preprocess(photo_rows()[:1]), IDS[0, 0].tolist()
    without = {name: value for name, value in alone.items() if name != omitted}
    assert (
        whole_logits(captioner, alone, ids) - whole_logits(captioner, without, ids)
    ).abs().max() > 0.05
    inputs = captioner.preprocess(photo_rows())
    scores = captioner.token_logits(captioner.policy, inputs, IDS)
    without = {name: value for name, value in inputs.items() if name != omitted}
    if family == "qwen2_5_vl":
        with pytest.raises(TypeError, match="mm_token_type_ids"):
            captioner.token_logits(captioner.policy, without, IDS)
    else:
        assert (
            captioner.token_logits(captioner.policy, without, IDS) - scores
        ).abs().max() > 0.05


@torch.no_grad()
def test_tokens_of_a_caption_do_not_see_those_after_them(tmp_path):
    captioner = tiny_vlm("paligemma", tmp_path / "paligemma")
    alone, ids = captioner.preprocess(photo_rows()[:1]), IDS[:1, :2]
    assert ids[0, 0, :2].equal(ids[0, 1, :2])
    as_prompt = [
        whole_logits(captioner, alone, caption.tolist(), caption_type=0)
        for caption in ids[0]
    ]
    assert (as_prompt[0][:3] - as_prompt[1][:3]).abs().max() > 0.05, (
        "the trap: with the type of a prompt they do"
    )
    scores = captioner.policy(**alone, token_ids=ids)[0]
    assert torch.allclose(scores[0, :3], scores[1, :3], atol=1e-5)
    assert torch.allclose(
        scores[0], whole_logits(captioner, alone, ids[0, 0].tolist())[:-1], atol=1e-4
    )


@torch.no_grad()
@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_the_padding_of_an_image_is_not_read(family, tmp_path):
    captioner = tiny_vlm(family, tmp_path / family)
    alone, ids = captioner.preprocess(photo_rows()[1:2]), IDS[:1, :1]
    (images,) = alone["images"].value
    images["pixel_attention_mask"][:, :, 16:] = (
        0  # processors of a batch make such masks of images of several sizes
    )
    expected = whole_logits(captioner, alone, ids[0, 0].tolist())[:-1]
    unmasked = {
        name: value for name, value in images.items() if name != "pixel_attention_mask"
    }
    without = {**alone, "images": Nested([unmasked])}
    assert (
        whole_logits(captioner, without, ids[0, 0].tolist())[:-1] - expected
    ).abs().max() > 0.05, "silently"
    captioner.policy.requires_grad_(False)
    states = captioner.image_states(captioner.policy, alone)
    assert "pooler_output" in states["features"].value
    for inputs in (alone, states):
        assert torch.allclose(
            captioner.policy(**inputs, token_ids=ids)[0, 0], expected, atol=1e-4
        )


@torch.no_grad()
def test_sizes_of_images_in_patches_are_passed(tmp_path):
    captioner = tiny_vlm("llava_onevision", tmp_path / "llava_onevision")
    alone, ids = captioner.preprocess(photo_rows()[1:2]), IDS[:1, :1]
    expected = whole_logits(captioner, alone, ids[0, 0].tolist())[:-1]
    (images,) = alone["images"].value
    swapped = {**images, "image_sizes": images["image_sizes"].flip(-1)}
    swapped = {**alone, "images": Nested([swapped])}
    with pytest.raises((ValueError, RuntimeError)):
        captioner.policy(**swapped, token_ids=ids)
    assert torch.allclose(
        captioner.policy(**alone, token_ids=ids)[0, 0], expected, atol=1e-4
    )


@torch.no_grad()
def test_nothing_depends_on_the_batch_that_the_module_saw_last(qwen):
    captioner, inputs, alone = qwen
    expected = captioner.token_logits(captioner.policy, inputs, IDS)
    logits, state = captioner.policy(**inputs, max_tokens=L)
    captioner.policy.model(**captioner.policy.arguments(alone[1]))
    assert captioner.policy.model.model.rope_deltas.shape[0] == 1
    following = captioner.family.read(captioner.policy, state, IDS[:, 0, :1])[:, -1]
    both = torch.stack([logits, following], dim=1)
    assert torch.allclose(both[:, :, 10:40], expected[:, 0, :2, 10:40], atol=1e-4)
    assert torch.equal(captioner.token_logits(captioner.policy, inputs, IDS), expected)


@torch.no_grad()
def test_positions_of_a_prompt_are_those_of_its_image_and_captions_follow_them(qwen):
    captioner, inputs, _ = qwen
    given = captioner.policy.arguments(inputs)
    positions = captioner.family.positions(captioner.policy.model, given)
    assert positions.shape == (3, *inputs["input_ids"].shape)
    assert not torch.equal(positions[0], positions[1]), "an image has rows and columns"
    _, state = captioner.policy(**inputs, max_tokens=L)
    lengths = inputs["attention_mask"].sum(-1)
    assert (state.position <= lengths).all()
    assert (state.position < lengths).any(), (
        "an image takes fewer positions than tokens"
    )


@torch.no_grad()
def test_the_padding_of_shorter_prompts_is_not_read(qwen):
    captioner, inputs, _ = qwen
    expected = captioner.token_logits(captioner.policy, inputs, IDS)
    padding = inputs["attention_mask"] == 0
    assert padding.any()
    other = dict(inputs, input_ids=inputs["input_ids"].masked_fill(padding, 20))
    assert torch.equal(captioner.token_logits(captioner.policy, other, IDS), expected)
    unmasked = dict(inputs, attention_mask=torch.ones_like(padding, dtype=torch.long))
    assert (
        captioner.token_logits(captioner.policy, unmasked, IDS) - expected
    ).abs().max() > 0.05


@torch.no_grad()
def test_captions_score_prompts_without_changing_what_was_read_of_them(qwen):
    captioner, inputs, _ = qwen
    policy = captioner.policy
    _, state = captioner.family.begin(policy, policy.arguments(inputs), PromptLayer)
    image, ids = torch.arange(3).repeat_interleave(2), IDS[:, :2].flatten(0, 1)
    first, again = (
        captioner.family.read(policy, state.of_captions(image), ids) for _ in range(2)
    )
    assert torch.equal(first, again)


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
    (own, *_), rows = talking.preprocess(photo_rows())["input_ids"], photo_rows()
    text = captioner.tokenizer.decode(own)
    assert (
        text.index("a dog")
        < text.index("a photo of")
        < text.index("<|image_pad|>")
        < text.index("in one sentence")
    )
    second = captioner.tokenizer.decode(talking.preprocess(rows)["input_ids"][1])
    assert rows[1]["prompt"] in second
    assert "in one sentence" not in second, (
        "a row's text stands in place of the user's last"
    )
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
        expected = whole_logits(
            captioner, captioner.preprocess([row]), IDS[number, 1].tolist()
        )[:-1]
        assert torch.allclose(scores[number, 1], expected, atol=1e-4)
    swapped = captioner.policy(
        **captioner.preprocess([rows[0] | {"image": [second, first]}]),
        token_ids=IDS[:1],
    )
    assert (swapped[0, 1] - scores[0, 1]).abs().max() > 0.01, "frames have an order"


def test_what_cannot_be_trained_exactly_is_refused_with_its_reason(qwen, tmp_path):
    captioner, _, _ = qwen
    with pytest.raises(ConfigError, match=r"data\.augment"):
        Collate(captioner, augmentations=["horizontal"])
    folder = save_vlm("qwen3_vl", tmp_path / "qwen3_vl")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": ["Qwen3VLModel"]}))
    with pytest.raises(CaptionerError, match="Qwen3VLModel"):
        load_captioner(folder)
    file.write_text(json.dumps(config))
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
    """The model of ``captioner`` with only its text trained, and a list to which every pass of its
    tower is added.
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


def scored(captioner, rows=None):
    """Logits and gradients of a step on rows, through the passes of self-critical training and of
    cross-entropy.
    """
    rows = photo_rows() if rows is None else rows
    policy, ids = captioner.policy, IDS[: len(rows)]
    states = captioner.image_states(policy, captioner.preprocess(rows))
    logits = captioner.token_logits(policy, states, ids)
    direct = captioner.token_logits(policy, captioner.preprocess(rows), ids)
    assert torch.equal(logits, direct)
    token_logprobs(direct, ids).sum().backward()
    captions = captioner.generate(
        policy, captioner.preprocess(rows), Decoding(max_new_tokens=L)
    )
    return [direct.detach(), captions, *gradients(policy).values()]


def test_visual_tokens_of_a_frozen_tower_are_kept_and_change_no_bit(case):
    captioner, inputs, _ = case
    if not captioner.policy.takes_features:
        pytest.skip("takes no visual tokens")
    plain, passes = frozen_vlm(captioner, cache_bytes=0)
    expected = scored(plain)
    assert len(passes) == 9, "a row at a time, in each of the three passes"
    assert torch.allclose(
        expected[0],
        captioner.token_logits(captioner.policy, inputs, IDS).detach(),
        atol=1e-4,
    )
    cached, passes = frozen_vlm(captioner)
    for epoch in range(3):
        assert all(
            torch.equal(one, other)
            for one, other in zip(scored(cached), expected, strict=True)
        )
        assert len(passes) == 3, f"epoch {epoch}: once for each image"
    used = 2**20 - cached.policy.kept.room
    rows = photo_rows()
    rows[1] = {
        **rows[1],
        "image": rows[1]["image"].transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        "image_id": "new",
    }
    mixed = [scored(one, rows) for one in (plain, cached)]
    assert all(torch.equal(one, other) for one, other in zip(*mixed, strict=True)), (
        "two are kept, one is not"
    )
    assert len(passes) == 4
    little, passes = frozen_vlm(captioner, cache_bytes=used - 1)
    for _ in range(2):
        assert all(
            torch.equal(one, other)
            for one, other in zip(scored(little), expected, strict=True)
        )
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
    captioner = load_captioner(qwen[0].name, cache_bytes=2**20, prompt="a photo of")
    captioner.adapt([] if lora is None else None, lora, False)
    assert captioner.preprocess(photo_rows())["images"].keys is None


def test_an_image_of_more_tokens_than_positions_is_refused_by_its_row(qwen):
    captioner = copy.copy(qwen[0])
    captioner.longest_prompt = 10
    with pytest.raises(DataError, match="image-0"):
        captioner.preprocess(photo_rows())
