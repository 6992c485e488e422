"""Images that a captioner's own processor refuses, found before any of them is needed.

What a processor makes of an image depends on its size: a Qwen2-VL refuses one that is 200 times as
wide as high.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from accelerate.utils import broadcast_object_list
from PIL import Image

from rewards.base import RewardError
from rewards.images import ImageSource, frames_of, image_size
from rl_caption.data.base import DataError, Row, RowView
from rl_caption.data.checks import Findings
from rl_caption.data.file_checks import in_parallel, progress
from rl_caption.runtime.engines import print_main

ImageSize = tuple[int, int]
"""Width and height in pixels."""
REFUSED = "images that the captioner cannot read"
ADVICE = "replace or crop them, or set data.on_bad (of caption --on_bad) to skip"
PASSED = 200
"""Sizes in a row that have to pass, from the most unusual on, until the rest is taken to pass, too.
"""


class _Kind(NamedTuple):
    """What decides whether a processor takes an image: the sizes of its frames, and its prompt."""

    sizes: tuple[ImageSize, ...]
    prompt: str


ORDERS: tuple[Callable[[_Kind], float], ...] = (
    lambda kind: max(max(size) / min(size) for size in kind.sizes),
    lambda kind: -min(map(min, kind.sizes)),
    lambda kind: sum(width * height for width, height in kind.sizes),
    lambda kind: len(kind.prompt),
)
"""The most unusual kinds come last: long, small, large, with a long prompt."""


class Prepares(Protocol):
    """What the check needs of a captioner."""

    input_kind: str

    def try_row(self, row: Row) -> None:
        """Prepare a row. Raises ``DataError`` where that fails."""


def usable_rows(
    splits: Mapping[str, Sequence[Row]],
    captioner: Prepares,
    on_bad: str,
    state: Any,
) -> dict[str, Sequence[Row]]:
    """The rows whose images a captioner can read: those of ``splits``, or with ``on_bad: skip`` the
    good ones of them.

    Args:
        splits: split -> rows.
        captioner: one that reads region features reads no images, and is not asked.
        on_bad: ``data.on_bad``.
        state: ``Accelerator`` or ``PartialState``; the main process alone looks at images.

    Raises:
        DataError: there are others, unless ``on_bad`` is ``skip``, or a split has no row left; it
            names them.
    """
    if captioner.input_kind != "pixels":
        return dict(splits)
    found: list[Any] = [None]
    if state.is_main_process:
        found = [
            {split: refused_rows(rows, captioner.try_row, split) for split, rows in splits.items()}
        ]
    if state.num_processes > 1:
        broadcast_object_list(found)
    refused: dict[str, dict[int, str]] = found[0]
    findings = Findings()
    kept: dict[str, Sequence[Row]] = {}
    for split, rows in splits.items():
        for reason in refused[split].values():
            findings.add(REFUSED, f"{split} {reason}")
        good = [index for index in range(len(rows)) if index not in refused[split]]
        kept[split] = RowView(rows, indices=good)
    if not findings:
        return dict(splits)
    findings[REFUSED].advice = ADVICE
    if on_bad != "skip" or not all(map(len, kept.values())):
        raise DataError(f"data: {findings[REFUSED]}")
    left_out = [f"{split} {len(refused[split])} of {len(splits[split])} rows" for split in refused]
    print_main(state, f"WARNING: data: {findings[REFUSED]}\nleft out: {', '.join(left_out)}")
    return kept


def refused_rows(
    rows: Sequence[Row], try_row: Callable[[Row], object], title: str = ""
) -> dict[int, str]:
    """Index of each row whose image cannot be read or prepared -> why, with the name of the image.

    Images are not decoded: a blank one of each size, and prompt, is tried, in each of ``ORDERS``
    from the most unusual on until ``PASSED`` of them pass, so that the time does not grow with the
    number of images.
    """
    refused: dict[int, str] = {}
    members: dict[_Kind, list[int]] = defaultdict(list)
    kinds = in_parallel(_kind, rows, 4, f"sizes of {title or 'images'}")
    for index, kind in enumerate(kinds):
        if isinstance(kind, str):
            refused[index] = kind
        elif kind is not None:
            members[kind].append(index)
    errors: dict[_Kind, str] = {}
    for order in ORDERS:
        passed = 0
        for kind in progress(sorted(members, key=order, reverse=True), "trying sizes", "size"):
            if kind not in errors:
                errors[kind] = _error(rows[members[kind][0]], kind, try_row)
            passed = 0 if errors[kind] else passed + 1
            if passed == PASSED:
                break
    for kind, error in errors.items():
        for index in members[kind] if error else ():
            image = rows[index]["image"]
            name = image if isinstance(image, str | Path) else rows[index]["image_id"]
            refused[index] = f"{str(name)!r}: {error}"
    return dict(sorted(refused.items()))


def _kind(row: Row) -> _Kind | str | None:
    """The kind of a row's image, the error of one that cannot be read, or None where the row has no
    image.
    """
    if "image" not in row:
        return None
    try:
        return _Kind(tuple(map(size_of, frames_of(row["image"]))), repr(row.get("prompt", "")))
    except RewardError as error:
        return str(error)


def size_of(source: ImageSource) -> ImageSize:
    """Width and height of an image, by its header where it has one. Raises ``RewardError``."""
    if isinstance(source, str | Path):
        return image_size(source)
    if isinstance(source, Image.Image):
        return source.size
    read: Callable[[], ImageSize] | None = getattr(source, "dimensions", None)
    return source.render().size if read is None else read()


def _error(row: Row, kind: _Kind, try_row: Callable[[Row], object]) -> str:
    """Why a row is refused with blank images in place of its own; empty where it is not."""
    width, height = kind.sizes[0]
    blanks: list[Any] = [Image.new("RGB", size) for size in kind.sizes]
    is_video = isinstance(row["image"], list | tuple)
    blank_row: Any = {**row, "image": blanks if is_video else blanks[0]}
    try:
        try_row(blank_row | {"image_id": f"{width} x {height} pixels"})
    except (ValueError, RewardError) as error:
        return f"{width} x {height} pixels: {error}"
    return ""
