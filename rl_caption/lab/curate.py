"""The curation program: measures and scores the captions of a data set, and keeps the best."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.base import Reward, score_captions
from rewards.build import RewardBuilder
from rewards.images import image_identity
from rewards.text.degeneration import BAD_ENDINGS
from rewards.text.detail_units import default_tagger, word_class
from rewards.text.tokenize import tokenize
from rl_caption.data.base import DataError, Row, load_image, with_references
from rl_caption.data.checks import in_parallel
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import CurateConfig, Selection
from rl_caption.lab.parts import Columns, Report, Rows, add_columns, selected_rows
from rl_caption.runtime.errors import ConfigError, config_errors

UNREADABLE = "image cannot be read"
"""Reason of captions whose image cannot be decoded."""
STOP_WORDS = BAD_ENDINGS.union(
    [
        "i",
        "you",
        "he",
        "she",
        "it",
        "we",
        "they",
        "him",
        "her",
        "them",
        "us",
        "me",
        "there",
        "here",
        "by",
        "not",
        "no",
        "so",
        "such",
        "when",
        "how",
        "what",
        "all",
        "any",
        "both",
        "each",
        "more",
        "most",
        "other",
        "only",
        "own",
        "too",
        "up",
        "down",
        "out",
        "off",
        "over",
        "under",
        "then",
        "once",
        "about",
        "after",
        "before",
        "above",
        "below",
        "can",
    ]
)
"""English function words."""
AUXILIARIES = frozenset(
    [
        "is",
        "are",
        "was",
        "were",
        "be",
        "been",
        "being",
        "am",
        "has",
        "have",
        "had",
        "do",
        "does",
    ]
)
Mask = NDArray[np.bool_]
Steps = dict[str, Mask]
"""Name of a step of the selection -> which captions are left after it, [N]."""
Scores = Mapping[str, NDArray[np.float32]]
"""Name -> scores of captions, NaN where one was not scored, [N]."""


def curate(config: CurateConfig) -> str:
    """Write ``kept.jsonl``, the rows with the captions that are kept (``parts.add_columns``).

    Raises:
        ConfigError: a rule, a score or a step of the selection cannot be used, or ``out`` has parts
            of other settings.
        DataError: a file, a row or an image cannot be read.
        RewardError: a score failed.
    """
    for name, limits in config.rules.items():
        if name not in MEASURES or len(limits) != 2:
            expected = f"expected [least, most] of one of {', '.join(MEASURES)}"
            raise ConfigError(f"rules.{name} is {limits}: {expected}")
    for step in config.select:
        if step.score not in {"random", *config.scores} or (
            step.top is not None and step.bottom is not None
        ):
            expected = (
                f"one of top and bottom, and a score among {', '.join(config.scores)}"
            )
            raise ConfigError(f"select has {step}: expected {expected}")
    rewards, builder = {}, RewardBuilder()
    for name, score in config.scores.items():
        with config_errors(f"scores.{name}"):
            reward = score.target or name
            unclipped = {"clip": False} if reward == "icc" else {}
            rewards[name] = builder.build(reward, unclipped | score.kwargs)
    data, rows = selected_rows(config, ids_differ=False)
    signatures = {name: reward.signature for name, reward in rewards.items()}
    made_by = {
        "rules": [
            list(rule) for rule in config.rules.items()
        ],  # a list: their order matters
        "scores": signatures,
        "duplicates": config.duplicates,
        "on_bad": config.data.on_bad,
    }

    def columns(batch: Rows) -> list[Columns]:
        return measure_rows(config, [row for _, row in batch], rewards)

    def report(made: list[Any]) -> Report:
        reasons = np.array(
            [reason for *_, new in made for reason in new["reasons"]], object
        )
        keys = [key for *_, new in made for key in new["keys"]]
        scores = {}
        for name in rewards:
            values = [value for *_, new in made for value in new["scores"][name]]
            scores[name] = np.array(values, np.float32)
        any_order = np.random.default_rng(config.seed).random(len(reasons))
        random = {"random": any_order.astype(np.float32)}
        steps = select(config, reasons, keys, random | scores)
        left = iter(steps[next(reversed(steps))].tolist())
        kept = []
        for split, row, _ in made:
            indices = [index for index, _ in enumerate(row["references"]) if next(left)]
            if indices:
                kept.append((split, with_references(row, indices), dict[str, Any]()))
        notes = [f"{name}: {signature}" for name, signature in signatures.items()]
        return Report(_table(steps, scores), notes, kept)

    return add_columns(config, data, rows, "kept", made_by, columns, report)


def measure_rows(
    config: CurateConfig, rows: Sequence[Row], rewards: Mapping[str, Reward]
) -> list[Columns]:
    """The columns of each row, of its captions: ``reasons``, the first rule that each breaks,
    ``UNREADABLE`` or None; ``keys``, which are equal for duplicates; ``scores``, None where a
    caption was not scored.
    """
    errors: list[str | None] = [None] * len(rows)
    if any("image" in reward.columns for reward in rewards.values()):
        errors = list(
            in_parallel(_error_of, rows, config.data.num_workers, "checking images")
        )
    unreadable = [error for error in errors if error is not None]
    if unreadable and config.data.on_bad == "fail":
        count = f"{len(unreadable)} of {len(rows)} images cannot be used"
        raise DataError(
            f"{count}: {unreadable[0]} (data.on_bad: skip drops their captions)"
        )
    columns: list[Columns] = []
    scored: list[tuple[Row, str, dict[str, list[float | None]], int]] = []
    for row, error in zip(rows, errors, strict=True):
        captions = row["references"]
        scores: dict[str, list[float | None]] = {
            name: [None] * len(captions) for name in rewards
        }
        reasons = [
            UNREADABLE if error else _broken_rule(config, text) for text in captions
        ]
        keys = [_key(config, row, caption) for caption in captions]
        columns.append({"reasons": reasons, "keys": keys, "scores": scores})
        for index, (caption, reason) in enumerate(zip(captions, reasons, strict=True)):
            if reason is None:
                scored.append((row, caption, scores, index))
    texts = [caption for _, caption, _, _ in scored]
    inputs = {key: [row[key] for row, *_ in scored] for key in ("image", "image_id")}  # type: ignore[literal-required]
    for name, reward in rewards.items() if scored else ():
        values = score_captions(reward, f"scores.{name}", None, texts, inputs)
        for (_, _, scores, index), value in zip(scored, values, strict=True):
            scores[name][index] = value
    return columns


def _error_of(row: Row) -> str | None:
    """Why the image of a row cannot be decoded."""
    try:
        load_image(row["image"])
    except DataError as error:
        return str(error)
    return None


def _broken_rule(config: CurateConfig, caption: str) -> str | None:
    for name, (least, most) in config.rules.items():
        value = MEASURES[name](caption)
        if (least is not None and value < least) or (most is not None and value > most):
            return name
    return None


def _key(config: CurateConfig, row: Row, caption: str) -> str:
    if config.duplicates is None:
        return ""
    text = " ".join(tokenize(caption))
    if config.duplicates == "pair":
        image = row["image"]
        text += f"\n{image if isinstance(image, str | Path) else image_identity(image)}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def select(
    config: CurateConfig, reasons: NDArray[Any], keys: Sequence[str], scores: Scores
) -> Steps:
    """The steps of the selection among N captions, in their order."""
    left = reasons != UNREADABLE
    steps = {"captions": np.ones(len(reasons), dtype=bool), "readable": left}
    for name, limits in config.rules.items():
        left = steps[f"{name} in {limits}"] = left & (reasons != name)
    if config.duplicates is not None:
        index = np.flatnonzero(left)
        first = np.unique(np.array(keys, dtype=str)[index], return_index=True)[1]
        left = steps[f"duplicate {config.duplicates}"] = _mask(len(left), index[first])
    for step in config.select:
        index = np.flatnonzero(left)
        chosen = _selected(step, scores[step.score][index])
        title = str(step.model_dump(exclude_none=True))
        left = steps[title] = _mask(len(left), index[chosen])
    return steps


def _mask(size: int, index: NDArray[np.int64]) -> Mask:
    mask = np.zeros(size, dtype=bool)
    mask[index] = True
    return mask


def _selected(step: Selection, scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Places of the scores that a step keeps."""
    low = -np.inf if step.min is None else step.min
    high = np.inf if step.max is None else step.max
    kept = np.flatnonzero((scores >= low) & (scores <= high))
    if step.top is not None:
        return kept[best(scores[kept], step.top)]
    if step.bottom is not None:
        return kept[best(-scores[kept], step.bottom)]
    return kept


def best(scores: NDArray[np.float32], count: float) -> NDArray[np.int64]:
    """Places of the highest scores: ``count`` of them, or below 1 that fraction, rounded down.
    Ties: the first.
    """
    # The decimal fraction as written: in binary, 0.29 * 100 is 28.999...
    number = int(Fraction(str(count)) * len(scores) if count < 1 else count)
    return np.argsort(-scores, kind="stable")[:number]


def _table(steps: Steps, scores: Scores) -> str:
    """A Markdown table: the number of captions after each step, and their mean scores."""
    lines = []
    before = len(steps["captions"])
    for name, left in steps.items():
        count = int(left.sum())
        means = []
        for values in scores.values():
            scored = values[left & ~np.isnan(values)]
            means.append(f"{scored.mean(dtype=np.float64):.4f}" if len(scored) else "–")
        lines.append([name, f"{before - count:,}", f"{count:,}", *means])
        before = count
    return markdown(
        ["step", "dropped", "left", *(f"mean {name}" for name in scores)], lines
    )


def _capitalised(caption: str) -> float:
    words = [word for word in caption.split() if word[0].isalpha()]
    return sum(word[0].isupper() for word in words) / len(words) if words else 0.0


def _stop_words(caption: str) -> float:
    return sum(word in STOP_WORDS for word in tokenize(caption))


@lru_cache(maxsize=1)
def _classes(caption: str) -> list[str]:
    """The ``word_class`` of each word of a caption but auxiliary verbs."""
    words = tokenize(caption)
    tagged = zip(words, default_tagger()([words])[0], strict=True)
    return [word_class(tag) for word, tag in tagged if word not in AUXILIARIES]


MEASURES: dict[str, Callable[[str], float]] = {
    "characters": len,
    "words": lambda caption: len(tokenize(caption)),
    "capitalised": _capitalised,
    "stop_words": _stop_words,
    "stop_word_fraction": lambda caption: (
        _stop_words(caption) / max(1, len(tokenize(caption)))
    ),
    "actions": lambda caption: _classes(caption).count("V"),
    "complexity": lambda caption: sum(kind in "JVI" for kind in _classes(caption)),
}
"""Measure of a caption by its name (docs/curation.md)."""
