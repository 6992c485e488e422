"""Decoding at fixed shapes: the same captions, and nothing that a CUDA graph could not record.

No GPU is needed: tracing with fake tensors, which have shapes and no values, fails wherever
recording would have to look at a value, and what was traced is kernels and addresses alone, as a
graph is.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rl_caption.captioners import decoding as decoding_module
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.decoding import ReplayedGenerate
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import region_inputs, tiny_captioner, tiny_rows
from tests.hf_models_for_tests import FAMILIES, PROMPT, tiny_hf_captioner
from tests.steps_for_tests import assert_equal_gradients, batches_of, gradient, scst_task

K, L = 3, 3
IDS = ["a", "b", "c"]
SAMPLING = Decoding(num_samples=K, with_greedy=True, max_new_tokens=L, temperature=1.2)


class Counting:
    """Counts, and records nothing: what it returns is the function itself."""

    recorded = 0

    def __call__(
        self, function: Callable[..., Tensor], example: dict[str, Tensor]
    ) -> Callable[..., Tensor]:
        self.recorded += 1
        return function


class Tracing(Counting):
    """Records by tracing."""

    def __call__(
        self, function: Callable[..., Tensor], example: dict[str, Tensor]
    ) -> Callable[..., Tensor]:
        self.recorded += 1
        names = list(example)
        traced = make_fx(
            lambda *tensors: function(**dict(zip(names, tensors, strict=True))),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,  # weights
        )(*example.values())
        return lambda **given: traced(*(given[name] for name in names))


Case = tuple[Any, dict[str, Tensor]]


@pytest.fixture(scope="module", params=["pixels", "regions", *FAMILIES])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "regions":
        return tiny_captioner(input_kind="regions"), region_inputs()
    if request.param == "pixels":
        captioner: Any = tiny_captioner()
        return captioner, captioner.preprocess(tiny_rows(3))
    captioner = tiny_hf_captioner(request.param, tmp_path_factory.mktemp("model"), PROMPT)
    with torch.no_grad():
        pixels = captioner.preprocess(tiny_rows(3))["pixel_values"]
        return captioner, {"states": captioner.policy(pixel_values=pixels, encode=True)}


@pytest.fixture
def case(made: Case) -> Case:
    """A copy, to change its weights."""
    return copy.deepcopy(made)


@pytest.fixture
def regions() -> tuple[Any, dict[str, Tensor], Tensor]:
    """A captioner, its inputs and noise."""
    return tiny_captioner(input_kind="regions"), region_inputs(), sampling_noise(0, 0, IDS, K, L)


@torch.no_grad()
@pytest.mark.parametrize(
    "decoding", [SAMPLING, SAMPLING.replace(with_greedy=False), Decoding(max_new_tokens=L)]
)
def test_captions_of_fixed_shapes_are_those_of_the_tree(made, decoding):
    captioner, inputs = made
    noise = sampling_noise(3, 0, IDS, decoding.num_samples, L) if decoding.num_samples else None
    tree = captioner.generate(captioner.policy, inputs, decoding, noise)
    fixed = captioner.generate(captioner.policy, inputs, decoding.replace(fixed_shapes=True), noise)
    assert fixed.shape == (3, decoding.captions_per_image, L)
    assert torch.equal(fixed[..., : tree.shape[-1]], tree)
    assert (fixed[..., tree.shape[-1] :] == captioner.pad_token_id).all()


@torch.no_grad()
def test_a_recording_gives_the_captions_of_other_images_noise_and_weights(case):
    captioner, inputs = case
    tracing = Tracing()
    generate = ReplayedGenerate(captioner, tracing)
    seen = []
    for step in range(3):
        noise = sampling_noise(0, step, IDS, K, L)
        changed = {
            name: tensor + step if tensor.is_floating_point() else tensor
            for name, tensor in inputs.items()
        }
        found = generate(captioner.policy, changed, SAMPLING, noise)
        assert torch.equal(found, captioner.generate(captioner.policy, changed, SAMPLING, noise))
        seen.append(found.tolist())
        for parameter in captioner.policy.parameters():
            parameter.mul_(1.02)
    assert tracing.recorded == 1
    assert seen[0] != seen[1] != seen[2]


@torch.no_grad()
def test_every_shape_and_decoding_is_recorded_until_there_are_too_many_and_all_anew_when_weights_move(
    regions, monkeypatch, caplog
):
    captioner, inputs, noise = regions
    monkeypatch.setattr(decoding_module, "MAX_GRAPHS", 3)
    counting = Counting()
    generate = ReplayedGenerate(captioner, counting)
    short = SAMPLING.replace(max_new_tokens=2)
    cooler = short.replace(temperature=0.5)

    def found(images, decoding):
        part, numbers = (
            {name: tensor[:images] for name, tensor in inputs.items()},
            noise[:images, :, :2],
        )
        tokens = generate(captioner.policy, part, decoding, numbers)
        assert torch.equal(tokens, captioner.generate(captioner.policy, part, decoding, numbers))
        return tokens.tolist()

    before = [
        found(*one)
        for one in ((3, short), (2, short), (3, short), (3, cooler), (1, short), (1, cooler))
    ]
    assert counting.recorded == 3
    assert sum("more than 3 shapes" in message for message in caplog.messages) == 1
    for parameter in captioner.policy.parameters():
        parameter.data = parameter.data.flip(0).clone()
    assert found(3, short) != before[0]
    assert counting.recorded == 4


@torch.no_grad()
def test_what_cannot_be_replayed_or_gives_other_captions_is_refused(regions):
    captioner, inputs, noise = regions

    def deaf(function: Callable[..., Tensor], example: dict[str, Tensor]) -> Callable[..., Tensor]:
        tokens = function(**{**example, "noise": 1 - example["noise"]})
        return lambda **_: tokens

    with pytest.raises(CaptionerError, match=r"expected 95%: turn rollout.cuda_graph off"):
        ReplayedGenerate(captioner, deaf)(captioner.policy, inputs, SAMPLING, noise)
    captioner.policy.train()
    with pytest.raises(ValueError, match="eval mode"):
        ReplayedGenerate(captioner, Tracing())(captioner.policy, inputs, SAMPLING, noise)


@torch.no_grad()
def test_the_decode_of_the_tree_cannot_be_traced(regions):
    """The checks above would see it if a fixed decode looked at a value."""
    captioner, inputs, noise = regions

    def tree(noise: Tensor, **inputs: Tensor) -> Tensor:
        return captioner.generate(captioner.policy, inputs, SAMPLING, noise)

    with pytest.raises(RuntimeError, match=r"aten\.nonzero|data-dependent"):
        Tracing()(tree, {**inputs, "noise": noise})


def test_a_step_that_replays_has_the_same_captions_and_the_same_gradient():
    captioner = tiny_captioner()
    batches = batches_of(captioner, 4, 2)
    plain, replayed = (
        scst_task(captioner, advantage="greedy"),
        scst_task(captioner, advantage="greedy"),
    )
    counting = Counting()
    replayed.generate = ReplayedGenerate(captioner, counting)
    for step in range(2):
        expected = gradient(captioner, plain, batches, step)
        assert_equal_gradients(gradient(captioner, replayed, batches, step), expected, atol=0)
        assert replayed.samples == plain.samples
    assert counting.recorded == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_a_cuda_graph_gives_the_same_captions(case):
    captioner, inputs = case
    captioner.policy.cuda()
    for precision in (torch.float32, torch.bfloat16):
        generate = ReplayedGenerate(captioner)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
            for step in range(3):
                noise = sampling_noise(0, step, IDS, K, L).cuda()
                given = {
                    name: (t + step if t.is_floating_point() else t).cuda()
                    for name, t in inputs.items()
                }
                fixed = captioner.generate(
                    captioner.policy, given, SAMPLING.replace(fixed_shapes=True), noise
                )
                found = generate(captioner.policy, given, SAMPLING, noise)
                assert torch.equal(found, fixed[..., : found.shape[-1]])
                for parameter in captioner.policy.parameters():
                    parameter.mul_(1.02)
                # casts of weights that have changed since, which a step's end clears
                torch.clear_autocast_cache()
        assert len(generate.graphs) == 1
