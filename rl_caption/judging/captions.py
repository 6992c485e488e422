"""Captions of mixed quality for scenes whose truth is known: references, samples and hard negatives, each judged."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from rewards.text.tokenize import tokenize
from rl_caption.captioners.base import Captioner, Decoding
from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes import hard_negatives, oracle
from rl_caption.scst.rollout import sample_captions
from rl_caption.training.accumulation import dropout_off
from rl_caption.types import CaptionBatch

REFERENCE, NEGATIVE = "reference", "hard negative"


@dataclass(frozen=True)
class JudgedCaption:
    """A caption of one scene and what the oracle says of it."""

    row: int
    """Which of the images."""
    text: str
    source: str
    """``reference``, ``greedy``, ``sample at 0.5``, ``hard negative``; the first that wrote this text."""
    f1: float
    """Oracle F1, in [0, 1]."""


@dataclass(frozen=True)
class CaptionPair:
    """Positions in ``JudgedCaptions.captions`` of a true caption and of a false one made from it."""

    correct: int
    wrong: int
    kind: str


@dataclass(frozen=True)
class JudgedCaptions:
    """N captions of R images, without repetitions within an image, and pairs among them."""

    rows: list[Row]
    """[R]"""
    references: list[list[str]]
    """[R] what metrics with references see, as written; none of them is a judged reference."""
    captions: list[JudgedCaption]
    """[N]"""
    pairs: list[CaptionPair]

    def columns(self) -> dict[str, list[Any]]:
        """Return the [N] columns ``image``, ``image_id`` and ``references`` for a reward."""
        owners = [caption.row for caption in self.captions]
        return {
            "image": [self.rows[row]["image"] for row in owners],
            "image_id": [self.rows[row]["image_id"] for row in owners],
            "references": [self.references[row] for row in owners],
        }


def judge_captions(
    rows: Sequence[Row], samples: Mapping[str, Sequence[Sequence[str]]], judged_references: int = 1, seed: int = 0
) -> JudgedCaptions:
    """Put the captions of every scene together and judge them.

    The first ``judged_references`` references of a scene are judged and left out of what metrics see; so are other
    references that say the same in the same words. Their hard negatives, at most one of each kind, are judged too. A
    caption that several sources wrote for a scene is judged once.

    All judged captions have the form of a captioner's output: caption tokens joined by spaces, lower case, no
    punctuation. As written, a full stop would tell references and negatives from samples. The oracle reads both forms
    alike.

    Args:
        rows: scenes with references, at least ``judged_references`` + 1 different ones each.
        samples: source -> for each row, any number of captions.
        judged_references: at least 1.
        seed: which hard negatives.

    Raises:
        DataError: a row has no scene or too few references.
        ValueError: ``judged_references`` is below 1, or a source has captions for another number of rows.
    """
    rows = list(rows)
    if judged_references < 1:
        raise ValueError(f"judged_references = {judged_references}: expected at least 1")
    for source, texts in samples.items():
        if len(texts) != len(rows):
            raise ValueError(f"{source!r} has captions for {len(texts)} images: expected {len(rows)}")
    found = _Collection()
    seen: list[list[str]] = []
    pairs: list[CaptionPair] = []
    for number, row in enumerate(tqdm(rows, desc="judging captions", unit="scene", delay=2, disable=None)):
        if row.get("scene") is None:
            raise DataError(f"image {row['image_id']!r} has no scene: only data.format scenes knows the truth")
        judged = row["references"][:judged_references]
        seen.append(_other_references(row, judged))
        places = [found.add(number, row, text, REFERENCE) for text in judged]
        for source, texts in samples.items():
            for text in texts[number]:
                found.add(number, row, text, source)
        for place, text in zip(places, judged, strict=True):
            for kind, negative in hard_negatives(row["scene"], text, seed):
                pairs.append(CaptionPair(place, found.add(number, row, negative, NEGATIVE), kind))
    return JudgedCaptions(rows, seen, found.captions, pairs)


class _Collection:
    """Judged captions, each text of an image once."""

    def __init__(self) -> None:
        self.captions: list[JudgedCaption] = []
        self._places: dict[tuple[int, str], int] = {}

    def add(self, number: int, row: Row, text: str, source: str) -> int:
        """Judge a caption of image ``number``, unless it is there already; return its position."""
        plain = _plain(text)
        if (number, plain) not in self._places:
            self._places[number, plain] = len(self.captions)
            self.captions.append(JudgedCaption(number, plain, source, oracle(plain, row["scene"]).f1))
        return self._places[number, plain]


def _other_references(row: Row, judged: Sequence[str]) -> list[str]:
    taken = {_plain(text) for text in judged}
    others = [text for text in row["references"] if _plain(text) not in taken]
    if not others or len(judged) > len(row["references"]):
        raise DataError(
            f"image {row['image_id']!r} has {len(row['references'])} references and {len(judged)} of them are judged: "
            "none is left for the metrics; judge fewer, or raise data.kwargs.captions_per_image"
        )
    return others


def _plain(text: str) -> str:
    return " ".join(tokenize(text))


@torch.no_grad()
def sample_at_temperatures(
    captioner: Captioner,
    rows: Sequence[Row],
    temperatures: Sequence[float],
    num_samples: int = 1,
    max_new_tokens: int = 24,
    batch_size: int = 64,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> dict[str, list[list[str]]]:
    """Caption rows greedily and by sampling at several temperatures, dropout off.

    Args:
        captioner: its policy is on ``device``.
        rows: R images.
        temperatures: different numbers above 0.
        num_samples: samples of an image at each temperature.
        max_new_tokens: length limit in tokens, EOS included.
        batch_size: images at a time; changes no caption.
        device: where inputs go.
        seed: of the samples.

    Returns:
        ``greedy`` and ``sample at <temperature>`` -> [R] lists of captions.

    Raises:
        ValueError: no temperature, one twice, or one that ``Decoding`` refuses.
        DataError: an image cannot be read.
    """
    if not temperatures or len(set(temperatures)) != len(temperatures) or num_samples < 1:
        raise ValueError(
            f"temperatures = {list(temperatures)}, num_samples = {num_samples}: expected different temperatures and "
            "at least 1 sample"
        )
    decodings = [Decoding(num_samples, number == 0, value, max_new_tokens) for number, value in enumerate(temperatures)]
    found: dict[str, list[list[str]]] = {"greedy": []}
    found |= {f"sample at {value:g}": [] for value in temperatures}
    starts = range(0, len(rows), batch_size)
    policy = captioner.policy
    with dropout_off(policy):
        for start in tqdm(starts, desc="sampling", unit="batch", delay=2, disable=not sys.stderr.isatty()):
            batch_rows = rows[start : start + batch_size]
            batch = CaptionBatch(batch_rows, captioner.preprocess(batch_rows)).to(torch.device(device))
            for number, decoding in enumerate(decodings):
                # Another step for every temperature: with the same noise, samples would be near copies.
                rollout = sample_captions(captioner, policy, batch, decoding, seed, step=number)
                found[f"sample at {decoding.temperature:g}"] += rollout.texts
                found["greedy"] += [[text] for text in rollout.greedy_texts or []]
    return found
