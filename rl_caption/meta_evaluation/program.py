"""Scores the captions of sets of judgements with metrics and compares: the program behind ``judge.py``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rewards.base import Reward, RewardError, checked_scores
from rewards.images import ImageSource
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import tokenize, untested_texts
from rl_caption.config.build import ConfigError, quiet_libraries
from rl_caption.config.checks import check
from rl_caption.evaluation import JavaError, check_writable
from rl_caption.meta_evaluation.config import JudgeSetConfig
from rl_caption.meta_evaluation.figures import NO_REFERENCES, Figure, pair_figures, rated_figures
from rl_caption.meta_evaluation.metrics import LeftOut, metric_specs
from rl_caption.meta_evaluation.scenes import scenes_sets
from rl_caption.meta_evaluation.sets import CaptionPairs, JudgementSet, RatedCaptions, load
from rl_caption.meta_evaluation.sets.pairs import Region
from rl_caption.meta_evaluation.tables import SetResult, write_results

logger = logging.getLogger(__name__)
SCENES = "scenes"


def compare_with_people(config: JudgeSetConfig) -> str:
    """Score a set with all metrics, write the tables, return them as Markdown.

    Raises:
        ConfigError: a setting or metric that does not exist, or a metric that needs what the set does not have.
        DataError: files of the set are missing, wrong or incomplete.
        RewardError: a metric failed.
        EvaluationError: the results cannot be written.
    """
    quiet_libraries()
    check(config)
    folder = check_writable(config.out)
    parts = _read(config)
    specs = metric_specs(config.metrics, config.judges)
    for spec in specs:  # before anything is loaded
        check_columns(spec.heading, spec.columns, parts)
    metrics = {spec.heading: spec.build() for spec in specs}
    for heading, metric in metrics.items():
        if not isinstance(metric, LeftOut):
            check_columns(heading, metric.columns, parts)
    results = [_judged(part, metrics, config.bootstrap, config.seed) for part in parts]
    paths = write_results(folder, config, results)
    print(f"wrote {', '.join(str(path) for path in paths)}", file=sys.stderr)
    return paths[0].read_text(encoding="utf-8")


def _read(config: JudgeSetConfig) -> Sequence[JudgementSet]:
    if config.set == SCENES:
        unused = [key for key in ("data", "images", "set_kwargs") if getattr(config, key)]
        if unused:
            raise ConfigError(f"{unused[0]} is of no use with set: scenes, whose settings are under scenes.data")
        return scenes_sets(config.scenes, config.seed)
    if config.data is None:
        raise ConfigError(f"data is not set: name the folder of the files of {config.set!r} (docs/judging.md)")
    return load(config.set, config.data, config.images, config.partial, config.set_kwargs)


def check_columns(heading: str, columns: frozenset[str], parts: Sequence[JudgementSet]) -> None:
    """See to it that sets have the columns that a metric needs, before anything is scored.

    Raises:
        ConfigError: which metric needs what, and what would help.
    """
    other = sorted(columns - {"references", "image", "image_id"})
    if other:
        raise ConfigError(f"{heading} needs the columns {other}, which sets of judgements do not have")
    for part in parts:
        _check_part(heading, columns, part)


def _check_part(heading: str, columns: frozenset[str], part: JudgementSet) -> None:
    if "references" in columns and not part.references:
        raise ConfigError(
            f"{heading} compares with references, and {part.name} was found without any: choose a metric that looks at "
            "images alone, or see docs/judging.md for the file that has them"
        )
    if "image" in columns:
        if part.images is None:
            raise ConfigError(
                f"{heading} looks at images, and those of {part.name} were not found: set images to their folder "
                "(docs/judging.md says where to get them)"
            )
        files = {image.path if isinstance(image, Region) else image for image in part.images}
        lost = sorted(str(file) for file in files if isinstance(file, str | Path) and not os.path.isfile(file))
        if lost:
            raise ConfigError(
                f"{heading} looks at images, and {len(lost)} of {len(files)} of {part.name} are not there, such as "
                f"{lost[0]!r}: set images to their folder"
            )


def _judged(part: JudgementSet, metrics: Mapping[str, Reward | LeftOut], resamples: int, seed: int) -> SetResult:
    count = len(part.captions) if isinstance(part, RatedCaptions) else len(part.first)
    result = SetResult(part.name, _described(part), part.convention, count, dict(part.excluded))
    for heading, metric in metrics.items():
        if isinstance(metric, LeftOut):
            result.left_out[heading] = metric.reason
            continue
        logger.info("%s: scoring by %s", part.name, heading)
        try:
            result.figures[heading] = score_set(part, metric, resamples, seed)
        except JavaError as error:
            result.left_out[heading] = str(error)
            continue
        except RewardError as error:
            raise RewardError(f"{heading} on {part.name}: {error}") from error
        result.signatures[heading] = _signature(metric, part)
    return result


def score_set(part: JudgementSet, metric: Reward, resamples: int = 0, seed: int = 0) -> list[Figure]:
    """Score a set with one metric and compare.

    CIDEr-D without document frequencies of its own counts one document for each judgement, as the published figures
    do (pycocoevalcap on all judgements at once), not one for each image.

    Raises:
        RewardError: the metric failed.
    """
    if isinstance(part, RatedCaptions):
        (scores,) = _scores(part, metric, [(part.captions, part.references)])
        return rated_figures(part, scores, resamples, seed)
    conditions: Mapping[str, Any] = part.references if "references" in metric.columns else {NO_REFERENCES: None}
    batches = [(texts, references) for references in conditions.values() for texts in (part.first, part.second)]
    scored = _scores(part, metric, batches)
    first, second = (dict(zip(conditions, own, strict=True)) for own in (scored[::2], scored[1::2]))
    return pair_figures(part, first, second, resamples, seed)


Batch = tuple[Sequence[str], Sequence[Sequence[str]] | None]
"""[N] captions of the N images of a set, and [N] lists of references."""


def _scores(part: JudgementSet, metric: Reward, batches: Sequence[Batch]) -> list[list[float]]:
    """Score each of the batches, [N] captions, in one call, in which equal rows are scored a single time.

    CIDEr-D that takes document frequencies from what it is given is called for each batch.
    """
    scorers: list[Any] = [metric]
    if isinstance(metric, CiderD) and metric.df is None:
        frequencies = [_document_frequencies(references or [], metric) for _, references in batches]
        scorers = [CiderD(df, metric.eos, metric.n, metric.sigma) for df in frequencies]
    images = list(part.images) if "image" in metric.columns and part.images is not None else None
    looked_at = [None] * len(part.image_ids) if images is None else [_identity(image) for image in images]
    keys = [
        list(zip(part.image_ids, looked_at, texts, map(tuple, references or [()] * len(texts)), strict=True))
        for texts, references in batches
    ]
    found = []
    for scorer, own in zip(scorers, [keys] if len(scorers) == 1 else [[batch] for batch in keys], strict=True):
        numbers = {key: number for batch in own for number, key in enumerate(batch)}  # different rows: one of each
        columns: dict[str, Any] = {"image_id": [key[0] for key in numbers]}
        if batches[0][1] is not None:
            columns["references"] = [list(key[3]) for key in numbers]
        if images is not None:
            columns["image"] = [images[number] for number in numbers.values()]
        scores = checked_scores(metric, scorer(None, [key[2] for key in numbers], **columns), len(numbers))
        by_key = dict(zip(numbers, scores, strict=True))
        found += [[by_key[key] for key in batch] for batch in own]
    return found


def _identity(image: ImageSource) -> Hashable:
    """What tells images apart: two regions of one file are two images."""
    return image if isinstance(image, str | Path | Region) else id(image)


def _document_frequencies(references: Sequence[Sequence[str]], metric: CiderD) -> DocumentFrequencies:
    rows = [tuple(row) for row in references]
    tokens = {row: [tokenize(text) for text in row] for row in dict.fromkeys(rows)}
    return DocumentFrequencies.from_references((tokens[row] for row in rows), eos=metric.eos, n=metric.n)


def _signature(metric: Reward, part: JudgementSet) -> str:
    own = isinstance(metric, CiderD) and metric.df is None
    return (
        metric.signature
        + ("+df[one document for each judgement]" if own else "")
        + untested_texts(metric, _texts(part))
    )


def _texts(part: JudgementSet) -> Iterator[str]:
    """All captions and references of a set."""
    if isinstance(part, RatedCaptions):
        yield from part.captions
        yield from chain(*(part.references or ()))
        return
    yield from chain(part.first, part.second, *(chain(*rows) for rows in part.references.values()))


def _described(part: JudgementSet) -> str:
    images = len(set(part.image_ids))
    if isinstance(part, CaptionPairs):
        kinds = len(set(part.kinds))
        return f"{len(part.first)} pairs of captions of {images} images" + (f", {kinds} kinds" if kinds > 1 else "")
    return f"{len(part.captions)} judgements of captions of {images} images, {len(set(part.ratings))} different ratings"
