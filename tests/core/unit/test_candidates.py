"""Several captions of an image: the choice among them, and what the programs write and refuse."""

import json

import pytest

from rewards.base import RewardError
from rewards.registry import build
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.captioners.config import Decoding
from rl_caption.cli.configuration import parse
from rl_caption.config.commands import CaptionConfig, EvaluateConfig
from rl_caption.config.schema import DataConfig
from rl_caption.evaluation.samples import evaluate_samples
from rl_caption.programs.caption import caption as caption_photos
from rl_caption.programs.captions import build_reranker
from rl_caption.programs.evaluate import evaluate_split
from rl_caption.runtime.errors import ConfigError
from tests.captioners_for_tests import REFERENCES, tiny_captioner, tiny_rows

COUNT = 6


class Longest:
    """Number of characters of a caption; it looks at the image, and finds no references."""

    __name__ = signature = "longest"
    columns = frozenset({"image", "image_id"})
    bounds = (0.0, 1e9)

    def __init__(self, fails=False):
        self.fails = fails

    def __call__(self, prompts, completions, **columns):
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
        name, references = row["image_id"], row["references"]
        row["image"].save(tmp_path / "photos" / f"{name}.png")
        line = {"image": f"photos/{name}.png", "references": references}
        for split in ("train", "test"):
            more = {"image_id": f"{split}-{name}", "split": split}
            lines.append(json.dumps({**line, **more}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return tmp_path


def configured(folder, **changes):
    return EvaluateConfig(
        model=str(folder / "model"),
        out=str(folder / "out"),
        bootstrap=0,
        metrics=["cider"],
        tokenizer="python",
        data=DataConfig(format="jsonl", path=str(folder / "data.jsonl")),
        decode=Decoding(max_new_tokens=8, **changes.pop("decode", {})),
        **changes,
    )


def results(folder):
    """Captions, scores and candidates that an evaluation wrote."""
    out = folder / "out"
    rows = json.loads((out / "predictions.json").read_text())
    captions = {row["image_id"]: row["caption"] for row in rows}
    file = out / "candidates.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    scores = json.loads((out / "scores.json").read_text())
    return captions, scores, list(map(json.loads, lines))


def test_the_consensus_of_samples_is_chosen(folder):
    decode = {"num_samples": COUNT, "temperature": 0.7, "top_p": 0.9}
    options = {"decode": decode, "rerank": "consensus", "candidates": True}
    evaluate_split(configured(folder, **options))
    captions, scores, lines = results(folder)
    samples = {}
    for line in lines:
        own = [one["caption"] for one in line["candidates"]]
        assert len(own) == COUNT
        assert captions[line["image_id"]] == own[line["chosen"]]
        samples[line["image_id"]] = own
    # As ``evaluate_samples`` chooses: its document frequencies are those of the references, here
    # equal in both splits.
    references = {f"test-image-{i}": texts for i, texts in enumerate(REFERENCES)}
    expected = evaluate_samples(samples, references)
    assert scores["metrics"]["CIDEr"] == pytest.approx(expected.best_of[-1].consensus)
    written = json.loads((folder / "out" / "candidates_scores.json").read_text())
    assert written["metrics"] == expected.metrics
    assert "chosen by consensus[" in scores["decoding"]
    evaluate_split(configured(folder, **options, seed=1))
    assert results(folder)[2] != lines
    # candidates of other captions do not stay beside the new ones
    evaluate_split(configured(folder))
    assert results(folder)[2] == []
    assert not (folder / "out" / "candidates_scores.json").exists()


def test_the_best_caption_of_a_photo_is_chosen(folder, capsys):
    def caption(*words):
        given = ["--model", str(folder / "model"), *words, str(folder / "photos")]
        return caption_photos(parse(CaptionConfig, given, "caption"))

    words = ["--num_beams", "3", "--num_return_sequences", "3", "--rerank", LONGEST]
    out = folder / "candidates.jsonl"
    caption(*words, "--candidates", str(out))
    printed = capsys.readouterr().out.splitlines()
    lines = list(map(json.loads, out.read_text().splitlines()))
    for text, line in zip(printed, lines, strict=True):
        own = [one["caption"] for one in line["candidates"]]
        assert len(own) == 3
        assert text.split("\t") == [line["image_id"], max(own, key=len)]
        assert line["chosen"] == own.index(max(own, key=len))
        rewards = [one["reward"] for one in line["candidates"]]
        assert rewards == list(map(len, own))
    with pytest.raises(RewardError, match="rerank: "):
        caption(*words, "--rerank_kwargs", '{"fails": true}')


def test_rewards_that_cannot_choose_are_refused(folder):
    with pytest.raises(ConfigError, match=r"rerank.*needs references"):
        build_reranker("cider", {}, ())
    options = {"decode": {"num_samples": 2}, "rerank": LONGEST}
    with pytest.raises(RewardError, match="rerank: "):
        evaluate_split(configured(folder, rerank_kwargs={"fails": True}, **options))


def test_consensus_is_the_mean_similarity_to_the_others():
    texts = ["a dog runs", "a dog runs fast", "a train", "a dog runs", "two birds"]
    found = build("consensus")(None, texts, image_id=["a", "a", "a", "b", "a"])
    assert found[0] > found[1] > found[2] > found[3] == found[4] == 0.0
    same = build("consensus")(None, ["one red dog"] * 2, image_id=["a", "a"])
    assert same[0] == pytest.approx(7.5)
    references = [[text] for text in texts]
    df = DocumentFrequencies.from_texts(references, eos=False)
    reranker = build_reranker("consensus", {}, references)
    assert reranker.signature == build("consensus", df=df).signature
