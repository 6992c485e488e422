"""Sets of pairs of captions of one image, of which one is better, and of groups in order.

One function for each set, named as in ``SETS``.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rewards.base import naming
from rewards.images import open_image
from rl_caption.data.base import DataError
from rl_caption.data.files import read_records
from rl_caption.data.negatives import EDITS, tag_words
from rl_caption.lab.meta_evaluation.sets.base import (
    COCO_CAPTIONS,
    READING,
    CaptionGroups,
    CaptionPairs,
    Files,
    Pair,
    caption_pairs,
    captions_of,
    convert,
    json_rows,
    other_captions,
)

CONSENSUS = "the PASCAL-50S and ABSTRACT-50S datasets and the consensus annotations, https://vrama91.github.io/cider/"
VOTES, REFERENCES, DRAWS = 48, 5, 5
BY_CONSENSUS = {"averaged": True, "ties": "half", "summary": "kinds"}
KINDS = {1: "HC", 2: "HI", 3: "HM", 4: "MM"}
PASCAL_IMAGES = ["JPEGImages", "VOC2010/JPEGImages", "VOC2012/JPEGImages", "images"]

FOIL_SOURCE = (
    "foilv1.0_test_2017.json from https://foilunitn.github.io/, or foil-it.json from VALSE "
    "(https://github.com/Heidelberg-NLP/VALSE); captions_val2014.json and val2014 from "
    "https://cocodataset.org/"
)
KARPATHY_SOURCE = "caption_datasets.zip of https://cs.stanford.edu/people/karpathy/deepimagesent"
AGAINST_FOILS = "the caption scores higher than its foil; equal scores are wrong"
FOIL_PAIRS = {"foilv1.0_test_2017.json": 99_480, "foil-it.json": 1_000}
SUGARCREPE_SOURCE = "the folder data of https://github.com/RAIVNLab/sugar-crepe, and val2017 from https://cocodataset.org/"
COCO_VAL2017 = "captions_val2017.json"
SUGARCREPE = {
    "add_att": 692,
    "add_obj": 2062,
    "replace_att": 788,
    "replace_obj": 1652,
    "replace_rel": 1406,
    "swap_att": 666,
    "swap_obj": 245,
}
"""File -> published number of pairs."""
ARO_SOURCE = "the files that https://github.com/mertyg/vision-language-models-are-bows downloads, with their images"
ARO = {"visual_genome_relation": 23_937, "visual_genome_attribution": 28_748}
MIN_ATTRIBUTE_PAIRS = 25
SUGARCREPE_PP_SOURCE = "the folder data of https://github.com/Sri-Harsha/scpp, and val2017 from https://cocodataset.org/"
SUGARCREPE_PP = {
    "swap_obj": 245,
    "swap_att": 666,
    "replace_obj": 1652,
    "replace_att": 788,
    "replace_rel": 1406,
}
"""File -> published number of triplets."""
ORDER_SOURCE = "https://storage.googleapis.com/sfr-vision-language-research/datasets/, to which add the name of the file"
ORDER = {"coco_karpathy_test.json": 25_010, "flickr30k_test.json": 5_000}
"""File -> published number of captions."""
ORDER_EDITS = (
    *("shuffle_nouns_adjectives", "shuffle_all_but_nouns_adjectives"),
    *("shuffle_within_trigrams", "shuffle_trigrams"),
)
MAX_WORDS = 30


def pascal50s(release: Files, seed: int = 0) -> list[CaptionPairs]:
    """Read ``consensus_pascal.mat`` (votes) with ``pair_pascal.mat`` (images and kinds).

    Vedantam, Zitnick and Parikh, "CIDEr", CVPR 2015: 48 people said which of two captions is more
    similar to a reference. 1,000 pairs each of HC (both by people, both right), HI (both by people,
    one of another image), HM (a person's and a system's), MM (two systems'). Metrics see 5 of the
    48 references, and accuracies are averaged over 5 draws (CLIPScore, PAC-S), which ``seed``
    draws. Where people are divided evenly, released code draws the better one at random; here the
    pair counts one half, which is its expectation, and so does a pair with equal scores.
    """
    file = _annotations(release, "consensus_pascal.mat")
    photos = release.image_folder(*PASCAL_IMAGES)
    pairs, references = _voted_pairs(file)
    path = _annotations(release, "pair_pascal.mat")
    content = _mat(path)
    rows = convert(path, content["new_input"], lambda row: list(row.values())[:3])
    kinds = convert(path, content["category"], lambda category: KINDS[int(category)])
    written = [{text.strip() for text in captions} for _, *captions in rows]  # in either order
    if len(kinds) != len(rows) or written != [{pair.first, pair.second} for pair in pairs]:
        raise DataError(
            f"{path} has {len(rows)} pairs that are not those of the {len(pairs)} of {file.name}, "
            "in order"
        )
    release.check_count("pairs", len(pairs), 4000)
    judged = []
    for pair, row, kind in zip(pairs, rows, kinds, strict=True):
        name = row[0].strip()
        judged.append(pair._replace(image_id=name, kind=kind, image=photos and photos / name))
    return [_consensus("pascal50s", judged, references, seed)]


def abstract50s(release: Files, seed: int = 0) -> list[CaptionPairs]:
    """Read ``consensus_abstract.mat``, and ``abstract_candsB.json`` for the names of the images.

    Protocol as for ``pascal50s``, but the public files do not say which pairs are HC and which are
    HI. Without the second file there are no images.
    """
    file = _annotations(release, "consensus_abstract.mat")
    pairs, references = _voted_pairs(file)
    release.check_count("pairs", len(pairs), 400)
    photos, names = None, [f"pair {number}" for number in range(len(pairs))]
    path = file.with_name("abstract_candsB.json")
    if path.is_file():
        rows = convert(path, json_rows(path), lambda row: (row["image_id"], row["caption"].strip()))
        if len(rows) != len(pairs) or not all(
            caption in (pair.first, pair.second)
            for (_, caption), pair in zip(rows, pairs, strict=True)
        ):
            raise DataError(
                f"{path}: expected a caption of each of the {len(pairs)} pairs, in order"
            )
        names = [name for name, _ in rows]
        photos = release.image_folder("images", "AbstractScenes", "RenderedScenes")
    pairs = [
        pair._replace(image_id=name, image=photos and photos / name)
        for pair, name in zip(pairs, names, strict=True)
    ]
    return [_consensus("abstract50s", pairs, references, seed)]


def _consensus(name: str, rows: list[Pair], references: list[list[str]], seed: int) -> CaptionPairs:
    """The set of P pairs; ``references`` are the 48 of each pair that people compared with."""
    convention = (
        f"the caption with most of {VOTES} votes scores higher; metrics with references see "
        f"{REFERENCES} of {VOTES}, "
        f"mean of {DRAWS} draws; pairs with as many votes for both, and equal scores, count one "
        f"half"
    )
    drawn: dict[str, list[list[str]]] = {}
    for draw in range(DRAWS):
        references_of_draw = drawn.setdefault(f"draw {draw + 1}", [])
        for number, texts in enumerate(references):
            order = np.random.default_rng((seed, draw, number)).permutation(len(texts))
            references_of_draw.append([texts[index] for index in order[:REFERENCES]])
    several = len({row.kind for row in rows}) > 1
    return caption_pairs(name, rows, drawn, convention, shown_kinds=several, **BY_CONSENSUS)


def _annotations(release: Files, name: str) -> Path:
    """A file in the folder, or in the subfolder that the release has."""
    return release.require(CONSENSUS, name, f"pyCIDErConsensus/{name}")


def _mat(path: Path) -> dict[str, Any]:
    """Variables of a MATLAB file: structures as dictionaries, cells as lists."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    with naming(f"{path} is no MATLAB file", (*READING, OSError, MatReadError), DataError):
        content: dict[str, Any] = loadmat(path, simplify_cells=True)
    return content


def _voted_pairs(path: Path) -> tuple[list[Pair], list[list[str]]]:
    """Read triplets (reference A, captions B and C, vote 1 or -1), 48 of each pair.

    Returns pairs without image, and their references.
    """

    def triplet(row: dict[str, Any]) -> tuple[str, str, str, int]:
        vote = next(value for key, value in row.items() if key not in "ABC")
        return row["A"].strip(), row["B"].strip(), row["C"].strip(), {1: 1, -1: -1}[vote]

    triplets = convert(path, _mat(path)["triplets"], triplet)
    pairs, references = [], []
    for start in range(0, len(triplets), VOTES):
        compared, first, second, votes = zip(*triplets[start : start + VOTES], strict=True)
        if len(votes) < VOTES or len(set(first)) > 1 or len(set(second)) > 1:
            raise DataError(
                f"{path}: the {VOTES} triplets from {start} are not of one pair of captions"
            )
        pairs.append(Pair("", first[0], second[0], preference=float(1 + np.sign(sum(votes))) / 2))
        references.append(list(compared))
    return pairs, references


def foil(
    release: Files, one_per_image: bool = False, held_out: bool = False, seed: int = 0
) -> list[CaptionPairs]:
    """Read ``foilv1.0_test_2017.json`` or ``foil-it.json``, and ``captions_val2014.json``.

    FOIL 1.0 (Shekhar et al., ACL 2017): a caption of COCO, and one with a wrong noun. Of
    ``foil-it.json`` (Parcalabescu et al., "VALSE", ACL 2022) those pairs are judged whose caption,
    and not the foil, at least two of three people found to be right. References are the image's
    other COCO captions, where their file is there: the first (``1 reference``) and all
    (``4 references``; of some images five or six), as in the code of Polos (Wada et al., CVPR
    2024). ``one_per_image`` judges one pair of each image, drawn by ``seed``, as CLIPScore does;
    which ones it drew is not published. ``held_out`` leaves out images of Karpathy's training split
    (``train`` and ``restval``), on which PAC-S was tuned, as its paper does; it reads
    ``dataset_coco.json``.
    """
    path = release.require(FOIL_SOURCE, *FOIL_PAIRS)
    excluded: dict[str, int] = {}
    if path.name == "foil-it.json":
        voted = convert(
            path,
            json_rows(path),
            lambda row: (
                Pair(row["image_file"], row["caption"], row["foil"]),
                row["mturk"]["caption"],
            ),
        )
        release.check_count(f"pairs in {path}", len(voted), FOIL_PAIRS[path.name])
        pairs = [pair for pair, votes in voted if votes >= 2]
        left_out = len(voted) - len(pairs)
        if left_out:
            excluded["fewer than 2 of 3 people found the caption right"] = left_out
    else:
        pairs = _released_foil(path)
        release.check_count(f"pairs in {path}", len(pairs), FOIL_PAIRS[path.name])
    if held_out:
        records = read_records(release.require(KARPATHY_SOURCE, "dataset_coco.json"))
        seen = {record.filename for record in records if record.split in ("train", "restval")}
        kept = [pair for pair in pairs if pair.image_id not in seen]
        excluded["the image is in Karpathy's training split"] = len(pairs) - len(kept)
        pairs = kept
    if one_per_image:
        pairs_of_image: dict[str, list[Pair]] = {}
        for pair in pairs:
            pairs_of_image.setdefault(pair.image_id, []).append(pair)
        generator = np.random.default_rng(seed)
        excluded["another pair of the image was drawn"] = len(pairs) - len(pairs_of_image)
        pairs = [
            members[int(generator.integers(len(members)))] for members in pairs_of_image.values()
        ]
    release.check_count(f"judged pairs in {path}", len(pairs))
    judged = [(pair.image_id, pair.first) for pair in pairs]
    others = other_captions(release.folder / COCO_CAPTIONS, judged, path)
    references = {}
    if others:
        references = {"1 reference": [texts[:1] for texts in others], "4 references": others}
    pairs = _with_images(pairs, release.image_folder("val2014", "images"))
    return [caption_pairs("foil", pairs, references, AGAINST_FOILS, excluded, shown_kinds=False)]


def _with_images(pairs: Sequence[Pair], folder: Path | None) -> list[Pair]:
    return [pair._replace(image=folder and folder / pair.image_id) for pair in pairs]


def _released_foil(path: Path) -> list[Pair]:
    images = convert(path, json_rows(path, "images"), lambda row: (row["id"], row["file_name"]))
    names = dict(images)
    true: dict[Any, str] = {}
    wrong: list[tuple[Any, str, str]] = []

    def read(row: dict[str, Any]) -> None:
        name = names[row["image_id"]]
        if {True: True, False: False}[row["foil"]]:
            wrong.append((row["id"], name, row["caption"]))
        else:
            true[row["id"]] = row["caption"]

    convert(path, json_rows(path, "annotations"), read)
    return convert(path, wrong, lambda foil: Pair(foil[1], true[foil[0]], foil[2]))


def sugarcrepe(release: Files) -> list[CaptionPairs]:
    """Read SugarCrepe's seven files (Hsieh et al., NeurIPS 2023).

    The summary is the mean of their accuracies. The set has no references. Where
    ``captions_val2017.json`` of COCO lies beside it, they are the image's other captions, so that
    metrics of text alone can be judged, too.
    """

    rows = []
    for kind, pairs in release.read_counted(
        SUGARCREPE_SOURCE,
        SUGARCREPE,
        lambda row: Pair(row["filename"], row["caption"], row["negative_caption"]),
    ):
        rows += [pair._replace(kind=kind) for pair in pairs]
    judged = [(row.image_id, row.first) for row in rows]
    others = other_captions(release.folder / COCO_VAL2017, judged, release.folder)
    references = {"other captions": others} if others else {}
    rows = _with_images(rows, release.image_folder("val2017", "images"))
    convention = "the caption scores higher than its hard negative; equal scores are wrong"
    return [caption_pairs("sugarcrepe", rows, references, convention, summary="kinds")]


@dataclass(frozen=True)
class Region:
    """A part of an image file, cut out when it is needed."""

    path: Path
    box: tuple[float, float, float, float]
    """Left, top, right, bottom, in pixels."""

    def render(self) -> Image.Image:
        """Read the file and cut the part out; ``RewardError`` where it cannot be read."""
        return open_image(self.path).crop(self.box)


def aro(release: Files) -> list[CaptionPairs]:
    """Read the relations and the attributes of ARO, two sets without references.

    Yuksekgonul et al., ICLR 2023. The image is cut to the box around the two things. Accuracies are
    averaged over relations, without those of ``ARO_LEFT_OUT``, and over pairs of attributes that
    occur at least 25 times.
    """
    photos = release.image_folder("images", "VG_100K")

    def pair_of(row: dict[str, Any]) -> Pair:
        name, left, top = row["image_path"], row["bbox_x"], row["bbox_y"]
        box = left, top, left + row["bbox_w"], top + row["bbox_h"]
        image = Region(photos / name, box) if photos else None
        kind = row["relation_name"] if "relation_name" in row else "_".join(row["attributes"])
        return Pair(name, row["true_caption"], row["false_caption"], kind, image=image)

    judgement_sets = []
    for file, pairs in release.read_counted(ARO_SOURCE, ARO, pair_of):
        title = file.removeprefix("visual_genome_")
        if title == "relation":
            left_out, reason = ARO_LEFT_OUT, "relations that the released evaluation leaves out"
        else:
            counts = Counter(pair.kind for pair in pairs)
            left_out = frozenset(kind for kind in counts if counts[kind] < MIN_ATTRIBUTE_PAIRS)
            reason = f"pairs of attributes that occur less than {MIN_ATTRIBUTE_PAIRS} times"
        rows = [pair for pair in pairs if pair.kind not in left_out]
        release.check_count(f"pairs in {file}.json besides {reason}", len(rows))
        convention = f"the true caption scores higher than the false one; equal scores are wrong; mean over {title}s"
        more: Any = {}, convention, {reason: len(pairs) - len(rows)}
        judgement_sets.append(
            caption_pairs(f"aro {title}", rows, *more, shown_kinds=False, summary="kinds")
        )
    return judgement_sets


def _caption_groups(
    name: str,
    folder: Path | None,
    rows: Sequence[Sequence[str]],
    kinds: Sequence[str],
    *more: Any,
    **options: Any,
) -> CaptionGroups:
    """``CaptionGroups`` of G rows (file of the image, K captions); ``more``: from ``above`` on."""
    captions = [text for _, *texts in rows for text in texts]
    files = [file for file, *texts in rows for _ in texts]
    images = [folder / file for file in files] if folder else None
    return CaptionGroups(name, captions, files, images, kinds, *more, **options)


def sugarcrepe_pp(release: Files) -> list[CaptionGroups]:
    """Read SugarCrepe++'s five files: two captions that are right and a hard negative.

    Dumpala et al., NeurIPS 2024. ITT: both captions score higher than the negative. TOT, for
    metrics with a text encoder: the cosine between the two captions is higher than that of either
    with the negative. The summaries are means over the files.
    """

    rows, kinds = [], []
    keys = ("filename", "caption", "caption2", "negative_caption")
    for kind, groups in release.read_counted(
        SUGARCREPE_PP_SOURCE, SUGARCREPE_PP, lambda row: [row[key] for key in keys]
    ):
        rows += groups
        kinds += [kind] * len(groups)
    convention = (
        "ITT: both captions score higher than the hard negative; TOT: the cosine of the two "
        "captions is above those of "
        "each with the negative, by the text encoder alone; equal scores are wrong"
    )
    figures = {"ITT": [(0, 2), (1, 2)]}, convention, {"TOT": [((0, 1), (0, 2)), ((0, 1), (1, 2))]}
    folder = release.image_folder("val2017", "images")
    return [_caption_groups("sugarcrepe_pp", folder, rows, kinds, *figures, summary="kinds")]


def aro_order(release: Files, seed: int = 0) -> list[CaptionGroups]:
    """Read COCO and Flickr30k captions for ARO's COCO-Order and Flickr30k-Order, if they are there.

    Yuksekgonul et al., ICLR 2023: a caption against four shuffles of its words. They have no
    published file: the released code shuffles anew in every run, here ``seed`` does, by the rules
    and the tagger of ``rl_caption.data.negatives``, which let nouns and adjectives change places
    with each other, too, and drop the commas of trigrams. As in the released code texts are in
    lower case, without most punctuation, and of 30 words at most, and equal scores are right: a
    shuffle may change nothing. ``images`` is the folder above ``val2014`` or ``flickr30k-images``.

    Raises:
        RewardError: the package of the tagger is missing (extra ``specs``).
    """
    release.require(ORDER_SOURCE, *ORDER)
    judgement_sets = []
    for file, published in ORDER.items():
        path = release.folder / file
        if not path.is_file():
            continue
        written = convert(
            path,
            json_rows(path),
            lambda row: [(row["image"], text) for text in captions_of(row["caption"])],
        )
        rows = []
        for number, (image, text) in enumerate(chain.from_iterable(written)):
            words, generator = tag_words(text), np.random.default_rng((seed, number))
            shuffled = [EDITS[edit](words, {}, generator) or text for edit in ORDER_EDITS]
            rows.append([image, *map(_as_released, (text, *shuffled))])
        release.check_count(f"captions in {path}", len(rows), published)
        below = release.folder if (release.folder / rows[0][0]).parent.is_dir() else None
        above = {"precision at 1": [(0, other) for other in range(1, 5)]}
        convention = f"no shuffle of the words (seed {seed}) scores higher than the caption; equal scores are right"
        more = ["all"] * len(rows), above, convention
        name, folder = f"aro_order {file.split('_')[0]}", release.images or below
        judgement_sets.append(
            _caption_groups(name, folder, rows, *more, ties="right", shown_kinds=False)
        )
    return judgement_sets


def _as_released(text: str) -> str:
    """As captions are prepared in the released code."""
    return " ".join(re.sub(r"([.!\"()*#:;~])", " ", text.lower()).split()[:MAX_WORDS])


_ARO_LEFT_OUT = """
adjusting, around, attached to, beside, between, bigger than, biting, boarding, brushing, by, chewing, cleaning,
climbing, close to, coming from, coming out of, contain, crossing, dragging, draped over, drinking, drinking from,
driving, driving down, driving on, eating from, eating in, enclosing, exiting, facing, filled with, floating in,
floating on, flying, flying above, flying in, flying over, flying through, full of, going down, going into, going
through, grazing in, growing in, growing on, guiding, hanging from, hanging in, hanging off, hanging over, higher
than, holding onto, hugging, in between, jumping off, jumping on, jumping over, kept in, larger than, leading, leaning
over, leaving, licking, longer than, looking in, looking into, looking out, looking over, looking through, lying next
to, lying on top of, making, mixed with, mounted on, moving, near, next to, of, on the back of, on the edge of, on the
front of, on the other side of, on the side of, opening, painted on, parked at, parked beside, parked by, parked in,
parked in front of, parked near, parked next to, perched on, petting, piled on, playing, playing in, playing on,
playing with, pouring, reaching for, reading, reflected on, riding on, running in, running on, running through, seen
through, sitting behind, sitting beside, sitting by, sitting in front of, sitting near, sitting next to, sitting
under, skiing down, skiing on, sleeping in, sleeping on, smiling at, sniffing, splashing, sprinkled on, stacked on,
standing against, standing around, standing behind, standing beside, standing in front of, standing near, standing
next to, staring at, stuck in, surrounding, swimming in, swinging, talking to, topped with, touching, traveling down,
traveling on, tying, typing on, underneath, wading in, waiting for, walking across, walking by, walking down, walking
next to, walking through, with, working in, working on, worn on, wrapped around, wrapped in
"""

ARO_LEFT_OUT = frozenset(name.strip() for name in _ARO_LEFT_OUT.replace("\n", " ").split(","))
"""157 names. Source: the published evaluation of ARO (Yuksekgonul et al., ICLR 2023), which removes
them.
"""
