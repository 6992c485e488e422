"""Sets of captions of one image of which one is better, or whose scores must be in order.

One function for each set, named as in ``SETS``.
"""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rewards.base import naming
from rewards.images import open_image
from rl_caption.data.base import DataError
from rl_caption.data.negatives import EDITS, tag_words
from rl_caption.data.rows import read_records
from rl_caption.lab.meta_evaluation.sets.base import (
    COCO_CAPTIONS,
    READING,
    Files,
    Judged,
    JudgementSet,
    captions_of,
    convert,
    json_rows,
    other_captions,
)

CONSENSUS = (
    "the PASCAL-50S and ABSTRACT-50S datasets and the consensus annotations, "
    "https://vrama91.github.io/cider/"
)
VOTES, REFERENCES, DRAWS = 48, 5, 5
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
SUGARCREPE_SOURCE = (
    "the folder data of https://github.com/RAIVNLab/sugar-crepe, and val2017 from "
    "https://cocodataset.org/"
)
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
ARO_SOURCE = (
    "the files that https://github.com/mertyg/vision-language-models-are-bows downloads, with "
    "their images"
)
ARO = {"visual_genome_relation": 23_937, "visual_genome_attribution": 28_748}
MIN_ATTRIBUTE_PAIRS = 25
SUGARCREPE_PP_SOURCE = (
    "the folder data of https://github.com/Sri-Harsha/scpp, and val2017 from "
    "https://cocodataset.org/"
)
SUGARCREPE_PP = {
    "swap_obj": 245,
    "swap_att": 666,
    "replace_obj": 1652,
    "replace_att": 788,
    "replace_rel": 1406,
}
"""File -> published number of triplets."""
ORDER_SOURCE = (
    "https://storage.googleapis.com/sfr-vision-language-research/datasets/, to which add the name "
    "of the file"
)
ORDER = {"coco_karpathy_test.json": 25_010, "flickr30k_test.json": 5_000}
"""File -> published number of captions."""
ORDER_EDITS = (
    "shuffle_nouns_adjectives",
    "shuffle_all_but_nouns_adjectives",
    "shuffle_within_trigrams",
    "shuffle_trigrams",
)
MAX_WORDS = 30


def pascal50s(release: Files, seed: int = 0) -> list[JudgementSet]:
    """Read ``consensus_pascal.mat`` (votes) with ``pair_pascal.mat`` (images and kinds).

    Vedantam, Zitnick and Parikh, "CIDEr", CVPR 2015: 48 people said which of two captions is more
    similar to a reference. 1,000 pairs each of HC (both by people, both right), HI (both by people,
    one of another image), HM (a person's and a system's), MM (two systems'). Metrics see 5 of the
    48 references, and accuracies are averaged over 5 draws (CLIPScore, PAC-S), which ``seed``
    draws. Where people are divided evenly, released code draws the better one at random; here the
    pair counts one half, which is its expectation, and so does a pair with equal scores.
    """
    file = _annotations(release, "consensus_pascal.mat")
    rows = _voted_pairs(file, seed)
    path = _annotations(release, "pair_pascal.mat")
    content = _mat(path)
    written = convert(path, content["new_input"], lambda row: list(row.values())[:3])
    kinds = convert(path, content["category"], lambda category: KINDS[int(category)])
    texts = [{text.strip() for text in captions} for _, *captions in written]  # in either order
    if len(kinds) != len(texts) or texts != [set(row.captions) for row in rows]:
        raise DataError(
            f"{path} has {len(texts)} pairs that are not those of the {len(rows)} of {file.name}, "
            "in order"
        )
    release.check_count("pairs", len(rows), 4000)
    names = [name.strip() for name, *_ in written]
    rows = [
        row._replace(image_id=name, kind=kind)
        for row, name, kind in zip(rows, names, kinds, strict=True)
    ]
    return [_consensus("pascal50s", release.with_images(rows, *PASCAL_IMAGES))]


def abstract50s(release: Files, seed: int = 0) -> list[JudgementSet]:
    """Read ``consensus_abstract.mat``, and ``abstract_candsB.json`` for the names of the images.

    Protocol as for ``pascal50s``, but the public files do not say which pairs are HC and which are
    HI. Without the second file there are no images.
    """
    file = _annotations(release, "consensus_abstract.mat")
    rows = _voted_pairs(file, seed)
    release.check_count("pairs", len(rows), 400)
    path = file.with_name("abstract_candsB.json")
    if not path.is_file():
        numbered = [row._replace(image_id=f"pair {n}") for n, row in enumerate(rows)]
        return [_consensus("abstract50s", numbered)]
    named = convert(path, json_rows(path), lambda row: (row["image_id"], row["caption"].strip()))
    if len(named) != len(rows) or not all(
        caption in row.captions for (_, caption), row in zip(named, rows, strict=True)
    ):
        raise DataError(f"{path}: expected a caption of each of the {len(rows)} pairs, in order")
    rows = [row._replace(image_id=name) for row, (name, _) in zip(rows, named, strict=True)]
    rows = release.with_images(rows, "images", "AbstractScenes", "RenderedScenes")
    return [_consensus("abstract50s", rows)]


def _consensus(name: str, rows: list[Judged]) -> JudgementSet:
    convention = (
        f"the caption with most of {VOTES} votes scores higher; metrics with references see "
        f"{REFERENCES} of {VOTES}, mean of {DRAWS} draws; pairs with as many votes for both, and "
        "equal scores, count one half"
    )
    return JudgementSet(
        name,
        rows,
        convention,
        conditions=[f"draw {draw + 1}" for draw in range(DRAWS)],
        averaged=True,
        ties="half",
        summary="kinds",
        shown_kinds=len({row.kind for row in rows}) > 1,
    )


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


def _voted_pairs(path: Path, seed: int) -> list[Judged]:
    """Read triplets (reference A, captions B and C, vote 1 or -1), 48 of each pair.

    The rows have no images; their references are ``DRAWS`` draws of 5 of the 48.
    """

    def triplet(row: dict[str, Any]) -> tuple[str, str, str, int]:
        vote = next(value for key, value in row.items() if key not in "ABC")
        return row["A"].strip(), row["B"].strip(), row["C"].strip(), {1: 1, -1: -1}[vote]

    triplets = convert(path, _mat(path)["triplets"], triplet)
    rows = []
    for number in range(-(-len(triplets) // VOTES)):
        own = triplets[number * VOTES : (number + 1) * VOTES]
        compared, first, second, votes = zip(*own, strict=True)
        if len(votes) < VOTES or len(set(first)) > 1 or len(set(second)) > 1:
            start = number * VOTES
            raise DataError(
                f"{path}: the {VOTES} triplets from {start} are not of one pair of captions"
            )
        drawn = []
        for draw in range(DRAWS):
            order = np.random.default_rng((seed, draw, number)).permutation(VOTES)
            drawn.append([compared[index] for index in order[:REFERENCES]])
        better = float(1 + np.sign(sum(votes))) / 2
        rows.append(Judged("", (first[0], second[0]), better=better, references=drawn))
    return rows


def foil(
    release: Files, one_per_image: bool = False, held_out: bool = False, seed: int = 0
) -> list[JudgementSet]:
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
    rows = _valse_foil(path) if path.name == "foil-it.json" else _released_foil(path)
    release.check_count(f"pairs in {path}", len(rows), FOIL_PAIRS[path.name])

    def keep(kept: list[Judged], reason: str) -> list[Judged]:
        excluded[reason] = len(rows) - len(kept)
        return kept

    agreed = [row for row in rows if row.better == 1]
    rows = keep(agreed, "fewer than 2 of 3 people found the caption right")
    if held_out:
        records = read_records(release.require(KARPATHY_SOURCE, "dataset_coco.json"))
        seen = {record.filename for record in records if record.split in ("train", "restval")}
        unseen = [row for row in rows if row.image_id not in seen]
        rows = keep(unseen, "the image is in Karpathy's training split")
    if one_per_image:
        rows_of_image: dict[str, list[Judged]] = {}
        for row in rows:
            rows_of_image.setdefault(row.image_id, []).append(row)
        generator = np.random.default_rng(seed)
        drawn = [own[int(generator.integers(len(own)))] for own in rows_of_image.values()]
        rows = keep(drawn, "another pair of the image was drawn")
    release.check_count(f"judged pairs in {path}", len(rows))
    others = other_captions(release.folder / COCO_CAPTIONS, rows, path)
    if others is not None:
        rows = [
            row._replace(references=(texts[:1], texts))
            for row, texts in zip(rows, others, strict=True)
        ]
    return [
        JudgementSet(
            "foil",
            release.with_images(rows, "val2014", "images"),
            AGAINST_FOILS,
            {reason: count for reason, count in excluded.items() if count},
            conditions=["1 reference", "4 references"],
            shown_kinds=False,
        )
    ]


def _valse_foil(path: Path) -> list[Judged]:
    """Pairs; 0 as ``better`` where fewer than two people found the caption right."""

    def read(row: dict[str, Any]) -> Judged:
        agreed = row["mturk"]["caption"] >= 2
        return Judged(row["image_file"], (row["caption"], row["foil"]), better=float(agreed))

    return convert(path, json_rows(path), read)


def _released_foil(path: Path) -> list[Judged]:
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
    return convert(path, wrong, lambda foil: Judged(foil[1], (true[foil[0]], foil[2])))


def sugarcrepe(release: Files) -> list[JudgementSet]:
    """Read SugarCrepe's seven files (Hsieh et al., NeurIPS 2023).

    The summary is the mean of their accuracies. The set has no references. Where
    ``captions_val2017.json`` of COCO lies beside it, they are the image's other captions, so that
    metrics of text alone can be judged, too.
    """

    def read(row: dict[str, str]) -> Judged:
        return Judged(row["filename"], (row["caption"], row["negative_caption"]))

    rows = []
    for kind, pairs in release.read_counted(SUGARCREPE_SOURCE, SUGARCREPE, read):
        rows += [pair._replace(kind=kind) for pair in pairs]
    others = other_captions(release.folder / COCO_VAL2017, rows, release.folder)
    if others is not None:
        rows = [row._replace(references=(o,)) for row, o in zip(rows, others, strict=True)]
    return [
        JudgementSet(
            "sugarcrepe",
            release.with_images(rows, "val2017", "images"),
            "the caption scores higher than its hard negative; equal scores are wrong",
            conditions=["other captions"],
            summary="kinds",
        )
    ]


@dataclass(frozen=True)
class Region:
    """A part of an image file, cut out when it is needed."""

    path: Path
    box: tuple[float, float, float, float]
    """Left, top, right, bottom, in pixels."""

    def render(self) -> Image.Image:
        """Read the file and cut the part out; ``RewardError`` where it cannot be read."""
        return open_image(self.path).crop(self.box)


def aro(release: Files, by_relation: bool = False) -> list[JudgementSet]:
    """Read the relations and the attributes of ARO, two sets without references.

    Yuksekgonul et al., ICLR 2023. The image is cut to the box around the two things. Accuracies are
    averaged over relations, without those of ``ARO_LEFT_OUT``, and over pairs of attributes that
    occur at least 25 times. ``by_relation`` shows the accuracy of each, too.
    """
    photos = release.image_folder("images", "VG_100K")

    def read(row: dict[str, Any]) -> Judged:
        name, left, top = row["image_path"], row["bbox_x"], row["bbox_y"]
        box = left, top, left + row["bbox_w"], top + row["bbox_h"]
        kind = row["relation_name"] if "relation_name" in row else "_".join(row["attributes"])
        captions = row["true_caption"], row["false_caption"]
        return Judged(name, captions, kind=kind, image=photos and Region(photos / name, box))

    judgement_sets = []
    for file, pairs in release.read_counted(ARO_SOURCE, ARO, read):
        title = file.removeprefix("visual_genome_")
        if title == "relation":
            left_out, reason = ARO_LEFT_OUT, "relations that the released evaluation leaves out"
        else:
            counts = Counter(pair.kind for pair in pairs)
            left_out = frozenset(kind for kind in counts if counts[kind] < MIN_ATTRIBUTE_PAIRS)
            reason = f"pairs of attributes that occur less than {MIN_ATTRIBUTE_PAIRS} times"
        rows = [pair for pair in pairs if pair.kind not in left_out]
        release.check_count(f"pairs in {file}.json besides {reason}", len(rows))
        convention = (
            "the true caption scores higher than the false one; equal scores are wrong; mean over "
            f"{title}s"
        )
        excluded = {reason: len(pairs) - len(rows)}
        options: dict[str, Any] = {"shown_kinds": by_relation, "summary": "kinds"}
        judgement_sets.append(JudgementSet(f"aro {title}", rows, convention, excluded, **options))
    return judgement_sets


def sugarcrepe_pp(release: Files) -> list[JudgementSet]:
    """Read SugarCrepe++'s five files: two captions that are right and a hard negative.

    Dumpala et al., NeurIPS 2024. ITT: both captions score higher than the negative. TOT, for
    metrics with a text encoder: the cosine between the two captions is higher than that of either
    with the negative. The summaries are means over the files.
    """

    def read(row: dict[str, str]) -> Judged:
        captions = row["caption"], row["caption2"], row["negative_caption"]
        return Judged(row["filename"], captions)

    rows = []
    for kind, groups in release.read_counted(SUGARCREPE_PP_SOURCE, SUGARCREPE_PP, read):
        rows += [group._replace(kind=kind) for group in groups]
    convention = (
        "ITT: both captions score higher than the hard negative; TOT: the cosine of the two "
        "captions is above those of each with the negative, by the text encoder alone; equal "
        "scores are wrong"
    )
    return [
        JudgementSet(
            "sugarcrepe_pp",
            release.with_images(rows, "val2017", "images"),
            convention,
            above={"ITT": [(0, 2), (1, 2)]},
            texts_above={"TOT": [((0, 1), (0, 2)), ((0, 1), (1, 2))]},
            summary="kinds",
        )
    ]


def aro_order(release: Files, seed: int = 0) -> list[JudgementSet]:
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
        listed = convert(
            path,
            json_rows(path),
            lambda row: [(row["image"], text) for text in captions_of(row["caption"])],
        )
        written = list(chain.from_iterable(listed))
        release.check_count(f"captions in {path}", len(written), published)
        below = release.folder if (release.folder / written[0][0]).parent.is_dir() else None
        folder = release.images or below
        rows = []
        for number, (image, text) in enumerate(written):
            words, generator = tag_words(text), np.random.default_rng((seed, number))
            shuffled = [EDITS[edit](words, {}, generator) or text for edit in ORDER_EDITS]
            captions = [_as_released(caption) for caption in (text, *shuffled)]
            rows.append(Judged(image, captions, image=folder and folder / image))
        convention = (
            f"no shuffle of the words (seed {seed}) scores higher than the caption; equal scores "
            "are right"
        )
        above = {"precision at 1": [(0, other) for other in range(1, 5)]}
        name, options = f"aro_order {file.split('_')[0]}", {"ties": "right", "shown_kinds": False}
        judgement_sets.append(JudgementSet(name, rows, convention, above=above, **options))  # type: ignore[arg-type]
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
