"""Combine bottleneck scores of captions into one concreteness score, the target that a student learns (docs/icc.md).

Source: Yanuka, Alper, Averbuch-Elor and Giryes, "ICC: Quantifying Image Caption Concreteness for Multimodal
Dataset Curation", Findings of ACL 2024, section 2 and appendix A.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit

import rewards.base
from rewards.base import Reward, score_captions
from rewards.build import RewardBuilder
from rl_caption.config.build import quiet_libraries
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json, write_json_lines
from rl_caption.data.formats import where_from
from rl_caption.data.plain_files import check_type, csv_rows, json_lines, shown, single_spaced
from rl_caption.evaluation import check_writable
from rl_caption.lab.config import ConcretenessConfig
from rl_caption.runtime.errors import ConfigError, naming

Floats = NDArray[np.float64]
MEANS = {"logit": 0.5, "median": 0.0}
"""How the paper's mu = 0.5 (appendix A.1) is read -> mean of the logits. ``logit``: mu is the parameter of the
logit-normal distribution, whose median is then 0.622. ``median``: mu is the median of the scores."""


def standardize(
    scores: ArrayLike,
    lengths: Sequence[int],
    reading: str = "logit",
    bin_width: int = 1,
    margin: float = 1e-4,
) -> Floats:
    """Give the scores of every caption length one logit-normal distribution (A.1): sigmoid(mean + z), [N] in (0, 1).

    z is the logit ln(p / (1 - p)) of a score, standardised over the captions of the same length: less their mean,
    divided by their standard deviation (of the population). Where all scores of a length are equal, such as that of a
    single caption, z is 0. The paper prints the logit without the numerator p.

    Args:
        scores: [N] in [0, 1]; clipped to [margin, 1 - margin].
        lengths: [N], 0 or more.
        reading: of the paper's mu = 0.5, a key of ``MEANS``.
        bin_width: lengths in a bin of this width count as the same.
        margin: see ``scores``.

    Raises:
        ValueError: a score is outside [0, 1], or there are not N lengths.
    """
    values = np.asarray(scores, np.float64)
    if values.shape != (len(lengths),):
        raise ValueError(
            f"scores of shape {values.shape} for {len(lengths)} lengths: expected one each"
        )
    wrong = values[~((values >= 0) & (values <= 1))]  # also NaN
    if len(wrong):
        raise ValueError(
            f"a score is {wrong[0]}: standardize logit needs scores in [0, 1]; set it to none for others"
        )
    logits = logit(values.clip(margin, 1 - margin))
    groups = np.asarray(lengths) // bin_width
    standardized = np.zeros(len(values))
    for group in np.unique(groups):
        members = groups == group
        spread = logits[members].std()
        if spread > 1e-12:
            standardized[members] = (logits[members] - logits[members].mean()) / spread
    return expit(MEANS[reading] + standardized)


@dataclass(frozen=True)
class Combination:
    """sigmoid(weights · scores + intercept), in (0, 1)."""

    weights: list[float]
    intercept: float

    def __call__(self, scores: ArrayLike) -> Floats:
        """Combine scores [N, F] to [N]."""
        return expit(np.asarray(scores, np.float64) @ np.array(self.weights) + self.intercept)


def binarize(ratings: Sequence[float]) -> list[bool]:
    """Whether each of [N] ratings is above their median. ``ValueError`` where none is."""
    labels = (np.asarray(ratings) > np.median(ratings)).tolist()
    if not any(labels):
        raise ValueError(
            f"none of {len(ratings)} ratings is above their median: expected different ratings"
        )
    return labels


def fit_combination(scores: ArrayLike, labels: Sequence[bool], l2: float = 1.0) -> Combination:
    """Logistic regression of [N] labels on scores [N, F], with the penalty l2 / 2 |weights|² on the log-likelihood.

    The intercept is not penalised. ``l2`` 1 is scikit-learn's default; with 0, separable labels have no optimum.

    Raises:
        ValueError: the labels are all alike, or the optimum was not found.
    """
    features, signs = np.asarray(scores, np.float64), np.where(labels, 1.0, -1.0)
    if len(set(signs.tolist())) < 2:
        raise ValueError(f"all {len(signs)} labels are equal: expected both classes")

    def objective(values: Floats) -> tuple[float, Floats]:
        margins = signs * (features @ values[:-1] + values[-1])
        slopes = -signs * expit(-margins)
        gradient = np.append(features.T @ slopes + l2 * values[:-1], slopes.sum())
        return float(np.logaddexp(0, -margins).sum() + l2 / 2 * values[:-1] @ values[:-1]), gradient

    result = minimize(
        objective,
        np.zeros(features.shape[1] + 1),
        jac=True,
        method="L-BFGS-B",
        options={"ftol": 1e-14},
    )
    if not np.isfinite(result.x).all() or not result.success:
        raise ValueError(
            f"the logistic regression has no optimum: {result.message}; a higher l2 is the usual remedy"
        )
    *weights, intercept = result.x.tolist()
    return Combination(weights, intercept)


def make_targets(config: ConcretenessConfig) -> str:
    """Score captions, combine the scores, and write the targets of a student; returns a summary as JSON.

    Both orders of the paper can be had. Regress, then distil (main text): one call with ``ratings``, and SBA and VBA as
    scorers. Distil, then regress (A.2): a first call without ``ratings``, which writes targets for a student of each
    scorer, and a second one with ``ratings`` and these students as scorers.

    Raises:
        ConfigError: a scorer cannot be made, or needs more than the caption.
        DataError: a file is not what it should be.
        RewardError: a scorer failed.
    """
    quiet_libraries()
    out = check_writable(config.out)
    for key, file in (("captions", config.captions), ("ratings", config.ratings)):
        if file is not None and not Path(file).exists():
            raise DataError(f"{key} {file!r} does not exist{where_from(config.source)}")
    captions = _captions(Path(config.captions))
    rated = {} if config.ratings is None else _ratings(Path(config.ratings))
    with naming(f"ratings {config.ratings!r}"):
        labels = binarize(list(rated.values())) if rated else []
    scorers = _scorers(config)
    every = list(dict.fromkeys([*captions, *rated]))
    columns = {name: _score(scorer, every, config) for name, scorer in scorers.items()}
    table = np.stack(list(columns.values()), axis=1)  # [N, F]
    rows = dict(zip(every, table.tolist(), strict=True))
    records = [
        {"caption": caption, **dict(zip(columns, rows[caption], strict=True))}
        for caption in captions
    ]
    write_json_lines(out / "scores.jsonl", records)
    signatures = {name: scorer.signature for name, scorer in scorers.items()}
    summary: dict[str, Any] = {"config": asdict(config), "signatures": signatures}
    targets = {
        f"targets_{name}.jsonl": table[: len(captions), index] for index, name in enumerate(columns)
    }
    if rated:
        with naming(f"ratings {config.ratings!r}"):
            combination = fit_combination([rows[caption] for caption in rated], labels, config.l2)
        right = (combination([rows[caption] for caption in rated]) > 0.5) == np.array(labels)
        weights = dict(zip(columns, combination.weights, strict=True))
        summary |= {
            "weights": weights,
            "intercept": combination.intercept,
            "accuracy": float(right.mean()),
        }
        targets = {"targets.jsonl": combination(table[: len(captions)])}
    for name, values in targets.items():
        pairs = zip(captions, values.tolist(), strict=True)
        write_json_lines(
            out / name, [{"caption": caption, "target": target} for caption, target in pairs]
        )
    write_json(out / "combination.json", summary)
    written = ", ".join(str(out / name) for name in ("scores.jsonl", *targets, "combination.json"))
    print(f"wrote {written}", file=sys.stderr)
    return json.dumps({key: value for key, value in summary.items() if key != "config"}, indent=1)


def _scorers(config: ConcretenessConfig) -> Mapping[str, Reward]:
    if not config.scorers:
        raise ConfigError("scorers is empty: name at least one reward, such as sba")
    scorers: dict[str, Reward] = {}
    builder = RewardBuilder()
    for name, judge in config.scorers.items():
        with naming(f"scorers.{name}"):
            scorers[name] = builder.build(judge.target or name, judge.kwargs)
        if scorers[name].columns:
            raise ConfigError(
                f"scorers.{name} needs {sorted(scorers[name].columns)}: expected a reward that reads captions only"
            )
    return scorers


def _score(scorer: Reward, captions: Sequence[str], config: ConcretenessConfig) -> Floats:
    """Scores of captions, standardised by length as the configuration says."""
    scores = score_captions(scorer, f"scorer {scorer.__name__!r}", None, captions, {})
    if config.standardize == "none":
        return np.array(scores)
    lengths = [
        len(caption.split() if config.length == "words" else caption) for caption in captions
    ]
    with naming(f"scorer {scorer.__name__!r}"):
        return standardize(scores, lengths, config.standardize, config.bin_width, config.margin)


def _captions(path: Path) -> list[str]:
    """The distinct captions of a file, with single spaces."""
    with _reading(path):
        if path.suffix in (".jsonl", ".csv"):
            texts = [caption for caption, _, _ in _captioned_lines(path)]
        else:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            texts = [single_spaced(line) for line in lines if line.strip()]
    if not texts:
        raise DataError(f"{path} has no captions")
    return list(dict.fromkeys(texts))


def _ratings(path: Path) -> dict[str, float]:
    """Caption -> the mean of its ratings."""
    ratings_of: dict[str, list[float]] = defaultdict(list)
    with _reading(path):
        for caption, where, item in _captioned_lines(path):
            rating = item.get("rating")
            if (
                not isinstance(rating, int | float)
                or isinstance(rating, bool)
                or not math.isfinite(rating)
            ):
                raise DataError(f"{where}: 'rating' is {shown(rating)}: expected a finite number")
            ratings_of[caption].append(float(rating))
    if not ratings_of:
        raise DataError(f"{path} has no ratings: expected JSON lines with 'caption' and 'rating'")
    return {caption: sum(ratings) / len(ratings) for caption, ratings in ratings_of.items()}


def _reading(path: Path) -> AbstractContextManager[None]:
    return rewards.base.naming(f"{path} cannot be read", (OSError, UnicodeDecodeError), DataError)


def _captioned_lines(path: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The caption, with single spaces, of each line of a JSON lines file; ``FILE, line N``; and the object itself.

    Of a CSV file those with a caption in that column; ``concreteness_annotation``, as in the authors' file, is the
    ``rating``.
    """
    lines = (
        _csv_lines(path)
        if path.suffix == ".csv"
        else ((where, item) for _, where, item in json_lines(path))
    )
    for where, item in lines:
        check_type(item, dict, where, DataError)
        caption = item.get("caption")
        if not isinstance(caption, str) or not caption.strip():
            raise DataError(f"{where}: 'caption' is {shown(caption)}: expected text")
        yield single_spaced(caption), where, item


def _csv_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in csv_rows(path, ["caption"]):
        rating = row.get("rating", row.get("concreteness_annotation"))
        if row["caption"].strip():
            try:
                yield (
                    where,
                    {"caption": row["caption"]}
                    | ({} if rating is None else {"rating": float(rating)}),
                )
            except ValueError as error:
                raise DataError(
                    f"{where}: the rating is {shown(rating)}: expected a number"
                ) from error
