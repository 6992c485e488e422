"""Captions of generated scenes, whose truth is known: references, samples and hard negatives, rated
by the oracle.
"""

from collections.abc import Mapping, Sequence

import torch

from rewards.text.tokenize import tokenize
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.config.build import build_data, usable_split
from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes import hard_negatives, oracle
from rl_caption.lab.meta_evaluation.config import ScenesConfig
from rl_caption.lab.meta_evaluation.sets import Judged, JudgementSet
from rl_caption.runtime.engines import dropout_off
from rl_caption.runtime.errors import config_errors
from rl_caption.runtime.types import CaptionBatch
from rl_caption.scst.rollout import sample_captions


def rate_captions(
    rows: Sequence[Row], samples: Mapping[str, Sequence[Sequence[str]]], seed: int = 0
) -> list[JudgementSet]:
    """Collect the captions of R scenes, rate them by the oracle's F1, and pair references with
    their hard negatives.

    Rated are, for each scene, its first reference, hard negatives of it (at most one of each kind,
    chosen by ``seed``) and ``samples`` (source -> [R] lists of captions); a caption from several
    sources is rated once. Metrics see the other references, less those with the same tokens as the
    first.

    All rated captions are lower-case tokens joined by spaces, as a captioner writes them: a full
    stop would tell references and negatives from samples. The oracle reads both forms alike.

    Raises:
        DataError: a row has no scene, or fewer than two different references.
    """
    rated: list[Judged] = []
    pairs: list[Judged] = []
    for number, row in enumerate(rows):
        image_id, image, scene = row["image_id"], row["image"], row.get("scene")
        if scene is None:
            raise DataError(f"image {image_id!r} has no scene: only data.format scenes knows it")
        true, *rest = row["references"]
        others = [text for text in rest if _plain(text) != _plain(true)]
        if not others:
            raise DataError(f"image {image_id!r} has no reference besides the judged one")
        negatives = hard_negatives(scene, true, seed)
        texts = [true, *(text for own in samples.values() for text in own[number])]
        texts += [text for _, text in negatives]
        for text in dict.fromkeys(map(_plain, texts)):
            rating = oracle(text, scene).f1
            rated.append(Judged(image_id, [text], rating, references=[others], image=image))
        for error, false in negatives:
            captions = _plain(true), _plain(false)
            pairs.append(Judged(image_id, captions, kind=error, references=[others], image=image))
    convention = "the rating is the F1 of the facts of a caption against the scene"
    judgement_sets = [JudgementSet("scenes, oracle F1", rated, convention, within_images=True)]
    if pairs:
        convention = (
            "the reference scores higher than the hard negative made from it; equal scores are "
            "wrong"
        )
        judgement_sets.append(JudgementSet("scenes, hard negatives", pairs, convention))
    return judgement_sets


def _plain(text: str) -> str:
    return " ".join(tokenize(text))


@torch.no_grad()
def sample_at_temperatures(
    captioner: Captioner,
    rows: Sequence[Row],
    temperatures: Sequence[float],
    max_new_tokens: int = 24,
    batch_size: int = 64,
    seed: int = 0,
) -> dict[str, list[list[str]]]:
    """Caption R rows greedily and by a sample at each of several temperatures, on the CPU, dropout
    off.

    ``max_new_tokens`` includes EOS; ``batch_size`` changes no caption. Returns ``greedy`` and
    ``sample at <temperature>`` -> [R] lists of captions.
    """
    samples: dict[str, list[list[str]]] = {"greedy": []}
    samples |= {f"sample at {value:g}": [] for value in temperatures}
    with dropout_off(captioner.policy):
        for start in range(0, len(rows), batch_size):
            batch_rows = rows[start : start + batch_size]
            batch = CaptionBatch(batch_rows, captioner.preprocess(batch_rows))
            # Another step for every temperature: with the same noise, samples would be near copies.
            for step, value in enumerate(temperatures):
                decoding = Decoding(
                    num_samples=1,
                    with_greedy=step == 0,
                    temperature=value,
                    max_new_tokens=max_new_tokens,
                )
                rollout = sample_captions(captioner, captioner.policy, batch, decoding, seed, step)
                samples[f"sample at {value:g}"] += rollout.texts
                samples["greedy"] += [[text] for text in rollout.greedy_texts or []]
    return samples


def scenes_sets(config: ScenesConfig, seed: int) -> list[JudgementSet]:
    """Return captions of scenes rated by the oracle's F1 and, if there are any, pairs of references
    and hard negatives.

    Raises ``ConfigError`` where the data are no scenes or a setting is out of range.
    """
    data = build_data(config.data)
    rows = list(data.split(usable_split(data, config.split))[: config.max_images])
    samples = {}
    if config.captioner is not None:
        with config_errors("scenes.captioner"):
            captioner = load_captioner(config.captioner)
        samples = sample_at_temperatures(captioner, rows, config.temperatures, seed=seed)
    return rate_captions(rows, samples, seed)
