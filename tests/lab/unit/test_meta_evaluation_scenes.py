"""Captions of generated scenes, rated by the oracle."""

from rewards.text.tokenize import tokenize
from rl_caption.data.scenes import ScenesData, hard_negatives, oracle
from rl_caption.lab.meta_evaluation.sets.scenes import rate_captions

WORLD = {"num_train": 0, "num_val": 0, "num_unseen": 0, "image_size": 32}


def plain(text):
    return " ".join(tokenize(text))


def test_references_and_hard_negatives_are_rated_once_and_the_reference_is_hidden():
    rows = list(ScenesData(num_test=12, **WORLD)["test"])
    first = rows[0]["references"][0]
    rows[0]["references"].insert(1, f" {first.upper()} ")
    rated, pairs = rate_captions(rows, seed=3)
    expected = []
    for row in rows:
        true, *others = row["references"]
        negatives = hard_negatives(row["scene"], true, 3)
        for kind, text in negatives:
            expected.append((row["image_id"], plain(true), plain(text), kind))
        own = [one for one in rated.rows if one.image_id == row["image_id"]]
        texts = [text for one in own for text in one.captions]
        written = [plain(true), *(plain(text) for _, text in negatives)]
        assert texts == list(dict.fromkeys(written))
        hidden = [text for text in others if plain(text) != plain(true)]
        assert hidden
        for one in own:
            assert one.rating == oracle(one.captions[0], row["scene"]).f1
            assert one.references == [hidden]
    found = [(one.image_id, *one.captions, one.kind) for one in pairs.rows]
    assert found == expected
