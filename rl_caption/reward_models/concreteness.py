"""From scores of captions by bottlenecks to one number of concreteness, the target of a student (docs/icc.md).

Source: Yanuka, Ben-Kish, Bitton, Szpektor and Giryes, "ICC: Quantifying Image Caption Concreteness for Multimodal
Dataset Curation", Findings of ACL 2024, section 3 and appendix A.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit

from rewards.base import Reward, checked_scores
from rewards.registry import build
from rl_caption.config.build import quiet_libraries
from rl_caption.config.checks import check
from rl_caption.config.programs import ConcretenessConfig
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json, write_json_lines
from rl_caption.data.plain_files import json_object, shown
from rl_caption.errors import ConfigError, naming
from rl_caption.evaluation import check_writable

Floats = NDArray[np.float64]
MEANS = {"logit": 0.5, "median": 0.0}
"""Reading of mu = 0.5 in appendix A.1 -> mean of the logit: mu of the logit-normal distribution, whose median is then
0.622; or its median, 0.5."""


def standardize(
    scores: ArrayLike, lengths: Sequence[int], reading: str = "logit", bin_width: int = 1, margin: float = 1e-4
) -> Floats:
    """Impose one logit-normal distribution on the scores of each length (A.1): sigmoid(mean + z), [N] in (0, 1).

    z is logit(p) = ln(p / (1 - p)) less its mean over the captions of a length, divided by their standard deviation
    (divisor: their number). Lengths in a bin of ``bin_width`` count as one. Where a length has no spread, one caption
    say, z is 0. The paper prints the logit without the numerator p.

    Args:
        scores: [N] in [0, 1]; clipped to [margin, 1 - margin].
        lengths: [N], 0 or more.
        reading: of mu = 0.5, a key of ``MEANS``.
        bin_width, margin: see above.

    Raises:
        ValueError: a score is outside [0, 1], or there are other numbers of lengths.
    """
    values = np.asarray(scores, np.float64)
    if values.shape != (len(lengths),):
        raise ValueError(f"scores of shape {values.shape} for {len(lengths)} lengths: expected as many")
    if not ((values >= 0) & (values <= 1)).all():
        wrong = values[~((values >= 0) & (values <= 1))][0]
        raise ValueError(f"a score is {wrong}: the logit needs scores in [0, 1]; or choose standardize none")
    logits = logit(values.clip(margin, 1 - margin))
    groups = np.asarray(lengths) // bin_width
    found = np.zeros(len(values))
    for group in np.unique(groups):
        own = groups == group
        spread = logits[own].std()
        if spread > 1e-12:
            found[own] = (logits[own] - logits[own].mean()) / spread
    return expit(MEANS[reading] + found)


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
        raise ValueError(f"none of {len(ratings)} ratings is above their median: expected different ratings")
    return labels


def fit_combination(scores: ArrayLike, labels: Sequence[bool], l2: float = 1.0) -> Combination:
    """Logistic regression of [N] labels on scores [N, F]: the maximum of likelihood less l2 / 2 |weights|².

    The penalty, which spares the intercept, is that of scikit-learn's default with ``l2`` 1. Without it separable
    labels have no maximum.

    Raises:
        ValueError: the labels are all alike, or the optimum was not found.
    """
    features, signs = np.asarray(scores, np.float64), np.where(labels, 1.0, -1.0)
    if len(set(signs.tolist())) < 2:
        raise ValueError(f"all {len(signs)} labels are alike: expected both")

    def objective(values: Floats) -> tuple[float, Floats]:
        margins = signs * (features @ values[:-1] + values[-1])
        slopes = -signs * expit(-margins)
        gradient = np.append(features.T @ slopes + l2 * values[:-1], slopes.sum())
        return float(np.logaddexp(0, -margins).sum() + l2 / 2 * values[:-1] @ values[:-1]), gradient

    result = minimize(objective, np.zeros(features.shape[1] + 1), jac=True, method="L-BFGS-B", options={"ftol": 1e-14})
    if not np.isfinite(result.x).all() or not result.success:
        raise ValueError(f"the logistic regression has no optimum: {result.message}; a higher l2 is the usual remedy")
    *weights, intercept = result.x.tolist()
    return Combination(weights, intercept)


def make_targets(config: ConcretenessConfig) -> str:
    """Score captions, combine the scores and write targets; returns a summary.

    Both orders of the paper are two calls at most. Regress, then distil (main text): with ``ratings``, SBA and VBA as
    scorers. Distil, then regress (A.2): first without ``ratings``, which writes targets of a student for each scorer;
    then with ``ratings`` and the students as scorers.

    Raises:
        ConfigError: a scorer cannot be made, or needs more than the caption.
        DataError: a file is not what it should be.
        RewardError: a scorer failed.
    """
    quiet_libraries()
    check(config)
    out = check_writable(config.out)
    captions = _captions(Path(config.captions))
    rated = {} if config.ratings is None else _ratings(Path(config.ratings))
    with naming(f"ratings {config.ratings!r}"):
        labels = binarize(list(rated.values())) if rated else []
    scorers = _scorers(config)
    every = list(dict.fromkeys([*captions, *rated]))
    columns = {name: _scored(scorer, every, config) for name, scorer in scorers.items()}
    table = np.stack(list(columns.values()), axis=1)  # [N, F]
    rows = dict(zip(every, table.tolist(), strict=True))
    records = [{"caption": caption, **dict(zip(columns, rows[caption], strict=True))} for caption in captions]
    write_json_lines(out / "scores.jsonl", records)
    signatures = {name: scorer.signature for name, scorer in scorers.items()}
    summary: dict[str, Any] = {"config": asdict(config), "signatures": signatures}
    targets = {f"targets_{name}.jsonl": table[: len(captions), index] for index, name in enumerate(columns)}
    if rated:
        with naming(f"ratings {config.ratings!r}"):
            combination = fit_combination([rows[caption] for caption in rated], labels, config.l2)
        right = (combination([rows[caption] for caption in rated]) > 0.5) == np.array(labels)
        weights = dict(zip(columns, combination.weights, strict=True))
        summary |= {"weights": weights, "intercept": combination.intercept, "accuracy": float(right.mean())}
        targets = {"targets.jsonl": combination(table[: len(captions)])}
    for name, values in targets.items():
        pairs = zip(captions, values.tolist(), strict=True)
        write_json_lines(out / name, [{"caption": caption, "target": target} for caption, target in pairs])
    write_json(out / "combination.json", summary)
    print(
        f"wrote {', '.join(str(out / name) for name in ('scores.jsonl', *targets, 'combination.json'))}",
        file=sys.stderr,
    )
    return json.dumps({key: value for key, value in summary.items() if key != "config"}, indent=1)


def _scorers(config: ConcretenessConfig) -> Mapping[str, Reward]:
    if not config.scorers:
        raise ConfigError("scorers is empty: name at least one reward, such as sba")
    found: dict[str, Reward] = {}
    for name, judge in config.scorers.items():
        with naming(f"scorers.{name}"):
            found[name] = build(judge.target or name, **judge.kwargs)
        if found[name].columns:
            raise ConfigError(f"scorers.{name} needs {sorted(found[name].columns)}: expected one of captions alone")
    return found


def _scored(scorer: Reward, captions: Sequence[str], config: ConcretenessConfig) -> Floats:
    """Scores of captions, standardised by length as the configuration says."""
    scores = checked_scores(scorer, scorer(None, captions), len(captions))
    if config.standardize == "none":
        return np.array(scores)
    lengths = [len(caption.split() if config.length == "words" else caption) for caption in captions]
    with naming(f"scorer {scorer.__name__!r}"):
        return standardize(scores, lengths, config.standardize, config.bin_width, config.margin)


def _captions(path: Path) -> list[str]:
    """The distinct captions of a file, with single spaces."""
    if path.suffix == ".jsonl":
        texts = [_text(item, where) for item, where in _lines(path)]
    else:
        texts = [" ".join(line.split()) for line in _read(path) if line.strip()]
    if not texts:
        raise DataError(f"{path} has no captions")
    return list(dict.fromkeys(texts))


def _ratings(path: Path) -> dict[str, float]:
    """Caption -> rating; of several ratings of a caption their mean."""
    found: dict[str, list[float]] = {}
    for item, where in _lines(path):
        rating = item.get("rating")
        if not isinstance(rating, int | float) or isinstance(rating, bool) or not np.isfinite(rating):
            raise DataError(f"{where}: 'rating' is {shown(rating)}: expected a finite number")
        found.setdefault(_text(item, where), []).append(float(rating))
    if not found:
        raise DataError(f"{path} has no ratings: expected JSON lines with 'caption' and 'rating'")
    return {caption: sum(ratings) / len(ratings) for caption, ratings in found.items()}


def _read(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _lines(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Objects of JSON lines, each with its place."""
    for number, line in enumerate(_read(path), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield json_object(line.encode(), where), where


def _text(item: Mapping[str, Any], where: str) -> str:
    caption = item.get("caption")
    if not isinstance(caption, str) or not caption.strip():
        raise DataError(f"{where}: 'caption' is {shown(caption)}: expected text")
    return " ".join(caption.split())
