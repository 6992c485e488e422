"""Result files and tables of evaluations."""

import os

from rewards.files import load_json
from rl_caption.evaluation import (
    Evaluation,
    format_table,
    write_evaluation,
)

METRICS = {
    "BLEU-4": 0.25,
    "CIDEr": 1.2345,
    "length/mean": 9.5,
    "vocabulary/size": 120.0,
    "captions/novel": 0.5,
}
EVALUATION = Evaluation(
    METRICS, "COCO-captions+ids:2 of 2", 2, {"METEOR": "no Java runtime"}
)


def written(folder, captions):
    predictions, scores = write_evaluation(EVALUATION, captions, folder)
    assert (predictions, scores) == (
        folder / "predictions.json",
        folder / "scores.json",
    )
    return load_json(predictions), load_json(scores)


def test_files_hold_what_was_found(tmp_path):
    written(tmp_path / "new" / "folder", {"1": "an earlier one"})
    rows, scores = written(tmp_path / "new" / "folder", {"391895": "a café", "7": ""})
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == [
        "predictions.json",
        "scores.json",
    ]
    assert rows == [
        {"image_id": 391895, "caption": "a café"},
        {"image_id": 7, "caption": ""},
    ]
    assert scores == {
        "metrics": METRICS,
        "signature": "COCO-captions+ids:2 of 2",
        "n": 2,
        "left_out": {"METEOR": "no Java runtime"},
    }


def test_ids_stay_strings_unless_all_are_plain_numbers(tmp_path):
    for other in ("photo.jpg", "007", "-1", "1.5", "٣", ""):
        rows, _ = written(tmp_path, {"12": "a", other: "b"})
        assert [row["image_id"] for row in rows] == ["12", other]


def test_table_multiplies_by_100_and_says_so():
    lines = format_table({"xe": EVALUATION}).splitlines()
    assert lines[0] == "x100: BLEU-4 METEOR CIDEr (CIDEr of 1.0 is printed as 100.00)"
    assert lines[2] == "| system | n | BLEU-4 | METEOR | CIDEr |"
    assert lines[4] == "| xe | 2 | 25.00 | – | 123.45 |"
    assert lines[8] == "| xe | 2 | 9.50 | 120 | 50.0 |"
    assert "– METEOR: no Java runtime" in lines
    assert lines[-1] == "signature: COCO-captions+ids:2 of 2"


def test_table_names_the_systems_that_lack_a_value():
    full = Evaluation(
        {**METRICS, "METEOR": 0.2, "SPICE": 0.1}, "COCO-captions+ids:2 of 2+java17", 2
    )
    table = format_table({"xe, long": full, "scst": EVALUATION})
    assert "– METEOR (scst): no Java runtime" in table
    assert "SPICE (scst): not asked for" in table
    assert "signatures differ:\n  xe, long: COCO-captions+ids:2 of 2+java17" in table
