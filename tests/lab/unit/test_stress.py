"""stress: probes of a reward, from the pairs to the command line, and best of n."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rewards.base import RewardError
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.cli.main import main, run_program
from rl_caption.data.base import Row
from rl_caption.data.scenes import ScenesData, oracle
from rl_caption.data.scenes.negatives import SceneNegatives
from rl_caption.lab.stress import gold_scores, split_references
from rl_caption.monitoring.probes import (
    ENGLISH,
    PROBES,
    Pair,
    ProbeResult,
    orders,
    probe_pairs,
    probe_result,
    score_pairs,
)
from rl_caption.monitoring.scoring import RowCaption, Scorer
from rl_caption.runtime.errors import ConfigError

SCENES = {
    "num_train": 20,
    "num_val": 6,
    "num_test": 30,
    "num_unseen": 0,
    "image_size": 16,
}


class Length:
    """Number of words; the base of the rewards of these tests."""

    __name__ = "length"
    columns: frozenset[str] = frozenset()
    bounds = (-1000.0, 1000.0)
    signature = "length"

    def __call__(
        self, prompts: Any, completions: Sequence[str], **columns: Any
    ) -> list[float]:
        return [float(len(text.split())) for text in completions]


class FailsOnShouting(Length):
    def __call__(
        self, prompts: Any, completions: Sequence[str], **columns: Any
    ) -> list[float]:
        if any(text.isupper() for text in completions):
            raise RewardError("too loud")
        return super().__call__(prompts, completions, **columns)


class OracleReward(Length):
    """The oracle's F1 of captions of generated scenes, times ``sign``."""

    columns: frozenset[str] = frozenset({"image_id"})
    sign = 1

    def __init__(self, rows: Iterable[Row] | None = None) -> None:
        rows = ScenesData(**SCENES).split("test") if rows is None else rows
        self.scenes = {row["image_id"]: row["scene"] for row in rows}

    def __call__(
        self, prompts: Any, completions: Sequence[str], **columns: Any
    ) -> list[float]:
        pairs = zip(completions, columns["image_id"], strict=True)
        return [
            self.sign * oracle(text, self.scenes[image_id]).f1
            for text, image_id in pairs
        ]


@pytest.fixture(scope="module")
def scenes() -> tuple[list[Row], list[str]]:
    """Rows with the references that a reward sees, and the captions that are judged."""
    rows: list[Any] = [dict(row) for row in ScenesData(**SCENES).split("test")]
    captions = []
    for row in rows:
        held_out, row["references"] = split_references(row)
        captions += held_out
    return rows, captions


def pairs_of(
    scenes: tuple[list[Row], list[str]], **options: Any
) -> dict[str, list[Pair]]:
    return probe_pairs(*scenes, SceneNegatives(), **options)


def results(scorer: Scorer, pairs: dict[str, list[Pair]]) -> dict[str, ProbeResult]:
    scores = score_pairs(scorer, pairs)
    return {name: probe_result(own, scores[name]) for name, own in pairs.items() if own}


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small captioner of the scenes, with random weights."""
    folder = tmp_path_factory.mktemp("captioner")
    shape = {
        "image_size": 16,
        "patch_size": 8,
        "d_model": 16,
        "num_heads": 2,
        "ffn_dim": 16,
    }
    references = [row["references"] for row in ScenesData(**SCENES).split("train")]
    made = TransformerCaptioner.from_scratch(
        references, 1, encoder_layers=1, decoder_layers=1, max_positions=24, **shape
    )
    made.save_pretrained(made.policy, folder)
    return str(folder)


def run(out: Path, target: str, *words: str) -> dict[str, Any]:
    reward = ["--trust", target] if ":" in target else []
    reward += ["--reward.terms.mine.target", target]
    reward += ["--data.kwargs", json.dumps(SCENES), "--num_samples", "4"]
    run_program("stress", [*reward, "--bootstrap=20", f"--out={out}", *words])
    found: dict[str, Any] = json.loads((out / "stress.json").read_text())
    return found


def test_orders_and_results_by_hand() -> None:
    scores = np.array([[2.0, 1.0], [1.0, 2.0], [1.0, 1.0 + 1e-9], [3.0, 1.0]])
    assert orders(scores).tolist() == [1, -1, 0, 1]
    pairs = [Pair(row, f"better {row}", f"worse {row}") for row in range(4)]
    found = probe_result(pairs, scores)
    assert (found.pairs, found.right, found.equal) == (4, 0.5, 0.25)
    assert found.worst == ("better 1", "worse 1", 1.0, 2.0)
    ten = probe_result(pairs[:1] * 10, np.array([[1.0, 0.0]] * 5 + [[0.0, 1.0]] * 5))
    assert ten.interval == pytest.approx((0.236593, 0.763407), abs=1e-6)


def test_the_truth_is_on_the_side_of_the_better_caption(
    scenes: tuple[list[Row], list[str]],
) -> None:
    rows, _ = scenes
    pairs = pairs_of(scenes)
    assert list(pairs) == list(PROBES)
    assert {name for name in PROBES if not pairs[name]} <= {"swap_count", "paraphrase"}
    of_form = ENGLISH | {"words_repeated", "caption_repeated", "words_shuffled"}
    for name, own in pairs.items():
        assert len({pair.row for pair in own}) == len(own), "one pair an image"
        for pair in own:
            scene = rows[pair.row]["scene"]
            better, worse = (oracle(text, scene) for text in (pair.better, pair.worse))
            assert pair.better != pair.worse
            if name == "detail_missing":
                assert better.recall > worse.recall
                assert better.precision >= worse.precision
            elif name in ("generic", "other_image", "length"):
                assert better.f1 > worse.f1
            elif name not in of_form:
                assert better.precision > worse.precision, name
    assert pairs_of(scenes) == pairs, "seeded"
    assert pairs_of(scenes, seed=1) != pairs


def test_probes_of_the_oracle_and_of_length(
    scenes: tuple[list[Row], list[str]],
) -> None:
    rows, _ = scenes
    pairs = pairs_of(scenes)
    gold = results(Scorer(OracleReward(rows), rows), pairs)
    for name in ("replace_object", "replace_count", "other_image", "generic"):
        assert gold[name].right == 1
    length = results(Scorer(Length(), rows), pairs)
    for name in ("words_repeated", "caption_repeated", "padded", "length"):
        assert length[name].right == 0
    assert (length["replace_object"].equal, length["replace_object"].right) == (1, 0)
    assert length["detail_missing"].right == 1
    _, worse, score_of_better, score_of_worse = length["padded"].worst
    assert score_of_worse - score_of_better == 11
    assert len(worse.split()) == score_of_worse


def test_the_report_and_its_json_agree(
    tmp_path: Path, captioner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--reward.terms.cider.weight", "1", "--data.kwargs", json.dumps(SCENES)]
    words += ["--model", captioner, "--num_samples", "4", "--bootstrap", "20"]
    assert main(["stress", *words, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "stress.json").read_text())
    report = capsys.readouterr().out
    assert "Cider-D" in found["signature"]
    for name, result in found["probes"].items():
        cells = f"{result['pairs']} | {100 * result['right']:.1f}"
        assert re.search(rf"\| {name} .*\| {re.escape(cells)} ", report)
    assert found["probes"]["words_repeated"]["right"] > 0.9
    assert found["probes"]["detail_missing"]["right"] < 0.5
    assert found["best_of_n"]["reward"]["n"] == [1, 2, 4]
    curve = found["best_of_n"]["oracle"]
    assert f"({curve['low'][-1]:.4g} to {curve['high'][-1]:.4g})" in report


MINE = [
    ("train", "A dog runs over the grass.", "a brown dog is running"),
    (
        "test",
        "A black dog sits on the bench next to a man.",
        "a man and a dog on a bench",
    ),
    ("test", "Two white boats on a blue lake.", "boats lie on the water"),
]


def test_captions_of_ones_own(tmp_path: Path, captioner: str) -> None:
    lines = []
    for number, (split, *references) in enumerate(MINE):
        Image.new("RGB", (16, 16)).save(tmp_path / f"{number}.png")
        lines.append(
            {"image": f"{number}.png", "split": split, "references": references}
        )
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"format": "jsonl", "path": str(tmp_path / "mine.jsonl")}
    mine = ["--data.kwargs", "{}"]
    for key, value in data.items():
        mine += [f"--data.{key}", value]
    probes = run(tmp_path / "out", "rouge_l", *mine)["probes"]
    absent = {"paraphrase", "detail_missing", "false_detail", "replace_object"}
    assert not absent & probes.keys()
    assert probes["words_shuffled"]["pairs"] == 2
    sampled = ["--model", captioner, "--judges", "{repetition: {}}"]
    curves = run(tmp_path / "out", "rouge_l", *mine, *sampled)["best_of_n"]
    assert list(curves) == ["reward", "CIDEr-D, references held out", "repetition"]
    with pytest.raises(ConfigError, match=r"judges\.rouge_l"):
        run(tmp_path / "judge", "rouge_l", *mine, "--judges", "{rouge_l: {}}")


def test_gold_sees_references_that_the_reward_does_not_see() -> None:
    references = ["a dog runs", "a dog sits", "two cats", "three boats", "A dog runs."]
    original: Row = {"image_id": "1", "references": references}
    held_out, seen = split_references(original)
    assert (held_out, seen) == (references[:2], references[2:4])
    row: Row = {**original, "references": held_out}
    (score,) = gold_scores([row], [held_out, ["x y"]]).values()
    first, second = score([RowCaption(0, "a dog runs"), RowCaption(0, "two cats")])
    assert first > 0
    assert second == 0, "the reward sees that reference, gold does not"


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="too loud"):
        run(tmp_path / "loud", f"{__name__}:FailsOnShouting")
    with pytest.raises(ConfigError, match=r"reward\.normalize"):
        run(tmp_path, "rouge_l", "--reward.normalize", "per_term")


def test_both_captions_of_a_pair_have_one_form() -> None:
    """Spaces before punctuation and a missing full stop would tell edits from originals."""
    texts = [
        "A black dog sits on a bench .",
        "two white boats , on a  blue lake .",
        "a red bus",
    ]
    rows: list[Any] = [
        {"image_id": str(number), "references": [text.replace("a ", "the ")]}
        for number, text in enumerate(texts)
    ]

    def edit(row: Row, caption: str, generator: Any) -> list[tuple[str, str]]:
        return [("replace_object", f"no {caption}")]

    pairs = probe_pairs(rows, texts, edit)
    made = {name: own for name, own in pairs.items() if own}
    assert {"words_shuffled", "replace_object", "reference", "generic"} <= set(made)
    for name, own in made.items():
        for pair in own:
            for text in (pair.better, pair.worse):
                assert text == " ".join(text.split())
                assert " ." not in text
                assert " ," not in text
            if name not in ("cut_off", "capitals", "generic", "other_image", "length"):
                assert pair.better.endswith(".") == pair.worse.endswith("."), pair
