"""CIDEr-D from token ids equals CIDEr-D from text, to the bit, wherever the ids are."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocoevalcap.cider.cider import Cider

from rewards.base import RewardError
from rewards.mixed import MixedReward
from rewards.text import token_cider
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.reference_bank import Bank
from rewards.text.token_cider import TokenCiderD, WordVocabulary
from rewards.text.tokenize import is_plain, tokenize
from rl_caption.build import read_token_ids
from rl_caption.captioners.base import Decoding
from rl_caption.evaluation.ngrams import cider_d_scores, count_captions
from rl_caption.scst.rollout import sample_captions
from rl_caption.scst.scoring import term_scores
from rl_caption.types import CaptionBatch
from tests.captioners_for_tests import REFERENCES, tiny_captioner, tiny_rows

PLAIN = ["a", "dog", "on", "the", "beach", "t-shirt", "red"]
OTHERS = ["cannot", "'s", "2", "1/2", "<unk>", "dog.", "Dog"]
NOT_COUNTED = ["zebra", "quagga"]
EOS_ID = 1
WORDS = ("<pad>", "<eos>", *PLAIN, *OTHERS, *NOT_COUNTED)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def ids_of(captions: list[list[str]], words: tuple[str, ...], longest: int, after: int = 0) -> tuple[Any, list[bool]]:
    """Token ids [N, L] of captions, cut at ``longest``, with ``after`` behind EOS; whether EOS is there."""
    ids = torch.full((len(captions), longest), after)
    finished = []
    for row, caption in enumerate(captions):
        tokens = [*map(words.index, caption), EOS_ID][:longest]
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        finished.append(EOS_ID in tokens)
    return ids, finished


def texts_of(ids: torch.Tensor, words: tuple[str, ...]) -> list[str]:
    """As a captioner decodes them."""
    rows = [row[: row.index(EOS_ID)] if EOS_ID in row else row for row in ids.tolist()]
    return [" ".join(words[token] for token in row) for row in rows]


def dense_scores(reward: CiderD, ids: torch.Tensor, finished: list[bool], references: list[list[str]]) -> list[float]:
    """What ``device_scores`` returns on the device of ``ids``, at most 10."""
    packed, scorer = reward._packed, reward._tokens
    assert packed is not None
    assert isinstance(scorer, TokenCiderD)
    unique = list(dict.fromkeys(map(tuple, references)))
    bank = Bank.of(packed.references(unique, reward._reference_tokens))
    owner = np.array([unique.index(tuple(own)) for own in references])
    found = scorer.on_device(ids, np.array(finished) & reward.eos, owner, bank)
    return found.clamp(max=10.0).tolist()


caption = st.lists(st.sampled_from(PLAIN), max_size=9)
sampled = st.lists(st.sampled_from([*PLAIN, *PLAIN, *NOT_COUNTED, *OTHERS]), max_size=12)
references = st.lists(caption.filter(bool), min_size=1, max_size=4)


@settings(deadline=None, max_examples=80)
@given(
    corpus=st.lists(references, min_size=1, max_size=4),
    data=st.data(),
    eos=st.booleans(),
    n=st.integers(1, 5),
    after=st.sampled_from([0, EOS_ID, 3, -100, 10**6]),
    kind=st.sampled_from([torch.int64, torch.int32]),
)
def test_scores_from_ids_equal_those_from_text(
    corpus: list[list[list[str]]], data: st.DataObject, eos: bool, n: int, after: int, kind: torch.dtype
) -> None:
    reward = CiderD(DocumentFrequencies.from_references(corpus, eos=eos, n=5), eos=eos, n=n)
    rows = data.draw(st.lists(st.tuples(sampled, st.integers(0, len(corpus) - 1)), min_size=1, max_size=9))
    ids, finished = ids_of([words for words, _ in rows], WORDS, data.draw(st.integers(1, 10)), after)
    texts = texts_of(ids, WORDS)
    own = [[" ".join(words) for words in corpus[number]] for _, number in rows]
    expected = reward(None, texts, references=own, finished=finished)
    reward.bind_vocabulary(WordVocabulary(WORDS, EOS_ID))
    ids = ids.to(kind)
    assert reward(None, texts, references=own, finished=finished, completion_ids=ids) == expected
    all_plain = [all(map(is_plain, text.split())) for text in texts]
    dense = dense_scores(reward, ids, finished, own)
    assert [value == value for value in dense] == all_plain, "NaN, and only there, where the text is needed"
    assert [value for value in dense if value == value] == [
        value for value, plain in zip(expected, all_plain, strict=True) if plain
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_real_references(device: str, shared_data: Path) -> None:
    grouped = defaultdict(list)
    for item in json.loads((shared_data / "coco_val2017_captions" / "captions_val2017.json").read_text())[
        "annotations"
    ]:
        grouped[item["image_id"]].append(item["caption"])
    images = list(grouped.values())[:1500]
    tokens = [[tokenize(text) for text in texts] for texts in images]
    df = DocumentFrequencies.from_references(tokens, eos=True)
    words = ("<pad>", "<eos>", *(word for word in df.words() if word != "<eos>"))
    known = {word: number for number, word in enumerate(words)}
    draw = np.random.default_rng(0)
    rows = [  # the beginning of one caption, the end of another image's
        [*own[draw.integers(5)][: draw.integers(1, 9)], *tokens[draw.integers(1500)][0][draw.integers(9) :]]
        for own in tokens
        for _ in range(2)
    ]
    ids = torch.zeros(len(rows), 18, dtype=torch.long)
    for row, caption in enumerate(rows):
        found = [*map(known.__getitem__, caption), EOS_ID][:18]
        ids[row, : len(found)] = torch.tensor(found)
    finished = (ids == EOS_ID).any(1).tolist()
    own_references = [texts for texts in images for _ in range(2)]
    texts = texts_of(ids, words)
    reward = CiderD(df)
    expected = reward(None, texts, references=own_references, finished=finished)
    reward.bind_vocabulary(WordVocabulary(words, EOS_ID))
    ids = ids.to(device)
    assert reward(None, texts, references=own_references, finished=finished, completion_ids=ids) == expected
    dense = dense_scores(reward, ids, finished, own_references)
    differing = [value for value, score in zip(dense, expected, strict=True) if value != score]
    assert np.isnan(differing).all()
    assert len(differing) < 0.05 * len(dense), "captions of other than plain words are few"


def test_squares_are_those_of_the_toolkit() -> None:
    """(ln 46 - ln 8)² by C's power, which the toolkit takes, is another double than the product (glibc 2.36)."""
    words = ("<pad>", "<eos>", "left", "right", "none", "new")
    own = [[" ".join(["left"] * (image < 8) + ["right"] * (image < 9)) or "none"] for image in range(46)]
    texts = ["left right new", "right left left right"] * 23
    expected = Cider().compute_score(dict(enumerate(own)), {row: [text] for row, text in enumerate(texts)})[1].tolist()
    tokens = [[text.split() for text in texts] for texts in own]
    assert cider_d_scores(count_captions([text.split() for text in texts], tokens)).tolist() == expected
    reward = CiderD(DocumentFrequencies.from_references(tokens, eos=False), eos=False)
    assert reward(None, texts, references=own) == expected
    reward.bind_vocabulary(WordVocabulary(words, EOS_ID))
    for longest in (4, 60):  # the second is longer than the tables of the first
        ids, finished = ids_of([text.split() for text in texts], words, longest)
        assert reward(None, texts, references=own, finished=finished, completion_ids=ids) == expected
        assert dense_scores(reward, ids, finished, own) == expected


def test_references_without_words() -> None:
    reward, own = CiderD(DocumentFrequencies.from_references([[["a"]], [["dog"]]], eos=False), eos=False), [["", "."]]
    reward.bind_vocabulary(WordVocabulary(WORDS, EOS_ID))
    ids, finished = ids_of([["a"]], WORDS, 3)
    assert reward(None, ["a"], references=own, completion_ids=ids) == [0.0]
    assert dense_scores(reward, ids, finished, own) == [0.0]


def bound() -> CiderD:
    corpus = [[["a", "dog"], ["the", "dog"]], [["a", "red", "beach"]]]
    reward = CiderD(DocumentFrequencies.from_references(corpus, eos=True))
    reward.bind_vocabulary(WordVocabulary(WORDS, EOS_ID))
    return reward


def test_lists_of_ids_and_unbound_rewards_go_by_the_text() -> None:
    reward, own = bound(), [["a dog", "the dog"]] * 2
    other, _ = ids_of([["red"], ["red", "beach"]], WORDS, 4)
    expected = reward(None, ["a dog", "the dog"], references=own)
    assert reward(None, ["a dog", "the dog"], references=own, completion_ids=other.tolist()) == expected, "as TRL's are"
    unbound = CiderD(reward.df)
    assert unbound(None, ["a dog", "the dog"], references=own, completion_ids=other) == expected
    assert reward(None, ["a dog", "the dog"], references=own, completion_ids=other) != expected
    counting = CiderD()  # has no document frequencies of its own
    counting.bind_vocabulary(WordVocabulary(WORDS, EOS_ID))
    assert counting(None, ["a dog", "the dog"], references=own, completion_ids=other) == CiderD()(
        None, ["a dog", "the dog"], references=own
    )


def test_references_that_were_not_counted_go_by_the_text() -> None:
    reward, texts, own = bound(), ["a zebra", "zebra red"], [["a zebra"], ["zebra red dog"]]
    ids, _ = ids_of([text.split() for text in texts], WORDS, 5)
    assert reward(None, texts, references=own, completion_ids=ids) == CiderD(reward.df)(None, texts, references=own)


def test_words_that_come_hundreds_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, own = ["a " * 299 + "dog", "a dog", "red"], [["a " * 400 + "dog", "the dog"], ["a dog"], ["red beach"]]
    ids, finished = ids_of([text.split() for text in texts], WORDS, 301)
    monkeypatch.setattr(token_cider, "MOST_PAIRS", 2 * 302**2)  # two captions at once
    reward = CiderD(DocumentFrequencies.from_references([[text.split() for text in texts] for texts in own], eos=True))
    expected = reward(None, texts, references=own)
    reward.bind_vocabulary(WordVocabulary(WORDS, EOS_ID))
    assert reward(None, texts, references=own, completion_ids=ids) == expected
    assert dense_scores(reward, ids, finished, own) == expected


@pytest.mark.parametrize("shape", [(1, 4), (2,), (3, 4)])
def test_ids_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RewardError, match=r"completion_ids have the shape .*: expected \[2, tokens\]"):
        bound()(None, ["a", "dog"], references=[["a"]] * 2, completion_ids=torch.ones(shape, dtype=torch.long))


def test_a_bound_reward_survives_pickling() -> None:
    reward, own = bound(), [["a dog"], ["a red beach"]]
    ids, _ = ids_of([["a", "dog"], ["red", "beach"]], WORDS, 4)
    scores = reward(None, ["", ""], references=own, completion_ids=ids)
    assert scores[0] == pytest.approx(7.5), "a caption of three tokens has no n-gram of four"
    assert pickle.loads(pickle.dumps(reward))(None, ["", ""], references=own, completion_ids=ids) == scores


WRITTEN = st.from_regex(r"\A[a-z]{1,6}(-[a-z]{1,4})?\Z").filter(is_plain) | st.sampled_from(
    ["'s", "n't", "a", "no", "st"]
)


@given(st.lists(WRITTEN, min_size=1, max_size=8))
def test_plain_words_are_tokens_whatever_stands_beside_them(words: list[str]) -> None:
    assert tokenize(" ".join(words)) == words


@pytest.mark.parametrize("word", ["cannot", "Dog", "dog.", "'re", "2", "", "a b", "-a", "a--b", "<unk>", "café"])
def test_what_is_not_plain(word: str) -> None:
    assert not is_plain(word)


# in a step of training


def scored(reward: MixedReward, *, with_texts: bool = True) -> dict[str, list[float]]:
    """Scores of a rollout of a tiny captioner, whose texts may be left out."""
    captioner = tiny_captioner()
    rows: Any = tiny_rows()
    batch = CaptionBatch(rows, captioner.preprocess(rows))
    rollout = sample_captions(captioner, captioner.policy, batch, Decoding(3, True, max_new_tokens=6), 0, 0)
    if not with_texts:
        rollout = replace(rollout, texts=[[""] * 3] * 4, greedy_texts=[""] * 4)
    return term_scores(reward, rollout, batch)


def test_a_word_level_captioner_is_scored_by_its_ids() -> None:
    df = DocumentFrequencies.from_references(([tokenize(text) for text in texts] for texts in REFERENCES), eos=True)
    expected = scored(MixedReward({"cider": (CiderD(df), 1.0)}))
    cider = CiderD(df)
    reward = MixedReward({"cider": (cider, 1.0)})
    read_token_ids(reward, tiny_captioner())
    assert cider.vocabulary is not None
    assert cider.vocabulary.words[:4] == ("",) * 4, "special tokens are no words"
    assert scored(reward, with_texts=False) == expected
    assert len(expected["cider"]) == 16
    assert max(expected["cider"]) > 0


def test_captioners_of_subwords_are_not_bound(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece

    cider = CiderD(DocumentFrequencies.from_references([[["a"]]], eos=True))
    words = tiny_captioner()
    backend = words.tokenizer.backend_tokenizer
    vocabulary = backend.get_vocab()
    pieces = Tokenizer(WordPiece(vocabulary, unk_token="<unk>"))
    pieces.save(str(tmp_path / "tokenizer.json"))
    subwords = type(words).from_scratch(
        REFERENCES, 1, str(tmp_path / "tokenizer.json"), image_size=16, patch_size=8, d_model=32, num_heads=4
    )
    read_token_ids(MixedReward({"cider": (cider, 1.0)}), subwords)
    assert cider.vocabulary is None
