"""Metrics of captions: the COCO toolkit's, signs of bad captions, the oracle of
generated scenes, and any reward.

BLEU, ROUGE-L and CIDEr-D come from ``rewards.text`` and equal the toolkit's to the last
bit; METEOR and SPICE are its Java programs (``toolkit``).
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from rewards.base import Reward, naming, score_captions
from rewards.text.bleu import bleu_counts, bleu_of_counts
from rewards.text.cider import cider_d
from rewards.text.degeneration import degeneration_statistics
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.rouge import rouge_l
from rewards.text.tokenize import TOKENIZER, is_tested, tokenize_lines, tokenizer_of
from rl_caption import __version__
from rl_caption.data.base import reward_inputs
from rl_caption.data.checks import missing_files
from rl_caption.data.plain_files import TextForms
from rl_caption.evaluation.toolkit import (
    JavaError,
    Scores,
    UndefinedMetric,
    java_version,
    meteor,
    ptb_tokenize,
    spice,
)
from rl_caption.runtime.errors import UserError

logger = logging.getLogger(__name__)

Tokenizer = Literal["auto", "java", "python", "unicode", "char", "none"]
METRIC_KEYS: dict[str, tuple[str, ...]] = {
    "bleu": ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"),
    "meteor": ("METEOR",),
    "rouge": ("ROUGE-L",),
    "cider": ("CIDEr",),
    "spice": ("SPICE",),
}
"""Name of a metric -> the keys it is reported under, in the order that papers print."""
DEFAULT_METRICS = tuple(METRIC_KEYS)
SIGNS = {"length": "length/mean", "vocabulary": "vocabulary/size"}
"""Key of ``rewards.text.degeneration`` -> metric key, where that is not ``captions/KEY``."""
OTHER_LANGUAGES = ("unicode", "char")
"""Tokenizers of captions that are not English."""
JUDGE = "judge/"
"""Prefix of the keys of rewards that serve as metrics (``add_judges``)."""


class EvaluationError(UserError, ValueError):
    """Captions cannot be evaluated as they are; the message says which, and what would be right."""


@dataclass(frozen=True)
class Evaluation:
    """Result of ``evaluate_captions`` on N images. Every key with its unit and range:
    docs/evaluation.md.
    """

    metrics: dict[str, float]
    """Key -> finite value, as computed (not times 100)."""
    signature: str
    """Everything the numbers depend on; numbers with different signatures are not comparable."""
    n: int
    left_out: dict[str, str] = field(default_factory=dict)
    """Key of a metric that was asked for and could not be computed -> reason."""
    per_image: dict[str, dict[str, float]] = field(default_factory=dict)
    """Image id -> key -> value, of metrics that are defined for one image."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Key -> bootstrap interval over images (``confidence.with_intervals``)."""
    interval: str = ""
    """How the intervals were made, such as ``95 % percentile bootstrap over images,
    1000 resamples, seed 0``.
    """
    decoding: str = ""
    """How the captions were decoded, where they were decoded for this evaluation."""
    bleu_counts: NDArray[np.float64] | None = field(
        default=None, repr=False, compare=False
    )
    """Counts [N, 10] of BLEU, which is a function of their sums over images."""


def evaluate_captions(
    captions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    tokenizer: Tokenizer = "auto",
    training_captions: Iterable[str] | None = None,
    scenes: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Evaluate one caption for each image against the references of its image.

    Args:
        captions: image id -> caption, as the model wrote it (EOS removed).
        references: image id -> captions that people wrote, untokenised. References of
            images without a caption are not used, not even for document frequencies;
            the signature has both numbers of images.
        metrics: names from ``DEFAULT_METRICS``. A metric that cannot be computed is in
            ``left_out`` with the reason.
        tokenizer: tokenizer of these metrics. ``java`` is the toolkit's PTB tokenizer,
            ``python`` is ``rewards.text.tokenize``; ``auto`` uses Python for texts on
            which the two are known to agree (``is_tested``) and, where there is a
            runtime, Java for the others; ``none`` splits at white space. ``unicode``
            and ``char`` are for languages other than English; metrics for English alone
            are then in ``left_out``.
        training_captions: captions that the model was trained on, untokenised; needed
            for ``captions/novel``.
        scenes: image id -> generated scene, for the oracle's metrics.

    Raises:
        EvaluationError: no captions, an unknown metric, an image without references, or no Java.
        JavaError: the Java tokenizer failed.
    """
    check_asked(metrics, tokenizer)
    _check_ids(captions, references)
    candidates, tokens, tokens_name = tokenise(captions, references, tokenizer)
    words = words_tokenizer(tokenizer, TOKENIZER)
    warn_of_forms(captions, references, words)
    values: dict[str, float] = {}
    left_out = {"captions/novel": "no training captions were given"}
    not_english = f"for English only, but the tokenizer is {tokenizer!r}"
    if words != TOKENIZER:
        english = [name.upper() for name in ("meteor", "spice") if name in metrics]
        left_out |= dict.fromkeys(["captions/bad_endings", *english], not_english)
    counts = None
    per_image: dict[str, dict[str, float]] = {image_id: {} for image_id in captions}
    asked = [name for name in METRIC_KEYS if name in metrics]
    for name in tqdm(asked, desc="metrics", unit="metric", disable=None):
        if METRIC_KEYS[name][0] in left_out:
            continue
        try:
            scores = SCORERS[name](candidates, tokens)
        except (JavaError, UndefinedMetric) as error:
            logger.info("%s left out: %s", name, error)
            left_out.update(dict.fromkeys(METRIC_KEYS[name], str(error)))
            continue
        counts = scores.counts if name == "bleu" else counts
        for key, (values[key], of_images) in scores.values.items():
            for row, score in zip(per_image.values(), of_images, strict=True):
                row[key] = score
    values |= _signs(captions, training_captions, words)
    if scenes is not None:
        values |= _oracle_scores(captions, scenes, per_image)
    java = "METEOR" in values or "SPICE" in values
    signature = _signature(captions, references, tokens_name, java)
    left_out = {key: why for key, why in left_out.items() if key not in values}
    number = len(captions)
    return Evaluation(
        values, signature, number, left_out, per_image, bleu_counts=counts
    )


def warn_of_forms(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]], tokenizer: str
) -> None:
    """Warn of captions, and references of their images, that cost scores by their form
    (``TextForms``).
    """
    forms = TextForms()
    for image_id, caption in captions.items():
        forms.add(f"caption of image {image_id!r}", caption, scored=True)
        for text in references.get(image_id, ()):
            forms.add(f"reference of image {image_id!r}", text)
    for sentence in forms.warnings(tokenizer):
        logger.warning("WARNING: %s", sentence)


def check_one_row_each(rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """Raise ``EvaluationError`` unless image ids, by which references are looked up, are unique."""
    counts = Counter(row["image_id"] for row in rows)
    repeated = [image_id for image_id, count in counts.items() if count > 1]
    if repeated:
        raise EvaluationError(
            f"{len(repeated)} image ids are in more than one row of {source}, such as "
            f"{repeated[:3]}: write one row per image, with all its references"
        )


def words_tokenizer(asked: str, data: str) -> str:
    """Tokenizer of rewards that judge or choose captions: ``asked`` if not English,
    else ``data``.
    """
    return asked if asked in OTHER_LANGUAGES else data


def validation_cider(
    captions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    tokenizer: str = TOKENIZER,
) -> float:
    """Return the CIDEr-D by which training chooses its best checkpoint: the mean over
    captions, in [0, 10].

    Captions are split by ``tokenizer`` (``rewards.text.tokenize.TOKENIZERS``), without
    EOS; document frequencies are of all ``references``, one document per image. Where
    every image of ``references`` has a caption, this equals the toolkit's CIDEr on the
    same tokens. Raises ``EvaluationError`` where there are no captions, an image has no
    references, or fewer than two images have references.
    """
    _check_ids(captions, references)
    tokens, df = tokenize_references(references, tokenizer)
    candidates = list(map(tokenizer_of(tokenizer), captions.values()))
    scores = cider_d(candidates, [tokens[image_id] for image_id in captions], df)
    return math.fsum(scores) / len(scores)


def tokenize_references(
    references: Mapping[str, Sequence[str]], tokenizer: str
) -> tuple[dict[str, list[list[str]]], DocumentFrequencies]:
    """Return image id -> tokenised references, and their document frequencies: one
    document per image, no EOS.
    """
    split = tokenizer_of(tokenizer)
    tokens = {
        image_id: [split(text) for text in texts]
        for image_id, texts in references.items()
        if texts
    }
    if len(tokens) < 2:
        raise EvaluationError(
            f"CIDEr needs references of at least 2 images, got {len(tokens)}"
        )
    df = DocumentFrequencies.from_references(
        tokens.values(), eos=False, n=4, tokenizer=tokenizer
    )
    return tokens, df


def _check_ids(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> None:
    unknown = [image_id for image_id in captions if image_id not in references]
    if unknown or not captions:
        raise EvaluationError(
            f"{len(unknown)} of {len(captions)} captions are of images that are not in the "
            f"references, such as {unknown[:3]}; the references have {len(references)} images, "
            f"such as {list(references)[:3]}"
        )
    check_referenced(captions, references)


def check_asked(metrics: Sequence[str], tokenizer: str) -> None:
    """Raise ``EvaluationError`` for an unknown metric, or where there is no Java for the tokenizer."""
    unknown = sorted(set(metrics) - set(METRIC_KEYS))
    if unknown:
        raise EvaluationError(
            f"unknown metrics {unknown}: known are {list(METRIC_KEYS)}"
        )
    if tokenizer == "java":
        with naming("tokenizer 'java' cannot be used", (JavaError,), EvaluationError):
            java_version()


def check_referenced(
    captioned: Collection[str], references: Mapping[str, Sequence[str]]
) -> None:
    """Raise ``EvaluationError`` where images whose captions are evaluated have no list
    of references.
    """
    texts = {image_id: references.get(image_id) for image_id in captioned}
    bare = [key for key, value in texts.items() if not value or isinstance(value, str)]
    if bare:
        raise EvaluationError(
            f"{len(bare)} of {len(captioned)} images have no list of reference captions, such as {bare[:3]}"
        )


def tokenise(
    captions: Mapping[str, str], references: Mapping[str, Sequence[str]], tokenizer: str
) -> tuple[dict[str, str], dict[str, list[str]], str]:
    """Tokenise captions and the references of their images (arguments: ``evaluate_captions``).

    Returns both for the images of ``captions``, tokens joined by single spaces, and the
    tokens' name for the signature, with this package's version where they may differ
    from the toolkit's.
    """
    # Two calls, as the toolkit makes them: its tokenizer looks at the next line to end an
    # abbreviation.
    written = [text for key in captions for text in references[key]]
    flat, untested = _tokenise(written, tokenizer)
    candidates, more = _tokenise(list(captions.values()), tokenizer)
    tokens = iter(flat)
    reference_tokens = {
        key: [next(tokens) for _ in references[key]] for key in captions
    }
    name = "none[split at spaces]" if tokenizer == "none" else "PTB[corenlp3.4.1]"
    if tokenizer in OTHER_LANGUAGES:
        name = f"{tokenizer}[NFKC,unicode{unicodedata.unidata_version}]"
    if untested + more:
        count = f"{untested + more} of {len(flat) + len(candidates)} texts not compared with Java"
        name = f"PTB-python[rl-caption{__version__},{count}]"
    return dict(zip(captions, candidates, strict=True)), reference_tokens, name


def _tokenise(texts: Sequence[str], tokenizer: str) -> tuple[list[str], int]:
    """Return the tokens of every text, and the number of texts whose tokens may differ
    from the toolkit's.
    """
    if tokenizer in ("none", *OTHER_LANGUAGES):
        return [" ".join(tokenizer_of(tokenizer)(text)) for text in texts], 0
    untested = sum(not is_tested(text) for text in texts)
    if tokenizer == "java" or (tokenizer == "auto" and untested):
        try:
            java_version()
            return ptb_tokenize(texts), 0
        except JavaError as error:
            if tokenizer == "java":
                raise
            note = "%s: tokens of %d of %d texts may differ from the toolkit's, see the signature"
            logger.warning(note, error, untested, len(texts))
    return tokenize_lines(texts), untested


def bleu(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> Scores:
    """BLEU-1 to BLEU-4 with the closest reference length, of the whole set (Papineni et
    al. 2002). Range [0, 1].

    The counts are [N, 10], ``rewards.text.bleu.bleu_counts`` of each image.
    """
    counts = np.array(list(map(bleu_counts, *_split(candidates, references))))
    total = bleu_of_counts(counts.sum(axis=0).tolist())
    columns = map(list, zip(*map(bleu_of_counts, counts.tolist()), strict=True))
    scores = zip(total, columns, strict=True)
    values = dict(zip(METRIC_KEYS["bleu"], scores, strict=True))
    return Scores(values, counts.astype(np.float64))


def rouge(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> Scores:
    """ROUGE-L F with beta 1.2, mean over images (Lin 2004). Range [0, 1]."""
    # Split at spaces alone, as the toolkit does here: a no-break space within a token stays.
    scores = list(map(rouge_l, *_split(candidates, references, " ")))
    return Scores({"ROUGE-L": (float(np.mean(scores)), scores)})


def cider(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> Scores:
    """CIDEr-D (n 1..4, sigma 6), which papers call CIDEr, mean over images (Vedantam et
    al. 2015). Range [0, 10].

    Document frequencies are counted in ``references``; ``UndefinedMetric`` where they
    leave every weight 0.
    """
    tokens, reference_tokens = _split(candidates, references)
    if len(candidates) < 2 or not any(chain.from_iterable(reference_tokens)):
        raise UndefinedMetric("CIDEr needs references with words of at least 2 images")
    df = DocumentFrequencies.from_references(reference_tokens, eos=False)
    if df.all_zero:
        raise UndefinedMetric(
            "the references of all images have the same n-grams: no weight left"
        )
    scores = cider_d(tokens, reference_tokens, df)
    return Scores({"CIDEr": (float(np.mean(scores)), scores)})


def _split(
    candidates: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    separator: str | None = None,
) -> tuple[list[list[str]], list[list[list[str]]]]:
    """Tokens of N candidates, and of each candidate's references."""
    tokens = [[text.split(separator) for text in references[key]] for key in candidates]
    return [caption.split(separator) for caption in candidates.values()], tokens


SCORERS: dict[
    str, Callable[[Mapping[str, str], Mapping[str, Sequence[str]]], Scores]
] = {
    "bleu": bleu,
    "meteor": meteor,
    "rouge": rouge,
    "cider": cider,
    "spice": spice,
}
"""Name of a metric -> function of tokenised captions and references."""


def _signs(
    captions: Mapping[str, str], training_captions: Iterable[str] | None, tokenizer: str
) -> dict[str, float]:
    """Signs of bad captions, always on Python tokens, so that machines with and without Java agree."""
    split = tokenizer_of(tokenizer)
    seen = None
    if training_captions is not None:
        seen = {tuple(split(text)) for text in training_captions}
    tokens = list(map(split, captions.values()))
    signs = degeneration_statistics(tokens, seen, tokenizer)
    return {SIGNS.get(name, f"captions/{name}"): signs[name] for name in signs}


def _oracle_scores(
    captions: Mapping[str, str],
    scenes: Mapping[str, Any],
    per_image: dict[str, dict[str, float]],
) -> dict[str, float]:
    """Mean oracle scores; each image's scores are added to ``per_image``."""
    from rl_caption.data.scenes.oracle import OracleScore, oracle

    for image_id, caption in captions.items():
        scores = oracle(caption, scenes[image_id])._asdict().items()
        per_image[image_id] |= {f"oracle/{name}": float(one) for name, one in scores}
    keys = [f"oracle/{name}" for name in OracleScore._fields]
    rows = per_image.values()
    return {key: math.fsum(row[key] for row in rows) / len(rows) for key in keys}


def _signature(
    captions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    tokenizer: str,
    java: bool,
) -> str:
    fields = [
        "COCO-captions",
        f"tokenizer:{tokenizer}",
        "df:references of this call",
        "eos:not counted",
        f"references:{sum(len(references[image_id]) for image_id in captions)}",
        f"ids:{len(captions)} of {len(references)}",
        f"pycocoevalcap{importlib.metadata.version('pycocoevalcap')}",
        *([f"java{java_version()}"] if java else []),
        f"rl-caption{__version__}",
    ]
    return "+".join(fields)


def check_judges(
    judges: Mapping[str, Reward],
    rows: Sequence[Mapping[str, Any]],
    source: str,
    key: str = "judges.",
) -> None:
    """Check that rows have the columns and image files that rewards need, before
    anything long starts.

    ``judges`` is name -> reward. In messages ``source`` says where the rows come from,
    such as ``split 'test'``, and ``key`` is put before the name. Raises
    ``EvaluationError``.
    """
    _, columns = reward_inputs(rows)
    for name, reward in judges.items():
        who = f"{key}{name}: the reward {reward.__name__!r}"
        if "image" in reward.columns:
            check_has_images(who, rows, source)
        missing = sorted(reward.columns - columns.keys())
        if missing:
            raise EvaluationError(
                f"{who} needs the columns {missing}, which {source} has not"
            )


def check_has_images(who: str, rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """Raise ``EvaluationError`` unless all rows have an image file that exists; the
    message says ``who`` needs it.
    """
    if not all("image" in row for row in rows):
        raise EvaluationError(
            f"{who} looks at images, and {source} has none: name a split of data"
        )
    lost = missing_files(row["image"] for row in rows)
    if lost:
        raise EvaluationError(
            f"{who} looks at images, and {len(lost)} of {len(rows)} of {source} are not there, "
            f"such as {lost[0]!r}: set data.image_root to their folder, or data.num_frames where "
            "each is a folder of frames"
        )


def add_judges(
    evaluation: Evaluation,
    rows: Sequence[Mapping[str, Any]],
    captions: Mapping[str, str],
    judges: Mapping[str, Reward],
) -> Evaluation:
    """Return ``evaluation`` with rewards as metrics: ``judge/NAME``, the mean over
    captions in the reward's own range.

    Args:
        evaluation: evaluation of ``captions``.
        rows: the images of the captions, in any order, with ``image_id`` and the
            columns that the rewards need.
        captions: image id -> caption.
        judges: name -> reward; each is called once, with all captions.

    Raises:
        RewardError: a reward failed or returned a score that is not finite; the message names it.
    """
    prompts, columns = reward_inputs(rows)
    texts = [captions[row["image_id"]] for row in rows]
    metrics = dict(evaluation.metrics)
    per_image = {name: dict(values) for name, values in evaluation.per_image.items()}
    signature = evaluation.signature
    for name, reward in tqdm(judges.items(), "judges", disable=None, delay=2):
        logger.info("scoring %d captions by %s", len(texts), name)
        scores = score_captions(reward, f"judges.{name}", prompts, texts, columns)
        for row, score in zip(rows, scores, strict=True):
            per_image[row["image_id"]][JUDGE + name] = score
        metrics[JUDGE + name] = math.fsum(scores) / len(scores)
        signature += f"+{JUDGE}{name}[{reward.signature}]"
    return replace(
        evaluation,
        metrics=metrics,
        per_image=per_image,
        signature=signature,
    )
