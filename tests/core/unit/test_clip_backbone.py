"""Frozen dual encoders: loading, preprocessing, text cutting, fingerprints, and the cache of image
embeddings.
"""

import json
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from torch.nn.functional import normalize
from transformers import BertConfig

from rewards.base import RewardError
from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.clipscore import ClipScore
from rewards.clip.encoder import (
    CachedEncoder,
    EmbeddingCache,
)
from rewards.clip.preprocessing import Preprocessing, pixels
from rewards.clip.student import LCLIP, ImageStudent
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
from tests.zoo.language_models import bert_tokenizer

SHORT_AND_LONG = ["a cat", "two black dogs wearing headphones look at the camera"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def backbone(tiny):
    return load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(tiny))


def test_embeddings_equal_those_of_the_model_itself(backbone, tiny, tmp_path):
    assert backbone.context_length == 77
    noise_image(1).save(tmp_path / "one.png")
    images = [tmp_path / "one.png", str(tmp_path / "one.png"), noise_image(1), Drawn(3)]
    model, transform = open_clip.create_model_from_pretrained(
        ARCHITECTURE, tiny_checkpoint(tiny, 0)
    )
    model.eval()
    with torch.no_grad():
        stacked = torch.stack(
            [transform(image) for image in (*[noise_image(1)] * 3, Drawn(3).render())]
        )
        image_features = normalize(model.encode_image(stacked), dim=-1)
        # The model reads all 77 positions; the backbone cuts them after the longest caption.
        text_features = normalize(
            model.encode_text(open_clip.tokenize(SHORT_AND_LONG)), dim=-1
        )
    assert torch.allclose(backbone.encode_images(images), image_features, atol=1e-6)
    assert torch.allclose(
        backbone.encode_texts(SHORT_AND_LONG), text_features, atol=1e-6
    )
    assert not backbone.encode_texts(["a cat"]).requires_grad


def test_embeddings_are_of_the_precision_that_was_asked_for_whatever_autocast_surrounds_them(
    backbone,
):
    def embedded() -> list[torch.Tensor]:
        tokens = (rows for _, rows in backbone.encode_tokens(SHORT_AND_LONG))
        return [
            backbone.encode_images([noise_image(1)]),
            backbone.encode_texts(SHORT_AND_LONG),
            *tokens,
        ]

    expected = embedded()
    with torch.autocast("cpu", torch.bfloat16):
        found = embedded()
    assert all(map(torch.equal, found, expected))


def test_students_load_from_their_folder(tmp_path):
    transform = open_clip.image_transform(32, is_train=False)
    for pad_attention, length in (("masked", 4), ("full", 77)):
        folder = tiny_student(tmp_path / pad_attention, pad_attention)
        student, model = load_frozen_encoder(str(folder)), LCLIP.from_pretrained(folder)
        with torch.no_grad():
            images = normalize(
                model.encode_image(transform(noise_image(1))[None]), dim=-1
            )
            texts = normalize(
                model.encode_text(open_clip.tokenize(["a cat"])[:, :length]), dim=-1
            )
        assert torch.allclose(
            student.encode_images([noise_image(1)]), images, atol=1e-6
        )
        assert torch.allclose(student.encode_texts(["a cat"]), texts, atol=1e-6)
        together = student.encode_texts(SHORT_AND_LONG)
        assert torch.allclose(together[:1], texts, atol=1e-5), (
            "a caption must not depend on those beside it"
        )


def test_folders_of_open_clip_load(tmp_path, tiny, backbone):
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": TINY, "preprocess_cfg": {}})
    )
    torch.save(
        torch.load(tiny_checkpoint(tiny, 0)), tmp_path / "open_clip_pytorch_model.bin"
    )
    found = load_frozen_encoder(str(tmp_path))
    assert torch.equal(
        found.encode_texts(SHORT_AND_LONG), backbone.encode_texts(SHORT_AND_LONG)
    )


def test_long_captions_are_cut_or_refused(tiny, backbone):
    long, longer = "cat " * 75, "cat " * 76
    assert torch.equal(backbone.encode_texts([longer]), backbone.encode_texts([long]))
    strict = load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(tiny, 0), truncate=False)
    assert torch.equal(strict.encode_texts([long]), backbone.encode_texts([long]))
    with pytest.raises(RewardError, match=r"'cat cat.*has 78 tokens.*reads 77"):
        strict.encode_texts(["short", longer])


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
        text |= {"width": 16, "heads": 2, "layers": 1, "pool_type": "last"}
    else:  # more positions than the tokenizer's context
        shape = {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
        BertConfig(
            vocab_size=len(tokenizer), max_position_embeddings=64, **shape
        ).save_pretrained(tmp_path)
        text |= {"hf_model_name": str(tmp_path), "hf_model_pretrained": False}
    shape = TINY | {"custom_text": True, "text_cfg": text}
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": shape, "preprocess_cfg": {}})
    )
    torch.save(
        open_clip.CustomTextCLIP(
            16, shape["vision_cfg"], shape["text_cfg"]
        ).state_dict(),
        tmp_path / "open_clip_pytorch_model.bin",
    )
    fits, long = " ".join(["dog"] * 6), " ".join(["dog"] * 7)  # and [CLS] and [SEP]
    backbone = load_frozen_encoder(str(tmp_path))
    assert backbone.texts.too_long([fits, long]) == 1
    assert torch.equal(*backbone.encode_texts([fits, long]))
    with pytest.raises(RewardError, match=r"'dog .* has 9 tokens, .* reads 8"):
        load_frozen_encoder(str(tmp_path), truncate=False).encode_texts([fits, long])


def test_fingerprint_depends_on_weights_precision_and_nothing_else(
    tiny, backbone, tmp_path
):
    copy = tmp_path / "elsewhere.pt"
    copy.write_bytes(Path(tiny_checkpoint(tiny, 0)).read_bytes())
    half = load_frozen_encoder(ARCHITECTURE, str(copy), precision="bf16")
    assert (
        load_frozen_encoder(ARCHITECTURE, str(copy), batch_size=3).fingerprint
        == backbone.fingerprint
    )
    others = {
        half.fingerprint,
        load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(tiny, 1)).fingerprint,
    }
    assert len(others | {backbone.fingerprint}) == 3
    assert (
        backbone.signature
        == f"{ARCHITECTURE}/seed0.pt,{backbone.fingerprint[:12]},fp32"
    )
    assert half.encode_texts(["a cat"]).dtype == torch.float32
    assert torch.allclose(
        half.encode_texts(["a cat"]), backbone.encode_texts(["a cat"]), atol=0.05
    )


def test_pickles_with_its_weights(tmp_path, tiny):
    backbone = load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(tiny, 0))
    copy = pickle.loads(pickle.dumps(backbone))
    assert torch.equal(copy.encode_texts(["a cat"]), backbone.encode_texts(["a cat"]))


def test_wrong_arguments_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "empty").mkdir()
    for name, options, message in (
        (ARCHITECTURE, {}, "needs 'pretrained'"),
        (ARCHITECTURE, {"pretrained": "damaged.pt"}, "damaged.pt"),
        ("empty", {}, "empty"),
        ("hf-hub:a/b", {"pretrained": "openai"}, "leave 'pretrained' out"),
        (ARCHITECTURE, {"pretrained": "x", "precision": "int8"}, "fp32.*fp16.*bf16"),
    ):
        with pytest.raises(ValueError, match=message):
            load_frozen_encoder(name, **options)


def test_tags_of_openai_get_their_activation(monkeypatch):
    asked: dict[str, Any] = {}

    def stop(name: str, pretrained: str | None, **options: Any) -> Any:
        asked[str(pretrained)] = options["force_quick_gelu"]
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
    images[2].save(tmp_path / "three.png")
    frames: list[Any] = [images[0], images[1], tmp_path / "three.png"]
    cached = CachedEncoder(backbone, tmp_path / "cache")
    embedded = backbone.encode_images(images)
    found = cached.embed_images(
        [frames, images[0], [images[0]] * 3, (images[0],), tuple(frames[::-1])]
    )
    assert np.allclose(found[0], normalize(embedded.mean(0), dim=0), atol=1e-6)
    assert np.array_equal(found[0], found[4])
    assert np.allclose(found[1:4], embedded[0], atol=1e-6)
    again = CachedEncoder(Counted(backbone), tmp_path / "cache")
    assert np.array_equal(again.embed_images([frames[1:] + frames[:1]])[0], found[0])
    assert again.encoder.images == 0, "read from the cache on disk"
    assert not np.allclose(again.embed_images([frames[:2]])[0], found[0], atol=1e-4)
    assert again.encoder.images == 2
    score = ClipScore(cached)
    assert score(None, ["a cat"], image=[[images[0]]]) == score(
        None, ["a cat"], image=images[:1]
    )


def test_a_broken_frame_is_named_with_its_index(tmp_path, backbone):
    broken, score = tmp_path / "broken.png", ClipScore(backbone)
    rows = {"image": [noise_image(1), [noise_image(1), noise_image(2), broken]]}
    with pytest.raises(OSError, match=r"broken\.png"):
        score(None, ["a cat", "a dog"], **rows)
    broken.write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(RewardError, match=r"frame 2.*broken\.png"):
        score(None, ["a cat", "a dog"], **rows)
    with pytest.raises(RewardError, match=r"row 1 has no image"):
        score(None, ["a cat", "a dog"], image=[noise_image(1), []])


class CountingEncoder:
    """Embeds an image as its first pixel and remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, images: Sequence[Any]) -> np.ndarray:
        self.seen += images
        rows = [
            np.asarray(pixels(image, Preprocessing(8)))[:, 0, 0] for image in images
        ]
        return np.array(rows, np.float32)


def test_cache_encodes_every_image_once_and_sees_a_changed_file(tmp_path):
    noise_image(1).save(tmp_path / "one.png")
    path, drawn, encode = str(tmp_path / "one.png"), Drawn(7), CountingEncoder()
    cache = EmbeddingCache("f")
    first = cache.embed([path, noise_image(2), path, drawn, drawn], encode)
    assert len(encode.seen) == 3
    assert np.array_equal(first[0], first[2])
    assert drawn.drawn == 2, "once to know it, once to encode it"
    again = cache.embed([drawn, Drawn(7), Path(path), noise_image(2)], encode)
    assert len(encode.seen) == 3, "equal content and equal paths are known"
    assert np.array_equal(again, first[[3, 3, 0, 1]])
    lazy = LazyColumn(
        [noise_image(seed) for seed in (1, 2, 1, 3)]
    )  # makes an image whenever it is read
    assert np.array_equal(cache.embed(lazy, encode)[1:3], first[[1, 0]])
    assert cache.embed([], encode).shape[0] == 0
    noise_image(2, (60, 60)).save(path)
    assert not np.array_equal(cache.embed([path], encode)[0], first[0])
    Path(path).unlink()
    with pytest.raises(OSError, match=r"one\.png"):
        cache.embed([path], encode)
    with pytest.raises(RewardError, match="not finite"):
        cache.embed(
            [noise_image(9)], lambda images: np.full((1, 3), np.nan, np.float32)
        )


def test_a_cache_of_half_the_data_finds_half_of_it_in_every_epoch():
    """Least recently used out first would find none of it."""
    encoded: list[str] = []

    def encode(texts: Sequence[str]) -> np.ndarray:
        encoded.extend(texts)
        return np.array([[float(text)] for text in texts], np.float32)

    cache = EmbeddingCache("f", max_entries=50)
    for epoch in range(4):
        for batch in np.arange(100).reshape(10, 10):
            assert (
                cache.embed([str(row) for row in batch], encode, str)[:, 0].tolist()
                == batch.tolist()
            )
        assert len(encoded) == 100 + 50 * epoch


def test_damaged_cache_files_are_made_anew(tmp_path, caplog):
    image, encode = noise_image(1), CountingEncoder()
    first = EmbeddingCache("f", tmp_path).embed([image], encode)
    (path,) = tmp_path.rglob("*.emb")
    EmbeddingCache("f", tmp_path).embed([noise_image(2)], encode)
    (other,) = set(tmp_path.rglob("*.emb")) - {path}
    whole = path.read_bytes()
    for damaged in (whole[:-5], b"", whole[:-1] + b"\x01", other.read_bytes()):
        path.write_bytes(damaged)
        before = len(encode.seen)
        for _ in range(2):  # the second time it was made anew
            assert np.array_equal(
                EmbeddingCache("f", tmp_path).embed([image], encode), first
            )
        assert len(encode.seen) == before + 1
    assert caplog.text.count("is damaged") == 4


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    cache, encode = EmbeddingCache("f", tmp_path), CountingEncoder()
    monkeypatch.setattr("rewards.files.os.replace", full)
    with caplog.at_level(logging.WARNING):
        cache.embed([noise_image(1), noise_image(2)], encode)
    assert caplog.text.count("No space left") == caplog.text.count("MB are free") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    cache.embed([noise_image(1)], encode)
    assert len(encode.seen) == 2


def test_a_cached_embedding_belongs_to_one_fingerprint_wherever_its_file_lies(
    tmp_path,
):
    asked: list[str] = []
    buffer = np.zeros((1, 2), np.float32)

    def embed(cache: EmbeddingCache, item: str, value: float) -> float:
        def encode(items: Sequence[str]) -> Any:
            asked.extend(items)
            buffer[:] = value
            return buffer

        return float(cache.embed([item], encode, str)[0, 0])

    first = EmbeddingCache("one", tmp_path)
    assert embed(first, "a", 1.0) == embed(first, "a", 9.0) == 1.0
    assert embed(first, "b", 2.0) == 2.0
    assert embed(first, "a", 9.0) == 1.0, (
        "what the encoder does with its memory later does not matter"
    )
    assert embed(EmbeddingCache("one", tmp_path), "a", 9.0) == 1.0
    assert asked == ["a", "b"]
    assert embed(EmbeddingCache("two", tmp_path), "a", 3.0) == 3.0
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}
    (tmp_path / "one").rename(tmp_path / "three")
    assert embed(EmbeddingCache("three", tmp_path), "a", 4.0) == 4.0
    assert asked == ["a", "b", "a", "a"]


def test_a_fingerprint_changes_with_shape_preprocessing_and_precision_of_equal_weights(
    tmp_path, monkeypatch
):
    folders = [tiny_student(tmp_path / name, name) for name in ("masked", "full")]
    loaded = [load_frozen_encoder(str(folder)) for folder in folders]
    states = [each.model.state_dict() for each in loaded]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    half = load_frozen_encoder(str(folders[0]), precision="bf16")
    other = Preprocessing(32, mean=(0.0, 0.0, 0.0))
    monkeypatch.setattr(ImageStudent, "preprocessing", other)
    darker = load_frozen_encoder(str(folders[0]))
    found = {each.fingerprint for each in (*loaded, half, darker)}
    assert len(found) == 4
