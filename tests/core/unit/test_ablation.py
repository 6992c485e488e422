"""The parts of an ablation: cells from a configuration, trainings in parallel, tables,
and what is refused.
"""

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from rl_caption.captioners.loading import weights_hash
from rl_caption.cli.configuration import parse
from rl_caption.config.schema import RewardTerm
from rl_caption.evaluation.results import column_of
from rl_caption.programs.ablation.config import AblateConfig, CellConfig
from rl_caption.programs.ablation.grid import (
    Result,
    Run,
    ended_runs,
    share_devices,
    write_tables,
)
from rl_caption.programs.ablation.runner import check_start, make_plan
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.launch import stop_requests
from rl_caption.runtime.threads import granted_cores
from rl_caption.training.checkpoint import write_run_files

MIX = {"cider": RewardTerm(weight=0.5), "bleu": RewardTerm(weight=0.5)}
WORLD = "{num_train: 4, num_val: 2, num_test: 2, num_unseen: 0, image_size: 32}"
SMALL_WORLD = f"data: {{format: scenes, kwargs: {WORLD}}}\n"


def grid(**changes):
    return AblateConfig(
        recipe="a.yaml", cells={"S_Mix": CellConfig(terms=MIX)}
    ).replace(**changes)


def cell(**overrides):
    return {"L": CellConfig(terms={"cider": RewardTerm()}, overrides=overrides)}


def planned(config, tmp_path, text=None):
    base = tmp_path / "base.yaml"
    if text is not None:
        base.write_text(text)
    return make_plan(config.replace(recipe=str(base), out=str(tmp_path / "out")), parse)


def captioner(folder):
    """What looks like a saved captioner; ``base.yaml`` that starts from it."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return SMALL_WORLD + f"model: {{init: {folder}}}\n"


@pytest.mark.parametrize(("jobs", "threads"), [(10**4, 1), (1, granted_cores())])
def test_cells_go_seed_by_seed_and_share_the_cores(
    tmp_path, monkeypatch, jobs, threads
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = grid(cells=grid().cells | cell(), seeds=[3, 1, 3], jobs=jobs)
    text = SMALL_WORLD + "model: {name: huggingface, init: Owner/model}\n"
    _, _, runs = planned(config, tmp_path, text)
    assert [run.seed for run in runs] == [3, 3, 1, 1]
    assert runs[0].folder == tmp_path / "out/cells/S_Mix/seed3/run"
    assert runs[0].config.train.threads == threads


def test_nothing_starts_before_everything_is_checked(tmp_path):
    text = captioner(tmp_path / "start")
    absent = SMALL_WORLD + f"model: {{init: {tmp_path}/absent}}\n"
    for match, config, base in (
        ("/absent", grid(), absent),
        (r"cell 'L'.*train\.lrr", grid(cells=cell(**{"train.lrr": 1.0})), text),
        ("cell 'L'", grid(cells=cell(**{"data.kwargs.num_test": 1})), text),
        ("a/b", grid(cells={"a/b": CellConfig()}), text),
    ):
        with pytest.raises(ConfigError, match=match):
            planned(config, tmp_path, base)
    assert not (tmp_path / "out").exists()


def test_a_cell_replaces_the_reward_and_data_of_the_grid_reach_all_runs(tmp_path):
    base = captioner(tmp_path / "start")
    base += "reward: {terms: {rouge_l: {weight: 9.0}}}\ntrain: {lr: 0.5, seed: 7}\n"
    (tmp_path / "base.yaml").write_text(base)
    terms = {"cider": {"weight": 0.5, "kwargs": {"n": 3}}}
    values = {
        "recipe": f"{tmp_path}/base.yaml",
        "out": f"{tmp_path}/out",
        "seeds": [2],
        "cells": {"L": {"terms": terms, "overrides": {"train.lr": 1.0e-5}}},
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(values))
    words = ["--config", f"{tmp_path}/grid.yaml", "--all.data.kwargs.num_test", "3"]
    _, rows, (run,) = make_plan(parse(AblateConfig, words, "ablate"), parse)
    assert run.config.reward.terms == {"cider": RewardTerm(weight=0.5, kwargs={"n": 3})}
    assert (run.config.train.lr, run.config.train.seed) == (1e-5, 2)
    assert run.config.data.kwargs["num_train"] == 4, "what is not named stays"
    assert len(rows) == 3


def test_a_cell_that_has_begun_keeps_its_configuration_its_start_and_its_reward(
    tmp_path,
):
    _, _, (run,) = planned(grid(), tmp_path, captioner(tmp_path / "start"))
    out, start = tmp_path / "out", str(tmp_path / "start")
    out.mkdir()

    def with_reward(**terms):
        reward = run.config.reward.replace(terms=terms)
        return [run._replace(config=run.config.replace(reward=reward))]

    other = with_reward(bleu=RewardTerm())
    check_start(out, start, other)
    check_start(out, start, [run])
    write_run_files(Path(run.config.run.dir), run.config.model_dump(mode="json"), {})
    check_start(out, start, [run])
    with pytest.raises(ConfigError, match="S_Mix"):
        check_start(out, start, other)
    (tmp_path / "start/model.safetensors").write_bytes(b"1")
    with pytest.raises(ConfigError, match="start"):
        check_start(out, start, [run])
    with (tmp_path / "base.yaml").open("a") as file:
        file.write("train: {lr: 0.5}\n")
    with pytest.raises(ConfigError, match=r"S_Mix seed 0.*train.lr: 5e-06 -> 0.5"):
        planned(grid(), tmp_path)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Makes runs whose trainings are pieces of Python."""
    start = subprocess.Popen

    def in_place(command, **options):
        code = yaml.safe_load(Path(command[-1]).read_text())["code"]
        return start([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "Popen", in_place)

    def make(*codes):
        made = []
        for number, code in enumerate(codes):
            config = Mock(**{"model_dump.return_value": {"code": code}})
            made.append(Run(str(number), 0, tmp_path / str(number), config))
        return made

    return make


def waiting_for(file):
    loop = f"while not pathlib.Path({str(file)!r}).exists(): time.sleep(0.01)"
    return f"import pathlib, time\n{loop}"


def touching(file):
    return f"import pathlib; pathlib.Path({str(file)!r}).touch()"


def test_trainings_run_at_the_same_time_and_a_failure_stops_none(runs, tmp_path):
    go = tmp_path / "go"
    made = runs(waiting_for(go), "import sys; sys.exit('no')", touching(go))
    ended = [(run.label, code) for run, code in ended_runs(made, 2)]
    assert ended[0] == ("1", 1), (
        "the first waits for the third, which starts after the second"
    )
    assert sorted(ended) == [("0", 0), ("1", 1), ("2", 0)]
    assert (tmp_path / "1/log.txt").read_text() == "no\n"


def test_trainings_that_still_run_are_asked_to_stop_then_killed(
    runs, tmp_path, monkeypatch
):
    monkeypatch.setattr("rl_caption.programs.ablation.grid.SECONDS_TO_SAVE", 2.0)
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    code = f"""
import signal, time
signal.signal(signal.SIGTERM, lambda *_: open({str(saved)!r}, "w"))
open({str(ready)!r}, "w")
time.sleep(60)
time.sleep(60)
"""
    with closing(ended_runs(runs(code, waiting_for(ready)), 2)) as running:
        next(running)
    assert saved.exists()


def test_a_training_that_starts_when_a_signal_arrives_is_stopped_too(runs, monkeypatch):
    started = []
    start = subprocess.Popen

    def interrupted(*arguments, **named):
        started.append(start(*arguments, **named))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    sleep = "import time; time.sleep(60)"
    with (
        pytest.raises(SystemExit) as left,
        stop_requests(leave=True),
        closing(ended_runs(runs(sleep, sleep), 2)) as running,
    ):
        next(running)
    assert left.value.code == 128 + signal.SIGTERM
    ended = [job.poll() for job in started]
    for job in started:
        job.kill()
        job.wait()
    assert set(ended) == {-signal.SIGTERM}


def test_the_table_has_means_deviations_and_seeds(tmp_path, capsys):
    def result(label, seed, cider):
        figures = {"CIDEr": cider, "judge/L-CLIPS": 0.75, "captions/bad_endings": 0.25}
        return Result(label, seed, figures)

    results = [
        result("start", None, 1.0),
        result("a", 0, 1.2),
        result("a", 1, 1.4),
        Result("bare", 0, {"ROUGE-L": 0.5, "CIDEr": None}),
    ]
    notes, failures = ["decoding: greedy"], ["c seed 0 failed"]
    assert write_tables(tmp_path, results, column_of, notes, []) == 0
    assert write_tables(tmp_path, results, column_of, notes, failures) == 1
    assert "error: c seed 0 failed" in capsys.readouterr().err
    table = (tmp_path / "table.md").read_text().splitlines()
    # Standard deviation of (120, 140) with n - 1: 10 * sqrt(2) = 14.14.
    for line in (
        "| system | seeds | CIDEr (x100) | L-CLIPS | bad endings, % | ROUGE-L (x100) |",
        "| start | 1 | 100.00 | 0.7500 | 25.0 | – |",
        "| a | 2 | 130.00 ± 14.14 | 0.7500 ± 0.0000 | 25.0 ± 0.0 | – |",
        "| bare | 1 | – | – | – | 50.00 |",
        "- decoding: greedy",
        "- missing: c seed 0 failed",
    ):
        assert line in table, line
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert lines[0].startswith("system,seed,CIDEr,")
    for line, begin in zip(
        lines[2:], ("a,0,1.2,", "a,1,1.4,", "bare,0,,"), strict=True
    ):
        assert line.startswith(begin)


def test_weights_are_known_by_a_hash_in_one_file_or_in_several(tmp_path):
    shards = [tmp_path / f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for shard in shards:
        shard.write_bytes(b"0")
    (tmp_path / "optimizer.safetensors").write_bytes(b"0")
    found = [weights_hash(tmp_path)]
    for shard in (*shards, tmp_path / "optimizer.safetensors"):
        shard.write_bytes(b"1")
        found.append(weights_hash(tmp_path))
    assert len(set(found)) == 3
    assert found[2] == found[3]
    assert weights_hash("Owner/model") == "Owner/model"


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert share_devices(3, 2) == ["0", "1", "0"]
    assert share_devices(1, 2) == [None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7")
    assert share_devices(2, 2) == ["4", "7"]
