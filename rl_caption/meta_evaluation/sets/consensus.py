"""Pascal-50S and Abstract-50S: of two captions of an image, which one is nearer to what 48 people wrote.

Source: Vedantam, Zitnick and Parikh, "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015. For each pair,
48 triplets (reference, first, second) were judged: which caption is more similar to the reference. The majority of the
48 votes says which one is better.

Protocol (CLIPScore, PAC-S): metrics see 5 of the 48 references, and accuracies are averaged over 5 draws; metrics
without references need no draws. Where people are divided evenly, the released code says by a random number which
caption is better. Here such a pair counts one half whatever the metric says, which is what that comes to on average,
and needs no seed; so does a pair to which a metric gives equal scores.

``pascal_50s.json``, in which Pascal-50S circulates (in the repositories of FLEUR, Lee et al., ACL 2024, and of EXPERT),
has 5 references that somebody drew and a label instead of the votes: metrics with references have one draw then, and
evenly divided people are a side that somebody chose.

Pascal-50S has 4,000 pairs, 1,000 of each kind: HC (both by people, both right), HI (both by people, one of another
image), HM (a person's and a system's), MM (two systems'). The public files of Abstract-50S, 400 pairs, do not tell
HC from HI: its kinds are not reported.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from rl_caption.meta_evaluation.sets.base import (
    CaptionPairs,
    JudgingSetError,
    check_count,
    image_folder,
    list_of,
    read_json,
    require,
    text_of,
    texts_of,
)

SOURCE = (
    "the PASCAL-50S and ABSTRACT-50S datasets and the consensus annotations, https://vrama91.github.io/cider/, or "
    "pascal_50s.json from https://github.com/Yebin46/FLEUR"
)
VOTES, REFERENCES, DRAWS = 48, 5, 5
KINDS = {1: "HC", 2: "HI", 3: "HM", 4: "MM"}

PHOTOS = ["JPEGImages", "VOC2010/JPEGImages", "VOC2012/JPEGImages", "images"]
_NOT_AS_EXPECTED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading MATLAB's structures raises where they are others."""
_UNREADABLE = (OSError, EOFError, MemoryError, NotImplementedError, struct.error, zlib.error)

Triplet = tuple[str, str, str, int]
"""Reference, first caption, second caption, vote: 1 for the first, -1 for the second."""


def pascal50s(folder: Path, images: Path | None = None, partial: bool = False, seed: int = 0) -> list[CaptionPairs]:
    """Read Pascal-50S: ``consensus_pascal.mat`` (votes) and ``pair_pascal.mat`` (images and kinds), or
    ``pascal_50s.json``.

    Args:
        folder: of the files, or the one above their ``pyCIDErConsensus``.
        images: folder of the photos (``JPEGImages`` of VOC2010 or VOC2012); None looks below ``folder``.
        partial: accept other numbers than the published ones.
        seed: which references are drawn; of no effect on the JSON file.

    Raises:
        JudgingSetError: a file is missing or wrong, or has another number of pairs.
    """
    name = "pascal50s"
    place = _annotations(folder)
    file = require(place, name, ["consensus_pascal.mat", "pascal_50s.json"], SOURCE)
    if file.suffix == ".json":
        return [_pascal_json(file, image_folder(folder, images, PHOTOS), partial)]
    votes = _triplets(file, name)
    path = require(place, name, ["pair_pascal.mat"], SOURCE)
    content = _mat(path)
    try:
        rows = [[str(_plain(row[field])).strip() for field in range(3)] for row in content["new_input"].ravel()]
        files, written = [row[0] for row in rows], [tuple(row[1:]) for row in rows]
        kinds = [KINDS[int(kind)] for kind in content["category"].ravel()]
    except _NOT_AS_EXPECTED as error:
        raise JudgingSetError(
            f"{path} is not of Pascal-50S: expected new_input (image, first, second) and category"
        ) from error
    pairs = _by_pair(votes, name)
    if len(files) != len(pairs) or len(kinds) != len(pairs):
        raise JudgingSetError(
            f"{path} has {len(files)} pairs and {len(kinds)} categories: the votes are of {len(pairs)}"
        )
    for number, (pair, captions) in enumerate(zip(pairs, written, strict=True)):
        if set(pair[0][1:3]) != set(captions):  # in either order; the votes are of the triplets' order
            raise JudgingSetError(
                f"{path}: pair {number} has the captions {captions!r:.120}, the votes are of {pair[0][1:3]!r:.120}"
            )
    check_count(name, "pairs", len(pairs), 4000, partial)
    photos = image_folder(folder, images, PHOTOS)
    return [_pairs(name, pairs, kinds, files, None if photos is None else [photos / file for file in files], seed)]


def _pascal_json(path: Path, photos: Path | None, partial: bool) -> CaptionPairs:
    content = read_json(path)
    rows = [
        (kind, item, f"{path}, {kind}[{number}]")
        for kind in KINDS.values()
        for number, item in enumerate(list_of(content, path, kind))
    ]
    check_count("pascal50s", "pairs", len(rows), 4000, partial)
    captions = [texts_of(item.get("captions"), f"{where}: 'captions'") for _, item, where in rows]
    for own, (_, item, where) in zip(captions, rows, strict=True):
        if len(own) != 2 or item.get("label") not in (0, 1):
            raise JudgingSetError(
                f"{where} has {len(own)} captions and the label {item.get('label')!r:.80}: expected two, and 0 or 1"
            )
    files = [PurePosixPath(text_of(item, "image", where)).name for _, item, where in rows]
    return CaptionPairs(
        "pascal50s",
        [first for first, _ in captions],
        [second for _, second in captions],
        [1.0 - item["label"] for _, item, _ in rows],
        [kind for kind, _, _ in rows],
        files,
        None if photos is None else [photos / file for file in files],
        {
            f"{REFERENCES} references": [
                texts_of(item.get("references"), f"{where}: 'references'") for _, item, where in rows
            ]
        },
        "the caption that the label names scores higher; metrics with references see those of the file; equal scores "
        "count one half",
        averaged=True,
        ties="half",
        summary="kinds",
    )


def abstract50s(folder: Path, images: Path | None = None, partial: bool = False, seed: int = 0) -> list[CaptionPairs]:
    """Read Abstract-50S: ``consensus_abstract.mat``, and ``abstract_candsB.json`` for the names of the images.

    Arguments and errors as for ``pascal50s``. Without the second file there are no images.
    """
    name = "abstract50s"
    place = _annotations(folder)
    pairs = _by_pair(_triplets(require(place, name, ["consensus_abstract.mat"], SOURCE), name), name)
    check_count(name, "pairs", len(pairs), 400, partial)
    files = [f"pair {number}" for number in range(len(pairs))]
    photos = None
    candidates = place / "abstract_candsB.json"
    if candidates.is_file():
        files = _names(candidates, pairs)
        photos = image_folder(folder, images, ["images", "AbstractScenes", "RenderedScenes"])
    kinds = ["all pairs"] * len(pairs)
    return [_pairs(name, pairs, kinds, files, None if photos is None else [photos / file for file in files], seed)]


def draw_references(
    references: list[list[str]], seed: int, count: int = REFERENCES, draws: int = DRAWS
) -> dict[str, Any]:
    """Draw ``count`` of each pair's references, ``draws`` times; both captions of a pair see the same ones.

    Returns:
        ``draw 1`` ... -> [P] lists. A pure function of the arguments.
    """
    drawn: dict[str, list[list[str]]] = {}
    for draw in range(draws):
        own = drawn.setdefault(f"draw {draw + 1}", [])
        for number, texts in enumerate(references):
            generator = np.random.default_rng((seed, draw, number))
            own.append([texts[place] for place in generator.permutation(len(texts))[:count]])
    return drawn


def _annotations(folder: Path) -> Path:
    below = folder / "pyCIDErConsensus"
    return below if below.is_dir() else folder


def _mat(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        content: dict[str, Any] = loadmat(path)
    except (*_NOT_AS_EXPECTED, *_UNREADABLE, MatReadError) as error:
        raise JudgingSetError(f"{path} cannot be read as a MATLAB file: {error}") from error
    return content


def _plain(value: Any) -> Any:
    """Take what MATLAB's cells and matrices wrap."""
    while isinstance(value, np.ndarray):
        if value.size != 1:
            raise ValueError(f"{value.size} values where one was expected")
        value = value.ravel()[0]
    return value


def _triplets(path: Path, name: str) -> list[Triplet]:
    rows = _mat(path).get("triplets")
    if not isinstance(rows, np.ndarray) or rows.dtype.names is None or set("ABC") - set(rows.dtype.names):
        raise JudgingSetError(
            f"{path} has no triplets with the fields A, B, C and a rating: expected the consensus annotations"
        )
    rating = next(field for field in rows.dtype.names if field not in ("A", "B", "C"))
    found = []
    for number, row in enumerate(rows.ravel()):
        try:
            reference, first, second = (str(_plain(row[field])).strip() for field in "ABC")
            vote = int(_plain(row[rating]))
        except _NOT_AS_EXPECTED as error:
            raise JudgingSetError(f"{path}, triplet {number} of {name}: {error}") from error
        if vote not in (1, -1):
            raise JudgingSetError(f"{path}, triplet {number} has the vote {vote}: expected 1 (first) or -1 (second)")
        found.append((reference, first, second, vote))
    return found


def _by_pair(triplets: list[Triplet], name: str) -> list[list[Triplet]]:
    if not triplets or len(triplets) % VOTES:
        raise JudgingSetError(f"{name} has {len(triplets)} triplets: expected {VOTES} for each pair")
    pairs = [triplets[start : start + VOTES] for start in range(0, len(triplets), VOTES)]
    for number, pair in enumerate(pairs):
        if len({triplet[1:3] for triplet in pair}) > 1:
            raise JudgingSetError(f"{name}: the {VOTES} triplets of pair {number} are not of one pair of captions")
    return pairs


def _names(path: Path, pairs: list[list[Triplet]]) -> list[str]:
    content = list_of(read_json(path), path)
    if len(content) != len(pairs):
        raise JudgingSetError(
            f"{path} has {len(content)} items: expected one for each of the {len(pairs)} pairs, in order"
        )
    for number, (item, pair) in enumerate(zip(content, pairs, strict=True)):
        if text_of(item, "caption", f"{path}, [{number}]").strip() not in pair[0][1:3]:
            raise JudgingSetError(f"{path}, [{number}]: {item['caption']!r:.80} is no caption of pair {number}")
    return [text_of(item, "image_id", f"{path}, [{number}]") for number, item in enumerate(content)]


def _pairs(
    name: str, pairs: list[list[Triplet]], kinds: list[str], files: list[str], images: list[Path] | None, seed: int
) -> CaptionPairs:
    shares = [sum(vote == 1 for *_, vote in pair) for pair in pairs]
    return CaptionPairs(
        name,
        [pair[0][1] for pair in pairs],
        [pair[0][2] for pair in pairs],
        [0.5 if 2 * votes == VOTES else float(2 * votes > VOTES) for votes in shares],
        kinds,
        files,
        images,
        draw_references([[triplet[0] for triplet in pair] for pair in pairs], seed),
        f"the caption with most of {VOTES} votes scores higher; metrics with references see {REFERENCES} of {VOTES}, "
        f"mean of {DRAWS} draws; pairs with as many votes for both, and equal scores, count one half",
        averaged=True,
        ties="half",
        shown_kinds=len(set(kinds)) > 1,
        summary="kinds",
    )
