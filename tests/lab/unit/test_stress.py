"""stress: probes of a reward, from the pairs to the command line."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape
from PIL import Image

from rewards.base import RewardError
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.cli.main import main, run_program
from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes import ScenesData, oracle
from rl_caption.data.scenes.negatives import SceneNegatives, ScenePositives
from rl_caption.lab.stress.sampling import gold_scores, judged_captions
from rl_caption.monitoring.probes import (
    ENGLISH,
    PROBES,
    Pair,
    effect_size,
    probe_pairs,
    run_probes,
    wilson,
)
from rl_caption.monitoring.scoring import RowCaption, Scorer
from rl_caption.runtime.errors import ConfigError

SCENES = {"num_train": 20, "num_val": 0, "num_test": 30, "num_unseen": 0, "image_size": 16}
OF_FORM = (
    "words_repeated",
    "caption_repeated",
    "words_shuffled",
    "keywords",
    "cut_off",
    "padded",
    "instruction",
)


class Length:
    """Number of words; the base of the rewards of these tests."""

    __name__ = "length"
    columns: frozenset[str] = frozenset()
    bounds = (-1000.0, 1000.0)
    signature = "length"

    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        return [float(len(text.split())) for text in completions]


class Constant(Length):
    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        return [0.5] * len(completions)


class NeedsDepth(Length):
    columns = frozenset({"depth"})


class FailsOnShouting(Length):
    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        if any(text.isupper() for text in completions):
            raise RewardError("too loud")
        return super().__call__(prompts, completions, **columns)


class FailsAtSecondCall(Length):
    """Scores the captions of the probes, then fails, until ``calls`` is large."""

    signature = "fails"
    calls = 0

    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        FailsAtSecondCall.calls += 1
        if 1 < self.calls < 10:
            raise RewardError("second call")
        return super().__call__(prompts, completions, **columns)


class OracleReward:
    """The oracle's F1 of captions of generated scenes."""

    __name__ = "oracle"
    columns: frozenset[str] = frozenset({"image_id"})
    bounds = (0.0, 1.0)
    signature = "scenes-oracle-f1"

    def __init__(self, rows: Iterable[Row]) -> None:
        self.scenes = {row["image_id"]: row["scene"] for row in rows}

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``image_id``."""
        pairs = zip(completions, columns["image_id"], strict=True)
        return [oracle(text, self.scenes[image_id]).f1 for text, image_id in pairs]


@pytest.fixture(scope="module")
def scenes() -> tuple[list[Row], list[str]]:
    return judged_captions(ScenesData(**SCENES).split("test"))


def pairs_of(scenes: tuple[list[Row], list[str]], **options: Any) -> dict[str, list[Pair]]:
    return probe_pairs(*scenes, SceneNegatives(), ScenePositives(), **options)


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
        "max_positions": 24,
    }
    references = [row["references"] for row in ScenesData(**SCENES).split("train")]
    made = TransformerCaptioner.from_scratch(
        references, 1, encoder_layers=1, decoder_layers=1, **shape
    )
    made.save_pretrained(made.policy, folder)
    return str(folder)


def run(out: Path, target: str, *words: str) -> dict[str, Any]:
    reward = ["--trust", target] if ":" in target else []
    reward += ["--reward.terms.mine.target", target, "--data.kwargs", json.dumps(SCENES)]
    small = ["--budget", "fast", "--num_samples", "4", "--bootstrap", "20"]
    run_program("stress", [*reward, *small, "--out", str(out), *words])
    found: dict[str, Any] = json.loads((out / "stress.json").read_text())
    return found


def test_wilson_and_effect_size() -> None:
    assert wilson(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert wilson(0, 20)[0] == 0
    assert wilson(20, 20) == pytest.approx((0.838875, 1.0), abs=1e-6)
    assert effect_size(np.array([1.0, 2.0, 3.0])) == pytest.approx(2.0)
    assert effect_size(np.array([1.0, 1.0])) is None
    assert effect_size(np.array([1.0])) is None


def test_the_truth_is_on_the_side_of_the_better_caption(
    scenes: tuple[list[Row], list[str]],
) -> None:
    rows, _ = scenes
    pairs = pairs_of(scenes)
    assert list(pairs) == list(PROBES)
    assert {name for name in PROBES if not pairs[name]} <= {
        "replace_direction",
        "replace_verb",
        "swap_count",
    }
    for name, own in pairs.items():
        assert len({pair.row for pair in own}) == len(own), "one pair an image"
        for pair in own:
            assert pair.better != pair.worse
            better, worse = (
                oracle(text, rows[pair.row]["scene"]) for text in (pair.better, pair.worse)
            )
            if name == "detail_missing":
                assert better.recall > worse.recall
                assert better.precision >= worse.precision
            elif name in ("generic", "other_image", "length"):
                assert better.f1 > worse.f1
            elif name not in (*OF_FORM, "negated"):
                assert better.precision > worse.precision, name
    assert pairs_of(scenes) == pairs, "seeded"
    assert pairs_of(scenes, seed=1) != pairs
    assert not any(own for name, own in pairs_of(scenes, english=False).items() if name in ENGLISH)


def test_probes_of_the_oracle_and_of_length(scenes: tuple[list[Row], list[str]]) -> None:
    rows, _ = scenes
    pairs = pairs_of(scenes)
    gold = run_probes(Scorer(OracleReward(rows), rows), rows, pairs)
    assert all(
        gold[name].right == 1
        for name in ("replace_object", "replace_count", "other_image", "generic")
    )
    length = run_probes(Scorer(Length(), rows), rows, pairs, examples=2)
    assert all(
        length[name].right == 0
        for name in ("words_repeated", "caption_repeated", "padded", "length")
    )
    assert length["replace_object"].tied == 1
    assert length["replace_object"].right == 0
    assert length["replace_object"].effect is None
    assert length["detail_missing"].right == 1
    assert (length["cut_off"].effect or 0) > 0
    assert length["replace_verb"].pairs == 0
    assert length["replace_verb"].right is None
    first, second = length["padded"].examples
    assert first["score_of_worse"] - first["score_of_better"] == 11
    assert len(first["worse"].split()) == first["score_of_worse"]
    assert second["image_id"] != first["image_id"]


def test_the_report_and_its_json_agree(
    tmp_path: Path, captioner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--reward.terms.cider.weight",
        "1",
        "--data.kwargs",
        json.dumps(SCENES),
        "--out",
        str(tmp_path),
    ]
    words += ["--model", captioner, "--budget", "fast", "--num_samples", "4", "--bootstrap", "20"]
    assert main(["stress", *words]) == 0
    found = json.loads((tmp_path / "stress.json").read_text())
    report, page = (tmp_path / "stress.md").read_text(), (tmp_path / "stress.html").read_text()
    assert report in capsys.readouterr().out + "\n"
    assert found["images"] == 30
    assert "Cider-D" in found["signature"]
    for name, result in found["probes"].items():
        line = next(line for line in report.splitlines() if line.startswith(f"| {name} "))
        cells = [cell.strip() for cell in line.split("|")][3:5]
        assert cells[0] == str(result["pairs"])
        assert cells[1] == (f"{100 * result['right']:.1f}" if result["pairs"] else "does not apply")
    assert found["probes"]["words_repeated"]["right"] > 0.9
    assert found["probes"]["detail_missing"]["right"] < 0.5
    assert "prefers the worse caption in detail_missing;" in report
    assert found["best_of_n"]["n"] == [1, 2, 4]
    assert found["best_of_n"]["reward"]["mean"] == sorted(found["best_of_n"]["reward"]["mean"])
    assert report.splitlines()[2] == f"**{found['verdict']}**", (
        "the verdict is one line, and comes first"
    )
    assert f"<strong>{escape(found['verdict'])}</strong>" in page
    assert set(found["seconds"]) == {"probes", "samples", "scores", "best_of_n"}
    assert "| this reward |" in report
    assert "| ROUGE-L (" in report, "the shipped table of known rewards"
    for heading in ("Best of n", "Probes", "Known rewards", "Settings"):
        assert f">{heading}</h2>" in page


def test_equal_scores_are_not_called_wrong(tmp_path: Path, captioner: str) -> None:
    run(tmp_path, f"{__name__}:Length", "--model", captioner)
    sentence = (
        (tmp_path / "stress.md").read_text().partition("- Of 25 probes")[2].partition("\n")[0]
    )
    wrong, equal = sentence.partition(";")[::2]
    assert "words_repeated" in wrong
    assert "replace_object" in equal
    assert "replace_object" not in wrong


def test_a_constant_reward_is_called_so(tmp_path: Path, captioner: str) -> None:
    found = run(tmp_path, f"{__name__}:Constant", "--model", captioner)
    assert all(
        result["tied"] in (1, None) and result["effect"] is None
        for result in found["probes"].values()
    )
    assert found["constant"]
    assert "best_of_n" not in found
    assert "constant" in (tmp_path / "stress.md").read_text()


def test_finished_stages_are_kept_and_other_settings_refused(
    tmp_path: Path, captioner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, model = f"{__name__}:FailsAtSecondCall", ("--model", captioner)
    monkeypatch.setattr(FailsAtSecondCall, "calls", 0)
    with pytest.raises(RewardError, match="second call"):
        run(tmp_path, target, *model)
    found = json.loads((tmp_path / "stress.json").read_text())
    assert list(found["seconds"]) == ["probes", "samples"], (
        "the scores failed, what was finished is reported"
    )
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "stages").iterdir()}
    monkeypatch.setattr(FailsAtSecondCall, "calls", 10)
    whole = run(tmp_path, target, *model)
    assert whole["probes"] == found["probes"]
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    with pytest.raises(ConfigError, match="seed"):
        run(tmp_path, target, *model, "--seed", "1")
    with pytest.raises(ConfigError, match="signature"):
        run(tmp_path, f"{__name__}:Length", *model)


@pytest.mark.parametrize(
    "damage", ['{"seconds": 1}', '{"seconds": 1, "result": {}, "hash": 0}', "changed", "half", "[]"]
)
def test_a_damaged_stage_is_named(tmp_path: Path, captioner: str, damage: str) -> None:
    run(tmp_path, f"{__name__}:Length", "--model", captioner)
    for file in (tmp_path / "stages").iterdir():
        whole = file.read_text()
        other = re.sub(r"\d", lambda digit: str(9 - int(digit[0])), whole)
        file.write_text({"changed": other, "half": whole[: len(whole) // 2]}.get(damage, damage))
        with pytest.raises(ConfigError, match=file.name):
            run(tmp_path, f"{__name__}:Length", "--model", captioner)
        file.write_text(whole)
    run(tmp_path, f"{__name__}:Length", "--model", captioner)


def test_two_rewards_on_the_same_captions(tmp_path: Path, captioner: str) -> None:
    (tmp_path / "other.yaml").write_text("reward: {terms: {rouge_l: {}}}")
    words = ["--model", captioner, "--compare", str(tmp_path / "other.yaml")]
    found = run(tmp_path / "file", f"{__name__}:Length", *words)["comparison"]
    section = ["--model", captioner, "--compare", '{"terms": {"rouge_l": {}}}']
    assert run(tmp_path / "section", f"{__name__}:Length", *section)["comparison"] == found
    assert found["second"].startswith("ROUGE-L")
    probes = found["differences"]["probes in the right order"]
    assert probes["interval"][0] > 0, "ROUGE-L knows more than length"
    same = run(tmp_path / "same", "rouge_l", *section)["comparison"]["differences"]
    assert all(line["difference"] == 0 and line["p"] == 1 for line in same.values())
    with pytest.raises(ConfigError, match="compare"):
        run(
            tmp_path / "wrong",
            "rouge_l",
            "--model",
            captioner,
            "--compare",
            '{"terms": {"nowhere": {}}}',
        )
    (tmp_path / "other.yaml").write_text("train: {}")
    with pytest.raises(ConfigError, match="compare"):
        run(tmp_path / "none", "rouge_l", *words)


MINE = [
    ("train", "A dog runs over the grass.", "a brown dog is running"),
    ("test", "A black dog sits on the bench next to a man.", "a man and a dog on a bench"),
    ("test", "Two white boats on a blue lake.", "boats lie on the water"),
]


@pytest.fixture
def mine(tmp_path: Path) -> list[str]:
    """Options of data without scenes, with two references of each image."""
    lines = [
        {"image_id": str(n), "image": f"{n}.png", "split": split, "references": [first, second]}
        for n, (split, first, second) in enumerate(MINE)
    ]
    for line in lines:
        Image.new("RGB", (16, 16)).save(tmp_path / str(line["image"]))
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        "--data.format",
        "jsonl",
        "--data.path",
        str(tmp_path / "mine.jsonl"),
        "--data.kwargs",
        "{}",
    ]


def test_captions_of_ones_own(tmp_path: Path, mine: list[str]) -> None:
    pytest.importorskip("textblob")
    found = run(tmp_path / "out", "rouge_l", *mine)
    probes = found["probes"]
    assert probes["paraphrase"]["pairs"] == probes["detail_missing"]["pairs"] == 0
    assert probes["false_detail"]["pairs"] == probes["words_shuffled"]["pairs"] == 2
    assert probes["replace_count"]["pairs"] == 1
    assert list(found["seconds"]) == ["probes"], "there is no captioner"
    with pytest.raises(ConfigError, match="model"):
        run(tmp_path / "second", "rouge_l", *mine, "--compare", '{"terms": {"cider": {}}}')


def test_gold_of_ones_own_photos_is_of_references_that_the_reward_does_not_see(
    tmp_path: Path, mine: list[str], captioner: str
) -> None:
    pytest.importorskip("textblob")
    words = [*mine, "--model", captioner, "--judges", "{repetition: {}}"]
    gold = run(tmp_path / "out", "rouge_l", *words)["best_of_n"]["gold"]
    assert list(gold) == ["CIDEr-D, references held out", "repetition"]
    references = ["a dog runs", "a dog sits", "two cats", "three boats"]
    original: Row = {"image_id": "1", "references": [*references, "A dog runs."]}
    (row,), captions = judged_captions([original], halve=True)
    assert (row["references"], captions) == (references[2:], references[:1])
    score = gold_scores([row], [references[:2]], [references, ["x y"]], {}, None)[
        "CIDEr-D, references held out"
    ]
    first, second = score([RowCaption(0, "a dog runs"), RowCaption(0, "two cats")])
    assert first > 0
    assert second == 0, "the reward sees that reference, gold does not"
    with pytest.raises(ConfigError, match=r"judges\.rouge_l"):
        run(tmp_path / "judge", "rouge_l", *mine, "--model", captioner, "--judges", "{rouge_l: {}}")


def test_mistakes_are_named(
    tmp_path: Path, scenes: tuple[list[Row], list[str]], captioner: str
) -> None:
    with pytest.raises(ConfigError, match="depth"):
        run(tmp_path, f"{__name__}:NeedsDepth")
    with pytest.raises(RewardError, match=r"image 'test-\d+', caption '[A-Z ]+': "):
        run(tmp_path / "loud", f"{__name__}:FailsOnShouting")
    with pytest.raises(ConfigError, match=r"reward\.terms"):
        run_program("stress", ["--out", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"reward\.normalize"):
        run(tmp_path, "rouge_l", "--reward.normalize", "per_term")
    with pytest.raises(DataError, match="test-000000"):
        run(tmp_path, "rouge_l", "--data.kwargs", json.dumps({**SCENES, "captions_per_image": 1}))
    with pytest.raises(DataError, match="nowhere"):
        run(tmp_path, "rouge_l", "--split", "nowhere")
    with pytest.raises(ConfigError, match="max_new_tokens"):
        run(tmp_path / "long", "rouge_l", "--model", captioner, "--max_new_tokens", "50")
    with pytest.raises(ConfigError, match=r"data\.tokenizer"):
        run(tmp_path / "char", "rouge_l", "--model", captioner, "--data.tokenizer", "char")
    rows = scenes[0][:2]
    scorer = Scorer(Length(), rows)
    assert scorer([RowCaption(0, "a b"), RowCaption(1, "c"), RowCaption(0, "a b")]).tolist() == [
        2,
        1,
        2,
    ]
    assert len(scorer.scores) == 2


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("textblob")
    page = Path(__file__).parents[3] / "docs/stress.md"
    (source,) = re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    exec(compile(source, str(page), "exec"), {})
    printed = capsys.readouterr().out
    assert "highest at n = 1," in printed, "length is hacked by repetition"
    assert "words_repeated 2 0.0 " in printed
    assert "\nrepeat a dog runs ->" in printed


@pytest.mark.slow
def test_a_push(tmp_path: Path, captioner: str) -> None:
    data = json.dumps({**SCENES, "num_train": 40, "num_val": 6})
    words = ["--model", captioner, "--data.kwargs", data, "--push_steps", "2", "--budget", "normal"]
    found = run(tmp_path, f"{__name__}:Length", *words)
    assert [run["factor"] for run in found["push"]] == [0.0, 0.1, 0.5]
    for push in found["push"]:
        assert push["step"] == [0, 1, 2]
        assert len(push["gold"]) == len(push["reward"]) == len(push["kl"]) == 3
        assert push["kl"][0] is None
    page = (tmp_path / "stress.html").read_text()
    assert ">Push</h2>" in page
    again = run(tmp_path, f"{__name__}:Length", *words)
    assert again == found
