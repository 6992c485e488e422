"""The frozen teacher: its embeddings of the training split, computed once where memory allows."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from rewards.clip.backbone import FrozenEncoder, load_frozen_encoder
from rewards.clip.encoder import EmbeddingCache, image_identity
from rl_caption.config.reward_models import TeacherConfig
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import Row
from rl_caption.reward_models.batch import Captions, PairBatch
from rl_caption.runtime.engines import print_main
from rl_caption.runtime.errors import naming

T = TypeVar("T")
Tower: TypeAlias = Literal["image", "text"]
PART = 2**16
"""Number of images or captions that are embedded and gathered from the processes at a time."""


def embed_distributed(
    accelerator: Accelerator, items: Sequence[T], embed: Callable[[list[T]], Tensor]
) -> Tensor:
    """Embed N items, a part in each process, and gather them: [N, D] on the CPU of
    every process, in order.
    """
    processes = accelerator.num_processes
    if processes == 1:
        return embed(list(items)).cpu()
    count = -(-len(items) // processes)
    first = accelerator.process_index * count
    # A gather needs parts of equal size: the last ones start again at the first item.
    share = [items[number % len(items)] for number in range(first, first + count)]
    embedded = embed(share).to(accelerator.device).contiguous()
    return accelerator.gather(embedded).cpu()[: len(items)]


class Teacher:
    """A frozen dual encoder, or one tower of it, that gives raw embeddings (not of unit length).

    Args:
        towers: ``image``, ``text`` or both.
        augmented: whether to embed, at every step, the augmented view of the student.
        cache_dir: folder that keeps embeddings between runs; None keeps none.
    """

    def __init__(
        self,
        backbone: FrozenEncoder,
        towers: Sequence[str],
        accelerator: Accelerator,
        augmented: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        self.backbone = backbone
        self.accelerator = accelerator
        self.towers = tuple(towers)
        self.augmented = augmented
        self._disk: EmbeddingCache | None = None
        if cache_dir is not None:
            # ``prepare`` keeps tables in memory; the disk cache's own memory is as small as possible.
            self._disk = EmbeddingCache(
                f"{backbone.fingerprint}-raw", cache_dir, max_entries=1
            )
        self.width = int(self.embed("text", ["a"]).shape[1])
        self._tables: dict[str, tuple[dict[str, int], Tensor]] = {}
        """Tower -> row of each image id or caption in a table of embeddings [N, D]."""

    def __call__(self, batch: PairBatch) -> dict[str, Tensor]:
        """Raw embeddings [B, D] by tower; on the training device, without gradient."""
        embeddings = {}
        for tower in self.towers:
            keys = batch.captions
            if tower == "image":
                keys = [row["image_id"] for row in batch.rows]
            index, table = self._tables.get(tower, ({}, torch.zeros(0)))
            if tower == "image" and self.augmented:
                views = batch.inputs["image"]
                encoded = self.backbone.encode_pixels(views, normalize=False)
            elif all(key in index for key in keys):
                encoded = table[[index[key] for key in keys]]
            else:
                encoded = self.embed(tower, batch.rows if tower == "image" else keys)
            embeddings[tower] = encoded.to(self.accelerator.device)
        return embeddings

    def embed(self, tower: str, items: Sequence[Any]) -> Tensor:
        """Embeddings of the images of N rows as they are, or of N captions: [N, D] on the CPU.

        They are read from ``cache_dir`` if there; captions by their token ids.
        """
        encode: Any = self.backbone.encode_texts
        if tower == "image":
            encode = self.backbone.encode_images
            items = [row["image"] for row in items]
        encode = partial(encode, normalize=False)
        if self._disk is None:
            return encode(items)
        token_ids = self.backbone.token_ids
        rows = self._disk.embed(
            items,
            lambda missing: encode(missing).numpy(),
            image_identity
            if tower == "image"
            else lambda caption: f"tokens:{token_ids([caption])[0].tolist()}",
            tower,
        )
        return torch.from_numpy(rows)

    def prepare(
        self, rows: Sequence[Row], captions: Captions, cache_bytes: int
    ) -> None:
        """Embed the training split before the first step, captions first, as far as
        ``cache_bytes`` of memory allow, ``PART`` at a time.
        """
        count = 1 if captions == "first" else None
        texts = [caption for row in rows for caption in row["references"][:count]]
        distinct = list(dict.fromkeys(texts))
        ids = [row["image_id"] for row in rows]
        plans = [("text", distinct, distinct), ("image", ids, rows)]
        for tower, keys, items in plans:
            if tower not in self.towers or (tower == "image" and self.augmented):
                continue
            needed = len(items) * self.width * 4
            size = f"({needed / 2**20:.0f} MiB)"
            if needed > cache_bytes:
                print_main(
                    self.accelerator,
                    f"teacher: {len(items)} {tower}s {size} are more than teacher.cache_mb has "
                    "left: they are read from teacher.cache_dir, or embedded, at every step",
                )
                continue
            said = f"teacher: embedding {len(items)} {tower}s once {size}"
            print_main(self.accelerator, said)
            cache_bytes -= needed
            table = torch.empty(len(items), self.width)
            for start in range(0, len(items), PART):
                chunk = items[start : start + PART]
                table[start : start + PART] = embed_distributed(
                    self.accelerator, chunk, partial(self.embed, tower)
                )
            self._tables[tower] = {key: row for row, key in enumerate(keys)}, table


def load_teacher(
    accelerator: Accelerator,
    teacher: TeacherConfig,
    data: DataConfig,
    towers: Sequence[Tower],
) -> Teacher:
    """The frozen model of the section ``teacher``. ``ConfigError`` where it cannot be loaded."""
    assert teacher.name is not None  # the configuration checks it
    with naming("teacher"), accelerator.main_process_first():  # which may download it
        backbone = load_frozen_encoder(
            teacher.name,
            teacher.pretrained,
            str(accelerator.device),
            precision=teacher.precision,
            batch_size=teacher.batch_size,
        )
    return Teacher(backbone, towers, accelerator, bool(data.augment), teacher.cache_dir)
