"""The curation program: measures and scores the captions of a data set, and keeps the best."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame

from rewards.base import Reward, score_captions
from rewards.images import image_identity
from rewards.text.detail_units import default_tagger, word_class
from rewards.text.tokenize import tokenize
from rl_caption.data.base import DataError, Row, load_image, with_references
from rl_caption.data.checks import in_parallel
from rl_caption.data.plain_files import hash_text
from rl_caption.evaluation.results import LEFT_OUT, markdown
from rl_caption.lab.config import CurateConfig, Selection
from rl_caption.lab.parts import Columns, Report, Rows, add_columns
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.runtime.errors import ConfigError

Steps = dict[str, DataFrame]
"""Name of a step of the selection -> the captions that remain after it."""
UNREADABLE = "image cannot be read"
"""Reason of captions whose image cannot be decoded."""
_AUXILIARIES = "is are was were be been being am has have had do does"
AUXILIARIES = frozenset(_AUXILIARIES.split())


def curate(config: CurateConfig) -> str:
    """Write ``kept.jsonl``, the rows with the kept captions (``parts.add_columns``);
    return a table of the steps.

    Raises:
        ConfigError: a rule, a score or a step of the selection cannot be used, or
            ``out`` has parts of other settings.
        DataError: a file, a row or an image cannot be read.
        RewardError: a score failed.
    """
    for step in config.select:
        if step.score not in {"random", *config.scores}:
            raise ConfigError(f"select: {step.score!r} is not one of scores")
    scores = {}
    for name, judge in config.scores.items():
        reward = judge.target or name
        unclipped = {"clip": False} if reward == "icc" else {}
        scores[name] = JudgeConfig(target=reward, kwargs=unclipped | judge.kwargs)
    rewards = build_judges(scores, None, [], "scores")
    made_by = {
        "rules": [list(rule) for rule in config.rules.items()],  # their order matters
        "scores": {name: reward.signature for name, reward in rewards.items()},
        "duplicates": config.duplicates,
        "on_bad": config.data.on_bad,
    }

    def columns(split: str, rows: Sequence[Row]) -> Columns:
        return {"captions": measure_rows(config, rows, rewards)}

    def report(rows: Rows) -> Report:
        """The table of the steps, and the rows with the kept captions."""
        captions = [one for row in rows for one in row["captions"]]
        steps = select(config, captions)
        *_, left = steps.values()
        is_left = iter(np.isin(range(len(captions)), left.index))
        kept = []
        for row in rows:
            flags = list(itertools.islice(is_left, len(row["captions"])))
            if any(flags):
                kept.append(with_references(row, np.flatnonzero(flags).tolist()))
        return Report(_table(steps, list(rewards)), kept)

    return add_columns(config, "kept", made_by, columns, report, ids_differ=False)


def measure_rows(
    config: CurateConfig, rows: Sequence[Row], rewards: Mapping[str, Reward]
) -> list[list[dict[str, Any]]]:
    """The column ``captions`` of each row: for each caption the ``reason`` to drop it
    (the first rule that it breaks, ``UNREADABLE``, or None); the ``key``, which is
    equal for duplicates; and its scores by name, where it has no reason. Raises
    ``DataError`` for an image that cannot be read, unless ``data.on_bad`` is ``skip``.
    """
    errors: Sequence[str] = [""] * len(rows)
    if any("image" in reward.columns for reward in rewards.values()):
        errors = list(in_parallel(_error_of, rows, "checking images"))
    unreadable = list(filter(None, errors))
    if unreadable and config.data.on_bad == "fail":
        count = f"{len(unreadable)} of {len(rows)} images cannot be used"
        raise DataError(
            f"{count}: {unreadable[0]} (data.on_bad: skip drops their captions)"
        )
    column = []
    scored: list[dict[str, Any]] = []
    inputs: dict[str, list[Any]] = {"image": [], "image_id": []}
    texts = []
    for row, error in zip(rows, errors, strict=True):
        measured: list[dict[str, Any]] = []
        for caption in row["references"]:
            reason = UNREADABLE if error else _broken_rule(config, caption)
            measured.append({"reason": reason, "key": _key(config, row, caption)})
            if reason is None:
                scored.append(measured[-1])
                texts.append(caption)
                inputs["image"].append(row["image"])
                inputs["image_id"].append(row["image_id"])
        column.append(measured)
    for name, reward in rewards.items() if scored else ():
        values = score_captions(reward, f"scores.{name}", None, texts, inputs)
        for one, value in zip(scored, values, strict=True):
            one[name] = value
    return column


def _error_of(row: Row) -> str:
    """Why the image of a row cannot be decoded; empty where it can."""
    try:
        load_image(row["image"])
    except DataError as error:
        return str(error)
    return ""


def _broken_rule(config: CurateConfig, caption: str) -> str | None:
    for name, (least, most) in config.rules.items():
        measure = MEASURES[name](caption)
        too_low = least is not None and measure < least
        if too_low or (most is not None and measure > most):
            return name
    return None


def _key(config: CurateConfig, row: Row, caption: str) -> int:
    if config.duplicates is None:
        return 0
    text = " ".join(tokenize(caption))
    if config.duplicates == "pair":
        image = row["image"]
        text += f"\n{image if isinstance(image, str | Path) else image_identity(image)}"
    return hash_text(text)


def select(config: CurateConfig, captions: list[dict[str, Any]]) -> Steps:
    """Select among N measured captions; return the steps in their order."""
    table = DataFrame(captions, columns=["reason", "key", *config.scores])
    table = table.astype(dict.fromkeys(config.scores, "float32"))
    if "random" not in config.scores:
        table["random"] = np.random.default_rng(config.seed).random(len(table))
    left = table[table["reason"] != UNREADABLE]
    steps = {"captions": table, "readable": left}
    for name, limits in config.rules.items():
        left = steps[f"{name} in {limits}"] = left[left["reason"] != name]
    if config.duplicates is not None:
        left = left.drop_duplicates("key")
        steps[f"duplicate {config.duplicates}"] = left
    for step in config.select:
        left = steps[str(step.model_dump(exclude_none=True))] = select_captions(
            step, left
        )
    return steps


def select_captions(step: Selection, table: DataFrame) -> DataFrame:
    """The captions that a step of the selection keeps; at equal scores, the first ones."""
    low = -np.inf if step.min is None else step.min
    high = np.inf if step.max is None else step.max
    kept = table[table[step.score].between(low, high)]
    if step.top is not None:
        kept = kept.nlargest(_number(step.top, kept), step.score)
    if step.bottom is not None:
        kept = kept.nsmallest(_number(step.bottom, kept), step.score)
    return kept.sort_index()


def _number(count: float, table: DataFrame) -> int:
    """Number of captions for ``count``; below 1, it is a fraction of the table."""
    # Rounded, because 0.29 * 100 is 28.999999999999996.
    return int(count if count >= 1 else round(count * len(table), 6))


def _table(steps: Steps, scores: list[str]) -> str:
    """A Markdown table: the number of captions after each step, and their mean scores."""
    lines = []
    before = len(steps["captions"])
    for name, left in steps.items():
        means = left[scores].astype(float).mean().map("{:.4f}".format)
        dropped = f"{before - len(left):,}"
        cells = means.replace("nan", LEFT_OUT)
        lines.append([name, dropped, f"{len(left):,}", *cells])
        before = len(left)
    headings = [f"mean {score}" for score in scores]
    return markdown(["step", "dropped", "left", *headings], lines)


@lru_cache(maxsize=1)
def _classes(caption: str) -> list[str]:
    """The ``word_class`` of each word of a caption except auxiliary verbs."""
    words = tokenize(caption)
    tagged = zip(words, default_tagger()([words])[0], strict=True)
    return [word_class(tag) for word, tag in tagged if word not in AUXILIARIES]


MEASURES: dict[str, Callable[[str], float]] = {
    "characters": len,
    "words": lambda caption: len(tokenize(caption)),
    "actions": lambda caption: _classes(caption).count("V"),
    "complexity": lambda caption: sum(tag in "JVI" for tag in _classes(caption)),
}
"""Measure of a caption by its name (docs/curation.md)."""
