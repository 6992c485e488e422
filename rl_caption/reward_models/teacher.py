"""Embeddings of a frozen teacher: computed once for the training split where they can be, else at every step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from rewards.clip.backbone import Backbone
from rewards.clip.encoder import EmbeddingCache
from rewards.images import image_identity
from rl_caption.data.base import Row
from rl_caption.reward_models.batch import Captions, PairBatch
from rl_caption.training.tracking import announce

logger = logging.getLogger(__name__)
T = TypeVar("T")


def shared_out(accelerator: Accelerator, items: Sequence[T], embed: Callable[[list[T]], Tensor]) -> Tensor:
    """Embed N items, each process its share; every process gets all of them: [N, D] on the CPU, in order."""
    processes = accelerator.num_processes
    if processes == 1:
        return embed(list(items)).cpu()
    share = -(-len(items) // processes)
    # Shares of equal size, which a gather needs: the last ones start again at the first item.
    mine = [items[(accelerator.process_index * share + offset) % len(items)] for offset in range(share)]
    return accelerator.gather(embed(mine).to(accelerator.device).contiguous()).cpu()[: len(items)]


class Teacher:
    """Raw embeddings (not of unit length) of a frozen dual encoder.

    Args:
        backbone: the teacher.
        towers: which embeddings are wanted: ``image``, ``text`` or both.
        accelerator: devices and processes.
        augmented: images are seen in another view at every step: the teacher then embeds the view that the student
            sees, and none of its image embeddings can be kept.
        cache_dir: folder that keeps embeddings of images and captions between runs; None keeps them in memory only.
    """

    def __init__(
        self,
        backbone: Backbone,
        towers: Sequence[str],
        accelerator: Accelerator,
        augmented: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        self.backbone, self.towers, self.accelerator = backbone, tuple(towers), accelerator
        self.augmented = augmented
        # Memory is for what ``prepare`` brings together; one entry is the least.
        folder = None if cache_dir is None else Path(cache_dir)
        self._kept = None if folder is None else EmbeddingCache(f"{backbone.fingerprint}-raw", folder, max_entries=1)
        self.width = int(self.text_embeddings(["a"]).shape[1])
        self._images: dict[str, int] = {}
        self._texts: dict[str, int] = {}
        self._image_table = self._text_table = torch.zeros(0, self.width)

    def __call__(self, batch: PairBatch) -> dict[str, Tensor]:
        """Embeddings [B, D] by tower, on the training device, without gradient."""
        found = {}
        if "image" in self.towers:
            found["image"] = self._batch_images(batch)
        if "text" in self.towers:
            known = all(caption in self._texts for caption in batch.captions)
            found["text"] = (
                self._text_table[[self._texts[caption] for caption in batch.captions]]
                if known
                else self.text_embeddings(batch.captions)
            )
        return {name: rows.to(self.accelerator.device) for name, rows in found.items()}

    def _batch_images(self, batch: PairBatch) -> Tensor:
        if self.augmented:
            return self.backbone.encode_pixels(batch.inputs["image"], normalize=False)
        ids = [row["image_id"] for row in batch.rows]
        if all(image in self._images for image in ids):
            return self._image_table[[self._images[image] for image in ids]]
        return self.image_embeddings(batch.rows)

    def image_embeddings(self, rows: Sequence[Row]) -> Tensor:
        """Embeddings of the images of N rows as they are, [N, D] on the CPU; those in ``cache_dir`` are read."""
        return self._embedded([row["image"] for row in rows], self.backbone.encode_images, image_identity, "image")

    def text_embeddings(self, captions: Sequence[str]) -> Tensor:
        """Embeddings of N captions, [N, D] on the CPU; those in ``cache_dir`` are read."""
        return self._embedded(captions, self.backbone.encode_texts, self._caption_identity, "caption")

    def _embedded(
        self, items: Sequence[Any], encode: Callable[..., Tensor], identity: Callable[[Any], str], kind: str
    ) -> Tensor:
        if self._kept is None:
            return encode(items, normalize=False)
        found = self._kept.embed(items, lambda missing: encode(missing, normalize=False).numpy(), identity, kind)
        return torch.from_numpy(found)

    def _caption_identity(self, caption: str) -> str:
        """The token ids that the teacher reads: a text of another tokenizer is another text."""
        return f"tokens:{self.backbone.token_ids([caption])[0].tolist()}"

    def prepare(self, rows: Sequence[Row], captions: Captions, cache_bytes: int) -> None:
        """Embed what training will ask for, once and for all, as far as it fits into ``cache_bytes``."""
        left = cache_bytes
        if "text" in self.towers:
            texts = [row["references"][:1] if captions == "first" else row["references"] for row in rows]
            distinct = list(dict.fromkeys(caption for own in texts for caption in own))
            if self._fits(len(distinct), left, "captions"):
                self._text_table = shared_out(self.accelerator, distinct, self.text_embeddings)
                self._texts = {caption: index for index, caption in enumerate(distinct)}
                left -= self._text_table.nbytes
        if "image" in self.towers and not self.augmented and self._fits(len(rows), left, "images"):
            self._image_table = shared_out(self.accelerator, rows, self.image_embeddings)
            self._images = {row["image_id"]: index for index, row in enumerate(rows)}

    def _fits(self, count: int, cache_bytes: int, what: str) -> bool:
        needed = count * self.width * 4
        if needed <= cache_bytes:
            announce(self.accelerator, f"teacher: embedding {count} {what} once ({needed / 2**20:.0f} MiB)")
            return True
        instead = "embedded" if self._kept is None else "read from teacher.cache_dir, or embedded the first time,"
        announce(
            self.accelerator,
            f"teacher: {count} {what} need {needed / 2**20:.0f} MiB, more than is left of teacher.cache_mb: they are "
            f"{instead} at every step instead",
        )
        return False
