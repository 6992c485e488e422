"""EMScore: greedy matching by hand, token embeddings against the models', weights of
tokens, references, errors.
"""

import math

import numpy as np
import open_clip
import pytest
import torch
from torch.nn.functional import normalize

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.dual import DualConfig, PretrainedDual
from rewards.clip.emscore import EmScore, RefEmScore, greedy_f1, token_idf
from rewards.registry import build
from rewards.trust import trust
from tests.clip_for_tests import (
    ARCHITECTURE,
    Counted,
    noise_image,
    tiny_checkpoint,
    tiny_student,
)
from tests.encoders_for_tests import save_text_encoder

TEXTS = ["a cat", "two black dogs look at the camera"]
VIDEO = [noise_image(1), noise_image(2), noise_image(3)]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return load_frozen_encoder(ARCHITECTURE, checkpoint)


def test_greedy_matching_by_hand():
    cosines = np.array([[0.9, 0.1, 0.3], [0.2, 0.6, 0.4]])
    weights = np.array([0.75, 0.25]), np.full(3, 1 / 3)
    # precision 0.825, recall 1.9 / 3
    expected = 2 * 0.825 * 1.9 / (3 * 0.825 + 1.9)
    assert greedy_f1(cosines, *weights) == pytest.approx(expected)
    assert greedy_f1(-cosines, *weights) == 0


def test_weights_of_tokens_by_hand():
    weights = token_idf([[1, 5, 5, 9], [1, 5, 9], [1, 6, 9]])
    assert weights[1] == 0
    assert weights[5] == pytest.approx(math.log(4 / 3))
    assert weights[6] == pytest.approx(math.log(4 / 2))
    assert weights[9] == pytest.approx((math.log(4 / 3) + math.log(2)) / 4)


@torch.no_grad()
def by_hand(backbone, text, other, weight=lambda token: 1.0):
    """Coarse and fine, from the tower's own layers; ``other`` [P, D] with equal weights."""
    model = backbone.model
    ids = open_clip.tokenize([text])
    hidden = model.token_embedding(ids) + model.positional_embedding
    hidden = model.transformer(hidden, attn_mask=model.attn_mask)
    hidden = model.ln_final(hidden) @ model.text_projection
    end = int(ids.argmax())
    tokens = normalize(hidden[0, : end + 1], dim=-1).numpy().astype(float)
    cosines = tokens @ other.T
    own = [weight(token) for token in ids[0, : end + 1].tolist()]
    precision = np.average(cosines.max(1), weights=own)
    recall = cosines.max(0).mean()
    fine = 0.0
    if min(precision, recall) > 0:
        fine = 2 * precision * recall / (precision + recall)
    mean = other.mean(0)
    return tokens[-1] @ mean / np.linalg.norm(mean), fine


@pytest.mark.parametrize("idf", [None, ["a cat", "a dog", "two cats"]])
def test_scores_by_hand(backbone, idf):
    frames = backbone.encode_images(VIDEO).numpy().astype(float)
    options = {}
    if idf is not None:
        rows = open_clip.tokenize(idf)
        table = token_idf([ids[: int(ids.argmax()) + 1].tolist() for ids in rows])
        options["weight"] = lambda token: table.get(token, math.log(4))
    score = EmScore(backbone, idf_captions=idf)
    found = score(None, TEXTS, image=[VIDEO, VIDEO[::-1]])
    both = [by_hand(backbone, text, frames, **options) for text in TEXTS]
    expected = [(coarse + fine) / 2 for coarse, fine in both]
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_score_with_references_is_the_mean_with_the_best_one(backbone):
    references = [["a dog runs", TEXTS[0]], ["a red house"]]
    columns = {"image": [VIDEO, VIDEO], "references": references}
    found = RefEmScore(backbone)(None, TEXTS, **columns)
    alone = EmScore(backbone)(None, TEXTS, **columns)
    # a caption that is a reference matches it fully
    assert found[0] == pytest.approx((alone[0] + 1) / 2, abs=1e-6)
    tokens = backbone.encode_tokens(["a red house"])[0][1].numpy().astype(float)
    _, fine = by_hand(backbone, TEXTS[1], tokens)
    coarse = float(tokens[-1] @ backbone.encode_texts(TEXTS)[1].numpy())
    assert found[1] == pytest.approx((alone[1] + (coarse + fine) / 2) / 2, abs=1e-6)


@pytest.mark.parametrize("kind", ["masked", "full", "dual"])
def test_the_pooled_token_is_the_captions_embedding(tmp_path, kind):
    if kind == "dual":
        image = "tests.encoders_for_tests:TinyImageEncoder"
        text = save_text_encoder(tmp_path / "text")
        trust([image])
        shape = DualConfig(
            image,
            text,
            embed_dim=8,
            hidden=10,
            pool="first",
        )
        PretrainedDual(shape).save_pretrained(tmp_path)
    else:
        tiny_student(tmp_path, kind)
    encoder = load_frozen_encoder(str(tmp_path))
    found = encoder.encode_tokens(TEXTS)
    place = 0 if kind == "dual" else -1
    pooled = torch.stack([rows[place] for _, rows in found])
    assert torch.allclose(pooled, encoder.encode_texts(TEXTS), atol=1e-5)
    lengths = encoder.texts.encoder.lengths(encoder.token_ids(TEXTS))
    assert [len(rows) for _, rows in found] == lengths.tolist()
    assert [len(ids) for ids, _ in found] == lengths.tolist()


def test_what_cannot_be_matched_is_refused(backbone):
    with pytest.raises(ValueError, match="idf_captions"):
        EmScore(backbone, idf_captions=[" "])
    with pytest.raises(ValueError, match="token embeddings"):
        EmScore(Counted(backbone))
    assert build("ref_pac_s_video", backbone=backbone).__name__ == "ref_pac_s_video"
