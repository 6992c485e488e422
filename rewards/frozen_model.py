"""Loading of the frozen language models of Transformers that are behind rewards."""

from dataclasses import dataclass
from typing import Any

from rewards.base import naming
from rewards.devices import DTYPES, Precision, default_device
from rewards.options import check_values


@dataclass(frozen=True)
class FrozenModel:
    """A network in evaluation mode, without gradients, with its tokenizer."""

    network: Any
    tokenizer: Any
    """Tokenizer, or the processor of a vision-language model."""
    device: str
    longest: int
    """Largest number of tokens that it reads, special ones included."""
    weights: str
    """First 12 hexadecimal digits of the fingerprint of its weights."""


def load_frozen(
    head: str,
    model: str,
    reward: str,
    device: str | None = None,
    precision: Precision = "fp32",
) -> FrozenModel:
    """Load a model of Transformers with its tokenizer, or with its processor if it reads images.

    Args:
        head: class of Transformers to load it with, such as ``AutoModelForCausalLM``.
        model: folder with safetensors weights, or a name on the hub.
        reward: its name, for messages.
        device: None is the process's current CUDA device if there is one, else the CPU.
        precision: of weights and activations.

    Raises:
        ValueError: the precision is unknown, or the model cannot be found or loaded, or
            has no weights for ``head``.
    """
    check_values(Precision, precision=precision)
    import transformers

    from rewards.model_files import (
        export_hint,
        fingerprint,
        load_complete,
        transformers_options,
    )

    with naming(f"{reward}: the model {model!r} cannot be loaded"):
        if hint := export_hint(model):
            raise ValueError(f"it is the folder of a run{hint}")
        options = transformers_options(model)
        vision = head == "AutoModelForImageTextToText"
        reader: Any = (
            transformers.AutoProcessor if vision else transformers.AutoTokenizer
        )
        tokenizer: Any = reader.from_pretrained(model, **options)
        options |= {"dtype": DTYPES[precision], "use_safetensors": True}
        network = load_complete(getattr(transformers, head), model, **options)
    device = default_device(device)
    network = network.to(device).eval().requires_grad_(False)
    config = network.config.get_text_config() if vision else network.config
    longest = most_tokens(config, tokenizer.tokenizer if vision else tokenizer)
    return FrozenModel(
        network, tokenizer, device, longest, fingerprint(network.state_dict())[:12]
    )


def most_tokens(config: Any, tokenizer: Any) -> int:
    """Number of tokens that a model has positions for, special ones included; if
    unknown, its tokenizer's limit.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return int(tokenizer.model_max_length)
    if "roberta" in config.model_type:  # positions start after the padding token's
        positions -= config.pad_token_id + 1
    return min(int(positions), int(tokenizer.model_max_length))
