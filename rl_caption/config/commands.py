"""Options of the programs that are used from the command line alone."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from rl_caption.captioners.config import Decoding
from rl_caption.config.evaluation import check_choice
from rl_caption.config.schema import TrustConfig
from rl_caption.runtime.options import Seed


class CaptionConfig(TrustConfig, Decoding):
    """``caption --model RUN/export/best PHOTO|FOLDER ...``: caption photos."""

    positional: ClassVar[str] = "photos"

    photos: list[str]
    """Photos, and folders of photos."""
    model: str
    """Folder of a captioner, such as ``RUN/export/best``, or the name of a model on the hub."""
    prompt: str | None = None
    """Prompt of a model of Transformers; null uses the prompt that was saved with it, if any."""
    rerank: str | None = None
    """Chooses one of several captions: ``consensus``, or a reward that needs no references."""
    rerank_kwargs: dict = {}
    """Options of ``rerank``."""
    seed: Seed = 0
    """Of samples."""
    on_bad: Literal["fail", "skip"] = "fail"
    """What an image does that cannot be read."""
    out: str | None = None
    """Also write the captions to this JSON file, in COCO result format."""
    candidates: str | None = None
    """Write all captions of a photo with their scores to this JSON lines file."""

    @model_validator(mode="after")
    def _check_caption(self) -> Self:
        check_choice(self, self.rerank, self.candidates is not None)
        return self
