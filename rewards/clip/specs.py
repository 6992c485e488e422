"""SPECS: cosine of an image and a long caption under a dual encoder that was trained for specificity.

Source: Chen et al., "Specificity-Enhanced CLIP-Score for Long Image Caption Evaluation" (SPECS), EMNLP 2025, section 3;
its released code for ``scale="shifted"``. Captions go to CLIP's BPE as they are: no prefix, no PTB tokenisation.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rewards.base import (
    Reward,
    RewardError,
    as_texts,
    naming,
    required_column,
    score_captions,
)
from rewards.clip.clipscore import ClipScore, Floats
from rewards.clip.encoder import EncoderOptions, EncoderSource, is_main_process, passes_on
from rewards.options import Count, check_values
from rewards.text.tokenize import TOKENIZER

logger = logging.getLogger(__name__)
Scale = Literal["clipped", "shifted"]


def specs_score(cosines: Floats, scale: Scale = "clipped") -> Floats:
    """Scores in [0, 1] of image-caption cosines [N]: max(cosine, 0) (paper) or (cosine + 1) / 2 (released code)."""
    scores = cosines if scale == "clipped" else (cosines + 1) / 2
    return np.clip(scores, 0.0, 1.0)


class Specs(ClipScore):
    """SPECS: cosine of image and long caption under a specificity-tuned dual encoder; no references.

    Args:
        backbone: folder that ``train_reward_model.py`` exported, or another of ``EncoderOptions``, such as ``ViT-B-32``
            with ``pretrained: spec.pt``.
        pretrained: checkpoint file, with an architecture.
        scale: ``clipped`` at 0 (paper), or ``shifted`` to (cosine + 1) / 2 (released code). None is ``shifted`` for a
            file in the layout of the released weights, whose cosines are often negative, else ``clipped``.
        truncate: cut captions above the encoder's context; False raises and names the row.
        **encoder: the other fields of ``EncoderOptions``.

    Raises:
        ValueError: an argument is wrong, or the weights cannot be found or loaded.
    """

    __name__ = "specs"
    bounds = (0.0, 1.0)

    @passes_on(EncoderOptions)
    def __init__(
        self,
        backbone: EncoderSource,
        pretrained: str | None = None,
        *,
        scale: Scale | None = None,
        truncate: bool = False,
        **encoder: Any,
    ) -> None:
        if scale is not None:
            check_values(Scale, scale=scale)
        super().__init__(backbone, pretrained, prefix="", w=1.0, truncate=truncate, **encoder)
        released = getattr(self.backbone.encoder, "long_layout", False)
        self.scale: Scale = scale or ("shifted" if released else "clipped")
        self.truncate, self.clips = truncate, self.scale == "clipped"
        cut = ",truncate" if truncate else ""
        self.signature = f"{self.__name__}[{self.backbone.signature},{self.scale}{cut}]"
        if released and is_main_process():
            why = f"{self.backbone.signature} has the layout of released weights, whose cosines are often below 0"
            if scale is None:
                logger.info("%s: %s. Scale is 'shifted', (cosine + 1) / 2, as in the released code", self.__name__, why)
            elif self.clips:
                logger.warning(
                    "%s: %s. With scale clipped, all such captions score 0: set scale: shifted", self.__name__, why
                )

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return N scores in [0, 1]. Raises as ``ClipScore``."""
        texts = as_texts(completions)
        if not self.truncate:
            encoder = self.backbone.encoder
            longest = encoder.context_length - 2  # without start and end
            for row, text in enumerate(texts):
                if (tokens := encoder.count_tokens(text) - 2) > longest:
                    raise RewardError(
                        f"reward {self.__name__!r}: caption {row} has {tokens} tokens, its encoder "
                        f"({self.backbone.signature}) reads {longest}: {text!r:.80}. Shorten it, or set truncate: true"
                    )
        return super().__call__(prompts, texts, **columns)

    def _scores(self, cosines: Floats) -> Floats:
        return specs_score(cosines, self.scale)


class LengthRouter:
    """A short-caption score below a number of tokens, a long-caption score from there on.

    The SPECS paper recommends CLIP below 60 tokens and SPECS above. Tokens are those of CLIP's BPE, without start and
    end. Both scores of the default pair are in [0, 1], but they come from two encoders, so a score below the threshold
    does not compare with one above it.

    Args:
        short: a reward, or ``{name, **arguments}`` of one of the registry, for captions of fewer than ``threshold``
            tokens; a mapping without a name is ``clipscore`` with ``w`` 1.
        long: the same for all other captions; without a name it is ``specs``.
        threshold: tokens, at least 1.
        tokenizer: one of ``rewards.text.tokenize.TOKENIZERS``, for those of the two rewards that have an argument
            ``tokenizer`` and do not set it.

    Raises:
        ValueError: the threshold is below 1, or a reward cannot be built.
    """

    __name__ = "length_router"
    columns: frozenset[str]
    bounds: tuple[float, float]

    def __init__(
        self,
        short: Reward | Mapping[str, Any],
        long: Reward | Mapping[str, Any],
        threshold: int = 60,
        tokenizer: str = TOKENIZER,
    ) -> None:
        check_values(Count, threshold=threshold)
        self.threshold = threshold
        first = _built(short, "short", {"name": "clipscore", "w": 1.0}, tokenizer)
        last = _built(long, "long", {"name": "specs"}, tokenizer)
        self.rewards = {"short": first, "long": last}
        self.columns = first.columns | last.columns
        ends = list(zip(first.bounds, last.bounds, strict=True))
        self.bounds = (min(ends[0]), max(ends[1]))
        self.signature = f"{self.__name__}[<{threshold} CLIP tokens: {first.signature}; else: {last.signature}]"

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score N captions, each by the score for its length; columns of N items are split as the captions are.

        Raises:
            RewardError: one of the two failed; the message names it.
        """
        from rewards.clip.preprocessing import count_tokens

        texts = as_texts(completions)
        for name in sorted(self.columns):
            required_column(columns, name, self.__name__, len(texts))
        is_long = [count_tokens(text) >= self.threshold for text in texts]
        scores = [0.0] * len(texts)
        for length, reward in self.rewards.items():
            rows = [row for row, found in enumerate(is_long) if found == (length == "long")]
            if not rows:
                continue
            own = {name: _rows_of(column, rows, len(texts)) for name, column in columns.items()}
            own_prompts = None if prompts is None else [prompts[row] for row in rows]
            first = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
            where = f"{self.__name__}, {length} captions (rows {first})"
            found = score_captions(reward, where, own_prompts, [texts[row] for row in rows], own)
            for row, score in zip(rows, found, strict=True):
                scores[row] = score
        return scores


def _built(given: Reward | Mapping[str, Any], key: str, default: Mapping[str, Any], tokenizer: str) -> Reward:
    if not isinstance(given, Mapping):
        return given
    from rewards.build import RewardBuilder

    arguments = dict(given) if "name" in given else {**default, **given}
    with naming(key):
        return RewardBuilder(tokenizer=tokenizer).build(arguments.pop("name"), arguments)


def _rows_of(column: Any, rows: Sequence[int], count: int) -> Any:
    """The items of ``rows`` of a column of ``count`` items; anything else, such as ``log_metric``, unchanged."""
    is_column = isinstance(column, Sequence) and not isinstance(column, str) and len(column) == count
    return [column[row] for row in rows] if is_column else column
