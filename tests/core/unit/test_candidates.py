"""Several captions of an image: the choice among them, and what the programs write and refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from rewards.base import RewardError
from rewards.registry import build
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import tokenize
from rl_caption.captioners.config import Decoding
from rl_caption.cli.caption import caption as caption_photos
from rl_caption.cli.configuration import parse
from rl_caption.config.commands import CaptionConfig
from rl_caption.config.evaluation import EvaluateModelConfig
from rl_caption.config.schema import DataConfig
from rl_caption.evaluation import EvaluationError
from rl_caption.evaluation.samples import evaluate_samples
from rl_caption.programs.captions import build_reranker
from rl_caption.programs.evaluate import evaluate_split
from rl_caption.runtime.errors import ConfigError
from tests.captioners_for_tests import REFERENCES, tiny_captioner, tiny_rows

COUNT = 6


def caption(words: list[str]) -> int:
    return caption_photos(parse(CaptionConfig, words, "caption"))


class Longest:
    """Number of characters of a caption; it looks at the image, and finds no references."""

    __name__, columns, bounds, signature = (
        "longest",
        frozenset({"image", "image_id"}),
        (0.0, 1e9),
        "longest",
    )

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> list[float]:
        if self.fails:
            raise RewardError("no score today")
        assert columns.keys() == {"image", "image_id", "finished"}
        return [float(len(text)) for text in completions]


LONGEST = f"{__name__}:Longest"


@pytest.fixture
def folder(tmp_path):
    """A captioner, photos, and data of four test images."""
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, tmp_path / "model")
    (tmp_path / "photos").mkdir()
    lines = []
    for row in tiny_rows(4):
        row["image"].save(tmp_path / "photos" / f"{row['image_id']}.png")
        image = f"photos/{row['image_id']}.png"
        lines += [
            {
                "image": image,
                "image_id": f"{split}-{row['image_id']}",
                "references": row["references"],
                "split": split,
            }
            for split in ("train", "test")
        ]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return tmp_path


def configured(folder: Path, **changes: Any) -> EvaluateModelConfig:
    decode = Decoding(max_new_tokens=8, **changes.pop("decode", {}))
    data = DataConfig(format="jsonl", path=str(folder / "data.jsonl"))
    options: dict[str, Any] = {
        "model": str(folder / "model"),
        "out": str(folder / "out"),
        "bootstrap": 0,
    }
    options |= {
        "metrics": ["cider"],
        "tokenizer": "python",
        "data": data,
        "decode": decode,
    }
    return EvaluateModelConfig(**options | changes)


def results(
    folder: Path,
) -> tuple[dict[str, str], dict[str, Any], list[dict[str, Any]]]:
    out = folder / "out"
    captions = {
        row["image_id"]: row["caption"]
        for row in json.loads((out / "predictions.json").read_text())
    }
    candidates = out / "candidates.jsonl"
    lines = (
        [json.loads(line) for line in candidates.read_text().splitlines()]
        if candidates.is_file()
        else []
    )
    return captions, json.loads((out / "scores.json").read_text()), lines


def test_the_consensus_of_samples_is_chosen(folder):
    decode = {"num_samples": COUNT, "temperature": 0.7, "top_p": 0.9}
    table = evaluate_split(
        configured(folder, decode=decode, rerank="consensus", candidates=True)
    )
    captions, scores, lines = results(folder)
    samples = {
        line["image_id"]: [one["caption"] for one in line["candidates"]]
        for line in lines
    }
    assert {len(own) for own in samples.values()} == {COUNT}
    assert captions == {
        line["image_id"]: samples[line["image_id"]][line["chosen"]] for line in lines
    }
    # As ``evaluate_samples`` chooses: its document frequencies are those of the references, here
    # equal in both splits.
    expected = evaluate_samples(
        samples, {f"test-image-{i}": texts for i, texts in enumerate(REFERENCES)}
    )
    assert scores["metrics"]["CIDEr"] == pytest.approx(expected.best_of[-1].consensus)
    written = json.loads((folder / "out" / "candidates_scores.json").read_text())
    assert written == {
        "metrics": expected.metrics,
        "best_of": [one._asdict() for one in expected.best_of],
    }
    how = f"sampling, num_samples {COUNT}, temperature 0.7, max_new_tokens 8, top_p 0.9, seed 0, chosen by consensus["
    assert scores["decoding"].startswith(how)
    assert how in table
    evaluate_split(
        configured(folder, decode=decode, rerank="consensus", candidates=True, seed=1)
    )
    assert results(folder)[2] != lines
    evaluate_split(configured(folder))
    assert results(folder)[2] == [], (
        "candidates of other captions do not stay beside the new ones"
    )
    assert not (folder / "out" / "candidates_scores.json").exists()


def test_a_reward_chooses_among_beams(folder):
    decode = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0}
    evaluate_split(configured(folder, decode=decode, rerank=LONGEST, candidates=True))
    captions, _, lines = results(folder)
    for line in lines:
        own = line["candidates"]
        lengths = [len(one["caption"]) for one in own]
        assert [one["reward"] for one in own] == lengths
        assert line["chosen"] == lengths.index(max(lengths))
        assert captions[line["image_id"]] == own[line["chosen"]]["caption"]
        ordered = [one["score"] for one in own]
        assert ordered == sorted(ordered, reverse=True)
    assert any(line["chosen"] for line in lines), (
        "the case must hold a caption that is not the likeliest"
    )


def test_the_best_caption_of_a_photo_is_chosen(folder, capsys):
    words = ["--model", str(folder / "model"), "--num_beams", "3"]
    words += [
        "--num_return_sequences",
        "3",
        "--remove_bad_endings",
        "--rerank",
        LONGEST,
    ]
    out = folder / "candidates.jsonl"
    assert caption([*words, "--candidates", str(out), str(folder / "photos")]) == 0
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert printed == [
        [line["image_id"], line["candidates"][line["chosen"]]["caption"]]
        for line in lines
    ]
    assert [len(line["candidates"]) for line in lines] == [3] * 4
    with pytest.raises(RewardError, match="rerank: "):
        caption([*words, "--rerank_kwargs", '{"fails": true}', str(folder / "photos")])
    decoded = [
        [line["image_id"], one["caption"]]
        for line in lines
        for one in line["candidates"]
    ]
    assert [
        text.split("\t") for text in capsys.readouterr().out.splitlines()
    ] == decoded
    with pytest.raises(ConfigError, match="decode gives 3 captions an image"):
        caption(
            [
                "--model",
                str(folder / "model"),
                "--num_samples",
                "3",
                str(folder / "photos"),
            ]
        )


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"decode": {"num_samples": 5}}, "decode .* 5 captions"),
        ({"rerank": "consensus"}, "rerank is 'consensus'"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(changes, key, tmp_path):
    with pytest.raises(ValueError, match=key):
        configured(tmp_path, **changes)


def test_rewards_that_cannot_choose_are_refused(folder):
    for rerank, kwargs, part in (
        ("cider", {}, "needs references"),
        ("consensus", {"widht": 3}, "widht"),
    ):
        with pytest.raises(ConfigError, match=f"rerank.*{part}"):
            build_reranker(rerank, kwargs, ())
    with pytest.raises(RewardError, match="rerank: "):
        evaluate_split(
            configured(
                folder,
                decode={"num_samples": 2},
                rerank=LONGEST,
                rerank_kwargs={"fails": True},
            )
        )


def test_images_are_looked_for_before_anything_is_decoded(folder):
    (folder / "photos/image-2.png").unlink()
    with pytest.raises(EvaluationError, match=r"^.*1 of 4"):
        evaluate_split(configured(folder, decode={"num_samples": 2}, rerank=LONGEST))


def test_consensus_is_the_mean_similarity_to_the_others():
    texts = ["a dog runs", "a dog runs fast", "a train", "a dog runs", "two birds"]
    found = build("consensus")(None, texts, image_id=["a", "a", "a", "b", "a"])
    assert found[0] > found[1] > found[2] > found[3] == found[4] == 0.0
    assert build("consensus")(
        None, ["one red dog", "one red dog"], image_id=["a", "a"]
    )[0] == pytest.approx(7.5)
    df = DocumentFrequencies.from_references(
        [[tokenize(text)] for text in texts], eos=False
    )
    assert (
        build_reranker("consensus", {}, [[text] for text in texts]).signature
        == build("consensus", df=df).signature
    )
    with pytest.raises(ValueError, match="eos"):
        build(
            "consensus",
            df=DocumentFrequencies.from_references(
                [[tokenize(text)] for text in texts], eos=True
            ),
        )
