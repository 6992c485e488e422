"""What a user can mend ends with one clear message and a non-zero code, without a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from rl_caption.__main__ import run as run_program
from tests.training_for_tests import (
    DATA,
    checked_run,
    files,
    lines,
    run,
    scst_config,
    weights,
    xe_config,
)

ROOT = Path(__file__).parents[3]
NAN_REWARD = """
import math

class Broken:
    __name__ = "broken"
    columns = frozenset()
    bounds = (0.0, 1.0)
    signature = "broken"

    def __call__(self, prompts, completions, **columns):
        if len(completions) == 6:  # the validation images
            return [0.5] * 6
        return [0.5] * (len(completions) - 2) + [math.nan, 0.5]
"""


def assert_one_message(ended, *parts, code=1):
    assert ended.code == code, ended.output
    assert "Traceback" not in ended.output, ended.output
    errors = [line for line in ended.output.splitlines() if "error: " in line]
    assert len(errors) == 1, ended.output
    for part in parts:
        assert part in ended.output, f"{part!r} is not in:\n{ended.output}"


def test_nan_in_the_weights_stops_before_the_update(tmp_path):
    folder = tmp_path / "run"
    ended = run(xe_config(folder), folder, poison=3)
    good = folder / "checkpoints/step-00000002"
    assert_one_message(
        ended,
        "loss/total is nan at step 3",
        f"checkpoint: {good}",
    )
    assert [line["step"] for line in lines(folder) if "loss/total" in line] == [1, 2]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [good.name]
    assert all(tensor.isfinite().all() for tensor in weights(good).values())


def test_a_reward_that_returns_nan_names_itself_and_the_row(start, tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "broken_reward.py").write_text(NAN_REWARD)
    config = scst_config(folder, start)
    config["reward"]["terms"] = {"mine": {"target": "broken_reward:Broken"}}
    ended = run(config, folder, "scst", python_path=str(tmp_path))
    # 8 images x 2 samples, then 8 greedy captions: row 22 of 24 is the last but one.
    assert_one_message(
        ended, "reward term 'mine'", "'broken' returned nan for caption 22"
    )


EXITING = """
import sys

class Exiting:
    __name__ = "exiting"
    columns = frozenset()
    bounds = (0.0, 1.0)
    signature = "exiting"

    def __call__(self, prompts, completions, **columns):
        sys.exit(0)

def objective(logprobs, old_logprobs, ref_logprobs, mask, scores, advantages):
    sys.exit(0)

def advantage(rewards, greedy_rewards):
    sys.exit(0)

def data(path=""):
    sys.exit(0)
"""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward.terms.mine.target", "exiting:Exiting"),
        ("train.objective", "exiting:objective"),
        ("train.advantage", "exiting:advantage"),
        ("data.target", "exiting:data"),
    ],
)
def test_user_code_that_exits_ends_with_an_error_and_its_line(
    start, key, value, tmp_path
):
    (tmp_path / "exiting.py").write_text(EXITING)
    folder = tmp_path / "run"
    changes = {
        key: value,
        "train.kl_coef": 0,
        "data": DATA if key != "data.target" else {"target": value},
    }
    ended = run(
        scst_config(folder, start, **changes), folder, "scst", python_path=str(tmp_path)
    )
    assert_one_message(ended, "exiting.py, line ", "sys.exit(0)", "SystemExit: 0")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"train.micro_batch_size": 3},
            "is not a multiple of 1 processes times train.micro_batch_size 3",
        ),
        (
            {"train.max_target_tokens": 17},
            "train.max_target_tokens is 17: the captioner has positions for 16",
        ),
        ({"data.kwargs.num_val": 1}, "eval.split 'val' has 1 usable image"),
        (
            {"train.mixed_precision": "fp16"},
            "train.mixed_precision is fp16, which a CPU cannot train in",
        ),
        ({"train.num_processes": 2}, "train.num_processes=2, but 1 train together"),
        (
            {"rollout.max_new_tokens": 40},
            "rollout.max_new_tokens is 40: the captioner has positions for 16",
        ),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_named(start, tmp_path, changes, part):
    folder = tmp_path / "run"
    if "rollout.max_new_tokens" in changes:
        ended = run(scst_config(folder, start, **changes), folder, "scst")
    else:
        ended = run(xe_config(folder, **changes), folder)
    assert_one_message(ended, part)


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path):
    folder = tmp_path / "file" / "run"
    (tmp_path / "file").write_text("not a folder")
    assert_one_message(run(xe_config(folder), tmp_path / "run"), str(folder))


def contents(folder):
    return {name: (folder / name).read_bytes() for name in files(folder)}


def test_a_full_disk_is_told_and_the_checkpoint_before_is_kept(tmp_path):
    """The weights take 81 kB in a checkpoint, the optimizer twice that."""
    folder = tmp_path / "run"
    options = {"eval.every": 100, "run.save_every": 2, "train.max_steps": 4}
    checked_run(xe_config(folder, **options), folder)
    before = contents(folder / "checkpoints")
    options |= {"train.max_steps": 6, "run.resume": True}
    for largest in (
        40_000,
        120_000,
    ):  # the weights do not fit, or the optimizer does not
        ended = run(xe_config(folder, **options), folder, largest_file=largest)
        assert_one_message(ended, "step-00000006 could not be written")
        assert contents(folder / "checkpoints") == before
        assert not list(folder.rglob(".partial-*"))


def dataset(folder):
    """JSON lines with six images, of which row 2 has none."""
    folder.mkdir()
    rows = []
    for index in range(6):
        Image.new("RGB", (16, 16), (index * 40, 0, 0)).save(folder / f"{index}.png")
        split = "val" if index > 3 else "train"
        rows.append(
            {
                "image": f"{index}.png",
                "references": ["a red square", "red"],
                "split": split,
            }
        )
    rows[2]["image"] = "lost.png"
    file = folder / "captions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = {"train.batch_size": 2, "train.micro_batch_size": 2, "train.max_steps": 1}
    return {"data.format": "jsonl", "data.path": str(file), "data.kwargs": {}, **size}


def test_unusable_rows_are_named_before_training(tmp_path):
    folder, data = tmp_path / "run", dataset(tmp_path / "data")
    assert_one_message(run(xe_config(folder, **data), folder), "lost.png")
    skipped = checked_run(xe_config(folder, **data, **{"data.on_bad": "skip"}), folder)
    assert "3 training and 2 validation images" in skipped.output


INTERRUPTED = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(9)
except BaseException:  # as some libraries do where they look for others
    pass
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("yaml", ["-m", "rl_caption", "scst"]),
        ("yaml", [str(ROOT / "scripts" / "scst.py")]),
        (
            "yaml",
            [
                "-c",
                "from rl_caption.__main__ import main; raise SystemExit(main())",
                "scst",
            ],
        ),  # the command
        ("psutil", ["-m", "rl_caption.runtime.launch"]),
    ],
)
def test_an_interruption_while_modules_are_imported_is_one_line(
    tmp_path, module, command
):
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_an_interruption_of_a_program_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("rl_caption.cli.preflight.main", interrupted)
    assert run_program("doctor", []) == 130
    assert capsys.readouterr().err == "interrupted\n"
