"""The curation program: measures and scores the captions of a data set, and keeps the best."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
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
    ["is", "are", "was", "were", "be", "been", "being", "am", "has", "have", "had", "do", "does"]
)
Mask = NDArray[np.bool_]
Steps = dict[str, Mask]
"""Name of a step of the selection -> which captions are left after it, [N]."""


def curate(config: CurateConfig) -> str:
    """Write ``kept.jsonl``, the rows with the captions that are kept (``parts.add_columns``).

    Raises:
        ConfigError: a rule, a score or a step of the selection cannot be used, or ``out`` has parts
            of other settings.
        DataError: a file, a row or an image cannot be read.
        RewardError: a score failed.
    """
    _check_steps(config)
    rewards, builder = {}, RewardBuilder()
    for name, score in config.scores.items():
        with config_errors(f"scores.{name}"):
            rewards[name] = builder.build(score.target or name, score.kwargs)
        if foreign := sorted(rewards[name].columns - {"image", "image_id"}):
            raise ConfigError(f"scores.{name} needs {', '.join(foreign)}: none are given to it")
    data, rows = selected_rows(config, ids_differ=False)
    signatures = {name: reward.signature for name, reward in rewards.items()}
    made_by = {
        "rules": [list(rule) for rule in config.rules.items()],  # a list: their order matters
        "scores": signatures,
        "duplicates": config.duplicates,
        "on_bad": config.data.on_bad,
    }

    def columns(batch: Rows) -> list[Columns]:
        return measure_rows(config, [row for _, row in batch], rewards)

    def report(made: list[dict[str, Any]]) -> Report:
        reasons = np.array([reason for new in made for reason in new["reasons"]], dtype=object)
        keys = [key for new in made for key in new["keys"]]
        scores = {}
        for name in rewards:
            values = [value for new in made for value in new["scores"][name]]
            scores[name] = np.array(values, np.float32)  # NaN where a caption was not scored
        steps = select(config, reasons, keys, scores)
        left = iter(steps[next(reversed(steps))].tolist())
        kept = []
        for split, row in rows:
            indices = [index for index, _ in enumerate(row["references"]) if next(left)]
            if indices:
                kept.append((split, with_references(row, indices), dict[str, Any]()))
        notes = [f"{name}: {signature}" for name, signature in signatures.items()]
        captions = [caption for _, row in rows for caption in row["references"]]
        examples = _examples(config.examples, captions, steps, scores)
        return Report(_table(steps, scores), notes, kept, examples)

    return add_columns(config, data, rows, "kept", made_by, columns, report)


def _check_steps(config: CurateConfig) -> None:
    """Refuse rules and steps that would keep other captions than they say."""
    for name, limits in config.rules.items():
        if name not in MEASURES or len(limits) != 2:
            expected = f"expected [least, most] of one of {', '.join(MEASURES)}"
            raise ConfigError(f"rules.{name} is {limits}: {expected}")
    for index, step in enumerate(config.select):
        if step.score not in config.scores or (step.top is not None and step.bottom is not None):
            expected = f"one of top and bottom, and a score among {', '.join(config.scores)}"
            raise ConfigError(f"select[{index}] is {step}: expected {expected}")


def measure_rows(
    config: CurateConfig, rows: Sequence[Row], rewards: Mapping[str, Reward]
) -> list[Columns]:
    """The columns of each row, of its captions: ``reasons``, the first rule that each breaks,
    ``UNREADABLE`` or None; ``keys``, which are equal for duplicates; ``scores``, None where a
    caption was not scored.
    """
    errors: list[str | None] = [None] * len(rows)
    if any("image" in reward.columns for reward in rewards.values()):
        errors = list(in_parallel(_error_of, rows, config.data.num_workers, "checking images"))
    unreadable = [error for error in errors if error is not None]
    if unreadable and config.data.on_bad == "fail":
        count = f"{len(unreadable)} of {len(rows)} images cannot be used"
        raise DataError(f"{count}: {unreadable[0]} (data.on_bad: skip drops their captions)")
    columns: list[Columns] = []
    scored: list[tuple[Row, str, dict[str, list[float | None]], int]] = []
    for row, error in zip(rows, errors, strict=True):
        captions = row["references"]
        scores: dict[str, list[float | None]] = {name: [None] * len(captions) for name in rewards}
        reasons = [UNREADABLE if error else _broken_rule(config, text) for text in captions]
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
    config: CurateConfig,
    reasons: NDArray[Any],
    keys: Sequence[str],
    scores: Mapping[str, NDArray[np.float32]],
) -> Steps:
    """The steps of the selection among N captions, in their order."""
    left = np.ones(len(reasons), dtype=bool)
    steps = {"captions": left}
    if (reasons == UNREADABLE).any():
        left = steps[UNREADABLE] = left & (reasons != UNREADABLE)
    for name, limits in config.rules.items():
        title = f"{name} in {limits}".replace("None", "-")
        left = steps[title] = left & (reasons != name)
    if config.duplicates is not None:
        index = np.flatnonzero(left)
        first = np.unique(np.array(keys, dtype=str)[index], return_index=True)[1]
        left = steps[f"duplicate {config.duplicates}"] = _mask(len(left), index[first])
    for step in config.select:
        index = np.flatnonzero(left)
        is_kept = _is_selected(step, scores[step.score][index])
        given = [
            f"{k} {v:.10g}" for k, v in step.model_dump().items() if k != "score" and v is not None
        ]
        title = f"{step.score}: {', '.join(given)}"
        left = steps[title] = _mask(len(left), index[is_kept])
    return steps


def _mask(size: int, index: NDArray[np.int64]) -> Mask:
    mask = np.zeros(size, dtype=bool)
    mask[index] = True
    return mask


def _is_selected(step: Selection, scores: NDArray[np.float32]) -> Mask:
    keep = np.ones(len(scores), dtype=bool)
    if step.min is not None:
        keep &= scores >= step.min
    if step.max is not None:
        keep &= scores <= step.max
    count = step.top or step.bottom
    if count:
        among = np.flatnonzero(keep)
        values = scores[among] if step.top else -scores[among]
        keep = _mask(len(scores), among[best(values, count)])
    return keep


def best(scores: NDArray[np.float32], count: float) -> NDArray[np.int64]:
    """Places of the highest scores: ``count`` of them, or below 1 that fraction, rounded down.
    Ties: the first.
    """
    # The decimal fraction as written: in binary, 0.29 * 100 is 28.999...
    number = int(Fraction(str(count)) * len(scores) if count < 1 else count)
    return np.argsort(-scores, kind="stable")[:number]


def _examples(
    count: int, captions: Sequence[str], steps: Steps, scores: Mapping[str, NDArray[np.float32]]
) -> list[str]:
    """Lines of the report: some captions that were kept, and some that each step dropped."""
    generator = np.random.default_rng(0)
    masks = {"kept": steps[next(reversed(steps))]}
    for (_, before), (name, after) in pairwise(steps.items()):
        masks[f"dropped: {name}"] = before & ~after
    lines: list[str] = []
    for name, mask in masks.items():
        index = np.flatnonzero(mask)
        drawn = np.sort(generator.choice(index, min(count, len(index)), replace=False))
        lines += ["", f"## {name}", ""] if len(drawn) else []
        for at in drawn:
            told = ", ".join(f"{score} {values[at]:.4f}" for score, values in scores.items())
            caption = " ".join(captions[at].split())
            lines.append(f"- {caption}" + (f" ({told})" if told else ""))
    return lines


def _table(steps: Steps, scores: Mapping[str, NDArray[np.float32]]) -> str:
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
    return markdown(["step", "dropped", "left", *(f"mean {name}" for name in scores)], lines)


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
    "stop_word_fraction": lambda caption: _stop_words(caption) / max(1, len(tokenize(caption))),
    "actions": lambda caption: _classes(caption).count("V"),
    "complexity": lambda caption: sum(kind in "JVI" for kind in _classes(caption)),
}
"""Measure of a caption by its name (docs/curation.md)."""
