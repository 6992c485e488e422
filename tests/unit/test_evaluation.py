"""Evaluation of captions: parity with the caption toolkit, what is left out and why, what is refused."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import stat
from pathlib import Path

import pytest

from rl_caption.data.files import read_captions, read_references
from rl_caption.data.scenes.oracle import oracle
from rl_caption.data.scenes.world import Scene, Thing
from rl_caption.evaluation import (
    EvaluationError,
    Java,
    JavaError,
    evaluate_captions,
    evaluate_rows,
    find_java,
    ptb_tokenize,
    validation_cider,
)
from rl_caption.evaluation import toolkit as coco
from rl_caption.evaluation.confidence import meteor_of_sums
from rl_caption.evaluation.table import COLUMNS
from tests.captions_for_tests import CAPTIONS, REFERENCES

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# Golden vector of CIDEr-D: pycocoevalcap 1.2 Cider and pyciderevalcap CiderD on these captions, split at spaces.
CIDER = {"1": 3.4911665004503494, "2": 4.637277509288021, "3": 1.766107140418223, "4": 2.065937268201736}
JAVA_STAND_IN = """#!/bin/sh
[ "$1" = -version ] && { echo 'openjdk version "17"' >&2; exit 0; }"""


def no_java() -> str:
    try:
        find_java()
    except JavaError as error:
        return str(error)
    return ""


def needs_java(test):
    return pytest.mark.java(pytest.mark.skipif(bool(no_java()), reason=no_java() or "Java is there")(test))


def golden(name: str) -> list[dict]:
    content = json.loads((GOLDEN / name).read_text(encoding="utf-8"))
    assert content["source"]
    assert content["command"]
    return content["cases"]


def agree(metrics: dict[str, float], wanted: dict[str, float]) -> bool:
    """Equal to the last two bits: what another order of the same additions may change."""
    return all(math.isclose(metrics[key], value, rel_tol=1e-15, abs_tol=0.0) for key, value in wanted.items())


@pytest.fixture
def without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@needs_java
@pytest.mark.parametrize("case", golden("karpathy_systems.json"), ids=lambda case: case["system"])
def test_karpathy_test_split_equals_the_toolkit(case: dict, shared_data: Path) -> None:
    """METEOR, which takes 15 s, of one system only."""
    folder = shared_data / "coco_karpathy_test"
    published = case["system"] == "magic_result"
    evaluation = evaluate_captions(
        read_captions(folder / "predictions" / f"{case['system']}.json"),
        read_references(folder / "refs.json", by="image_name"),
        metrics=("bleu", "rouge", "cider", *(["meteor"] if published else [])),
    )
    wanted = {key: value for key, value in case["metrics"].items() if published or key != "METEOR"}
    assert evaluation.n == case["n"]
    assert agree(evaluation.metrics, wanted)
    assert f"+ids:{case['n']} of 5000+" in evaluation.signature
    assert "tokenizer:PTB[corenlp3.4.1]" in evaluation.signature
    for key in wanted:
        assert not agree(evaluation.metrics, {key: wanted[key] * (1 + 1e-12)}), "the comparison sees nothing"
    if published:  # Su et al. 2022, "Language Models Can See", table 1
        table = {"BLEU-4": 0.129, "METEOR": 0.174, "ROUGE-L": 0.399, "CIDEr": 0.493}
        assert {key: round(evaluation.metrics[key], 3) for key in table} == table


def test_fakecap_equals_the_published_scores(shared_data: Path) -> None:
    case = golden("karpathy_fakecap.json")[0]
    folder = shared_data / "coco_fakecap_oracle"
    candidates = json.loads((folder / "res.json").read_text(encoding="utf-8"))
    evaluation = evaluate_captions(
        {image_id: captions[0] for image_id, captions in candidates.items()},
        json.loads((folder / "gts.json").read_text(encoding="utf-8")),
        metrics=("bleu", "rouge", "cider"),
        tokenizer="none",
    )
    assert evaluation.n == case["n"]
    assert agree(evaluation.metrics, case["metrics"])


def test_cider_golden_vector() -> None:
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("cider",), tokenizer="none")
    for image_id, value in CIDER.items():
        assert evaluation.per_image[image_id]["CIDEr"] == pytest.approx(value, rel=1e-12)
    assert evaluation.metrics["CIDEr"] == pytest.approx(2.9901221045895823, rel=1e-12)


@needs_java
def test_tokens_equal_the_toolkits_tokenizer() -> None:
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    captions = ["A man's dog -- isn't it?", "", "  ", 'He said "stop" (loudly).', "café at 5 p.m.", "x ||| y", "..."]
    wanted = PTBTokenizer().tokenize({row: [{"caption": caption}] for row, caption in enumerate(captions)})
    assert ptb_tokenize(captions) == [wanted[row][0] for row in range(len(captions))]


@needs_java
def test_line_ends_of_java_stay_within_their_caption() -> None:
    captions = [f"one{end}two" for end in "\n\r\x0b\x0c\u2028\u2029\x85"] + ["last"]
    assert ptb_tokenize(captions) == ["one two"] * 7 + ["last"]


@needs_java
def test_meteor_equals_the_toolkits_class() -> None:
    case = golden("karpathy_meteor.json")[0]
    # '|||' separates the fields of METEOR's input; the toolkit takes it out of captions but not of references.
    references = {**case["references"], "5": ["a ||| café in the park"]}
    scores, counts = coco.meteor_counted(case["captions"], references)
    assert scores == {"METEOR": (case["score"], case["per_image"])}
    of_sums = meteor_of_sums(counts.sum(axis=0, keepdims=True), len(counts))[0, 0]
    assert of_sums == pytest.approx(case["score"], rel=1e-12), "METEOR of a set is a function of its sums"


def test_without_java_meteor_is_left_out_by_name(without_java: None) -> None:
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("bleu", "meteor", "cider"))
    assert "METEOR" not in evaluation.metrics
    assert evaluation.left_out["METEOR"] == "no Java runtime: 'java' is not on PATH"
    assert set(evaluation.metrics) >= {"BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "CIDEr"}
    assert "tokenizer:PTB[corenlp3.4.1]" in evaluation.signature
    assert "+java" not in evaluation.signature


ODD = {**CAPTIONS, "1": "a sign that reads 猫", "3": "a man surfs at 10 1/2 with 7\xadĬ"}


def test_odd_captions_without_java_are_counted_in_the_signature(without_java: None) -> None:
    evaluation = evaluate_captions(ODD, REFERENCES, metrics=("rouge",))
    assert re.search(r"tokenizer:PTB-python\[rl-caption.*,2 of 14 texts not compared with Java\]", evaluation.signature)


@needs_java
def test_odd_captions_go_to_java() -> None:
    by_java = evaluate_captions(ODD, REFERENCES, metrics=("bleu", "rouge", "cider"), tokenizer="java")
    mixed = evaluate_captions(ODD, REFERENCES, metrics=("bleu", "rouge", "cider"))
    python = evaluate_captions(ODD, REFERENCES, metrics=("bleu", "rouge", "cider"), tokenizer="python")
    assert mixed.metrics == by_java.metrics
    assert mixed.signature == by_java.signature
    assert "tokenizer:PTB[corenlp3.4.1]+" in mixed.signature
    assert "not compared with Java" in python.signature
    # Java makes two tokens of `7\xadĬ`.
    assert python.metrics["ROUGE-L"] != by_java.metrics["ROUGE-L"]


def test_java_tokenizer_without_java_is_refused(without_java: None) -> None:
    with pytest.raises(EvaluationError, match=r"tokenizer 'java' cannot be used: no Java runtime"):
        evaluate_captions(CAPTIONS, REFERENCES, metrics=("bleu",), tokenizer="java")


@pytest.mark.skipif(os.name != "posix", reason="the stand-in for java is a shell script")
def test_crashing_meteor_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text(
        '#!/bin/sh\n[ "$1" = -version ] && { echo \'openjdk version "17"\' >&2; exit 0; }\necho lost >&2; exit 9\n'
    )
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("meteor", "rouge"), tokenizer="none")
    assert evaluation.left_out["METEOR"] == "METEOR stopped answering (status 9): lost"
    assert "ROUGE-L" in evaluation.metrics


def test_spice_without_its_jars_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pycocoevalcap.spice.get_stanford_models.JAR", "models-that-are-not-there")
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("spice",), tokenizer="none")
    assert "does not ship models-that-are-not-there.jar" in evaluation.left_out["SPICE"]
    assert "SPICE" not in evaluation.metrics


def spice_stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, score: str) -> None:
    """Install a ``java`` that writes scores as SPICE does, and jars with the names that SPICE needs."""
    answer = folder / "answer.json"
    values = {"1": 0.5, "2": 0.25, "3": 0.0, "4": 1.0}
    items = [{"image_id": key, "scores": {"All": {"f": value}}} for key, value in values.items()]
    answer.write_text(json.dumps(items).replace("0.25", score))
    java = folder / "java"
    java.write_text(f'{JAVA_STAND_IN}\nwhile [ "$1" != -out ]; do shift; done; /bin/cat "{answer}" > "$2"\n')
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    (folder / "lib").mkdir()
    for name in ("corenlp.jar", "corenlp-models.jar"):
        (folder / "lib" / name).touch()
    monkeypatch.setattr("pycocoevalcap.spice.get_stanford_models.JAR", "corenlp")
    monkeypatch.setattr(coco, "_folder", lambda module: folder)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.skipif(os.name != "posix", reason="the stand-in for java is a shell script")
def test_spice_scores_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spice_stand_in(tmp_path, monkeypatch, "0.25")
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("spice",), tokenizer="none")
    assert evaluation.metrics["SPICE"] == 0.4375
    assert [evaluation.per_image[key]["SPICE"] for key in "1234"] == [0.5, 0.25, 0.0, 1.0]


def spice_jars(folder: Path) -> Path:
    folder.mkdir()
    for name in ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(("version", "opened"), [("17.0.15", True), ("25", True), ("1.8.0_412", False)])
def test_the_command_line_of_spice(tmp_path: Path, version: str, opened: bool) -> None:
    toolkit, jars = tmp_path / "toolkit", spice_jars(tmp_path / "my jars")
    line = coco.spice_arguments(toolkit, jars, Java("java", version))
    assert ("--add-opens=java.base/java.lang=ALL-UNNAMED" in line) is opened, "Java 8 does not know the option"
    assert line[0] == "-Xmx8G"
    assert line[-3] == "-cp"
    assert line[-1] == "edu.anu.spice.SpiceScorer"
    path = line[-2].split(os.pathsep)
    assert path[0] == str(toolkit / "spice-1.0.jar")
    assert path[1:3] == [str(jars / f"stanford-corenlp-3.6.0{end}.jar") for end in ("", "-models")]
    assert path[3] == str(toolkit / "lib" / "*"), "SPICE's other libraries"


@pytest.mark.skipif(os.name != "posix", reason="the stand-in for java is a shell script")
def test_spice_with_jars_of_a_named_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spice_stand_in(tmp_path, monkeypatch, "0.25")
    monkeypatch.setattr("pycocoevalcap.spice.get_stanford_models.JAR", "stanford-corenlp-3.6.0")
    jars = spice_jars(tmp_path / "jars")
    given = tmp_path / "java"
    given.write_text(given.read_text().replace("while [", f'pwd > "{tmp_path}/folder"; while [', 1))
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("spice",), tokenizer="none", spice_jars=jars)
    assert evaluation.metrics["SPICE"] == 0.4375
    scratch = Path((tmp_path / "folder").read_text().strip())
    assert scratch.name.startswith("spice-")
    assert not scratch.exists(), "the temporary folder is gone"
    (jars / "stanford-corenlp-3.6.0-models.jar").unlink()
    left_out = evaluate_captions(CAPTIONS, REFERENCES, metrics=("spice",), tokenizer="none", spice_jars=jars).left_out
    assert re.search(r"3\.6\.0-models\.jar, and it is not in the folder '.*jars' \(spice_jars\)", left_out["SPICE"])


@pytest.mark.skipif(os.name != "posix", reason="the stand-in for java is a shell script")
def test_spice_that_writes_nonsense_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spice_stand_in(tmp_path, monkeypatch, "0.25")
    (tmp_path / "answer.json").write_text('[{"image_id": "1"}]')
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("spice",), tokenizer="none")
    assert evaluation.left_out["SPICE"] == "SPICE wrote something else than scores: KeyError: 'scores'"


@pytest.mark.skipif(os.name != "posix", reason="the stand-in for java is a shell script")
def test_a_spice_score_that_is_not_a_number_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spice_stand_in(tmp_path, monkeypatch, "NaN")
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("spice",), tokenizer="none")
    assert evaluation.left_out["SPICE"] == "SPICE gave nan for image '2'"


def test_cider_of_one_image_is_left_out() -> None:
    one = {"1": CAPTIONS["1"]}
    evaluation = evaluate_captions(one, REFERENCES, metrics=("cider", "rouge"), tokenizer="none")
    assert "at least 2 images, got 1" in evaluation.left_out["CIDEr"]
    assert "ROUGE-L" in evaluation.metrics
    assert "+references:3+ids:1 of 4+" in evaluation.signature


def test_empty_captions_are_scored_low_and_finite() -> None:
    evaluation = evaluate_captions(
        {**CAPTIONS, "2": ""}, REFERENCES, metrics=("bleu", "rouge", "cider"), tokenizer="none"
    )
    assert evaluation.per_image["2"]["CIDEr"] == 0.0
    assert evaluation.per_image["2"]["ROUGE-L"] == 0.0
    assert all(math.isfinite(value) for value in evaluation.metrics.values())


def test_references_of_other_images_do_not_count() -> None:
    some = {key: CAPTIONS[key] for key in ("1", "2", "3")}
    whole = evaluate_captions(some, REFERENCES, metrics=("cider",), tokenizer="none")
    own = evaluate_captions(some, {key: REFERENCES[key] for key in some}, metrics=("cider",), tokenizer="none")
    assert whole.metrics["CIDEr"] == own.metrics["CIDEr"]
    assert "ids:3 of 4" in whole.signature
    assert "ids:3 of 3" in own.signature


@pytest.mark.parametrize(
    ("captions", "references", "words"),
    [
        ({}, REFERENCES, "no captions"),
        ({"1": "a", "9": "b", "8": "c"}, REFERENCES, r"2 of 3 captions are of images that are not in the references"),
        ({"1": "a"}, {"1": []}, r"1 of 1 images have no reference caption, such as \['1'\]"),
        ({"1": "a"}, {"1": "a dog"}, r"references of image '1' are the string 'a dog': expected a list"),
        ({"1": None}, REFERENCES, r"caption of image '1' is None: expected a string"),
    ],
)
def test_bad_input_is_refused_with_counts(captions: dict, references: dict, words: str) -> None:
    with pytest.raises(EvaluationError, match=words):
        evaluate_captions(captions, references, metrics=("rouge",), tokenizer="none")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(EvaluationError, match=r"unknown metrics \['rogue'\]: known are \['bleu'"):
        evaluate_captions(CAPTIONS, REFERENCES, metrics=("rogue",))
    with pytest.raises(EvaluationError, match="tokenizer is 'ptb': expected auto, java, python or none"):
        evaluate_captions(CAPTIONS, REFERENCES, metrics=("rouge",), tokenizer="ptb")  # type: ignore[arg-type]


def test_input_is_not_changed() -> None:
    captions, references = dict(CAPTIONS), copy.deepcopy(REFERENCES)
    evaluate_captions(captions, references, metrics=("bleu", "cider"), tokenizer="none")
    assert (captions, references) == (CAPTIONS, REFERENCES)


def rows() -> list[dict]:
    return [{"image_id": key, "image": f"{key}.jpg", "references": texts} for key, texts in REFERENCES.items()]


def test_rows_are_judged_in_order() -> None:
    evaluation = evaluate_rows(rows(), list(CAPTIONS.values()), metrics=("cider",), tokenizer="none")
    assert evaluation.metrics["CIDEr"] == pytest.approx(2.9901221045895823, rel=1e-12)


def test_rows_and_captions_must_match() -> None:
    with pytest.raises(EvaluationError, match="3 captions for 4 rows"):
        evaluate_rows(rows(), ["a", "b", "c"], metrics=("cider",))
    with pytest.raises(EvaluationError, match=r"1 image ids are in more than one row, such as \['1'\]"):
        evaluate_rows([*rows(), rows()[0]], ["a"] * 5, metrics=("cider",))


def test_validation_cider_equals_the_toolkit() -> None:
    assert validation_cider(CAPTIONS, REFERENCES) == pytest.approx(2.9901221045895823, rel=1e-12)


def test_validation_cider_needs_captions_of_known_images() -> None:
    with pytest.raises(EvaluationError, match="no captions"):
        validation_cider({}, REFERENCES)
    with pytest.raises(EvaluationError, match="1 of 1 captions are of images that are not in the references"):
        validation_cider({"9": "a dog"}, REFERENCES)
    with pytest.raises(EvaluationError, match="at least 2 images"):
        validation_cider({"1": "a dog"}, {"1": ["a dog"]})


def test_signs_of_bad_captions_are_counted_on_python_tokens() -> None:
    captions = {"1": "A dog, a dog.", "2": "a man with a", "3": "", "4": "a dog a dog"}
    evaluation = evaluate_captions(
        captions, REFERENCES, metrics=(), tokenizer="none", training_captions=["A man with a!", "a dog"]
    )
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


def test_novel_captions_are_left_out_without_training_captions() -> None:
    evaluation = evaluate_captions(CAPTIONS, REFERENCES, metrics=("rouge",), tokenizer="none")
    assert "captions/novel" not in evaluation.metrics
    assert evaluation.left_out == {"captions/novel": "no training captions were given"}


def test_oracle_judges_captions_of_scenes() -> None:
    scene = Scene("white", (Thing("circle", "red", "large", "solid", 300, 500),))
    captions = {"1": "a red circle", "2": "a blue circle", "3": "flarp"}
    scenes = dict.fromkeys(captions, scene)
    references = {key: ["a large red circle"] for key in captions}
    evaluation = evaluate_captions(captions, references, metrics=("rouge",), tokenizer="none", scenes=scenes)
    for image_id, caption in captions.items():
        for part, value in oracle(caption, scene)._asdict().items():
            assert evaluation.per_image[image_id][f"oracle/{part}"] == value
    assert evaluation.per_image["1"]["oracle/precision"] == 1.0
    assert evaluation.per_image["1"]["oracle/f1"] > evaluation.per_image["2"]["oracle/f1"]
    f1 = [evaluation.per_image[image_id]["oracle/f1"] for image_id in captions]
    assert evaluation.metrics["oracle/f1"] == pytest.approx(sum(f1) / 3, rel=1e-12)
    assert evaluation.metrics["oracle/unparsed"] == pytest.approx(1 / 3, rel=1e-12)


def test_rows_with_scenes_are_judged_by_the_oracle() -> None:
    scene = Scene("white", (Thing("circle", "red", "large", "solid", 300, 500),))
    scene_rows = [{**row, "scene": scene} for row in rows()]
    evaluation = evaluate_rows(scene_rows, ["a red circle"] * 4, metrics=("rouge",), tokenizer="none")
    assert evaluation.metrics["oracle/precision"] == 1.0
    partly = evaluate_rows([*scene_rows[:3], rows()[3]], ["a red circle"] * 4, metrics=("rouge",), tokenizer="none")
    assert "oracle/f1" not in partly.metrics


def test_captions_without_scene_are_refused() -> None:
    with pytest.raises(EvaluationError, match=r"4 of 4 captions have no scene, such as images \['1', '2', '3'\]"):
        evaluate_captions(CAPTIONS, REFERENCES, metrics=("rouge",), tokenizer="none", scenes={})


def test_validation_cider_counts_documents_of_all_references() -> None:
    some = {key: CAPTIONS[key] for key in ("1", "2")}
    assert validation_cider(some, REFERENCES) == pytest.approx((CIDER["1"] + CIDER["2"]) / 2, rel=1e-12)


def test_every_metric_has_a_column_and_is_documented() -> None:
    scene = Scene("white", (Thing("circle", "red", "large", "solid", 300, 500),))
    evaluation = evaluate_captions(
        CAPTIONS, REFERENCES, metrics=("bleu", "rouge", "cider"), tokenizer="python",
        training_captions=[], scenes=dict.fromkeys(CAPTIONS, scene),
    )  # fmt: skip
    keys = {*evaluation.metrics, "METEOR", "SPICE"}
    assert keys == set(COLUMNS)
    page = (GOLDEN.parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    table = page.split("## Keys")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    documented = set(re.findall(r"`([A-Za-z/_0-9-]+)`", " ".join(cells)))
    assert documented == keys - {"BLEU-2", "BLEU-3"} | {"judge/NAME"}
