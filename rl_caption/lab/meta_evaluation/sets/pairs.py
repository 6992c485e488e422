"""Sets of pairs of captions of one image, of which one is better, and of groups whose scores must be in order.

One function for each set, named as in ``SETS``.
"""

import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from rewards.images import open_image
from rl_caption.data.base import DataError
from rl_caption.data.files import read_records
from rl_caption.data.negatives import EDITS, tag_words
from rl_caption.data.plain_files import shown
from rl_caption.lab.meta_evaluation.sets.base import (
    COCO_CAPTIONS,
    CaptionGroups,
    CaptionPairs,
    Files,
    Pair,
    Row,
    caption_pairs,
    image_files,
    json_rows,
    other_captions,
)

CONSENSUS = (
    "the PASCAL-50S and ABSTRACT-50S datasets and the consensus annotations, https://vrama91.github.io/cider/, or "
    "pascal_50s.json from https://github.com/Yebin46/FLEUR"
)
VOTES, REFERENCES, DRAWS = 48, 5, 5
BY_CONSENSUS = {"averaged": True, "ties": "half", "summary": "kinds"}
KINDS = {1: "HC", 2: "HI", 3: "HM", 4: "MM"}
PASCAL_IMAGES = ["JPEGImages", "VOC2010/JPEGImages", "VOC2012/JPEGImages", "images"]
_NOT_AS_EXPECTED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading MATLAB's structures raises where they are others."""
_DAMAGED = (
    *_NOT_AS_EXPECTED,
    OSError,
    EOFError,
    MemoryError,
    NotImplementedError,
    struct.error,
    zlib.error,
)

FOIL_SOURCE = (
    "foilv1.0_test_2017.json from https://foilunitn.github.io/, or foil-it.json from VALSE "
    "(https://github.com/Heidelberg-NLP/VALSE); captions_val2014.json and val2014 from https://cocodataset.org/"
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
    """Read ``consensus_pascal.mat`` (votes) with ``pair_pascal.mat`` (images and kinds), or ``pascal_50s.json``.

    Vedantam, Zitnick and Parikh, "CIDEr", CVPR 2015: 48 people said which of two captions is more similar to a
    reference. 1,000 pairs each of HC (both by people, both right), HI (both by people, one of another image), HM (a
    person's and a system's), MM (two systems'). Metrics see 5 of the 48 references, and accuracies are averaged over 5
    draws (CLIPScore, PAC-S), which ``seed`` draws. Where people are divided evenly, released code draws the better one
    at random; here the pair counts one half, which is its expectation, and so does a pair with equal scores.
    ``pascal_50s.json`` (Lee et al., "FLEUR", ACL 2024) has 5 references that somebody drew and a label in place of the
    votes.
    """
    file = _annotations(release, "consensus_pascal.mat", "pascal_50s.json")
    photos = release.image_folder(*PASCAL_IMAGES)
    if file.suffix == ".json":
        return [_pascal_json(release, file, photos)]
    pairs, references = _voted_pairs(file)
    path = _annotations(release, "pair_pascal.mat")
    content = _mat(path)
    try:
        rows = [
            [str(text).strip() for text in list(row.values())[:3]] for row in content["new_input"]
        ]
        kinds = [KINDS[int(category)] for category in content["category"]]
    except _NOT_AS_EXPECTED as error:
        raise DataError(
            f"{path} has no pairs of Pascal-50S: expected new_input and category"
        ) from error
    written = [
        set(captions) for _, *captions in rows
    ]  # in either order; the votes are of the triplets' order
    if len(kinds) != len(rows) or written != [{pair.first, pair.second} for pair in pairs]:
        raise DataError(
            f"{path} has {len(rows)} pairs that are not those of the {len(pairs)} of {file.name}, in order"
        )
    release.check_count("pairs", len(pairs), 4000)
    pairs = [
        pair._replace(image=row[0], kind=category)
        for pair, row, category in zip(pairs, rows, kinds, strict=True)
    ]
    return [_consensus("pascal50s", pairs, references, photos, seed)]


def _pascal_json(release: Files, path: Path, photos: Path | None) -> CaptionPairs:
    rows, references = [], []
    for category in KINDS.values():
        for row in json_rows(path, category):
            captions, label = row.captions("captions"), row.values.get("label")
            if len(captions) != 2 or label not in (0, 1):
                raise DataError(
                    f"{row.where} has {len(captions)} captions and the label {shown(label)}: expected two, and 0 or 1"
                )
            rows.append(
                Pair(
                    PurePosixPath(row.text("image")).name,
                    captions[0],
                    captions[1],
                    category,
                    1.0 - label,
                )
            )
            references.append(row.captions("references"))
    release.check_count("pairs", len(rows), 4000)
    convention = (
        "the caption that the label names scores higher; metrics with references see those of the file; equal scores "
        "count one half"
    )
    further = {f"{REFERENCES} references": references}
    return caption_pairs("pascal50s", rows, photos, further, convention, **BY_CONSENSUS)


def abstract50s(release: Files, seed: int = 0) -> list[CaptionPairs]:
    """Read ``consensus_abstract.mat``, and ``abstract_candsB.json`` for the names of the images.

    Protocol as for ``pascal50s``, but the public files do not say which pairs are HC and which are HI. Without the
    second file there are no images.
    """
    file = _annotations(release, "consensus_abstract.mat")
    pairs, references = _voted_pairs(file)
    release.check_count("pairs", len(pairs), 400)
    photos, files = None, [f"pair {number}" for number in range(len(pairs))]
    path = file.with_name("abstract_candsB.json")
    if path.is_file():
        items = json_rows(path)
        if len(items) != len(pairs):
            raise DataError(
                f"{path} has {len(items)} items: expected one for each of the {len(pairs)} pairs, in order"
            )
        for row, pair in zip(items, pairs, strict=True):
            if row.text("caption").strip() not in (pair.first, pair.second):
                raise row.refusal("caption", "a caption of this pair")
        files = [row.text("image_id") for row in items]
        photos = release.image_folder("images", "AbstractScenes", "RenderedScenes")
    pairs = [pair._replace(image=file) for pair, file in zip(pairs, files, strict=True)]
    return [_consensus("abstract50s", pairs, references, photos, seed)]


def _consensus(
    name: str, rows: list[Pair], references: list[list[str]], photos: Path | None, seed: int
) -> CaptionPairs:
    """The set of P pairs; ``references`` are the 48 of each pair that people compared its captions with."""
    convention = (
        f"the caption with most of {VOTES} votes scores higher; metrics with references see {REFERENCES} of {VOTES}, "
        f"mean of {DRAWS} draws; pairs with as many votes for both, and equal scores, count one half"
    )
    drawn: dict[str, list[list[str]]] = {}
    for draw in range(DRAWS):
        pairs_of_draw = drawn.setdefault(f"draw {draw + 1}", [])
        for number, texts in enumerate(references):
            generator = np.random.default_rng((seed, draw, number))
            pairs_of_draw.append(
                [texts[index] for index in generator.permutation(len(texts))[:REFERENCES]]
            )
    several = len({row.kind for row in rows}) > 1
    return caption_pairs(name, rows, photos, drawn, convention, shown_kinds=several, **BY_CONSENSUS)


def _annotations(release: Files, *names: str) -> Path:
    """The first of ``names`` that is in the folder, or in the subfolder that the release has."""
    return release.require(
        CONSENSUS, *(place for name in names for place in (name, f"pyCIDErConsensus/{name}"))
    )


def _mat(path: Path) -> dict[str, Any]:
    """Variables of a MATLAB file: structures as dictionaries, cells as lists."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    try:
        content: dict[str, Any] = loadmat(path, simplify_cells=True)
    except (*_DAMAGED, MatReadError) as error:
        raise DataError(f"{path} cannot be read as a MATLAB file: {error}") from error
    return content


def _voted_pairs(path: Path) -> tuple[list[Pair], list[list[str]]]:
    """Read triplets (reference A, captions B and C, vote), 48 of each pair: pairs without image, and references."""
    rows = _mat(path).get("triplets")
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, dict) for row in rows)
        or len(rows) % VOTES
    ):
        raise DataError(
            f"{path} has no triplets A, B, C with a rating, {VOTES} for each pair: expected the annotations"
        )
    triplets = []
    for number, values in enumerate(rows):
        row = Row(values, f"{path}, triplet {number}")
        rating = next((key for key in values if key not in "ABC"), "rating")
        if row.number(rating) not in (1, -1):
            raise row.refusal(rating, "1 (first) or -1 (second)")
        triplets.append((*(row.text(key).strip() for key in "ABC"), row.number(rating)))
    pairs, references = [], []
    for start in range(0, len(triplets), VOTES):
        compared, first, second, votes = zip(*triplets[start : start + VOTES], strict=True)
        if len(set(first)) > 1 or len(set(second)) > 1:
            raise DataError(
                f"{path}: the {VOTES} triplets from {start} are not of one pair of captions"
            )
        pairs.append(Pair("", first[0], second[0], preference=float(1 + np.sign(sum(votes))) / 2))
        references.append(list(compared))
    return pairs, references


def foil(
    release: Files, one_per_image: bool = False, held_out: bool = False, seed: int = 0
) -> list[CaptionPairs]:
    """Read ``foilv1.0_test_2017.json`` or ``foil-it.json``, and ``captions_val2014.json`` where it is there.

    FOIL 1.0 (Shekhar et al., ACL 2017): a caption of COCO, and one with a wrong noun. Of ``foil-it.json`` (Parcalabescu
    et al., "VALSE", ACL 2022) those pairs are judged whose caption, and not the foil, at least two of three people
    found to be right. References are the image's other COCO captions, the first (``1 reference``) and all
    (``4 references``; of some images five or six), as in the code of Polos (Wada et al., CVPR 2024). ``one_per_image``
    judges one pair of each image, drawn by ``seed``, as CLIPScore does; which ones it drew is not published.
    ``held_out`` leaves out images of Karpathy's training split (``train`` and ``restval``), on which PAC-S was tuned,
    as its paper does; it reads ``dataset_coco.json``.
    """
    path = release.require(FOIL_SOURCE, *FOIL_PAIRS)
    excluded: Counter[str] = Counter()
    pairs = list(
        _valid(json_rows(path), excluded) if path.name == "foil-it.json" else _released_foil(path)
    )
    release.check_count(f"pairs in {path}", len(pairs) + excluded.total(), FOIL_PAIRS[path.name])
    if held_out:
        records = read_records(release.require(KARPATHY_SOURCE, "dataset_coco.json"))
        seen = {record.filename for record in records if record.split in ("train", "restval")}
        count = len(pairs)
        pairs = [pair for pair in pairs if pair.image not in seen]
        excluded["the image is in Karpathy's training split"] = count - len(pairs)
    if one_per_image:
        pairs_of_image: dict[str, list[Pair]] = {}
        for pair in pairs:
            pairs_of_image.setdefault(pair.image, []).append(pair)
        generator = np.random.default_rng(seed)
        excluded["another pair of the image was drawn"] = len(pairs) - len(pairs_of_image)
        pairs = [
            members[int(generator.integers(len(members)))] for members in pairs_of_image.values()
        ]
    release.check_count(f"judged pairs in {path}", len(pairs))
    others = other_captions(
        release.folder / COCO_CAPTIONS, [(pair.image, pair.first) for pair in pairs], path
    )
    references = (
        {"1 reference": [texts[:1] for texts in others], "4 references": others} if others else {}
    )
    photos = release.image_folder("val2014", "images")
    return [
        caption_pairs(
            "foil", pairs, photos, references, AGAINST_FOILS, dict(excluded), shown_kinds=False
        )
    ]


def _released_foil(path: Path) -> Iterator[Pair]:
    names = {row.identifier("id"): row.text("file_name") for row in json_rows(path, "images")}
    true: dict[str, str] = {}
    wrong: list[tuple[str, str, str]] = []
    for row in json_rows(path, "annotations"):
        annotation, image, caption = (
            row.identifier("id"),
            row.identifier("image_id"),
            row.text("caption"),
        )
        if image not in names:
            raise row.refusal("image_id", "the id of one of the images")
        if not isinstance(row.values.get("foil"), bool):
            raise row.refusal("foil", "true or false")
        if row.values["foil"]:
            wrong.append((annotation, image, caption))
        else:
            true[annotation] = caption
    for annotation, image, caption in wrong:
        if annotation not in true:
            raise DataError(
                f"{path}: the foil of annotation {annotation!r:.80} has no caption that it was made from"
            )
        yield Pair(names[image], true[annotation], caption)


def _valid(
    rows: Sequence[Row], excluded: Counter[str], category: str = "all pairs"
) -> Iterator[Pair]:
    """The pairs of a file of VALSE that people found valid; the others are counted."""
    for row in rows:
        votes = row.row("mturk").number("caption")
        # Published code reads the captions of plurals.json as lists of one.
        caption = (
            row.texts("caption")[0]
            if isinstance(row.values.get("caption"), list)
            else row.text("caption")
        )
        pair = Pair(row.text("image_file"), caption, row.text("foil"), category)
        if votes >= 2:
            yield pair
        else:
            excluded["fewer than 2 of 3 people found the caption right"] += 1


def sugarcrepe(release: Files) -> list[CaptionPairs]:
    """Read SugarCrepe's seven files (Hsieh et al., NeurIPS 2023); the summary is the mean of their accuracies.

    The set has no references. Where ``captions_val2017.json`` of COCO lies beside it, they are the image's other
    captions, so that metrics of text alone can be judged, too.
    """
    rows = []
    for category, items in release.read_counted(SUGARCREPE_SOURCE, SUGARCREPE, "pairs"):
        rows += [
            Pair(row.text("filename"), row.text("caption"), row.text("negative_caption"), category)
            for row in items
        ]
    others = other_captions(
        release.folder / COCO_VAL2017, [(row.image, row.first) for row in rows], release.folder
    )
    references = {"other captions": others} if others else {}
    photos = release.image_folder("val2017", "images")
    convention = "the caption scores higher than its hard negative; equal scores are wrong"
    return [caption_pairs("sugarcrepe", rows, photos, references, convention, summary="kinds")]


@dataclass(frozen=True)
class Region:
    """A part of an image file, cut out when it is needed."""

    path: Path
    box: tuple[float, float, float, float]
    """Left, top, right, bottom, in pixels."""

    def render(self) -> Image.Image:
        """Read the file and cut the part out; ``RewardError`` where it cannot be read."""
        return open_image(self.path).crop(self.box)


def aro(release: Files, by_relation: bool = False) -> list[CaptionPairs]:
    """Read the relations and the attributes of ARO, two sets without references (Yuksekgonul et al., ICLR 2023).

    The image is cut to the box around the two things. Accuracies are averaged over relations, without those of
    ``ARO_LEFT_OUT``, and over pairs of attributes that occur at least 25 times. ``by_relation`` shows the accuracy of
    each of them, too.
    """
    photos = release.image_folder("images", "VG_100K")
    judgement_sets = []
    for file, items in release.read_counted(ARO_SOURCE, ARO, "pairs"):
        title = file.removeprefix("visual_genome_")
        if title == "relation":
            kinds, left_out = [row.text("relation_name") for row in items], ARO_LEFT_OUT
            reason = "relations that the released evaluation leaves out"
        else:
            kinds = ["_".join(row.texts("attributes")) for row in items]
            left_out = frozenset(
                category
                for category, count in Counter(kinds).items()
                if count < MIN_ATTRIBUTE_PAIRS
            )
            reason = f"pairs of attributes that occur less than {MIN_ATTRIBUTE_PAIRS} times"
        rows, regions = [], []
        for category, row in zip(kinds, items, strict=True):
            if category not in left_out:
                rows.append(
                    Pair(
                        row.text("image_path"),
                        row.text("true_caption"),
                        row.text("false_caption"),
                        category,
                    )
                )
                left, top, width, height = (row.number(f"bbox_{axis}") for axis in "xywh")
                box = left, top, left + width, top + height
                regions.append(Region((photos or release.folder) / rows[-1].image, box))
        release.check_count(f"pairs in {file}.json besides {reason}", len(rows))
        convention = f"the true caption scores higher than the false one; equal scores are wrong; mean over {title}s"
        excluded = {reason: len(items) - len(rows)}
        images, how = regions if photos else None, {"shown_kinds": by_relation, "summary": "kinds"}
        judgement_sets.append(
            caption_pairs(f"aro {title}", rows, images, {}, convention, excluded, **how)
        )
    return judgement_sets


def sugarcrepe_pp(release: Files) -> list[CaptionGroups]:
    """Read SugarCrepe++'s five files (Dumpala et al., NeurIPS 2024): two captions that are right and a hard negative.

    ITT: both captions score higher than the negative. TOT, for metrics with a text encoder: the cosine between the two
    captions is higher than that of either with the negative. The summaries are means over the files.
    """
    captions, files, kinds = [], [], []
    for category, rows in release.read_counted(SUGARCREPE_PP_SOURCE, SUGARCREPE_PP, "triplets"):
        captions += [
            row.text(key) for row in rows for key in ("caption", "caption2", "negative_caption")
        ]
        files += [row.text("filename") for row in rows for _ in range(3)]
        kinds += [category] * len(rows)
    photos = image_files(release.image_folder("val2017", "images"), files)
    convention = (
        "ITT: both captions score higher than the hard negative; TOT: the cosine of the two captions is above those of "
        "each with the negative, by the text encoder alone; equal scores are wrong"
    )
    figures = {"ITT": [(0, 2), (1, 2)]}, convention, {"TOT": [((0, 1), (0, 2)), ((0, 1), (1, 2))]}
    return [
        CaptionGroups("sugarcrepe_pp", captions, files, photos, kinds, *figures, summary="kinds")
    ]


def aro_order(release: Files, seed: int = 0) -> list[CaptionGroups]:
    """Read COCO and Flickr30k captions for ARO's COCO-Order and Flickr30k-Order, those of the two that are there.

    Yuksekgonul et al., ICLR 2023: a caption against four shuffles of its words. They have no published file: the
    released code shuffles anew in every run, here ``seed`` does, by the rules and the tagger of
    ``rl_caption.data.negatives``, which let nouns and adjectives change places with each other, too, and drop the
    commas of trigrams. As in the released code texts are in lower case, without most punctuation, and of 30 words at
    most, and equal scores are right: a shuffle may change nothing. ``images`` is the folder above ``val2014`` or
    ``flickr30k-images``.

    Raises:
        RewardError: the package of the tagger is missing (extra ``specs``).
    """
    release.require(ORDER_SOURCE, *ORDER)
    judgement_sets = []
    for file, published in ORDER.items():
        path, name = release.folder / file, f"aro_order {file.split('_')[0]}"
        if not path.is_file():
            continue
        rows = [
            (row.text("image"), text) for row in json_rows(path) for text in row.captions("caption")
        ]
        release.check_count(f"captions in {path}", len(rows), published)
        captions = []
        for number, (_, text) in enumerate(rows):
            words, generator = tag_words(text), np.random.default_rng((seed, number))
            shuffled = [EDITS[edit](words, {}, generator) or text for edit in ORDER_EDITS]
            captions += [_as_released(caption) for caption in (text, *shuffled)]
            if not captions[-5]:
                raise DataError(
                    f"{path}: the caption {text!r:.80} of {rows[number][0]!r:.80} has no words"
                )
        names = [image for image, _ in rows for _ in range(5)]
        photos = image_files(
            release.images
            or (release.folder if (release.folder / rows[0][0]).parent.is_dir() else None),
            names,
        )
        above = {"precision at 1": [(0, other) for other in range(1, 5)]}
        convention = f"no shuffle of the words (seed {seed}) scores higher than the caption; equal scores are right"
        caption = captions, names, photos, ["all"] * len(rows), above, convention
        judgement_sets.append(CaptionGroups(name, *caption, ties="right", shown_kinds=False))
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
"""157 names. Source: the published evaluation of ARO (Yuksekgonul et al., ICLR 2023), which removes them."""
