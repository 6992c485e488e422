"""The generated world as a dataset (``data.format: scenes``)."""

import itertools
from functools import lru_cache, partial
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from rl_caption.data.base import Row, RowView, Splits
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

Scenes: TypeAlias = Annotated[int, Field(ge=0, le=10**9)]
Side: TypeAlias = Annotated[int, Field(ge=16, le=4096)]
Captions: TypeAlias = Annotated[int, Field(ge=1, le=10)]
BUCKETS_OF_SPLIT = {
    "train": range(2, 8),
    "val": range(1),
    "test": range(1, 2),
    "test_unseen": range(8),
}
"""Which of the eight buckets of scenes belong to a split."""
_CELL = 16
"""Positions are compared in cells of 16 thousandths of the side: one pixel at 64 pixels."""


class ScenesData(Splits):
    """Scenes with captions, in four disjoint splits; a pure function of its parameters.

    A hash of a scene's content decides its split, so that no scene occurs in two splits, whatever
    the sizes and seeds. Scenes of ``test_unseen`` have at least one of eight pairs of colour and
    shape (``UNSEEN_PAIRS``) that no other split contains; training has every colour and every shape
    in other pairs.

    Args:
        num_train: scenes in ``train``; likewise ``num_val``, ``num_test``, ``num_unseen``. 0 gives
            an empty split.
        image_size: side of the images in pixels, at least 16.
        seed: which scenes and captions. The first n scenes of a split do not depend on the split's
            size.
        captions_per_image: short references per image, 1 to 10.
        positives: rows also have as many ``positive_captions``, in other words, and one of
            ``positive_images`` per reference, which show the same scene shifted.
    """

    def __init__(
        self,
        num_train: Scenes = 4000,
        num_val: Scenes = 400,
        num_test: Scenes = 400,
        num_unseen: Scenes = 400,
        image_size: Side = 64,
        seed: Seed = 0,
        captions_per_image: Captions = 5,
        positives: bool = False,
    ) -> None:
        sizes = (num_train, num_val, num_test, num_unseen)
        rows = {}
        for split, size in zip(BUCKETS_OF_SPLIT, sizes, strict=True):
            options = (image_size, seed, captions_per_image, positives, split)
            rows[split] = RowView(range(size), partial(_row, options))
        super().__init__(rows, "the generated world")


def _row(options: tuple[Any, ...], index: int) -> Row:
    """A row, whose references are the caller's own list."""
    row = _kept_row(*options, index)
    return {**row, "references": list(row["references"])}


@lru_cache(maxsize=100_000)
def _kept_row(
    image_size: int,
    seed: int,
    count: int,
    positives: bool,
    split: str,
    index: int,
) -> Row:
    """Make a row (about 3 KB, without pixels)."""
    scene = _scene_of_row(seed, split, index)
    wording = hash_text(f"{seed}/{split}/{index}/captions")
    # The first captions do not depend on how many are asked for.
    captions = references(scene, wording, 2 * count if positives else count)
    row = Row(
        image_id=f"{split}-{index:06d}",
        image=SceneImage(scene, image_size),
        references=captions[:count],
        long_reference=long_reference(scene, wording),
        scene=scene,
    )
    if positives:
        row["positive_captions"] = captions[count:]
        # Where no shift of the scene belongs to this split, the scene itself.
        shifted = [
            moved for moved in moves(scene) if moved != scene and belongs(moved, split)
        ]
        order = Draws("moved", f"{seed}/{index}", split).permute(shifted or [scene])
        row["positive_images"] = [
            SceneImage(order[number % len(order)], image_size)
            for number in range(count)
        ]
    return row


def _scene_of_row(seed: int, split: str, index: int) -> Scene:
    """The first of the row's candidates whose content belongs in the split."""
    pairs = (PAIRS, UNSEEN_PAIRS) if split == "test_unseen" else (SEEN_PAIRS, ())
    for attempt in itertools.count():
        scene = make_scene(hash_text(f"{seed}/{split}/{index}/{attempt}"), *pairs)
        if belongs(scene, split):
            return scene
    raise AssertionError("a scene belongs in some split")


def belongs(scene: Scene, split: str) -> bool:
    """Whether the content of a scene may be in a split."""
    return hash_text(content_key(scene)) % 8 in BUCKETS_OF_SPLIT[split]


def content_key(scene: Scene) -> str:
    """What is seen of a scene, as a string: background, looks, and positions in cells of about a
    pixel.
    """
    things = sorted(
        (*thing.look, thing.x // _CELL, thing.y // _CELL) for thing in scene.things
    )
    return f"{scene.background} {things}"
