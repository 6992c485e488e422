"""Configuration of the captioner."""

from dataclasses import dataclass, field
from typing import Literal

from rl_caption.options import Positive, Probability, Rank, Steps


@dataclass
class LoraConfig:
    """LoRA adapters (Hu et al. 2022); all other weights are frozen.

    Args:
        r: rank.
        alpha: the adapters' output is scaled by alpha / r.
        dropout: dropout on the adapters' input.
        target_modules: suffixes of the names of modules to adapt; null adapts the query and value projections of the
            text model.
        export_adapters: also write the adapters alone to ``export/best/adapters``, in the format of ``peft``.
    """

    r: Rank = 16
    alpha: Positive = 32.0
    dropout: Probability = 0.0
    target_modules: list[str] | None = None
    export_adapters: bool = False


@dataclass
class ModelConfig:
    """The captioner.

    Args:
        name: ``transformer``, this package's encoder-decoder, trained from scratch; or ``huggingface``, a pretrained
            model of Transformers (docs/captioners.md). A folder given as ``init`` is recognised without it.
        target: ``package.module:Class`` of a captioner outside this package; null uses ``name``.
        init: folder of a saved captioner to start from, or the name of a model on the hub (``huggingface`` only); null
            starts from random weights (cross-entropy only).
        min_count: from scratch: words that occur less often in the training references become UNK.
        tokenizer: from scratch: a ``tokenizers`` tokenizer (folder or ``tokenizer.json``) instead of whole words.
        kwargs: from scratch: options of ``CaptionTransformerConfig``, or of ``target``.
        prompt: huggingface: text that every caption continues, such as ``a photography of``; it is neither scored nor
            trained. A vision-language model answers it; it may be messages (a list of ``role`` and ``content``). Null
            uses the prompt saved in the folder, if any.
        processor_kwargs: huggingface: options of a vision-language model's processor, such as
            ``{max_pixels: 200704}`` of Qwen2-VL, which limits the tokens of an image.
        freeze: huggingface: patterns of the names of parameters to freeze (``vision_model.*``); null freezes the vision
            tower of BLIP-2, InstructBLIP and vision-language models, and nothing in other models.
        lora: huggingface: train LoRA adapters instead of the weights, also in frozen parts; exports have them merged
            into the weights.
        gradient_checkpointing: huggingface: recompute activations in the backward pass, to save memory.
        dtype: huggingface: type of the weights; other than float32 only with ``lora``, whose adapters are float32.
    """

    name: Literal["transformer", "huggingface"] = "transformer"
    target: str | None = None
    init: str | None = None
    min_count: Steps = 5
    tokenizer: str | None = None
    kwargs: dict = field(default_factory=dict)
    prompt: str | list[dict] | None = None
    processor_kwargs: dict = field(default_factory=dict)
    freeze: list[str] | None = None
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
