"""The metrics that are judged: n-gram metrics by their usual names, METEOR and SPICE, and any reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards.base import Reward, RewardError, as_texts, checked_scores
from rewards.registry import build, load
from rewards.text.cider import CiderD
from rewards.text.references import reference_lists
from rewards.text.tokenize import tokenize
from rl_caption.build import ConfigError
from rl_caption.evaluation.java import JavaError, find_java
from rl_caption.evaluation.toolkit import SCORERS
from rl_caption.hacking.config import JudgeConfig

NAMES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "bleu": {f"BLEU-{n}": ("bleu", {"n": n}) for n in (1, 2, 3, 4)},
    **{f"bleu{n}": {f"BLEU-{n}": ("bleu", {"n": n})} for n in (1, 2, 3, 4)},
    "rouge": {"ROUGE-L": ("rouge_l", {})},
    "rouge_l": {"ROUGE-L": ("rouge_l", {})},
    "cider": {"CIDEr": ("cider", {"eos": False})},
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


def build_metrics(names: str | Sequence[str], judges: Mapping[str, JudgeConfig]) -> dict[str, Reward | LeftOut]:
    """Make the metrics.

    Args:
        names: those of ``NAMES`` and ``TOOLKIT``, or of a reward that needs no arguments; with commas, or a list.
        judges: heading -> reward with arguments. ``cider`` is without EOS unless its arguments say otherwise.

    Returns:
        Heading -> metric, or why it is left out.

    Raises:
        ConfigError: no metric, an unknown one, one twice, or arguments that it does not take.
    """
    made: dict[str, Reward | LeftOut] = {}
    for name in split_names(names):
        for heading, metric in _named(name).items():
            if heading in made:
                raise ConfigError(f"metrics: {heading} is asked for twice")
            made[heading] = metric
    for heading, judge in judges.items():
        if heading in made:
            raise ConfigError(f"judges.{heading} is among the metrics, too: give it another heading")
        arguments = dict(judge.kwargs)
        made[heading] = _built(judge.target or heading, arguments, f"judges.{heading}")
    if not made:
        raise ConfigError(f"metrics is {names!r} and judges is empty: name at least one metric, such as cider")
    return made


def _named(name: str) -> dict[str, Reward | LeftOut]:
    if name in NAMES:
        return {heading: build(reward, **arguments) for heading, (reward, arguments) in NAMES[name].items()}
    if name in TOOLKIT:
        try:
            find_java()
        except JavaError as error:
            return {TOOLKIT[name]: LeftOut(str(error))}
        return {TOOLKIT[name]: build(f"{__name__}:ToolkitMetric", metric=name)}
    return {name: _built(name, {}, "metrics")}


def _built(name: str, arguments: dict[str, Any], key: str) -> Reward:
    if _known(name, key) is CiderD:
        arguments = {"eos": False} | arguments
    try:
        return build(name, **arguments)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{key}: {error}") from error


def _known(name: str, key: str) -> Any:
    try:
        return load(name)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}. Besides rewards there are {', '.join([*NAMES, *TOOLKIT])}") from error


def columns_before_built(names: str | Sequence[str], judges: Mapping[str, JudgeConfig]) -> dict[str, frozenset[str]]:
    """Say which columns metrics need whose classes tell without being built: nothing is loaded for this.

    Returns:
        Heading -> columns; metrics that decide when they are built are not among them.

    Raises:
        ConfigError: an unknown metric.
    """
    wanted = {name: "metrics" for name in split_names(names) if name not in NAMES and name not in TOOLKIT}
    targets = {name: (name, key) for name, key in wanted.items()}
    targets |= {heading: (judge.target or heading, f"judges.{heading}") for heading, judge in judges.items()}
    found = {heading: getattr(_known(name, key), "columns", None) for heading, (name, key) in targets.items()}
    return {heading: columns for heading, columns in found.items() if isinstance(columns, frozenset)}


def split_names(names: str | Sequence[str]) -> list[str]:
    """Return the names of a text with commas, or of a list."""
    parts = names.split(",") if isinstance(names, str) else names
    return [name.strip() for name in parts if name.strip()]
