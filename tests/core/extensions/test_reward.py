"""A reward from outside: a class in a file of one's own, and its name in the
configuration (docs/rewards.md).
"""

from collections.abc import Sequence
from typing import Any

import pytest

from rewards.base import as_texts, checked_scores, required_column
from rewards.files import load_json
from rl_caption.cli.main import main
from rl_caption.config.build import build_reward
from rl_caption.config.schema import RewardConfig, RewardTerm
from tests.training_for_tests import checked_run, lines, scst_config

NAME = "tests.core.extensions.test_reward:LengthMatch"


class LengthMatch:
    """Closeness of a caption's length to a number of words: 1 - |length - words| /
    words, at least 0.

    ``words``, 1 to 100, is the length that scores 1; captions that did not end score
    ``unfinished``, 0 to 1.
    """

    __name__ = "length_match"
    columns = frozenset({"finished"})
    bounds = (0.0, 1.0)

    def __init__(self, words: int = 6, unfinished: float = 0.0) -> None:
        if not 1 <= words <= 100:
            raise ValueError(f"words is {words}: expected 1 to 100")
        if not 0 <= unfinished <= 1:
            raise ValueError(f"unfinished is {unfinished}: expected 0 to 1")
        self.words, self.unfinished = words, unfinished

    @property
    def signature(self) -> str:
        return f"length_match[{self.words},unfinished{self.unfinished:g}]"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        texts = as_texts(completions)
        finished = required_column(
            {"finished": [True] * len(texts)} | columns,
            "finished",
            self.__name__,
            len(texts),
        )
        scores = [
            max(0.0, 1 - abs(len(text.split()) - self.words) / self.words)
            if done
            else self.unfinished
            for text, done in zip(texts, finished, strict=True)
        ]
        return checked_scores(self, scores, len(texts))


class Closeness(LengthMatch):
    """``LengthMatch`` for files of captions, which do not record whether a caption ended."""

    columns: frozenset[str] = frozenset()


def test_a_run_trains_with_it(start, tmp_path):
    terms = {
        "length": {"weight": 0.5, "target": NAME, "kwargs": {"words": 4}},
        "cider": {"weight": 0.5},
    }
    config = scst_config(
        tmp_path, start, **{"train.max_steps": 2, "reward.terms": terms}
    )
    ended = checked_run(config, tmp_path, "scst")
    logged = [
        line for line in lines(tmp_path, "metrics.jsonl") if "reward/length" in line
    ]
    assert [line["step"] for line in logged] == [1, 2]
    for line in logged:
        assert 0 <= line["reward/length"] <= 1
        assert line["reward/total"] == pytest.approx(
            0.5 * line["reward/length"] + 0.5 * line["reward/cider"], abs=1e-6
        )
    assert "0.5*[length_match[4,unfinished0]]" in ended.output, "the signature names it"


def test_captions_in_files_are_scored_with_it(tmp_path, capsys):
    captions, out = tmp_path / "captions.json", tmp_path / "scores.json"
    captions.write_text('[{"image_id": "1", "caption": "a dog runs"}]')
    name = NAME.replace("LengthMatch", "Closeness")
    words = [f"--captions={captions}", f"--out={out}", f"--reward={name}", "--kwargs"]
    assert main(["score", *words, '{"words": 2}']) == 0
    assert load_json(out)["scores"] == {"1": 0.5}
    with pytest.raises(SystemExit):
        main(["score", *words, '{"words": 2, "unfinished": 3}'])
    assert "unfinished is 3: expected 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "kwargs", "part"),
    [
        (NAME, {"words": 200}, "reward.terms.mine: words is 200: expected 1 to 100"),
        (NAME, {"word": 3}, "takes (words"),
        (f"{__name__}:Missing", {}, "'Missing'"),
        ("collections:Counter", {}, "which is not a reward"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(target, kwargs, part):
    with pytest.raises(ValueError) as refused:
        build_reward(
            RewardConfig(terms={"mine": RewardTerm(target=target, kwargs=kwargs)}),
            [["a dog"]],
        )
    assert part in str(refused.value)
