"""Flickr8k-Expert and Flickr8k-CrowdFlower: captions of other images of Flickr8k, rated for an image.

Source: Hodosh, Young and Hockenmaier, "Framing Image Description as a Ranking Task", JAIR 2013. The protocol is the one
of CLIPScore (Hessel et al., EMNLP 2021) and of those who compare with it:

- Expert: three experts rate a pair of image and caption from 1 to 4, and each rating is a judgement of its own. Pairs
  whose caption is among the image's five references are left out: 158 of 5,822, so that 16,992 judgements remain.
  Printed is tau_c.
- CrowdFlower: the rating is the share of at least three people who said yes. All 47,830 pairs are judged; a caption
  that is among the image's references is taken out of them, for all captions of that image. Printed is tau_b. Of equal
  references one is taken out for each judgement, as the released code does (one image has two).

Read are the files of the authors (``ExpertAnnotations.txt`` or ``CrowdFlowerAnnotations.txt``, with
``Flickr8k.token.txt``), or ``flickr8k.json`` and ``crowdflower_flickr8k.json``, which others have made from them. White
space is made single.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rl_caption.meta_evaluation.human import read_ratings
from rl_caption.meta_evaluation.sets.base import (
    JudgingSetError,
    RatedCaptions,
    check_count,
    image_folder,
    number_of,
    require,
    single_spaced,
    tab_rows,
)

SOURCE = (
    "Flickr8k_text.zip (captions and annotations) and Flickr8k_Dataset.zip (photos), University of Illinois, "
    "https://hockenmaier.cs.illinois.edu/8k-pictures.html, or the copies that are named there"
)
IMAGE_FOLDERS = ("images", "Flickr8k_Dataset", "Flicker8k_Dataset")
EXPERT_PAIRS, EXPERT_JUDGEMENTS, CROWD_JUDGEMENTS, CAPTIONS = 5_822, 16_992, 47_830, 40_460
REFERENCES = 5
"""Captions of an image."""
OWN_REFERENCE = "the caption is one of the image's references"

Judgement = tuple[str, str, float]
"""File name of an image, caption, rating."""


def flickr8k_expert(folder: Path, images: Path | None = None, partial: bool = False) -> list[RatedCaptions]:
    """Read Flickr8k-Expert.

    Args:
        folder: of the files.
        images: folder of the photos; None looks below ``folder``.
        partial: accept other numbers than the published ones.

    Raises:
        JudgingSetError: a file is missing or wrong, or has another number of judgements.
    """
    name = "flickr8k_expert"
    path = require(folder, name, ["ExpertAnnotations.txt", "flickr8k.json"], SOURCE)
    if path.suffix == ".json":
        judgements, references = _from_json(path)
    else:
        captions, references = _captions(folder, name, partial)
        rows = tab_rows(path, 5)
        check_count(name, f"pairs in {path}", len(rows), EXPERT_PAIRS, partial)
        judgements = [
            (
                image,
                _caption(captions, caption, path),
                number_of(score, f"{path}: a rating of {image:.80}, {caption:.80},"),
            )
            for image, caption, *scores in rows
            for score in scores
        ]
    _check_images(judgements, references, path)
    kept = [judgement for judgement in judgements if judgement[1] not in references[judgement[0]]]
    check_count(name, "judgements", len(kept), EXPERT_JUDGEMENTS, partial)
    excluded = {OWN_REFERENCE: len(judgements) - len(kept)}
    seen = [references[image] for image, _, _ in kept]
    convention = "each of the three experts' ratings of a caption is a judgement; 5 references"
    return [_rated(name, kept, seen, image_folder(folder, images, IMAGE_FOLDERS), "tau_c", convention, excluded)]


def flickr8k_crowdflower(folder: Path, images: Path | None = None, partial: bool = False) -> list[RatedCaptions]:
    """Read Flickr8k-CrowdFlower; arguments and errors as for ``flickr8k_expert``."""
    name = "flickr8k_crowdflower"
    path = require(folder, name, ["CrowdFlowerAnnotations.txt", "crowdflower_flickr8k.json"], SOURCE)
    if path.suffix == ".json":
        judgements, references = _from_json(path)
    else:
        captions, references = _captions(folder, name, partial)
        judgements = [
            (
                image,
                _caption(captions, caption, path),
                number_of(share, f"{path}: the share of {image:.80}, {caption:.80},"),
            )
            for image, caption, share, _, _ in tab_rows(path, 5)
        ]
    _check_images(judgements, references, path)
    check_count(name, "judgements", len(judgements), CROWD_JUDGEMENTS, partial)
    # In the files of others they are out already, and such an image has fewer than five.
    whole = {image: texts for image, texts in references.items() if len(texts) >= REFERENCES}
    others = references | references_without(judgements, whole, path)
    seen = [others[image] for image, _, _ in judgements]
    convention = "the rating is the share of people who said yes; judged captions are not among the references"
    return [_rated(name, judgements, seen, image_folder(folder, images, IMAGE_FOLDERS), "tau_b", convention, {})]


def references_without(
    judgements: Sequence[Judgement], references: Mapping[str, list[str]], path: Path
) -> dict[str, list[str]]:
    """Take judged captions out of the references of their image: for each judgement one that is equal to it.

    Returns:
        Image -> what is left, for the images of ``references``.

    Raises:
        JudgingSetError: nothing is left for an image.
    """
    others = {image: list(texts) for image, texts in references.items()}
    for image, caption, _ in judgements:
        if caption in others.get(image, ()):
            others[image].remove(caption)
    bare = [image for image, texts in others.items() if not texts]
    if bare:
        raise JudgingSetError(f"{path}: all references of {len(bare)} images are judged, such as {bare[0]!r:.80}")
    return others


def read_tokens(path: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Read ``IMAGE#NUMBER<tab>CAPTION`` lines, the format of Flickr8k and Flickr30k.

    Returns:
        Caption id -> caption, and file name of an image -> its captions.

    Raises:
        JudgingSetError: a line is something else.
    """
    captions: dict[str, str] = {}
    references: dict[str, list[str]] = {}
    for caption_id, text in tab_rows(path, 2):
        image, mark, _ = caption_id.partition("#")
        if not mark:
            raise JudgingSetError(f"{path}: {caption_id!r:.80} is not a caption id: expected IMAGE#NUMBER")
        captions[caption_id] = single_spaced(text)
        references.setdefault(image, []).append(captions[caption_id])
    return captions, references


def _captions(folder: Path, name: str, partial: bool) -> tuple[dict[str, str], dict[str, list[str]]]:
    path = require(folder, name, ["Flickr8k.token.txt"], SOURCE)
    captions, references = read_tokens(path)
    check_count(name, f"captions in {path}", len(captions), CAPTIONS, partial)
    return captions, references


def _caption(captions: dict[str, str], caption_id: str, path: Path) -> str:
    if caption_id not in captions:
        raise JudgingSetError(f"{path} judges the caption {caption_id!r:.80}, which Flickr8k.token.txt does not have")
    return captions[caption_id]


def _check_images(judgements: Sequence[Judgement], references: dict[str, list[str]], path: Path) -> None:
    unknown = [image for image, _, _ in judgements if image not in references]
    if unknown:
        raise JudgingSetError(
            f"{path}: {len(unknown)} judgements are of images without captions, such as {unknown[0]!r:.80}"
        )


def _from_json(path: Path) -> tuple[list[Judgement], dict[str, list[str]]]:
    rated = read_ratings(path)
    if rated.references is None:
        raise JudgingSetError(f"{path} has no references: expected 'ground_truth' for every image")
    names = [Path(image).name for image in rated.images]
    judgements = list(zip(names, rated.captions, rated.ratings, strict=True))
    return judgements, dict(zip(names, rated.references, strict=True))


def _rated(
    name: str,
    judgements: Sequence[Judgement],
    references: list[list[str]],
    photos: Path | None,
    published: Literal["tau_b", "tau_c"],
    convention: str,
    excluded: dict[str, int],
) -> RatedCaptions:
    images = [image for image, _, _ in judgements]
    return RatedCaptions(
        name,
        [caption for _, caption, _ in judgements],
        [rating for _, _, rating in judgements],
        images,
        None if photos is None else [photos / image for image in images],
        references,
        published,
        convention,
        excluded,
    )
