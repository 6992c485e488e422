"""Captions of generated scenes, judged by the world's oracle, in the form of a set of human judgements."""

from __future__ import annotations

from rl_caption.build import ConfigError, build_data, usable_split
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.loading import load_captioner
from rl_caption.meta_evaluation.captions import JudgedCaptions, judge_captions, sample_at_temperatures
from rl_caption.meta_evaluation.config import ScenesConfig
from rl_caption.meta_evaluation.sets.base import CaptionPairs, JudgedSet, RatedCaptions


def scenes_sets(config: ScenesConfig, seed: int) -> list[JudgedSet]:
    """Judge captions of scenes: references, hard negatives and, where there is a captioner, its captions.

    Returns:
        Captions rated by oracle F1, and pairs of a reference and a hard negative made from it.

    Raises:
        ConfigError: the data are no scenes, or a number is out of range.
        CaptionerError, DataError: a captioner or data that cannot be used.
    """
    if config.data.format != "scenes":
        raise ConfigError(f"scenes.data.format is {config.data.format!r}: only generated scenes have a known truth")
    if config.max_images is not None and config.max_images < 1:
        raise ConfigError(f"scenes.max_images is {config.max_images}: expected at least 1")
    data = build_data(config.data)
    rows = list(data.split(usable_split(data, config.split))[: config.max_images])
    samples = {}
    if config.captioner is not None:
        try:
            samples = sample_at_temperatures(load_captioner(config.captioner), rows, config.temperatures, seed=seed)
        except CaptionerError as error:
            raise CaptionerError(f"scenes.captioner: {error}") from error
        except ValueError as error:
            raise ConfigError(f"scenes: {error}") from error
    return as_sets(judge_captions(rows, samples, seed=seed))


def as_sets(judged: JudgedCaptions) -> list[JudgedSet]:
    """Return judged captions as rated captions and, where there are hard negatives, as pairs."""
    columns, captions = judged.columns(), judged.captions
    rated = RatedCaptions(
        "scenes, oracle F1",
        [caption.text for caption in captions],
        [caption.f1 for caption in captions],
        columns["image_id"],
        columns["image"],
        columns["references"],
        None,
        "the rating is the F1 of the facts of a caption against the scene",
        within_images=True,
    )
    if not judged.pairs:
        return [rated]
    places = [pair.correct for pair in judged.pairs]
    pairs = CaptionPairs(
        "scenes, hard negatives",
        [captions[place].text for place in places],
        [captions[pair.wrong].text for pair in judged.pairs],
        [1.0] * len(places),
        [pair.kind for pair in judged.pairs],
        [columns["image_id"][place] for place in places],
        [columns["image"][place] for place in places],
        {"": [columns["references"][place] for place in places]},
        "the reference scores higher than the hard negative made from it; equal scores are wrong",
    )
    return [rated, pairs]
