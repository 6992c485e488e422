"""DeepSpeed ZeRO-1, 2 and 3 on CPU processes: the same steps, samples, checkpoints and exports."""

import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks import engine_memory
from tests.training_for_tests import (
    ENGINES,
    PRELOAD,
    Kill,
    assert_close_runs,
    checked_run,
    files,
    lines,
    run_together,
    scst_config,
    xe_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

OPTIONS = {
    # four backward passes a process, or two, and as many again for cross-entropy
    "train.micro_batch_size": 2,
    "train.grad_clip_norm": 0.1,  # gradients are two times as long
    "run.log_samples": 4,  # rank 0 holds the first four images of the batch of eight
}
SHARDED_FILES = {
    "manifest.json",
    "model.safetensors",
    "optimizer.bin",
    "trainer_state.json",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A captioner without dropout, whose random numbers belong to a process."""
    folder = tmp_path_factory.mktemp("start") / "xe"
    checked_run(
        xe_config(folder, **{"model.kwargs.dropout": 0.0, "train.max_steps": 30}),
        folder,
    )
    return folder / "export/best"


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory) -> Path:
    """Four self-critical steps of one process under plain Accelerate."""
    folder = tmp_path_factory.mktemp("whole") / "plain"
    checked_run(scst_config(folder, trained, **OPTIONS), folder, "scst")
    return folder


@pytest.fixture(scope="module")
def killed(trained, tmp_path_factory):
    """A function of engine and processes: the folder of a run that was killed in its
    fourth step, made once.
    """
    made: dict[tuple[str, int], Path] = {}

    def killed_run(engine: str, count: int) -> Path:
        if (engine, count) not in made:
            folder = tmp_path_factory.mktemp("killed") / f"{engine}-{count}"
            kill = Kill("rl_caption.training.run:Run.begin_step", 4)
            config = scst_config(folder, trained, **OPTIONS)
            first = run_together(count, config, folder, "scst", kill, ENGINES[engine])[
                0
            ]
            assert first.code == -signal.SIGKILL, first.output
            made[engine, count] = folder
        return made[engine, count]

    return killed_run


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_killed_resumed_and_exported_as_one_plain_process(
    trained, whole, killed, tmp_path, engine, count
):
    folder = shutil.copytree(killed(engine, count), tmp_path / "run")
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    assert files(checkpoint) == SHARDED_FILES | {
        f"random_states_{rank}.pkl" for rank in range(count)
    }
    config = scst_config(folder, trained, **OPTIONS)
    for ended in run_together(count, config, folder, "scst", engine=ENGINES[engine]):
        assert ended.code == 0, ended.output
    log = (tmp_path / "run.0.log").read_text()
    assert f"going on from {folder / 'checkpoints/step-00000002'}" in log
    assert f"{count} process(es) on cpu" in log
    assert f"engine {engine}, " in log
    assert_close_runs(whole, folder, rel=2e-5)
    assert len(lines(folder, "samples.jsonl")) == 16
    assert files(folder / "export/best") == files(whole / "export/best")


def test_several_updates_on_a_rollout_are_those_of_one_plain_process(trained, tmp_path):
    options = OPTIONS | {"train.objective": "ppo_clip", "train.updates_per_rollout": 2}
    alone, folder = tmp_path / "alone", tmp_path / "run"
    checked_run(scst_config(alone, trained, **options), alone, "scst")
    for ended in run_together(
        2,
        scst_config(folder, trained, **options),
        folder,
        "scst",
        engine=ENGINES["zero3"],
    ):
        assert ended.code == 0, ended.output
    assert_close_runs(alone, folder, rel=2e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("zero3", 2), ("plain", 1)),
        (("plain", 1), ("zero3", 2)),
        (("zero1", 2), ("zero2", 1)),
    ],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def test_a_run_goes_on_under_another_engine_and_number_of_processes(
    trained, whole, killed, tmp_path, before, after
):
    folder = shutil.copytree(killed(*before), tmp_path / "run")
    config = scst_config(folder, trained, **OPTIONS)
    for ended in run_together(
        after[1], config, folder, "scst", engine=ENGINES[after[0]]
    ):
        assert ended.code == 0, ended.output
    if before[1] != after[1]:
        assert (
            f"number of processes, {before[1]} (now {after[1]})"
            in (tmp_path / "run.0.log").read_text()
        )
    assert_close_runs(whole, folder, rel=2e-5)
    assert len(lines(folder, "samples.jsonl")) == 16


@pytest.mark.parametrize("engine", ["plain", "zero2", "zero3"])
def test_all_processes_refuse_to_write_weights_that_one_of_them_has_spoilt(
    tmp_path, engine
):
    folder = tmp_path / "run"
    config = xe_config(folder, **{"eval.every": 4, "run.save_every": 1})
    for ended in run_together(2, config, folder, "xe", engine=ENGINES[engine], spoil=2):
        assert ended.code == 1, ended.output
        assert "NaN or infinite after step 2" in ended.output
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [
        "step-00000001"
    ]


def held(module: torch.nn.Module, engine: str) -> int:
    """Elements of the parameters that this process holds, by what the engine itself keeps for each."""
    return sum(parameter.numel() for parameter in module.parameters())


def _decode_alone(
    rank: int, engine: str, port: int, model: str, queue: multiprocessing.Queue
) -> None:
    """Rank 0 decodes one token of one image, rank 1 eight tokens of two images, three
    times; the second time fails.

    Both train a step after each.
    """
    os.environ.update(ENGINES[engine] | engine_memory.launched(rank, 2, port))
    from rl_caption.captioners.config import Decoding
    from rl_caption.captioners.transformer import TransformerCaptioner
    from rl_caption.config.schema import RunConfig, TrainConfig
    from rl_caption.runtime.engines import backward_all, build_accelerator
    from rl_caption.runtime.zero import gathered_parameters, prepare

    train = TrainConfig(threads=1, batch_size=2, grad_clip_norm=None)
    accelerator = build_accelerator(train, RunConfig())
    if engine == "zero3":
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["zero_optimization"]["stage3_param_persistence_threshold"] = (
            0  # spread the small ones too
        )
    captioner = TransformerCaptioner.from_pretrained(model)
    policy = captioner.policy.eval()
    images = {"pixel_values": torch.ones(1 + rank, 3, 32, 32)}
    decoding = Decoding(max_new_tokens=8 if rank else 1)
    expected = captioner.generate(policy, images, decoding, None)
    whole = sum(parameter.numel() for parameter in policy.parameters())
    prepared, _ = prepare(accelerator, policy, torch.optim.AdamW(policy.parameters()))
    hooks = [
        (dict(part._forward_hooks), dict(part._forward_pre_hooks))
        for part in policy.modules()
    ]
    found = []
    for fails in (False, True, False):
        found.append(held(policy, engine) < 0.6 * whole)
        try:
            with gathered_parameters(accelerator, prepared), torch.no_grad():
                found.append(held(policy, engine) == whole)
                found.append(
                    torch.equal(
                        captioner.generate(policy, images, decoding, None), expected
                    )
                )
                if fails:
                    raise InterruptedError
        except InterruptedError:
            found.append(True)
        found.append(held(policy, engine) < 0.6 * whole)
        found.append(
            hooks
            == [
                (dict(part._forward_hooks), dict(part._forward_pre_hooks))
                for part in policy.modules()
            ]
        )
        share = [
            lambda: captioner.token_logits(
                prepared, images, expected.clamp(min=3)
            ).mean()
        ]
        backward_all(accelerator, prepared, share)
    queue.put(found)
    accelerator.wait_for_everyone()


def test_processes_decode_different_numbers_of_tokens(start):
    port = get_free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    queue = context.Queue()
    processes = [
        context.Process(
            target=_decode_alone,
            args=(rank, "zero3", port, str(start), queue),
            daemon=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        assert [queue.get(timeout=60) for _ in processes] == [[True] * 16] * 2
    finally:
        for process in processes:
            process.kill()


def test_memory_is_what_the_page_says():
    """Bytes a parameter of ZeRO-2 on two processes, by the second table of docs/scaling.md."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    row = engine_memory.measure_engine("zero2", 2, "forkserver")
    assert [row[moment] for moment in engine_memory.MOMENTS] == pytest.approx(
        (10, 10, 12.11, 12.11), abs=0.02
    )
