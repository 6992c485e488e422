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

CORPUS = [[["a", "dog"], ["a", "red", "dog"]], [["a", "cat"]], [["the", "café"]]]


def counted(eos=False):
    return DocumentFrequencies.from_references(CORPUS, eos=eos)


@pytest.mark.parametrize("seed", [1, 7])
def test_counts_are_those_of_the_definition(seed):
    source, expected = random.Random(seed), Counter()
    corpus = [
        [source.choices("abcdef", k=source.randint(0, 7)) for _ in range(4)]
        for _ in range(30)
    ]
    df = DocumentFrequencies.from_references(corpus, eos=False, n=5)
    for part in corpus:
        expected.update({ngram for tokens in part for ngram in ngram_counts(tokens, 5)})
    assert dict(df.table.items()) == expected
    made = DocumentFrequencies.from_counts(expected, df.log_documents, n=5, eos=False)
    assert made.fingerprint == df.fingerprint
    # a prefix is not counted
    gaps = {("a",): 1, ("b", "a", "c"): 2}
    df = DocumentFrequencies.from_counts(gaps, 1.0, eos=False)
    assert dict(df.table.items()) == gaps
    ended = dict(counted(eos=True).table.items())
    assert (ended[EOS,], ended["dog", EOS]) == (3, 1)


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
    turned = DocumentFrequencies.from_references(CORPUS[::-1], eos=False)
    assert turned.fingerprint == counted().fingerprint
    one = {"counts": {("a",): 2}, "log_documents": 1.0, "n": 2, "eos": False}
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
        assert (df.documents, df.eos) == (113287, eos)
        assert dict(df.table.items()) == counts
    path.write_bytes(pickle.dumps(legacy(100, {("a",): 60.0, ("a", "dog"): 30.0})))
    assert load_legacy_pickle(path).n == 2


@pytest.mark.parametrize("images", [2, 3, 8, 12, 20, 30, 49, 50, 51, 8091, 113287])
def test_whole_numbers_are_numbers_of_images_and_others_logarithms(images, tmp_path):
    path, log = tmp_path / "words.p", math.log(images)
    for ref_len in (
        images,
        np.int64(images),
        float(images),
        log,
        np.log(float(images)),
        float(np.log(np.float32(images))),
    ):
        path.write_bytes(pickle.dumps(legacy(ref_len, {("a",): float(images)})))
        found = load_legacy_pickle(path).log_documents
        is_single = abs(ref_len - log) > 1e-12 and ref_len != images
        assert found == pytest.approx(log, rel=1e-6 if is_single else 1e-15)


@pytest.mark.parametrize("ref_len", [12, 12.0, 2.4, 112, 60.5])
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
    assert (dict(df.table.items())["café",], df.documents) == (2, 100)


class RunsSomething:
    def __init__(self, target, *arguments):
        self.call = (target, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("key", ["ref_len", "document_frequency", "more"])
def test_a_malicious_pickle_runs_nothing(key, tmp_path):
    trace, path = tmp_path / "ran", tmp_path / "bad.p"
    for attack in (
        RunsSomething(os.system, f"touch {trace}"),
        RunsSomething(Path.touch, trace),
        RunsSomething(eval, f"open({str(trace)!r}, 'w')"),
        RunsSomething(getattr, "x", "upper"),
        RunsSomething(np.load, str(trace)),
    ):
        path.write_bytes(pickle.dumps({**legacy(113287), key: attack}))
        with pytest.raises(ValueError, match=r"bad\.p.*plain data"):
            load_legacy_pickle(path)
        assert not trace.exists()


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
    path.write_bytes(b"not a pickle")
    with pytest.raises(ValueError, match=path.name):
        load_legacy_pickle(path)


def test_rows_of_ngrams_must_be_ascending():
    single, pairs = np.array([[0], [1]]), np.array([[1, 0], [0, 1]])
    with pytest.raises(ValueError, match="ascending"):
        table_of_rows(["a", "b"], [single, pairs], [np.ones(2), np.ones(2)])
