"""What must hold for every family of Transformers' captioners between sampling,
scoring, decoding and saving.
"""

import copy
import itertools
import json

import pytest
import torch
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
from tests.captioners_for_tests import (
    NAMES,
    captions_of,
    logits_of,
    near,
    sample_slowly,
    tiny_captioner,
    tiny_rows,
    token_ids,
)
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

K = 4
L = 6
SAMPLING = Decoding(num_samples=K, with_greedy=True, max_new_tokens=L)
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
    """Transformers' own forward pass of one image and one whole sequence, without a
    cache: logits [T, V].
    """
    name = captioner.family.name
    inputs = {"input_ids": torch.tensor([ids])}
    if name != "BLIP":
        inputs = {"decoder_input_ids": torch.tensor([ids])}
    if name == "Florence-2":
        text = captioner.family.tasks.get(captioner.prompt, captioner.prompt)
        text = f"{'<image>' * 5}<s>{text}</s>"
        read = captioner.tokenizer(text, add_special_tokens=False)["input_ids"]
        inputs["input_ids"] = torch.tensor([read])
    return captioner.policy.model(pixel_values=pixel_values, **inputs).logits[0]


@torch.no_grad()
def test_samples_are_transformers_own_and_teacher_forcing_gives_the_scores_they_were_sampled_with(
    case,
):
    captioner, inputs = case
    noise = sampling_noise(2, 0, NAMES, 2, L)
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
    name = captioner.name
    prompt = captioner.prompt
    start = None
    if captioner.family.name == "VisionEncoderDecoder":
        process = AutoImageProcessor.from_pretrained(name, backend="pil")
        inputs = dict(process(images=images, return_tensors="pt"))
        if prompt:
            words = captioner.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            start = [captioner.policy.config.decoder_start_token_id, *words]
    else:
        is_florence = captioner.family.name == "Florence-2"
        texts = [prompt] * len(images) if prompt or is_florence else None
        process = AutoProcessor.from_pretrained(name, backend="pil")
        inputs = dict(process(images=images, text=texts, return_tensors="pt"))
        if is_florence:
            start = captioner.policy.conventions.start
    if start is not None:
        inputs["decoder_input_ids"] = torch.tensor([start] * len(images))
    return inputs


@torch.no_grad()
def test_florence_reads_one_prompt_whose_padding_would_move_its_positions(tmp_path):
    captioner = tiny_hf_captioner("florence2", tmp_path / "florence2", "a dog")
    model = captioner.policy.model
    inputs = captioner.preprocess(tiny_rows(1))
    start = torch.tensor([[*captioner.policy.conventions.start, 15, 16]])
    expected = own_logits(
        captioner,
        inputs["pixel_values"],
        start[0].tolist(),
    )
    words = captioner.policy.conventions.encoder_prompt
    ids = torch.tensor([[*[model.config.image_token_id] * 5, *words]])

    def read(*padding, masked=True):
        padded = torch.nn.functional.pad(
            ids,
            padding,
            value=captioner.pad_token_id,
        )
        mask = torch.nn.functional.pad(torch.ones_like(ids), padding)
        return model(
            **inputs,
            input_ids=padded,
            attention_mask=mask if masked else None,
            decoder_input_ids=start,
        ).logits[0]

    assert near(read(0, 2), expected)
    assert (read(2, 0) - expected).abs().max() > 0.05, "the trap"
    assert (read(0, 2, masked=False) - expected).abs().max() > 0.05, "the other"
    scores = captioner.policy(**inputs, token_ids=start[None, :, 2:])[0, 0]
    assert near(scores, expected[1:-1])


@torch.no_grad()
def test_greedy_captions_of_photos_are_those_of_transformers_processor_and_generate(
    case,
):
    captioner, _ = case
    images = [
        row["image"].resize((31 - 3 * i, 20 + i)) for i, row in enumerate(tiny_rows(7))
    ]
    images.append(Image.new("L", (18, 40), 90))
    rows = [
        {"image_id": str(i), "image": image, "references": []}
        for i, image in enumerate(images)
    ]
    inputs = captioner.preprocess(rows)
    ids = captions_of(captioner, inputs, Decoding(max_new_tokens=L))[:, 0]
    ours = captioner.decode(ids)
    theirs = own_inputs(captioner, [image.convert("RGB") for image in images])
    assert torch.equal(theirs["pixel_values"], inputs["pixel_values"])
    start = captioner.policy.conventions.start[0]
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=L,
        suppress_tokens=list(captioner.forbidden),
        eos_token_id=captioner.eos_token_id,
        pad_token_id=captioner.pad_token_id,
        bos_token_id=start,
        decoder_start_token_id=start,
    )
    model = captioner.policy.model
    # ``generate`` would take from the model's settings what it is not told.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "generation_config", GenerationConfig())
        generated = model.generate(**theirs, generation_config=settings)
    tokenizer = AutoTokenizer.from_pretrained(captioner.name)
    texts = [
        " ".join(text.split())
        for text in tokenizer.batch_decode(generated, skip_special_tokens=True)
    ]
    assert ours == [text.removeprefix(captioner.prompt).strip() for text in texts]
    assert len(set(ours)) > 1


def test_recomputed_activations_and_dropout_that_is_off_change_nothing(family_case):
    captioner, inputs = family_case
    ids = token_ids("5 6 7 8", "9 6 5 5")
    # Florence's vision tower has no layers of the kind that is computed again.
    share = 0.6 if captioner.family.name == "Florence-2" else 0.5
    assert_recomputing_changes_nothing(captioner, inputs, ids, share)


def test_captions_at_once_and_with_prefixes_that_they_share_have_the_gradient_of_one_at_a_time(
    family_case,
):
    captioner, inputs = family_case
    ids = token_ids("5 6 7 8", "5 6 9 9", "5 6 7 8", "5 6 0 0")
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 3, 3:] = False  # all that this caption's tokens depend on is in others
    alone = []
    for image, caption in itertools.product(range(3), range(4)):
        one = {"pixel_values": inputs["pixel_values"][image : image + 1]}
        chosen = ids[image, caption].view(
            1,
            1,
            -1,
        )
        logprobs = token_logprobs(logits_of(captioner, one, chosen), chosen)
        alone.append(logprobs[0, 0][mask[image, caption]])
    assert_gradients_of_one_at_a_time(
        captioner,
        [inputs],
        ids,
        mask,
        torch.cat(alone),
    )


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
    noise = sampling_noise(1, 0, NAMES, K, L)
    tokens = captions_of(captioner, inputs, SAMPLING, noise)
    logits_of(captioner, inputs, tokens)
    captions_of(
        captioner,
        inputs,
        Decoding(num_beams=3, max_new_tokens=L),
    )
    hook.remove()
    assert seen == [3, 3, 3], "sampling, scoring and beam search each encode 3 images"


@pytest.mark.parametrize("frozen", [False, True])
def test_states_that_are_kept_for_a_step_give_the_same_captions_and_the_same_gradient(
    family_case, frozen
):
    captioner, inputs = copy.deepcopy(family_case)
    policy = captioner.policy
    policy(**inputs, encode=True)["states"].sum().backward()
    for parameter in policy.parameters():
        if frozen and parameter.grad is not None:
            parameter.requires_grad_(False)
    policy.zero_grad()
    ids = token_ids("5 6 7 8", "9 6 5 5")
    with torch.no_grad():
        without = captioner.image_states(policy, inputs)
    # States without gradient would leave a trained encoder without one.
    assert (without is inputs) != frozen
    states = captioner.image_states(policy, inputs)
    assert states.keys() == {"states"}
    assert states["states"].requires_grad != frozen
    noise = sampling_noise(1, 0, NAMES, K, L)
    found = []
    for given in (inputs, states):
        logits = logits_of(captioner, given, ids)
        token_logprobs(logits, ids).sum().backward()
        tokens = captions_of(captioner, given, SAMPLING, noise)
        found.append([tokens, logits.detach(), *gradients(policy).values()])
    assert all(map(torch.equal, *found))


def test_texts_survive_encoding_and_decoding_and_the_prompt_is_part_of_none(case):
    captioner, _ = case
    encoded = assert_texts_survive(captioner)
    if captioner.policy.conventions.encoder_prompt:
        return
    start = list(captioner.policy.conventions.start[1:])
    assert captioner.tokenizer.decode(start) == captioner.prompt
    whole = f"{captioner.prompt} a small dog".strip()
    expected = captioner.tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert [*start, *encoded[0][:-1]] == expected, "it goes on from the prompt"


def test_rewards_read_the_words_of_a_caption_whatever_tokens_it_is_made_of(tmp_path):
    """WordPiece decodes to ``man ' s``, whose words are others than those of the references."""
    for family in ("vit_bert", "vit_gpt2"):
        captioner = tiny_hf_captioner(family, tmp_path / family)
        for text in ("a man's dog, sitting.", "they don't run"):
            ids = torch.tensor(captioner.encode([text], 40))
            (decoded,) = captioner.decode(ids)
            assert tokenize(decoded) == tokenize(text), family


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
    ids = token_ids("5 6 7", "8 9 5")
    pixels = again.preprocess(tiny_rows(3))["pixel_values"]
    assert torch.equal(pixels, inputs["pixel_values"])
    expected = logits_of(captioner, inputs, ids)
    assert torch.equal(expected, logits_of(again, inputs, ids))
    if captioner.family.has_processor:
        processor = AutoProcessor.from_pretrained(tmp_path)
        assert type(processor) is type(captioner.processor)
