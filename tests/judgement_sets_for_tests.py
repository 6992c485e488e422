"""Tiny sets of judgements in the formats of the published sets."""

import pickle

import numpy as np
from scipy.io import savemat

from rl_caption.data.files import write_json, write_json_lines
from rl_caption.lab.meta_evaluation.sets.pairs import SUGARCREPE, SUGARCREPE_PP

IMAGES = ["1_a.jpg", "2_b.jpg", "3_c.jpg"]
WORDS = ["a dog runs", "a cat sits", "two men talk"]


def token_file(path):
    """Write five captions of each of three images, in the format of Flickr8k."""
    named = zip(IMAGES, WORDS, strict=True)
    lines = [
        f"{image}#{number}\t{words}  in place {number} .\n"
        for image, words in named
        for number in range(5)
    ]
    path.write_text("".join(lines))


def flickr8k(folder):
    token_file(folder / "Flickr8k.token.txt")
    expert = """1_a.jpg 1_a.jpg#0 4 4 4
1_a.jpg 2_b.jpg#1 1 2 1
2_b.jpg 3_c.jpg#2 1 1 3"""
    crowd = """1_a.jpg 1_a.jpg#0 1 3 0
1_a.jpg 2_b.jpg#1 0.25 1 3
2_b.jpg 3_c.jpg#2 0 0 3"""
    for name, text in (("Expert", expert), ("CrowdFlower", crowd)):
        (folder / f"{name}Annotations.txt").write_text(text.replace(" ", "\t"))


def composite(folder):
    """Write three captions a row in 8k, four in the other parts, and the two lines at
    the end of the real files.
    """
    token_file(folder / "Flickr8k.token.txt")
    token_file(folder / "results_20130124.token")
    coco = [
        {"image_id": 12, "id": n, "caption": f"a bus  in place {n}"} for n in range(5)
    ]
    write_json(folder / "captions_val2014.json", {"images": [], "annotations": coco})
    for part, url, own, count in (
        ("8k", "http://x/y/1_a.jpg", "a dog runs in place 1 .", 3),
        ("30k", "http://x/2_b.jpg", "a cat sits in place 2 .", 4),
        ("coco", "http://x/COCO_val2014_000000000012.jpg", "a bus in place 3", 4),
    ):
        numbers = range(1, count + 1)
        head = ["HITId", "Input.image_url", *(f"Input.text{n}" for n in numbers)]
        head += [f"Answer.Q{n}Answer" for n in numbers]
        texts = [own, '"a thing; with a semicolon"', "nothing", "something"][:count]
        row = ["h", url, *texts, *"5213"[:count]]
        blank = ";" * (len(head) - 1)
        lines = [
            ";".join(head),
            ";".join(row),
            blank,
            f"sum{blank}",
        ]
        (folder / f"{part}_correctness.csv").write_text("\n".join(lines))


def cell(text):
    wrapped = np.empty((1, 1), object)
    wrapped[0, 0] = text
    return wrapped


def consensus(path, pairs):
    """Write votes of 48 people on each pair (first, second, votes for the first)."""
    fields = [
        ("A", "O"),
        ("B", "O"),
        ("C", "O"),
        ("rating", "O"),
    ]
    triplets = np.empty((1, 48 * len(pairs)), fields)
    for number, (first, second, votes) in enumerate(pairs):
        for vote in range(48):
            row = (
                cell(f"reference {vote} of {number} "),
                cell(first),
                cell(second),
                1 if vote < votes else -1,
            )
            triplets[0, 48 * number + vote] = row
    savemat(path, {"triplets": triplets})


def pascal50s(folder):
    """Write four pairs, one of each kind; the second has its captions in the other
    order, the third has a tie of votes.
    """
    pairs = [
        ("one dog", "one cat", 40),
        ("two dogs", "two cats", 10),
        ("men", "women", 24),
        ("a", "b", 48),
    ]
    consensus(folder / "consensus_pascal.mat", pairs)
    written = [
        ("one dog", "one cat "),
        ("two cats", "two dogs"),
        ("men", "women"),
        ("a", "b"),
    ]
    new_input = np.empty((1, 4), [("image", "O"), ("first", "O"), ("second", "O")])
    for number, captions in enumerate(written):
        new_input[0, number] = (f"2008_{number}.jpg", *captions)
    savemat(
        folder / "pair_pascal.mat",
        {"new_input": new_input, "category": np.array([[1, 2, 3, 4]])},
    )


def abstract50s(folder):
    consensus(
        folder / "consensus_abstract.mat",
        [("one dog", "one cat", 40), ("men", "women", 20)],
    )
    names = [
        {"image_id": f"Scene{n}_0.png", "caption": text}
        for n, text in enumerate(["one cat", "women"])
    ]
    write_json(folder / "abstract_candsB.json", names)


def foil(folder):
    """Write two images with three pairs, and the COCO captions that they were made
    from.
    """
    images = [{"id": n, "file_name": f"COCO_val2014_{n:012}.jpg"} for n in (7, 8)]
    captions = {
        7: ["a dog runs.", "a cat runs.", "a cow runs."],
        8: ["a bus stops", "a car stops"],
    }
    annotations = [
        {
            "id": 10 * image,
            "image_id": image,
            "caption": text,
            "foil": number > 0,
        }
        for image, texts in captions.items()
        for number, text in enumerate(texts)
    ]
    write_json(
        folder / "foilv1.0_test_2017.json",
        {"images": images, "annotations": annotations},
    )
    references = {
        7: [
            "A dog runs",
            "a dog is running",
            "the dog runs",
            "dog",
            "dogs run",
            "one dog",
        ],
        8: ["a bus", "a bus stops"],
    }
    coco = [
        {"image_id": image, "caption": text}
        for image, texts in references.items()
        for text in texts
    ]
    write_json(folder / "captions_val2014.json", {"annotations": coco})


def sugarcrepe(folder):
    for kind in SUGARCREPE:
        pair = {
            "filename": "000000000001.jpg",
            "caption": f"a dog {kind}",
            "negative_caption": "a cat",
        }
        write_json(
            folder / f"{kind}.json",
            {"0": pair, "1": {**pair, "filename": "000000000002.jpg"}},
        )


def sugarcrepe_pp(folder):
    for kind in SUGARCREPE_PP:
        captions = {
            "caption": f"a dog {kind}",
            "caption2": "one dog",
            "negative_caption": "a cat",
        }
        rows = [
            {
                "id": n,
                "filename": f"{n + 1:012}.jpg",
                **captions,
            }
            for n in range(2)
        ]
        write_json(folder / f"{kind}.json", rows)


def aro(folder):
    box = {
        "bbox_x": 1,
        "bbox_y": 2,
        "bbox_w": 10,
        "bbox_h": 8,
        "image_path": "5.jpg",
    }
    captions = {
        "true_caption": "the dog is on the mat",
        "false_caption": "the mat is on the dog",
    }
    relations = [
        {**box, **captions, "relation_name": name}
        for name in ("on", "on", "in", "near", "of")
    ]
    write_json(folder / "visual_genome_relation.json", relations)
    attributes = [
        {
            **box,
            **captions,
            "attributes": ["red", "small"],
        }
    ] * 25
    rare = [
        {
            **box,
            **captions,
            "attributes": ["blue", "small"],
        }
    ] * 24
    write_json(folder / "visual_genome_attribution.json", attributes + rare)


def ratings(folder):
    row = {"caption": "A dog.", "references": ["dogs"]}
    rows = [
        row
        | {
            "image": f"{n}.jpg",
            "rating": n,
            "group": n,
        }
        for n in (1, 2)
    ]
    write_json_lines(folder / "mine.jsonl", rows)


def icc_captions(folder):
    text = """sample_id,caption,concreteness_annotation,icc_score
1.0,"A dog, on a couch",3,0.9
2.0,a great day,0,0.1
3.0,two cats in the garden,2,1.02
4.0,the meaning of the dog,1,0.05
"""
    (folder / "caption_concreteness_annotations.csv").write_text(text)


def icc_words(folder):
    head = "Word Bigram Conc.M Conc.SD Unknown Total Percent_known SUBTLEX Dom_Pos"
    lines = [
        head,
        "dog 0 4.85 0.5 0 28 1.00 9 Noun",
        "cat 0 4.86 0.5 0 28 1.00 9 Noun",
        "day 0 4.04 0.5 0 28 1.00 9 Noun",
        "meaning 0 1.93 0.5 0 28 1.00 9 Noun",
        "great 0 2.2 0.5 0 28 1.00 9 Adjective",
    ]
    text = "\n".join(lines).replace(" ", "\t")
    text += "\nbaking soda\t1\t4.96\t0.5\t0\t28\t1.00\t9\t#N/A\n"
    file = folder / "Concreteness_ratings_Brysbaert_et_al_BRM.txt"
    file.write_text(text)


def vatex_eval(folder):
    """Write pickled NumPy arrays for EMScore's ``VATEX-EVAL-demo.py``: ratings are
    [people, captions], flat.
    """
    contents = {
        "candidates_list": np.array(
            ["a man  runs .", "a dog sits .", "a cat sleeps ."]
        ),
        "gts_list": np.array(
            [
                ["a person runs", "a runner"],
                ["a dog", "a sitting dog"],
                ["a cat", "a sleepy cat"],
            ]
        ),
        "human_scores": np.array([[3, 1, 4], [4, 2, 5], [3, 2, 5]]).reshape(-1),
        "video_ids": np.array(
            ["aaa_000001_000011", "aaa_000001_000011", "bbb_000002_000012"]
        ),
    }
    for name, content in contents.items():
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(content, protocol=2))


def activitynet_foil(folder):
    """Write the files of EMScore's ``ActivityNet-FOIL_demo.py``."""
    right = ["A man  runs.", "He stops.", "A dog barks."]
    foiled = ["A woman runs.", "He stops.", "A cat barks."]
    for name, sentences in (("right", right), ("foil", foiled)):
        results = {
            "v_1": [{"sentence": text, "timestamp": [0, 1]} for text in sentences]
        }
        write_json(
            folder / f"final_{name}_video_sentences.json",
            {"version": "1", "results": results},
        )
    times = [[0, 10.4], [10.4, 20], [15, 40]]
    first = {"duration": 40.0, "timestamps": times, "sentences": right}
    second = {
        "duration": 40.0,
        "timestamps": [[0, 4], [3, 30]],
        "sentences": ["A runner.", "A long  run."],
    }
    write_json(folder / "anet_entities_test_1.json", {"v_1": first, "v_2": first})
    write_json(folder / "anet_entities_test_2.json", {"v_1": second})


_NAMED = (
    vatex_eval,
    activitynet_foil,
    composite,
    pascal50s,
    abstract50s,
    foil,
    sugarcrepe,
    aro,
    sugarcrepe_pp,
    ratings,
    icc_captions,
    icc_words,
)
BUILDERS = {
    "flickr8k_expert": flickr8k,
    "flickr8k_crowdflower": flickr8k,
    **{build.__name__: build for build in _NAMED},
}
