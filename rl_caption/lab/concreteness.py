"""Combine bottleneck scores of captions into one concreteness score, the target that a
student learns (docs/papers.md).

Source: Yanuka, Alper, Averbuch-Elor and Giryes, "ICC: Quantifying Image Caption
Concreteness for Multimodal Dataset Curation", Findings of ACL 2024, section 2 and
appendix A.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pandas import DataFrame, Index, Series, read_csv, to_numeric
from scipy.optimize import minimize
from scipy.special import expit, logit

from rewards.base import score_captions
from rl_caption.config.build import quiet_libraries
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json, write_json_lines
from rl_caption.data.plain_files import json_lines, read_utf8, single_spaced
from rl_caption.evaluation import check_writable
from rl_caption.lab.config import ConcretenessConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.runtime.errors import ConfigError, naming

Floats = NDArray[np.float64]
MEANS = {"logit": 0.5, "median": 0.0}
"""Reading of the paper's mu = 0.5 (appendix A.1) -> mean of the logits. ``logit``: mu
is the parameter of the logit-normal distribution, whose median is then 0.622.
``median``: mu is the median of the scores.
"""


def standardize(
    scores: ArrayLike,
    lengths: ArrayLike,
    reading: str = "logit",
    margin: float = 1e-4,
) -> Floats:
    """Standardise scores to one logit-normal distribution for every caption length
    (A.1): sigmoid(mean + z), [N] in (0, 1).

    z is the logit ln(p / (1 - p)) of a score, standardised over the captions of the
    same length: less their mean, divided by their standard deviation (of the
    population). Where all scores of a length are equal, such as the score of a single
    caption, z is 0. The paper prints the logit without the numerator p.

    Args:
        scores: [N] in [0, 1]; clipped to [margin, 1 - margin].
        lengths: [N] numbers of words, 0 or more.
        reading: reading of the paper's mu = 0.5, a key of ``MEANS``.
        margin: distance from 0 and 1 to which scores are clipped.

    Raises:
        ValueError: a score is outside [0, 1].
    """
    values = np.asarray(scores, np.float64)
    wrong = values[~((values >= 0) & (values <= 1))]  # also NaN
    if len(wrong):
        raise ValueError(
            f"a score is {wrong[0]}: only scores in [0, 1] are standardised"
        )
    logits = Series(logit(values.clip(margin, 1 - margin)))
    alike = logits.groupby(np.asarray(lengths))
    spread = alike.transform("std", ddof=0)
    distances = (logits - alike.transform("mean")) / spread.where(spread > 1e-12)
    return expit(MEANS[reading] + distances.fillna(0.0).to_numpy())


class Combination(NamedTuple):
    """sigmoid(weights · scores + intercept), in (0, 1)."""

    weights: list[float]
    intercept: float

    def __call__(self, scores: ArrayLike) -> Floats:
        """Combine scores [N, F] to [N]."""
        return expit(np.asarray(scores) @ np.array(self.weights) + self.intercept)


def fit_combination(
    scores: ArrayLike, labels: ArrayLike, l2: float = 1.0
) -> Combination:
    """Logistic regression of [N] labels on scores [N, F], with the penalty l2 / 2
    |weights|² on the log-likelihood.

    The intercept is not penalised. ``l2`` 1 is scikit-learn's default; with 0,
    separable labels have no optimum.

    Raises:
        ValueError: the optimum was not found.
    """
    signs = np.where(labels, 1.0, -1.0)
    features = np.column_stack([scores, np.ones(len(signs))])
    penalties = np.append(np.full(features.shape[1] - 1, l2), 0.0)

    def objective(weights: Floats) -> tuple[float, Floats]:
        """Penalised logistic loss, and its gradient."""
        margins = signs * (features @ weights)
        loss = np.logaddexp(0, -margins).sum() + penalties @ weights**2 / 2
        slopes = features.T @ (signs * expit(-margins))
        return loss, penalties * weights - slopes

    start = np.zeros(len(penalties))
    options = {"ftol": 1e-14}
    result = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    if not np.isfinite(result.x).all() or not result.success:
        raise ValueError(
            f"the regression has no optimum: {result.message}; try a higher l2"
        )
    *weights, intercept = result.x.tolist()
    return Combination(weights, intercept)


def make_targets(config: ConcretenessConfig) -> str:
    """Score captions, combine the scores, and write the targets of a student; returns a
    summary as JSON.

    Both orders of the paper are possible. Regress, then distil (main text): one call
    with ``ratings``, and SBA and VBA as scorers. Distil, then regress (A.2): a first
    call without ``ratings``, which writes targets for a student of each scorer, and a
    second call with ``ratings`` and these students as scorers.

    Raises:
        ConfigError: a scorer cannot be made, or needs more than the caption.
        DataError: a file is missing or malformed.
        RewardError: a scorer failed.
    """
    quiet_libraries()
    out = check_writable(config.out)
    captions = _read(config, "captions")["caption"].unique()
    ratings = _ratings(config)
    labels = ratings > ratings.median()
    if config.ratings and not labels.any():
        raise ConfigError(
            f"ratings: none of {len(ratings)} ratings is above their median"
        )
    scorers = build_judges(config.scorers, None, [], "scorers")
    every = list(dict.fromkeys([*captions, *ratings.index]))
    lengths = [len(caption.split()) for caption in every]
    table = DataFrame(index=Index(every, name="caption"))
    for name, scorer in scorers.items():
        table[name] = score_captions(scorer, f"scorers.{name}", None, every, {})
        if config.standardize != "none":
            with naming(f"scorers.{name}"):
                table[name] = standardize(table[name], lengths, config.standardize)
    signatures = {name: scorer.signature for name, scorer in scorers.items()}
    summary: dict[str, Any] = {"signatures": signatures}
    targets = {f"targets_{name}": table[name].rename("target") for name in scorers}
    if config.ratings:
        features = table.loc[ratings.index]
        with naming("ratings"):
            combination = fit_combination(features, labels, config.l2)
        right = (combination(features) > 0.5) == labels
        summary["weights"] = dict(zip(scorers, combination.weights, strict=True))
        summary["intercept"] = combination.intercept
        summary["accuracy"] = float(right.mean())
        combined = Series(combination(table), table.index, name="target")
        targets = {"targets": combined}
    for name, values in {"scores": table, **targets}.items():
        lines = values.loc[captions].reset_index().to_dict("records")
        write_json_lines(out / f"{name}.jsonl", lines)
    content = summary | {"config": config.model_dump(mode="json")}
    write_json(out / "combination.json", content)
    return json.dumps(summary, indent=1)


def _read(config: ConcretenessConfig, key: Literal["captions", "ratings"]) -> DataFrame:
    """The rows of a file of JSON lines, CSV or text, with single spaces in ``caption``
    and without blank captions. Raises ``DataError``.
    """
    path = Path(getattr(config, key))
    if not path.exists():
        source = f". It takes {config.source}" if config.source else ""
        raise DataError(f"{key} {path} does not exist{source}")
    wrong = ValueError, KeyError, TypeError, AttributeError
    with naming(
        str(path),
        wrong,
        error=DataError,
        kept=(DataError,),
    ):
        if path.suffix == ".csv":
            table = read_csv(path, dtype=str, keep_default_na=False)
        elif path.suffix == ".jsonl":
            table = DataFrame([line for *_, line in json_lines(path)])
        else:
            table = DataFrame({"caption": read_utf8(path).split("\n")})
        table["caption"] = table["caption"].map(single_spaced)
    return table[table["caption"] != ""]


def _ratings(config: ConcretenessConfig) -> Series:
    """Caption -> the mean of its ratings; ``concreteness_annotation`` in the authors' file."""
    if config.ratings is None:
        return Series(dtype=float)
    table = _read(config, "ratings")
    key = "rating" if "rating" in table else "concreteness_annotation"
    with naming(f"{config.ratings}: rating", (KeyError, ValueError), error=DataError):
        ratings = to_numeric(table[key])
    odd = table["caption"][~np.isfinite(ratings)]
    if len(odd):
        raise DataError(f"{config.ratings}: no rating of {odd.iloc[0]!r:.80}")
    return ratings.groupby(table["caption"], sort=False).mean()
