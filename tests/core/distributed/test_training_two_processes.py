"""One process and two with the same global batch take the same steps, are killed,
resumed and stopped alike.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rewards.base import RewardError
from tests.training_for_tests import (
    LONGEST,
    Kill,
    assert_close_runs,
    assert_same_run,
    checked_run,
    files,
    lines,
    run_arguments_together,
    run_two,
    scst_config,
    write_pipeline,
    xe_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

REPOSITORY = Path(__file__).resolve().parents[3]
STILL = {
    "model.kwargs.dropout": 0.0
}  # dropout draws from a generator of its own in each process
SHARED = {
    "run.log_samples": 4
}  # rank 0 holds the first four images of the batch of eight


@pytest.fixture(scope="module")
def one_xe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "xe"
    checked_run(xe_config(folder, **STILL), folder)
    return folder


def test_cross_entropy_takes_the_same_steps(one_xe, tmp_path):
    folder = tmp_path / "two"
    for rank, ended in enumerate(run_two(xe_config(folder, **STILL), folder, "xe")):
        assert ended.code == 0, f"rank {rank}:\n{ended.output}"
    assert "2 process(es)" in (tmp_path / "two.0.log").read_text()
    assert_close_runs(one_xe, folder)
    for line in [line for line in lines(folder) if "time/step" in line]:
        assert line["train/images_per_second"] * line["time/step"] == pytest.approx(
            8
        ), "of both processes"
    extra = {f"checkpoints/step-0000000{step}/random_states_1.pkl" for step in (4, 6)}
    assert files(folder) == files(one_xe) | extra


Z_SCORES = {
    "reward.terms": {"cider": {"weight": 0.5}, "rouge_l": {"weight": 0.5}},
    "reward.normalize": "per_term",
}
REUSE = {"train.objective": "ppo_clip", "train.updates_per_rollout": 2}
SCHEDULES = {
    "reward.terms": {
        "cider": {"schedule": [[0, 1.0], [4, 0.5]]},
        "rouge_l": {"weight": 0.3},
    },
    "reward.normalize": "per_group",
    "rollout.temperature_schedule": [[0, 1.0], [4, 0.5]],
}


@pytest.mark.parametrize(
    ("advantage", "changes"),
    [
        ("greedy", {}),
        ("greedy", Z_SCORES),
        ("leave_one_out", REUSE),
        ("leave_one_out", SCHEDULES),
    ],
    ids=["raw", "z-scores", "two updates", "schedules"],
)
def test_self_critical_training_takes_the_same_steps(
    one_xe, tmp_path, advantage, changes
):
    options: dict[str, Any] = (
        SHARED | changes | {"train.advantage": advantage, "train.micro_batch_size": 2}
    )
    alone, together = tmp_path / "one", tmp_path / "two"
    checked_run(scst_config(alone, one_xe / "export/best", **options), alone, "scst")
    for ended in run_two(
        scst_config(together, one_xe / "export/best", **options), together, "scst"
    ):
        assert ended.code == 0, ended.output
    assert_close_runs(alone, together)
    assert len(lines(together, "samples.jsonl")) == 16


@pytest.mark.parametrize(
    "kill",
    [
        Kill("rl_caption.training.run:Run.begin_step", 4),
        Kill("accelerate:Accelerator.save_state", 2, "after"),
        Kill("rl_caption.training.checkpoint:seal", 4, "after"),
        Kill("rl_caption.training.checkpoint:os.rename", 3, "after"),
    ],
    ids=["in a step", "while saving", "before the rename", "while export/best is away"],
)
def test_killed_and_started_again(tmp_path_factory, tmp_path, kill):
    whole = tmp_path_factory.getbasetemp() / "whole-two"
    if not whole.exists():
        assert [ended.code for ended in run_two(xe_config(whole), whole, "xe")] == [
            0,
            0,
        ]
    folder = tmp_path / "run"
    assert (
        run_two(xe_config(folder), folder, "xe", kill=kill)[0].code == -signal.SIGKILL
    )
    for ended in run_two(xe_config(folder), folder, "xe"):
        assert ended.code == 0, ended.output
    assert_same_run(folder, whole)


def test_going_on_with_another_number_of_processes_says_so(tmp_path):
    folder = tmp_path / "run"
    checked_run(xe_config(folder, **STILL, **{"train.max_steps": 4}), folder)
    ended = run_two(xe_config(folder, **STILL, **{"run.resume": True}), folder, "xe")
    assert [one.code for one in ended] == [0, 0], ended[0].output
    assert "number of processes, 1 (now 2)" in ended[0].output
    assert [line["step"] for line in lines(folder) if "loss/total" in line] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_both_stages_in_one_command(tmp_path):
    """A pipeline runs its stages in the same processes, which may compute in other
    precisions; what is finished is skipped by both, and what is refused ends both.
    """
    stage = xe_config(
        tmp_path / "xe", **{"train.max_steps": 2, "train.mixed_precision": "bf16"}
    )
    folder = tmp_path / "scst"
    config = scst_config(folder, tmp_path / "xe/export/best")
    words = [
        "run",
        str(write_pipeline(tmp_path, xe=("xe", stage), scst=("scst", config))),
    ]
    for ended in run_arguments_together(2, words, tmp_path / "first"):
        assert ended.code == 0, ended.output
    assert (tmp_path / "xe/result.json").is_file()
    assert [line["step"] for line in lines(folder) if "loss/total" in line] == [
        1,
        2,
        3,
        4,
    ]
    for ended in run_arguments_together(2, words, tmp_path / "second"):
        assert ended.code == 0, ended.output
        assert "step 1/" not in ended.output
    first, _ = run_arguments_together(
        2, [*words, "--xe.train.lr", "0.5"], tmp_path / "third"
    )
    assert first.code == 1
    assert "--again xe" in first.output


@pytest.fixture
def launched(tmp_path) -> Iterator[Any]:
    """Start a program under a launcher, as typed; what is left of it at the end is killed."""
    started: list[psutil.Process] = []

    def start(
        configuration: str,
        program: str,
        config: dict[str, Any],
        *options: str,
        launcher: str = "accelerate.commands.launch",
    ) -> subprocess.Popen[str]:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")
        }
        environment |= {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
        }
        if launcher == SLURM:
            (tmp_path / "srun").write_text('#!/bin/sh\n"$@"\n')
            (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            for file in ("srun", "python"):
                (tmp_path / file).chmod(0o755)
            environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
            environment |= {"LAUNCH": f"configs/accelerate/{configuration}"}
            command = ["bash", SLURM, str(tmp_path / "run.yaml")]
        else:
            command = [
                sys.executable,
                "-m",
                launcher,
                "--config_file",
                f"configs/accelerate/{configuration}",
                *options,
            ]
            command += [f"scripts/{program}", "--config", str(tmp_path / "run.yaml")]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        started.append(psutil.Process(process.pid))
        return process

    yield start
    for process in started:
        if process.is_running():
            for child in [*process.children(recursive=True), process]:
                child.kill()


def wait_for_steps(launcher: int, folder: Path, count: int) -> None:
    """Until the run, of so many processes, has logged a few steps."""
    deadline = time.monotonic() + LONGEST
    log = folder / "metrics.jsonl"
    while not log.exists() or log.read_text().count("\n") < 3:
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)
    family = psutil.Process(launcher).children(recursive=True)
    ranks = {
        rank
        for process in family
        if (rank := process.environ().get("RANK")) is not None
    }
    assert len(ranks or {"0"}) == count


SLOW = """
import time
from pathlib import Path

class Slow:
    __name__, columns, bounds, signature = "slow", frozenset(), (0.0, 1.0), "slow"

    def __init__(self, marker):
        self.marker = Path(marker)

    def __call__(self, prompts, completions, **columns):
        time.sleep(self.marker.exists())
        return [0.5] * len(completions)
"""
SLURM = "scripts/slurm_scst.sh"


@pytest.mark.parametrize(
    ("launcher", "configuration", "count", "number", "everyone"),
    [
        ("rl_caption.runtime.launch", "cpu.yaml", 1, signal.SIGINT, True),
        ("rl_caption.runtime.launch", "cpu.yaml", 1, signal.SIGHUP, False),
        (SLURM, "cpu2.yaml", 2, signal.SIGTERM, True),
        ("rl_caption.runtime.launch", "cpu2.yaml", 2, signal.SIGTERM, False),
    ],
    ids=["Ctrl-C", "launcher of one", "Slurm", "launcher of two"],
)
def test_a_signal_saves_before_the_launcher_ends(
    one_xe, tmp_path, launched, launcher, configuration, count, number, everyone
):
    """What a scheduler does: a signal, to the launcher or to all processes of a job,
    and an end to all that is left.
    """
    folder, marker = tmp_path / "run", tmp_path / "slow"
    (tmp_path / "slow_reward.py").write_text(SLOW)
    config = scst_config(
        folder,
        one_xe / "export/best",
        **{"train.max_steps": 1_000_000, "eval.every": 1_000_000},
    )
    config["reward"]["terms"] = {
        "slow": {"target": "slow_reward:Slow", "kwargs": {"marker": str(marker)}}
    }
    config["data"]["num_workers"] = int(everyone)
    job = launched(configuration, "scst.py", config, launcher=launcher)
    wait_for_steps(job.pid, folder, count)
    first = psutil.Process(job.pid)
    if (
        launcher == SLURM
    ):  # it signals the processes of a step, but neither the script nor the srun that wait for it
        ((first,),) = (srun.children() for srun in first.children())
    family = [first, *first.children(recursive=True)]
    marker.touch()
    for process in family if everyone else family[:1]:
        process.send_signal(number)
    code = job.wait(30)
    left = [process for process in family if process.is_running()]
    for process in left:
        process.kill()
    log = (tmp_path / "log").read_text()
    assert code == (130 if number == signal.SIGINT else 0), log
    assert "Traceback" not in log
    assert not left
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert (
        f"terminated: checkpoint of step {int(checkpoint.name.removeprefix('step-'))} saved"
        in log
    )
    assert lines(folder)[-1]["step"] == int(checkpoint.name.removeprefix("step-"))


FAILS_ON_RANK_1 = """
import os

class Failing:
    __name__ = "failing"
    columns = frozenset()
    bounds = (0.0, 1.0)
    signature = "failing"
    calls = 0

    def __init__(self, killed=False):
        self.killed = killed

    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        broken = os.environ["RANK"] == "1" and self.calls > 2
        if broken and self.killed:
            os.kill(os.getpid(), 9)
        return [float("nan") if broken else 0.5] * len(completions)
"""


@pytest.mark.parametrize(
    ("configuration", "killed"), [("cpu2.yaml", True), ("deepspeed_zero3.yaml", False)]
)
def test_a_rank_that_fails_or_is_killed_ends_the_job(
    one_xe, tmp_path, launched, configuration, killed
):
    folder = tmp_path / "run"
    (tmp_path / "failing_reward.py").write_text(FAILS_ON_RANK_1)
    config = scst_config(
        folder, one_xe / "export/best", **{"train.max_steps": 1_000_000}
    )
    config["reward"]["terms"] = {
        "mine": {"target": "failing_reward:Failing", "kwargs": {"killed": killed}}
    }
    launcher = launched(configuration, "scst.py", config, "--num_processes", "2")
    family = psutil.Process(launcher.pid)
    code = launcher.wait(LONGEST)
    log = (tmp_path / "log").read_text()
    assert code != 0, log
    if killed:
        assert "(local_rank: 1)" in log
        assert "Signal 9 (SIGKILL)" in log
    else:
        assert (
            "error: reward term 'mine': reward 'failing' returned nan for caption 0"
            in log
        )
    assert not family.is_running()
    left = [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]
    assert not left


class Waning:
    """A judge that thinks less of the captions at every validation, or fails at the second one."""

    __name__, columns, bounds, signature = (
        "waning",
        frozenset[str](),
        (0.0, 1.0),
        "waning",
    )

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.calls = fails, 0

    def __call__(
        self, prompts: object, completions: list[str], **columns: object
    ) -> list[float]:
        self.calls += 1
        if self.fails and self.calls > 1:
            raise RewardError("no score today")
        return [1 / self.calls] * len(completions)


class Waxing(Waning):
    """A reward that always rises."""

    __name__, signature = "waxing", "waxing"

    def __call__(
        self, prompts: object, completions: list[str], **columns: object
    ) -> list[float]:
        return [1 - score for score in super().__call__(prompts, completions)]


@pytest.mark.parametrize("fails", [False, True], ids=["alarm", "failing judge"])
def test_the_monitor_of_the_main_process_ends_both(one_xe, tmp_path, fails):
    judges = {"waning": {"target": f"{__name__}:Waning", "kwargs": {"fails": fails}}}
    options = {
        "reward.terms": {"waxing": {"target": f"{__name__}:Waxing"}},
        "monitor": {"judges": judges, "stop": True},
        "train.advantage": "leave_one_out",
    }
    for ended in run_two(
        scst_config(tmp_path / "two", one_xe / "export/best", **options),
        tmp_path / "two",
        "scst",
    ):
        assert ended.code == (1 if fails else 0), ended.output
        if fails:
            assert "judge 'waning': no score today" in ended.output
    steps = [
        line["step"] for line in lines(tmp_path / "two") if "hacking/alarm" in line
    ]
    assert steps == ([0] if fails else [0, 2])
