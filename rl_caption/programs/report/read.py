"""Read the folders of runs (finished or not) and of evaluations.

A file that is missing or damaged raises ``ReportError``, damaged captions raise
``DataError``; both name the file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rewards.trust import check_trusted
from rl_caption.config.schema import DataConfig
from rl_caption.data.files import PREDICTIONS, read_captions
from rl_caption.data.plain_files import read_json, read_log, read_yaml
from rl_caption.evaluation import Evaluation
from rl_caption.evaluation.results import LEFT_OUT, SETTINGS, ScoresFile, factor_of
from rl_caption.runtime.errors import UserError, naming
from rl_caption.runtime.options import class_names
from rl_caption.training.checkpoint import newest_checkpoint, read_state


class ReportError(UserError, ValueError):
    """A folder or file cannot be reported on. The message names it, the line where
    there is one, and what is expected.
    """


class EvaluationFolder(NamedTuple):
    """Results of ``evaluate``: ``scores.json``, image id -> caption, and
    ``settings.json``.
    """

    scores: Evaluation
    captions: Mapping[str, str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """A training run: its folder, the lines of ``metrics.jsonl``, ``config.yaml``,
    ``env.json``, and its state.

    The state is ``result.json`` or, while the run is not ``complete``, the counters of
    its newest checkpoint.
    """

    path: Path
    lines: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    state: Mapping[str, Any]
    complete: bool

    @property
    def terms(self) -> Mapping[str, Mapping[str, Any]]:
        """Name -> reward term; empty for a run without rewards."""
        return self.config.get("reward", {}).get("terms", {})

    @property
    def best_step(self) -> int | None:
        """Step of the best validation; None where it is not known, or where no step was
        better than the start.
        """
        return self.state.get("best_step") or None

    @property
    def evidence(self) -> Sequence[str]:
        """Sentences that explain the monitor's first alarm."""
        alarm = self.state.get("notes", {}).get("hacking", {}).get("first_alarm") or {}
        return alarm.get("evidence", [])

    @cached_property
    def keys(self) -> list[str]:
        """All logged keys except ``step``, in the order of the log."""
        keys = dict.fromkeys(key for line in self.lines for key in line)
        return [key for key in keys if key != "step"]

    @property
    def last_step(self) -> int:
        """The last step that was logged or, for ``grpo_vlm``, noted in ``result.json``;
        0 where there is none.
        """
        return max(line.get("step", 0) for line in (self.state, *self.lines))

    @property
    def alarms(self) -> list[int]:
        """Steps of the validations with an alarm."""
        return [step for step, value in self.series("hacking/alarm") if value > 0]

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a logged key, in order."""
        return [(line["step"], line[key]) for line in self.lines if key in line]

    def predictions(self, step: int) -> dict[str, str]:
        """Image id -> greedy caption at the validation of ``step``; empty where
        captions were not kept.
        """
        return _captions(self.path / "eval" / f"step-{step:08d}")

    def shown_steps(self) -> dict[str, int]:
        """Labels of the validations to show, such as ``step 0 (first)``, -> step. Also
        the best and the last validation.
        """
        keys = [key for key in self.keys if key.startswith("val/")]
        steps = sorted({step for key in keys for step, _ in self.series(key)})
        words = {}
        if steps:
            words = {steps[0]: "first", steps[-1]: "last"}
        if self.best_step in steps:
            words[self.best_step] = "best"
        return {f"step {step} ({words[step]})": step for step in sorted(words)}

    def validations(self) -> list[list[str]]:
        """A table, its head first: metrics as rows; the first, best and last validation
        as columns; empty before the first validation.
        """
        steps = self.shown_steps()
        table = [["key", *steps]] if steps else []
        for key in self.keys:
            if key.startswith("val/"):
                values = dict(self.series(key))
                row = [shown_key(key)]
                for step in steps.values():
                    value = factor_of(key) * values.get(step, math.nan)
                    row.append(LEFT_OUT if math.isnan(value) else f"{value:.4g}")
                table.append(row)
        return table


def shown_key(key: str) -> str:
    """A logged key for display, with " (x100)" where values are multiplied by 100."""
    return key if factor_of(key) == 1 else f"{key} (x100)"


def read_run(path: Path) -> RunFolder:
    """Read the folder of a run, which may still be going on. Raises ``ReportError``."""
    log, result = path / "metrics.jsonl", path / "result.json"
    lines = read_log(log, ReportError) if log.is_file() else []
    state = _read(result)
    newest = newest_checkpoint(path / "checkpoints")
    if newest is not None and not result.is_file():
        state = vars(read_state(newest))
    config, env = _read(path / "config.yaml"), _read(path / "env.json")
    return RunFolder(path, lines, config, env, state, result.is_file())


def read_evaluation(path: Path) -> EvaluationFolder:
    """Read the folder of an evaluation. Raises ``ReportError``."""
    scores = Evaluation(**read_json(path / "scores.json", ReportError, ScoresFile))
    return EvaluationFolder(scores, _captions(path), _read(path / SETTINGS))


def received_data(data: Mapping[str, Any]) -> DataConfig:
    """The section ``data`` of a saved configuration, perhaps of another person: classes
    in it must be in ``trust``.

    Raises ``ConfigError``, also for unknown keys and wrong types.
    """
    with naming("data"):
        for name in class_names(data):
            check_trusted(name, "its class")
        return DataConfig.model_validate_json(json.dumps(data))


def _read(file: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file, empty where there is none."""
    read = read_yaml if file.suffix == ".yaml" else read_json
    content: dict[str, Any] = read(file, ReportError) if file.is_file() else {}
    return content


def _captions(folder: Path) -> dict[str, str]:
    file = folder / PREDICTIONS
    return read_captions(file) if file.is_file() else {}
