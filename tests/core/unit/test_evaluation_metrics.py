"""Evaluation of captions: parity with the caption toolkit, what is left out, what is refused."""

import re
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge

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
from rl_caption.evaluation.toolkit import UndefinedMetric
from tests.captions_for_tests import CAPTIONS, REFERENCES, needs_java

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# CIDEr-D by pycocoevalcap 1.2 and pyciderevalcap, of captions split at spaces.
CIDER = [3.4911665004503494, 4.637277509288021, 1.766107140418223, 2.065937268201736]
SCENE = Scene("white", (Thing("circle", "red", "large", "solid", 300, 500),))
words = st.sampled_from(["a", "a", "a", "man", "dog", "on", "the", "the", "wave"])
texts = st.lists(words, max_size=9).map(" ".join)
images = st.tuples(texts, st.lists(texts, min_size=1, max_size=4))


def golden(name):
    content = load_json(GOLDEN / name)
    assert content["source"]
    assert content["command"]
    return content["cases"]


def assert_agree(evaluation, wanted):
    """Equal to the last two bits: what another order of the same additions may change."""
    found = {key: evaluation.metrics[key] for key in wanted}
    assert found == pytest.approx(wanted, rel=1e-15, abs=0)


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
    wanted = case["metrics"]
    names = ["bleu", "rouge", "cider"]
    published = case["system"] == "magic_result"
    if published:
        names.append("meteor")
    else:
        del wanted["METEOR"]
    evaluation = evaluate_captions(
        read_captions(folder / "predictions" / f"{case['system']}.json"),
        read_references(folder / "refs.json", by="image_name"),
        metrics=names,
    )
    assert evaluation.n == case["n"]
    assert_agree(evaluation, wanted)
    assert f"+ids:{case['n']} of 5000+" in evaluation.signature
    assert "tokenizer:PTB[corenlp3.4.1]" in evaluation.signature
    assert ("+java" in evaluation.signature) == published, "of METEOR"
    if published:  # Su et al. 2022, "Language Models Can See", table 1
        table = {"BLEU-4": 0.129, "METEOR": 0.174, "ROUGE-L": 0.399, "CIDEr": 0.493}
        assert {key: round(evaluation.metrics[key], 3) for key in table} == table


def test_fakecap_equals_the_published_scores(shared_data):
    (case,) = golden("karpathy_fakecap.json")
    folder = shared_data / "coco_fakecap_oracle"
    candidates = load_json(folder / "res.json")
    evaluation = evaluate_captions(
        {image_id: captions[0] for image_id, captions in candidates.items()},
        load_json(folder / "gts.json"),
        metrics=("bleu", "rouge", "cider"),
        tokenizer="none",
    )
    assert evaluation.n == case["n"]
    assert_agree(evaluation, case["metrics"])


@settings(max_examples=50)
@given(st.lists(images, min_size=2, max_size=6))
def test_scores_equal_the_toolkits_classes(images):
    assume(any(text for _, texts in images for text in texts))
    candidates, references, singles = {}, {}, {}
    for number, (caption, texts) in enumerate(images):
        candidates[str(number)] = caption
        references[str(number)] = texts
        singles[str(number)] = [caption]
    totals, per_image = Bleu(4).compute_score(references, singles, verbose=0)
    bleu = metrics.bleu(candidates, references).values
    assert bleu == {f"BLEU-{n + 1}": (totals[n], per_image[n]) for n in range(4)}
    total, scores = Rouge().compute_score(references, singles)
    rouge = metrics.rouge(candidates, references).values
    assert rouge == {"ROUGE-L": (total, scores.tolist())}
    total, scores = Cider().compute_score(references, singles)
    try:
        found = metrics.cider(candidates, references).values
    except UndefinedMetric:  # all images have the same n-grams
        assert not any(scores)
    else:
        assert found == {"CIDEr": (total, scores.tolist())}


def test_a_no_break_space_within_a_token_does_not_split_it():
    """As in the toolkit, whose ROUGE-L splits at spaces: three of four tokens are
    shared, not four of five.
    """
    scores = metrics.rouge({"1": "a man at 10\xa01/2"}, {"1": ["a man at 10\xa0am"]})
    assert scores.values["ROUGE-L"] == (0.75, [0.75])


@pytest.mark.parametrize(
    ("references", "message"),
    [
        ([["a dog", "a man"], ["a man", "a dog"]], "n-grams"),
        ([[""], [""]], "reference"),
    ],
)
def test_references_without_a_weight_leave_cider_undefined(references, message):
    captions = {"1": "a dog", "2": "a cat"}
    with pytest.raises(UndefinedMetric, match=message):
        metrics.cider(captions, dict(zip("12", references, strict=True)))


def test_cider_of_a_single_image_is_left_out():
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


@needs_java
def test_odd_captions_go_to_java():
    by_java, mixed, python = (
        evaluated(ODD, "bleu", "rouge", "cider", tokenizer=tokenizer)
        for tokenizer in ("java", "auto", "python")
    )
    assert mixed.metrics == by_java.metrics
    assert mixed.signature == by_java.signature
    assert "tokenizer:PTB[corenlp3.4.1]+" in mixed.signature
    assert "not compared with Java" in python.signature
    # Java makes two tokens of `7\xadĬ`
    assert python.metrics["ROUGE-L"] != by_java.metrics["ROUGE-L"]


@pytest.mark.parametrize(
    ("captions", "references", "metric", "message"),
    [
        ({}, REFERENCES, "rouge", "0 of 0"),
        ({"1": "a", "9": "b", "8": "c"}, REFERENCES, "rouge", "2 of 3"),
        ({"1": "a"}, {"1": []}, "rouge", r"1 of 1 .*\['1'\]"),
        ({"1": "a"}, {"1": "a dog"}, "rouge", r"1 of 1 .*\['1'\]"),
        (CAPTIONS, REFERENCES, "meter", "meter"),
    ],
)
def test_bad_input_is_refused(captions, references, metric, message):
    with pytest.raises(EvaluationError, match=message):
        evaluate_captions(captions, references, metrics=(metric,), tokenizer="none")


def test_doubled_images_are_refused():
    rows = [{"image_id": key} for key in "1231"]
    with pytest.raises(EvaluationError, match=r"row .*\['1'\]"):
        metrics.check_one_row_each(rows, "split 'test'")


def test_validation_cider_equals_the_toolkit_and_counts_documents_of_all_references():
    found = validation_cider(CAPTIONS, REFERENCES)
    assert found == pytest.approx(fmean(CIDER), rel=1e-12)
    found = validation_cider({key: CAPTIONS[key] for key in "12"}, REFERENCES)
    assert found == pytest.approx(fmean(CIDER[:2]), rel=1e-12)
    wrong = {"2 images": ({"1": "a dog"}, {"1": ["a dog"]}), "0 of 0": ({}, REFERENCES)}
    for message, both in wrong.items():
        with pytest.raises(EvaluationError, match=message):
            validation_cider(*both)


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
    texts = ["a red circle", "a blue circle", "flarp", "a red circle"]
    captions = dict(zip("1234", texts, strict=True))
    evaluation = evaluated(captions, scenes=dict.fromkeys("1234", SCENE))
    for image_id, caption in captions.items():
        for part, value in oracle(caption, SCENE)._asdict().items():
            assert evaluation.per_image[image_id][f"oracle/{part}"] == value
    f1 = [evaluation.per_image[image_id]["oracle/f1"] for image_id in "1234"]
    assert f1[0] > f1[1]
    found = evaluation.metrics
    assert found["oracle/f1"] == pytest.approx(fmean(f1), rel=1e-12)
    assert found["oracle/unparsed"] == pytest.approx(1 / 4, rel=1e-12)


def test_every_metric_has_a_column_and_is_documented():
    evaluation = evaluated(
        CAPTIONS,
        "bleu",
        "rouge",
        "cider",
        tokenizer="python",
        training_captions=[],
        scenes=dict.fromkeys(CAPTIONS, SCENE),
    )
    keys = {*evaluation.metrics, "METEOR", "SPICE"}
    assert keys == set(COLUMNS)
    page = (GOLDEN.parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    table = page.split("## Keys")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    documented = set(re.findall(r"`([A-Za-z/_0-9@-]+)`", " ".join(cells)))
    assert documented == keys - {"BLEU-2", "BLEU-3"} | {"judge/NAME"}
