"""Folders that a report is made of, read as they lie on disk: runs (finished or not), evaluations, ablations."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from rl_caption.checkpoint import STATE, CheckpointError, newest_checkpoint, read_state
from rl_caption.data.files import read_captions
from rl_caption.data.plain_files import check_type, read_json, read_log, read_yaml
from rl_caption.evaluation.comparison import COMPARISON
from rl_caption.report.errors import ReportError

Kind = Literal["run", "evaluation", "ablation", "comparison"]
STEP_PREFIX = "step-"


class _Term(TypedDict, total=False):
    weight: float


class _Reward(TypedDict, total=False):
    normalize: str
    terms: dict[str, _Term]


class _Eval(TypedDict, total=False):
    split: str


class _Train(TypedDict, total=False):
    max_steps: int | None


class _Config(TypedDict, total=False):
    """What is shown of ``config.yaml``."""

    reward: _Reward
    eval: _Eval
    train: _Train
    data: dict[str, Any]
    task: str


class _Env(TypedDict, total=False):
    """What is shown of ``env.json``."""

    versions: dict[str, str | None]
    command: list[str]


class _Alarm(TypedDict):
    step: int
    evidence: list[str]


class _Hacking(TypedDict, total=False):
    first_alarm: _Alarm | None


class _Notes(TypedDict, total=False):
    hacking: _Hacking


class _State(TypedDict, total=False):
    """What is shown of ``result.json`` and ``trainer_state.json``."""

    metric: str
    best_step: int | None
    stopped: str | None
    signature: str
    notes: _Notes


class _Judges(TypedDict):
    image_id: list[str]
    judges: dict[str, list[float]]


class _Intervals(TypedDict, total=False):
    left_out: dict[str, str]
    intervals: dict[str, tuple[float, float]]
    interval: str


class ScoresFile(_Intervals):
    """``scores.json``."""

    metrics: dict[str, float]
    n: int
    signature: str


@dataclass(frozen=True)
class RunFolder:
    """A training run.

    Attributes:
        path: its folder.
        lines: of ``metrics.jsonl``, in order.
        config: ``config.yaml``; empty where there is none.
        env: ``env.json``; empty where there is none.
        state: ``result.json`` or, while the run is not complete, the counters of its newest checkpoint.
        complete: whether it reached its end.
    """

    path: Path
    lines: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    state: Mapping[str, Any]
    complete: bool

    @property
    def name(self) -> str:
        """Of the folder; a folder that is just called ``run`` has those of the two above it."""
        parts = self.path.resolve().parts
        return "/".join(parts[-3:-1]) if parts[-1] == "run" else parts[-1]

    @property
    def validations(self) -> list[Mapping[str, Any]]:
        """Lines of validations."""
        return [line for line in self.lines if any(key.startswith("val/") for key in line)]

    @property
    def last_step(self) -> int:
        """Newest step that was logged; 0 where none was."""
        return max((line["step"] for line in self.lines), default=0)

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a logged key, in order."""
        return [(line["step"], line[key]) for line in self.lines if key in line]

    @property
    def alarms(self) -> list[int]:
        """Steps of the validations with an alarm."""
        return [step for step, value in self.series("hacking/alarm") if value > 0]

    def predictions(self, step: int) -> dict[str, str]:
        """Image id -> greedy caption of the validation of ``step``; empty where they were not kept."""
        file = self._eval(step) / "predictions.json"
        return read_captions(file, allow_empty=True) if file.is_file() else {}

    def judges(self, step: int) -> dict[str, dict[str, float]]:
        """Judge -> image id -> score at the validation of ``step``; empty where there are none."""
        file = self._eval(step) / "judges.json"
        if not file.is_file():
            return {}
        content = read_json(file, ReportError, _Judges)
        ids = content["image_id"]
        for name, scores in content["judges"].items():
            if len(scores) != len(ids):
                raise ReportError(f"{file}: judge {name!r} has {len(scores)} scores of {len(ids)} images")
        return {name: dict(zip(ids, scores, strict=True)) for name, scores in content["judges"].items()}

    def shown_steps(self) -> dict[str, int]:
        """The validations whose captions are compared: ``start``, ``best`` and ``last`` -> step, as far as they differ.

        A run that does not validate before its first step starts with its first validation (``first``).
        """
        steps = [line["step"] for line in self.validations if (self._eval(line["step"]) / "predictions.json").is_file()]
        if not steps:
            return {}
        best = self.state.get("best_step")
        found = {"start" if steps[0] == 0 else "first": steps[0]}
        if best in steps and best not in found.values():
            found["best"] = best
        if steps[-1] not in found.values():
            found["last"] = steps[-1]
        return found

    def _eval(self, step: int) -> Path:
        return self.path / "eval" / f"{STEP_PREFIX}{step:08d}"


@dataclass(frozen=True)
class EvaluationFolder:
    """What ``evaluate.py`` wrote: ``scores.json``, ``predictions.json``.

    Attributes:
        path: the folder.
        metrics: key -> value, as computed.
        n: captions.
        signature: what the numbers depend on.
        left_out: key -> reason.
        intervals: key -> (low, high), where the evaluation has confidence intervals.
        interval: how they were made.
        captions: image id -> caption.
        settings: ``settings.json``, where an ablation wrote it: data, split.
    """

    path: Path
    metrics: Mapping[str, float]
    n: int
    signature: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    interval: str = ""
    captions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.path.resolve().name


@dataclass(frozen=True)
class Member:
    """One judged captioner of an ablation: a starting policy (``run`` is None), or a cell with one seed."""

    system: str
    alpha: float | None
    seed: int | None
    evaluation: EvaluationFolder
    run: RunFolder | None


@dataclass(frozen=True)
class AblationFolder:
    """What ``ablate.py`` wrote; members in the order of ``runs.csv``."""

    path: Path
    members: Sequence[Member]
    missing: Sequence[str]
    """Sentences about cells that have a folder and no result."""

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.path.resolve().name


def kind_of(path: Path) -> Kind:
    """What a folder holds.

    Raises:
        ReportError: nothing that a report can be made of.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder: name the folder of a run, of an evaluation or of an ablation")
    if (path / "metrics.jsonl").is_file() or ((path / "config.yaml").is_file() and (path / "env.json").is_file()):
        return "run"
    if (path / "scores.json").is_file():
        return "evaluation"
    if (path / "runs.csv").is_file():
        return "ablation"
    if (path / COMPARISON).is_file():
        return "comparison"
    raise ReportError(
        f"{path} holds no run (config.yaml and metrics.jsonl), no evaluation (scores.json), no comparison "
        "(comparison.json) and no ablation (runs.csv)"
    )


def read_run(path: Path) -> RunFolder:
    """Read a run, also one that is still being written.

    Raises:
        ReportError: no run, or a damaged file, with its name and line.
    """
    if kind_of(path) != "run":
        raise ReportError(f"{path} is not the folder of a run: it has no metrics.jsonl")
    config, env = path / "config.yaml", path / "env.json"
    complete = (path / "result.json").is_file()
    return RunFolder(
        path,
        read_lines(path / "metrics.jsonl"),
        read_yaml(config, ReportError, _Config) if config.is_file() else {},
        read_json(env, ReportError, _Env) if env.is_file() else {},
        _state(path, complete),
        complete,
    )


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``. A last line that a kill left without its end is passed over; no file is no line.

    Raises:
        ReportError: a line that is not a JSON object with a whole ``step`` and numbers, by its number.
    """
    if not file.is_file():
        return []
    found = []
    for where, record in read_log(file, ReportError):
        check_type(record, dict[str, float], where, ReportError)
        found.append(record)
    return found


def read_evaluation(path: Path) -> EvaluationFolder:
    """Read what ``evaluate.py`` wrote.

    Raises:
        ReportError: no evaluation, or a damaged ``scores.json``.
        DataError: a damaged ``predictions.json``.
    """
    file = path / "scores.json"
    if not file.is_file():
        raise ReportError(f"{path} holds no evaluation: it has no scores.json")
    scores = read_json(file, ReportError, ScoresFile)
    predictions, settings = path / "predictions.json", path / "settings.json"
    return EvaluationFolder(
        path,
        scores["metrics"],
        scores["n"],
        scores["signature"],
        scores.get("left_out", {}),
        {key: (low, high) for key, (low, high) in scores.get("intervals", {}).items()},
        scores.get("interval", ""),
        read_captions(predictions, allow_empty=True) if predictions.is_file() else {},
        read_json(settings, ReportError) if settings.is_file() else {},
    )


def read_ablation(path: Path) -> AblationFolder:
    """Read what ``ablate.py`` wrote: the systems of ``runs.csv``, their captions, and the runs behind them.

    Raises:
        ReportError: no ablation, or a member without its files.
    """
    file = path / "runs.csv"
    if not file.is_file():
        raise ReportError(f"{path} holds no ablation: it has no runs.csv")
    try:
        with file.open(encoding="utf-8", newline="") as handle:
            rows = list(csv.DictReader(handle))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ReportError(f"{file} is not CSV: {error}") from error
    members = []
    for number, row in enumerate(rows, start=2):
        absent = [key for key in ("system", "base", "alpha", "seed") if row.get(key) is None]
        if absent:
            raise ReportError(f"{file}, line {number} has no {absent[0]!r}: expected what ablate.py writes")
        is_start = row["seed"] == ""
        try:
            alpha, seed = float(row["alpha"]) if row["alpha"] else None, None if is_start else int(row["seed"])
        except ValueError as error:
            raise ReportError(f"{file}, line {number}: alpha and seed: {error}") from error
        # A system is called BASE/LABEL where there are several bases, and its folder is too.
        folder = path / "start" / row["base"] if is_start else path / "cells" / row["system"] / f"seed{row['seed']}"
        judged = sorted(scores.parent for scores in folder.glob("*/scores.json"))
        if not judged:
            raise ReportError(f"{file}, line {number}: {row['system']!r} has no */scores.json in {folder}")
        newest = max(judged, key=lambda found: (found / "scores.json").stat().st_mtime)
        run = folder / "run"
        members.append(
            Member(
                row["system"],
                alpha,
                seed,
                read_evaluation(newest),
                read_run(run) if run.is_dir() and not is_start else None,
            )
        )
    there = {(member.system, member.seed) for member in members}
    planned = sorted(cell.parent for cell in (path / "cells").rglob("scst.yaml"))
    missing = [
        f"{cell.relative_to(path)} has no result: its output is in {cell / 'log.txt'}"
        for cell in planned
        if (cell.parent.relative_to(path / "cells").as_posix(), int(cell.name.removeprefix("seed"))) not in there
    ]
    return AblationFolder(path, members, missing)


def _state(path: Path, complete: bool) -> dict[str, Any]:
    if complete:
        return read_json(path / "result.json", ReportError, _State)
    newest = newest_checkpoint(path / "checkpoints")
    if newest is None:
        return {}
    try:
        state = vars(read_state(newest))
    except CheckpointError as error:  # of another version
        raise ReportError(str(error)) from error
    check_type(state, _State, str(newest / STATE), ReportError)
    return state
