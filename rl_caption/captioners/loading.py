"""Loading a saved captioner of any kind, by its ``config.json``, and making a new one.

Classes of captioners are imported when one is loaded: Transformers' models take seconds
to import (with torchvision and torch's compiler), and most errors in a run's options
are found before.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.model_files import export_hint, read_object
from rewards.trust import check_trusted
from rl_caption.captioners.base import (
    FROM_SCRATCH,
    WEIGHTS,
    Captioner,
    CaptionerError,
    reading,
)
from rl_caption.captioners.config import HUB_NAME
from rl_caption.runtime.errors import ConfigError, errors_of_user_code, naming
from rl_caption.runtime.options import check_options, load_target


def load_captioner(
    name: str | Path,
    cache_bytes: int = 0,
    prompt: str | list[dict[str, Any]] | None = None,
    dtype: str = "float32",
    target: str | None = None,
    processor_kwargs: Mapping[str, Any] | None = None,
) -> Captioner:
    """Load a folder that ``save_pretrained`` wrote, or a model of Transformers from the hub.

    Args:
        name: the folder, or ``OWNER/MODEL`` on the hub.
        cache_bytes: memory for decoded images of this package's Transformer, or for
            visual tokens of a vision-language model.
        prompt: what captions continue, a text or messages; for models of Transformers
            only. None is the prompt saved in the folder.
        dtype: type of the weights; for models of Transformers only.
        target: ``package.module:Class`` of a captioner outside this package; None takes
            the ``model_type`` of the folder's ``config.json``, if the user trusts that
            class (``rewards.trust``).
        processor_kwargs: options of the processor; for vision-language models only.

    Raises:
        CaptionerError: there is no captioner, its weights do not fit, it takes no
            prompt, or the user does not trust its class.
        ConfigError: ``target`` is not a captioner.
    """
    saved_type = target or model_type(name) or ""
    if prompt and (":" in saved_type or saved_type == FROM_SCRATCH):
        raise CaptionerError(
            f"{str(name)!r} is a captioner from scratch, which takes no prompt"
        )
    if ":" in saved_type:
        return _load_by_class(name, saved_type, target)
    if saved_type == FROM_SCRATCH:
        from rl_caption.captioners.transformer import TransformerCaptioner

        return TransformerCaptioner.from_pretrained(name, cache_bytes)
    if not is_captioner(name):
        raise CaptionerError(
            f"{str(name)!r} is not a saved captioner: it has no config.json, and is no name on the "
            f"hub (OWNER/MODEL){export_hint(name)}"
        )
    from rl_caption.captioners.huggingface import HuggingFaceCaptioner

    captioner = HuggingFaceCaptioner.from_pretrained(
        name, prompt, dtype, processor_kwargs
    )
    captioner.policy.kept.room = cache_bytes
    return captioner


def _load_by_class(name: str | Path, class_name: str, target: str | None) -> Captioner:
    key = "model.target" if target else f"model_type in {Path(name) / 'config.json'}"
    code = errors_of_user_code(f"{key} {class_name}", error=CaptionerError)
    with reading(name), code:
        if target is None:
            check_trusted(class_name, key)
        return captioner_class(class_name, key).from_pretrained(name)


def new_captioner(
    target: str, references: Sequence[list[str]], kwargs: Mapping[str, Any]
) -> Captioner:
    """A captioner with random weights: ``from_scratch`` of the class ``model.target``,
    with ``model.kwargs``.

    Raises:
        ConfigError: ``target`` is not a captioner, or an option is unknown, missing or
            out of its range.
    """
    target_class = captioner_class(target, "model.target", kwargs)
    where = f"model.target {target!r} cannot be made"
    with naming(where, (TypeError, ValueError)), errors_of_user_code(where):
        return target_class.from_scratch(references, **kwargs)


def captioner_class(
    target: str, key: str, kwargs: Mapping[str, Any] | None = None
) -> type[Captioner]:
    """The class ``package.module:Class``, which is the value of the configuration key ``key``.

    With ``kwargs``, these are checked as options of its ``from_scratch``.

    Raises:
        ConfigError: as ``new_captioner``.
    """
    target_class = load_target(target, key)
    if Captioner not in getattr(target_class, "__mro__", ()):
        raise ConfigError(
            f"{key} is {target!r}: expected a class that inherits from {__package__}.base:Captioner"
        )
    if kwargs is not None:
        check_options(target_class.from_scratch, 1, target, kwargs, "model.kwargs")
    return target_class


def is_captioner(name: str | Path) -> bool:
    """Whether ``name`` is a folder with a ``config.json``, or has the form of a name on the hub."""
    on_hub = HUB_NAME.fullmatch(str(name)) is not None and not Path(name).exists()
    return on_hub or model_type(name) is not None


def weights_hash(model: str | Path) -> str:
    """SHA-256 of the weight files in the folder of a captioner or checkpoint; for a
    model on the hub its name.
    """
    files = [file for end in WEIGHTS for file in sorted(Path(model).glob(end))]
    if not files:
        return str(model)
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as weights:
            hashlib.file_digest(weights, lambda: digest)
    return digest.hexdigest()


def model_type(name: str | Path) -> str | None:
    """``model_type`` in a folder's ``config.json``, or None. Raises ``CaptionerError``
    if it holds no JSON object.
    """
    file = Path(name) / "config.json"
    if not file.is_file():
        return None
    with reading(file):
        return str(read_object(file).get("model_type"))
