"""Files of saved models, local or on the hub: checks of folders, configurations and
weights before they are used.

The last file written to an exported folder is a manifest of all others: their sizes,
and hashes of the small ones. Folders without a manifest, made by other packages, are
not compared with anything.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from rewards.base import naming
from rewards.files import atomic_write, load_json

T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module)

MANIFEST = "manifest.json"
HASHED = 2**24
"""Size in bytes up to which files are hashed, which takes milliseconds: configurations,
tokenizers, small weights.
"""
EXPORTS = ("export/best", "export/last", "best", "last")
"""Places of an exported model in the folder of a run, or in its folder ``export``."""
OTHER_TASKS = ("Classification", "QuestionAnswering", "Retrieval")
"""Endings of the names of Transformers' classes that write no text."""
STATE_KEYS = ("state_dict", "model", "model_state_dict")
"""Keys under which files of training programs have the weights."""


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of ``folder``: relative path -> size of every other file, and its
    hash if it has at most ``HASHED`` bytes.
    """
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path != folder / MANIFEST
    )
    return {file.relative_to(folder).as_posix(): _entry(file) for file in files}


def damage(folder: Path) -> str | None:
    """Describe the first difference between ``folder`` and its manifest; None if there is none.

    Files that the manifest does not list are ignored.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}"
    try:
        entries = read_object(manifest)
    except ValueError as error:
        return str(error)
    for name, listed in entries.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if listed["size"] != file.stat().st_size:
            return f"{name} has {file.stat().st_size} bytes, not {listed['size']}"
        if listed != _entry(file):
            return f"the content of {name} differs from the manifest"
    return None


def check_folder(folder: Path) -> None:
    """Raise ``ValueError`` if a file of ``folder`` differs from the folder's manifest,
    if it has one.
    """
    change = damage(folder) if (folder / MANIFEST).is_file() else None
    if change is not None:
        raise ValueError(
            f"{str(folder)!r} has changed since it was written: {change}. Remove its {MANIFEST} if "
            f"that is intended"
        )


def _entry(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    if size > HASHED:
        return {"size": size}
    return {"size": size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ``OSError``, or ``ValueError`` if the file holds anything else."""
    content = load_json(file)
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} holds {type(content).__name__}: expected a JSON object"
        )
    return content


def save_model(
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    folder: str | Path,
    prefix: str = "",
) -> None:
    """Write ``<prefix>model.safetensors`` and ``<prefix>config.json`` to ``folder``,
    which is created if needed.

    Each file is written atomically (``atomic_write``).
    """
    weights = {
        name: tensor.detach().cpu().contiguous() for name, tensor in state.items()
    }
    with atomic_write(Path(folder) / f"{prefix}model.safetensors") as file:
        file.write(save(weights, metadata={"format": "pt"}))
    with atomic_write(Path(folder) / f"{prefix}config.json") as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())


def read_config(
    config_class: type[T],
    folder: Path,
    model_type: str,
    others: Collection[str] = (),
) -> T:
    """Read the dataclass ``config_class`` from the ``config.json`` that ``save_model``
    wrote, and check the folder.

    The file has to contain this ``model_type`` and every field of ``config_class``. The
    keys ``others`` are allowed and ignored.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file differs from the manifest, or the configuration has another
            type or a wrong key or value.
    """
    file = folder / "config.json"
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            where = f"{str(folder)!r} is not a saved {model_type}"
            raise FileNotFoundError(f"{where}: it has no {name}{export_hint(folder)}")
    check_folder(folder)
    values = {
        key: value for key, value in read_object(file).items() if key not in others
    }
    stored_type = values.pop("model_type", None)
    if stored_type != model_type:
        raise ValueError(
            f"{file} has model_type {stored_type!r}: expected {model_type!r}"
        )
    needed = {option.name for option in fields(config_class)}  # type: ignore[arg-type]
    if missing := sorted(needed - values.keys()):
        raise ValueError(f"{file} lacks {missing}")
    with naming(str(file), (TypeError, ValueError)):
        return config_class(**values)


def export_hint(folder: str | Path) -> str:
    """End of a message about ``folder``, which holds no model: the path of an exported
    model in it, if it is the folder of a run; else empty.
    """
    for name in EXPORTS:
        export = Path(folder) / name
        if any(export.glob("*config.json")):
            return f"; did you mean {export}?"
    return ""


def load_complete(model_class: Any, name: str, **options: Any) -> Any:
    """Load a model of Transformers by ``from_pretrained``, but refuse a file that lacks
    weights, which would stay random.

    Raises:
        ValueError: the file has not all weights of ``model_class``, or is of a model
            for another task.
    """
    model, info = model_class.from_pretrained(name, output_loading_info=True, **options)
    expected = type(model).__name__
    architectures = model.config.architectures or []
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"it has no weights for {', '.join(missing[:5])}: expected a {expected}"
        )
    others = [name for name in architectures if name.endswith(OTHER_TASKS)]
    if others and expected not in architectures:
        raise ValueError(
            f"its architectures are {architectures}: expected a {expected}"
        )
    return model


def has_model_type(folder: str | Path, model_type: str) -> bool:
    """Whether ``folder`` has a ``config.json`` with this ``model_type``."""
    file = Path(folder) / "config.json"
    return file.is_file() and read_object(file).get("model_type") == model_type


def load_weights(model: Model, folder: Path) -> Model:
    """Load the weights of ``folder`` into ``model``, which may be on the meta device,
    as float32; return ``model``.

    Raises ``ValueError`` if they do not fit the model. Integer buffers are not loaded.
    """
    weights = read_weights(folder / "model.safetensors")
    check_state(weights, float_state(model), f"weights in {str(folder)!r}")
    weights = {name: tensor.float() for name, tensor in weights.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    return model


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises ``OSError``, or ``ValueError`` that begins with
    the file's name.
    """
    with naming(str(file), (SafetensorError,)):
        return load_file(file)


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the state dict of a checkpoint file: safetensors, or a PyTorch file with
    ``weights_only=True``.

    A state dict under a key of ``STATE_KEYS`` is found, and the prefix ``module.`` of
    data parallelism is removed.

    Raises:
        OSError, RuntimeError, ValueError, pickle.UnpicklingError: the file cannot be
            read as a state dict.
    """
    if path.suffix == ".safetensors":
        state: Any = read_weights(path)
    else:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        state = next((stored[key] for key in STATE_KEYS if key in stored), stored)
    if not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path} holds {list(state)[:5]}: expected tensors, or {STATE_KEYS}"
        )
    return {str(key).removeprefix("module."): value for key, value in state.items()}


def float_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of ``model`` without integer buffers (batch norm's counters),
    which are not needed.
    """
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def state_shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a state dict."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_state(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str
) -> None:
    """Raise ``ValueError`` with the first five keys of ``state`` that are missing,
    unexpected or of another shape than in ``expected``, the state dict of the model.
    """
    shapes = state_shapes(state)
    right = state_shapes(expected)
    wrong = [
        f"{name} {list(shapes[name])}, not {list(right[name])}"
        for name in shapes.keys() & right.keys()
        if shapes[name] != right[name]
    ]
    differences = {
        "missing": right.keys() - shapes.keys(),
        "unexpected": shapes.keys() - right.keys(),
        "wrong shape": wrong,
    }
    problems = [
        f"{len(names)} {key}: {', '.join(sorted(names)[:5])}"
        for key, names in differences.items()
        if names
    ]
    if problems:
        raise ValueError(f"{what} do not fit the configuration: {'; '.join(problems)}")


def fingerprint(state: Mapping[str, Any], *others: Any) -> str:
    """Hash of a state dict and of the ``repr`` of ``others``: whatever else the model's
    output depends on.
    """
    digest = hashlib.blake2b(repr(others).encode(), digest_size=16)
    for key, value in sorted(state.items()):
        digest.update(f"{key}{tuple(value.shape)}{value.dtype}".encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def ask_hub(name: str, file: str) -> bool:
    """Check with a single request that the hub has ``file`` of the model ``name``.

    Returns True if the hub has it, and False if the hub cannot be reached but the file
    is in the local cache. Without this check a mistyped name takes half a minute,
    because libraries request a dozen files and retry each.

    Raises:
        OSError: there is no such model or file, or there is neither a connection nor a
            copy in the cache.
        ValueError: ``name`` cannot be the name of a model.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    # of the client that huggingface_hub was built on
    http_error: Any = HfHubHTTPError.__mro__[1]
    try:
        get_hf_file_metadata(hf_hub_url(name, file))
    except (OSError, http_error) as error:
        if isinstance(try_to_load_from_cache(name, file), str):
            return False
        raise OSError(
            f"{name!r} is neither on the hub nor in its cache: {error}"
        ) from error
    return True


def transformers_options(name: str) -> dict[str, Any]:
    """Arguments of every ``from_pretrained`` of Transformers for ``name``, a folder or
    a name on the hub.

    They keep Transformers from running code that comes with the model (``auto_map``),
    and from asking at the terminal whether to. A folder with ``adapter_config.json`` is
    refused: Transformers would silently load another model or adapters.

    Raises:
        OSError, ValueError: as ``ask_hub``, or the folder is refused.
    """
    folder = Path(name)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder / 'adapter_config.json'}: merge the adapters into their model"
        )
    local = folder.is_dir() or ask_hub(name, "config.json")
    return {"trust_remote_code": False} | ({} if local else {"local_files_only": True})


def check_open_clip(config: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` if the ``model_cfg`` of a saved open_clip model asks for
    code of its tokenizer to run.
    """
    options = (config.get("text_cfg") or {}).get("tokenizer_kwargs") or {}
    if options.get("trust_remote_code"):
        raise ValueError(f"{where}: text_cfg.tokenizer_kwargs.trust_remote_code is set")
