"""The generated world as a dataset (``data.format: scenes``)."""

import itertools
from functools import lru_cache, partial
from typing import Annotated, Any

from pydantic import Field

from rl_caption.data.base import Row, RowView, Splits, with_references
from rl_caption.data.plain_files import hash_text
from rl_caption.data.scenes.language import long_reference, references
from rl_caption.data.scenes.render import SceneImage
from rl_caption.data.scenes.world import (
    PAIRS,
    SEEN_PAIRS,
    UNSEEN_PAIRS,
    Draws,
    Scene,
    make_scene,
    moves,
)
from rl_caption.runtime.options import Seed

Scenes = Annotated[int, Field(ge=0)]
CAPTIONS = 5
"""Short references per image."""
BUCKETS_OF_SPLIT = {
    "train": range(2, 8),
    "val": [0],
    "test": [1],
    "test_unseen": range(8),
}
"""Split -> its buckets among the eight buckets of scenes."""
_CELL = 16
"""Positions are compared in cells of 16 thousandths of the side: one pixel at 64 pixels."""


class ScenesData(Splits):
    """Scenes with captions, in four disjoint splits; a pure function of its parameters.

    A hash of a scene's content decides its split, so that no scene occurs in two
    splits, whatever the sizes and seeds. Scenes of ``test_unseen`` have at least one of
    eight pairs of colour and shape (``UNSEEN_PAIRS``) that no other split contains;
    training has every colour and every shape in other pairs.

    Args:
        num_train: scenes in ``train``; likewise ``num_val``, ``num_test``,
            ``num_unseen``. 0 gives an empty split.
        image_size: side of the images in pixels, at least 16.
        seed: which scenes and captions. The first n scenes of a split do not depend on
            the split's size.
        positives: rows also have as many ``positive_captions``, in other words, and one
            of ``positive_images`` per reference, which show the same scene shifted.
    """

    def __init__(
        self,
        num_train: Scenes = 4000,
        num_val: Scenes = 400,
        num_test: Scenes = 400,
        num_unseen: Scenes = 400,
        image_size: Annotated[int, Field(ge=16)] = 64,
        seed: Seed = 0,
        positives: bool = False,
    ) -> None:
        sizes = (num_train, num_val, num_test, num_unseen)
        rows = {
            split: RowView(
                range(size), partial(_row, image_size, seed, positives, split)
            )
            for split, size in zip(BUCKETS_OF_SPLIT, sizes, strict=True)
        }
        super().__init__(rows, "the generated world")


def _row(*key: Any) -> Row:
    """A copy of a cached row, which the caller may change."""
    return with_references(_make_row(*key), range(CAPTIONS))


@lru_cache(maxsize=100_000)
def _make_row(
    image_size: int, seed: int, positives: bool, split: str, index: int
) -> Row:
    """The row of the first of its candidates whose content belongs in the split."""
    pairs = (PAIRS, UNSEEN_PAIRS) if split == "test_unseen" else (SEEN_PAIRS, ())
    candidates = (
        make_scene(hash_text(f"{seed}/{split}/{index}/{attempt}"), *pairs)
        for attempt in itertools.count()
    )
    scene = next(scene for scene in candidates if belongs(scene, split))
    wording = hash_text(f"{seed}/{split}/{index}/captions")
    # The first captions do not depend on how many are asked for.
    captions = references(scene, wording, (1 + positives) * CAPTIONS)
    row = Row(
        image_id=f"{split}-{index:06d}",
        image=SceneImage(scene, image_size),
        references=captions[:CAPTIONS],
        long_reference=long_reference(scene, wording),
        scene=scene,
    )
    if positives:
        others = [moved for moved in moves(scene) if moved != scene]
        shifted = [moved for moved in others if belongs(moved, split)]
        # Where no shift of the scene belongs to this split, the scene itself.
        order = Draws("moved", f"{seed}/{index}", split).permute(shifted or [scene])
        chosen = (order * CAPTIONS)[:CAPTIONS]
        row["positive_captions"] = captions[CAPTIONS:]
        row["positive_images"] = [SceneImage(moved, image_size) for moved in chosen]
    return row


def belongs(scene: Scene, split: str) -> bool:
    """Whether the content of a scene may be in a split."""
    return hash_text(content_key(scene)) % 8 in BUCKETS_OF_SPLIT[split]


def content_key(scene: Scene) -> str:
    """What a scene shows, as a string: background, looks, and positions in cells of
    about a pixel.
    """
    things = sorted(
        (*thing[:4], thing.x // _CELL, thing.y // _CELL) for thing in scene.things
    )
    return f"{scene.background} {things}"
