"""Evaluation of captions: parity with the caption toolkit, what is left out and why, what is
refused.
"""

import contextlib
import copy
import math
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rewards.files import load_json
from rl_caption.data.files import read_captions, read_references
from rl_caption.data.scenes.oracle import oracle
from rl_caption.data.scenes.world import Scene, Thing
from rl_caption.evaluation import (
    EvaluationError,
    evaluate_captions,
    metrics,
    validation_cider,
)
from rl_caption.evaluation.results import COLUMNS
from rl_caption.evaluation.toolkit import Scores, UndefinedMetric
from tests.captions_for_tests import CAPTIONS, REFERENCES, needs_java

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# Golden vector of CIDEr-D: pycocoevalcap 1.2 Cider and pyciderevalcap CiderD on these captions,
# split at spaces.
CIDER = {
    "1": 3.4911665004503494,
    "2": 4.637277509288021,
    "3": 1.766107140418223,
    "4": 2.065937268201736,
}
SCENE = Scene("white", (Thing("circle", "red", "large", "solid", 300, 500),))
CAPTION = st.lists(
    st.sampled_from(["a", "a", "a", "man", "dog", "on", "the", "the", "wave"]),
    max_size=9,
).map(" ".join)
IMAGES = st.lists(
    st.tuples(CAPTION, st.lists(CAPTION, min_size=1, max_size=4)),
    min_size=2,
    max_size=6,
)


def golden(name):
    content = load_json(GOLDEN / name)
    assert content["source"]
    assert content["command"]
    return content["cases"]


def agree(found, wanted):
    """Equal to the last two bits: what another order of the same additions may change."""
    return all(
        math.isclose(found[key], value, rel_tol=1e-15, abs_tol=0.0)
        for key, value in wanted.items()
    )


def evaluated(captions, *names, **options):
    """Captions of some of the four images, by these metrics."""
    options = {"tokenizer": "none"} | options
    return evaluate_captions(captions, REFERENCES, metrics=names, **options)


@pytest.mark.slow
@needs_java
@pytest.mark.parametrize(
    "case", golden("karpathy_systems.json"), ids=lambda case: case["system"]
)
def test_karpathy_test_split_equals_the_toolkit(case, shared_data):
    """METEOR, which takes 15 s, of one system only."""
    folder = shared_data / "coco_karpathy_test"
    published = case["system"] == "magic_result"
    evaluation = evaluate_captions(
        read_captions(folder / "predictions" / f"{case['system']}.json"),
        read_references(folder / "refs.json", by="image_name"),
        metrics=("bleu", "rouge", "cider", *(["meteor"] if published else [])),
    )
    wanted = {
        key: value
        for key, value in case["metrics"].items()
        if published or key != "METEOR"
    }
    assert evaluation.n == case["n"]
    assert agree(evaluation.metrics, wanted)
    assert f"+ids:{case['n']} of 5000+" in evaluation.signature
    assert "tokenizer:PTB[corenlp3.4.1]" in evaluation.signature
    if published:  # Su et al. 2022, "Language Models Can See", table 1
        table = {"BLEU-4": 0.129, "METEOR": 0.174, "ROUGE-L": 0.399, "CIDEr": 0.493}
        assert {key: round(evaluation.metrics[key], 3) for key in table} == table


def test_fakecap_equals_the_published_scores(shared_data):
    case = golden("karpathy_fakecap.json")[0]
    folder = shared_data / "coco_fakecap_oracle"
    candidates = load_json(folder / "res.json")
    evaluation = evaluate_captions(
        {image_id: captions[0] for image_id, captions in candidates.items()},
        load_json(folder / "gts.json"),
        metrics=("bleu", "rouge", "cider"),
        tokenizer="none",
    )
    assert evaluation.n == case["n"]
    assert agree(evaluation.metrics, case["metrics"])


@settings(max_examples=50)
@given(IMAGES)
def test_scores_equal_the_toolkits_classes(images):
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    assume(any(text for _, texts in images for text in texts))
    candidates = {str(number): caption for number, (caption, _) in enumerate(images)}
    references = {str(number): texts for number, (_, texts) in enumerate(images)}
    singles = {key: [caption] for key, caption in candidates.items()}
    totals, per_image = Bleu(4).compute_score(references, singles, verbose=0)
    bleu = metrics.bleu(candidates, references).values
    assert bleu == {f"BLEU-{n + 1}": (totals[n], per_image[n]) for n in range(4)}
    total, scores = Cider().compute_score(references, singles)
    if any(scores):
        assert metrics.cider(candidates, references).values == {
            "CIDEr": (total, scores.tolist())
        }
    else:  # ours says why, where all images have the same n-grams
        with contextlib.suppress(UndefinedMetric):
            assert metrics.cider(candidates, references).values["CIDEr"][0] == 0
    total, scores = Rouge().compute_score(references, singles)
    assert metrics.rouge(candidates, references).values == {
        "ROUGE-L": (total, scores.tolist())
    }


def test_a_no_break_space_within_a_token_does_not_split_it():
    """As in the toolkit, whose ROUGE-L splits at spaces: three of four tokens are shared, not four
    of five.
    """
    scores = metrics.rouge({"1": "a man at 10\xa01/2"}, {"1": ["a man at 10\xa0am"]})
    assert scores.values["ROUGE-L"] == (0.75, [0.75])


def test_references_without_a_weight_leave_cider_undefined():
    with pytest.raises(UndefinedMetric, match="n-grams"):
        metrics.cider(
            {"1": "a dog", "2": "a cat"},
            {"1": ["a dog", "a man"], "2": ["a man", "a dog"]},
        )
    with pytest.raises(UndefinedMetric, match="reference"):
        metrics.cider({"1": "a dog", "2": "a cat"}, {"1": [""], "2": [""]})
    assert (
        metrics.cider(
            {"1": "a cat", "2": "a cat"}, {"1": ["a dog"], "2": ["a man"]}
        ).values["CIDEr"][0]
        == 0
    )
    evaluation = evaluated({"1": CAPTIONS["1"]}, "cider", "rouge")
    assert "at least 2 images" in evaluation.left_out["CIDEr"]
    assert "ROUGE-L" in evaluation.metrics
    assert "+references:3+ids:1 of 4+" in evaluation.signature


ODD = {
    **CAPTIONS,
    "1": "a sign that reads 猫",
    "3": "a man surfs at 10 1/2 with 7\xadĬ",
}


def test_odd_captions_without_java_are_counted_in_the_signature(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    signature = evaluated(ODD, "rouge", tokenizer="auto").signature
    assert ",2 of 14 texts not compared with Java]" in signature


@pytest.mark.parametrize("name", ["meteor", "spice"])
def test_the_java_that_scored_is_in_the_signature(name, monkeypatch):
    (key,) = metrics.METRIC_KEYS[name]
    scores = Scores({key: (0.5, [0.5] * 4)})
    monkeypatch.setattr(metrics, "java_version", lambda: "17.0.1")
    monkeypatch.setitem(metrics.SCORERS, "meteor", lambda *_: scores)
    for name, told in (("meteor", True), ("rouge", False)):
        assert ("+java17.0.1+" in evaluated(CAPTIONS, name).signature) == told


@needs_java
def test_odd_captions_go_to_java():
    by_java, mixed, python = (
        evaluated(ODD, "bleu", "rouge", "cider", tokenizer=tokenizer)
        for tokenizer in ("java", "auto", "python")
    )
    assert (mixed.metrics, mixed.signature) == (by_java.metrics, by_java.signature)
    assert "tokenizer:PTB[corenlp3.4.1]+" in mixed.signature
    assert "not compared with Java" in python.signature
    assert python.metrics["ROUGE-L"] != by_java.metrics["ROUGE-L"], (
        "Java makes two tokens of `7\xadĬ`"
    )


def test_empty_captions_are_scored_low_and_finite_and_input_is_not_changed():
    captions, references = {**CAPTIONS, "2": ""}, copy.deepcopy(REFERENCES)
    evaluation = evaluate_captions(
        captions, references, metrics=("bleu", "rouge", "cider"), tokenizer="none"
    )
    assert (captions, references) == ({**CAPTIONS, "2": ""}, REFERENCES)
    assert evaluation.per_image["2"]["CIDEr"] == 0.0
    assert evaluation.per_image["2"]["ROUGE-L"] == 0.0
    assert all(math.isfinite(value) for value in evaluation.metrics.values())


def test_bad_input_is_refused():
    for captions, references, options, words in (
        ({}, REFERENCES, {}, "0 of 0"),
        (
            {"1": "a", "9": "b", "8": "c"},
            REFERENCES,
            {},
            "2 of 3",
        ),
        ({"1": "a"}, {"1": []}, {}, r"1 of 1 .*\['1'\]"),
        ({"1": "a"}, {"1": "a dog"}, {}, r"1 of 1 .*\['1'\]"),
        (CAPTIONS, REFERENCES, {"metrics": ("meter",)}, "meter"),
    ):
        with pytest.raises(EvaluationError, match=words):
            evaluate_captions(
                captions,
                references,
                **{"metrics": ("rouge",), "tokenizer": "none"} | options,
            )


def rows():
    return [
        {"image_id": key, "image": f"{key}.jpg", "references": texts}
        for key, texts in REFERENCES.items()
    ]


def test_doubled_images_are_refused():
    with pytest.raises(EvaluationError, match=r"row .*\['1'\]"):
        metrics.check_one_row_each([*rows(), rows()[0]], "split 'test'")


def test_validation_cider_equals_the_toolkit_and_counts_documents_of_all_references():
    assert validation_cider(CAPTIONS, REFERENCES) == pytest.approx(
        2.9901221045895823, rel=1e-12
    )
    some = {key: CAPTIONS[key] for key in ("1", "2")}
    assert validation_cider(some, REFERENCES) == pytest.approx(
        (CIDER["1"] + CIDER["2"]) / 2, rel=1e-12
    )
    with pytest.raises(EvaluationError, match="2 images"):
        validation_cider({"1": "a dog"}, {"1": ["a dog"]})


def test_signs_of_bad_captions_are_counted_on_python_tokens():
    captions = {"1": "A dog, a dog.", "2": "a man with a", "3": "", "4": "a dog a dog"}
    training = ["A man with a!", "a dog"]
    evaluation = evaluated(captions, training_captions=training)
    assert evaluation.metrics == {
        "length/mean": 3.0,
        "vocabulary/size": 4.0,
        "captions/novel": 0.75,
        "captions/bad_endings": 0.5,
        "captions/repeated_ngrams": 2 / 9,
        "captions/duplicates": 0.25,
        "captions/empty": 0.25,
    }
    assert evaluation.left_out == {}
    without = evaluated(CAPTIONS, "rouge")
    assert "captions/novel" not in without.metrics
    assert without.left_out == {"captions/novel": "no training captions were given"}


def test_the_oracle_scores_captions_of_scenes():
    scene_rows = [{**row, "scene": SCENE} for row in rows()]
    captions = dict(
        zip(
            "1234",
            ["a red circle", "a blue circle", "flarp", "a red circle"],
            strict=True,
        )
    )
    evaluation = evaluate_captions(
        captions,
        REFERENCES,
        metrics=(),
        tokenizer="none",
        scenes={row["image_id"]: row["scene"] for row in scene_rows},
    )
    for row, caption in zip(scene_rows, captions.values(), strict=True):
        for part, value in oracle(caption, SCENE)._asdict().items():
            assert evaluation.per_image[row["image_id"]][f"oracle/{part}"] == value
    f1 = [evaluation.per_image[image_id]["oracle/f1"] for image_id in "1234"]
    assert f1[0] > f1[1]
    assert evaluation.metrics["oracle/f1"] == pytest.approx(sum(f1) / 4, rel=1e-12)
    assert evaluation.metrics["oracle/unparsed"] == pytest.approx(1 / 4, rel=1e-12)


def test_every_metric_has_a_column_and_is_documented():
    evaluation = evaluate_captions(
        CAPTIONS, REFERENCES, metrics=("bleu", "rouge", "cider"), tokenizer="python",
        training_captions=[], scenes=dict.fromkeys(CAPTIONS, SCENE),
    )  # fmt: skip
    keys = {*evaluation.metrics, "METEOR", "SPICE"}
    assert keys == set(COLUMNS)
    page = (GOLDEN.parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    table = page.split("## Keys")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    documented = set(re.findall(r"`([A-Za-z/_0-9@-]+)`", " ".join(cells)))
    assert documented == keys - {"BLEU-2", "BLEU-3"} | {"judge/NAME"}
