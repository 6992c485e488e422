"""Configuration of ``judge``."""

from dataclasses import dataclass, field

from rl_caption.config.schema import DataConfig, TrustConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.options import Resamples, Seed, Steps, Temperature


@dataclass
class ScenesConfig:
    """Captions of generated scenes.

    Args:
        data: data with ``format: scenes``.
        split: split of ``data``.
        captioner: folder of a saved captioner whose captions are also judged; null judges only
            references and hard negatives.
        temperatures: sampling temperatures of the captioner, with one sample per image at each.
        max_images: use only the first scenes, at most this number; null uses all.
    """

    data: DataConfig = field(default_factory=lambda: DataConfig(format="scenes"))
    split: str = "test"
    captioner: str | None = None
    temperatures: list[Temperature] = field(default_factory=lambda: [0.5, 1.0, 1.5])
    max_images: Steps | None = None


@dataclass
class JudgeSetConfig(TrustConfig):
    """``judge``: how well metrics agree with human judgements of captions (docs/judging.md).

    Args:
        set: name of the set of judgements, or ``scenes``, which compares with the facts of
            generated scenes.
        data: folder of the set's files; not for ``scenes``.
        images: folder of the set's images; null looks for it in ``data``.
        metrics: a list, or names separated by commas: cider, bleu (1 to 4), bleu1, rouge, meteor,
            spice, or any reward.
        judges: further metrics, by their headings: rewards with options, as in ``evaluate``, such
            as CLIPScore with its backbone.
        scores: scores of further metrics, by their headings, that were computed elsewhere: JSON
            lines with ``image``, ``caption`` and ``score``.
        set_kwargs: further options of the set, such as ``{held_out: true}`` of foil.
        partial: accept a set whose number of judgements differs from the published one.
        bootstrap: number of bootstrap resamples of images for the 95 % intervals; 0 computes none.
        costs: also print captions a second, and calls and tokens of language models.
        seed: of the bootstrap and, for ``scenes``, of captions.
        scenes: the captions to judge if ``set`` is ``scenes``.
        out: folder for ``agreement.md``, ``agreement.csv`` and ``agreement.json``.
    """

    set: str
    data: str | None = None
    images: str | None = None
    metrics: str | list[str] = "bleu,rouge,cider,meteor"
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    scores: dict[str, str] = field(default_factory=dict)
    set_kwargs: dict = field(default_factory=dict)
    partial: bool = False
    bootstrap: Resamples = 1000
    costs: bool = False
    seed: Seed = 0
    scenes: ScenesConfig = field(default_factory=ScenesConfig)
    out: str = "agreement"
