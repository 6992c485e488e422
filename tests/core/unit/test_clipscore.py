"""CLIPScore, RefCLIPScore and the same under a student: against a plain recomputation, and as
rewards.
"""

import inspect
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from torch.nn.functional import cosine_similarity

from rewards.base import RewardError
from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.clipscore import ClipScore, RefClipScore, harmonic_mean
from rewards.clip.encoder import EncoderOptions
from rewards.clip.l_clipscore import LClipScore, RefLClipScore
from rewards.clip.pac import PacScore, RefPacScore
from rewards.clip.specs import Specs
from rewards.clip.student import LCLIP
from rewards.registry import build
from tests.clip_for_tests import (
    ARCHITECTURE,
    Counted,
    Drawn,
    noise_image,
    tiny_checkpoint,
    tiny_student,
)

CAPTIONS = ["a cat", "two dogs play", "a cat"]
REFERENCES = [
    ["one cat sits", "a grey cat"],
    ["dogs in a park"],
    ["a red bus", "one cat sits"],
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def backbone(tiny):
    return load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(tiny))


@pytest.fixture
def columns(tmp_path):
    noise_image(1).save(tmp_path / "one.png")
    image = str(tmp_path / "one.png")
    return {
        "image": [image, noise_image(2), Drawn(90)],
        "references": REFERENCES,
        "image_id": ["1", "2", "1"],
    }


def recomputed(model: Any, prefix: str) -> tuple[list[float], list[float]]:
    """Score CAPTIONS one by one with the model's own functions: CLIPScore, and RefCLIPScore as in
    the paper.
    """
    transform = open_clip.image_transform(32, is_train=False)
    plain, with_references = [], []
    with torch.no_grad():
        for caption, image, references in zip(
            CAPTIONS,
            [noise_image(1), noise_image(2), Drawn(90).render()],
            REFERENCES,
            strict=True,
        ):
            text = model.encode_text(open_clip.tokenize([prefix + caption]))
            others = model.encode_text(
                open_clip.tokenize([prefix + reference for reference in references])
            )
            first = 2.5 * max(
                float(
                    cosine_similarity(text, model.encode_image(transform(image)[None]))
                ),
                0.0,
            )
            second = max(float(cosine_similarity(text, others).max()), 0.0)
            plain.append(first)
            with_references.append(
                0.0 if first == 0 or second == 0 else 2 / (1 / first + 1 / second)
            )
    return plain, with_references


def test_scores_equal_a_plain_recomputation(tiny, backbone, columns):
    model = open_clip.create_model(ARCHITECTURE, tiny_checkpoint(tiny)).eval()
    for prefix in (
        "A photo depicts ",
        None,
    ):  # None: `--kwargs.prefix ''` of a command line
        plain, with_references = recomputed(model, prefix or "")
        assert all(plain), "a row that scores 0 shows nothing"
        assert ClipScore(backbone, prefix=prefix)(
            None, CAPTIONS, **columns
        ) == pytest.approx(plain, abs=1e-5)
        found = RefClipScore(backbone, prefix=prefix)(None, CAPTIONS, **columns)
        assert found == pytest.approx(with_references, abs=1e-5)


def test_students_score_bare_captions(tmp_path, columns):
    folder = tiny_student(tmp_path / "student")
    plain, with_references = recomputed(LCLIP.from_pretrained(folder).eval(), "")
    assert all(plain), "a row that scores 0 shows nothing"
    assert LClipScore(folder)(None, CAPTIONS, **columns) == pytest.approx(
        plain, abs=1e-5
    )
    assert RefLClipScore(folder)(None, CAPTIONS, **columns) == pytest.approx(
        with_references, abs=1e-5
    )
    assert re.fullmatch(
        r"l_clipscore\[student,\w{12},fp32,prefix='',w2\.5\]",
        LClipScore(folder).signature,
    )
    with pytest.raises(ValueError, match=r"absent'"):
        LClipScore(tmp_path / "absent")


def test_formulas_by_hand(backbone):
    cosines = np.array([0.3, -0.2, 1.0, 1.0000001])
    assert ClipScore(backbone).scores(cosines).tolist() == [0.75, 0.0, 2.5, 2.5]
    scores, agreements = (
        np.array([0.75, 0.0, 0.75, 0.0, 2.5, 0.5]),
        np.array([0.5, 0.5, 0.0, 0.0, 1.0, -0.5]),
    )
    # 2 * 0.75 * 0.5 / 1.25; three zero cases; 10/7, the largest; a sum of 0, which only unclipped
    # cosines can have.
    assert harmonic_mean(scores, agreements) == pytest.approx(
        [0.6, 0.0, 0.0, 0.0, 10 / 7, 0.0]
    )


class Fixed:
    """Every image has one cosine with every caption, every reference another; records the texts."""

    fingerprint, signature, context_length = "fixed", "fixed", 77

    def __init__(self, image: float, reference: float) -> None:
        self.image, self.reference, self.texts = image, reference, list[str]()

    def encode_images(self, images: Any) -> torch.Tensor:
        return torch.tensor([[self.image, math.sqrt(1 - self.image**2)]]).repeat(
            len(images), 1
        )

    def encode_texts(self, texts: Any) -> torch.Tensor:
        self.texts += texts
        there = [self.reference, math.sqrt(1 - self.reference**2)]
        return torch.tensor(
            [there if "reference" in text else [1.0, 0.0] for text in texts]
        )


def test_clipping_by_hand():
    for kind, image, reference, plain, clipped, unclipped in (
        (ClipScore, 0.3, 0.5, 0.75, 0.6, 0.6),
        (ClipScore, 0.3, -0.5, 0.75, 0.0, -3.0),
        (ClipScore, -0.3, -0.5, 0.0, 0.0, 0.0),
        (PacScore, 0.4, 0.5, 0.8, 0.8 / 1.3, 0.8 / 1.3),  # 2 * 0.8 * 0.5 / 1.3
        (PacScore, 1.0, 1.0, 2.0, 4 / 3, 4 / 3),
    ):
        encoder, with_references = (
            Fixed(image, reference),
            {ClipScore: RefClipScore, PacScore: RefPacScore}[kind],
        )
        row = {"image": [noise_image(1)], "references": [["a reference"]]}
        paper, released = (
            with_references(encoder),
            with_references(encoder, clip_references=False),
        )
        assert kind(encoder)(None, ["caption"], **row) == pytest.approx(
            [plain], abs=1e-6
        )
        assert paper(None, ["caption"], **row) == pytest.approx([clipped], abs=1e-6)
        assert released(None, ["caption"], **row) == pytest.approx(
            [unclipped], abs=1e-5
        )
        assert set(encoder.texts) == {
            "A photo depicts caption",
            "A photo depicts a reference",
        }
        w = kind(encoder).w
        assert (kind(encoder).bounds, paper.bounds) == (
            (0, w),
            (0, pytest.approx(2 * w / (1 + w))),
        )
        assert released.bounds == (-math.inf, math.inf)
        assert paper.signature != released.signature
        assert (kind(encoder).columns, paper.columns) == (
            {"image"},
            {"image", "references"},
        )
        assert kind.bounds == kind(encoder).bounds, "what a listing says"


def test_signature_names_all_that_a_score_depends_on(backbone):
    start = f"{ARCHITECTURE}/seed0.pt,{backbone.fingerprint[:12]},fp32"
    assert (
        ClipScore(backbone).signature
        == f"clipscore[{start},prefix='A photo depicts ',w2.5]"
    )
    assert (
        RefClipScore(backbone, prefix="", w=1).signature
        == f"ref_clipscore[{start},prefix='',w1,clipped references]"
    )


@pytest.mark.parametrize(
    "kind",
    [ClipScore, RefClipScore, LClipScore, RefLClipScore, PacScore, RefPacScore, Specs],
)
def test_every_score_takes_the_options_of_its_encoder_and_no_others(kind, tiny):
    options = inspect.signature(EncoderOptions).parameters
    own = inspect.signature(kind).parameters
    assert options.keys() <= own.keys()
    changed = {"backbone", "truncate"} if kind is Specs else {"backbone"}
    assert {
        name for name in options if own[name].default != options[name].default
    } <= changed
    with pytest.raises(ValueError, match=r"batch_sise.*batch_size"):
        build(
            f"{kind.__module__}:{kind.__qualname__}", backbone=str(tiny), batch_sise=2
        )


def test_images_and_references_are_encoded_once(backbone, columns, tmp_path):
    counted, later = Counted(backbone), Counted(backbone)
    reward = RefClipScore(counted, cache_dir=tmp_path / "cache")
    first = reward(None, CAPTIONS, **columns)
    assert (counted.images, counted.texts) == (3, 2 + 4)
    assert reward(None, CAPTIONS, **columns) == pytest.approx(first, abs=1e-6)
    assert (counted.images, counted.texts) == (3, 2 + 4 + 2), (
        "only captions are encoded again"
    )
    bounded = RefClipScore(later, cache_dir=tmp_path / "cache", cache_references=2)
    for _ in range(2):
        assert bounded(None, CAPTIONS, **columns) == pytest.approx(first, abs=1e-6)
    assert (later.images, later.texts) == (0, 2 + 4 + 2 + 2), (
        "images are on disk; two of four references are known"
    )


def test_bad_rows_and_arguments_are_named(backbone, columns, tmp_path):
    reward = RefClipScore(backbone)
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    for change, message in (
        ({"image": None}, "needs .*'image'"),
        ({"references": [["a"], [], ["b"]]}, "row 1"),
        ({"image": columns["image"][:1]}, r"column 'image' has 1.*3"),
        (
            {"image": [*columns["image"][:2], str(tmp_path / "absent.jpg")]},
            "absent.jpg",
        ),
        (
            {"image": [*columns["image"][:2], str(tmp_path / "broken.jpg")]},
            "broken.jpg",
        ),
    ):
        with pytest.raises((RewardError, OSError), match=message):
            reward(None, CAPTIONS, **columns | change)
    assert reward(None, [], image=[], references=[]) == []
    for name, value in (("w", 0), ("w", math.nan), ("cache_images", 0)):
        with pytest.raises(ValueError, match=f"{name} .*expected"):
            ClipScore(backbone, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metric", "file", "plain", "with_references"),
    [
        ("CLIPSCORE", "good", 0.8584, 0.8450),
        ("CLIPSCORE", "bad", 0.7153, 0.7253),
        ("PAC", "good", 0.8264, 0.8393),
        ("PAC", "bad", 0.5772, 0.6357),
    ],
)
def test_released_examples_under_released_weights(metric, file, plain, with_references):
    """Means in the READMEs of CLIPScore (half precision on a GPU; float32 gives .8585 first) and
    aimagelab/pacscore.

    The folders are the released ``example``: ``images/``, ``good_captions.json``,
    ``bad_captions.json``, ``refs.json``.
    """
    example, path = (
        os.environ.get(f"RL_CAPTION_{metric}_{name}") for name in ("EXAMPLE", "WEIGHTS")
    )
    if not example or (not path and metric == "PAC"):
        pytest.skip(
            f"RL_CAPTION_{metric}_EXAMPLE and _WEIGHTS do not name the released example and weights"
        )
    try:
        encoder = load_frozen_encoder(
            "ViT-B-32",
            path or "openai",
            tuned_from="openai" if metric == "PAC" else None,
        )
    except ValueError as error:
        pytest.skip(f"no weights of ViT-B/32: {error}")
    captions = json.loads((Path(example) / f"{file}_captions.json").read_text())
    references = json.loads((Path(example) / "refs.json").read_text())
    rows: dict[str, Any] = {
        "image": [
            next((Path(example) / "images").glob(f"{name}.*")) for name in captions
        ],
        "references": [
            own if isinstance(own, list) else [own]
            for own in (references[name] for name in captions)
        ],
    }
    kinds = (PacScore, RefPacScore) if metric == "PAC" else (ClipScore, RefClipScore)
    # Published with four digits; half precision moved CLIPScore's by up to 1e-4.
    tolerance = 1e-4 if metric == "PAC" else 2.5e-4
    for kind, expected in zip(kinds, (plain, with_references), strict=True):
        assert np.mean(
            kind(encoder)(None, list(captions.values()), **rows)
        ) == pytest.approx(expected, abs=tolerance)
