"""Read what the programs leave in folders: runs (finished or not), evaluations, comparisons, ablations."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from rl_caption.data.files import read_captions
from rl_caption.data.plain_files import check_type, read_json, read_log, read_yaml
from rl_caption.evaluation.results import COMPARISON, folder_of
from rl_caption.training.checkpoint import STATE, CheckpointError, newest_checkpoint, read_state


class ReportError(ValueError):
    """A folder or file cannot be reported on; the message names it, the line where there is one, and what is right."""


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
    reward: _Reward
    eval: _Eval
    train: _Train
    data: dict[str, Any]
    task: str


class _Env(TypedDict, total=False):
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
    metric: str
    best_step: int | None
    stopped: str | None
    signature: str
    notes: _Notes


class _Judges(TypedDict):
    image_id: list[str]
    judges: dict[str, list[float]]


class ScoresFile(TypedDict):
    """``scores.json``; intervals are (low, high), and ``interval`` says how they were made."""

    metrics: dict[str, float]
    n: int
    signature: str
    left_out: NotRequired[dict[str, str]]
    intervals: NotRequired[dict[str, tuple[float, float]]]
    interval: NotRequired[str]


class Difference(TypedDict):
    """Of one metric: both systems, the second less the first, its confidence interval and p-value."""

    first: float
    second: float
    difference: float
    interval: tuple[float, float]
    p: float


class _ComparisonFile(TypedDict):
    systems: tuple[str, str]
    resamples: int
    differences: dict[str, Difference]


@dataclass(frozen=True)
class RunFolder:
    """A training run.

    Attributes:
        path: its folder.
        lines: of ``metrics.jsonl``, in order.
        config: ``config.yaml``, and ``env``: ``env.json``; empty where there is none.
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
    def split(self) -> str:
        """Validation split."""
        return self.config.get("eval", {}).get("split", "val")

    @property
    def terms(self) -> Mapping[str, _Term]:
        """Reward terms; empty where nothing is rewarded."""
        return self.config.get("reward", {}).get("terms", {})

    @property
    def validations(self) -> list[Mapping[str, Any]]:
        """Lines of validations."""
        return [line for line in self.lines if any(key.startswith("val/") for key in line)]

    @property
    def last_step(self) -> int:
        """Newest step that was logged; 0 where none was."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def alarms(self) -> list[int]:
        """Steps of the validations with an alarm."""
        return [step for step, value in self.series("hacking/alarm") if value > 0]

    @property
    def alarm_word(self) -> str:
        """``none``, ``from step N``, or that nobody watched."""
        if not self.series("hacking/alarm"):
            return "not watched"
        return f"from step {self.alarms[0]}" if self.alarms else "none"

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a logged key, in order."""
        return [(line["step"], line[key]) for line in self.lines if key in line]

    def equal(self, one: str, other: str) -> bool:
        """Whether two logged keys have the same values wherever both were logged: one chart is enough."""
        pairs = [(line[one], line[other]) for line in self.lines if one in line and other in line]
        return bool(pairs) and all(abs(first - second) < 1e-9 for first, second in pairs)

    def predictions(self, step: int) -> dict[str, str]:
        """Image id -> greedy caption of the validation of ``step``; empty where they were not kept."""
        return _captions(self._validation(step))

    def judges(self, step: int) -> dict[str, dict[str, float]]:
        """Judge -> image id -> score at the validation of ``step``; empty where there are none."""
        file = self._validation(step) / "judges.json"
        content = _json_if_there(file, _Judges) or {"image_id": [], "judges": {}}
        ids = content["image_id"]
        for name, scores in content["judges"].items():
            if len(scores) != len(ids):
                raise ReportError(f"{file}: judge {name!r} has {len(scores)} scores of {len(ids)} images")
        return {name: dict(zip(ids, scores, strict=True)) for name, scores in content["judges"].items()}

    def shown_steps(self) -> dict[str, int]:
        """The validations whose captions are compared: ``start``, ``best`` and ``last`` -> step, as far as they differ.

        A run that does not validate before its first step starts with its first validation (``first``).
        """
        logged = (line["step"] for line in self.validations)
        steps = [step for step in logged if (self._validation(step) / "predictions.json").is_file()]
        if not steps:
            return {}
        best = self.state.get("best_step")
        found = {"start" if steps[0] == 0 else "first": steps[0]}
        if best in steps and best not in found.values():
            found["best"] = best
        if steps[-1] not in found.values():
            found["last"] = steps[-1]
        return found

    def _validation(self, step: int) -> Path:
        return self.path / "eval" / f"step-{step:08d}"


@dataclass(frozen=True)
class EvaluationFolder:
    """What ``evaluate.py`` wrote: ``scores.json``, captions by image id, and the ``settings.json`` of an ablation."""

    scores: ScoresFile
    captions: Mapping[str, str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class ComparisonFolder:
    """What ``evaluate.py --compare`` wrote: differences by metric key, and both evaluations by name."""

    resamples: int
    differences: Mapping[str, Difference]
    evaluations: Mapping[str, EvaluationFolder]


@dataclass(frozen=True)
class Member:
    """One evaluated captioner of an ablation: a starting policy (seed and run are None), or a cell with one seed."""

    system: str
    alpha: float | None
    seed: int | None
    evaluation: EvaluationFolder
    run: RunFolder | None


@dataclass(frozen=True)
class AblationFolder:
    """What ``ablate.py`` wrote: members in the order of ``runs.csv``, and a sentence for each cell without a result."""

    path: Path
    members: Sequence[Member]
    missing: Sequence[str]


def kind_of(path: Path) -> str:
    """What a folder holds: ``run``, ``evaluation``, ``ablation`` or ``comparison``.

    Raises:
        ReportError: nothing that a report can be made of.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder: name the folder of a run, of an evaluation or of an ablation")
    if (path / "config.yaml").is_file() and (path / "env.json").is_file():
        return "run"
    signs = {"metrics.jsonl": "run", "scores.json": "evaluation", "runs.csv": "ablation", COMPARISON: "comparison"}
    for file, kind in signs.items():
        if (path / file).is_file():
            return kind
    raise ReportError(
        f"{path} holds no run (config.yaml and metrics.jsonl), no evaluation (scores.json), no comparison "
        "(comparison.json) and no ablation (runs.csv)"
    )


def read_folder(path: Path) -> Any:
    """Read a folder of any kind: a ``RunFolder``, ``EvaluationFolder``, ``ComparisonFolder`` or ``AblationFolder``.

    Raises:
        ReportError: nothing to report on, or a damaged file, with its name and line.
        DataError: a damaged ``predictions.json``.
    """
    kind = kind_of(path)
    if kind == "run":
        return _run(path)
    if kind == "evaluation":
        return _evaluation(path)
    if kind == "ablation":
        return _ablation(path)
    content: _ComparisonFile = read_json(path / COMPARISON, ReportError, _ComparisonFile)
    evaluations = {name: _evaluation(path / folder_of(name)) for name in content["systems"]}
    return ComparisonFolder(content["resamples"], content["differences"], evaluations)


def _run(path: Path) -> RunFolder:
    log, config, result = path / "metrics.jsonl", path / "config.yaml", path / "result.json"
    lines = []
    for where, line in read_log(log, ReportError) if log.is_file() else ():
        check_type(line, dict[str, float], where, ReportError)
        lines.append(line)
    settings = read_yaml(config, ReportError, _Config) if config.is_file() else {}
    state = _json_if_there(result, _State)
    newest = newest_checkpoint(path / "checkpoints") if not result.is_file() else None
    if newest is not None:
        try:
            state = vars(read_state(newest))
        except CheckpointError as error:  # of another version
            raise ReportError(str(error)) from error
        check_type(state, _State, str(newest / STATE), ReportError)
    return RunFolder(path, lines, settings, _json_if_there(path / "env.json", _Env), state, result.is_file())


def _evaluation(path: Path) -> EvaluationFolder:
    file = path / "scores.json"
    if not file.is_file():
        raise ReportError(f"{path} holds no evaluation: it has no scores.json")
    scores = read_json(file, ReportError, ScoresFile)
    return EvaluationFolder(scores, _captions(path), _json_if_there(path / "settings.json", dict))


def _ablation(path: Path) -> AblationFolder:
    file = path / "runs.csv"
    try:
        with file.open(encoding="utf-8", newline="") as handle:
            rows = list(csv.DictReader(handle))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ReportError(f"{file} is not CSV: {error}") from error
    members = [_member(path, row, f"{file}, line {number}") for number, row in enumerate(rows, start=2)]
    finished = {(member.system, member.seed) for member in members}
    cells = path / "cells"
    missing = [
        f"{cell.relative_to(path)} has no result: its output is in {cell / 'log.txt'}"
        for cell in sorted(config.parent for config in cells.rglob("scst.yaml"))
        if (cell.parent.relative_to(cells).as_posix(), int(cell.name.removeprefix("seed"))) not in finished
    ]
    return AblationFolder(path, members, missing)


def _member(path: Path, row: Mapping[str, str | None], where: str) -> Member:
    """One line of ``runs.csv``: system, base, alpha and seed, of which a starting policy has no alpha and no seed."""
    system, base, alpha, seed = (row.get(key) for key in ("system", "base", "alpha", "seed"))
    if system is None or base is None or alpha is None or seed is None:
        raise ReportError(f"{where} is not what ablate.py writes: expected system, base, alpha and seed")
    try:
        numbers = float(alpha) if alpha else None, int(seed) if seed else None
    except ValueError as error:
        raise ReportError(f"{where}: alpha and seed: {error}") from error
    # A system is called BASE/LABEL where there are several bases, and its folder is too.
    folder = path / "cells" / system / f"seed{seed}" if seed else path / "start" / base
    files = list(folder.glob("*/scores.json"))
    if not files:
        raise ReportError(f"{where}: {system!r} has no */scores.json in {folder}")
    newest = max(sorted(files), key=lambda found: found.stat().st_mtime)
    run = _run(folder / "run") if seed and (folder / "run").is_dir() else None
    return Member(system, *numbers, _evaluation(newest.parent), run)


def _json_if_there(file: Path, kind: Any) -> Any:
    return read_json(file, ReportError, kind) if file.is_file() else {}


def _captions(folder: Path) -> dict[str, str]:
    file = folder / "predictions.json"
    return read_captions(file, allow_empty=True) if file.is_file() else {}
