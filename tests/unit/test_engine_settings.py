"""What the engines refuse before anything starts, and what is filled in for them."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from rl_caption.reward_models.config import RewardModelConfig
from rl_caption.training.distributed.engines import (
    EngineError,
    _silenced,
    _size_buckets,
    engine_of,
    fill_deepspeed_config,
    fsdp_arguments,
    prepare,
    settle_engine,
)
from rl_caption.training.setup import _check_sharding

DEEPSPEED, FSDP = "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"


def accelerator(kind: str, stage: int = 2, processes: int = 2, **config: Any) -> Any:
    """As much of an ``Accelerator`` as these functions look at."""
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config={"zero_optimization": {"stage": stage}, **config})
    kinds = {"plain": DistributedType.MULTI_CPU, "zero": DistributedType.DEEPSPEED, "fsdp": DistributedType.FSDP}
    return SimpleNamespace(
        distributed_type=kinds[kind], num_processes=processes, state=SimpleNamespace(deepspeed_plugin=plugin)
    )


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (DEEPSPEED, FSDP, "FSDP_VERSION", "FSDP_OFFLOAD_PARAMS"):
        monkeypatch.delenv(variable, raising=False)


def test_names_of_engines() -> None:
    made = [accelerator("plain"), accelerator("zero", 1), accelerator("zero", 3), accelerator("fsdp")]
    assert [engine_of(one) for one in made] == ["plain", "zero1", "zero3", "fsdp2"]


@pytest.mark.parametrize(
    ("wanted", "runs", "precision", "clip_value", "reason"),
    [
        (DEEPSPEED, accelerator("plain"), "no", None, "unset ACCELERATE_USE_CPU"),
        (FSDP, accelerator("plain", processes=1), "no", None, r"1 process\(es\) run without it.*Start at least 2"),
        (DEEPSPEED, accelerator("zero", 0), "no", None, "zero_stage is 0.*multi_gpu.yaml"),
        (DEEPSPEED, accelerator("zero"), "fp16", None, "fp16 under zero2.*use bf16"),
        (FSDP, accelerator("fsdp"), "fp16", None, "fp16 under fsdp2.*use bf16"),
        (DEEPSPEED, accelerator("zero"), "no", 0.5, "grad_clip_value is 0.5.*set it to null"),
        (DEEPSPEED, accelerator("zero", optimizer={"type": "Adam"}), "no", None, "section 'optimizer': leave it out"),
        (DEEPSPEED, accelerator("zero", bf16={"enabled": True}), "no", None, "section 'bf16': leave it out"),
        (
            DEEPSPEED,
            accelerator("zero", zero_optimization={"offload_param": {"device": "cpu"}}),
            "no",
            None,
            r"offloads to 'cpu' \(offload_param\)",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str, runs: Any, precision: str, clip_value: float | None, reason: str
) -> None:
    monkeypatch.setenv(wanted, "true")
    with pytest.raises(EngineError, match=reason):
        settle_engine(runs, precision, clip_value)


def test_bf16_is_autocast_over_float32_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEEPSPEED, "true")
    runs = accelerator("zero", bf16={"enabled": False}, zero_optimization={"offload_param": {"device": "none"}})
    settle_engine(runs, "bf16", None)
    assert runs.state.deepspeed_plugin.deepspeed_config["torch_autocast"]["dtype"] == "bfloat16"
    monkeypatch.delenv(DEEPSPEED)
    settle_engine(accelerator("plain"), "fp16", 0.5)  # nothing to refuse


@pytest.mark.parametrize("kind", ["zero", "fsdp"])
def test_reward_models_are_not_spread(kind: str) -> None:
    with pytest.raises(EngineError, match=r"reward models do not train under .*multi_gpu\.yaml"):
        _check_sharding(RewardModelConfig(), accelerator(kind), 1)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [("FSDP_VERSION", "1", "fsdp_version to 2"), ("FSDP_OFFLOAD_PARAMS", "true", "offloading is not supported")],
)
def test_fsdp_as_it_is_not_supported_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    assert fsdp_arguments("no") == {}
    monkeypatch.setenv(FSDP, "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(variable, value)
    with pytest.raises(EngineError, match=reason):
        fsdp_arguments("no")


def test_batch_sizes_and_clipping_are_those_of_the_training() -> None:
    config: dict[str, Any] = {"train_batch_size": "auto", "gradient_clipping": 0.5}
    fill_deepspeed_config(config, batch_size=24, micro_batch_size=3, processes=4, grad_clip_norm=0.5)
    assert config == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
    }
    with pytest.raises(EngineError, match=r"sets gradient_clipping to 0\.5, train\.grad_clip_norm makes it 1\.0"):
        fill_deepspeed_config({"gradient_clipping": 0.5}, 24, 3, 4, 1.0)


def test_gradient_buffers_are_no_larger_than_of_use() -> None:
    config: dict[str, Any] = {}
    model = nn.Linear(3, 4)
    model.bias.requires_grad_(False)
    _size_buckets(config, model)
    assert config == {"zero_optimization": {"reduce_bucket_size": 12}}
    _size_buckets(config, nn.Linear(5, 5))  # a size that is given stays
    assert config == {"zero_optimization": {"reduce_bucket_size": 12}}
    with torch.device("meta"):
        large = nn.ModuleList([nn.Linear(10_000, 7_000), nn.Linear(10_000, 7_000)])
    config = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    _size_buckets(config, large)
    assert config["zero_optimization"]["reduce_bucket_size"] == 70_000_000  # a tensor goes in whole


@pytest.mark.parametrize("kind", ["zero", "fsdp"])
def test_a_parameter_without_dimensions_is_named(kind: str) -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(EngineError, match=r"scale is a parameter without dimensions.*shape \[1\]"):
        prepare(accelerator(kind), model, None)


def test_silenced_hooks_come_back_in_their_order() -> None:
    called: list[str] = []

    def hook(name: str) -> Any:
        def call(module: nn.Module, *tensors: Tensor) -> None:
            called.append(name)

        return call

    model = nn.Identity()
    handles = [model.register_forward_pre_hook(hook("a")), model.register_forward_hook(hook("d"))]
    model.register_forward_pre_hook(hook("b"))
    handles.append(model.register_forward_pre_hook(hook("c")))
    with suppress(KeyError), _silenced(handles):
        model(torch.ones(1))
        raise KeyError
    assert called == ["b"]
    model(torch.ones(1))
    assert called == ["b", "a", "b", "c", "d"]
    handles[0].remove()
    called.clear()
    model(torch.ones(1))
    assert called == ["b", "c", "d"]
