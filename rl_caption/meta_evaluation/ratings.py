"""Any file of ratings by people, and the correlation of a metric's scores with them in all the ways papers print."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError
from rl_caption.data.plain_files import shown
from rl_caption.meta_evaluation.correlation import (
    GroupedTau,
    UndefinedCorrelation,
    check_scores,
    grouped_tau_b,
    kendall_tau_b,
    kendall_tau_c,
    pearson,
    unfitted,
)
from rl_caption.meta_evaluation.sets.base import (
    caption_of,
    id_of,
    json_lines,
    number_of,
    parse_json,
    read_text,
    text_of,
    texts_of,
)


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
      are several lines. DeCapBench (five captions of each image, one rating each) is written so.
    - ``flickr8k.json`` and ``crowdflower_flickr8k.json``: an object of image id -> ``{image_path, ground_truth,
      human_judgement: [{caption, rating}]}``. White space is made single, and a judgement without a number (NaN) is
      left out, as in the loader of PAC-S.

    Raises:
        DataError: no such file, no ratings, or a row is wrong.
    """
    path = Path(path)
    try:
        whole = parse_json(read_text(path), str(path))
    except DataError:
        whole = None  # lines, or not JSON: then the line is named
    is_flickr = isinstance(whole, dict) and all(
        isinstance(value, dict) and "human_judgement" in value for value in whole.values()
    )
    rows = list(_flickr8k_rows(whole, path) if is_flickr and whole else _line_rows(path))
    if not rows:
        raise DataError(f"{path} has no ratings: expected JSON lines with 'image', 'caption' and 'rating'")
    without = [where for where, *_, references in rows if references is None]
    if without and len(without) < len(rows):
        raise DataError(f"{without[0]} has no 'references', other rows have: expected them in all or in none")
    _, images, captions, ratings, groups, references = (list(column) for column in zip(*rows, strict=True))
    return Ratings(images, captions, ratings, groups, None if without else references)


_Row = tuple[str, str, str, float, str, list[str] | None]
"""Where it stands, image, caption, rating, group, references."""


def _line_rows(path: Path) -> Iterator[_Row]:
    for where, item in json_lines(path):
        image = text_of(item, "image", where)
        group = id_of({"group": image} | item, "group", where)
        references = texts_of(item, "references", where, single=False) if "references" in item else None
        yield where, image, text_of(item, "caption", where), _rating(item, where), group, references


def _flickr8k_rows(content: Mapping[str, Any], path: Path) -> Iterator[_Row]:
    for image_id, item in content.items():
        where = f"{path}, {image_id!r:.80}"
        image, references = text_of(item, "image_path", where), texts_of(item, "ground_truth", where)
        judgements = item["human_judgement"]
        if not isinstance(judgements, list) or not all(isinstance(own, dict) for own in judgements):
            raise DataError(f"{where}: 'human_judgement' is no list of objects with caption and rating")
        for index, judgement in enumerate(judgements):
            row = f"{where}, human_judgement {index}"
            value = judgement.get("rating")
            if not (isinstance(value, float) and math.isnan(value)):
                yield row, image, caption_of(judgement, "caption", row), _rating(judgement, row), image_id, references


def _rating(item: Mapping[str, Any], where: str) -> float:
    if isinstance(item.get("rating"), str):
        raise DataError(f"{where}: 'rating' is {shown(item['rating'])}: expected a finite number")
    return number_of(item, "rating", where)


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

    def defined(name: str, compute: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return compute(*arguments)
        except UndefinedCorrelation as error:
            notes.append(f"{name}: {error}")
            return None

    pcc = defined("pearson", pearson, scores, ratings)
    if pcc == 0:
        notes.append("1 / PCC^2: the PCC is 0")
    grouped = None if groups is None else defined("sample-wise", grouped_tau_b, scores, ratings, groups)
    return HumanCorrelation(
        count=len(scores),
        pearson=pcc,
        inverse_r_squared=1 / pcc**2 if pcc else None,
        unfitted_ratings=defined("1 - R^2 of ratings", unfitted, ratings, scores),
        unfitted_scores=defined("1 - R^2 of scores", unfitted, scores, ratings),
        tau_b=defined("tau_b", kendall_tau_b, scores, ratings),
        tau_c=defined("tau_c", kendall_tau_c, scores, ratings),
        sample_tau_b=grouped,
        notes=notes,
    )
