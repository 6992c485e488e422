"""Document frequencies: counting, files, and pickles of other packages."""

import math
import os
import pickle
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewards.text.document_frequency import EOS, DocumentFrequencies, load_legacy_pickle
from rewards.text.ngrams import ngram_counts, table_of_rows

CORPUS = [[["a", "dog"], ["a", "red", "dog"]], [["a", "cat"]], [["the", "café"]]]


def counted(eos: bool = False) -> DocumentFrequencies:
    return DocumentFrequencies.from_references(CORPUS, eos=eos)


@pytest.mark.parametrize("seed", [1, 7])
def test_counts_are_those_of_the_definition(seed):
    source, expected = random.Random(seed), Counter[tuple[str, ...]]()
    corpus = [
        [
            source.choices("abcdef", k=source.randint(0, 7))
            for _ in range(source.randint(0, 4))
        ]
        for _ in range(30)
    ]
    df = DocumentFrequencies.from_references(corpus, eos=False, n=5)
    for part in corpus:
        expected.update({ngram for tokens in part for ngram in ngram_counts(tokens, 5)})
    assert dict(df.table.items()) == expected
    wrapped = DocumentFrequencies.from_counts(
        expected, df.log_documents, n=5, eos=False
    )
    assert wrapped.fingerprint == df.fingerprint


def test_fingerprint_and_file_of_earlier_versions(tmp_path):
    # Recorded with version 0.1.0 when it held a dict of tuples (commit dc70266).
    assert (counted().fingerprint, counted(eos=True).fingerprint) == (
        "d545c617ded3d0d0",
        "b3e7a3c7f54333cc",
    )
    df = DocumentFrequencies.from_counts(
        {("a",): 2.5, ("b", "a"): 1}, math.log(7), n=2, eos=False, tokenizer="mine"
    )
    assert df.fingerprint == "f7090c3bca2a6379"
    df.save(tmp_path / "df.npz")
    assert dict(DocumentFrequencies.load(tmp_path / "df.npz").table.items()) == {
        ("a",): 2.5,
        ("b", "a"): 1,
    }


def test_nothing_can_be_set():
    df = counted(eos=True)
    counts = dict(df.table.items())
    assert (counts[EOS,], counts["dog", EOS]) == (3, 1)
    with pytest.raises(ValueError, match="read-only"):
        df.table.counts[0] = 5
    gaps = DocumentFrequencies.from_counts(
        {("b", "a", "c"): 2, ("a",): 1}, 1.0, eos=False
    )
    expected = [(("a",), 1), (("b", "a", "c"), 2)]
    assert list(gaps.table.items()) == expected, "a prefix is not counted"


def test_saved_and_loaded_is_the_same(tmp_path):
    df, path = counted(eos=True), tmp_path / "new" / "df.npz"
    df.save(path)
    loaded = DocumentFrequencies.load(path)
    assert dict(loaded.table.items()) == dict(df.table.items())
    for name in ("documents", "log_documents", "n", "eos", "tokenizer", "fingerprint"):
        assert getattr(loaded, name) == getattr(df, name)
    with np.load(path, allow_pickle=False) as stored:
        assert all(stored[name].dtype.kind in "uif" for name in stored.files)


def test_fingerprint_is_of_the_content_not_of_its_order():
    same = (
        DocumentFrequencies.from_references(CORPUS[::-1], eos=False),
        pickle.loads(pickle.dumps(counted())),
    )
    others = (
        DocumentFrequencies.from_references(CORPUS[:2], eos=False),
        counted(eos=True),
    )
    assert {df.fingerprint for df in same} == {counted().fingerprint}
    assert len({df.fingerprint for df in (*others, counted())}) == 3


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "df.npz"
    counted().save(path)
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    for content, message in (
        (arrays | {"counts_1": arrays["counts_1"] + 1}, "damaged"),
        ({"other": np.zeros(3)}, path.name),
    ):
        np.savez(path, **content)
        with pytest.raises(ValueError, match=message):
            DocumentFrequencies.load(path)
    path.write_bytes(pickle.dumps({"document_frequency": {}}))
    with pytest.raises(ValueError, match=path.name):
        DocumentFrequencies.load(path)


def test_impossible_corpora_are_refused(tmp_path):
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (
            {("a",): 3, ("a", "b"): 9, ("b", "a"): 2},
            {},
            r"\('a', 'b'\).*9 of 3 documents",
        ),
        ({("a", "b"): 1}, {"n": 1}, r"\('a', 'b'\) has 2.*1.*= 1"),
    ]
    for counts, options, message in cases:
        with pytest.raises(ValueError, match=message):
            DocumentFrequencies.from_counts(counts, math.log(3), eos=False, **options)
    with pytest.raises(ValueError, match="image"):
        DocumentFrequencies.from_references([], eos=False)
    broken = DocumentFrequencies.from_counts(
        {("a\nb", "c"): 1, ("d",): 2}, math.log(3), eos=False
    )
    with pytest.raises(
        ValueError, match="line break"
    ):  # a file could not tell the words apart
        broken.save(tmp_path / "df.npz")
    assert not list(tmp_path.iterdir())


# pickles of other packages


def legacy(ref_len: object, eos: bool = False) -> dict[str, object]:
    counts: dict[tuple[str, ...], float] = defaultdict(float)
    counts.update(
        {ngram: float(count) for ngram, count in counted(eos=eos).table.items()}
    )
    return {"document_frequency": counts, "ref_len": ref_len}


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_both_conventions_of_ref_len(protocol, tmp_path):
    path = tmp_path / "coco-train-words.p"
    for ref_len in (113287, math.log(113287), np.log(113287.0), np.int64(113287)):
        path.write_bytes(pickle.dumps(legacy(ref_len, eos=protocol == 4), protocol))
        df = load_legacy_pickle(path)
        assert (df.documents, df.eos) == (113287, protocol == 4)
        assert df.log_documents == pytest.approx(math.log(113287), rel=1e-15)
        assert dict(df.table.items()) == dict(counted(eos=df.eos).table.items())


@pytest.mark.parametrize("images", [2, 3, 8, 12, 20, 30, 49, 50, 51, 8091])
def test_whole_numbers_are_numbers_of_images_and_others_logarithms(images, tmp_path):
    path = tmp_path / "words.p"
    for ref_len in (
        images,
        float(images),
        math.log(images),
        np.log(np.float32(images)),
    ):
        content = {
            "document_frequency": {("a",): float(images)},
            "ref_len": float(ref_len),
        }
        path.write_bytes(pickle.dumps(content))
        assert load_legacy_pickle(path).log_documents == pytest.approx(
            math.log(images), rel=1e-6
        )


@pytest.mark.parametrize("ref_len", [12, 12.0, 2.4, 112, 60.5])
def test_fewer_images_than_an_ngram_is_in_are_refused(ref_len, tmp_path):
    path = tmp_path / "words.p"
    path.write_bytes(
        pickle.dumps({"document_frequency": {("a",): 113.0}, "ref_len": ref_len})
    )
    with pytest.raises(ValueError, match=r"words\.p"):
        load_legacy_pickle(path)


def test_python_2_strings_are_read(tmp_path):
    # {'document_frequency': {('caf\xc3\xa9',): 2.0}, 'ref_len': 100} as Python 2.7 writes it with
    # protocol 0
    written = b"(dp0\nS'ref_len'\np1\nI100\nsS'document_frequency'\np2\n(dp3\n(S'caf\\xc3\\xa9'\np4\ntp5\nF2.0\nss."
    (tmp_path / "py2.p").write_bytes(written)
    df = load_legacy_pickle(tmp_path / "py2.p")
    assert (dict(df.table.items())["café",], df.documents) == (2, 100)


def test_the_longest_ngram_of_a_pickle_is_that_of_the_file(tmp_path):
    counts = {("a",): 60.0, ("a", "dog"): 30.0}
    (tmp_path / "two.p").write_bytes(
        pickle.dumps({"document_frequency": counts, "ref_len": 100})
    )
    assert load_legacy_pickle(tmp_path / "two.p").n == 2


class RunsSomething:
    def __init__(self, target: object, *arguments: object) -> None:
        self.call = (target, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


def test_a_malicious_pickle_runs_nothing(tmp_path):
    trace, path = tmp_path / "ran", tmp_path / "bad.p"
    for attack in (
        RunsSomething(os.system, f"touch {trace}"),
        RunsSomething(Path.touch, trace),
        RunsSomething(eval, f"open({str(trace)!r}, 'w')"),
        RunsSomething(getattr, "x", "upper"),
        RunsSomething(np.load, str(trace)),
    ):
        for key in ("ref_len", "document_frequency", "more"):
            path.write_bytes(pickle.dumps({**legacy(113287), key: attack}))
            with pytest.raises(ValueError, match=r"bad\.p.*plain data"):
                load_legacy_pickle(path)
            assert not trace.exists()


def test_other_content_is_refused(tmp_path):
    path = tmp_path / "other.p"
    for content in (
        b"not a pickle",
        {"document_frequency": {("a",): 1.0}},
        {"document_frequency": {}, "ref_len": 100},
        {"document_frequency": {"a": 1.0}, "ref_len": 100},
        {"document_frequency": {("a",): 1.0}, "ref_len": -1},
        {"document_frequency": {("0",): 9.0, ("12", "0"): 1.0}, "ref_len": 100},
    ):
        path.write_bytes(
            content if isinstance(content, bytes) else pickle.dumps(content)
        )
        with pytest.raises(ValueError, match=path.name):
            load_legacy_pickle(path)


def test_rows_of_ngrams_must_be_ascending():
    single, pairs = np.array([[0], [1]]), np.array([[1, 0], [0, 1]])
    with pytest.raises(ValueError, match="ascending"):
        table_of_rows(["a", "b"], [single, pairs], [np.ones(2), np.ones(2)])
