"""A saved captioner of any kind, told by its ``config.json``."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from rewards.model_files import read_object
from rl_caption.captioners.base import CaptionerError, reading
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.modeling import CaptionTransformerConfig
from rl_caption.captioners.transformer import TransformerCaptioner

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""``OWNER/MODEL``."""


def load_captioner(
    name: str | Path, cache_bytes: int = 0, prompt: str | None = None, dtype: str = "float32"
) -> TransformerCaptioner | HuggingFaceCaptioner:
    """Load what ``save_pretrained`` wrote, or a model of Transformers.

    Args:
        name: a folder, or a model's name on the hub where no folder is called so.
        cache_bytes: memory for decoded images, where the captioner keeps them.
        prompt: see ``HuggingFaceCaptioner.from_pretrained``; a captioner from scratch takes none.
        dtype: of the weights of a model of Transformers.

    Raises:
        CaptionerError: there is no captioner, its weights do not fit, or it takes no prompt.
    """
    kind = model_type(name)
    if kind == CaptionTransformerConfig.model_type:
        if prompt:
            raise CaptionerError(f"{str(name)!r} is a captioner from scratch, which takes no prompt")
        return TransformerCaptioner.from_pretrained(name, cache_bytes)
    if not is_captioner(name):
        raise CaptionerError(
            f"{str(name)!r} is not a saved captioner: it has no config.json, and is no name on the hub (OWNER/MODEL)"
        )
    return HuggingFaceCaptioner.from_pretrained(name, prompt, dtype)


def is_captioner(name: str | Path) -> bool:
    """Whether ``name`` is a folder with a ``config.json``, or a name on the hub (which is not asked)."""
    on_hub = HUB_NAME.fullmatch(str(name)) is not None and not Path(name).exists()
    return on_hub or model_type(name) is not None


def weights_hash(model: str | Path) -> str:
    """SHA-256 of the weights in a captioner's or a checkpoint's folder, in one file or in several; the name itself of a
    model on the hub, whose weights may not be here."""
    files = [file for end in ("model*.safetensors", "pytorch_model*.bin") for file in sorted(Path(model).glob(end))]
    if not files:
        return str(model)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as weights:
            for part in iter(lambda: weights.read(2**24), b""):
                digest.update(part)
    return digest.hexdigest()


def model_type(name: str | Path) -> str | None:
    """``model_type`` of the folder ``name``; None where it has no ``config.json``.

    Raises:
        CaptionerError: that file is no JSON object.
    """
    file = Path(name) / "config.json"
    if not file.is_file():
        return None
    with reading(file):
        return str(read_object(file).get("model_type"))
