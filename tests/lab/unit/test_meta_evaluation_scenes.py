"""Captions of generated scenes, rated by the oracle."""

from rewards.text.tokenize import tokenize
from rl_caption.data.scenes import ScenesData, hard_negatives, oracle
from rl_caption.lab.meta_evaluation.sets.scenes import rate_captions

SCENES = {
    "num_train": 0,
    "num_val": 0,
    "num_test": 12,
    "num_unseen": 0,
    "image_size": 32,
}


def scenes(**changes):
    return list(ScenesData(**{**SCENES, **changes}).split("test"))


def plain(text):
    return " ".join(tokenize(text))


def by_image(part):
    """Image id -> (caption, rating, references) of all that is judged of it."""
    found = {}
    for image_id, *judged in zip(
        part.image_ids, part.captions, part.ratings, part.references, strict=True
    ):
        found.setdefault(image_id, []).append(judged)
    return found


def test_every_caption_is_judged_once_by_the_oracle_and_the_judged_reference_is_hidden():
    rows = scenes()
    judged, _ = rate_captions(rows)
    found = by_image(judged)
    for row in rows:
        own = found[row["image_id"]]
        texts = [text for text, _, _ in own]
        assert len(set(texts)) == len(texts)
        assert all(text == plain(text) for text in texts)
        assert all(rating == oracle(text, row["scene"]).f1 for text, rating, _ in own)
        assert texts[0] == plain(row["references"][0])
        hidden = [text for text in row["references"] if plain(text) != texts[0]]
        assert hidden
        assert all(references == hidden for *_, references in own)


def test_a_reference_written_twice_is_hidden_twice():
    rows = scenes(num_test=1)
    first = rows[0]["references"][0]
    rows[0]["references"] = [first, f" {first.upper()} ", rows[0]["references"][1]]
    assert rate_captions(rows)[0].references[0] == rows[0]["references"][2:]


def test_pairs_are_hard_negatives_of_the_judged_reference():
    rows = scenes()
    _, judged = rate_captions(rows, seed=3)
    expected = [
        (row["image_id"], plain(row["references"][0]), plain(negative), kind)
        for row in rows
        for kind, negative in hard_negatives(row["scene"], row["references"][0], 3)
    ]
    assert [(row.image_id, *row.captions, row.kind) for row in judged.rows] == expected
