"""What the programs leave in folders: runs (finished or not), evaluations.

A file that is missing or damaged raises ``ReportError``, damaged captions raise ``DataError``; both
name the file.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rl_caption.data.files import PREDICTIONS, read_captions
from rl_caption.data.plain_files import read_json, read_log, read_yaml
from rl_caption.evaluation.results import SETTINGS, ScoresFile
from rl_caption.runtime.errors import UserError
from rl_caption.training.checkpoint import newest_checkpoint, read_state


class ReportError(UserError, ValueError):
    """A folder or file cannot be reported on; the message names it, the line where there is one,
    and what is right.
    """


class EvaluationFolder(NamedTuple):
    """What ``evaluate`` wrote: ``scores.json``, image id -> caption, and ``settings.json``."""

    scores: ScoresFile
    captions: Mapping[str, str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """A training run: its folder, the lines of ``metrics.jsonl``, ``config.yaml``, ``env.json``,
    and its state.

    The state is ``result.json`` or, while the run is not ``complete``, the counters of its newest
    checkpoint.
    """

    path: Path
    lines: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    state: Mapping[str, Any]
    complete: bool

    @property
    def name(self) -> str:
        """The folder's name; ``A/B`` of a run in ``A/B/run``."""
        names = self.path.resolve().parts
        return "/".join(names[-3:-1]) if names[-1] == "run" else names[-1]

    @property
    def terms(self) -> Mapping[str, Mapping[str, Any]]:
        """Name -> reward term; empty for a run without rewards."""
        return self.config.get("reward", {}).get("terms", {})

    @property
    def reward(self) -> str:
        """Weights and terms, such as ``1 cider + 0.5 l_clipscore``."""
        return " + ".join(
            f"{term.get('weight', 1):g} {name}" for name, term in self.terms.items()
        )

    @property
    def best_step(self) -> int | None:
        """Step of the best validation; None where it is not known, or where no step was better than
        the start.
        """
        return self.state.get("best_step") or None

    @property
    def evidence(self) -> Sequence[str]:
        """Sentences on the first alarm of the monitor."""
        alarm = self.state.get("notes", {}).get("hacking", {}).get("first_alarm") or {}
        return alarm.get("evidence", [])

    @cached_property
    def keys(self) -> list[str]:
        """All logged keys except ``step``, in the order of the log."""
        keys = dict.fromkeys(key for line in self.lines for key in line)
        return [key for key in keys if key != "step"]

    @property
    def validations(self) -> list[Mapping[str, Any]]:
        """The lines of the log that a validation wrote."""
        return [
            line for line in self.lines if any(key.startswith("val/") for key in line)
        ]

    @property
    def last_step(self) -> int:
        """The last step that was logged or, for ``grpo_vlm``, noted in ``result.json``; 0 where
        there is none.
        """
        return max(
            (line.get("step", 0) for line in [self.state, *self.lines]), default=0
        )

    @property
    def has_monitor(self) -> bool:
        """Whether the monitor looked for signs of reward hacking."""
        return "hacking/alarm" in self.keys

    @property
    def alarms(self) -> list[int]:
        """Steps of the validations with an alarm."""
        return [step for step, value in self.series("hacking/alarm") if value > 0]

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a logged key, in order."""
        return [(line["step"], line[key]) for line in self.lines if key in line]

    def predictions(self, step: int) -> dict[str, str]:
        """Image id -> greedy caption at the validation of ``step``; empty where captions were not
        kept.
        """
        return _captions(self._validation(step))

    def judges(self, step: int) -> dict[str, dict[str, float]]:
        """Judge -> image id -> score at the validation of ``step``; empty where there are none."""
        content = _read(self._validation(step) / "judges.json")
        return {
            name: dict(zip(content["image_id"], scores, strict=True))
            for name, scores in content.get("judges", {}).items()
        }

    def shown_steps(self) -> dict[str, int]:
        """The validations that are shown: ``step 0 (first)``, also ``best`` and ``last`` -> step."""
        steps = [line["step"] for line in self.validations]
        words = {}
        if steps:
            words = {steps[0]: "first", steps[-1]: "last"}
        if self.best_step in steps:
            words[self.best_step] = "best"
        return {f"step {step} ({words[step]})": step for step in sorted(words)}

    def _validation(self, step: int) -> Path:
        return self.path / "eval" / f"step-{step:08d}"


def read_run(path: Path) -> RunFolder:
    """Read a run, which may still be going on."""
    log, result = path / "metrics.jsonl", path / "result.json"
    lines = [line for _, line in read_log(log, ReportError)] if log.is_file() else []
    state = _read(result)
    newest = newest_checkpoint(path / "checkpoints")
    if newest is not None and not result.is_file():
        state = vars(read_state(newest))
    config, env = _read(path / "config.yaml"), _read(path / "env.json")
    return RunFolder(path, lines, config, env, state, result.is_file())


def read_evaluation(path: Path) -> EvaluationFolder:
    """Read what ``evaluate`` wrote."""
    scores = read_json(path / "scores.json", ReportError, ScoresFile)
    return EvaluationFolder(scores, _captions(path), _read(path / SETTINGS))


def over_seeds(
    evaluations: Sequence[EvaluationFolder],
) -> dict[str, tuple[float, float | None]]:
    """Metric key -> its mean over seeds, and the sample standard deviation (n - 1) where there are
    several values.
    """
    values_by_key: dict[str, list[float]] = {}
    for evaluation in evaluations:
        for key, value in evaluation.scores["metrics"].items():
            values_by_key.setdefault(key, []).append(value)
    return {
        key: (
            statistics.fmean(values),
            statistics.stdev(values) if len(values) > 1 else None,
        )
        for key, values in values_by_key.items()
    }


def _read(file: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file, empty where there is none."""
    read = read_yaml if file.suffix == ".yaml" else read_json
    content: dict[str, Any] = read(file, ReportError) if file.is_file() else {}
    return content


def _captions(folder: Path) -> dict[str, str]:
    file = folder / PREDICTIONS
    return read_captions(file) if file.is_file() else {}
