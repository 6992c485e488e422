"""Configuration of ``judge``."""

from pydantic import NonNegativeInt

from rl_caption.config.schema import TrustConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.options import Seed


class JudgeSetConfig(TrustConfig):
    """``judge``: how well metrics agree with human judgements of captions (docs/judging.md)."""

    set: str
    """Name of the set of judgements, or ``scenes``, which compares with the facts of generated
    scenes.
    """
    data: str | None = None
    """Folder of the set's files; null is the current one. ``scenes`` has none."""
    images: str | None = None
    """Folder of the set's images; null looks for it in ``data``."""
    metrics: str | list[str] = "bleu,rouge,cider,meteor"
    """A list, or names separated by commas: cider, bleu (1 to 4), bleu1, rouge, meteor, spice, or
    any reward.
    """
    judges: dict[str, JudgeConfig] = {}
    """Further metrics, by their headings: rewards with options, as in ``evaluate``, such as
    CLIPScore with its backbone.
    """
    set_kwargs: dict = {}
    """Further options of the set, such as ``{held_out: true}`` of foil."""
    partial: bool = False
    """Accept a set whose number of judgements differs from the published one."""
    bootstrap: NonNegativeInt = 1000
    """Number of bootstrap resamples of images for the 95 % intervals; 0 computes none."""
    seed: Seed = 0
    """Of the bootstrap."""
    out: str = "agreement"
    """Folder for ``agreement.md`` and ``agreement.json``."""
