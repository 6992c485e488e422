"""The curation program: measures and scores the captions of a data set, and keeps the best."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rewards.base import Reward, score_captions
from rewards.build import RewardBuilder
from rewards.images import image_identity
from rewards.text.tokenize import tokenize
from rl_caption.data.base import DataError, Row, load_image, with_references
from rl_caption.data.file_checks import in_parallel
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import CurateConfig, Selection
from rl_caption.lab.curation import MEASURES, best, first_of_equals
from rl_caption.lab.parts import Columns, Rows, make_parts, selected_rows, write_result
from rl_caption.runtime.errors import ConfigError, config_errors

UNREADABLE = "image cannot be read"
"""Reason of captions whose image cannot be decoded."""
Steps = Sequence[tuple[str, NDArray[np.bool_]]]
"""Steps of the selection: name, and which captions are left after it, [N]."""


class Measurements(NamedTuple):
    """What is known of the N captions of a data set, in the order of its rows."""

    reasons: NDArray[Any]
    """[N]: name of the first rule that the caption breaks, ``UNREADABLE``, or None."""
    keys: NDArray[Any]
    """[N]: a hash that is equal for duplicates."""
    scores: Mapping[str, NDArray[np.float32]]
    """Name of a score -> [N]; NaN where a caption was not scored."""


def curate(config: CurateConfig) -> str:
    """Write ``kept.jsonl`` and ``report.md`` to ``config.out``, and return the table of the report.

    With ``config.worker`` only the parts of that worker are made, and a sentence is returned that
    counts them.

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
    made_by = {
        "rules": [list(rule) for rule in config.rules.items()],  # a list: their order matters
        "scores": {name: reward.signature for name, reward in rewards.items()},
        "duplicates": config.duplicates,
        "on_bad": config.data.on_bad,
    }

    def columns(batch: Rows) -> list[Columns]:
        """Reasons, keys and scores of the captions of each row."""
        return _measure(config, [row for _, row in batch], rewards)

    summary, made = make_parts(config, rows, made_by, columns, "scoring")
    if config.worker is not None:
        return summary
    measurements = Measurements(
        np.array([reason for new in made for reason in new["reasons"]], dtype=object),
        np.array([key for new in made for key in new["keys"]]),
        {
            name: np.array([value for new in made for value in new["scores"][name]], np.float32)
            for name in rewards
        },
    )
    steps = _select(config, measurements)
    chosen = iter(steps[-1][1].tolist())
    kept = []
    for split, row in rows:
        indices = [index for index, _ in enumerate(row["references"]) if next(chosen)]
        if indices:
            kept.append((split, with_references(row, indices), dict[str, Any]()))
    notes = [f"{name}: {reward.signature}" for name, reward in rewards.items()]
    captions = [caption for _, row in rows for caption in row["references"]]
    examples = _examples(config.examples, captions, steps, measurements.scores)
    table = _table(steps, measurements.scores)
    return write_result(config, data, kept, "kept", table, notes, examples)


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


def _measure(
    config: CurateConfig, rows: Sequence[Row], rewards: Mapping[str, Reward]
) -> list[Columns]:
    """Reasons, keys and scores of the captions of each row."""
    unreadable = [False] * len(rows)
    if any("image" in reward.columns for reward in rewards.values()):
        errors = list(in_parallel(_error_of, rows, config.data.num_workers, "checking images"))
        unreadable = [error is not None for error in errors]
        if any(unreadable) and config.data.on_bad == "fail":
            count = f"{sum(unreadable)} of {len(rows)} images cannot be used"
            first = next(filter(None, errors))
            raise DataError(f"{count}: {first} (data.on_bad: skip drops their captions)")
    columns: list[Columns] = []
    good = []
    for row, is_unreadable in zip(rows, unreadable, strict=True):
        captions = row["references"]
        reasons = [UNREADABLE if is_unreadable else _broken_rule(config, text) for text in captions]
        empty: dict[str, list[float | None]] = {name: [None] * len(captions) for name in rewards}
        keys = [_key(config, row, caption) for caption in captions]
        columns.append({"reasons": reasons, "keys": keys, "scores": empty})
        good += [
            (row, caption, empty, index)
            for index, caption in enumerate(captions)
            if reasons[index] is None
        ]
    texts = [caption for _, caption, _, _ in good]
    inputs = {key: [row[key] for row, _, _, _ in good] for key in ("image", "image_id")}  # type: ignore[literal-required]
    for name, reward in rewards.items() if good else ():
        scores = score_captions(reward, f"scores.{name}", None, texts, inputs)
        for (_, _, of_row, index), score in zip(good, scores, strict=True):
            of_row[name][index] = score
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


def _select(config: CurateConfig, measurements: Measurements) -> Steps:
    """The steps of the selection in their order."""
    reasons = measurements.reasons
    left = np.ones(len(reasons), dtype=bool)
    steps = [("captions", left.copy())]
    if (reasons == UNREADABLE).any():
        left &= reasons != UNREADABLE
        steps.append((UNREADABLE, left.copy()))
    for name, limits in config.rules.items():
        left &= reasons != name
        steps.append((f"{name} in {limits}".replace("None", "-"), left.copy()))
    if config.duplicates is not None:
        index = np.flatnonzero(left)
        left[index[~first_of_equals(measurements.keys[index])]] = False
        steps.append((f"duplicate {config.duplicates}", left.copy()))
    for step in config.select:
        index = np.flatnonzero(left)
        left[index[~_is_selected(step, measurements.scores[step.score][index])]] = False
        given = {name: value for name, value in asdict(step).items() if value is not None}
        described = ", ".join(
            f"{name} {value:.10g}" for name, value in given.items() if name != "score"
        )
        steps.append((f"{step.score}: {described}", left.copy()))
    return steps


def _is_selected(step: Selection, scores: NDArray[np.float32]) -> NDArray[np.bool_]:
    keep = np.ones(len(scores), dtype=bool)
    if step.min is not None:
        keep &= scores >= step.min
    if step.max is not None:
        keep &= scores <= step.max
    count = step.top or step.bottom
    if count:
        among = np.flatnonzero(keep)
        keep[among] &= best(scores[among] if step.top else -scores[among], count)
    return keep


def _examples(
    count: int,
    captions: Sequence[str],
    steps: Steps,
    scores: Mapping[str, NDArray[np.float32]],
) -> list[str]:
    """Lines of the report: some captions that were kept, and some that each step dropped."""
    generator = np.random.default_rng(0)
    masks = {"kept": steps[-1][1]}
    for (_, before), (name, after) in pairwise(steps):
        masks[f"dropped: {name}"] = before & ~after
    lines: list[str] = []
    for name, mask in masks.items():
        index = np.flatnonzero(mask)
        drawn = np.sort(generator.choice(index, min(count, len(index)), replace=False))
        lines += ["", f"## {name}", ""] if len(drawn) else []
        for at in drawn:
            told = [f"{score} {values[at]:.4f}" for score, values in scores.items()]
            caption = " ".join(captions[at].split())
            lines.append(f"- {caption}" + (f" ({', '.join(told)})" if told else ""))
    return lines


def _table(steps: Steps, scores: Mapping[str, NDArray[np.float32]]) -> str:
    """A Markdown table: the number of captions after each step, and their mean scores."""
    lines = []
    before = int(steps[0][1].sum())
    for name, left in steps:
        count = int(left.sum())
        means = []
        for values in scores.values():
            scored = values[left & ~np.isnan(values)]
            means.append(f"{scored.mean(dtype=np.float64):.4f}" if len(scored) else "–")
        lines.append([name, f"{before - count:,}", f"{count:,}", *means])
        before = count
    return markdown(["step", "dropped", "left", *(f"mean {name}" for name in scores)], lines)
