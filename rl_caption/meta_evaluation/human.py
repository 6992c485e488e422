"""Correlation of a metric with ratings by people, over any file of ratings."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_caption.meta_evaluation.correlation import (
    GroupedTau,
    UndefinedCorrelation,
    check_scores,
    grouped_tau_b,
    kendall_tau_b,
    kendall_tau_c,
)
from rl_caption.meta_evaluation.sets.base import JudgingSetError, json_lines, read_json, text_of

RatingsError = JudgingSetError
"""Its earlier name."""


@dataclass(frozen=True)
class Ratings:
    """N rated captions, as columns."""

    images: list[str]
    """[N] paths or file names, as in the file."""
    captions: list[str]
    ratings: list[float]
    groups: list[str]
    """[N] captions with one group are compared with each other by the sample-wise tau; usually an image's."""
    references: list[list[str]] | None
    """[N] lists, or None where the file has none."""

    def columns(self, image_root: str | Path = "") -> dict[str, list[Any]]:
        """Return the [N] columns of a reward: ``image`` (below ``image_root``), ``image_id`` and ``references``."""
        columns: dict[str, list[Any]] = {
            "image": [str(Path(image_root) / image) for image in self.images],
            "image_id": list(self.images),
        }
        return columns if self.references is None else {**columns, "references": self.references}


def read_ratings(path: str | Path) -> Ratings:
    """Read ratings of captions by people.

    Two formats, told by the content:

    - JSON lines, one rated caption each: ``image``, ``caption``, ``rating`` (a number), and optionally ``references``
      (a list of strings; in all lines or in none) and ``group`` (the image, if absent). Several ratings of a caption
      are several lines. DeCapBench (five captions of each image, one rating each) and short-caption sets (Composite,
      Polaris, ...) are written so.
    - ``flickr8k.json`` and ``crowdflower_flickr8k.json``: an object of image id -> ``{image_path, ground_truth,
      human_judgement: [{caption, rating}]}``. White space is made single, and a judgement without a number (NaN) is
      left out, as in the loader of PAC-S.

    Raises:
        JudgingSetError: no such file, no ratings, or a row is wrong.
    """
    path = Path(path)
    try:
        whole = read_json(path)
    except JudgingSetError:
        whole = None  # lines, or not JSON: then the line is named
    is_flickr = isinstance(whole, dict) and all(
        isinstance(value, dict) and "human_judgement" in value for value in whole.values()
    )
    rows = list(_flickr8k_rows(whole, path) if is_flickr and whole else _line_rows(path))
    if not rows:
        raise JudgingSetError(f"{path} has no ratings: expected JSON lines with 'image', 'caption' and 'rating'")
    with_references = [row for row in rows if row["references"] is not None]
    if with_references and len(with_references) < len(rows):
        first = next(row for row in rows if row["references"] is None)
        raise JudgingSetError(f"{first['where']} has no 'references', other rows have: expected them in all or in none")
    return Ratings(
        [row["image"] for row in rows],
        [row["caption"] for row in rows],
        [row["rating"] for row in rows],
        [row["group"] for row in rows],
        [row["references"] for row in rows] if with_references else None,
    )


def _line_rows(path: Path) -> Iterator[dict[str, Any]]:
    for where, item in json_lines(path):
        image = text_of(item, "image", where)
        group = item.get("group", image)
        if not isinstance(group, str | int):
            raise JudgingSetError(f"{where}: 'group' is {group!r:.80}: expected a string or a whole number")
        references = _references(item["references"], f"{where}: 'references'") if "references" in item else None
        yield {
            "where": where, "image": image, "caption": text_of(item, "caption", where),
            "rating": _number(item.get("rating"), where), "group": str(group), "references": references,
        }  # fmt: skip


def _flickr8k_rows(content: Mapping[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    for image_id, item in content.items():
        image = text_of(item, "image_path", f"{path}, {image_id!r}")
        references = _references(item.get("ground_truth"), f"{path}, {image_id!r}: 'ground_truth'")
        if not isinstance(item["human_judgement"], list):
            raise JudgingSetError(
                f"{path}, {image_id!r}: 'human_judgement' is no list of objects with caption and rating"
            )
        for index, judgement in enumerate(item["human_judgement"]):
            where = f"{path}, {image_id!r}, human_judgement {index}"
            if not isinstance(judgement, dict):
                raise JudgingSetError(f"{where} is {judgement!r:.80}: expected an object with 'caption' and 'rating'")
            rating = judgement.get("rating")
            if isinstance(rating, float) and math.isnan(rating):
                continue
            yield {
                "where": where, "image": image, "caption": " ".join(text_of(judgement, "caption", where).split()),
                "rating": _number(rating, where), "group": image_id,
                "references": [" ".join(text.split()) for text in references],
            }  # fmt: skip


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise JudgingSetError(f"{where}: 'rating' is {value!r:.80}: expected a finite number")
    return float(value)


def _references(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text.strip() for text in value):
        raise JudgingSetError(f"{where} is {value!r:.80}: expected a list of at least one text")
    return list(value)


@dataclass(frozen=True)
class HumanCorrelation:
    """How scores follow ratings. What is not defined is None, and ``notes`` says why."""

    count: int
    """Ratings."""
    pearson: float | None
    """PCC over all ratings, in [-1, 1]."""
    inverse_r_squared: float | None
    """1 / PCC^2, at least 1: what the SPECS paper's own rows print as "1 - R^2"."""
    unfitted_ratings: float | None
    """1 - R^2 of the raw scores as predictions of the ratings, sum (r - s)^2 / sum (r - mean r)^2: 0 is perfect, no
    upper bound; nothing is fitted, so it depends on the scales."""
    unfitted_scores: float | None
    """The same with scores and ratings exchanged, sum (r - s)^2 / sum (s - mean s)^2: it grows without bound as scores
    vary less, as the numbers that SPECS takes over from DeCapBench do (3.3e7 for CIDEr)."""
    tau_b: float | None
    """Kendall's tau_b over all ratings, in [-1, 1]; likewise ``tau_c`` (Stuart)."""
    tau_c: float | None
    sample_tau_b: GroupedTau | None
    """Tau_b within groups, averaged over groups (the SPECS paper's "Sp tau")."""
    notes: list[str] = field(default_factory=list)


def correlations(
    scores: Sequence[float], ratings: Sequence[float], groups: Sequence[Hashable] | None = None
) -> HumanCorrelation:
    """Correlate [N] scores with [N] ratings, in all the ways that papers print.

    Args:
        scores: of a metric, any scale.
        ratings: of people, any scale.
        groups: [N] what each item belongs to (its image), for the sample-wise tau; None leaves that out.

    Raises:
        ValueError: other numbers of scores than of ratings or groups, fewer than two, or one that is not finite.
    """
    check_scores(scores, ratings)
    notes: list[str] = []

    def defined(name: str, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except UndefinedCorrelation as error:
            notes.append(f"{name}: {error}")
            return None

    pcc = defined("pearson", lambda: pearson(scores, ratings))
    if pcc == 0:
        notes.append("1 / PCC^2: the PCC is 0")
    grouped = None if groups is None else defined("sample-wise", lambda: grouped_tau_b(scores, ratings, groups))
    return HumanCorrelation(
        len(scores),
        pcc,
        1 / pcc**2 if pcc else None,
        defined("1 - R^2 of ratings", lambda: unfitted(ratings, scores)),
        defined("1 - R^2 of scores", lambda: unfitted(scores, ratings)),
        defined("tau_b", lambda: kendall_tau_b(scores, ratings)),
        defined("tau_c", lambda: kendall_tau_c(scores, ratings)),
        grouped,
        notes,
    )


def pearson(scores: Sequence[float], ratings: Sequence[float]) -> float:
    """Compute the product-moment correlation of [N] scores with [N] ratings, in [-1, 1] (Pearson 1895).

    Raises:
        UndefinedCorrelation: all scores or all ratings are equal.
        ValueError: other numbers of scores than of ratings, fewer than two, or one that is not finite.
    """
    from scipy.stats import pearsonr

    check_scores(scores, ratings)
    for name, values in (("scores", scores), ("ratings", ratings)):
        if len(set(values)) == 1:
            raise UndefinedCorrelation(f"all {len(values)} {name} are {values[0]:g}: Pearson's r is not defined")
    return float(pearsonr(scores, ratings).statistic)


def unfitted(truth: Sequence[float], predictions: Sequence[float]) -> float:
    """Compute 1 - R^2 without a fit: sum (t - p)^2 / sum (t - mean t)^2 of [N] values; 0 is perfect, above 1 is worse
    than the mean.

    Raises:
        UndefinedCorrelation: all of ``truth`` is one value.
    """
    mean = math.fsum(truth) / len(truth)
    spread = math.fsum((value - mean) ** 2 for value in truth)
    if len(set(truth)) == 1 or spread == 0:
        raise UndefinedCorrelation(f"all {len(truth)} values are {truth[0]:g}: R^2 is not defined")
    return math.fsum((t - p) ** 2 for t, p in zip(truth, predictions, strict=True)) / spread
