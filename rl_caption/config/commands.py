"""Options of the programs that are used from the command line alone."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rewards.registry import available
from rl_caption.captioners.config import Decoding
from rl_caption.config.evaluation import check_choice
from rl_caption.config.schema import TrustConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import BatchSize, Section, Seed, Workers


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


class ScoreConfig(TrustConfig):
    """``score --reward NAME --captions F --references F``: score captions in files with any reward."""

    reward: str = Field(
        description=f"{', '.join(available())}, or package.module:Class."
    )
    captions: str
    """JSON, ``[{image_id, caption}, ...]``, or a folder of ``evaluate``."""
    references: str | None = None
    """``{image_id: [str, ...]}``, COCO annotations, Karpathy JSON or JSON lines."""
    split: str | None = None
    """Split of Karpathy JSON or JSON lines; null takes all."""
    images: str | None = None
    """Folder of the images, for rewards that look at them."""
    df: str | None = None
    """Document frequencies; null takes those of the references."""
    eos: bool = False
    """Count EOS as a token; published scores are without."""
    tokenizer: Literal["ptb", "unicode", "char", "none"] | None = None
    """Of n-gram rewards: ``ptb`` (English), ``unicode`` (words of other languages), ``char``
    (characters of Chinese and Japanese) or ``none`` (split at white space).
    """
    kwargs: dict = {}
    """Further options of the reward."""
    out: str | None = None
    """File for the reward, its signature, the mean and the scores."""


class ReportConfig(TrustConfig):
    """``report FOLDER ...``: one page about a run, an evaluation, a comparison, or several
    evaluations.
    """

    positional: ClassVar[str] = "folders"

    folders: list[str]
    """A run, an evaluation or a comparison, or several evaluations."""
    out: str | None = None
    """Folder for ``report.html``; null is the first of ``folders``."""
    images: Annotated[int, Field(ge=0, le=10**6)] = 200
    """Maximum number of images in the gallery."""


class PrepareCocoConfig(Section):
    """``prepare_coco``: check the downloads of COCO captions, and make the folder that the
    configurations read.
    """

    out: str = "data/coco"
    """The folder to make."""
    downloads: str | None = None
    """Folder of the downloaded JSON files; null is ``downloads`` in ``out``."""
    images: str | None = None
    """Folder with ``train2014`` and ``val2014``."""
    features: str | None = None
    """Folder or HDF5 file of region features."""
    features_kwargs: dict = {}
    """As ``data.features_kwargs``, such as ``{"dim": 2048}``."""
    subset: bool = False
    """A part of COCO: do not compare the counts."""
    fast: bool = False
    """Do not decode images."""


class PrepareFeaturesConfig(TrustConfig):
    """``prepare_features TSV ... --out FOLDER``, or ``prepare_features --encoder NAME --data PATH
    --out FOLDER``: region features from published files, or of photos by a frozen encoder.
    """

    positional: ClassVar[str] = "tsv"

    tsv: list[str] = []
    """Files of bottom-up attention, LXMERT or VinVL."""
    out: str
    """Folder for one ``.npz`` an image."""
    dtype: Literal["float32", "float16"] | None = None
    """Of the stored features; null is float32 for TSV files, float16 with ``encoder``."""
    encoder: str | None = None
    """``transformers:NAME``, ``open_clip:ARCHITECTURE/TAG`` or ``package.module:Class``."""
    kwargs: dict = {}
    """Options of the encoder."""
    data: str | None = None
    """Images to encode: a Karpathy JSON file, its folder, or a folder of images."""
    image_root: str | None = None
    """As ``data.image_root`` of a training, of a Karpathy JSON."""
    image_extension: str | None = None
    """As ``data.image_extension``."""
    flatten: bool = False
    """As ``data.flatten``."""
    splits: list[str] | None = None
    """Of the Karpathy JSON; null takes all."""
    device: str | None = None
    """Such as ``cpu`` or ``cuda:0``; null is a GPU if there is one."""
    batch_size: BatchSize = 32
    """Images per forward pass."""
    num_workers: Workers = 4
    """Threads that read images."""

    @model_validator(mode="after")
    def _check_prepare_features(self) -> Self:
        if bool(self.tsv) == (self.encoder is not None and self.data is not None):
            raise ConfigError("tsv is not set: name TSV files, or an encoder with data")
        return self
