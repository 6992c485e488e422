"""The generated world as datasets (``data.format: scenes``, ``moving_scenes``), and its export to files."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from tqdm.auto import tqdm

from rewards.base import naming
from rewards.files import write_errors
from rewards.options import check_values
from rl_caption.data.base import DataError, Row, RowView, Splits, load_image
from rl_caption.data.files import write_text
from rl_caption.data.plain_files import hash_text
from rl_caption.data.scenes.language import long_reference, references
from rl_caption.data.scenes.moving import MovingScene, make_moving_scene, moving_references
from rl_caption.data.scenes.oracle import PUNCTUATION, tokens
from rl_caption.data.scenes.questions import scene_questions
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
from rl_caption.runtime.options import Range, Seed

Scenes: TypeAlias = Annotated[int, Range(min=0, max=10**9)]
Side: TypeAlias = Annotated[int, Range(min=16, max=4096)]
Frames: TypeAlias = Annotated[int, Range(min=2, max=256)]
Captions: TypeAlias = Annotated[int, Range(min=1, max=20)]
FewCaptions: TypeAlias = Annotated[int, Range(min=1, max=10)]
AnyScene = TypeVar("AnyScene", Scene, MovingScene)
SPLITS = ("train", "val", "test", "test_unseen")
_BUCKETS = 8
_SPLIT_BUCKETS = {
    "train": range(2, 8),
    "val": range(0, 1),
    "test": range(1, 2),
    "test_unseen": range(0, 8),
}
_CELL = 16
"""Positions are compared in cells of 16 thousandths of the side: one pixel at 64 pixels."""


class ScenesData(Splits):
    """Scenes with captions, in four disjoint splits; a pure function of its parameters.

    A hash of a scene's content decides its split, so that no scene occurs in two splits, whatever the sizes and seeds.
    Scenes of ``test_unseen`` have at least one of eight pairs of colour and shape (``UNSEEN_PAIRS``) that no other
    split contains; training has every colour and every shape in other pairs.

    Args:
        num_train: scenes in ``train``; likewise ``num_val``, ``num_test``, ``num_unseen``. 0 gives an empty split.
        image_size: side of the images in pixels, at least 16.
        seed: which scenes and captions. The first n scenes of a split do not depend on the split's size.
        captions_per_image: short references per image, 1 to 20.
        positives: rows also have as many ``positive_captions``, in other words, and one of ``positive_images`` per
            reference, which show the same scene shifted. ``captions_per_image`` is then at most 10.
        questions: most exact questions of a scene, the column ``questions`` of the reward ``caption_qa``; 0 gives none.

    Raises:
        DataError: a parameter is out of its range.
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
        questions: Scenes = 0,
    ) -> None:
        sizes = {
            "num_train": num_train,
            "num_val": num_val,
            "num_test": num_test,
            "num_unseen": num_unseen,
        }
        with naming("the generated world", (ValueError,), DataError):
            check_values(Scenes, **sizes, questions=questions)
            check_values(Side, image_size=image_size)
            check_values(
                FewCaptions if positives else Captions, captions_per_image=captions_per_image
            )
        make = partial(_scene_row, image_size, seed, captions_per_image, positives, questions)
        rows = _KeptRows.of(dict(zip(SPLITS, sizes.values(), strict=True)), make)
        super().__init__(rows, "the generated world")


def _scene_row(
    image_size: int, seed: int, count: int, positives: bool, questions: int, split: str, index: int
) -> Row:
    pairs = (PAIRS, UNSEEN_PAIRS) if split == "test_unseen" else (SEEN_PAIRS, ())
    scene = _first_of(
        split, (make_scene(number, *pairs) for number in _candidates(f"{seed}/{split}/{index}"))
    )
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
    if questions:
        row["questions"] = scene_questions(scene, wording, questions)
    if positives:
        row["positive_captions"] = captions[count:]
        # Shifts of the scene that belong to this split; the scene itself where there are none.
        shifted = [moved for moved in moves(scene) if moved != scene and belongs(moved, split)] or [
            scene
        ]
        order = Draws("moved", f"{seed}/{index}", split).permute(shifted)
        row["positive_images"] = [
            SceneImage(order[i % len(order)], image_size) for i in range(count)
        ]
    return row


class MovingScenesData(Splits):
    """Scenes that move, as videos of a few frames, in three disjoint splits; a pure function of its parameters.

    The ``image`` of a row is a tuple of ``num_frames`` frames (at least 2), evenly spaced from start to end. The other
    parameters are as for ``ScenesData``; ``captions_per_image`` is 1 to 10. Raises ``DataError`` where one is out of
    its range.
    """

    def __init__(
        self,
        num_train: Scenes = 4000,
        num_val: Scenes = 400,
        num_test: Scenes = 400,
        num_frames: Frames = 4,
        image_size: Side = 64,
        seed: Seed = 0,
        captions_per_image: FewCaptions = 5,
    ) -> None:
        sizes = {"train": num_train, "val": num_val, "test": num_test}
        with naming("the generated world of moving scenes", (ValueError,), DataError):
            check_values(Scenes, num_train=num_train, num_val=num_val, num_test=num_test)
            check_values(Frames, num_frames=num_frames)
            check_values(Side, image_size=image_size)
            check_values(FewCaptions, captions_per_image=captions_per_image)
        make = partial(_moving_row, num_frames, image_size, seed, captions_per_image)
        super().__init__(_KeptRows.of(sizes, make), "the generated world of moving scenes")


def _moving_row(
    num_frames: int, image_size: int, seed: int, count: int, split: str, index: int
) -> Row:
    scene = _first_of(split, map(make_moving_scene, _candidates(f"moving/{seed}/{split}/{index}")))
    moments = [number / (num_frames - 1) for number in range(num_frames)]
    return Row(
        image_id=f"{split}-{index:06d}",
        image=tuple(SceneImage(scene.at(moment), image_size) for moment in moments),
        references=moving_references(scene, hash_text(f"{seed}/{split}/{index}/captions"), count),
        scene=scene,
    )


@dataclass(eq=False)
class _KeptRows:
    """Makes the rows of one split and caches them (about 3 KB each, without pixels)."""

    make: Callable[[int], Row]
    cached: dict[int, Row] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Mapping[str, int], make: Callable[[str, int], Row]) -> dict[str, RowView]:
        """Rows of every split, each made when first accessed."""
        return {
            split: RowView(range(size), cls(partial(make, split))) for split, size in sizes.items()
        }

    def __call__(self, index: int, _: int) -> Row:
        if index not in self.cached:
            self.cached[index] = self.make(index)
        row = self.cached[index]
        return {**row, "references": list(row["references"])}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "made": {}}


def _candidates(key: str) -> Iterator[int]:
    """An endless sequence of seeds of scenes."""
    return (hash_text(f"{key}/{attempt}") for attempt in itertools.count())


def _first_of(split: str, scenes: Iterator[AnyScene]) -> AnyScene:
    """The first candidate whose content belongs in the split; every row has candidates of its own."""
    return next(scene for scene in scenes if belongs(scene, split))


def belongs(scene: Scene | MovingScene, split: str) -> bool:
    """Whether the content of a scene may be in a split."""
    return hash_text(content_key(scene)) % _BUCKETS in _SPLIT_BUCKETS[split]


def content_key(scene: Scene | MovingScene) -> str:
    """What is seen of a scene, as a string: background, looks, and positions in cells of about a pixel.

    For a moving scene, that of its start and its end.
    """
    if isinstance(scene, MovingScene):
        return f"{content_key(scene.start)} {content_key(scene.at(1))}"
    things = sorted(
        (t.shape, t.colour, t.size, t.texture, t.x // _CELL, t.y // _CELL) for t in scene.things
    )
    return f"{scene.background} {things}"


def export(directory: str | Path, data: ScenesData) -> Path:
    """Write every split to disk: ``images/<image_id>.png``, and, last, ``dataset.json``, whose path is returned.

    The JSON file is ``{"dataset": "scenes", "images": [{"filepath", "filename", "imgid", "split", "sentids",
    "sentences": [{"tokens", "raw", "imgid", "sentid"}], "long_reference", "scene"}]}``. ``tokens`` are lower-case words
    without punctuation; ``scene`` is what ``Scene.from_dict`` reads. Equal data gives equal files. Raises ``DataError``
    where the folder cannot be written.
    """
    root = Path(directory)
    entries: list[dict[str, Any]] = []
    sentence_id = 0
    try:
        (root / "images").mkdir(parents=True, exist_ok=True)
        for split in data.splits:
            for row in tqdm(data.split(split), desc=f"drawing {split}", unit="image", disable=None):
                entry = _entry(row, split, len(entries), sentence_id)
                image = root / "images" / entry["filename"]
                with write_errors(image):
                    load_image(row["image"]).save(image)
                sentence_id += len(entry["sentences"])
                entries.append(entry)
        path = root / "dataset.json"
        write_text(path, json.dumps({"dataset": "scenes", "images": entries}) + "\n")
    except OSError as error:
        raise DataError(f"cannot write the scenes to {str(root)!r}: {error}") from error
    return path


def _entry(row: Row, split: str, image_number: int, first_sentence: int) -> dict[str, Any]:
    words = [
        [word for word in tokens(caption) if word[0] not in PUNCTUATION]
        for caption in row["references"]
    ]
    sentences = [
        {"tokens": words_of_sentence, "raw": caption, "imgid": image_number, "sentid": number}
        for number, (words_of_sentence, caption) in enumerate(
            zip(words, row["references"], strict=True), start=first_sentence
        )
    ]
    names = {
        "filepath": "images",
        "filename": f"{row['image_id']}.png",
        "imgid": image_number,
        "split": split,
    }
    ids = [sentence["sentid"] for sentence in sentences]
    texts = {"sentids": ids, "sentences": sentences, "long_reference": row["long_reference"]}
    return {**names, **texts, "scene": row["scene"].to_dict()}
