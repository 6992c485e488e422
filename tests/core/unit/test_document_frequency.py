"""Document frequencies: counting, files, and pickles of other packages."""

import math
import os
import pickle
import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from rewards.text.document_frequency import EOS, DocumentFrequencies, load_legacy_pickle
from rewards.text.ngrams import ngram_counts, table_of_rows

CORPUS = [
    [["a", "dog"], ["a", "red", "dog"]],
    [["a", "cat"]],
    [["the", "café"]],
]


def counted(eos=False):
    return DocumentFrequencies.from_references(CORPUS, eos=eos)


def test_counts_are_those_of_the_definition():
    source = random.Random(1)
    expected = Counter()
    sizes = [source.randint(0, 7) for _ in range(120)]
    captions = [source.choices("abcdef", k=size) for size in sizes]
    corpus = [captions[start : start + 4] for start in range(0, 120, 4)]
    df = DocumentFrequencies.from_references(corpus, eos=False, n=5)
    for document in corpus:
        ngrams = set()
        for tokens in document:
            ngrams.update(ngram_counts(tokens, 5))
        expected.update(ngrams)
    assert dict(df.table.items()) == expected
    made = DocumentFrequencies.from_counts(expected, df.log_documents, n=5, eos=False)
    assert made.fingerprint == df.fingerprint
    # a prefix is not counted
    gaps = {("a",): 1, ("b", "a", "c"): 2}
    df = DocumentFrequencies.from_counts(gaps, 1.0, eos=False)
    assert dict(df.table.items()) == gaps
    ended = dict(counted(eos=True).table.items())
    assert ended[EOS,] == 3
    assert ended["dog", EOS] == 1


def test_saved_and_loaded_is_the_same(tmp_path):
    df = counted(eos=True)
    path = tmp_path / "new" / "df.npz"
    df.save(path)
    loaded = DocumentFrequencies.load(path)
    assert dict(loaded.table.items()) == dict(df.table.items())
    for name in ("documents", "log_documents", "n", "eos", "tokenizer", "fingerprint"):
        assert getattr(loaded, name) == getattr(df, name)
    with np.load(path, allow_pickle=False) as stored:
        assert all(stored[name].dtype.kind in "uif" for name in stored.files)


def test_fingerprint_is_of_the_content_not_of_its_order():
    turned = DocumentFrequencies.from_references(CORPUS[::-1], eos=False)
    assert turned.fingerprint == counted().fingerprint
    one = {
        "counts": {("a",): 2},
        "log_documents": 1.0,
        "n": 2,
        "eos": False,
    }
    made = DocumentFrequencies.from_counts
    changes = [
        {},
        {"counts": {("a",): 1}},
        {"log_documents": 1.5},
        {"n": 3},
        {"eos": True},
        {"tokenizer": "mine"},
    ]
    fingerprints = {made(**one | change).fingerprint for change in changes}
    assert len(fingerprints) == len(changes)


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "df.npz"
    counted().save(path)
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays["counts_1"] = arrays["counts_1"] + 1
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="damaged"):
        DocumentFrequencies.load(path)
    np.savez(path, other=np.zeros(3))
    with pytest.raises(ValueError, match=path.name):
        DocumentFrequencies.load(path)
    path.write_bytes(pickle.dumps({"document_frequency": {}}))
    with pytest.raises(ValueError, match=path.name):
        DocumentFrequencies.load(path)


# pickles of other packages


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ({("a",): 3, ("a", "b"): 9}, {}, r"\('a', 'b'\).*9 of 3 documents"),
        ({("a", "b"): 1}, {"n": 1}, r"\('a', 'b'\) has 2.*1.*= 1"),
    ],
)
def test_impossible_counts_are_refused(counts, options, message):
    with pytest.raises(ValueError, match=message):
        DocumentFrequencies.from_counts(counts, math.log(3), eos=False, **options)


def test_a_word_with_a_line_break_is_not_saved(tmp_path):
    """A file could not tell the words apart."""
    counts = {("a\nb", "c"): 1, ("d",): 2}
    broken = DocumentFrequencies.from_counts(counts, math.log(3), eos=False)
    with pytest.raises(ValueError, match="line break"):
        broken.save(tmp_path / "df.npz")
    assert not list(tmp_path.iterdir())


def legacy(ref_len, counts=None):
    """What other packages pickle."""
    return {"document_frequency": counts or {("a",): 60.0}, "ref_len": ref_len}


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickles_keep_counts_eos_and_the_longest_ngram(protocol, tmp_path):
    path = tmp_path / "coco-train-words.p"
    for eos in (True, False):
        counts = defaultdict(float, counted(eos=eos).table.items())
        path.write_bytes(pickle.dumps(legacy(113287, counts), protocol))
        df = load_legacy_pickle(path)
        assert df.documents == 113287
        assert df.eos == eos
        assert dict(df.table.items()) == counts
    short = {("a",): 60.0, ("a", "dog"): 30.0}
    path.write_bytes(pickle.dumps(legacy(100, short)))
    assert load_legacy_pickle(path).n == 2


@pytest.mark.parametrize("images", [2, 8, 50, 8091, 113287])
def test_whole_numbers_are_numbers_of_images_and_others_logarithms(images, tmp_path):
    path = tmp_path / "words.p"
    log = math.log(images)
    single = float(np.float32(log))
    for ref_len, rel in (
        (images, 1e-15),
        (np.int64(images), 1e-15),
        (float(images), 1e-15),
        (log, 1e-15),
        (np.float64(log), 1e-15),
        (single, 1e-6),
    ):
        content = legacy(ref_len, {("a",): float(images)})
        path.write_bytes(pickle.dumps(content))
        found = load_legacy_pickle(path).log_documents
        assert found == pytest.approx(log, rel=rel)


@pytest.mark.parametrize("ref_len", [12, 2.4, 60.5])
def test_fewer_images_than_an_ngram_is_in_are_refused(ref_len, tmp_path):
    path = tmp_path / "words.p"
    path.write_bytes(pickle.dumps(legacy(ref_len, {("a",): 113.0})))
    with pytest.raises(ValueError, match=r"words\.p"):
        load_legacy_pickle(path)


def test_python_2_strings_are_read(tmp_path):
    # {'document_frequency': {('caf\xc3\xa9',): 2.0}, 'ref_len': 100} as Python 2.7 writes it with
    # protocol 0
    written = b"(dp0\nS'ref_len'\np1\nI100\nsS'document_frequency'\np2\n(dp3\n(S'caf\\xc3\\xa9'\np4\ntp5\nF2.0\nss."
    (tmp_path / "py2.p").write_bytes(written)
    df = load_legacy_pickle(tmp_path / "py2.p")
    assert dict(df.table.items())["café",] == 2
    assert df.documents == 100


class RunsSomething:
    def __init__(self, target, *arguments):
        self.call = (target, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (os.system, ["touch ran"]),
        (eval, ["open('ran', 'w')"]),
        (getattr, ["x", "upper"]),
        (np.load, ["ran"]),
    ],
)
def test_a_malicious_pickle_runs_nothing(target, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    attack = RunsSomething(target, *arguments)
    Path("bad.p").write_bytes(pickle.dumps(legacy(attack)))
    with pytest.raises(ValueError, match=r"bad\.p.*plain data"):
        load_legacy_pickle("bad.p")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        {"document_frequency": {("a",): 1.0}},
        {"document_frequency": {}, "ref_len": 100},
        legacy(100, {"a": 1.0}),
        legacy(-1),
        legacy(100, {("0",): 9.0, ("12", "0"): 1.0}),
    ],
)
def test_other_content_is_refused(content, tmp_path):
    path = tmp_path / "other.p"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=path.name):
        load_legacy_pickle(path)


def test_rows_of_ngrams_must_be_ascending():
    single = np.array([[0], [1]])
    pairs = np.array([[1, 0], [0, 1]])
    counts = [np.ones(2), np.ones(2)]
    with pytest.raises(ValueError, match="ascending"):
        table_of_rows(["a", "b"], [single, pairs], counts)
