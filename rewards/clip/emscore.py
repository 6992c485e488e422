"""EMScore: how well a caption fits a video, as a whole and word by frame, in a joint
embedding space.

Source: Shi et al., "EMScore: Evaluating Video Captioning via Coarse-Grained and
Fine-Grained Embedding Matching", CVPR 2022; greedy matching after BERTScore (Zhang et
al., ICLR 2020). docs/rewards.md says where the released code differs.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from rewards.base import RewardError, naming, passes_on
from rewards.clip.clipscore import ClipScore, Floats, harmonic_mean
from rewards.clip.encoder import EncoderOptions, EncoderSource, mean_embedding
from rewards.images import frames_of


class Embedded(NamedTuple):
    """A caption with its tokens, or a video with its frames. All embeddings have length 1."""

    whole: Floats
    """Embedding [D] of the caption (at EOT), or normalised mean of the frames'
    embeddings.
    """
    units: Floats
    """Embeddings [P, D] of the tokens, start and end included, or of the frames."""
    weights: Floats
    """Weights [P] of the units: at least 0, with the sum 1."""


def greedy_f1(cosines: Floats, left: Floats, right: Floats) -> float:
    """F1 of greedy matching of P units with Q others, in [0, 1], from their cosines [P, Q].

    Each unit is matched with the nearest one of the other side. Precision is the mean
    of these cosines over the P units, weighted by ``left`` [P]; recall is the mean over
    the Q units, weighted by ``right`` [Q] (EMScore, equations 3 to 5). Both are clipped
    at 0.
    """
    precision = max(float(cosines.max(axis=1) @ left), 0.0)
    recall = max(float(cosines.max(axis=0) @ right), 0.0)
    return float(harmonic_mean(np.array(precision), np.array(recall)))


def token_idf(documents: Sequence[Sequence[int]]) -> dict[int, float]:
    """Token -> weight log((M + 1) / (m + 1)), for a token that occurs in m of M
    captions (lists of token ids).

    The end token, which is the last of every caption, gets the mean of all weights instead of 0.
    """
    counts = Counter(chain.from_iterable(map(set, documents)))
    total = len(documents) + 1
    weights = {token: math.log(total / (count + 1)) for token, count in counts.items()}
    return weights | {documents[0][-1]: sum(weights.values()) / len(weights)}


class EmScore(ClipScore):
    """EMScore: (coarse + fine) / 2 of a caption and the frames of its video; no references.

    Coarse is the cosine of the caption and the normalised mean of its frames'
    embeddings, in [-1, 1]; fine is the F1 of greedy matching of tokens and frames
    (``greedy_f1``), in [0, 1]. An image is a video of one frame. No order of the frames
    changes a score. Source: Shi et al., CVPR 2022, section 3.

    Args:
        backbone, pretrained, **encoder: fields of ``EncoderOptions``, as for
            ``ClipScore``. The text tower has to give an embedding of every token:
            open_clip's CLIP, an L-CLIP student, or a dual of pretrained encoders.
        idf_captions: captions, such as the training split's, or a file with one caption
            a line; tokens are weighted by their inverse document frequencies in these
            captions (``token_idf``). None gives all tokens the same weight.
        prefix: put before captions and references; None (the default, as in the
            released code) for none.

    Raises:
        ValueError: an argument is wrong, the weights cannot be found or loaded, or the
            model has no token embeddings.
    """

    __name__ = "emscore"
    bounds = (-0.5, 1.0)

    @passes_on(EncoderOptions)
    def __init__(
        self,
        backbone: EncoderSource = "ViT-B-32",
        pretrained: str | None = None,
        *,
        idf_captions: Sequence[str] | str | Path | None = None,
        prefix: str | None = None,
        **encoder: Any,
    ) -> None:
        captions = _read_captions(idf_captions)
        super().__init__(backbone, pretrained, prefix=prefix, w=1.0, **encoder)
        self.encoder = cast(Any, self.backbone.encoder)
        if not getattr(self.encoder, "has_tokens", False):
            raise ValueError(
                f"{self.backbone.signature} gives no token embeddings: expected open_clip's CLIP, "
                "a student or a dual encoder of pretrained parts"
            )
        self.bounds = (-0.5, 1.0)
        self._idf: Mapping[int, float] = {}
        self._unseen = 1.0
        weighted = "no idf"
        if captions is not None:
            ids = self.encoder.token_ids([self.prefix + text for text in captions])
            lengths = self.encoder.texts.encoder.lengths(ids).tolist()
            rows = zip(ids.tolist(), lengths, strict=True)
            self._idf = token_idf([row[:end] for row, end in rows])
            self._unseen = math.log(len(captions) + 1)
            digest = hashlib.blake2b(
                "\n".join(captions).encode(), digest_size=6
            ).hexdigest()
            weighted = f"idf of {len(captions)} captions {digest}"
        self.signature = f"{self.__name__}[{self.backbone.signature},{weighted},prefix={self.prefix!r}]"

    def _score_rows(
        self,
        texts: list[str],
        images: Sequence[Any],
        references: list[tuple[str, ...]],
    ) -> Sequence[float]:
        captions = self._captions([*texts, *chain(*references)])
        videos = self._videos(images)
        scores = []
        for row, (text, image) in enumerate(zip(texts, images, strict=True)):
            score = self._score(captions[text], videos[id(image)])
            if references:
                near = [
                    self._score(captions[text], captions[other])
                    for other in references[row]
                ]
                score = (score + max(near)) / 2
            scores.append(score)
        return scores

    def _score(self, caption: Embedded, other: Embedded) -> float:
        coarse = float(np.clip(caption.whole @ other.whole, -1, 1))
        fine = greedy_f1(caption.units @ other.units.T, caption.weights, other.weights)
        return (coarse + min(fine, 1.0)) / 2

    def _captions(self, texts: Sequence[str]) -> dict[str, Embedded]:
        distinct = list(dict.fromkeys(texts))
        prefixed = [self.prefix + text for text in distinct]
        wholes = self.backbone.embed_texts(prefixed).astype(np.float64)
        pairs = zip(distinct, wholes, strict=True)
        embedded = {}
        encoded = self.encoder.encode_tokens(prefixed)
        for (text, whole), (ids, tokens) in zip(pairs, encoded, strict=True):
            weights = np.array(
                [self._idf.get(token, self._unseen) for token in ids.tolist()]
            )
            if weights.sum() <= 0:
                raise RewardError(
                    f"reward {self.__name__!r}: all tokens of {text!r:.80} have the weight 0"
                )
            units = tokens.numpy().astype(np.float64)
            embedded[text] = Embedded(whole, units, weights / weights.sum())
        return embedded

    def _videos(self, images: Sequence[Any]) -> dict[int, Embedded]:
        """``id`` of each video object -> its embeddings. Frames are cached one by one,
        as images are.
        """
        videos = {id(image): frames_of(image) for image in images}
        rows = self.backbone.embed_images([*chain(*videos.values())])
        embedded = {}
        start = 0
        for key, frames in videos.items():
            vectors = rows[start : start + len(frames)]
            start += len(frames)
            whole = mean_embedding(vectors).astype(np.float64)
            embedded[key] = Embedded(
                whole, vectors, np.full(len(vectors), 1 / len(vectors))
            )
        return embedded


class RefEmScore(EmScore):
    """EMScore with references: (Score(caption, video) + best Score(caption, reference)) / 2.

    A reference is matched as a video is, with its weighted tokens in place of frames.
    Arguments as for ``EmScore``. Source: Shi et al., CVPR 2022, section 3; PAC-S's
    equation for video.
    """

    __name__ = "ref_emscore"
    columns = frozenset({"image", "references"})


def _read_captions(source: Sequence[str] | str | Path | None) -> list[str] | None:
    if source is None:
        return None
    if isinstance(source, str | Path):
        with naming(f"idf_captions: {source}"):
            source = Path(source).read_text(encoding="utf-8-sig").splitlines()
    captions = [text.strip() for text in source if text.strip()]
    if not captions:
        raise ValueError("idf_captions has no caption: expected at least one")
    return captions
