"""The parts of an ablation: cells from a configuration, jobs in parallel, tables, and what is
refused.
"""

import csv
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_caption.captioners.loading import weights_hash
from rl_caption.cli.configuration import parse
from rl_caption.config.schema import RewardTerm, ScstConfig
from rl_caption.data.base import Row
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.programs.ablation.config import AblateConfig, AlphaConfig, CellConfig
from rl_caption.programs.ablation.jobs import Job, run_jobs, share_devices
from rl_caption.programs.ablation.plan import (
    Plan,
    build_rewards,
    check_start,
    make_cells,
    make_plan,
)
from rl_caption.programs.ablation.report import (
    Member,
    ablation_page,
    alpha_series,
    by_system,
    formula,
    markdown_tables,
    runs_csv,
)
from rl_caption.programs.report.gallery import source_of
from rl_caption.programs.report.pages import render, score_notes
from rl_caption.programs.report.read import EvaluationFolder, RunFolder
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.launch import stop_requests
from rl_caption.training.run_folder import plain, write_run_files

TERM: dict[str, dict[str, Any]] = {"cider": {}}
ALPHA = AlphaConfig(
    values=[0, 0.3, 1], terms={"rouge_l": RewardTerm()}, against={"cider": RewardTerm()}
)


def grid(**changes: Any) -> AblateConfig:
    config = AblateConfig(
        recipe="a.yaml",
        cells={
            "S_Mix": CellConfig(
                terms={"cider": RewardTerm(weight=0.5), "bleu": RewardTerm(weight=0.5)}
            )
        },
    )
    return config.replace(**changes)


def test_alpha_weights_the_terms_and_its_ends_are_pure() -> None:
    cells, alphas = make_cells(
        grid(cells={}, alpha=ALPHA.replace(terms={"rouge_l": RewardTerm(weight=2.0)}))
    )
    assert {
        alphas[label]: {name: term.weight for name, term in cell.terms.items()}
        for label, cell in cells.items()
    } == {
        0: {"cider": 1.0},
        0.3: {"rouge_l": 0.6, "cider": 0.7},
        1: {"rouge_l": 2.0},
    }
    assert list(cells) == ["alpha=0", "alpha=0.3", "alpha=1"]
    assert formula(cells["alpha=0.3"]) == "0.6 rouge_l + 0.7 cider"
    cell = cells["alpha=0"].replace(
        terms={"cider": RewardTerm(length_ratio=(0.5, 2.0)), "bleu": RewardTerm(kwargs={"n": 2})},
    )
    assert formula(cell) == 'cider {"length_ratio": [0.5, 2.0]} + bleu {"kwargs": {"n": 2}}'
    overrides = {"train.lr": 1e-5, "train.advantage": "greedy"}
    assert formula(cells["alpha=0.3"].replace(overrides=overrides)).endswith(
        "; train.lr = 1e-05; train.advantage = greedy"
    )


def test_cells_go_seed_by_seed(tmp_path: Path) -> None:
    config = grid(alpha=ALPHA, seeds=[3, 1])
    runs = planned(config, tmp_path, captioner(tmp_path / "start")).runs
    assert [run.seed for run in runs] == [3] * 4 + [1] * 4
    assert runs[3].folder == tmp_path / "out/cells/S_Mix/seed3/run"


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"recipe": None}, "recipe"),
        ({"cells": {}}, "cells"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"alpha": {"values": [0.5, 0.5], "terms": {"bleu": {}}}}, "alpha=0.5"),
        ({"alpha": {"values": [0.5], "terms": TERM}}, "alpha.terms"),
        ({"cells": {"start": {"terms": TERM}}}, "'start'"),
        ({"cells": {"a/b": {"terms": TERM}}}, "'a/b'"),
        (
            {"cells": {"a": {"terms": TERM, "overrides": {"data.path": "x"}}}},
            "cells.a.overrides has data.path",
        ),
        (
            {"cells": {"a": {"terms": TERM, "overrides": {"train.seed": 1}}}},
            "cells.a.overrides has train.seed",
        ),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], key: str, tmp_path: Path) -> None:
    complete = {"recipe": "a.yaml", "cells": {"S_Mix": {"terms": TERM}}}
    assert parse(AblateConfig, written(complete, tmp_path), "ablate").recipe == "a.yaml"
    with pytest.raises(ConfigError) as refused:
        parse(AblateConfig, written(complete | values, tmp_path), "ablate")
    assert key in str(refused.value)


def written(values: dict[str, Any], folder: Path) -> list[str]:
    (folder / "grid.yaml").write_text(yaml.safe_dump(values))
    return ["--config", str(folder / "grid.yaml")]


SMALL_WORLD = "data: {format: scenes, kwargs: {num_train: 4, num_val: 2, num_test: 2, num_unseen: 0, image_size: 32}}\n"


def planned(config: AblateConfig, tmp_path: Path, text: str | None = None) -> Plan:
    if text is not None:
        (tmp_path / "base.yaml").write_text(text)
    return make_plan(
        config.replace(recipe=str(tmp_path / "base.yaml"), out=str(tmp_path / "out")), parse
    )


def captioner(folder: Path) -> str:
    """What looks like a saved captioner; ``base.yaml`` that starts from it."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return SMALL_WORLD + f"model: {{init: {folder}}}\n"


def test_nothing_starts_before_everything_is_checked(tmp_path: Path, capsys: Any) -> None:
    def cell(key: str, value: float | str) -> AblateConfig:
        return grid(cells={"L": CellConfig(terms={"cider": RewardTerm()}, overrides={key: value})})

    text, absent = (
        captioner(tmp_path / "start"),
        SMALL_WORLD + f"model: {{init: {tmp_path}/absent}}\n",
    )
    for match, config, base in (
        (r"base\.yaml: model\.init is None", grid(), SMALL_WORLD),
        (r"base\.yaml: model\.init is '.*/absent'", grid(), absent),
        (
            f"cell 'L'.*{tmp_path}/base.yaml: train.lr is -1.0: expected",
            cell("train.lr", -1.0),
            text,
        ),
        (
            "cell 'L': .*: monitor.best_by is 'val/reward/bleu'",
            cell("monitor.best_by", "val/reward/bleu"),
            text,
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            planned(config, tmp_path, base)
    with pytest.raises(ConfigError, match=r"cell 'L'.*train\.lrr"):
        planned(cell("train.lrr", 1.0), tmp_path, text)
    assert not (tmp_path / "out").exists()


def with_term(plan: Plan, name: str, **term: Any) -> Plan:
    """The plan with one other term as the reward of its only cell."""
    (run,) = plan.runs
    reward = run.config.reward.replace(terms={name: RewardTerm(**term)})
    return replace(plan, runs=[replace(run, config=run.config.replace(reward=reward))])


def test_a_wrong_reward_is_named_by_its_cell_or_judge(tmp_path: Path) -> None:
    plan = planned(grid(), tmp_path, captioner(tmp_path / "start"))
    for name, term, part in (
        ("l_clipscore", {"kwargs": {"backbone": f"{tmp_path}/lclipp"}}, ".*lclipp"),
        ("l_clipscore", {"target": "blue"}, "'blue'"),
    ):
        with pytest.raises(ConfigError, match=f"^cell 'S_Mix': .*{part}"):
            build_rewards(grid(), with_term(plan, name, **term))
        with pytest.raises(ConfigError, match=rf"^judges\.{name}.*{part}"):
            build_rewards(grid(judges={name: JudgeConfig(**term)}), plan)


def test_a_cell_replaces_the_reward_and_data_of_the_grid_reach_all_runs(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        captioner(tmp_path / "start")
        + "reward: {terms: {rouge_l: {weight: 9.0}}}\ntrain: {lr: 0.5, seed: 7}\n"
    )
    (tmp_path / "grid.yaml").write_text(
        f"recipe: {tmp_path}/base.yaml\nout: {tmp_path}/out\n"
        "seeds: [2]\n"
        "cells: {L: {terms: {cider: {weight: 0.5, kwargs: {n: 3}}},"
        " overrides: {train.lr: 1.0e-5, rollout.num_samples: 3}}}\n"
    )
    words = [
        "--config",
        f"{tmp_path}/grid.yaml",
        "--all.data.kwargs.num_test",
        "3",
        "--all.data.cache_mb=7",
    ]
    plan = make_plan(parse(AblateConfig, words, "ablate.py"), parse)
    (cell,) = plan.runs
    assert cell.config.reward.terms == {
        "cider": RewardTerm(weight=0.5, target=None, kwargs={"n": 3})
    }
    assert (cell.config.train.lr, cell.config.rollout.num_samples, cell.config.train.seed) == (
        1e-5,
        3,
        2,
    )
    assert (cell.config.data.kwargs["num_test"], cell.config.data.cache_mb) == (3, 7)
    assert cell.config.data.kwargs["num_train"] == 4, "what is not named stays"
    assert len(plan.rows) == 3


def test_a_cell_that_has_begun_keeps_its_configuration_its_start_and_its_reward(
    tmp_path: Path,
) -> None:
    plan = planned(grid(), tmp_path, captioner(tmp_path / "start"))
    (cell,), start = plan.runs, plan.start
    check_start(cell, start, {"bleu": "of a grid that was interrupted before this cell"})
    check_start(cell, start, {"cider": "now"})
    write_run_files(Path(cell.config.run.dir), plain(cell.config), {})
    check_start(cell, start, {"cider": "now"})
    with pytest.raises(ConfigError, match="S_Mix seed 0"):
        check_start(cell, start, {"cider": "later"})
    (tmp_path / "start/model.safetensors").write_bytes(b"1")
    with pytest.raises(ConfigError, match=r"S_Mix seed 0.*/start"):
        check_start(cell, start, {"cider": "now"})
    planned(grid(), tmp_path)
    (tmp_path / "base.yaml").write_text((tmp_path / "base.yaml").read_text() + "train: {lr: 0.5}\n")
    with pytest.raises(ConfigError, match=r"S_Mix seed 0 exists .*: train.lr: 5e-06 -> 0.5"):
        planned(grid(), tmp_path)


def test_the_start_may_be_on_the_hub_and_cells_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = SMALL_WORLD + "model: {name: huggingface, init: Owner/model}\n"
    for jobs, threads in ((10**4, 1), (1, os.cpu_count() or 1)):
        plan = planned(grid(jobs=jobs), tmp_path, text)
        assert (plan.start, plan.runs[0].config.train.threads) == ("Owner/model", threads)


def test_weights_are_known_by_a_hash_in_one_file_or_in_several(tmp_path: Path) -> None:
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


def test_a_cell_is_noted_by_its_own_reward_whatever_cells_are_before_it(tmp_path: Path) -> None:
    cells = {
        "raw": CellConfig(terms={"cider": RewardTerm()}),
        "masked": CellConfig(terms={"cider": RewardTerm(length_ratio=(0.5, 2.0))}),
        "normalised": CellConfig(
            terms={"cider": RewardTerm()}, overrides={"reward.normalize": "per_term"}
        ),
    }
    config = grid(cells=cells)
    plan = planned(config, tmp_path, captioner(tmp_path / "start"))
    alone: dict[str, Any] = {}
    for cell in plan.runs:
        alone |= build_rewards(config, replace(plan, runs=[cell]))[1]
    assert build_rewards(config, plan)[1] == alone


def test_a_judge_cider_is_that_of_evaluation() -> None:
    texts = [["a dog"], ["a cat"]]
    rows = [Row(image_id=str(i), image="", references=own) for i, own in enumerate(texts)]
    config = grid(judges={"cider": JudgeConfig()})
    plan = Plan(ScstConfig(), "start", rows, {}, {}, [])
    for tokenizer, words in (("auto", "ptb"), ("char", "char")):
        judges, _ = build_rewards(config.replace(tokenizer=tokenizer), plan)
        evaluated = build_judges(config.judges, None, texts, tokenizer=words)
        assert judges["cider"].signature == evaluated["cider"].signature
        assert judges["cider"].signature.startswith("NO<EOS>_wInit")


def python(code: str, log: Path, name: str = "job") -> Job:
    return Job(name, [sys.executable, "-c", code], log)


def waiting_for(file: Path) -> str:
    return f"import pathlib, time\nwhile not pathlib.Path({str(file)!r}).exists(): time.sleep(0.01)"


def test_jobs_run_at_the_same_time_and_a_failure_stops_none(tmp_path: Path) -> None:
    jobs = [
        python(waiting_for(tmp_path / "go"), tmp_path / "0.log", "first"),
        python("import sys; sys.exit('no')", tmp_path / "1.log", "second"),
        python(
            f"import pathlib; pathlib.Path({str(tmp_path / 'go')!r}).touch()",
            tmp_path / "2.log",
            "third",
        ),
    ]
    ended = list(run_jobs(jobs, [None, None]))
    assert {one.job.name: one.code for one in ended} == {"first": 0, "second": 1, "third": 0}
    assert ended[0].job.name == "second", (
        "the first waits for the third, which starts when the second has ended"
    )
    assert (tmp_path / "1.log").read_text() == "no\n"


@pytest.mark.parametrize("deaf", [False, True], ids=["saves", "killed"])
def test_jobs_that_still_run_are_asked_to_stop_then_killed(tmp_path, monkeypatch, deaf):
    monkeypatch.setattr("rl_caption.programs.ablation.jobs.SECONDS_TO_SAVE", 0.2 if deaf else 30)
    handler = (
        "signal.SIG_IGN"
        if deaf
        else f"lambda *_: (open({str(tmp_path / 'saved')!r}, 'w'), sys.exit(0))"
    )
    code = (
        f"import signal, sys, time\nsignal.signal(signal.SIGTERM, {handler})\n"
        f"open({str(tmp_path / 'ready')!r}, 'w')\ntime.sleep(60)"
    )
    jobs = [
        python(code, tmp_path / "a.log"),
        python(waiting_for(tmp_path / "ready"), tmp_path / "b.log"),
    ]
    began = time.monotonic()
    with closing(run_jobs(jobs, [None, None])) as running:
        next(running)
    assert time.monotonic() - began < 30
    assert (tmp_path / "saved").exists() != deaf


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_starts_when_a_signal_arrives_is_stopped_too(tmp_path, monkeypatch, number):
    started, start, before = [], subprocess.Popen, signal.getsignal(signal.SIGINT)

    def interrupted(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **named))
        os.kill(os.getpid(), number)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    jobs = [python("import time; time.sleep(60)", tmp_path / f"{name}.log", name) for name in "ab"]
    with (
        pytest.raises(SystemExit) as left,
        stop_requests(leave=True),
        closing(run_jobs(jobs, [None, None])) as running,
    ):
        next(running)
    assert left.value.code == 128 + number
    ended = [job.poll() for job in started]
    for job in started:
        job.kill()
        job.wait()
    assert set(ended) == {-signal.SIGTERM}
    assert signal.getsignal(signal.SIGINT) is before


def test_gpus_are_shared_out() -> None:
    assert share_devices(3, 2, {}) == ["0", "1", "0"]
    assert share_devices(2, 5, {"CUDA_VISIBLE_DEVICES": "0, 1,4,6,7"}) == ["0,1", "4,6"]
    assert share_devices(2, 2, {"CUDA_VISIBLE_DEVICES": ""}) == ["0", "1"]
    assert share_devices(1, 2, {}) == [None]
    assert share_devices(2, 1, {}) == [None, None]


def member(
    system: str,
    seed: int | None,
    cider: float,
    alpha: float | None = None,
    alarm: int | None = None,
) -> Member:
    metrics = {
        "CIDEr": cider,
        "judge/L-CLIPS": 0.75,
        "length/mean": 8.0,
        "captions/bad_endings": 0.25,
    }
    left_out = {"METEOR": "no Java", "captions/novel": "not shown"}
    scores: Any = {
        "metrics": metrics,
        "signature": "S1",
        "n": 2,
        "left_out": left_out,
        "decoding": "greedy",
    }
    lines = [{"step": step, "hacking/alarm": float(step == alarm)} for step in (0, 40, 60)]
    run = None if seed is None else RunFolder(Path(), lines, {}, {}, {}, True)
    return Member(system, alpha, seed, EvaluationFolder(scores, {}, {}), run)


RESULTS = [
    member("start", None, 1.0),
    member("alpha=0", 0, 1.2, 0.0),
    member("alpha=1", 0, 0.5, 1.0, alarm=60),
    member("alpha=0", 1, 1.4, 0.0),
    member("alpha=1", 1, 0.5, 1.0, alarm=40),
]


def test_the_table_has_means_deviations_and_seeds() -> None:
    table = markdown_tables(by_system(RESULTS)).splitlines()
    assert table[0] == "| system | of | CIDEr (x100) | L-CLIPS |"
    # Standard deviation of (120, 140) with n - 1: 10 * sqrt(2) = 14.14.
    assert table[2:5] == [
        "| start | 2 captions | 100.00 | 0.7500 |",
        "| alpha=0 | 2 seeds | 130.00 ± 14.14 | 0.7500 ± 0.0000 |",
        "| alpha=1 | 2 seeds | 50.00 ± 0.00 | 0.7500 ± 0.0000 |",
    ]
    assert table[6] == "| system | of | length, tokens | bad endings, % |"
    assert table[9] == "| alpha=0 | 2 seeds | 8.00 ± 0.00 | 25.0 ± 0.0 |"
    assert table[-3:] == [
        "| start | not watched | none |",
        "| alpha=0 | 0 of 2 | none |",
        "| alpha=1 | 2 of 2 | step 40 |",
    ]
    scores: Any = {"metrics": {"ROUGE-L": 0.5}, "signature": "S2", "n": 2}
    bare = RESULTS[0]._replace(evaluation=EvaluationFolder(scores, {}, {}))
    assert "| start | 2 captions | 50.00 | – | – |" in markdown_tables(
        by_system([bare, *RESULTS[1:]])
    ), "never a zero"
    notes = score_notes({"a": [bare.evaluation], "b": [RESULTS[1].evaluation]})
    assert "METEOR is left out: no Java" in notes
    assert "Decoding: greedy" in notes
    assert any(note.startswith("The signatures differ") for note in notes)


def test_the_page_has_the_tables_and_what_is_missing() -> None:
    missing = ["alpha=2 seed 0 <failed>"]
    text = render(ablation_page("grid", by_system(RESULTS), missing, source_of([])))
    assert "<b>130.00</b><small>± 14.14</small>" in text
    assert "Missing: alpha=2 seed 0 &lt;failed&gt;" in text
    assert text.count("<svg") == 3, "CIDEr, length and the judge over alpha"


def test_the_csv_file_has_the_values_as_computed() -> None:
    runs = list(csv.DictReader(runs_csv(by_system(RESULTS)).splitlines()))
    assert [(run["system"], run["seed"], run["CIDEr"]) for run in runs][1:3] == [
        ("alpha=0", "0", "1.2"),
        ("alpha=0", "1", "1.4"),
    ]


def test_the_lines_over_alpha_have_means_deviations_and_start() -> None:
    line, start = alpha_series(by_system(RESULTS), "CIDEr")
    assert line.points == [(0.0, pytest.approx(130)), (1.0, 50.0)]
    assert line.errors == {0.0: pytest.approx(10 * 2**0.5), 1.0: 0.0}
    assert (start.name, start.points) == ("start", [(0.0, 100.0), (1.0, 100.0)])
