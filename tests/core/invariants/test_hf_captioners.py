"""What must hold for every family of Transformers' captioners between sampling, scoring, decoding
and saving.
"""

import copy
import itertools
import json

import pytest
import torch
import transformers
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
)

from rewards.text.tokenize import tokenize
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.huggingface import SETTINGS, HuggingFaceCaptioner
from rl_caption.captioners.loading import load_captioner
from rl_caption.data.base import DataError
from rl_caption.scst.objectives import token_logprobs
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import sample_slowly, tiny_captioner, tiny_rows
from tests.hf_models_for_tests import (
    ENCODER_DECODERS,
    assert_draws_and_scores,
    assert_gradients_of_one_at_a_time,
    assert_recomputing_changes_nothing,
    assert_texts_survive,
    gradients,
    tiny_hf_captioner,
)
from tests.zoo.language_models import PROMPT

K, L = 4, 6
SLOW = ("florence2",)
PROMPTED = [
    pytest.param(
        (family, prompt),
        id=f"{family}-{prompt or 'plain'}",
        marks=[pytest.mark.slow] * (family in SLOW),
    )
    for family in ENCODER_DECODERS
    for prompt in (PROMPT, "")
]


@pytest.fixture(scope="module", params=PROMPTED)
def case(request, tmp_path_factory):
    """Every family with and without a prompt, where its tokens matter."""
    return loaded(*request.param, tmp_path_factory)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=[pytest.mark.slow] * (family in SLOW))
        for family in ENCODER_DECODERS
    ],
)
def family_case(request, tmp_path_factory):
    """Every family with a prompt."""
    return loaded(request.param, PROMPT, tmp_path_factory)


def loaded(family, prompt, tmp_path_factory):
    captioner = tiny_hf_captioner(family, tmp_path_factory.mktemp("model"), prompt)
    return captioner, captioner.preprocess(tiny_rows(3))


def own_logits(captioner, pixel_values, ids):
    """Transformers' own forward pass of one image and one whole sequence, without a cache: logits
    [T, V].
    """
    model, name = captioner.policy.model, captioner.family.name
    ids = torch.tensor([ids])
    if name == "Florence-2":
        task, tokenizer = (
            captioner.family.tasks.get(captioner.prompt, captioner.prompt),
            captioner.tokenizer,
        )
        text = f"{'<image>' * 5}<s>{task}</s>"
        read = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        return model(
            pixel_values=pixel_values, input_ids=read, decoder_input_ids=ids
        ).logits[0]
    if name == "VisionEncoderDecoder":
        return model(pixel_values=pixel_values, decoder_input_ids=ids).logits[0]
    return model(pixel_values=pixel_values, input_ids=ids).logits[0]


@torch.no_grad()
def test_samples_are_transformers_own_and_teacher_forcing_gives_the_scores_they_were_sampled_with(
    case,
):
    captioner, inputs = case
    noise = sampling_noise(2, 0, ["a", "b", "c"], 2, L)
    start = captioner.policy.conventions.start
    expected, scores = sample_slowly(
        captioner,
        inputs,
        noise,
        1.3,
        lambda one, ids: own_logits(captioner, one["pixel_values"], [*start, *ids])[-1],
        ending=True,
    )
    assert_draws_and_scores(captioner, inputs, noise, expected, scores)


def test_prompts_of_rows_are_refused_with_the_row(tmp_path):
    row = tiny_rows(1)[0]
    for captioner in (tiny_hf_captioner("blip", tmp_path / "blip"), tiny_captioner()):
        with pytest.raises(DataError, match=r"image-0.*'a dog'"):
            captioner.preprocess([row | {"prompt": "a dog"}])
        captioner.preprocess([row | {"prompt": ""}])


def own_inputs(captioner, images):
    """What Transformers' own processor makes of images and prompt, as the models' pages say."""
    name, prompt = captioner.name, captioner.prompt
    if captioner.family.name == "VisionEncoderDecoder":
        process = AutoImageProcessor.from_pretrained(name, backend="pil")
        inputs = dict(process(images=images, return_tensors="pt"))
        if prompt:
            ids = [
                captioner.policy.model.config.decoder_start_token_id,
                *captioner.tokenizer(prompt, add_special_tokens=False)["input_ids"],
            ]
            inputs["decoder_input_ids"] = torch.tensor([ids] * len(images))
        return inputs
    reads = prompt or captioner.family.name == "Florence-2"
    texts = [prompt] * len(images) if reads else None
    inputs = dict(
        AutoProcessor.from_pretrained(name, backend="pil")(
            images=images, text=texts, return_tensors="pt"
        )
    )
    if captioner.family.name == "Florence-2":
        inputs["decoder_input_ids"] = torch.tensor(
            [captioner.policy.conventions.start] * len(images)
        )
    return inputs


@torch.no_grad()
def test_florence_reads_one_prompt_whose_padding_would_move_its_positions(tmp_path):
    captioner = tiny_hf_captioner("florence2", tmp_path / "florence2", "a dog")
    model, inputs = captioner.policy.model, captioner.preprocess(tiny_rows(1))
    start = torch.tensor([[*captioner.policy.conventions.start, 15, 16]])
    expected = own_logits(captioner, inputs["pixel_values"], start[0].tolist())
    ids = torch.tensor([captioner.policy.conventions.encoder_prompt])
    images = torch.full((1, 5), model.config.image_token_id)
    padding = torch.full((1, 2), captioner.pad_token_id)

    def read(*columns, mask=None):
        return model(
            pixel_values=inputs["pixel_values"], input_ids=torch.cat(columns, 1), attention_mask=mask,
            decoder_input_ids=start,
        ).logits[0]  # fmt: skip

    ones, zeros = (
        torch.ones(1, 5 + ids.shape[1], dtype=torch.long),
        torch.zeros(1, 2, dtype=torch.long),
    )
    right = read(images, ids, padding, mask=torch.cat([ones, zeros], 1))
    assert torch.allclose(right, expected, atol=1e-4)
    assert (
        read(padding, images, ids, mask=torch.cat([zeros, ones], 1)) - expected
    ).abs().max() > 0.05, "the trap"
    assert (read(images, ids, padding) - expected).abs().max() > 0.05, "the other"
    scores = captioner.policy(**inputs, token_ids=start[None, :, 2:])[0, 0]
    assert torch.allclose(scores, expected[1:-1], atol=1e-4)


@torch.no_grad()
def test_greedy_captions_of_photos_are_those_of_transformers_processor_and_generate(
    case,
):
    captioner, _ = case
    images = [
        row["image"].resize((31 - 3 * i, 20 + i)) for i, row in enumerate(tiny_rows(7))
    ] + [Image.new("L", (18, 40), 90)]
    rows = [
        {"image_id": str(i), "image": image, "references": []}
        for i, image in enumerate(images)
    ]
    inputs = captioner.preprocess(rows)
    ours = captioner.decode(
        captioner.generate(captioner.policy, inputs, Decoding(max_new_tokens=L), None)[
            :, 0
        ]
    )
    theirs = own_inputs(captioner, [image.convert("RGB") for image in images])
    assert torch.equal(theirs["pixel_values"], inputs["pixel_values"])
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=L,
        suppress_tokens=list(captioner.forbidden),
        eos_token_id=captioner.eos_token_id,
        pad_token_id=captioner.pad_token_id,
        bos_token_id=captioner.policy.conventions.start[0],
        decoder_start_token_id=captioner.policy.conventions.start[0],
    )
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # of whose settings ``generate`` would take what it is not told
        patch.setattr(captioner.policy.model, "generation_config", GenerationConfig())
        generated = captioner.policy.model.generate(
            **theirs, generation_config=settings
        )
    tokenizer = AutoTokenizer.from_pretrained(captioner.name)
    texts = [
        " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())
        for ids in generated
    ]
    assert ours == [text.removeprefix(captioner.prompt).strip() for text in texts]
    assert len(set(ours)) > 1


def test_recomputed_activations_and_dropout_that_is_off_change_nothing(family_case):
    captioner, inputs = family_case
    ids = torch.tensor([[[5, 6, 7, 8], [9, 6, 5, 5]]]).repeat(3, 1, 1)
    # Florence's vision tower has no layers of the kind that is computed again.
    share = 0.6 if captioner.family.name == "Florence-2" else 0.5
    assert_recomputing_changes_nothing(captioner, inputs, ids, share)


def test_captions_at_once_and_with_prefixes_that_they_share_have_the_gradient_of_one_at_a_time(
    family_case,
):
    captioner, inputs = family_case
    policy = captioner.policy
    ids = torch.tensor(
        [[[5, 6, 7, 8], [5, 6, 9, 9], [5, 6, 7, 8], [5, 6, 0, 0]]]
    ).repeat(3, 1, 1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 3, 3:] = False  # all that this caption's tokens depend on is in others
    alone = []
    for image, caption in itertools.product(range(3), range(4)):
        one = {"pixel_values": inputs["pixel_values"][image : image + 1]}
        chosen = ids[image, caption].view(1, 1, -1)
        logprobs = token_logprobs(captioner.token_logits(policy, one, chosen), chosen)
        alone.append(logprobs[0, 0][mask[image, caption]])
    assert_gradients_of_one_at_a_time(captioner, [inputs], ids, mask, torch.cat(alone))


@torch.no_grad()
def test_the_image_is_encoded_once_for_all_captions(family_case):
    captioner, inputs = family_case
    model = captioner.policy.model
    towers = {
        "VisionEncoderDecoder": "encoder",
        "Florence-2": "model.vision_tower",
    }
    tower = model.get_submodule(towers.get(captioner.family.name, "vision_model"))
    seen = []
    hook = tower.register_forward_hook(
        lambda module, arguments, output: seen.append(output[0].shape[0])
    )
    noise = sampling_noise(1, 0, ["a", "b", "c"], K, L)
    tokens = captioner.generate(
        captioner.policy,
        inputs,
        Decoding(num_samples=K, with_greedy=True, max_new_tokens=L),
        noise,
    )
    captioner.token_logits(captioner.policy, inputs, tokens)
    captioner.generate(
        captioner.policy, inputs, Decoding(num_beams=3, max_new_tokens=L), None
    )
    hook.remove()
    assert seen == [3, 3, 3], "sampling, scoring and beam search each encode 3 images"


@pytest.mark.parametrize("frozen", [False, True])
def test_states_that_are_kept_for_a_step_give_the_same_captions_and_the_same_gradient(
    family_case, frozen
):
    captioner, inputs = copy.deepcopy(family_case)
    policy = captioner.policy
    policy(pixel_values=inputs["pixel_values"], encode=True)["states"].sum().backward()
    for parameter in policy.parameters():
        parameter.requires_grad_(
            parameter.requires_grad and not (frozen and parameter.grad is not None)
        )
    policy.zero_grad()
    ids = torch.tensor([[[5, 6, 7, 8], [9, 6, 5, 5]]]).repeat(3, 1, 1)
    with torch.no_grad():
        without = captioner.image_states(policy, inputs)
    assert (without is inputs) != frozen, (
        "states without gradient would leave a trained encoder without one"
    )
    states = captioner.image_states(policy, inputs)
    assert states.keys() == {"states"}
    assert states["states"].requires_grad != frozen
    noise, decoding = (
        sampling_noise(1, 0, ["a", "b", "c"], K, L),
        Decoding(num_samples=K, with_greedy=True, max_new_tokens=L),
    )
    found = []
    for given in (inputs, states):
        logprobs = token_logprobs(captioner.token_logits(policy, given, ids), ids)
        logprobs.sum().backward()
        tokens = captioner.generate(policy, given, decoding, noise)
        found.append(
            {"tokens": tokens, "logprobs": logprobs.detach(), **gradients(policy)}
        )
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_texts_survive_encoding_and_decoding_and_the_prompt_is_part_of_none(case):
    captioner, _ = case
    encoded = assert_texts_survive(captioner)
    if captioner.policy.conventions.encoder_prompt:
        return
    start, tokenizer = list(captioner.policy.conventions.start[1:]), captioner.tokenizer
    assert tokenizer.decode(start) == captioner.prompt
    whole = f"{captioner.prompt} a small dog".strip()
    ids = [*start, *encoded[0][:-1]]
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"], (
        "the caption goes on from the prompt"
    )


def test_rewards_read_the_words_of_a_caption_whatever_tokens_it_is_made_of(tmp_path):
    """WordPiece decodes to ``man ' s``, whose words are others than those of the references."""
    for family in ("vit_bert", "vit_gpt2"):
        captioner = tiny_hf_captioner(family, tmp_path / family)
        for text in ("a man's dog, sitting.", "they don't run"):
            (ids,) = captioner.encode([text], 40)
            assert tokenize(captioner.decode(torch.tensor([ids]))[0]) == tokenize(
                text
            ), family


@torch.no_grad()
def test_save_and_load_keep_every_bit_and_transformers_own_classes_load_the_folder(
    family_case, tmp_path
):
    captioner, inputs = family_case
    captioner.save_pretrained(captioner.policy, tmp_path)
    again = load_captioner(tmp_path)
    assert isinstance(again, HuggingFaceCaptioner)
    assert json.loads((tmp_path / SETTINGS).read_text()) == {"prompt": captioner.prompt}
    again.policy.eval()
    ids = torch.tensor([[[5, 6, 7], [8, 9, 5]]]).repeat(3, 1, 1)
    assert torch.equal(
        again.preprocess(tiny_rows(3))["pixel_values"], inputs["pixel_values"]
    )
    assert torch.equal(
        captioner.token_logits(captioner.policy, inputs, ids),
        again.token_logits(again.policy, inputs, ids),
    )
    if captioner.family.processor_class is not None:
        processor = transformers.AutoProcessor.from_pretrained(tmp_path)
        assert type(processor).__name__ == captioner.family.processor_class
