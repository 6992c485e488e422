"""Zero-shot classification: the class whose name in CLIP's prompts is nearest to an image.

Protocol of Radford et al., "Learning Transferable Visual Models From Natural Language
Supervision", ICML 2021, section 3.1.4: the embeddings of a class's prompts are averaged
and normalised.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rewards.base import RewardError, naming, optional
from rewards.clip.encoder import CachedEncoder
from rl_caption.data.base import DataError

CIFAR_PROMPTS = (
    "a photo of a {}.",
    "a blurry photo of a {}.",
    "a black and white photo of a {}.",
    "a low contrast photo of a {}.",
    "a high contrast photo of a {}.",
    "a bad photo of a {}.",
    "a good photo of a {}.",
    "a photo of a small {}.",
    "a photo of a big {}.",
    "a photo of the {}.",
    "a blurry photo of the {}.",
    "a black and white photo of the {}.",
    "a low contrast photo of the {}.",
    "a high contrast photo of the {}.",
    "a bad photo of the {}.",
    "a good photo of the {}.",
    "a photo of the small {}.",
    "a photo of the big {}.",
)
"""CLIP's 18 prompts for CIFAR-10 and CIFAR-100."""
IMAGENET_CLASS = re.compile(r"n\d{8}")


def zero_shot_accuracy(
    encoder: CachedEncoder, folder: str | Path, prompts: str = "imagenet"
) -> float:
    """Share of images whose class is the nearest one, in [0, 1].

    Args:
        encoder: embeds images and prompts.
        folder: has a folder of images for each class (ImageNet's layout). Names such as
            ``n01440764`` are classes of ImageNet-1k, and all 1,000 must be there; other
            names are the names of the classes, with ``_`` for spaces.
        prompts: ``imagenet`` (CLIP's 80) or ``cifar`` (its 18).

    Raises:
        DataError: the folder has fewer than two classes, or a class has no image.
        RewardError: an image cannot be read, or open_clip is not installed.
    """
    names, images, classes = labelled_images(Path(folder))
    writers: Sequence[Callable[[str], str]] = [text.format for text in CIFAR_PROMPTS]
    if prompts == "imagenet":
        writers = _metadata().OPENAI_IMAGENET_TEMPLATES
    rows = encoder.embed_texts([write(name) for name in names for write in writers])
    means = rows.reshape(len(names), len(writers), -1).mean(axis=1)
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    nearest = (encoder.embed_images(images) @ means.T).argmax(axis=1)
    return float(np.mean(nearest == np.array(classes)))


def labelled_images(folder: Path) -> tuple[list[str], list[str], list[int]]:
    """Read a folder with a folder for each of C classes: their names [C], N images, and
    the class of each [N].
    """
    from torchvision.datasets import ImageFolder  # imports torch

    with naming(str(folder), (FileNotFoundError,), DataError):
        dataset = ImageFolder(str(folder))
    if len(dataset.classes) < 2:
        raise DataError(f"{str(folder)!r} has one folder: expected one for each class")
    names = [name.replace("_", " ") for name in dataset.classes]
    if all(map(IMAGENET_CLASS.fullmatch, dataset.classes)):
        names = list(_metadata().IMAGENET_CLASSNAMES)
        if len(names) != len(dataset.classes):
            raise DataError(
                f"{str(folder)!r} has {len(dataset.classes)} of ImageNet's {len(names)} classes"
            )
    images, classes = zip(*dataset.samples, strict=True)
    return names, list(images), list(classes)


def _metadata():  # type: ignore[no-untyped-def]  # a module
    return optional(
        "open_clip.zero_shot_metadata",
        "the names of ImageNet's classes need",
        "'rl-caption[clip]'",
        RewardError,
    )
