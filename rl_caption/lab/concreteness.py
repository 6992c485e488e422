"""Combine bottleneck scores of captions into one concreteness score, the target that a student
learns (docs/papers.md).

Source: Yanuka, Alper, Averbuch-Elor and Giryes, "ICC: Quantifying Image Caption Concreteness for
Multimodal Dataset Curation", Findings of ACL 2024, section 2 and appendix A.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pandas import DataFrame, Index, Series, read_csv
from scipy.optimize import minimize
from scipy.special import expit, logit

from rewards.base import score_captions
from rl_caption.config.build import quiet_libraries
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json, write_json_lines
from rl_caption.data.formats import where_from
from rl_caption.data.plain_files import json_lines, read_utf8, single_spaced
from rl_caption.evaluation import check_writable
from rl_caption.lab.config import ConcretenessConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.runtime.errors import ConfigError, naming

Floats = NDArray[np.float64]
MEANS = {"logit": 0.5, "median": 0.0}
"""How the paper's mu = 0.5 (appendix A.1) is read -> mean of the logits. ``logit``: mu is the
parameter of the logit-normal distribution, whose median is then 0.622. ``median``: mu is the median
of the scores.
"""


def standardize(
    scores: ArrayLike,
    lengths: Sequence[int],
    reading: str = "logit",
    margin: float = 1e-4,
) -> Floats:
    """Give the scores of every caption length one logit-normal distribution (A.1): sigmoid(mean +
    z), [N] in (0, 1).

    z is the logit ln(p / (1 - p)) of a score, standardised over the captions of the same length:
    less their mean, divided by their standard deviation (of the population). Where all scores of a
    length are equal, such as that of a single caption, z is 0. The paper prints the logit without
    the numerator p.

    Args:
        scores: [N] in [0, 1]; clipped to [margin, 1 - margin].
        lengths: [N], 0 or more.
        reading: of the paper's mu = 0.5, a key of ``MEANS``.
        margin: see ``scores``.

    Raises:
        ValueError: a score is outside [0, 1].
    """
    values = np.asarray(scores, np.float64)
    wrong = values[~((values >= 0) & (values <= 1))]  # also NaN
    if len(wrong):
        raise ValueError(
            f"a score is {wrong[0]}: only scores in [0, 1] are standardised"
        )
    logits = logit(values.clip(margin, 1 - margin))
    standardized = np.zeros(len(values))
    for length in np.unique(lengths):
        members = np.asarray(lengths) == length
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
        return expit(
            np.asarray(scores, np.float64) @ np.array(self.weights) + self.intercept
        )


def fit_combination(
    scores: ArrayLike, labels: ArrayLike, l2: float = 1.0
) -> Combination:
    """Logistic regression of [N] labels on scores [N, F], with the penalty l2 / 2 |weights|² on the
    log-likelihood.

    The intercept is not penalised. ``l2`` 1 is scikit-learn's default; with 0, separable labels
    have no optimum.

    Raises:
        ValueError: the optimum was not found.
    """
    features, signs = np.asarray(scores, np.float64), np.where(labels, 1.0, -1.0)

    def objective(values: Floats) -> tuple[float, Floats]:
        weights = values[:-1]
        margins = signs * (features @ weights + values[-1])
        slopes = -signs * expit(-margins)
        loss = np.logaddexp(0, -margins).sum() + l2 / 2 * weights @ weights
        return loss, np.append(features.T @ slopes + l2 * weights, slopes.sum())

    start, options = np.zeros(features.shape[1] + 1), {"ftol": 1e-14}
    result = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    if not np.isfinite(result.x).all() or not result.success:
        raise ValueError(
            f"the regression has no optimum: {result.message}; try a higher l2"
        )
    *weights, intercept = result.x.tolist()
    return Combination(weights, intercept)


def make_targets(config: ConcretenessConfig) -> str:
    """Score captions, combine the scores, and write the targets of a student; returns a summary as
    JSON.

    Both orders of the paper can be had. Regress, then distil (main text): one call with
    ``ratings``, and SBA and VBA as
    scorers. Distil, then regress (A.2): a first call without ``ratings``, which writes targets for
    a student of each scorer, and a second one with ``ratings`` and these students as scorers.

    Raises:
        ConfigError: a scorer cannot be made, or needs more than the caption.
        DataError: a file is not what it should be.
        RewardError: a scorer failed.
    """
    quiet_libraries()
    out = check_writable(config.out)
    captions = list(
        dict.fromkeys(caption for _, caption, _ in _captioned(config, "captions"))
    )
    rated = _ratings(config)
    ratings = np.array(list(rated.values()))
    labels = ratings > np.median(ratings) if rated else ratings
    if rated and not labels.any():
        raise ConfigError(
            f"ratings: none of {len(rated)} ratings is above their median"
        )
    scorers = build_judges(config.scorers, None, [], "scorers")
    every = list(dict.fromkeys([*captions, *rated]))
    lengths = [len(caption.split()) for caption in every]
    columns = {}
    for name, scorer in scorers.items():
        scores = score_captions(scorer, f"scorers.{name}", None, every, {})
        columns[name] = np.array(scores)
        if config.standardize != "none":
            with naming(f"scorers.{name}"):
                columns[name] = standardize(scores, lengths, config.standardize)
    table = DataFrame(columns, index=Index(every, name="caption"))
    signatures = {name: scorer.signature for name, scorer in scorers.items()}
    summary: dict[str, Any] = {"signatures": signatures}
    targets = {f"targets_{name}": table[name] for name in scorers}
    if rated:
        features = table.loc[list(rated)].to_numpy()
        with naming("ratings"):
            combination = fit_combination(features, labels, config.l2)
        right = (combination(features) > 0.5) == labels
        summary["weights"] = dict(zip(scorers, combination.weights, strict=True))
        summary |= {"intercept": combination.intercept, "accuracy": float(right.mean())}
        targets = {"targets": Series(combination(table.to_numpy()), table.index)}
    targets = {name: own.to_frame("target") for name, own in targets.items()}
    for name, values in {"scores": table, **targets}.items():
        lines = values.loc[captions].reset_index().to_dict("records")
        write_json_lines(out / f"{name}.jsonl", lines)
    content = summary | {"config": config.model_dump(mode="json")}
    write_json(out / "combination.json", content)
    return json.dumps(summary, indent=1)


def _captioned(
    config: ConcretenessConfig, key: Literal["captions", "ratings"]
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """``FILE, line N``, the caption with single spaces, and the item, of each line with a caption.

    Lines are those of JSON or CSV, or of a text file.
    """
    path = Path(getattr(config, key))
    if not path.exists():
        raise DataError(f"{key} {path} does not exist{where_from(config.source)}")
    lines: Iterable[tuple[str, Any]]
    if path.suffix == ".csv":
        with naming(str(path), (ValueError,), error=DataError):
            table = read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
        lines = ((f"{path}, line {n}", row) for n, row in enumerate(table, start=2))
    elif path.suffix == ".jsonl":
        lines = ((where, item) for _, where, item in json_lines(path))
    else:
        lines = ((str(path), {"caption": text}) for text in read_utf8(path).split("\n"))
    for where, item in lines:
        with naming(where, (KeyError, TypeError, AttributeError), error=DataError):
            caption = single_spaced(item["caption"])
        if caption:
            yield where, caption, item


def _ratings(config: ConcretenessConfig) -> dict[str, float]:
    """Caption -> the mean of its ratings; ``concreteness_annotation`` in the authors' file."""
    ratings_of: dict[str, list[float]] = defaultdict(list)
    for where, caption, item in _captioned(config, "ratings") if config.ratings else ():
        with naming(f"{where}: rating", (TypeError, ValueError), error=DataError):
            rating = float(item.get("rating", item.get("concreteness_annotation")))  # type: ignore[arg-type]
        if not math.isfinite(rating):
            raise DataError(
                f"{where}: the rating is {rating}: expected a finite number"
            )
        ratings_of[caption].append(rating)
    return {caption: fmean(ratings) for caption, ratings in ratings_of.items()}
