"""Engines and precision: what is refused before anything starts, and what is filled in
for DeepSpeed.
"""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, HfDeepSpeedConfig
from torch import nn

from rl_caption.config.schema import RunConfig, TrainConfig
from rl_caption.runtime.engines import (
    build_accelerator,
    global_count,
    training_precision,
)
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.launch import LaunchError
from rl_caption.runtime.zero import (
    configure_deepspeed,
    prepare,
    without_hooks,
)


def accelerator(stage, **config):
    """As much of an ``Accelerator`` as these functions look at; ``stage`` None is plain."""
    read = HfDeepSpeedConfig({})
    read.config = config
    plugin = SimpleNamespace(
        zero_stage=stage, deepspeed_config=config, get_value=read.get_value
    )
    kind = DistributedType.MULTI_CPU if stage is None else DistributedType.DEEPSPEED
    return SimpleNamespace(
        distributed_type=kind,
        num_processes=2,
        state=SimpleNamespace(deepspeed_plugin=plugin),
        prepare=lambda *prepared: prepared,
    )


OFFLOADED = {"offload_param": {"device": "cpu"}}


def test_a_tracker_that_is_not_installed_and_fsdp_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_caption.runtime.engines.get_available_trackers", list)
    run = RunConfig(dir=str(tmp_path), trackers=["tensorboard"])
    with pytest.raises(ConfigError, match=r"run\.trackers.*tensorboard"):
        build_accelerator(TrainConfig(), run)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(LaunchError, match="ACCELERATE_USE_FSDP"):
        build_accelerator(TrainConfig(), RunConfig())


@pytest.mark.parametrize(
    ("runs", "precision", "train", "named"),
    [
        (accelerator(None), "no", {}, "plain runs"),
        (accelerator(0), "no", {}, "zero0 runs"),
        (accelerator(2), "fp16", {}, "zero2"),
        (accelerator(2), "no", {"grad_clip_value": 0.5}, "zero2"),
        (accelerator(2, zero_optimization=OFFLOADED), "no", {}, "zero2"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(runs, precision, train, named):
    with pytest.raises(ConfigError, match=named):
        configure_deepspeed(runs, precision, TrainConfig(**train))


def test_precision_batch_sizes_and_clipping_are_those_of_the_training():
    runs = accelerator(
        2,
        train_batch_size=7,
        gradient_clipping=0.9,
        optimizer={"type": "Adam"},
        bf16={"enabled": True},
        zero_optimization={"offload_param": {"device": "none"}},
    )
    train = TrainConfig(batch_size=24, micro_batch_size=3, grad_clip_norm=0.5)
    configure_deepspeed(runs, "bf16", train)
    config = runs.state.deepspeed_plugin.deepspeed_config
    assert config.pop("torch_autocast")["dtype"] == "bfloat16"
    del config["zero_optimization"]
    assert config == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
    }


@pytest.mark.parametrize("given", ["auto", 12])
def test_gradient_buckets_are_bounded(given):
    with torch.device("meta"):
        large = nn.ModuleList([nn.Linear(10_000, 7_000), nn.Linear(10_000, 7_000)])
    zero = {"reduce_bucket_size": given}
    runs = accelerator(2, gradient_accumulation_steps=1, zero_optimization=zero)
    prepare(runs, large, None)
    expected = 70_000_000 if given == "auto" else 12  # a bucket holds a whole tensor
    assert zero["reduce_bucket_size"] == expected


def test_removed_hooks_come_back_in_their_order():
    called = []

    def hook(name):
        return lambda *given: called.append(name)

    model = nn.Identity()
    handles = [
        model.register_forward_pre_hook(hook("a")),
        model.register_forward_hook(hook("d")),
    ]
    model.register_forward_pre_hook(hook("b"))
    handles.append(model.register_forward_pre_hook(hook("c")))
    with suppress(KeyError), without_hooks(handles):
        model(torch.ones(1))
        raise KeyError
    assert called == ["b"]
    model(torch.ones(1))
    assert called == ["b", "a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("train", "launched", "expected"),
    [
        ("bf16", "", "bf16"),
        ("auto", "bf16", "bf16"),
        ("no", "fp16", "fp16"),
        ("bf16", "fp16", r"train.mixed_precision is bf16.*fp16"),
        ("no", "fp8", "'fp8'"),
    ],
)
def test_precision_of_the_launcher(train, launched, expected, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    if len(expected) < 5:
        assert training_precision(train) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            training_precision(train)


@pytest.mark.parametrize(
    ("wanted", "capabilities", "expected"),
    [
        ("no", {"amx_bf16": True}, "no"),
        ("auto", {"avx512_bf16": True, "amx_bf16": False}, "bf16"),
        ("auto", {"avx512_bf16": False, "amx_bf16": True}, "bf16"),
        ("auto", {"architecture": "arm64"}, "no"),
    ],
)
def test_auto_is_bf16_only_where_a_cpu_computes_with_it(
    monkeypatch, wanted, capabilities, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert training_precision(wanted) == expected


def test_a_count_of_nothing_can_be_divided_by():
    assert global_count(Accelerator(cpu=True), torch.tensor([0, 3])).tolist() == [1, 3]
