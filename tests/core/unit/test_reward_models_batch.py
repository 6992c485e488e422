"""What embedding models read: captions chosen, token ids, pixels, random views,
triplets, generated positives.
"""

from functools import partial

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
)
from rl_caption.reward_models.contrastive import (
    HardNegatives,
    add_short_captions,
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
from tests.clip_for_tests import Drawn, noise_image
from tests.reward_models_for_tests import DATA

ROW = {
    "image_id": "a",
    "references": ["one dog", "two black cats", "a very long caption here"],
}
LONG = build_data(
    DataConfig(format="scenes", kwargs=DATA["kwargs"], long_captions=True)
)
ROWS = LONG["train"]
CAPTIONS = [row["references"][0] for row in ROWS]
IDS = [row["image_id"] for row in ROWS]


def texts_of(context_length, trims=True):
    return Texts(ClipText(SimpleTokenizer(), context_length), context_length, trims)


TOKENS = texts_of(124)


def test_ids_are_those_of_the_tokenizer_truncated_or_padded():
    captions = ["a dog", "two black cats on a mat"]
    expected = SimpleTokenizer(context_length=24)(captions)
    assert torch.equal(texts_of(24, trims=False)(captions), expected)
    longest = int((expected != 0).sum(dim=1).max())
    assert torch.equal(texts_of(24)(captions), expected[:, :longest])
    cut = SimpleTokenizer(context_length=4)(captions)
    assert torch.equal(texts_of(4)(captions), cut)
    assert texts_of(4).too_long(captions) == 1, "4 tokens fit 4"


def short_caption(row, caption, step, source):
    added = add_short_captions([(row, step)], [caption], source, 0)
    return added.texts["text_short"][0]


def test_the_caption_is_a_function_of_seed_step_and_image():
    def chosen(seed, captions="random"):
        return [caption_index(ROW, captions, seed, step) for step in range(60)]

    assert {*chosen(0)} == {0, 1, 2}
    assert chosen(0) == chosen(0) != chosen(1)
    assert {*chosen(0, "first")} == {0}
    row = {**ROW, "short_references": ["a", "b"]}
    rows = [{**row, "image_id": str(number)} for number in range(40)]
    assert {caption_index(row, "random", 0, 3) for row in rows} == {0, 1, 2}
    assert {short_caption(row, "", 3, "references") for row in rows} == {"a", "b"}


def test_pixels_are_those_of_the_preprocessing_and_drawn_once():
    preprocessing = Preprocessing(32)
    cache = PixelCache(preprocessing, cache_bytes=3 * 32 * 32)
    image = noise_image(1)
    for _ in range(2):
        found = cache.of({"image_id": "b", "image": image})
        assert torch.equal(found, preprocessing(image))
    drawn = Drawn(3)
    for memory, times in ((cache, 2), (PixelCache(preprocessing, 10**6), 3)):
        memory.square("c", drawn)
        memory.square("c", drawn)
        assert drawn.drawn == times, "there is memory for one image, then for all"


def test_images_of_two_splits_with_one_id_have_their_own_pixels(tmp_path):
    rows = []
    for seed in range(2):
        rows.append(
            {
                "image_id": "a",
                "image": tmp_path / f"{seed}.png",
            }
        )
        noise_image(seed, (32, 32)).save(rows[-1]["image"])
    cache = PixelCache(Preprocessing(32), cache_bytes=10**6)
    for row in rows * 2:
        expected = Preprocessing(32)(open_image(row["image"]))
        assert torch.equal(cache.of(row), expected)


def test_hard_negatives_are_texts_of_their_rows_and_counted():
    """A row may have fewer than there are columns."""
    rows = [{"image_id": str(n), "references": ["dog"]} for n in range(3)]

    def negated(row, caption, generator):
        made = [("no", f"no {caption}"), ("two", f"{generator.integers(10**6)} dogs")]
        return made[: int(row["image_id"])]

    def batch(step, first=0):
        made = HardNegatives(negated, 2, seed=2)
        collate = PairCollate(None, TOKENS, seed=2, additions=[made])
        return collate([(row, step) for row in rows[first:]])

    found = batch(3)
    assert found.targets["false"].tolist() == [[0, 0], [1, 0], [1, 1]]
    expected = TOKENS(["", "no dog", "no dog"])
    assert torch.equal(found.inputs["text_false0"], expected)
    second = found.inputs["text_false1"][2]
    part = batch(3, first=2).inputs["text_false1"][0]
    assert torch.equal(part, second), "whatever the micro-batch"
    assert not torch.equal(batch(4).inputs["text_false1"][2], second)


def test_rand_augment_comes_before_normalisation_and_the_other_views():
    row = {"image_id": "b", "image": noise_image(1, (32, 32))}
    preprocessing = Preprocessing(32)
    square = preprocessing.square(row["image"])
    cache = PixelCache(preprocessing, 10**6)
    names = ("rand_augment", "horizontal")
    collate = PairCollate(cache, None, augmentations=names, seed=3)
    for step in range(6):
        view = preprocessing.normalise(rand_augment(square, 3, step, "b"))
        expected = augment(
            view,
            ["horizontal"],
            3,
            step,
            "b",
        )
        assert torch.equal(collate([(row, step)]).inputs["image"][0], expected)
    assert torch.equal(cache.square("b", row["image"]), square), "as it was"


def test_base_and_positive_are_prefixes_and_the_negative_is_of_another_caption():
    lengths = set()
    triplets = make_triplets(CAPTIONS, IDS, seed=1, shuffle_rate=0)
    for caption, triplet in zip(CAPTIONS, triplets, strict=True):
        grown = prefixes(detail_units(caption))
        length = grown.index(triplet.base)
        lengths.add(length)
        assert triplet.positive == grown[length + 1]
        assert triplet.negative.startswith(triplet.base)
        unit = triplet.negative.removeprefix(triplet.base).strip()
        # The unit at the same position, or the last one of a shorter caption; no comma follows a
        # full stop.
        lead = ",;: " if triplet.base.endswith(".") else " "
        units = []
        for other in CAPTIONS:
            if other != caption:
                details = detail_units(other)
                detail = details[min(length + 1, len(details) - 1)]
                units.append(detail.lstrip(lead).strip())
        assert unit in units
        own = triplet.positive.removeprefix(triplet.base).strip()
        assert unit.lower() != own.lower()
    assert len(lengths) > 3


def test_with_given_donors_a_triplet_depends_on_its_row_and_the_seed_alone():
    donors = [Donor("z", detail_units(CAPTIONS[0]))]

    def made(seed, rows=slice(1, None)):
        return make_triplets(CAPTIONS[rows], IDS[rows], seed, donors=donors)

    assert made(1, slice(1, 4)) == made(1)[:3]
    assert made(2) != made(1)


def test_shuffled_negatives_have_the_words_of_the_others_in_another_order():
    plain = make_triplets(CAPTIONS, IDS, 1, 0.0)
    for rate, least, most in ((1.0, 0.6, 1.0), (0.5, 0.2, 0.6)):
        mixed = make_triplets(CAPTIONS, IDS, 1, rate)
        moved = 0
        for one, other in zip(plain, mixed, strict=True):
            assert (one.base, one.positive) == (other.base, other.positive)
            words = [sorted(t.negative.strip(".").split()) for t in (one, other)]
            assert words[0] == words[1]
            moved += one != other
        assert least < moved / len(plain) <= most
    text = shuffled_words(", and a small 3.5 m (old) boat.", Draws("test", 0))
    assert (text[:2], text[-1]) == (", ", ".")
    assert sorted(text[2:-1].split()) == sorted(
        ["and", "a", "small", "3.5", "m", "(old)", "boat"]
    )
    assert shuffled_words("...", Draws("test", 0)) == "..."


def test_none_without_two_units_or_without_another_image():
    long = "A dog runs and a cat sits. The sky is blue."
    fish = "A fish swims. It is red."
    assert make_triplets([long, "A dog."], ["a", "b"], 0)[1] is None
    assert make_triplets([long, fish], ["a", "a"], 0) == [None, None]
    # In the same words, though of another image, it would be no negative.
    same = [Donor("b", detail_units(long))]
    assert make_triplets([long], ["a"], 0, donors=same) == [None]


@pytest.mark.parametrize(
    ("base", "unit", "joined"),
    [
        ("A circle", ", a star", "A circle, a star"),
        ("A circle.", ", a star", "A circle. a star"),
        ("A circle.", " It is blue.", "A circle. It is blue."),
        ("A circle", "a star", "A circle a star"),
    ],
)
def test_units_of_other_captions_are_joined_without_double_punctuation(
    base, unit, joined
):
    """A metric could tell a false detail by ".," alone."""
    assert append_unit(base, unit) == joined


@pytest.mark.parametrize("donors", [None, donors_of(ROWS)], ids=["batch", "all"])
def test_step_triplets_take_one_detail_of_another_image_of_the_batch_or_of_all(donors):
    captions = dict(zip(IDS, CAPTIONS, strict=True))
    made = StepTriplets(
        ROWS,
        TOKENS,
        4,
        3,
        "random",
        shuffle_rate=0.0,
        donors=donors,
    )
    outside = 0
    for step in range(4):
        batch = {IDS[index] for index in step_indices(len(ROWS), 4, step, 3)}
        triplets = made.of_step(step)
        assert triplets.keys() == batch
        for image_id, triplet in triplets.items():
            assert captions[image_id].startswith(triplet.positive)
            detail = triplet.negative.removeprefix(triplet.base).strip(" ,")
            owners = {other for other in IDS if detail in captions[other]}
            assert owners - {image_id}
            outside += not owners & batch
    assert (outside > 0) == (donors is not None)


def test_triplets_that_do_not_fit_do_not_count():
    fits = Triplet("a cat", "a cat sits", "a cat flies")
    long = Triplet("a", "a cat", "a cat on a mat in a hat")
    texts, counts = triplet_texts([fits, None, long], texts_of(8))
    assert counts.tolist() == [1, 0, 0]
    assert texts == {name: [text, "", ""] for name, text in fits._asdict().items()}


def test_short_captions_are_the_first_sentence_or_a_reference():
    row = ROWS[0]
    for caption, first in (
        ("A cat sits. It is 3.5 kg.", "A cat sits."),
        # paragraphs, as of ShareGPT4V
        ("A cat sits.\n\nIt is 3.5 kg. It sleeps.", "A cat sits."),
        ("a cat", "a cat"),
    ):
        assert short_caption(row, caption, 0, "first_sentence") == first
    drawn = {short_caption(row, "One.", step, "references") for step in range(40)}
    assert drawn == {*row["short_references"]}


def test_some_captions_are_as_a_captioner_writes_them():
    """Per image and step, all texts of it alike, and their tokens those of the bare words."""
    triplets = StepTriplets(
        ROWS,
        TOKENS,
        len(ROWS),
        3,
        "random",
        shuffle_rate=0.0,
    )
    short = partial(add_short_captions, source="references", seed=3)

    def batch(rate):
        options = {
            "seed": 3,
            "plain_captions": rate,
            "additions": [short, triplets],
        }
        return PairCollate(None, TOKENS, **options)([(row, 2) for row in ROWS])

    written, bare, mixed = (batch(rate) for rate in (0.0, 1.0, 0.5))
    # what the log and a teacher see does not change
    assert mixed.captions == bare.captions == written.captions
    marks = torch.tensor([SimpleTokenizer().encode(mark)[0] for mark in ".,"])
    plain = ~torch.isin(mixed.inputs["text"], marks).any(dim=1)
    assert 0.2 < plain.float().mean() < 0.8
    for name in ("text", "text_base", "text_positive", "text_negative", "text_short"):
        assert not torch.isin(bare.inputs[name], marks).any()
        for row, is_plain in enumerate(plain):
            expected = (bare if is_plain else written).inputs[name][row]
            found = mixed.inputs[name][row]
            assert found[found > 0].tolist() == expected[expected > 0].tolist()


def photo(name, **more):
    """A row of three captions."""
    image = noise_image(1, (32, 32))
    references = ["a dog", "two cats", "red"]
    return {
        "image_id": name,
        "image": image,
        "references": references,
        **more,
    }


MADE = {
    "positive_captions": ["a hound", "an animal on grass"],
    "positive_images": [noise_image(seed, (32, 32)) for seed in (2, 3, 4)],
}


@pytest.mark.parametrize("captions", ["random", "first"])
def test_a_generated_image_is_that_of_the_caption_which_the_step_learns(captions):
    row = photo("a", **MADE)
    preprocessing = Preprocessing(32)
    generated = GeneratedPositives(("image", "text"), captions, seed=3)
    pixels = PixelCache(preprocessing, 10**6)
    collate = PairCollate(
        pixels,
        TOKENS,
        captions,
        seed=3,
        additions=[generated],
    )
    seen = set()
    told = set()
    for step in range(24):
        batch = collate([(row, step)])
        index = caption_index(row, captions, 3, step)
        seen.add(index)
        assert batch.captions == [row["references"][index]]
        image = preprocessing(MADE["positive_images"][index])
        assert torch.equal(batch.inputs["image_generated"][0], image)
        text = batch.inputs["text_generated"]
        told |= {one for one in MADE["positive_captions"] if TOKENS([one]).equal(text)}
    assert seen == ({0} if captions == "first" else {0, 1, 2})
    assert told == {*MADE["positive_captions"]}


def test_positives_that_are_missing_are_named(tmp_path):
    whole = photo("a", **MADE)
    one = photo("b", positive_images=MADE["positive_images"][:1])
    check_positives([whole], ("image", "text"), "random")
    check_positives([one], ("image",), "first")
    with pytest.raises(DataError, match="'b' has 1 positive_images for 3"):
        check_positives([whole, one], ("image",), "random")
    (tmp_path / "bad.png").write_bytes(b"no image")
    images = [noise_image(2), str(tmp_path / "bad.png"), noise_image(2)]
    given = photo("c", positive_images=images)
    with pytest.raises(DataError, match=r"'c', '.*bad.png'"):
        check_positives([given], ("image",), "random", cache=tmp_path / "cache")
