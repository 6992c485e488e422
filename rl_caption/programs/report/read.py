"""What the programs leave in folders: runs (finished or not), evaluations, comparisons, ablations.

A damaged file raises ``ReportError``, damaged captions raise ``DataError``; both name the file and the line or key.
"""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from rl_caption.data.files import PREDICTIONS, read_captions
from rl_caption.data.plain_files import check_type, read_json, read_log, read_yaml
from rl_caption.evaluation.confidence import Difference
from rl_caption.evaluation.results import COMPARISON, SETTINGS, ScoresFile, folder_of
from rl_caption.runtime.errors import UserError
from rl_caption.training.checkpoint import STATE, CheckpointError, newest_checkpoint, read_state


class ReportError(UserError, ValueError):
    """A folder or file cannot be reported on; the message names it, the line where there is one, and what is right."""


class _Term(TypedDict, total=False):
    weight: float
    target: str | None
    schedule: list[tuple[float, float]] | None


class _Alarm(TypedDict):
    step: int
    evidence: list[str]


CONFIG_KEYS = {
    "reward.normalize": str,
    "reward.terms": dict[str, _Term],
    "eval.split": str | None,
    "train.max_steps": int | None,
    "data": dict[str, Any],
    "data.path": str | None,
    "data.format": str | None,
    "model.init": str | None,
    "model.name": str | None,
    "rollout": dict[str, Any],
    "task": str,
}
"""The values of ``config.yaml`` that a report or a model card reads: dotted key -> type."""
ENV_KEYS = {"versions": dict[str, str | None], "command": list[str]}
STATE_KEYS = {
    "metric": str,
    "best_step": int | None,
    "step": int,
    "stopped": str | None,
    "signature": str,
    "notes.hacking.first_alarm": _Alarm | None,
}


SETTINGS_KEYS = {
    "data": dict[str, Any],
    "split": str,
    "weights": str | list[str],
    "predictions": str,
}


class Comparison(TypedDict):
    """``comparison.json``; differences by metric key."""

    systems: tuple[str, str]
    resamples: int
    differences: dict[str, Difference]


class EvaluationFolder(NamedTuple):
    """What ``evaluate.py`` wrote: ``scores.json``, image id -> caption, and ``settings.json``."""

    scores: ScoresFile
    captions: Mapping[str, str]
    settings: Mapping[str, Any]


class Member(NamedTuple):
    """One evaluated captioner of an ablation: a starting policy (seed and run are None), or a cell with one seed.

    ``system`` names its row in tables, which all seeds of a cell share: ``LABEL`` or, with several bases,
    ``BASE/LABEL``.
    """

    system: str
    base: str
    alpha: float | None
    seed: int | None
    evaluation: EvaluationFolder
    run: "RunFolder | None"


@dataclass(frozen=True)
class RunFolder:
    """A training run: its folder, the lines of ``metrics.jsonl``, ``config.yaml``, ``env.json``, and its state.

    The state is ``result.json`` or, while the run is not ``complete``, the counters of its newest checkpoint.
    """

    path: Path
    lines: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    state: Mapping[str, Any]
    complete: bool

    @property
    def name(self) -> str:
        """The folder's name. A folder that is just called ``run`` gets the names of the two above it: ``A/B``."""
        names = self.path.resolve().parts
        return "/".join(names[-3:-1]) if names[-1] == "run" else names[-1]

    @property
    def terms(self) -> Mapping[str, _Term]:
        """Name -> reward term; empty for a run without rewards."""
        return self.config.get("reward", {}).get("terms", {})

    @property
    def reward(self) -> str:
        """Weights and terms, such as ``0.5 cider + 0.5 l_clipscore``."""
        return " + ".join(f"{term.get('weight', 1):g} {name}" for name, term in self.terms.items())

    @property
    def rewards_cider_alone(self) -> bool:
        """Whether the reward is CIDEr-D and nothing else."""
        scaled = self.config.get("reward", {}).get("normalize", "none") != "none"
        terms = [
            (name, term.get("target"), term.get("weight", 1)) for name, term in self.terms.items()
        ]
        return len(terms) == 1 and "cider" in terms[0][:2] and terms[0][2] == 1 and not scaled

    @property
    def best_step(self) -> int | None:
        """Step of the best validation; None where it is not known, or where no step was better than the start."""
        return self.state.get("best_step") or None

    @property
    def first_alarm(self) -> Mapping[str, Any]:
        """``step`` and ``evidence`` (sentences) of the first alarm; empty where there was none, or none was noted."""
        return self.state.get("notes", {}).get("hacking", {}).get("first_alarm") or {}

    @cached_property
    def keys(self) -> list[str]:
        """All logged keys except ``step``, in the order of the log."""
        return [
            key
            for key in dict.fromkeys(key for line in self.lines for key in line)
            if key != "step"
        ]

    @cached_property
    def doubles(self) -> set[str]:
        """Keys of judges whose values equal ``val/cider``: they are not shown twice."""
        return {
            key
            for key in self.keys
            if key.startswith("val/judge/") and self.equal(key, "val/cider")
        }

    @property
    def validations(self) -> list[Mapping[str, Any]]:
        """The lines of the log that a validation wrote."""
        return [line for line in self.lines if any(key.startswith("val/") for key in line)]

    @property
    def last_step(self) -> int:
        """The last step that was logged or, for ``grpo_vlm``, noted in ``result.json``; 0 where there is none."""
        return max(
            (line["step"] for line in [self.state, *self.lines] if "step" in line), default=0
        )

    @property
    def has_monitor(self) -> bool:
        """Whether the monitor looked for signs of reward hacking."""
        return "hacking/alarm" in self.keys

    @cached_property
    def alarms(self) -> list[int]:
        """Steps of the validations with an alarm."""
        return [step for step, value in self.series("hacking/alarm") if value > 0]

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a logged key, in order."""
        return [(line["step"], line[key]) for line in self.lines if key in line]

    def equal(self, one: str, other: str) -> bool:
        """Whether two logged keys have the same values wherever both were logged, so that one chart shows both."""
        pairs = [(line[one], line[other]) for line in self.lines if one in line and other in line]
        return bool(pairs) and all(abs(first - second) < 1e-9 for first, second in pairs)

    def predictions(self, step: int) -> dict[str, str]:
        """Image id -> greedy caption at the validation of ``step``; empty where captions were not kept."""
        return _captions(self._validation(step))

    @property
    def best_predictions(self) -> Path:
        """The file of captions of the best validation, or of the newest where none is known to be best.

        Raises ``ReportError`` where the captions were not kept.
        """
        best = self.state.get("best_step")
        newest = self.validations[-1]["step"] if self.validations else 0
        file = self._validation(newest if best is None else best) / PREDICTIONS
        if not file.is_file():
            raise ReportError(f"{file}: the run has no captions of its validation")
        return file

    def judges(self, step: int) -> dict[str, dict[str, float]]:
        """Judge -> image id -> score at the validation of ``step``; empty where there are none."""
        file = self._validation(step) / "judges.json"
        content = _read(file, {"image_id": list[str], "judges": dict[str, list[float]]})
        ids, judges = content.get("image_id", []), content.get("judges", {})
        for name, scores in judges.items():
            if len(scores) != len(ids):
                raise ReportError(
                    f"{file}: judge {name!r} has {len(scores)} scores of {len(ids)} images"
                )
        return {name: dict(zip(ids, scores, strict=True)) for name, scores in judges.items()}

    def shown_steps(self) -> dict[str, int]:
        """Validations whose captions are shown: ``start`` (``first`` if not step 0), ``best``, ``last`` -> step."""
        steps = [
            x["step"]
            for x in self.validations
            if (self._validation(x["step"]) / "predictions.json").is_file()
        ]
        if not steps:
            return {}
        steps_by_name = {"start" if steps[0] == 0 else "first": steps[0]}
        if self.best_step in steps[1:]:
            steps_by_name["best"] = self.best_step
        if steps[-1] not in steps_by_name.values():
            steps_by_name["last"] = steps[-1]
        return steps_by_name

    def _validation(self, step: int) -> Path:
        return self.path / "eval" / f"step-{step:08d}"


def kind_of(path: Path) -> str:
    """What a folder holds: ``run``, ``evaluation``, ``ablation`` or ``comparison``; ``ReportError`` if none of them."""
    if not path.is_dir():
        raise ReportError(
            f"{path} is not a folder: expected the folder of a run, an evaluation, a comparison or an ablation"
        )
    if (path / "config.yaml").is_file() and (path / "env.json").is_file():
        return "run"
    signs = {
        "metrics.jsonl": "run",
        "scores.json": "evaluation",
        "runs.csv": "ablation",
        COMPARISON: "comparison",
    }
    for file, content in signs.items():
        if (path / file).is_file():
            return content
    raise ReportError(
        f"{path} holds no run (config.yaml and metrics.jsonl), no evaluation (scores.json), no comparison "
        "(comparison.json) and no ablation (runs.csv)"
    )


def read_run(path: Path) -> RunFolder:
    """Read a run, which may still be going on."""
    log, result = path / "metrics.jsonl", path / "result.json"
    lines = []
    for where, line in read_log(log, ReportError) if log.is_file() else ():
        check_type(line, dict[str, float], where, ReportError)
        lines.append(line)
    state = _read(result, STATE_KEYS)
    newest = newest_checkpoint(path / "checkpoints") if not result.is_file() else None
    if newest is not None:
        try:
            state = vars(read_state(newest))
        except CheckpointError as error:  # of another version
            raise ReportError(str(error)) from error
        _check_keys(state, STATE_KEYS, newest / STATE)
    config, env = _read(path / "config.yaml", CONFIG_KEYS), _read(path / "env.json", ENV_KEYS)
    return RunFolder(path, lines, config, env, state, result.is_file())


def read_evaluation(path: Path) -> EvaluationFolder:
    """Read what ``evaluate.py`` wrote."""
    file = path / "scores.json"
    if not file.is_file():
        raise ReportError(f"{path} holds no evaluation: it has no scores.json")
    scores = read_json(file, ReportError, ScoresFile)
    return EvaluationFolder(scores, _captions(path), _read(path / SETTINGS, SETTINGS_KEYS))


def named_data(path: Path) -> tuple[dict[str, Any], str]:
    """The section ``data``, empty where there is none, and the split of the captions of a run or an evaluation."""
    if (path / PREDICTIONS).is_file():
        settings = _read(path / SETTINGS, SETTINGS_KEYS)
        return settings.get("data", {}), settings.get("split", "test")
    config = read_run(path).config
    return config.get("data", {}), config.get("eval", {}).get("split", "val")


def read_comparison(path: Path) -> tuple[Comparison, dict[str, EvaluationFolder]]:
    """Read what ``evaluate.py --compare`` wrote: the comparison, and both evaluations by name."""
    content: Comparison = read_json(path / COMPARISON, ReportError, Comparison)
    return content, {name: read_evaluation(path / folder_of(name)) for name in content["systems"]}


def read_ablation(path: Path) -> tuple[list[Member], list[str]]:
    """Read what ``ablate.py`` wrote: members as in ``runs.csv``, and a sentence for each cell without a result."""
    file = path / "runs.csv"
    try:
        with file.open(encoding="utf-8", newline="") as handle:
            rows = list(csv.DictReader(handle))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ReportError(f"{file} is not CSV: {error}") from error
    members = [
        _member(path, row, f"{file}, line {number}") for number, row in enumerate(rows, start=2)
    ]
    finished = {(member.system, member.seed) for member in members}
    cells = path / "cells"
    missing = [
        f"{cell.relative_to(path)} has no result: its output is in {cell / 'log.txt'}"
        for cell in sorted(config.parent for config in cells.rglob("scst.yaml"))
        if (cell.parent.relative_to(cells).as_posix(), int(cell.name.removeprefix("seed")))
        not in finished
        and not any(cell.glob("*/settings.json"))  # else it is of an earlier grid in this folder
    ]
    return members, missing


def _member(path: Path, row: Mapping[str, str | None], where: str) -> Member:
    """One line of ``runs.csv``, of which a starting policy has no alpha and no seed."""
    system, base, alpha, seed = (row.get(key) for key in ("system", "base", "alpha", "seed"))
    if system is None or base is None or alpha is None or seed is None:
        raise ReportError(
            f"{where} was not written by ablate: expected the columns system, base, alpha and seed"
        )
    try:
        numbers = float(alpha) if alpha else None, int(seed) if seed else None
    except ValueError as error:
        raise ReportError(f"{where}: alpha and seed: {error}") from error
    # A system is called BASE/LABEL where there are several bases, and its folder is too.
    folder = path / "cells" / system / f"seed{seed}" if seed else path / "start" / base
    if not folder.resolve().is_relative_to(path.resolve()):
        raise ReportError(
            f"{where}: {system!r} and {base!r} are paths outside of {path}: expected plain names"
        )
    files = sorted(folder.glob("*/scores.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ReportError(f"{where}: {system!r} has no */scores.json in {folder}")
    evaluations = [read_evaluation(file.parent) for file in files]
    # Other splits and policies may have been evaluated since: the one of these numbers, or else the newest.
    told = [
        one
        for one in evaluations
        if all(row.get(key, str(x)) == str(x) for key, x in one.scores["metrics"].items())
    ]
    run = read_run(folder / "run") if seed and (folder / "run").is_dir() else None
    return Member(system, base, *numbers, (told or evaluations)[-1], run)


def by_system(members: Sequence[Member]) -> dict[str, list[Member]]:
    """System -> its members (a starting policy, or the seeds of a cell), in the order in which systems first occur."""
    return {
        one.system: [other for other in members if other.system == one.system] for one in members
    }


def over_seeds(evaluations: Sequence[EvaluationFolder]) -> dict[str, tuple[float, float | None]]:
    """Metric key -> its mean over seeds, and the sample standard deviation (n - 1) where there are several values."""
    values_by_key: dict[str, list[float]] = {}
    for evaluation in evaluations:
        for key, value in evaluation.scores["metrics"].items():
            values_by_key.setdefault(key, []).append(value)
    return {
        key: (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
        for key, values in values_by_key.items()
    }


def alpha_curve(
    systems: Mapping[str, Sequence[Member]], base: str, key: str, factor: float = 1.0
) -> list[tuple[float, float, float]]:
    """(alpha, mean, standard deviation) over seeds of a metric times ``factor``, by alpha, of the cells of a base.

    The deviation of one seed is 0.
    """
    curve = []
    for members in systems.values():
        mean, deviation = over_seeds([member.evaluation for member in members]).get(
            key, (None, None)
        )
        if members[0].base == base and members[0].alpha is not None and mean is not None:
            curve.append((members[0].alpha, factor * mean, factor * (deviation or 0.0)))
    return sorted(curve)


def starts_of(systems: Mapping[str, Sequence[Member]]) -> dict[str, Member]:
    """Base -> its starting policy."""
    return {members[0].base: members[0] for members in systems.values() if members[0].seed is None}


def _read(file: Path, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping in a JSON or YAML file, empty where there is none; values at dotted keys have the given types."""
    read = read_yaml if file.suffix == ".yaml" else read_json
    values = read(file, ReportError) if file.is_file() else {}
    _check_keys(values, kinds, file)
    return values


def _check_keys(values: Mapping[str, Any], kinds: Mapping[str, Any], file: Path) -> None:
    for dotted, expected in kinds.items():
        value, where = values, str(file)
        for key in dotted.split("."):
            check_type(value, dict, where, ReportError)
            if key not in value:
                break
            value, where = value[key], f"{file}, {key!r}"
        else:
            check_type(value, expected, f"{file}, {dotted!r}", ReportError)


def _captions(folder: Path) -> dict[str, str]:
    file = folder / "predictions.json"
    return read_captions(file, allow_empty=True) if file.is_file() else {}
