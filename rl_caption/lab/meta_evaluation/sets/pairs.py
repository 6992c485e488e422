"""Sets of pairs or groups of captions of one image, whose scores must be in order.

One function for each set, named as in ``SETS``.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rewards.base import naming
from rewards.images import open_image
from rl_caption.data.base import DataError
from rl_caption.data.rows import karpathy
from rl_caption.lab.meta_evaluation.sets.base import (
    Files,
    Judged,
    JudgementSet,
    coco_id,
    coco_references,
)

VOTES, REFERENCES, DRAWS = 48, 5, 5
KINDS = {1: "HC", 2: "HI", 3: "HM", 4: "MM"}
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
SUGARCREPE_PP = ("swap_obj", "swap_att", "replace_obj", "replace_att", "replace_rel")
"""Files of SugarCrepe++, with as many triplets as SugarCrepe has pairs."""
ARO = {
    "relation": (23_937, 1, "relations that the released evaluation leaves out"),
    "attribution": (28_748, 25, "pairs of attributes that occur less than 25 times"),
}
"""Part -> published number of pairs; least pairs of a kind; why other pairs are left
out.
"""


def pascal50s(files: Files, seed: int = 0) -> list[JudgementSet]:
    """Read ``consensus_pascal.mat`` (votes) with ``pair_pascal.mat`` (images and kinds).

    Vedantam, Zitnick and Parikh, "CIDEr", CVPR 2015: 48 people said which of two
    captions is more similar to a reference. 1,000 pairs each of HC (both by people,
    both right), HI (both by people, one of another image), HM (a person's and a
    system's), MM (two systems'). Metrics see 5 of the 48 references, and accuracies are
    averaged over 5 draws by ``seed`` (CLIPScore, PAC-S). Where people are divided
    evenly, released code draws the better caption at random; here the pair counts one
    half, the expectation, and so does a pair with equal scores.
    """
    content = _mat(files, "pair_pascal.mat")
    written = []
    for pair, category in zip(content["new_input"], content["category"], strict=True):
        name, *captions = list(pair.values())[:3]
        written.append((name.strip(), KINDS[int(category)], captions))
    folders = "JPEGImages", "VOC2010/JPEGImages", "VOC2012/JPEGImages", "images"
    return _consensus(files, "consensus_pascal.mat", 4000, written, seed, *folders)


def abstract50s(files: Files, seed: int = 0) -> list[JudgementSet]:
    """Read ``consensus_abstract.mat`` with ``abstract_candsB.json`` (images).

    Protocol as for ``pascal50s``, but the public files do not say which pairs are HC
    and which are HI.
    """
    written = []
    for candidate in files.json("abstract_candsB.json"):
        written.append((candidate["image_id"], "", [candidate["caption"]]))
    folders = "images", "AbstractScenes", "RenderedScenes"
    return _consensus(files, "consensus_abstract.mat", 400, written, seed, *folders)


def _consensus(
    files: Files,
    votes: str,
    published: int,
    written: Sequence[tuple[str, str, Sequence[str]]],
    seed: int,
    *folders: str,
) -> list[JudgementSet]:
    """Read triplets (reference A, captions B and C, vote 1 or -1), 48 of each pair.

    ``written`` has image, kind and captions of each pair, from another file. References
    are ``DRAWS`` draws of 5 of the 48.
    """
    triplets = _mat(files, votes)["triplets"]
    files.check_count("pairs", len(triplets) // VOTES, published)
    rows: list[Judged] = []
    for number, (image, kind, captions) in enumerate(written):
        pair_triplets = triplets[VOTES * number :][:VOTES]
        pairs = {(row["B"].strip(), row["C"].strip()) for row in pair_triplets}
        (pair,) = pairs
        if not {caption.strip() for caption in captions} <= set(pair):
            raise ValueError(f"{captions} are not the captions {pair} of the votes")
        drawn = []
        for draw in range(DRAWS):
            generator = np.random.default_rng((seed, draw, number))
            order = generator.permutation(VOTES)[:REFERENCES]
            drawn.append([pair_triplets[index]["A"].strip() for index in order])
        answers = [row[key] for row in pair_triplets for key in row if key not in "ABC"]
        if not {*answers} <= {1, -1}:
            raise ValueError(f"votes for {pair} are {answers}, not 1 or -1")
        better = float(1 + np.sign(sum(answers))) / 2
        judged = Judged(
            image,
            pair,
            better=better,
            kind=kind,
            references=drawn,
        )
        rows.append(judged)
    if len(triplets) != VOTES * len(rows):
        raise ValueError(f"expected {VOTES} triplets of each of {len(rows)} pairs")
    convention = (
        f"the caption with most of {VOTES} votes scores higher; metrics with references see "
        f"{REFERENCES} of {VOTES}, mean of {DRAWS} draws; pairs with as many votes for both, and "
        "equal scores, count one half"
    )
    return [
        JudgementSet(
            files.name,
            files.with_images(rows, *folders),
            convention,
            conditions=[f"draw {draw + 1}" for draw in range(DRAWS)],
            averaged=True,
            ties="half",
            summary="kinds",
        )
    ]


def _mat(files: Files, name: str) -> Mapping[str, Any]:
    """Variables of a MATLAB file: structures as dictionaries, cells as lists."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    path = files.require(name)
    with naming(str(path), (MatReadError,), DataError):
        content: dict[str, Any] = loadmat(path, simplify_cells=True)
    return content


def foil(files: Files, held_out: bool = False) -> list[JudgementSet]:
    """Read ``foilv1.0_test_2017.json`` or ``foil-it.json``, and ``captions_val2014.json``.

    FOIL 1.0 (Shekhar et al., ACL 2017): a caption of COCO, and one with a wrong noun.
    In ``foil-it.json`` (Parcalabescu et al., "VALSE", ACL 2022), the judged pairs are
    the ones whose caption, and not the foil, at least two of three people found right.
    References are the image's other COCO captions, where their file exists: the first
    (``1 reference``) and all (``4 references``; five or six for some images), as in the
    code of Polos (Wada et al., CVPR 2024). ``held_out`` leaves out images of Karpathy's
    training split (``train`` and ``restval``), on which PAC-S was tuned, as its paper
    does; it reads ``dataset_coco.json``.
    """
    path = files.require("foilv1.0_test_2017.json", "foil-it.json")
    content = files.json(path.name)
    excluded: dict[str, int] = {}
    if path.name == "foil-it.json":
        files.check_count("pairs", len(content), 1_000)
        rows = [
            Judged(row["image_file"], (row["caption"], row["foil"]))
            for row in content.values()
            if row["mturk"]["caption"] >= 2
        ]
        disputed = len(content) - len(rows)
        excluded["fewer than 2 of 3 people found the caption right"] = disputed
    else:
        names = {row["id"]: row["file_name"] for row in content["images"]}
        by_kind: dict[bool, list[Any]] = {True: [], False: []}
        for row in content["annotations"]:
            by_kind[row["foil"]].append(row)
        true = {row["id"]: row["caption"] for row in by_kind[False]}
        rows = [
            Judged(names[row["image_id"]], (true[row["id"]], row["caption"]))
            for row in by_kind[True]
        ]
        files.check_count("pairs", len(rows), 99_480)
    if held_out:
        trained = karpathy(files.require("dataset_coco.json"))["train"]
        seen = {Path(str(row["image"])).name for row in trained}
        unseen = [row for row in rows if row.image_id not in seen]
        excluded["the image is in Karpathy's training split"] = len(rows) - len(unseen)
        rows = unseen
    files.check_count("judged pairs", len(rows))
    return [
        JudgementSet(
            "foil",
            files.with_images(_with_other_captions(files, rows), "val2014", "images"),
            "the caption scores higher than its foil; equal scores are wrong",
            excluded,
            conditions=["1 reference", "4 references"],
        )
    ]


def _with_other_captions(files: Files, rows: list[Judged]) -> list[Judged]:
    """Add the image's other captions as references, where COCO's annotations exist.

    Captions are compared by words: case, punctuation and spaces differ between copies
    of COCO. Raises ``DataError`` for an image without a caption besides the row's
    first.
    """

    name = "captions_val2014.json"
    references = coco_references(files, name)
    if not references:
        return rows
    extended_rows = []
    for row in rows:
        texts = references.get(coco_id(row.image_id), [])
        first, *words = (
            re.findall(r"\w+", t.lower()) for t in (row.captions[0], *texts)
        )
        others = [text for text, its in zip(texts, words, strict=True) if its != first]
        if not others:
            raise DataError(f"{name} has no other caption of {row.image_id!r:.80}")
        extended_rows.append(row._replace(references=(others[:1], others)))
    return extended_rows


def sugarcrepe(files: Files) -> list[JudgementSet]:
    """Read SugarCrepe's seven files (Hsieh et al., NeurIPS 2023).

    The summary is the mean of the files' accuracies. The set has no references.
    """
    return [
        JudgementSet(
            "sugarcrepe",
            _by_file(files, SUGARCREPE, "caption", "negative_caption"),
            "the caption scores higher than its hard negative; equal scores are wrong",
            summary="kinds",
        )
    ]


def sugarcrepe_pp(files: Files) -> list[JudgementSet]:
    """Read SugarCrepe++'s five files: two captions that are right and a hard negative.

    Dumpala et al., NeurIPS 2024. ITT: both captions score higher than the negative.
    TOT, for metrics with a text encoder: the cosine between the two captions is higher
    than the cosines of both with the negative. The summaries are means over the files.
    """
    keys = "caption", "caption2", "negative_caption"
    convention = (
        "ITT: both captions score higher than the hard negative; TOT: the cosine of the two "
        "captions is above those of each with the negative, by the text encoder alone; equal "
        "scores are wrong"
    )
    return [
        JudgementSet(
            "sugarcrepe_pp",
            _by_file(files, SUGARCREPE_PP, *keys),
            convention,
            above={"ITT": [(0, 2), (1, 2)]},
            texts_above={"TOT": [(0, 1), (0, 2)]},
            summary="kinds",
        )
    ]


def _by_file(files: Files, kinds: Collection[str], *captions: str) -> list[Judged]:
    """Groups of captions of COCO's images, a file for each kind."""
    rows = []
    for kind in kinds:
        groups = files.json(f"{kind}.json")
        files.check_count(f"groups in {kind}.json", len(groups), SUGARCREPE[kind])
        for row in groups.values() if isinstance(groups, dict) else groups:
            texts = [row[key] for key in captions]
            rows.append(Judged(row["filename"], texts, kind=kind))
    return files.with_images(rows, "val2017", "images")


@dataclass(frozen=True)
class Region:
    """A part of an image file, cut out when it is needed."""

    path: Path
    box: tuple[float, float, float, float]
    """Left, top, right, bottom, in pixels."""

    def render(self) -> Image.Image:
        """Read the file and cut the part out. Raises ``RewardError``."""
        return open_image(self.path).crop(self.box)


def aro(files: Files, by_relation: bool = False) -> list[JudgementSet]:
    """Read the relations and the attributes of ARO, two sets without references.

    Yuksekgonul et al., ICLR 2023. The image is cut to the box around the two things.
    Accuracies are averaged over relations, without ``ARO_LEFT_OUT``, and over pairs of
    attributes that occur at least 25 times. ``by_relation`` also shows the accuracy of
    each relation and pair of attributes.
    """
    photos = files.image_folder("images", "VG_100K")
    judgement_sets = []
    for title, (published, fewest, reason) in ARO.items():
        pairs = []
        for row in files.json(f"visual_genome_{title}.json"):
            name, left, top = row["image_path"], row["bbox_x"], row["bbox_y"]
            box = left, top, left + row["bbox_w"], top + row["bbox_h"]
            kind = row.get("relation_name") or "_".join(row["attributes"])
            captions = row["true_caption"], row["false_caption"]
            image = photos and Region(photos / name, box)
            pairs.append(Judged(name, captions, kind=kind, image=image))
        files.check_count(f"pairs of {title}s", len(pairs), published)
        counts = Counter(pair.kind for pair in pairs)
        kinds = {kind for kind in counts if counts[kind] >= fewest} - ARO_LEFT_OUT
        rows = [pair for pair in pairs if pair.kind in kinds]
        files.check_count(f"pairs of {title}s besides {reason}", len(rows))
        convention = (
            "the true caption scores higher than the false one; equal scores are wrong; mean over "
            f"{title}s"
        )
        judged = JudgementSet(
            f"aro {title}",
            rows,
            convention,
            {reason: len(pairs) - len(rows)},
            shown_kinds=by_relation,
            summary="kinds",
        )
        judgement_sets.append(judged)
    return judgement_sets


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

ARO_LEFT_OUT = frozenset(
    name.strip() for name in _ARO_LEFT_OUT.replace("\n", " ").split(",")
)
"""157 relations that the published evaluation of ARO removes (Yuksekgonul et al., ICLR
2023).
"""
