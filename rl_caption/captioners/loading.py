"""A saved captioner of any kind, told by its ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.modeling import CaptionTransformerConfig
from rl_caption.captioners.transformer import TransformerCaptioner


def load_captioner(
    name: str | Path, cache_bytes: int = 0, on_hub: bool = False, prompt: str | None = None, dtype: str = "float32"
) -> TransformerCaptioner | HuggingFaceCaptioner:
    """Load what ``save_pretrained`` wrote, or a model of Transformers.

    Args:
        name: a folder; with ``on_hub``, also a model's name on the hub.
        cache_bytes: memory for decoded images, where the captioner keeps them.
        on_hub: whether ``name`` may be on the hub.
        prompt: see ``HuggingFaceCaptioner.from_pretrained``.
        dtype: of the weights of a model of Transformers.

    Raises:
        CaptionerError: there is no captioner, or its weights do not fit.
    """
    kind = model_type(name)
    if kind == CaptionTransformerConfig.model_type or (kind is None and not on_hub):
        return TransformerCaptioner.from_pretrained(name, cache_bytes)
    return HuggingFaceCaptioner.from_pretrained(name, prompt, dtype)


def model_type(name: str | Path) -> str | None:
    """``model_type`` of the folder ``name``; None where it has no ``config.json``.

    Raises:
        CaptionerError: that file is no JSON object.
    """
    file = Path(name) / "config.json"
    if not file.is_file():
        return None
    try:
        config: Any = json.loads(file.read_text())
        return str(config.get("model_type"))
    except (ValueError, AttributeError) as error:
        raise CaptionerError(f"{file} is not the configuration of a captioner: {error}") from error
