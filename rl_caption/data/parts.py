"""Programs that work in parts: distribution of the parts over workers, and a check that settings
stay the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.files import remove_leftovers
from rl_caption.data.files import write_json
from rl_caption.data.fingerprint import changes
from rl_caption.data.plain_files import read_json
from rl_caption.runtime.errors import ConfigError

SETTINGS = "parts.json"
"""File of the settings that made the parts in a folder."""


def own_parts(worker: str | None, total: int) -> range:
    """Indices, below ``total``, of the parts of worker ``K/N`` (None: all). Raises ``ConfigError``
    for other text.
    """
    if worker is None:
        return range(total)
    first, _, step = worker.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise ConfigError(
            f"worker is {worker!r}: expected K/N, such as 0/4 to 3/4 of four workers"
        )
    return range(int(first), total, int(step))


def check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Record the settings of the parts in ``out``. Raises ``ConfigError`` where existing parts have
    others.

    ``data`` among them is a ``fingerprint``; times of files may differ.
    """
    file = out / SETTINGS
    if file.exists() and any(
        path.is_file() and path != file for path in out.rglob("*")
    ):
        stored = read_json(file, ConfigError)
        changed, _ = changes(stored.pop("data", {}), settings.get("data", {}))
        for name in settings.keys() - {"data"}:
            if stored.get(name) != settings[name]:
                changed.append(
                    f"{name} was {stored.get(name)!r}, is now {settings[name]!r}"
                )
        if changed:
            raise ConfigError(
                f"{out} has parts that were written with other settings or from other data: "
                f"{'; '.join(changed)}; name another out"
            )
    write_json(file, settings)


def missing_parts(
    out: Path,
    files: Sequence[Path],
    worker: str | None,
    settings: Mapping[str, Any],
) -> tuple[list[int], str]:
    """Numbers of the parts that a worker has to make, of ``files`` for all parts; and a sentence
    that counts them.

    ``settings`` are recorded in ``out``; ``ConfigError`` where the parts in it were made by others.
    """
    worker_parts = own_parts(worker, len(files))
    check_settings(out, settings)
    remove_leftovers(out / "parts")
    missing = [number for number in worker_parts if not files[number].exists()]
    return (
        missing,
        f"{len(missing)} parts made, {len(worker_parts) - len(missing)} were there; {len(files)} "
        f"in all",
    )
