"""Scores sets of human judgements with metrics and reports how well they agree: the program behind
``judge``.
"""

import hashlib
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rewards.base import (
    Reward,
    RewardError,
    as_texts,
    checked_scores,
    naming,
    reference_lists,
)
from rewards.build import RewardBuilder
from rewards.clip.clipscore import ClipScore
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import TOKENIZER, tokenize, tokenizer_of, untested_texts
from rl_caption.config.build import ConfigError, quiet_libraries
from rl_caption.data.base import DataError
from rl_caption.data.checks import missing_files
from rl_caption.data.plain_files import json_lines, single_spaced
from rl_caption.evaluation import JavaError, check_writable
from rl_caption.evaluation.metrics import SCORERS
from rl_caption.lab.meta_evaluation import sets
from rl_caption.lab.meta_evaluation.config import JudgeSetConfig
from rl_caption.lab.meta_evaluation.figures import (
    NO_REFERENCES,
    Figure,
    Floats,
    SetResult,
    blind_figures,
    order_figures,
    rated_figures,
    write_results,
)
from rl_caption.lab.meta_evaluation.scenes import scenes_sets
from rl_caption.lab.meta_evaluation.sets import JudgementSet
from rl_caption.lab.meta_evaluation.sets.base import READING
from rl_caption.lab.meta_evaluation.sets.pairs import Region
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import config_errors

logger = logging.getLogger(__name__)

NAMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"bleu{n}": (f"BLEU-{n}", "bleu", {"n": n}) for n in (1, 2, 3, 4)},
    "rouge": ("ROUGE-L", "rouge_l", {}),
    "cider": ("CIDEr", "cider", {}),
    "meteor": ("METEOR", f"{__name__}:ToolkitMetric", {"metric": "meteor"}),
    "length": ("length", "rewards.text.concreteness:CaptionLength", {}),
    "spice": ("SPICE", f"{__name__}:ToolkitMetric", {"metric": "spice"}),
}
"""Name on the command line -> heading, name of the reward, its arguments."""
FILE_SCORES = f"{__name__}:FileScores"


class ToolkitMetric:
    """METEOR or SPICE of single captions as a ``Reward``, by the Java programs of the COCO toolkit,
    in [0, 1].

    Captions and references are tokenised by ``rewards.text.tokenize``. Not for training: every call
    starts a Java program. ``JavaError`` where that fails.
    """

    columns = frozenset({"references"})
    bounds = (0.0, 1.0)
    tokenizer = TOKENIZER

    def __init__(self, metric: str) -> None:
        """Choose ``meteor`` or ``spice``."""
        self.__name__ = metric

    @property
    def signature(self) -> str:
        """Name and version of the toolkit."""
        from importlib.metadata import version

        return f"{self.__name__.upper()}[pycocoevalcap{version('pycocoevalcap')}]+ptb"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``references`` (N lists of captions)."""
        texts = as_texts(completions)
        candidates, references = {}, {}
        lists = reference_lists(columns, self.__name__, len(texts))
        for number, (text, own) in enumerate(zip(texts, lists, strict=True)):
            candidates[str(number)] = " ".join(tokenize(text))
            references[str(number)] = [
                " ".join(tokenize(reference)) for reference in own
            ]
        with naming(
            f"metric {self.__name__!r}", (ValueError,), RewardError, (JavaError,)
        ):
            scored = SCORERS[self.__name__](candidates, references)
        _, scores = scored.values[self.__name__.upper()]
        return checked_scores(self, scores, len(texts))


class FileScores:
    """Scores that were computed elsewhere, as a ``Reward``.

    Args:
        file: JSON lines with ``image`` (the name of its file, or the id that the set has for it),
            ``caption`` and ``score``; equal pairs may be repeated with an equal score.
        heading: of the metric, in messages.

    Raises:
        DataError: the file is missing or damaged, or has two scores of one caption; it names the
            line.
    """

    columns = frozenset({"image_id"})
    bounds = (-math.inf, math.inf)

    def __init__(self, file: str, heading: str = "scores") -> None:
        self.__name__, self.file = heading, Path(file)
        self._scores: dict[tuple[str, str], float] = {}
        for _, where, row in json_lines(self.file):
            with naming(where, READING, DataError):
                key = str(row["image"]), single_spaced(row["caption"])
                score = float(row["score"])
                if self._scores.setdefault(key, score) != score:
                    raise ValueError(
                        f"'score' is {score:g}, and {self._scores[key]:g} before"
                    )

    @property
    def signature(self) -> str:
        """Name of the file and a fingerprint of its scores."""
        scores = repr(sorted(self._scores.items())).encode(errors="surrogatepass")
        return f"{self.file.name}[{hashlib.sha256(scores).hexdigest()[:12]}]"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Look up the scores of N captions of the images ``image_id``. ``RewardError`` for one that
        is not there.
        """
        keys = [
            (str(image), single_spaced(text))
            for image, text in zip(
                columns["image_id"], as_texts(completions), strict=True
            )
        ]
        absent = [key for key in keys if key not in self._scores]
        if absent:
            raise RewardError(
                f"{self.file} has no score of {len(absent)} of {len(keys)} captions, such as image "
                f"and caption {absent[0]}"
            )
        return [self._scores[key] for key in keys]


def build_metrics(
    names: str | Sequence[str],
    judges: Mapping[str, JudgeConfig],
    judgement_sets: Sequence[JudgementSet] = (),
    scores: Mapping[str, str] | None = None,
) -> dict[str, Reward]:
    """Return heading -> metric.

    Args:
        names: of ``NAMES``, ``bleu`` (BLEU-1 to 4), or rewards that need no arguments; with commas,
            or a list.
        judges: heading -> reward with arguments. CIDEr-D is without EOS unless its arguments say
            otherwise.
        judgement_sets: the sets that will be scored.
        scores: heading -> file of scores, as for ``FileScores``.

    Raises:
        ConfigError: there is no metric, one is there twice or does not exist, or one needs what a
            set does not have.
    """
    asked: list[tuple[str, str, str, dict[str, Any]]] = []
    listed = names.split(",") if isinstance(names, str) else names
    for name in filter(None, map(str.strip, listed)):
        for one in [f"bleu{n}" for n in (1, 2, 3, 4)] if name == "bleu" else [name]:
            asked.append(("metrics", *NAMES.get(one, (one, one, {}))))
    for heading, judge in judges.items():
        asked.append(
            (f"judges.{heading}", heading, judge.target or heading, dict(judge.kwargs))
        )
    for heading, file in (scores or {}).items():
        options = {"file": file, "heading": heading}
        asked.append((f"scores.{heading}", heading, FILE_SCORES, options))
    if not asked:
        raise ConfigError(
            f"metrics is {names!r}, judges and scores are empty: name a metric"
        )
    metrics: dict[str, Reward] = {}
    builder = RewardBuilder()
    for key, heading, reward, arguments in asked:
        with config_errors(key):
            if heading in metrics:
                raise ConfigError(f"{heading} is listed twice: give it another heading")
            metric = metrics[heading] = builder.build(reward, arguments)
            check_columns(heading, metric.columns, judgement_sets)
    return metrics


def check_columns(
    heading: str, columns: frozenset[str], judgement_sets: Sequence[JudgementSet]
) -> None:
    """Refuse a metric that needs columns or images which the sets do not have."""
    lacking = [
        f"the column {name!r}" for name in columns - {"references", "image", "image_id"}
    ]
    for judged in judgement_sets:
        if "references" in columns and not judged.has_references:
            lacking.append(f"references, which {judged.name} has none of")
        if "image" in columns and judged.images is None:
            lacking.append(f"images, which {judged.name} was found without (--images)")
        elif "image" in columns:
            images = judged.images or ()
            files = {
                image.path if isinstance(image, Region) else image for image in images
            }
            lost = sorted(missing_files(files))
            if lost:
                count = (
                    f"{len(lost)} of {len(files)} are not there, such as {lost[0]!r}"
                )
                lacking.append(f"images of {judged.name}: {count} (--images)")
    if lacking:
        raise ConfigError(f"{heading} needs {lacking[0]}; see docs/judging.md")


def compare_with_people(config: JudgeSetConfig) -> str:
    """Score a set with all metrics, write the tables and return them as Markdown.

    The tables are written after every metric, so that finished figures survive one that fails.

    Raises:
        ConfigError: a setting or metric that does not exist, or a metric that needs what the set
            does not have.
        DataError: files that are missing, wrong or incomplete.
        RewardError: a metric failed.
        EvaluationError: the results cannot be written.
    """
    quiet_libraries()
    folder = check_writable(config.out)
    if config.set == "scenes":
        judgement_sets: Sequence[JudgementSet] = scenes_sets(config.scenes, config.seed)
    elif config.data is None:
        raise ConfigError(
            f"data is not set: name the folder of the files of {config.set!r}"
        )
    else:
        files = config.data, config.images
        judgement_sets = sets.load(
            config.set, *files, config.partial, config.set_kwargs
        )
    metrics = build_metrics(
        config.metrics, config.judges, judgement_sets, config.scores
    )
    draws = config.bootstrap, config.seed
    results: list[SetResult] = []
    for judged in judgement_sets:
        counts = len(judged.rows), dict(judged.excluded)
        result = SetResult(judged.name, _describe(judged), judged.convention, *counts)
        results.append(result)
        if judged.text_alone:
            result.drawn = "captions"
        for heading, scores in judged.released.items():
            result.figures[heading] = rated_figures(judged, scores, *draws)
            result.signatures[heading] = "as released with the set"
        for heading, metric in metrics.items():
            _add_metric(result, judged, heading, metric, config)
            write_results(folder, config, results)
        for heading, figures in blind_figures(judged, *draws).items():
            result.figures[heading] = figures
            result.signatures[heading] = (
                "number of characters; equal ones in random order"
            )
            result.blind.append(heading)
    paths = write_results(folder, config, results)
    print(f"wrote {', '.join(str(path) for path in paths)}", file=sys.stderr)
    return paths[0].read_text(encoding="utf-8")


def _add_metric(
    result: SetResult,
    judged: JudgementSet,
    heading: str,
    metric: Reward,
    config: JudgeSetConfig,
) -> None:
    """Add the figures of a metric to a result, or why it is left out (no Java)."""
    logger.info("%s: scoring by %s", judged.name, heading)
    try:
        with naming(f"{heading} on {judged.name}", (RewardError,), RewardError):
            figures = score_set(judged, metric, config.bootstrap, config.seed)
    except JavaError as error:
        result.left_out[heading] = str(error)
        return
    result.figures[heading] = figures
    signature = metric.signature
    if isinstance(metric, CiderD) and metric.df is None:
        signature += "+df[one document for each judgement]"
    texts = [*judged.captions]
    for references in chain.from_iterable(row.references for row in judged.rows):
        texts += references
    result.signatures[heading] = signature + untested_texts(metric, texts)
    if not metric.columns:
        result.blind.append(heading)


def _describe(judged: JudgementSet) -> str:
    count, images = len(judged.rows), f" of {len(set(judged.image_ids))} images"
    if judged.is_rated:
        images = "" if judged.text_alone else images
        different = f"{len(set(judged.ratings))} different ratings"
        return f"{count} judgements of captions{images}, {different}"
    size = len(judged.rows[0].captions)
    groups = "pairs of" if size == 2 else f"groups of {size}"
    kinds = len({row.kind for row in judged.rows})
    return f"{count} {groups} captions{images}" + (
        f", {kinds} kinds" if kinds > 1 else ""
    )


def score_set(
    judged: JudgementSet, metric: Reward, resamples: int = 0, seed: int = 0
) -> list[Figure]:
    """Score a set with one metric and compute its figures of agreement, with intervals of
    ``resamples`` draws.

    CIDEr-D without document frequencies of its own counts one document for each judgement, not one
    for each image, as the published figures do (pycocoevalcap on all judgements in one call).
    """
    scores: dict[str, Floats] = {}
    if "references" not in metric.columns:
        scores[NO_REFERENCES] = _score(judged, metric, [None])[0]
    elif isinstance(metric, CiderD) and metric.df is None:
        for number, name in enumerate(judged.conditions):
            references = [row.references[number] for row in judged.rows]
            scores[name] = _score(judged, _with_df(metric, references), [number])[0]
    else:
        found = _score(judged, metric, range(len(judged.conditions)))
        scores = dict(zip(judged.conditions, found, strict=True))
    if judged.is_rated:
        (values,) = scores.values()
        return rated_figures(judged, values[:, 0].tolist(), resamples, seed)
    cosines = None
    if judged.texts_above and isinstance(metric, ClipScore):
        embeddings = metric.embed_texts(judged.captions).astype(np.float64)
        rows = embeddings.reshape(len(judged.rows), -1, embeddings.shape[1])
        cosines = rows @ rows.transpose(0, 2, 1)  # [N, K, K]
    return order_figures(judged, scores, cosines, resamples, seed)


def _with_df(metric: CiderD, references: Sequence[Sequence[str]]) -> Any:
    """CIDEr-D with the document frequencies of a set, one document for each judgement."""
    split = tokenizer_of(metric.tokenizer)
    tokens = {row: [split(text) for text in row] for row in set(map(tuple, references))}
    how: dict[str, Any] = {
        "eos": metric.eos,
        "n": metric.n,
        "tokenizer": metric.tokenizer,
    }
    df = DocumentFrequencies.from_references(
        (tokens[tuple(row)] for row in references), **how
    )
    return CiderD(df, sigma=metric.sigma, **how)


def _score(
    judged: JudgementSet, metric: Reward, conditions: Sequence[int | None]
) -> list[Floats]:
    """Score all captions in one call, equal ones once: [N, K] scores for each of some conditions.

    A condition is the number of the list of references that the metric sees; None shows none.
    """
    sees = "image" in metric.columns
    keys = []
    columns: dict[tuple[Any, ...], dict[str, Any]] = {}
    for condition in conditions:
        for row in judged.rows:
            references = () if condition is None else tuple(row.references[condition])
            image = row.image if sees else None
            values = {
                "image_id": row.image_id,
                "image": image,
                "references": list(references),
            }
            for caption in row.captions:
                # Two regions of one file are two images.
                keys.append((row.image_id, str(image), caption, references))
                columns.setdefault(keys[-1], values)
    names = (
        ["image_id"] + ["image"] * sees + ["references"] * (conditions[0] is not None)
    )
    seen = {name: [values[name] for values in columns.values()] for name in names}
    found = metric(None, [caption for _, _, caption, _ in columns], **seen)
    by_key = dict(
        zip(columns, checked_scores(metric, found, len(columns)), strict=True)
    )
    found_by_row = np.array([by_key[key] for key in keys], np.float64)
    return list(found_by_row.reshape(len(conditions), len(judged.rows), -1))
