"""The program ``judge``: how well metrics agree with sets of human judgements."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
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
from rewards.clip.clipscore import ClipScore
from rewards.text.cider import CiderD
from rewards.text.tokenize import TOKENIZER, tokenize, untested_texts
from rl_caption.config.build import ConfigError, quiet_libraries
from rl_caption.data.checks import missing_files
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation import JavaError, check_writable
from rl_caption.evaluation.confidence import Floats
from rl_caption.evaluation.metrics import SCORERS
from rl_caption.evaluation.results import LEFT_OUT, markdown
from rl_caption.lab.config import JudgeSetConfig
from rl_caption.lab.meta_evaluation import sets
from rl_caption.lab.meta_evaluation.figures import (
    Figure,
    order_figures,
    rated_figures,
)
from rl_caption.lab.meta_evaluation.sets import JudgementSet
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges

logger = logging.getLogger(__name__)

BLEU = ("bleu1", "bleu2", "bleu3", "bleu4")
NAMES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: (f"BLEU-{name[-1]}", "bleu", {"n": int(name[-1])}) for name in BLEU},
    "rouge": ("ROUGE-L", "rouge_l", {}),
    "cider": ("CIDEr", "cider", {}),
    "meteor": ("METEOR", f"{__name__}:ToolkitMetric", {"metric": "meteor"}),
    "length": ("length", "rewards.text.concreteness:CaptionLength", {}),
    "spice": ("SPICE", f"{__name__}:ToolkitMetric", {"metric": "spice"}),
}
"""Name on the command line -> heading, name of the reward, its arguments."""
CORRELATED = ("tau", "pearson", "spearman")
PLAIN = "1 / r^2"
"""Figure that is printed without the factor 100."""


class ToolkitMetric:
    """METEOR or SPICE of single captions as a ``Reward``, by the Java programs of the
    COCO toolkit, in [0, 1].

    Captions and references are tokenised by ``rewards.text.tokenize``. Not for
    training: every call starts a Java program. Raises ``JavaError`` where this fails.
    """

    columns = frozenset({"references"})
    bounds = (0.0, 1.0)
    tokenizer = TOKENIZER

    def __init__(self, metric: str) -> None:
        """Choose ``meteor`` or ``spice``."""
        self.__name__ = metric
        toolkit = f"pycocoevalcap{version('pycocoevalcap')}"
        self.signature = f"{metric.upper()}[{toolkit}]+ptb"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``references`` (N lists of captions)."""
        texts = as_texts(completions)
        lists = reference_lists(columns, self.__name__, len(texts))
        candidates, references = {}, {}
        for number, (text, captions) in enumerate(zip(texts, lists, strict=True)):
            candidates[str(number)] = " ".join(tokenize(text))
            references[str(number)] = [" ".join(tokenize(one)) for one in captions]
        with naming(f"metric {self.__name__!r}", (ValueError,), RewardError):
            scored = SCORERS[self.__name__](candidates, references)
        _, scores = scored.values[self.__name__.upper()]
        return checked_scores(self, scores, len(texts))


def build_metrics(
    names: str | Sequence[str],
    judges: Mapping[str, JudgeConfig],
    judgement_sets: Sequence[JudgementSet] = (),
) -> dict[str, Reward]:
    """Build metrics: heading -> metric.

    Args:
        names: names in ``NAMES``, ``bleu`` (BLEU-1 to 4), or rewards that need no
            arguments; a list, or separated by commas.
        judges: heading -> reward with arguments. CIDEr-D is without EOS unless its
            arguments say otherwise.
        judgement_sets: the sets that will be scored.

    Raises:
        ConfigError: a metric does not exist, or a set lacks what it needs.
    """
    asked = {}
    for name in names.split(",") if isinstance(names, str) else names:
        for one in BLEU if name.strip() == "bleu" else [name.strip()]:
            heading, target, kwargs = NAMES.get(one, (one, one, {}))
            asked[heading] = JudgeConfig(target=target, kwargs=kwargs)
    asked.pop("", None)
    metrics = build_judges(asked, None, [], "metrics")
    for heading in metrics.keys() & judges.keys():
        raise ConfigError(f"{heading} is listed twice: give it another heading")
    metrics |= build_judges(judges, None, [], "judges")
    for heading, metric in metrics.items():
        check_columns(heading, metric.columns, judgement_sets)
    return metrics


def check_columns(
    heading: str, columns: frozenset[str], judgement_sets: Sequence[JudgementSet]
) -> None:
    """Raise ``ConfigError`` where a metric needs columns or images that a set lacks."""
    lacking = [
        f"the column {name!r}" for name in columns - {"references", "image", "image_id"}
    ]
    for judged in judgement_sets:
        if "references" in columns and not judged.references:
            lacking.append(f"references, which {judged.name} has none of")
        if "image" in columns and not judged.images:
            lacking.append(f"images, which {judged.name} was found without (--images)")
        elif "image" in columns:
            files = {getattr(image, "path", image) for image in judged.images}
            lost = sorted(missing_files(files))
            if lost:
                count = f"{len(lost)} of {len(files)}, such as {lost[0]!r}"
                lacking.append(f"images of {judged.name}, but lacks {count} (--images)")
    if lacking:
        raise ConfigError(f"{heading} needs {lacking[0]}; see docs/judging.md")


@dataclass
class SetResult:
    """Figures of all metrics on one set, or on one part of it."""

    name: str
    description: str
    convention: str
    excluded: Mapping[str, int]
    """Reason for leaving out judgements of the files -> their number."""
    drawn: str
    """Units that are drawn with replacement for the intervals: images or captions."""
    figures: dict[str, list[Figure]] = field(default_factory=dict)
    """Heading of a metric -> its figures; empty for a metric that could not be
    computed.
    """
    signatures: dict[str, str] = field(default_factory=dict)
    """Heading of a metric -> its signature, or why it could not be computed."""


def compare_with_people(config: JudgeSetConfig) -> str:
    """Score a set with all metrics, write the tables and return them as Markdown.

    The tables are written after every metric, so that finished figures survive a
    failure.

    Raises:
        ConfigError: a setting or metric does not exist, or the set lacks what a metric
            needs.
        DataError: files are missing, wrong or incomplete.
        RewardError: a metric failed.
        EvaluationError: the results cannot be written.
    """
    quiet_libraries()
    folder = check_writable(config.out)
    files = config.data, config.images
    judgement_sets = sets.load(
        config.set,
        *files,
        config.partial,
        config.set_kwargs,
    )
    metrics = build_metrics(config.metrics, config.judges, judgement_sets)
    draws = config.bootstrap, config.seed
    results: list[SetResult] = []
    for judged in judgement_sets:
        drawn = "captions" if judged.text_alone else "images"
        about = _describe(judged), judged.convention, judged.excluded
        result = SetResult(judged.name, *about, drawn)
        results.append(result)
        for heading, scores in judged.released.items():
            result.figures[heading] = rated_figures(judged, scores, *draws)
            result.signatures[heading] = "as released with the set"
        for heading, metric in metrics.items():
            logger.info("%s: scoring by %s", judged.name, heading)
            result.figures[heading] = []
            try:
                with naming(f"{heading} on {judged.name}", (RewardError,), RewardError):
                    result.figures[heading] = score_set(judged, metric, *draws)
                result.signatures[heading] = _signature(judged, metric)
            except JavaError as error:
                result.signatures[heading] = f"left out: {error}"
            write_results(folder, config, results)
    text = write_results(folder, config, results)
    print(f"wrote agreement.md and agreement.json in {folder}", file=sys.stderr)
    return text


def _signature(judged: JudgementSet, metric: Reward) -> str:
    """Signature of a metric on a set, with the number of texts that its tokenizer was
    not tested on.
    """
    signature = metric.signature
    if isinstance(metric, CiderD) and metric.df is None:
        signature += "+df[one document for each judgement]"
    texts = list(judged.captions)
    for row in judged.rows:
        texts += chain.from_iterable(row.references)
    return signature + untested_texts(metric, texts)


def _describe(judged: JudgementSet) -> str:
    what = "judgements" if judged.ratings else "pairs or groups of captions"
    images = "" if judged.text_alone else f", {len(set(judged.image_ids))} images"
    return f"{len(judged.rows)} {what}{images}"


def score_set(
    judged: JudgementSet, metric: Reward, resamples: int = 0, seed: int = 0
) -> list[Figure]:
    """Score a set with one metric, and compute its figures of agreement with bootstrap
    intervals of ``resamples`` draws.
    """
    conditions = judged.conditions if "references" in metric.columns else [""]
    scores = {
        name: _score(judged, metric, number) for number, name in enumerate(conditions)
    }
    if judged.ratings:
        (values,) = scores.values()
        return rated_figures(judged, values[:, 0].tolist(), resamples, seed)
    cosines = None
    if judged.texts_above and isinstance(metric, ClipScore):
        embeddings = metric.embed_texts(judged.captions).astype(np.float64)
        rows = embeddings.reshape(len(judged.rows), -1, embeddings.shape[1])
        first, second = np.triu_indices(rows.shape[1], k=1)
        cosines = (rows @ rows.transpose(0, 2, 1))[:, first, second]
    return order_figures(judged, scores, cosines, resamples, seed)


def _score(judged: JudgementSet, metric: Reward, condition: int) -> Floats:
    """Score all captions in one call, equal captions once: [N, K].

    ``condition`` is the index of the list of references that the metric sees. CIDEr-D
    without document frequencies of its own counts one document for each judgement
    instead of each image, as the published figures do (pycocoevalcap on all judgements
    in one call).
    """
    counting = isinstance(metric, CiderD) and metric.df is None
    keys, images = [], {}
    for number, row in enumerate(judged.rows):
        name = str(number) if counting else row.image_id
        # Two regions of one file are two images.
        image = row.image if "image" in metric.columns else None
        row_texts = row.references[condition] if "references" in metric.columns else ()
        for caption in row.captions:
            keys.append((name, str(image), tuple(row_texts), caption))
            images[keys[-1]] = image
    names, _, references, texts = zip(*images, strict=True)
    columns = {
        "image_id": names,
        "image": list(images.values()),
        "references": list(map(list, references)),
    }
    needed = {"image_id", *metric.columns}
    arguments = {name: columns[name] for name in columns if name in needed}
    results = checked_scores(metric, metric(None, list(texts), **arguments), len(texts))
    scores = dict(zip(images, results, strict=True))
    return np.array([scores[key] for key in keys]).reshape(len(judged.rows), -1)


def write_results(
    folder: Path, config: JudgeSetConfig, results: Sequence[SetResult]
) -> str:
    """Write ``agreement.md``, which is returned, and ``agreement.json``."""
    text = "\n".join("\n\n".join(as_markdown(result, config)) for result in results)
    write_text(folder / "agreement.md", text)
    records = [asdict(result) for result in results]
    content = {"config": config.model_dump(mode="json"), "sets": records}
    write_json(folder / "agreement.json", content)
    return text


def as_markdown(result: SetResult, config: JudgeSetConfig) -> Iterator[str]:
    """Yield a heading; a line for each metric, a column for each figure, times 100 as
    papers print them; further tables; notes.
    """
    yield f"## {result.name}: {result.description}"
    figures = list(chain.from_iterable(result.figures.values()))
    for table in dict.fromkeys(["main", *(figure.table for figure in figures)]):
        head = dict.fromkeys(_title(one) for one in figures if one.table == table)
        lines = []
        for metric, row in result.figures.items():
            cells = {_title(one): _cell(one) for one in row if one.table == table}
            lines.append([metric, *(cells.get(title, LEFT_OUT) for title in head)])
        yield markdown(["metric", *head], lines)
    notes = [f"Convention: {result.convention}"]
    for reason, count in result.excluded.items():
        notes += [f"Excluded: {count}, {reason}"] if count else []
    if config.bootstrap:
        notes.append(
            f"In brackets: 95 % bootstrap interval, {config.bootstrap} resamples of {result.drawn}"
        )
    if any(figure.published for figure in figures):
        notes.append(f"Bold: what papers print for {result.name}")
    if any(figure.value is None for figure in figures):
        notes.append(f"{LEFT_OUT}: not defined, as all scores or all ratings are equal")
    for metric, row in result.figures.items():
        notes += dict.fromkeys(f"{metric}: {one.note}" for one in row if one.note)
    for metric, signature in result.signatures.items():
        notes.append(f"{metric}: `{signature}`")
    yield "\n".join(f"- {note}" for note in notes) + "\n"


def _title(figure: Figure) -> str:
    title = figure.name
    if not title.startswith(PLAIN):
        title += ", x100" if title.startswith(CORRELATED) else ", % right"
    return f"**{title}**" if figure.published else title


def _cell(figure: Figure) -> str:
    if figure.value is None:
        return LEFT_OUT
    if figure.name.startswith(PLAIN):
        return f"{figure.value:.4g}"
    ends = [end for end in (figure.low, figure.high) if end is not None]
    value, *interval = [f"{100 * number:z.1f}" for number in (figure.value, *ends)]
    return f"{value} [{', '.join(interval)}]" if interval else value
