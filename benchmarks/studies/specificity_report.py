"""What training on specificity gives and costs: specificity rates, agreement by length, retrieval and hubness."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from benchmarks.studies.encoder_report import RememberingEncoder, texts_of
from rewards.base import Reward
from rewards.clip.backbone import Backbone
from rewards.clip.preprocessing import count_tokens
from rewards.registry import build
from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes import hard_negatives, oracle
from rl_caption.data.scenes.draws import Draws
from rl_caption.meta_evaluation.correlation import UndefinedCorrelation, grouped_tau_b, kendall_tau_b
from rl_caption.meta_evaluation.specificity import (
    Chain,
    ChainScores,
    SpecificityRates,
    make_chains,
    released_specificity_rates,
    score_chains,
    specificity_rates,
)
from rl_caption.meta_evaluation.tables import UNDEFINED, markdown
from rl_caption.reward_models.retrieval import retrieval_recall

logger = logging.getLogger(__name__)

EDGES = (0, 10, 20, 30, 45)
"""Bins of words: 0 to 9, 10 to 19, 20 to 29, 30 to 44, 45 and more."""


@dataclass(frozen=True)
class GrownCaption:
    """A caption of one scene and what the oracle says of it."""

    row: int
    """Which of the scenes."""
    text: str
    source: str
    """``prefix``, ``unit of another scene`` or ``hard negative``."""
    words: int
    f1: float
    """Oracle F1, in [0, 1]."""
    precision: float
    """Oracle precision, in [0, 1]."""


def grown_captions(rows: Sequence[Row], chains: Sequence[Chain | None], seed: int = 0) -> list[GrownCaption]:
    """Judge captions of growing length for R scenes: true ones, and false ones of the same lengths.

    The texts of each scene's chain (its long description cut short after each detail, and the same with a detail of
    another scene), and one hard negative of each true one: one word or number edited, of a kind drawn at random. Every
    text of a scene is judged once.

    Args:
        rows: [R] scenes.
        chains: [R] of the scenes' long descriptions.
        seed: which hard negatives.

    Raises:
        DataError: a row has no scene.
    """
    found: list[GrownCaption] = []
    pairs = list(zip(rows, chains, strict=True))
    for number, (row, chain) in enumerate(tqdm(pairs, desc="judging captions", unit="scene", delay=2, disable=None)):
        if row.get("scene") is None:
            raise DataError(f"image {row['image_id']!r} has no scene: only data.format scenes knows the truth")
        if chain is None:
            continue
        draws = Draws("grown", seed, row["image_id"])
        texts = dict.fromkeys(chain.captions, "prefix")
        for text in chain.negatives:
            texts.setdefault(text, "unit of another scene")
        for text in chain.captions:
            negatives = [negative for _, negative in hard_negatives(row["scene"], text, seed)]
            if negatives:
                texts.setdefault(draws.choice(negatives), "hard negative")
        for text, source in texts.items():
            judged = oracle(text, row["scene"])
            found.append(GrownCaption(number, text, source, len(text.split()), judged.f1, judged.precision))
    return found


@dataclass(frozen=True)
class LengthBin:
    """How a metric agrees with oracle F1 among captions of one length. What is not defined is None."""

    low: int
    """Fewest words."""
    high: int | None
    """Most words; None for the last bin, which has no upper end."""
    captions: int
    tau_b: float | None
    """Over all captions of the bin, in [-1, 1]."""
    within_scene_tau_b: float | None
    """Among the captions of one scene, averaged over scenes, in [-1, 1]."""
    scenes: int
    """Scenes in that mean."""


def tau_by_length(
    scores: Sequence[float], captions: Sequence[GrownCaption], edges: Sequence[int] = EDGES
) -> list[LengthBin]:
    """Compare [N] scores with oracle F1 in bins of words, and over all lengths.

    Longer captions of a description tell more, so a metric that pays for length alone agrees well over all lengths. It
    does less so within a bin, where lengths differ less; give its tau beside that of a metric.

    Args:
        scores: [N] of the captions.
        captions: [N].
        edges: fewest words of each bin, increasing.

    Returns:
        A bin for each edge, then one over all.

    Raises:
        ValueError: another number of scores, one that is not finite, or edges that do not increase.
    """
    if len(scores) != len(captions):
        raise ValueError(f"{len(scores)} scores for {len(captions)} captions: expected as many")
    if not edges or any(after <= before for before, after in pairwise(edges)):
        raise ValueError(f"edges = {list(edges)}: expected increasing numbers of words")
    members: list[list[int]] = [[] for _ in edges]
    for index, caption in enumerate(captions):
        place = bisect_right(edges, caption.words) - 1
        if place >= 0:
            members[place].append(index)
    ends = [*(edge - 1 for edge in edges[1:]), None]
    bins = [_bin(low, high, own, scores, captions) for low, high, own in zip(edges, ends, members, strict=True)]
    return [*bins, _bin(0, None, range(len(captions)), scores, captions)]


def _bin(
    low: int, high: int | None, members: Sequence[int], scores: Sequence[float], captions: Sequence[GrownCaption]
) -> LengthBin:
    own, f1 = [scores[index] for index in members], [captions[index].f1 for index in members]
    if len(own) < 2:
        return LengthBin(low, high, len(own), None, None, 0)
    tau = within = None
    scenes = 0
    try:
        tau = kendall_tau_b(own, f1)
        grouped = grouped_tau_b(own, f1, [captions[index].row for index in members])
        within, scenes = grouped.mean, grouped.groups
    except UndefinedCorrelation:
        pass  # what is not defined stays None
    return LengthBin(low, high, len(own), tau, within, scenes)


class Hubness(NamedTuple):
    """How unevenly candidates occur among the k nearest of all queries."""

    skewness: float
    """Of the numbers of occurrences N_k (Radovanovic et al., JMLR 2010); 0 is even, above 1 is hubs."""
    never: float
    """Share of candidates that occur nowhere, in [0, 1]."""
    largest: float
    """Share of queries that have the most frequent candidate among their k nearest, in [0, 1]."""


@torch.no_grad()
def hubness(queries: Tensor, candidates: Tensor, k: int = 10, chunk_size: int = 512) -> Hubness:
    """Count how often each of M candidates is among the k nearest, by cosine, of N queries.

    Args:
        queries: [N, D] embeddings of any length above 0.
        candidates: [M, D] embeddings, M > k; leave out repetitions, which share their occurrences by chance.
        k: neighbours.
        chunk_size: queries at a time.

    Raises:
        ValueError: wrong shapes, or not more candidates than k.
    """
    if queries.ndim != 2 or candidates.ndim != 2 or queries.shape[1] != candidates.shape[1] or not queries.numel():
        raise ValueError(
            f"queries {tuple(queries.shape)} and candidates {tuple(candidates.shape)}: expected [N, D] and [M, D]"
        )
    if not 1 <= k < len(candidates):
        raise ValueError(f"k = {k} with {len(candidates)} candidates: expected 1 to {len(candidates) - 1}")
    queries, candidates = normalize(queries.float(), dim=1), normalize(candidates.float(), dim=1)
    occurrences = torch.zeros(len(candidates), dtype=torch.long, device=candidates.device)
    for start in range(0, len(queries), chunk_size):
        nearest = (queries[start : start + chunk_size] @ candidates.T).topk(k, dim=1).indices
        occurrences += torch.bincount(nearest.flatten(), minlength=len(candidates))
    counts = occurrences.double()
    deviations = counts - counts.mean()
    spread = deviations.pow(2).mean()
    skewness = float(deviations.pow(3).mean() / spread.pow(1.5)) if spread > 0 else 0.0
    return Hubness(skewness, float((counts == 0).double().mean()), float(counts.max()) / len(queries))


class CaptionLength:
    """Number of words, a metric that looks at nothing else: what pays for length alone."""

    __name__ = "words"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, float("inf"))
    signature = "words"

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[str], **columns: Any) -> list[float]:
        """Return the number of words of each caption."""
        return [float(len(text.split())) for text in completions]


@dataclass
class MetricResult:
    """One metric on growing captions."""

    signature: str
    rates: SpecificityRates
    released: SpecificityRates | None
    """By the released estimator; only for cosines, and None where it skips all captions."""
    lengths: list[LengthBin] = field(default_factory=list)
    """Empty where no truth is known."""


@dataclass
class ModelResult:
    """Retrieval of one dual encoder."""

    signature: str
    long: dict[str, float]
    """Recall at k with long descriptions as texts: ``i2t_r1`` ... ``t2i_r10``, in [0, 1]."""
    short: dict[str, float]
    """The same with the references."""
    text_hubs: Hubness
    """Of long descriptions among the 10 nearest of images."""
    image_hubs: Hubness
    """Of images among the 10 nearest of long descriptions."""
    truncated: int
    """Texts of the study that are longer than the encoder reads."""


class SpecificityStudy:
    """Judges metrics and models on the long descriptions of one split.

    Args:
        rows: with ``long_reference``; scenes too where agreement with the truth is wanted.
        seed: which negatives.
        shuffle_rate: share of negative units whose words are shuffled, in [0, 1].
        edges: fewest words of each bin of lengths.
        processes: that cut descriptions into units.

    Raises:
        DataError: a row has no long description, or no description has two units.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int = 0,
        shuffle_rate: float = 0.0,
        edges: Sequence[int] = EDGES,
        processes: int = 1,
    ) -> None:
        for row in rows:
            if not row.get("long_reference"):
                raise DataError(f"image {row['image_id']!r} has no long_reference: the study needs one for each image")
        # With data.long_captions the references are the descriptions, and what they were is short_references.
        self.rows: list[Row] = [{**row, "references": row.get("short_references", row["references"])} for row in rows]
        self.edges = edges
        self.descriptions = [row["long_reference"] for row in self.rows]
        chains = make_chains(
            self.descriptions, seed, shuffle_rate, [row["image_id"] for row in rows], processes=processes
        )
        self.kept = [number for number, chain in enumerate(chains) if chain is not None]
        if not self.kept:
            raise DataError(f"none of {len(self.rows)} long descriptions has two detail units and a negative")
        self.chains: list[Chain] = [chain for chain in chains if chain is not None]
        known = all(row.get("scene") is not None for row in self.rows)
        self.grown: list[GrownCaption] = grown_captions(self.rows, chains, seed) if known else []
        self.metrics: dict[str, MetricResult] = {}
        self.models: dict[str, ModelResult] = {}

    def judge_metric(self, name: str, metric: Reward, cosines: bool = False) -> None:
        """Add a metric; ``cosines`` says that its scores are (cosine + 1) / 2.

        Raises:
            RewardError: it cannot score a caption.
        """
        logger.info("judging %s on %d descriptions", name, len(self.chains))
        scores = score_chains(metric, self.chains, self._columns(self.kept))
        released = None
        if cosines:
            raw = [ChainScores(*([2 * score - 1 for score in part] for part in chain)) for chain in scores]
            try:
                released = released_specificity_rates(raw)
            except ValueError as error:
                logger.info("%s: the released estimator is not defined: %s", name, error)
        result = MetricResult(metric.signature, specificity_rates(scores), released)
        if self.grown:
            columns = self._columns([caption.row for caption in self.grown])
            result.lengths = tau_by_length(
                metric(None, [caption.text for caption in self.grown], **columns), self.grown, self.edges
            )
        self.metrics[name] = result

    def judge_model(self, label: str, backbone: Backbone) -> None:
        """Add a dual encoder: its SPECS score as a metric, retrieval, hubness. Each image and text is embedded once.

        Raises:
            RewardError: an image cannot be read.
            DataError: an image has no reference.
        """
        encoder = RememberingEncoder(backbone)
        self.judge_metric(
            f"specs of {label}", build("specs", backbone=encoder, scale="shifted", truncate=True), cosines=True
        )
        images = encoder.encode_images([row["image"] for row in self.rows])
        shorts, owners = texts_of(self.rows)
        long = encoder.encode_texts(self.descriptions)
        distinct = list(dict.fromkeys(self.descriptions))
        nearest = min(10, len(distinct) - 1)
        longest = encoder.context_length - 2
        texts = {text for chain in self.chains for part in chain for text in part} | set(self.descriptions)
        self.models[label] = ModelResult(
            backbone.signature,
            retrieval_recall(images, long, torch.arange(len(images))),
            retrieval_recall(images, encoder.encode_texts(shorts), torch.tensor(owners)),
            hubness(images, encoder.encode_texts(distinct), nearest),
            hubness(long, images, nearest),
            sum(count_tokens(text) > longest for text in texts),
        )

    def _columns(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        rows = [self.rows[number] for number in numbers]
        return {name: [row[name] for row in rows] for name in ("image", "image_id", "references")}

    def markdown(self) -> str:
        """Return the tables as text."""
        steps = next(iter(self.metrics.values())).rates.steps if self.metrics else 0
        parts = [f"Specificity over {steps} details of {len(self.chains)} long descriptions", rates_table(self.metrics)]
        if self.grown:
            parts += [f"Agreement with oracle F1 over {len(self.grown)} captions: Kendall's tau_b, by number of words"]
            parts += [lengths_table(self.metrics, within=False)]
            parts += ["The same within scenes: mean tau_b among the captions of one scene"]
            parts += [lengths_table(self.metrics, within=True)]
        if self.models:
            parts += [f"Retrieval among {len(self.rows)} images", retrieval_table(self.models)]
            parts += ["Hubs: candidates among the 10 nearest (of all queries)", hubs_table(self.models)]
        parts += ["\n".join(f"- {name}: `{found.signature}`" for name, found in self.metrics.items())]
        return "\n\n".join(parts) + "\n"

    def content(self) -> dict[str, Any]:
        """Return everything as JSON: shares in [0, 1], tau in [-1, 1], nothing times 100."""
        metrics = {
            name: {
                **asdict(found),
                "rates": found.rates._asdict(),
                "released": found.released and found.released._asdict(),
            }
            for name, found in self.metrics.items()
        }
        models = {
            label: {
                **asdict(found),
                "text_hubs": found.text_hubs._asdict(),
                "image_hubs": found.image_hubs._asdict(),
            }
            for label, found in self.models.items()
        }
        return {"images": len(self.rows), "captions": len(self.grown), "metrics": metrics, "models": models}


def rates_table(metrics: Mapping[str, MetricResult]) -> str:
    """Specificity rates in per cent, by the equations and as released."""
    head = ["metric", "SR_pos, %", "SR_neg, %", "released SR_pos, %", "released SR_neg, %", "of descriptions"]
    lines = []
    for name, found in metrics.items():
        released = found.released
        own = [f"{100 * rate:.1f}" for rate in found.rates[:2]]
        own += [f"{100 * rate:.1f}" for rate in released[:2]] if released else [UNDEFINED, UNDEFINED]
        lines.append([name, *own, str(released.captions) if released else UNDEFINED])
    return markdown(head, lines)


def lengths_table(metrics: Mapping[str, MetricResult], within: bool) -> str:
    """Tau_b times 100, a column for each bin of words."""
    bins = next(iter(metrics.values())).lengths
    head = ["metric, tau_b x100"]
    for number, own in enumerate(bins):
        last = number == len(bins) - 1
        words = "all" if last else f"{own.low}+" if own.high is None else f"{own.low} to {own.high}"
        head.append(f"{words} ({own.scenes if within else own.captions})")
    values = {
        name: [own.within_scene_tau_b if within else own.tau_b for own in found.lengths]
        for name, found in metrics.items()
    }
    return markdown(
        head, [[name, *(UNDEFINED if v is None else f"{100 * v:.1f}" for v in own)] for name, own in values.items()]
    )


def retrieval_table(models: Mapping[str, ModelResult]) -> str:
    """Recall at k in per cent, long descriptions and references, both ways."""
    head = ["model", "texts", *(f"{way} R@{k}, %" for way in ("image to text", "text to image") for k in (1, 5, 10))]
    keys = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)]
    lines = []
    for label, found in models.items():
        for kind, recall in (("long descriptions", found.long), ("references", found.short)):
            lines.append([label, kind, *(f"{100 * recall[key]:.1f}" for key in keys)])
    return markdown(head, lines)


def hubs_table(models: Mapping[str, ModelResult]) -> str:
    """Hubness of long descriptions and of images, and how many texts were cut."""
    head = [
        "model",
        "candidates",
        "skewness, 0 is even",
        "never near, %",
        "queries near the largest hub, %",
        "texts cut",
    ]
    lines = []
    for label, found in models.items():
        for kind, hubs in (("long descriptions", found.text_hubs), ("images", found.image_hubs)):
            shares = [f"{100 * hubs.never:.1f}", f"{100 * hubs.largest:.1f}"]
            lines.append([label, kind, f"{hubs.skewness:.2f}", *shares, str(found.truncated)])
    return markdown(head, lines)
