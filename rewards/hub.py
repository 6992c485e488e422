"""Models named ``OWNER/MODEL``: asked for once, before anything is loaded."""

from __future__ import annotations

from typing import Any


def ask_hub(name: str, file: str) -> bool:
    """Ask the hub for ``file`` of the model ``name``, once.

    Libraries ask for a dozen files, and again for each that fails: a mistyped name would take half a minute without a
    connection.

    Returns:
        Whether the hub answers; where it does not, the file lies in the local cache, and so may the others.

    Raises:
        OSError: there is no such model, or neither a connection nor a copy in the cache.
        ValueError: this is no name of a model.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    http_error: Any = HfHubHTTPError.__mro__[1]  # of the client that huggingface_hub was built on
    try:
        get_hf_file_metadata(hf_hub_url(name, file))
    except GatedRepoError as error:
        raise OSError(f"{name!r} asks for an agreement: accept it on its page, then log in (hf auth login)") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise OSError(f"{name!r} is no model on the hub that has a {file}: {_first_line(error)}") from error
    except (OSError, http_error) as error:
        if isinstance(try_to_load_from_cache(name, file), str):
            return False
        raise OSError(f"the hub cannot be reached, and {name!r} is not in the cache: {_first_line(error)}") from error
    return True


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
