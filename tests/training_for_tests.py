"""Tiny trainings: their configurations, and forked processes that run them, fail or are
killed on request.

Importing torch and Transformers takes seconds, so one fork server imports everything
once and each run is a fork of it.
"""

import importlib
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks import engine_memory
from rewards.clip.preprocessing import clip_tokenizer
from rewards.files import load_json
from rl_caption.cli.stages import make_stages
from rl_caption.config.reward_models import RewardModelConfig

ENGINES = {name: engine_memory.environment(name) for name in engine_memory.ENGINES}
"""Name of a DeepSpeed engine -> environment variables that ``accelerate launch
--config_file configs/accelerate/deepspeed_NAME.yaml`` sets.
"""
LONGEST = 300
"""Seconds after which a run counts as hanging."""
PRELOAD = [
    "rl_caption.programs.train",
    "rl_caption.captioners.huggingface",
    "rl_caption.captioners.transformer",
    "rl_caption.reward_models.program",
    "open_clip",
    "rl_caption.cli.main",
    "rl_caption.programs.report.page",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "torch._dynamo",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.ops.op_builder.all_ops",
    "tests.hf_models_for_tests",
    "tests.training_for_tests",
]
# Kept, so that no fork makes its own:
RewardModelConfig.choose({})
clip_tokenizer()
Image.init()
MODEL = {
    "min_count": 1,
    "kwargs": {
        "image_size": 32,
        "patch_size": 16,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "num_heads": 2,
        "ffn_dim": 32,
        "max_positions": 16,
        "dropout": 0.2,
    },
}
DATA = {
    "format": "scenes",
    "kwargs": {
        "num_train": 32,
        "num_val": 6,
        "num_test": 0,
        "num_unseen": 0,
        "image_size": 32,
    },
}


def xe_config(folder, **changes):
    """Cross-entropy with dropout (so that random states matter) and accumulation;
    ``changes`` are dotted keys.
    """
    return changed(
        {
            "model": MODEL,
            "data": DATA,
            "train": {
                "max_steps": 6,
                "batch_size": 8,
                "micro_batch_size": 4,
                "lr": 0.003,
                "warmup_steps": 2,
                "schedule": "cosine",
                "captions_per_image": 2,
                "max_target_tokens": 12,
                "threads": 1,
            },
            "eval": {"every": 2},
            "run": {"dir": str(folder), "log_every": 1},
        },
        changes,
    )


def scst_config(folder, init, **changes):
    """Self-critical training with every term of the loss; ``changes`` are dotted keys."""
    return changed(
        {
            "model": {"init": str(init)},
            "data": DATA,
            "rollout": {"num_samples": 2, "max_new_tokens": 8},
            "reward": {"terms": {"cider": {"weight": 1.0}}},
            "train": {
                "advantage": "greedy",
                "max_steps": 4,
                "batch_size": 8,
                "lr": 0.003,
                "kl_coef": 0.05,
                "xe_weight": 0.1,
                "threads": 1,
            },
            "eval": {"every": 2},
            "run": {"dir": str(folder), "log_every": 1},
        },
        changes,
    )


def write_pipeline(folder, **stages):
    """Write a pipeline of stages, each with its program and configuration, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = {}
    for name, (program, config) in stages.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        listed[name] = {program: str(folder / f"{name}.yaml")}
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump({"stages": listed}, sort_keys=False))
    return file


def changed(config, changes):
    """A copy of ``config`` with the values at dotted keys replaced."""
    config = json.loads(json.dumps(config))
    for key, value in changes.items():
        *parents, last = key.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return config


@dataclass(frozen=True)
class Kill:
    """SIGKILL (or another signal) at the ``call``-th call of ``target``
    (``module:attribute.attribute``).

    ``moment`` is ``before`` the call, ``after`` it, or ``half`` way through its writing
    or removing.
    """

    target: str
    call: int = 1
    moment: str = "before"
    number: int = signal.SIGKILL


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a run."""

    code: int
    """Exit code, or minus the signal that ended it."""
    output: str
    """Standard output and error."""


def run(config, folder, program="xe", **how):
    """Run ``python -m rl_caption PROGRAM --config FILE`` in a fork; ``how`` as in ``_child``."""
    file = folder.with_name(f"{folder.name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config))
    return run_arguments(
        [program, "--config", str(file)], file.with_suffix(".log"), **how
    )


def checked_run(config, folder, program="xe", **how):
    """``run``, which must end with 0, or with SIGKILL if ``kill`` sends it."""
    ended, kill = run(config, folder, program, **how), how.get("kill")
    is_killed = kill is not None and kill.number == signal.SIGKILL
    assert ended.code == (-signal.SIGKILL if is_killed else 0), ended.output
    return ended


def run_arguments(arguments, output, **how):
    """Run ``python -m rl_caption ARGUMENTS`` in a fork, and return how it ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_child, args=(arguments, str(output)), kwargs=how)
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"{arguments} hang:\n{output.read_text()}")
    return Ended(process.exitcode, output.read_text() if output.exists() else "")


def checked_arguments(arguments, output, **how):
    """``run_arguments``, which must end with 0; return the output."""
    ended = run_arguments(arguments, output, **how)
    assert ended.code == 0, ended.output
    return ended.output


def run_together(count, config, folder, program, *how, **named):
    """Run the program in ``count`` processes; ``how`` as in ``run_arguments_together``."""
    file = folder.with_name(f"{folder.name}.yaml")
    file.write_text(yaml.safe_dump(config))
    words = [program, "--config", str(file)]
    return run_arguments_together(count, words, folder, *how, **named)


def run_arguments_together(
    count, arguments, folder, kill=None, engine=None, spoil=None
):
    """Run ``python -m rl_caption ARGUMENTS`` in ``count`` processes that train together
    (gloo), with the environment of an ``engine``; logs are beside ``folder``.

    ``kill`` is for rank 0; then the other processes are killed. After step ``spoil``
    the last process alone has weights that are not finite.
    """
    port, context = get_free_port(), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    outputs = [folder.with_name(f"{folder.name}.{rank}.log") for rank in range(count)]
    processes = []
    for rank, output in enumerate(outputs):
        launched = engine_memory.launched(rank, count, port) | (engine or {})
        how = {
            "environment": {"OMP_NUM_THREADS": "1"} | launched,
            "kill": kill if rank == 0 else None,
            "spoil": spoil if rank == count - 1 else None,
        }
        child = (arguments, str(output))
        processes.append(context.Process(target=_child, args=child, kwargs=how))
        processes[-1].start()
    processes[0].join(LONGEST)
    if kill is not None or processes[0].is_alive():
        for other in processes[1:]:
            other.kill()
    for process in processes:
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()
    pairs = zip(processes, outputs, strict=True)
    return [Ended(process.exitcode or 0, log.read_text()) for process, log in pairs]


run_two = partial(run_together, 2)


def _child(
    arguments,
    output,
    kill=None,
    poison=None,
    spoil=None,
    largest_file=None,
    python_path=None,
    environment=None,
    simulated=False,
):
    """Run the program with a ``kill`` armed, with NaN in a weight from step ``poison``
    on or after step ``spoil``, with a limit of file sizes (bytes), or on a simulated
    device.
    """
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["rl_caption", *arguments]
    os.environ.update(environment or {})
    torch.set_num_threads(1)
    if python_path is not None:
        sys.path.insert(0, python_path)
    if kill is not None:
        _arm(kill)
    for step, after in ((poison, False), (spoil, True)):
        if step is not None:
            _break_weights(step, after)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if simulated:
        from tests import simulated_device_for_tests

        simulated_device_for_tests.activate()
    from rl_caption.cli.main import main

    sys.exit(main(arguments))


def _arm(kill):
    module, path = kill.target.split(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0

    def armed(*positional, **named):
        nonlocal calls
        calls += 1
        if calls != kill.call:
            return original(*positional, **named)
        if kill.moment == "half":
            _write_half(original, *positional, **named)
        result = original(*positional, **named) if kill.moment == "after" else None
        os.kill(os.getpid(), kill.number)
        return result if kill.moment == "after" else original(*positional, **named)

    setattr(owner, name, armed)


def _write_half(original, *positional, **named):
    """Call a function that writes or removes a path, and leave half of its work."""
    path = next(Path(value) for value in positional if isinstance(value, str | Path))
    if original.__name__ == "rmtree":
        next(file for file in sorted(path.iterdir()) if file.is_file()).unlink()
        return
    before = path.stat().st_size if path.exists() else 0
    original(*positional, **named)
    whole = path.read_bytes()
    path.write_bytes(whole[: (before + len(whole)) // 2])


def _break_weights(step, after):
    """Make a weight NaN before step ``step``, or after it; if the weight is sharded,
    this process's shard.
    """
    from rl_caption.training.run import Run

    name = "end_step" if after else "begin_step"
    original = getattr(Run, name)

    def broken(self, *arguments):
        result = original(self, *arguments)
        if self.state.global_step + (not after) == step:
            *_, last = filter(lambda one: one.requires_grad, self.model.parameters())
            getattr(last, "ds_tensor", last).detach().fill_(math.nan)
        return result

    setattr(Run, name, broken)


def lines(folder, file="metrics.jsonl"):
    """Records of a run's log."""
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def steps(folder, key="loss/total"):
    """Steps whose records in a run's log have a key."""
    return [line["step"] for line in lines(folder) if key in line]


def values(folder, key):
    """Values of a key in a run's log, record after record."""
    return [line[key] for line in lines(folder) if key in line]


def read_json(path):
    """Contents of a JSON file, or of ``result.json`` in a run's folder."""
    path = Path(path)
    return load_json(path / "result.json" if path.is_dir() else path)


def untimed(folder):
    """Records of ``metrics.jsonl`` without the keys of times."""
    timed = ("time/", "val/seconds", "train/images_per_second")
    return [
        {key: value for key, value in line.items() if not key.startswith(timed)}
        for line in lines(folder)
    ]


def files(folder):
    """Relative paths of all files in a folder."""
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }


def weights(folder):
    """Weights of a checkpoint or of an exported model."""
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def _last_and_best(one, other):
    """Yield the name of each weight of the last checkpoint and of the exported model,
    with its values in both runs.
    """
    last = sorted((other / "checkpoints").iterdir())[-1].relative_to(other)
    for model in (last, Path("export/best")):
        found, expected = weights(one / model), weights(other / model)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            yield f"{model}: {name}", value, expected[name]


def assert_close_runs(one, other, rel=1e-5):
    """Assert that steps, samples, best model and last checkpoint of two runs are equal
    up to float32 rounding.
    """
    for a, b in zip(untimed(one), untimed(other), strict=True):
        assert a == pytest.approx(b, rel=rel, abs=rel / 100)
    if (one / "samples.jsonl").exists():
        keys = ("step", "image_id", "samples", "greedy")
        for pair in zip(
            *(lines(run, "samples.jsonl") for run in (one, other)), strict=True
        ):
            assert len({str([line[key] for key in keys]) for line in pair}) == 1
    for name, found, expected in _last_and_best(other, one):
        assert found.dtype == expected.dtype
        # The bias of the keys has no gradient but rounding errors, which Adam scales up to full
        # steps.
        if not name.endswith("key.bias"):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def assert_same_run(run_folder, whole):
    """Assert that the files with results of a stopped and resumed run equal the files
    of a whole run, bit for bit.
    """
    of_pipeline = {"stage.json"}
    assert files(run_folder) - of_pipeline == files(whole) - of_pipeline
    for name, found, expected in _last_and_best(run_folder, whole):
        assert torch.equal(found, expected), f"{name} differs"
    assert untimed(run_folder) == untimed(whole)
    if (whole / "samples.jsonl").exists():
        assert lines(run_folder, "samples.jsonl") == lines(whole, "samples.jsonl")
    assert read_json(run_folder) == read_json(whole)
    final = sorted((whole / "checkpoints").iterdir())[-1].relative_to(whole)
    moments = [
        torch.load(folder / final / "optimizer.bin", weights_only=True)["state"]
        for folder in (run_folder, whole)
    ]
    torch.testing.assert_close(*moments, rtol=0, atol=0)


def stage_config(pipeline, stage):
    """The configuration of a stage of a shipped pipeline."""
    stages, _ = make_stages(pipeline)
    return next(one for one in stages if one.name == stage).config


def write_stage(pipeline, stage, file):
    """Write the configuration of a stage of a shipped pipeline to a file."""
    values = stage_config(pipeline, stage).model_dump(mode="json", exclude_unset=True)
    file.write_text(yaml.safe_dump(values))
    return file
