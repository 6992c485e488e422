"""The metrics that are judged: n-gram metrics by their usual names, METEOR and SPICE, and any reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.base import Reward, RewardError, as_texts, checked_scores, reference_lists
from rewards.registry import build, load
from rewards.text.cider import CiderD
from rewards.text.tokenize import TOKENIZER, tokenize
from rl_caption.config.build import ConfigError
from rl_caption.evaluation.java import JavaError, find_java
from rl_caption.evaluation.toolkit import SCORERS
from rl_caption.monitoring.config import JudgeConfig

NAMES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "bleu": {f"BLEU-{n}": ("bleu", {"n": n}) for n in (1, 2, 3, 4)},
    **{f"bleu{n}": {f"BLEU-{n}": ("bleu", {"n": n})} for n in (1, 2, 3, 4)},
    "rouge": {"ROUGE-L": ("rouge_l", {})},
    "rouge_l": {"ROUGE-L": ("rouge_l", {})},
    "cider": {"CIDEr": ("cider", {})},
}
"""Name on the command line -> heading -> (name of the reward, its arguments)."""
TOOLKIT = {"meteor": "METEOR", "spice": "SPICE"}


@dataclass(frozen=True)
class LeftOut:
    """A metric that cannot be computed here, and why."""

    reason: str


class ToolkitMetric:
    """METEOR or SPICE of single captions, by the Java programs of the COCO toolkit, in [0, 1].

    Captions and references are tokenised by ``rewards.text.tokenize``. Equal captions with equal references are scored
    once. Not for training: every call starts a Java program.
    """

    columns = frozenset({"references"})
    bounds = (0.0, 1.0)
    tokenizer = TOKENIZER

    def __init__(self, metric: str) -> None:
        """Choose ``meteor`` or ``spice``."""
        self.__name__ = metric

    @property
    def signature(self) -> str:
        """Name and version of the toolkit."""
        from importlib.metadata import version

        return f"{TOOLKIT[self.__name__]}[pycocoevalcap{version('pycocoevalcap')}]+ptb"

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score N captions by the column ``references`` (N lists of captions).

        Raises:
            RewardError: the column is missing or wrong, or the program gives no score for a caption.
            JavaError: no Java, or the program failed or took too long.
        """
        texts = as_texts(completions)
        rows = list(zip(texts, reference_lists(columns, self.__name__, len(texts)), strict=True))
        keys = {row: str(number) for number, row in enumerate(dict.fromkeys(rows))}
        candidates = {key: " ".join(tokenize(text)) for (text, _), key in keys.items()}
        references = {key: [" ".join(tokenize(text)) for text in own] for (_, own), key in keys.items()}
        try:
            _, scores = SCORERS[self.__name__](candidates, references)[TOOLKIT[self.__name__]]
        except JavaError:
            raise
        except ValueError as error:
            raise RewardError(f"metric {self.__name__!r}: {error}") from error
        by_key = dict(zip(candidates, scores, strict=True))
        return checked_scores(self, [by_key[keys[row]] for row in rows], len(texts))


@dataclass(frozen=True)
class MetricSpec:
    """A metric that was asked for."""

    heading: str
    reward: str
    """Name in the registry, or ``module:Class``."""
    arguments: dict[str, Any]
    key: str
    """Of the configuration, for messages."""

    @property
    def kind(self) -> Any:
        """The reward's class; nothing is loaded for this.

        Raises:
            ConfigError: it is unknown.
        """
        try:
            return load(self.reward)
        except ValueError as error:
            names = ", ".join([*NAMES, *TOOLKIT])
            raise ConfigError(f"{self.key}: {error}. Besides rewards there are {names}") from error

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the class says it needs; none where it decides when it is built."""
        columns = getattr(self.kind, "columns", None)
        return columns if isinstance(columns, frozenset) else frozenset()

    def build(self) -> Reward | LeftOut:
        """Make the metric, or say why it is left out; CIDEr-D is without EOS unless its arguments say otherwise.

        Raises:
            ConfigError: it is unknown, or does not take its arguments.
        """
        if self.kind is ToolkitMetric:
            try:
                find_java()
            except JavaError as error:
                return LeftOut(str(error))
        own = {"eos": False} if self.kind is CiderD else {}
        try:
            return build(self.reward, **(own | self.arguments))
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"{self.key}: {error}") from error


def metric_specs(names: str | Sequence[str], judges: Mapping[str, JudgeConfig]) -> list[MetricSpec]:
    """Say which metrics are asked for, each heading once.

    Args:
        names: those of ``NAMES`` and ``TOOLKIT``, or of a reward that needs no arguments; with commas, or a list.
        judges: heading -> reward with arguments.

    Raises:
        ConfigError: no metric, or one twice.
    """
    found: dict[str, MetricSpec] = {}
    for name in (part.strip() for part in (names.split(",") if isinstance(names, str) else names)):
        if name in TOOLKIT:
            wanted = {TOOLKIT[name]: (f"{__name__}:ToolkitMetric", {"metric": name})}
        else:
            wanted = NAMES.get(name, {name: (name, {})} if name else {})
        for heading, (reward, arguments) in wanted.items():
            if heading in found:
                raise ConfigError(f"metrics: {heading} is asked for twice")
            found[heading] = MetricSpec(heading, reward, arguments, "metrics")
    for heading, judge in judges.items():
        if heading in found:
            raise ConfigError(f"judges.{heading} is among the metrics, too: give it another heading")
        found[heading] = MetricSpec(heading, judge.target or heading, dict(judge.kwargs), f"judges.{heading}")
    if not found:
        raise ConfigError(f"metrics is {names!r} and judges is empty: name at least one metric, such as cider")
    return list(found.values())


def build_metrics(names: str | Sequence[str], judges: Mapping[str, JudgeConfig]) -> dict[str, Reward | LeftOut]:
    """Make the metrics: heading -> metric, or why it is left out. Arguments and errors as for ``metric_specs``."""
    return {spec.heading: spec.build() for spec in metric_specs(names, judges)}
