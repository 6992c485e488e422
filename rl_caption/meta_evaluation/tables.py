"""Markdown tables of dual encoders and of metrics."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_caption.data.scenes import NEGATIVE_KINDS
from rl_caption.meta_evaluation.agreement import Agreement
from rl_caption.meta_evaluation.captions import JudgedCaptions
from rl_caption.meta_evaluation.pairwise import ALL

UNDEFINED = "–"


@dataclass(frozen=True)
class ModelReport:
    """A dual encoder: its size, and retrieval on a split."""

    folder: str
    signature: str
    parameters: int
    retrieval: dict[str, float]
    """``i2t_r1`` ... ``t2i_r10``, in [0, 1]."""

    @property
    def fp32_mib(self) -> float:
        """Size of the parameters in float32, in MiB."""
        return self.parameters * 4 / 2**20


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Lay a table out: the first column to the left, numbers to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def models_table(models: Mapping[str, ModelReport]) -> str:
    """Size, and recall at k in per cent in both directions."""
    keys = list(next(iter(models.values())).retrieval)
    names = {"i2t": "image to text", "t2i": "text to image"}
    head = ["model", "parameters, millions", "fp32, MiB"]
    head += [f"{names[key[:3]]} R@{key.removeprefix(key[:3] + '_r')}, %" for key in keys]
    lines = [
        [label, f"{model.parameters / 1e6:.2f}", f"{model.fp32_mib:.1f}"]
        + [f"{100 * model.retrieval[key]:.1f}" for key in keys]
        for label, model in models.items()
    ]
    return markdown(head, lines)


def agreement_table(metrics: Mapping[str, Agreement]) -> str:
    """Kendall's tau against oracle F1, times 100 as papers print it."""
    head = ["metric", "tau_b, x100", "tau_c, x100", "tau_b within images, x100", "images scored all alike"]
    lines = []
    for name, found in metrics.items():
        taus = [_tau(value) for value in (found.tau_b, found.tau_c, found.within_image_tau_b)]
        lines.append([name, *taus, f"{found.constant_images} of {found.images}"])
    return markdown(head, lines)


def accuracy_table(metrics: Mapping[str, Agreement], judged: JudgedCaptions) -> str:
    """Share of hard negatives scored below the reference that they were made from, in per cent."""
    found_kinds = Counter(pair.kind for pair in judged.pairs)
    counts = {ALL: len(judged.pairs)} | {kind: found_kinds[kind] for kind in NEGATIVE_KINDS if kind in found_kinds}
    head = ["metric", *(f"{kind} ({count}), %" for kind, count in counts.items())]
    lines = [[name, *(f"{100 * found.accuracy[kind]:.1f}" for kind in counts)] for name, found in metrics.items()]
    return markdown(head, lines)


def sources_table(judged: JudgedCaptions) -> str:
    """Where the judged captions come from and how good they are."""
    f1: dict[str, list[float]] = {}
    for caption in judged.captions:
        f1.setdefault(caption.source, []).append(caption.f1)
    head = ["source", "captions", "mean oracle F1, 0 to 1"]
    return markdown(head, [[source, str(len(own)), f"{statistics.fmean(own):.3f}"] for source, own in f1.items()])


def notes(metrics: Mapping[str, Agreement]) -> list[str]:
    """Why correlations are not defined, and the signatures of the metrics."""
    undefined = [f"- {UNDEFINED} {name}, {note}" for name, found in metrics.items() for note in found.notes]
    return undefined + [f"- {name}: `{found.signature}`" for name, found in metrics.items()]


def _tau(value: float | None) -> str:
    return UNDEFINED if value is None else f"{100 * value:.1f}"
