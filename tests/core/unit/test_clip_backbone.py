"""Frozen dual encoders: loading, preprocessing, text cutting, fingerprints, and the
cache of image embeddings.
"""

import json

import numpy as np
import open_clip
import pytest
import torch
from torch.nn.functional import normalize
from transformers import BertConfig

from rewards.base import RewardError
from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.clipscore import ClipScore
from rewards.clip.encoder import CachedEncoder, EmbeddingCache
from rewards.clip.preprocessing import Preprocessing, pixels
from rewards.clip.student import ImageStudent
from tests.captions_for_tests import LazyColumn
from tests.clip_for_tests import (
    ARCHITECTURE,
    TINY,
    Counted,
    Drawn,
    noise_image,
    tiny_checkpoint,
    tiny_student,
)
from tests.encoders_for_tests import TOWER
from tests.zoo.language_models import bert_tokenizer

SHORT_AND_LONG = ["a cat", "two black dogs wearing headphones look at the camera"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def backbone(checkpoint):
    return load_frozen_encoder(ARCHITECTURE, checkpoint)


@torch.no_grad()
def test_embeddings_equal_those_of_the_model_itself(backbone, checkpoint, tmp_path):
    file = tmp_path / "one.png"
    noise_image(1).save(file)
    model, transform = open_clip.create_model_from_pretrained(ARCHITECTURE, checkpoint)
    shown = [noise_image(1), noise_image(1), Drawn(3).render()]
    pixels = torch.stack([transform(image) for image in shown])
    images = normalize(model.eval().encode_image(pixels), dim=-1)
    # The model reads all 77 positions; the backbone cuts them after the longest caption.
    ids = open_clip.tokenize(SHORT_AND_LONG)
    texts = normalize(model.encode_text(ids), dim=-1)
    found = backbone.encode_images([str(file), noise_image(1), Drawn(3)])
    assert torch.allclose(found, images, atol=1e-6)
    found = backbone.encode_texts(SHORT_AND_LONG)
    assert torch.allclose(found, texts, atol=1e-6)


def test_embeddings_are_of_the_precision_that_was_asked_for_whatever_autocast_surrounds_them(
    backbone,
):
    def embedded():
        tokens = [rows for _, rows in backbone.encode_tokens(SHORT_AND_LONG)]
        images = backbone.encode_images([noise_image(1)])
        return [images, backbone.encode_texts(SHORT_AND_LONG), *tokens]

    expected = embedded()
    with torch.autocast("cpu", torch.bfloat16):
        found = embedded()
    assert all(map(torch.equal, found, expected))


def test_long_captions_are_cut_or_refused(checkpoint, backbone):
    long = "cat " * 75
    expected = backbone.encode_texts([long])
    assert torch.equal(backbone.encode_texts([long + "cat"]), expected)
    strict = load_frozen_encoder(ARCHITECTURE, checkpoint, truncate=False)
    assert torch.equal(strict.encode_texts([long]), expected)
    with pytest.raises(RewardError, match=r"'cat cat.*has 78 tokens.*reads 77"):
        strict.encode_texts(["short", long + "cat"])


@pytest.mark.parametrize("tower", ["SigLIP", "of Transformers"])
def test_captions_are_counted_by_a_tokenizer_of_transformers(tmp_path, tower):
    tokenizer = bert_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    text = {
        "context_length": 8,
        "vocab_size": len(tokenizer),
        "hf_tokenizer_name": str(tmp_path),
    }
    if tower == "SigLIP":
        text |= {
            "width": 16,
            "heads": 2,
            "layers": 1,
            "pool_type": "last",
        }
    else:  # more positions than the tokenizer's context
        text |= {
            "hf_model_name": str(tmp_path),
            "hf_model_pretrained": False,
        }
        BertConfig(
            **TOWER, vocab_size=len(tokenizer), max_position_embeddings=64
        ).save_pretrained(tmp_path)
    shape = TINY | {"custom_text": True, "text_cfg": text}
    content = {"model_cfg": shape, "preprocess_cfg": {}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    model = open_clip.CustomTextCLIP(16, shape["vision_cfg"], text)
    torch.save(model.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    captions = ["dog " * 6, "dog " * 7]  # and [CLS] and [SEP]
    backbone = load_frozen_encoder(str(tmp_path))
    assert backbone.texts.too_long(captions) == 1
    assert torch.equal(*backbone.encode_texts(captions))


def test_a_fingerprint_depends_on_weights_shape_preprocessing_and_precision_alone(
    checkpoint, backbone, tmp_path, monkeypatch
):
    again = load_frozen_encoder(ARCHITECTURE, checkpoint, batch_size=3)
    assert again.fingerprint == backbone.fingerprint
    half = load_frozen_encoder(ARCHITECTURE, checkpoint, precision="bf16")
    other = load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(tmp_path, 1))
    assert len({each.fingerprint for each in (backbone, half, other)}) == 3
    found = half.encode_texts(["a cat"])
    assert found.dtype == torch.float32
    assert torch.allclose(found, backbone.encode_texts(["a cat"]), atol=0.05)
    # equal weights
    folders = [tiny_student(tmp_path / kind, kind) for kind in ("masked", "full")]
    students = [load_frozen_encoder(str(folder)) for folder in folders]
    darker = Preprocessing(32, mean=(0.0, 0.0, 0.0))
    monkeypatch.setattr(ImageStudent, "preprocessing", darker)
    students.append(load_frozen_encoder(str(folders[0])))
    assert len({each.fingerprint for each in students}) == 3


@pytest.mark.parametrize("pretrained", [None, "damaged.pt"])
def test_weights_that_are_missing_or_damaged_are_named(
    tmp_path, monkeypatch, pretrained
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=pretrained or "needs 'pretrained'"):
        load_frozen_encoder(ARCHITECTURE, pretrained)


def test_tags_of_openai_get_their_activation(monkeypatch):
    asked = {}

    def stop(name, pretrained, force_quick_gelu, **_):
        asked[pretrained] = force_quick_gelu
        raise RuntimeError("stopped before the download")

    monkeypatch.setattr(open_clip, "create_model", stop)
    monkeypatch.setattr("rewards.clip.backbone.ask_for_weights", lambda *_: None)
    for tag in ("openai", "laion2b_s34b_b79k"):
        with pytest.raises(ValueError, match=tag):
            load_frozen_encoder("ViT-B-32", tag)
    assert asked == {"openai": True, "laion2b_s34b_b79k": False}


def test_frames_of_a_video_are_averaged(tmp_path, backbone):
    """The mean of the normalised embeddings, normalised again; known by the frames, in any order."""
    images = [noise_image(seed) for seed in (1, 2, 3)]
    counted = Counted(backbone)
    found = CachedEncoder(counted, tmp_path).embed_images([images, images[0]])
    embedded = backbone.encode_images(images)
    mean = normalize(embedded.mean(0), dim=0)
    assert np.allclose(found[0], mean, atol=1e-6)
    assert np.allclose(found[1], embedded[0], atol=1e-6)
    seen = counted.images
    again = CachedEncoder(counted, tmp_path).embed_images([tuple(images[::-1])])
    assert np.array_equal(again[0], found[0])
    assert counted.images == seen, "read from the cache on disk"


def test_a_broken_frame_is_named(tmp_path, backbone):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n broken")
    score = ClipScore(backbone)
    for frames, message in (
        ([noise_image(2), broken], r"broken\.png"),
        ([], "row 1 has no image"),
    ):
        with pytest.raises(RewardError, match=message):
            score(None, ["a cat", "a dog"], image=[noise_image(1), frames])


class CountingEncoder:
    """Embeds an image as its first pixel and remembers what it was asked."""

    def __init__(self):
        self.seen = []

    def __call__(self, images):
        self.seen += images
        rows = [pixels(image, Preprocessing(8)) for image in images]
        return torch.stack(rows)[:, :, 0, 0].numpy()


def test_cache_encodes_every_image_once_and_sees_a_changed_file(tmp_path):
    path = tmp_path / "one.png"
    noise_image(1).save(path)
    drawn = Drawn(7)
    encode = CountingEncoder()
    cache = EmbeddingCache("f")
    first = cache.embed([str(path), noise_image(2), path, drawn, drawn], encode)
    assert np.array_equal(first[0], first[2])
    assert drawn.drawn == 2, "once to know it, once to encode it"
    again = cache.embed([drawn, Drawn(7), path, noise_image(2)], encode)
    assert len(encode.seen) == 3, "equal content and equal paths are known"
    assert np.array_equal(again, first[[3, 3, 0, 1]])
    # makes an image whenever it is read
    lazy = LazyColumn([noise_image(seed) for seed in (1, 2, 1, 3)])
    assert np.array_equal(cache.embed(lazy, encode)[1:3], first[[1, 0]])
    noise_image(2, (60, 60)).save(path)
    assert not np.array_equal(cache.embed([path], encode)[0], first[0])
    with pytest.raises(RewardError, match="not finite"):
        cache.embed([noise_image(9)], lambda _: np.full((1, 3), np.nan))


def test_damaged_cache_files_are_made_anew(tmp_path):
    encode = CountingEncoder()

    def embedded(seed):
        return EmbeddingCache("f", tmp_path).embed([noise_image(seed)], encode)

    first = embedded(1)
    (path,) = tmp_path.rglob("*.emb")
    embedded(2)
    (other,) = {*tmp_path.rglob("*.emb")} - {path}
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1] + b"\x01", other.read_bytes()):
        path.write_bytes(damaged)
        before = len(encode.seen)
        for _ in range(2):  # the second time it was made anew
            assert np.array_equal(embedded(1), first)
        assert len(encode.seen) == before + 1


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rewards.files.os.replace", full)
    cache = EmbeddingCache("f", tmp_path)
    encode = CountingEncoder()
    for images in ([noise_image(1), noise_image(2)], [noise_image(1)]):
        cache.embed(images, encode)
    assert len(encode.seen) == 2
    assert caplog.text.count("No space left") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_cached_embedding_belongs_to_one_fingerprint_wherever_its_file_lies(tmp_path):
    buffer = np.zeros((1, 2), np.float32)

    def embed(fingerprint, item, value):
        def encode(items):
            buffer[:] = value  # what the encoder does with it later does not matter
            return buffer

        cache = EmbeddingCache(fingerprint, tmp_path)
        return float(cache.embed([item], encode, str)[0, 0])

    assert embed("one", "a", 1.0) == 1.0
    assert embed("one", "b", 2.0) == 2.0
    assert embed("one", "a", 9.0) == 1.0
    assert embed("two", "a", 3.0) == 3.0
    (tmp_path / "one").rename(tmp_path / "three")
    assert embed("three", "a", 4.0) == 4.0
