"""Device and precision of a model, chunks of its inputs, and the process that reports
progress.

Nothing here imports torch before it is needed.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from tqdm.auto import tqdm

logger = logging.getLogger(__name__)
T = TypeVar("T")
Precision = Literal["fp32", "fp16", "bf16"]
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_LOG_SECONDS = 10.0


def chunks(items: Sequence[T], size: int, title: str) -> Iterator[Sequence[T]]:
    """Yield the items in chunks of ``size``, with a progress bar on rank 0, or log
    lines if there is no terminal.
    """
    start = logged = time.monotonic()
    shows = is_main_process()
    disable = None if shows else True
    with tqdm(
        total=len(items), desc=title, leave=False, delay=2, disable=disable
    ) as bar:
        for first in range(0, len(items), size):
            chunk = items[first : first + size]
            yield chunk
            bar.update(len(chunk))
            now = time.monotonic()
            if shows and bar.disable and now - logged >= _LOG_SECONDS:
                logged = now
                count = first + len(chunk)
                seconds = now - start
                logger.info("%s: %d of %d in %.0f s", title, count, len(items), seconds)


def is_main_process() -> bool:
    """Whether this is rank 0; before ``torch.distributed`` is initialised, by the
    launcher's ``RANK``.
    """
    torch = sys.modules.get("torch")  # not imported: in no group
    distributed = torch and torch.distributed
    if distributed and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def default_device(device: str | None) -> str:
    """Name of a torch device: ``device``, or for None the process's current CUDA device
    if there is one, else the CPU.
    """
    import torch

    # With its index: plain "cuda" would follow a later change of the current device, and the
    # weights would not.
    return device or (
        f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    )
