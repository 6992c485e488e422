"""Configuration of the captioner, and of how it decodes captions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import LengthPenalty, Probability, Section, Temperature

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""``OWNER/MODEL``."""


class LoraConfig(Section):
    """LoRA adapters (Hu et al. 2022); all other weights are frozen."""

    r: PositiveInt = 16
    """Rank."""
    alpha: PositiveFloat = 32.0
    """The adapters' output is scaled by alpha / r."""
    dropout: Probability = 0.0
    """Dropout on the adapters' input."""
    target_modules: list[str] | None = None
    """Suffixes of the names of modules to adapt; null adapts the query and value
    projections of the text model.
    """
    export_adapters: bool = False
    """Also write the adapters alone to ``export/best/adapters``, in the format of ``peft``."""


class ModelConfig(Section):
    """Options of every captioner: its kind, and what it starts from."""

    name: Literal["transformer", "huggingface"] = "transformer"
    """``transformer``, this package's encoder-decoder, trained from scratch; or
    ``huggingface``, a pretrained model of Transformers (docs/captioners.md). A folder
    given as ``init`` is recognised without it.
    """
    target: str | None = None
    """``package.module:Class`` of a captioner outside this package; null uses ``name``."""
    init: str | None = None
    """Folder of a saved captioner to start from, or the name of a model on the hub
    (``huggingface`` only); null starts from random weights (cross-entropy only).
    """

    @classmethod
    def choose(cls, values: Mapping[str, Any]) -> type[ModelConfig]:
        """``SavedModelConfig`` if ``init`` is set or ``name`` is ``huggingface``, else
        ``NewModelConfig``.
        """
        is_saved = values.get("init") is not None or values.get("name") == "huggingface"
        return SavedModelConfig if is_saved else NewModelConfig


class NewModelConfig(ModelConfig):
    """A captioner with random weights."""

    min_count: PositiveInt = 5
    """Words that occur less often in the training references become UNK."""
    kwargs: dict = {}
    """Options of ``CaptionTransformerConfig``, or of ``target``."""


class SavedModelConfig(ModelConfig):
    """A saved or pretrained captioner; most options are for models of Transformers."""

    prompt: str | list[dict] | None = None
    """Text that every caption continues, such as ``a photography of``; it is neither
    scored nor trained. A vision-language model answers it; it may be messages (a list
    of ``role`` and ``content``). Null uses the prompt saved in the folder, if any.
    """
    processor_kwargs: dict = {}
    """Options of a vision-language model's processor, such as ``{size: {shortest_edge:
    3136, longest_edge: 200704}}`` of Qwen2.5-VL: at most 256 tokens an image.
    """
    freeze: list[str] | None = None
    """Patterns of the names of parameters to freeze (``vision_model.*``); null freezes
    the vision tower of BLIP-2, InstructBLIP and vision-language models, and nothing in
    other models.
    """
    lora: LoraConfig | None = None
    """Train LoRA adapters instead of the weights, also in frozen parts; exports have
    them merged into the weights.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights; other than float32 only with ``lora``, whose adapters are float32."""

    @model_validator(mode="after")
    def _check_saved_model(self) -> Self:
        if self.dtype != "float32" and self.lora is None:
            raise ConfigError(
                f"dtype is {self.dtype!r}: trained weights must be float32. Set lora, or use "
                "train.mixed_precision to compute in lower precision"
            )
        return self


def _chosen(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return ModelConfig.of(values)


AnyModel: TypeAlias = Annotated[SerializeAsAny[ModelConfig], BeforeValidator(_chosen)]
"""A new captioner or, where ``init`` is set, a saved one."""


class Decoding(Section):
    """How captions are decoded. Nothing is inherited from a model's own generation settings.

    Options that Transformers' ``generate`` also has mean the same here;
    docs/evaluation.md gives the sources. Temperature is applied first, then top-k, then
    top-p.
    """

    model_config = ConfigDict(frozen=True)

    num_samples: Annotated[int, Field(ge=0, le=4096)] = 0
    """Captions sampled per image (K), instead of greedy or beam search; 0 does not sample."""
    with_greedy: bool = False
    """Also decode the greedy caption of each image, after its samples. Without samples
    it is always decoded.
    """
    temperature: Temperature = 1.0
    """Temperature of sampling."""
    max_new_tokens: PositiveInt = 24
    """Length limit in tokens of the caption alone, without the prompt, EOS included."""
    num_beams: PositiveInt = 1
    """Width of beam search; 1 is greedy."""
    length_penalty: LengthPenalty = 1.0
    """Beam search divides log-probabilities by length**length_penalty. 1 compares
    means, as Transformers does; 0 compares sums, as self-critical.pytorch does
    (docs/coco.md).
    """
    num_return_sequences: PositiveInt = 1
    """Number of captions per image that beam search returns, the best ones, for
    ``rerank`` or ``candidates``.
    """
    num_beam_groups: PositiveInt = 1
    """Number of groups of beams; more than 1 is diverse beam search. Must divide
    ``num_beams``.
    """
    diversity_penalty: NonNegativeFloat = 0.0
    """Diverse beam search subtracts this from a token's log-probability for each beam
    of an earlier group that chose the token.
    """
    top_k: Annotated[int, Field(ge=0, le=10**7)] = 0
    """Sample from the k most likely tokens; 0 samples from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities sum to this (nucleus); 1
    samples from all.
    """
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=16384)] = 0
    """An n-gram of this size occurs at most once in a caption; 0 allows repetition."""
    block_trigrams: NonNegativeFloat = 0.0
    """For each earlier occurrence of a trigram, the log-probability of a token that
    would repeat it is reduced by 0.693 times this; 2 is ``block_trigrams`` of
    self-critical.pytorch.
    """
    remove_bad_endings: bool = False
    """No caption ends with an article, a preposition, a conjunction or an auxiliary,
    unless the length limit cuts it off there.
    """
    batch_size: PositiveInt = 64
    """Images per forward pass in programs that caption the images of a split or of
    files.
    """

    @model_validator(mode="after")
    def _check_decoding(self) -> Self:
        beams = self.num_beams
        groups = self.num_beam_groups
        if beams > 1 and self.num_samples:
            raise ConfigError(
                f"num_samples is {self.num_samples} and num_beams {beams}: beam search does not "
                "sample, set num_samples to 0"
            )
        if self.num_return_sequences > beams:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences}: expected at most num_beams, "
                f"{beams}"
            )
        if beams % groups:
            raise ConfigError(
                f"num_beam_groups is {groups}: expected a number that divides num_beams, {beams}"
            )
        return self

    @property
    def captions_per_image(self) -> int:
        """Number of captions of each image: K samples and the greedy caption, or what
        beam search returns.
        """
        if self.num_beams > 1:
            return self.num_return_sequences
        return self.num_samples + int(self.with_greedy or not self.num_samples)

    def describe(self) -> str:
        """How captions are chosen and every option that is set, such as ``beam search,
        num_beams 5, length_penalty 0.0, max_new_tokens 20``.
        """
        chosen = self.model_dump(exclude_defaults=True, exclude={"batch_size"})
        chosen["max_new_tokens"] = self.max_new_tokens
        how = "greedy"
        if self.num_beams > 1:
            how = "beam search"
        elif self.num_samples:
            how = "sampling"
        return ", ".join([how, *(f"{name} {value}" for name, value in chosen.items())])
