"""What embedding models read: captions chosen, token ids, pixels, random views, triplets, generated
positives.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from open_clip import SimpleTokenizer

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import ClipText, Texts
from rewards.images import open_image
from rewards.text.detail_units import detail_units, prefixes
from rl_caption.config.build import build_data
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.loader import augment, step_indices
from rl_caption.data.rand_augment import rand_augment
from rl_caption.data.scenes.world import Draws
from rl_caption.reward_models.batch import (
    PairCollate,
    PixelCache,
    caption_index,
    plain_form,
)
from rl_caption.reward_models.contrastive import (
    HardNegatives,
    add_short_captions,
    short_caption,
)
from rl_caption.reward_models.pac import GeneratedPositives, check_positives
from rl_caption.reward_models.specs import StepTriplets, donors_of
from rl_caption.reward_models.triplets import (
    Donor,
    Triplet,
    append_unit,
    make_triplets,
    shuffled_words,
    triplet_texts,
)
from tests.captioners_for_tests import tiny_captioner
from tests.clip_for_tests import Drawn, noise_image
from tests.reward_models_for_tests import DATA

ROW: Any = {
    "image_id": "a",
    "image": Drawn(9),
    "references": ["one dog", "two black cats", "a very long caption here"],
}
LONG = build_data(
    DataConfig(format="scenes", kwargs=DATA["kwargs"], long_captions=True)
)
ROWS = LONG.split("train")
CAPTIONS = [row["references"][0] for row in ROWS]
IDS = [row["image_id"] for row in ROWS]


def token_cache(trims: bool = True, context_length: int = 24) -> Texts:
    return Texts(ClipText(SimpleTokenizer(), context_length), context_length, trims)


TOKENS = token_cache(context_length=124)


def test_ids_are_those_of_the_tokenizer_truncated_or_padded():
    captions = ["a dog", "two black cats on a mat"]
    expected = SimpleTokenizer(context_length=24)(captions)
    assert torch.equal(token_cache(trims=False)(captions), expected)
    longest = int((expected != 0).sum(dim=1).max())
    assert torch.equal(token_cache()(captions), expected[:, :longest])
    short = SimpleTokenizer(context_length=5)(captions)
    assert torch.equal(token_cache(context_length=5)(captions), short)
    assert token_cache(context_length=5).too_long(captions) == 1
    assert [
        token_cache(context_length=length).too_long(["a dog"]) for length in (3, 4)
    ] == [
        1,
        0,
    ], "4 tokens fit 4"


def test_the_caption_is_a_function_of_seed_step_and_image():
    chosen, again, other = (
        [caption_index(ROW, "random", seed, step) for step in range(60)]
        for seed in (0, 0, 1)
    )
    assert set(chosen) == {0, 1, 2}
    assert chosen == again != other
    assert {caption_index(ROW, "first", 0, step) for step in range(9)} == {0}


def test_images_of_one_step_draw_each_for_itself():
    rows: list[Any] = [
        {**ROW, "image_id": str(number), "short_references": ["a", "b"]}
        for number in range(40)
    ]
    assert {caption_index(row, "random", 0, 3) for row in rows} == {0, 1, 2}
    assert {short_caption(row, "", 3, "references", 0) for row in rows} == {"a", "b"}


def test_pixels_are_those_of_the_preprocessing_and_drawn_once():
    image, preprocessing = noise_image(1), Preprocessing(32)
    cache = PixelCache(preprocessing, cache_bytes=3 * 32 * 32)
    row: Any = {"image_id": "b", "image": image}
    assert torch.equal(cache.of(row), preprocessing(image))
    assert torch.equal(cache.of(row), preprocessing(image))
    drawn = Drawn(3)
    cache.square("c", drawn), cache.square("c", drawn)
    assert drawn.drawn == 2, "there is memory for one image only"
    cache = PixelCache(preprocessing, cache_bytes=10**6)
    cache.square("c", drawn), cache.square("c", drawn)
    assert drawn.drawn == 3


def test_images_of_two_splits_with_one_id_have_their_own_pixels(tmp_path):
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        noise_image(number).save(file)
    captioner = tiny_captioner()
    captioner.cache_bytes = 10**6
    cache = PixelCache(Preprocessing(32), cache_bytes=10**6)
    sources: list[Any] = [str(files[0]), str(files[1]), files[2]]
    for _ in range(2):
        for source in sources:
            row: Any = {"image_id": "a", "image": source}
            assert torch.equal(cache.of(row), Preprocessing(32)(open_image(source)))
        found = [
            captioner.preprocess([{"image_id": "a", "image": image, "references": []}])
            for image in sources[:3]
        ]
        assert not any(
            torch.equal(a["pixel_values"], b["pixel_values"])
            for a, b in pairwise(found)
        )
    assert [len(model.cached) for model in (cache, captioner)] == [3, 3]
    captioner.cached.clear()
    captioner.cache_bytes = 2 * 16 * 16 * 3
    captioner.preprocess(
        [{"image_id": name, "image": files[0], "references": []} for name in "abc"]
    )
    assert len(captioner.cached) == 2, "there is memory for two images"


def test_a_batch_has_what_its_towers_read():
    pixels = PixelCache(Preprocessing(32))
    both = PairCollate(pixels, token_cache(), "first")([(ROW, 0), (ROW, 1)])
    assert {name: value.shape for name, value in both.inputs.items()} == {
        "image": (2, 3, 32, 32),
        "text": (2, 4),
    }
    assert both.captions == ["one dog", "one dog"]
    no_captions, no_image = (
        {**ROW, "references": []},
        {"image_id": "a", "references": ROW["references"]},
    )
    assert set(PairCollate(pixels, None)([(no_captions, 0)]).inputs) == {"image"}
    assert set(PairCollate(None, token_cache())([(no_image, 0)]).inputs) == {"text"}


class Doubled:
    """As positives the caption twice, as negatives it with "no" in front."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    def __call__(self, row: Any, caption: str, generator: Any) -> list[Any]:
        return (
            [("no", f"no {caption}")]
            if self.prefix
            else [f"{caption} {caption}"] * (row["image_id"] != "never")
        )


def test_a_share_of_the_captions_has_negatives():
    rows: Any = [{"image_id": str(n), "references": ["dog"]} for n in range(400)]
    items = [(row, 3) for row in rows]
    negatives = HardNegatives(Doubled("no"), 2, 0.25, seed=2)
    collate = PairCollate(None, token_cache(), seed=2, additions=[negatives])
    batch = collate(items)
    counted = batch.targets["false"][:, 0].tolist()
    assert np.mean(counted) == pytest.approx(0.25, abs=0.05)
    assert batch.targets["false"][:, 1].tolist() == [0] * 400, (
        "one caption alone is made"
    )
    expected = [
        f"no {text}" if count else ""
        for text, count in zip(batch.captions, counted, strict=True)
    ]
    assert torch.equal(batch.inputs["text_false0"], token_cache()(expected)), (
        "negatives are of the wording that is learnt"
    )
    part = collate(items[7:9]).targets["false"]
    assert torch.equal(part, batch.targets["false"][7:9]), "whatever the micro-batch"
    later = collate([(row, 4) for row in rows]).targets["false"]
    assert not torch.equal(later, batch.targets["false"])


# views


def test_rand_augment_comes_before_normalisation_and_the_other_views():
    row: Any = {"image_id": "b", "image": noise_image(1, (32, 32)), "references": []}
    preprocessing = Preprocessing(32)
    square = preprocessing.square(row["image"])
    cache = PixelCache(preprocessing, 10**6)
    collate = PairCollate(
        cache, None, augmentations=("rand_augment", "horizontal"), seed=3
    )
    for step in range(6):
        view = preprocessing.normalise(rand_augment(square, 3, step, "b"))
        expected = augment(view, ["horizontal"], 3, step, "b")
        assert torch.equal(collate([(row, step)]).inputs["image"][0], expected)
    assert torch.equal(cache.of(row), preprocessing(row["image"])), (
        "the cached pixels are left alone"
    )


# triplets


def test_base_and_positive_are_prefixes_and_the_negative_is_of_another_caption():
    lengths = set()
    for caption, triplet in zip(
        CAPTIONS, make_triplets(CAPTIONS, IDS, seed=1, shuffle_rate=0), strict=True
    ):
        grown = prefixes(detail_units(caption))
        assert triplet is not None
        length = grown.index(triplet.base)
        lengths.add(length)
        assert triplet.positive == grown[length + 1]
        assert triplet.negative.startswith(triplet.base)
        unit = triplet.negative.removeprefix(triplet.base).strip()
        others = [detail_units(other) for other in CAPTIONS if other != caption]
        # The unit at the same position, or the last one of a shorter caption; no comma follows a
        # full stop.
        lead = ",;: " if triplet.base.endswith(".") else " "
        assert unit in {
            units[min(length + 1, len(units) - 1)].lstrip(lead).strip()
            for units in others
        }
        assert (
            unit.lower() != triplet.positive.removeprefix(triplet.base).strip().lower()
        )
    assert len(lengths) > 3


def test_with_given_donors_a_triplet_depends_on_its_row_and_the_seed_alone():
    donors = [Donor("z", detail_units(CAPTIONS[0]))]
    whole, other = (
        make_triplets(CAPTIONS[1:], IDS[1:], seed, donors=donors) for seed in (1, 2)
    )
    assert make_triplets(CAPTIONS[1:4], IDS[1:4], 1, donors=donors) == whole[:3]
    assert other != whole


def test_shuffled_negatives_have_the_words_of_the_others_in_another_order():
    different = 0
    for one, other in zip(
        *(make_triplets(CAPTIONS, IDS, 1, rate) for rate in (0.0, 1.0)), strict=True
    ):
        assert one is not None
        assert other is not None
        assert (one.base, one.positive) == (other.base, other.positive)
        assert sorted(one.negative.strip(".").split()) == sorted(
            other.negative.strip(".").split()
        )
        different += one.negative != other.negative
    assert different > len(CAPTIONS) / 2
    found = []
    for seed in range(12):
        plain, mixed = (make_triplets(CAPTIONS, IDS, seed, rate) for rate in (0.0, 0.5))
        found.append([one != other for one, other in zip(plain, mixed, strict=True)])
    ever_shuffled = float(np.any(found, axis=0).mean())
    # A row is shuffled in every step or in none, a unit in half of them; and it may come out as it
    # was.
    assert ever_shuffled > 0.95


def test_shuffled_words_keep_the_punctuation_at_the_ends():
    text = shuffled_words(", and a small 3.5 m (old) boat.", Draws("test", 0))
    assert (text[:2], text[-1]) == (", ", ".")
    assert sorted(text[2:-1].split()) == sorted(
        ["and", "a", "small", "3.5", "m", "(old)", "boat"]
    )
    assert shuffled_words("...", Draws("test", 0)) == "..."


def test_none_without_two_units_or_without_another_image():
    long = "A dog runs and a cat sits. The sky is blue."
    assert make_triplets([long, "A dog."], ["a", "b"], 0)[1] is None
    assert make_triplets([long, "A fish swims. It is red."], ["a", "a"], 0) == [
        None,
        None,
    ]
    # In the same words, though of another image, it would be no negative.
    assert make_triplets([long], ["a"], 0, donors=[Donor("b", detail_units(long))]) == [
        None
    ]
    (triplet,) = make_triplets(
        ["A dog runs. The sky is blue."],
        ["a"],
        0,
        0.0,
        donors=[Donor("b", ["a red bus"])],
    )
    assert triplet is not None
    assert triplet.negative == triplet.base + " a red bus"


def test_units_of_other_captions_are_joined_without_double_punctuation():
    """A metric could tell a false detail by ".," alone."""
    for base, unit, joined in (
        ("A red circle", ", a blue star", "A red circle, a blue star"),
        ("A red circle.", ", a blue star", "A red circle. a blue star"),
        (
            "A red circle.",
            " The background is grey.",
            "A red circle. The background is grey.",
        ),
        ("A red circle", "a blue star", "A red circle a blue star"),
    ):
        assert append_unit(base, unit) == joined


def step_triplets(batch_size: int = 8, **options: Any) -> StepTriplets:
    return StepTriplets(
        ROWS, TOKENS, batch_size, 3, "random", shuffle_rate=0.0, **options
    )


def test_step_triplets_take_one_detail_of_another_image_of_the_batch_or_of_all():
    captions = dict(zip(IDS, CAPTIONS, strict=True))
    batch_alone, all_data, outside = (
        step_triplets(),
        step_triplets(4, donors=donors_of(ROWS)),
        0,
    )
    for step in range(4):
        for made, size in ((batch_alone, 8), (all_data, 4)):
            batch = {IDS[index] for index in step_indices(len(ROWS), size, step, 3)}
            triplets = made.of_step(step)
            assert triplets.keys() == batch
            for image_id, triplet in triplets.items():
                assert triplet is not None
                assert captions[image_id].startswith(triplet.positive)
                detail = triplet.negative.removeprefix(triplet.base).strip(" ,")
                owners = {
                    other for other in {*IDS} - {image_id} if detail in captions[other]
                }
                assert owners
                assert owners & batch or made is all_data
                outside += not owners & batch
    assert outside > 0
    assert batch_alone.of_step(2) != batch_alone.of_step(3)


def test_triplets_that_do_not_fit_do_not_count():
    short = token_cache(context_length=8)
    given = [
        Triplet("a cat", "a cat sits", "a cat flies"),
        None,
        Triplet("a", "a cat", "a cat on a mat in a hat"),
    ]
    texts, counts = triplet_texts(given, short)
    assert counts.tolist() == [1, 0, 0]
    assert texts == {
        "base": ["a cat", "", ""],
        "positive": ["a cat sits", "", ""],
        "negative": ["a cat flies", "", ""],
    }
    assert short(texts["base"]).shape == (3, 4)


def test_short_captions_are_the_first_sentence_or_a_reference():
    row = ROWS[0]
    for caption, first in (
        ("A cat sits. It is 3.5 kg.", "A cat sits."),
        (
            "A cat sits.\n\nIt is 3.5 kg. It sleeps.",
            "A cat sits.",
        ),  # paragraphs, as of ShareGPT4V
        ("A cat.", "A cat."),
        ("a cat", "a cat"),
    ):
        assert short_caption(row, caption, 0, "first_sentence", 0) == first
    drawn = {
        short_caption(row, "One. Two.", step, "references", 0) for step in range(40)
    }
    assert drawn == set(row["short_references"])
    batch = PairCollate(
        None,
        TOKENS,
        additions=[partial(add_short_captions, source="references", seed=0)],
    )([(row, 4)])
    assert (
        batch.inputs["text_short"].tolist()
        == TOKENS([short_caption(row, "", 4, "references", 0)]).tolist()
    )


def test_some_captions_are_as_a_captioner_writes_them():
    """Per image and step, all texts of it alike, and their tokens those of the bare words."""
    made, items = step_triplets(len(ROWS)), [(row, 2) for row in ROWS]
    written, bare, mixed = (
        PairCollate(
            None,
            TOKENS,
            seed=3,
            plain_captions=rate,
            additions=[partial(add_short_captions, source="references", seed=3), made],
        )(items)
        for rate in (0.0, 1.0, 0.5)
    )
    assert mixed.captions == bare.captions == written.captions, (
        "what the log and a teacher see does not change"
    )
    commas = torch.tensor([SimpleTokenizer().encode(mark)[0] for mark in ".,"])
    plain = ~torch.isin(mixed.inputs["text"], commas).any(dim=1)
    assert 0.2 < plain.float().mean() < 0.8
    for name in ("text", "text_base", "text_positive", "text_negative", "text_short"):
        assert not torch.isin(bare.inputs[name], commas).any()
        for own, *ids in zip(
            plain,
            *(each.inputs[name].tolist() for each in (mixed, written, bare)),
            strict=True,
        ):
            found, with_marks, without = (
                [token for token in row if token] for row in ids
            )
            assert found == (without if own else with_marks)
    assert (
        plain_form("A red circle, on 3.5 metres. It's big!")
        == "a red circle on 3.5 metres it 's big"
    )
    rows: Any = [
        {"image_id": text, "references": [text]} for text in ("A dog.", "a dog")
    ]
    for rate, distinct in ((0.0, 2), (1.0, 1)):
        grouped = PairCollate(None, TOKENS, plain_captions=rate, groups=True)(
            [(row, 0) for row in rows]
        )
        assert len(grouped.targets["text_group"].unique()) == distinct, (
            "captions are equal where what is read is"
        )


# generated positives


def photo(name: str, **more: Any) -> Any:
    return {
        "image_id": name,
        "image": noise_image(1, (32, 32)),
        "references": ["a dog", "two cats", "red"],
        **more,
    }


MADE = {
    "positive_captions": ["a hound", "an animal on grass"],
    "positive_images": [noise_image(seed, (32, 32)) for seed in (2, 3, 4)],
}


@pytest.mark.parametrize("captions", ["random", "first"])
def test_a_generated_image_is_that_of_the_caption_which_the_step_learns(
    captions,
):
    row, preprocessing = photo("a", **MADE), Preprocessing(32)
    generated = GeneratedPositives(("image", "text"), captions, seed=3)
    collate = PairCollate(
        PixelCache(preprocessing, 10**6),
        TOKENS,
        captions,
        seed=3,
        additions=[generated],
    )
    plain = PairCollate(PixelCache(preprocessing), TOKENS, captions, seed=3)
    seen, told = set(), set()
    for step in range(24):
        batch = collate([(row, step)])
        index = caption_index(row, captions, 3, step)
        assert torch.equal(
            batch.inputs["image_generated"][0],
            preprocessing(MADE["positive_images"][index]),
        )
        told |= {
            text
            for text in MADE["positive_captions"]
            if TOKENS([text]).equal(batch.inputs["text_generated"])
        }
        seen.add(index)
        alone = plain([(row, step)]).inputs
        assert batch.inputs.keys() - alone.keys() == {
            "image_generated",
            "text_generated",
        }
        assert all(
            torch.equal(batch.inputs[name], value) for name, value in alone.items()
        ), "nor drawn otherwise"
    assert seen == ({0} if captions == "first" else {0, 1, 2})
    assert told == set(MADE["positive_captions"])


ONE = photo("b", positive_images=MADE["positive_images"][:1])
LOST = photo("a", **MADE) | {
    "references": ["two cats", "red"]
}  # an empty reference that data.on_bad left out


def test_positives_that_are_missing_are_named(tmp_path):
    for rows, wanted, captions in (
        ([photo("a", **MADE)], ("image", "text"), "random"),
        ([photo("a")], (), "random"),
        ([ONE], ("image",), "first"),
    ):
        check_positives(rows, wanted, captions)  # type: ignore[arg-type]
    for rows, wanted, captions, message in (
        (
            [photo("a", **MADE), ONE],
            ("image",),
            "random",
            r"^train 'b' has 1 positive_images for 3.*\(1 in all\)",
        ),
        (
            [photo("a", **MADE), ONE],
            ("text",),
            "random",
            r"^train 'b'.*positive_captions \(1 in all\)",
        ),
        (
            [photo("a")],
            ("image",),
            "first",
            r"train 'a' has 0 positive_images for 3 reference",
        ),
        (
            [LOST],
            ("image",),
            "first",
            r"train 'a' has 3 positive_images for 2 reference",
        ),
    ):
        with pytest.raises(DataError, match=message):
            check_positives(rows, wanted, captions)  # type: ignore[arg-type]
    noise_image(1, (32, 32)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    for name in ("bad.png", "none.png"):
        given = photo(
            "c",
            positive_images=[
                str(tmp_path / "good.png"),
                str(tmp_path / name),
                noise_image(2),
            ],
        )
        with pytest.raises(DataError, match=rf"^train 'c', '.*{name}'"):
            check_positives(
                [given], ("image",), "random", cache=tmp_path / "cache.json"
            )
