"""Judge captions: metrics of the COCO toolkit, signs of bad captions, and the oracle of generated scenes."""

from __future__ import annotations

import importlib.metadata
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from rl_caption.evaluation.errors import EvaluationError
from rl_caption.evaluation.java import JavaError, find_java
from rl_caption.evaluation.tokens import Tokenised, Tokenizer, tokenise
from rl_caption.evaluation.toolkit import COUNTED, METRIC_KEYS, SCORERS, Scores, UndefinedMetric, spice

if TYPE_CHECKING:
    from rl_caption.data.base import Row
    from rl_caption.data.scenes.world import Scene

logger = logging.getLogger(__name__)

DEFAULT_METRICS = tuple(SCORERS)
DEGENERATION_KEYS = {
    "length/mean": "length",
    "vocabulary/size": "vocabulary",
    "captions/novel": "novel",
    "captions/bad_endings": "bad_endings",
    "captions/repeated_ngrams": "repeated_ngrams",
    "captions/duplicates": "duplicates",
    "captions/empty": "empty",
}
"""Our key -> the key of ``rewards.text.degeneration``."""
JUDGE = "judge/"
"""What the keys of rewards that judge captions begin with (``rl_caption.evaluation.reward_scores``)."""


@dataclass(frozen=True)
class Evaluation:
    """What ``evaluate_captions`` found. Every key, its unit and its range: docs/evaluation.md."""

    metrics: dict[str, float]
    """Key -> finite value, as computed (not multiplied by 100)."""
    signature: str
    """Everything the numbers depend on; numbers with different signatures are not comparable."""
    n: int
    """Number of captions judged."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Key of a metric that was asked for and could not be computed -> reason."""
    per_image: dict[str, dict[str, float]] = field(default_factory=dict)
    """Image id -> key -> value, for the metrics that are defined for one image."""
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Key of a judge -> smallest and largest possible score."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Key -> confidence interval over images, where one was asked for (``rl_caption.evaluation.confidence``)."""
    interval: str = ""
    """How the intervals were made, such as ``95 % percentile bootstrap over images, 1000 resamples, seed 0``."""
    counts: dict[str, NDArray[np.float64]] = field(default_factory=dict, repr=False, compare=False)
    """``bleu``, ``meteor`` -> [n, C], what their score of the whole set is a function of, summed over images."""


def evaluate_captions(
    captions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    tokenizer: Tokenizer = "auto",
    training_captions: Iterable[str] | None = None,
    scenes: Mapping[str, Scene] | None = None,
    spice_jars: str | Path | None = None,
) -> Evaluation:
    """Judge one caption per image against the references of its image.

    The images are those of ``captions``: references of other images are not used, for document frequencies neither,
    and the signature then says how many ids of how many were scored.

    Args:
        captions: image id -> caption, as the model wrote it (EOS removed).
        references: image id -> captions that people wrote, untokenised.
        metrics: names from ``bleu``, ``meteor``, ``rouge``, ``cider``, ``spice``.
        tokenizer: of the n-gram metrics. ``java`` is the toolkit's PTB tokenizer, ``python`` this package's, ``auto``
            is ``python`` for captions on which the two were compared, and ``java``, where there is a Java runtime, for
            the others; ``none`` takes text whose tokens are already separated by spaces.
        training_captions: captions the model was trained on, untokenised; needed for ``captions/novel``.
        scenes: image id -> generated scene, where the data has one; every caption then needs a scene.
        spice_jars: folder of SPICE's parser; None looks into the toolkit's own (see ``toolkit.spice``).

    Raises:
        EvaluationError: no captions, an unknown metric or tokenizer, captions whose image has no references or no
            scene, or ``tokenizer="java"`` without Java.
        JavaError: Java is there, but the tokenizer failed.
    """
    _check(captions, references, metrics, scenes)
    ids = list(captions)
    package = importlib.metadata.version("rl-caption")
    tokens = tokenise(captions, references, tokenizer, package)
    values: dict[str, float] = {}
    per_image: dict[str, dict[str, float]] = {image_id: {} for image_id in ids}
    left_out: dict[str, str] = {}
    counts: dict[str, NDArray[np.float64]] = {}
    for name in tqdm([name for name in SCORERS if name in metrics], desc="metrics", unit="metric", disable=None):
        try:
            scores = _score(name, tokens, counts, spice_jars)
        except (JavaError, UndefinedMetric) as error:
            logger.info("%s left out: %s", ", ".join(METRIC_KEYS[name]), error)
            left_out.update(dict.fromkeys(METRIC_KEYS[name], str(error)))
            continue
        logger.info("computed %s of %d captions", ", ".join(METRIC_KEYS[name]), len(ids))
        for key, (total, image_scores) in scores.items():
            values[key] = total
            for image_id, score in zip(ids, image_scores, strict=True):
                per_image[image_id][key] = score
    found, missing = _degeneration(captions, training_captions)
    values.update(found)
    left_out.update(missing)
    if scenes is not None:
        values.update(_judge_scenes(captions, scenes, per_image))
    _check_finite(values)
    signature = _signature(captions, references, tokens.name, "METEOR" in values or "SPICE" in values, package)
    return Evaluation(values, signature, len(ids), left_out, per_image, counts=counts)


def _score(
    name: str, tokens: Tokenised, counts: dict[str, NDArray[np.float64]], spice_jars: str | Path | None
) -> Scores:
    """Scores of one metric by key; what is resampled of it goes into ``counts``."""
    if name in COUNTED:
        scores, counts[name] = COUNTED[name](tokens.captions, tokens.references)
        return scores
    if name == "spice":
        return spice(tokens.captions, tokens.references, spice_jars)
    return SCORERS[name](tokens.captions, tokens.references)


def evaluate_rows(
    rows: Sequence[Row],
    captions: Sequence[str],
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    tokenizer: Tokenizer = "auto",
    training_captions: Iterable[str] | None = None,
    spice_jars: str | Path | None = None,
) -> Evaluation:
    """Judge the decoded captions of a split; the oracle judges too where every row has its scene.

    Args:
        rows: rows of the split.
        captions: one caption for each row, in the order of ``rows``.
        metrics: as in ``evaluate_captions``.
        tokenizer: as in ``evaluate_captions``.
        training_captions: as in ``evaluate_captions``.
        spice_jars: as in ``evaluate_captions``.

    Raises:
        EvaluationError: another number of captions than rows, an image id in two rows, or a row without references.
    """
    if len(rows) != len(captions):
        raise EvaluationError(f"{len(captions)} captions for {len(rows)} rows: one caption is needed for each row")
    ids = [row["image_id"] for row in rows]
    if len(set(ids)) != len(ids):
        repeated = [image_id for image_id, count in Counter(ids).items() if count > 1]
        raise EvaluationError(f"{len(repeated)} image ids are in more than one row, such as {repeated[:3]}")
    return evaluate_captions(
        dict(zip(ids, captions, strict=True)),
        {row["image_id"]: row["references"] for row in rows},
        metrics=metrics,
        tokenizer=tokenizer,
        training_captions=training_captions,
        spice_jars=spice_jars,
        scenes={row["image_id"]: row["scene"] for row in rows} if rows and all("scene" in r for r in rows) else None,
    )


def validation_cider(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> float:
    """CIDEr-D of a validation split for choosing the best checkpoint: no Java, no subprocess.

    Python tokens, no EOS, document frequencies of ``references`` (all of them: one document per image). Equal to the
    toolkit's CIDEr on the same tokens when every image of ``references`` has a caption.

    Args:
        captions: image id -> caption.
        references: image id -> captions that people wrote, untokenised.

    Returns:
        Mean over the captions, range [0, 10].

    Raises:
        EvaluationError: no captions, captions whose image has no references, or fewer than two images with references.
    """
    from rewards.text.cider import cider_d
    from rewards.text.document_frequency import DocumentFrequencies
    from rewards.text.tokenize import tokenize

    _check_ids(captions, references)
    tokens = {image_id: [tokenize(text) for text in texts] for image_id, texts in references.items() if texts}
    if len(tokens) < 2:
        raise EvaluationError(
            f"CIDEr weighs words by how many images they occur in: it needs references of at least 2 images, got "
            f"{len(tokens)}"
        )
    df = DocumentFrequencies.from_references(tokens.values(), eos=False, n=4)
    scores = cider_d([tokenize(text) for text in captions.values()], [tokens[image_id] for image_id in captions], df)
    return math.fsum(scores) / len(scores)


def _check(
    captions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    metrics: Sequence[str],
    scenes: Mapping[str, Scene] | None,
) -> None:
    unknown = sorted(set(metrics) - set(SCORERS))
    if unknown:
        raise EvaluationError(f"unknown metrics {unknown}: known are {list(SCORERS)}")
    _check_ids(captions, references)
    if scenes is not None:
        lost = [image_id for image_id in captions if image_id not in scenes]
        if lost:
            raise EvaluationError(f"{len(lost)} of {len(captions)} captions have no scene, such as images {lost[:3]}")


def _check_ids(captions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> None:
    if not captions:
        raise EvaluationError("there are no captions to evaluate")
    for image_id, caption in captions.items():
        if not isinstance(caption, str):
            raise EvaluationError(f"the caption of image {image_id!r} is {caption!r:.80}: expected a string")
    for image_id, texts in references.items():
        if isinstance(texts, str):
            raise EvaluationError(f"the references of image {image_id!r} are the string {texts!r:.80}: expected a list")
    unknown = [image_id for image_id in captions if image_id not in references]
    if unknown:
        raise EvaluationError(
            f"{len(unknown)} of {len(captions)} captions are of images that are not in the references, such as "
            f"{unknown[:3]}; the references have {len(references)} images, such as {list(references)[:3]}"
        )
    bare = [image_id for image_id in captions if not references[image_id]]
    if bare:
        raise EvaluationError(f"{len(bare)} of {len(captions)} images have no reference caption, such as {bare[:3]}")


def _degeneration(
    captions: Mapping[str, str], training_captions: Iterable[str] | None
) -> tuple[dict[str, float], dict[str, str]]:
    """Signs of bad captions. Always on Python tokens, so that machines with and without Java agree."""
    from rewards.text.degeneration import degeneration_statistics
    from rewards.text.tokenize import tokenize

    seen = None if training_captions is None else {tuple(tokenize(text)) for text in training_captions}
    found = degeneration_statistics([tokenize(text) for text in captions.values()], seen)
    values = {key: found[name] for key, name in DEGENERATION_KEYS.items() if name in found}
    return values, {} if "captions/novel" in values else {"captions/novel": "no training captions were given"}


def _judge_scenes(
    captions: Mapping[str, str], scenes: Mapping[str, Scene], per_image: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Mean oracle scores; also written into ``per_image``."""
    from rl_caption.data.scenes.oracle import oracle

    for image_id, caption in tqdm(captions.items(), desc="oracle", unit="caption", disable=None):
        score = oracle(caption, scenes[image_id])
        for part in ("precision", "recall", "f1", "unparsed"):
            per_image[image_id][f"oracle/{part}"] = float(getattr(score, part))
    keys = [f"oracle/{part}" for part in ("precision", "recall", "f1", "unparsed")]
    return {key: math.fsum(per_image[image_id][key] for image_id in captions) / len(captions) for key in keys}


def _check_finite(values: Mapping[str, float]) -> None:
    for key, value in values.items():
        if not math.isfinite(value):
            raise EvaluationError(f"{key} came out as {value!r}: every metric must be finite")


def _signature(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]], tokenizer: str, java: bool, package: str
) -> str:
    """Everything the numbers depend on, as parts joined by '+'."""
    count = sum(len(references[image_id]) for image_id in captions)
    parts = [
        "COCO-captions",
        f"tokenizer:{tokenizer}",
        "df:references of this call",
        "eos:not counted",
        f"references:{count}",
        f"ids:{len(captions)} of {len(references)}",
        f"pycocoevalcap{importlib.metadata.version('pycocoevalcap')}",
    ]
    if java:
        parts.append(f"java{find_java().version}")
    return "+".join([*parts, f"rl-caption{package}"])
