"""From the options of a reward to its language model."""

from pathlib import Path
from typing import Any

from rewards.devices import Precision
from rewards.language.cache import CachedModel
from rewards.language.endpoint import EndpointModel
from rewards.language.local import LocalModel
from rewards.language.models import LanguageModel
from rewards.options import Count, check_values


def build_model(
    reward: str,
    model: str | LanguageModel | None = None,
    endpoint: dict[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    device: str | None = None,
    precision: Precision = "fp32",
    batch_size: int = 16,
    chat_template_kwargs: dict[str, Any] | None = None,
    vision: bool = False,
) -> LanguageModel:
    """Make the language model of a reward, whose options these are.

    Args:
        reward: its name, for messages.
        model: a local model of Transformers (a folder with safetensors weights, or a name on the
            hub), or a ``LanguageModel`` of a user's own. An answer is one forward pass.
        endpoint: arguments of ``Endpoint``, an OpenAI-compatible one, in place of ``model``.
        cache_dir: folder where answers are kept.
        device, precision, batch_size: of the local model, as for ``Icc``.
        chat_template_kwargs: variables of the chat template, local or behind the endpoint. By
            default thinking is turned off; ``{}`` sends none to the endpoint.
        vision: whether the questions have images.

    Raises:
        ValueError: not exactly one of ``model`` and ``endpoint`` is set, an argument is wrong, or
            the model cannot be loaded.
    """
    if (model is None) == (endpoint is None):
        raise ValueError(
            f"{reward}: set either model (a local model) or endpoint: {{url: ..., model: ...}}"
        )
    check_values(Count, batch_size=batch_size)
    built: Any = model
    if endpoint is not None:
        built = EndpointModel(endpoint, reward, chat_template_kwargs)
    elif isinstance(model, str | Path):
        built = LocalModel(
            str(model), reward, vision, device, precision, batch_size, chat_template_kwargs
        )
    return built if cache_dir is None else CachedModel(built, Path(cache_dir))
