"""SBA: how well a language model writes a caption again from its pooled text feature in
a dual encoder (docs/papers.md).

Source: Yanuka, Alper, Averbuch-Elor and Giryes, "ICC: Quantifying Image Caption
Concreteness for Multimodal Dataset Curation", Findings of ACL 2024, section 2: the
semantic bottleneck autoencoder. What the paper leaves open (length limit, what is
trained on) follows its released code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from rewards.base import Reward, as_texts, checked_scores
from rewards.clip.backbone import load_frozen_encoder
from rewards.devices import Precision, chunks, default_device
from rewards.frozen_model import FrozenModel, load_frozen
from rewards.model_files import fingerprint, load_weights, read_config, save_model
from rewards.options import Count, check_fields, check_values
from rewards.registry import build

MODEL_TYPE = "semantic_bottleneck"
Ending = Literal["newline", "eos"]


@dataclass(frozen=True)
class BottleneckConfig:
    """Shape of a bottleneck, and the frozen models on both sides of it.

    Args:
        width: width of the dual encoder's text feature.
        hidden: width of the language model's embeddings.
        ending: ``newline``: a caption is preceded by a space and followed by a line
            break, as in the released code; ``eos``: it is followed by the language
            model's EOS, for a language model that was trained on captions.
        encoder: architecture, hub id or folder of the dual encoder, as for ``clipscore``.
        pretrained: tag or checkpoint file of the dual encoder, if ``encoder`` is an architecture.
        language_model: folder or hub name of a causal language model.
        precision: precision of both models.
        encoder_fingerprint: expected ``FrozenEncoder.fingerprint``; empty for no check.
        language_model_fingerprint: expected ``FrozenModel.weights``; empty for no check.
    """

    width: Annotated[int, Field(ge=1, le=2**16)]
    hidden: Annotated[int, Field(ge=1, le=2**16)]
    ending: Ending = "newline"
    encoder: str = ""
    pretrained: str | None = None
    language_model: str = ""
    precision: Precision = "fp32"
    encoder_fingerprint: str = ""
    language_model_fingerprint: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


class Bottleneck(nn.Module):
    """A linear layer from text features [B, D], not normalised, to soft tokens [B, 1, H]."""

    def __init__(self, config: BottleneckConfig) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(config.width, config.hidden)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [B, D] to soft tokens [B, 1, H]."""
        return self.linear(features)[:, None]

    def save_pretrained(self, folder: Path) -> None:
        """Write ``model.safetensors`` and ``config.json``; the frozen models are only
        named in it, not copied.
        """
        save_model(
            self.state_dict(), {"model_type": MODEL_TYPE, **asdict(self.config)}, folder
        )

    @staticmethod
    def from_pretrained(path: str | Path) -> Bottleneck:
        """Load a folder that ``save_pretrained`` wrote. Raises as ``read_config`` and
        ``load_weights``.
        """
        config = read_config(BottleneckConfig, Path(path), MODEL_TYPE)
        return load_weights(Bottleneck(config), Path(path))


class CaptionWriter:
    """A frozen causal language model that writes a caption after BOS and a soft token.

    Raises:
        ValueError: its tokenizer has neither BOS nor EOS, or cannot write the ending.
    """

    def __init__(self, frozen: FrozenModel, ending: Ending = "newline") -> None:
        from transformers import GenerationConfig

        tokenizer = frozen.tokenizer
        ids = [tokenizer.bos_token_id, tokenizer.eos_token_id]
        ids = [token_id for token_id in ids if token_id is not None]
        self.frozen = frozen
        self.ending = ending
        self._bos = ids[0]
        self._ends = [ids[-1]]
        self.room = frozen.longest - 2  # of BOS and the soft token
        # Without the model's own sampling settings.
        frozen.network.generation_config = GenerationConfig()
        self._embed: Any = frozen.network.get_input_embeddings()
        if ending == "newline":
            last = tokenizer(" \n", add_special_tokens=False)["input_ids"][-1:]
            if "\n" not in tokenizer.decode(last):
                raise ValueError(
                    "the language model's tokenizer has no newline: set ending to eos"
                )
            self._ends += last

    def token_ids(self, captions: Sequence[str]) -> list[list[int]]:
        """Ids that the model should write: the caption with single spaces and the
        ending, cut to its positions.
        """
        texts = [" ".join(caption.split()) for caption in captions]
        end = self._ends[:1]
        if self.ending == "newline":
            texts = [f" {text} \n" for text in texts]
            end = []
        token_ids = self.frozen.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [[*ids, *end][: self.room] for ids in token_ids]

    def _prefix(self, soft: Tensor) -> Tensor:
        """Embeddings [B, 2, H] of BOS and the soft tokens, in the model's precision."""
        start = self._embed(torch.full((len(soft), 1), self._bos, device=soft.device))
        return torch.cat([start, soft.to(start.dtype)], dim=1)

    def negative_log_likelihood(
        self, soft: Tensor, ids: Tensor, mask: Tensor
    ) -> Tensor:
        """Teacher forcing: sum of -ln p (nats) over the tokens ``ids`` [B, L] where
        ``mask`` [B, L] is true.
        """
        inputs = torch.cat([self._prefix(soft), self._embed(ids)], dim=1)
        attended = nn.functional.pad(mask.long(), (2, 0), value=1)
        output = self.frozen.network(inputs_embeds=inputs, attention_mask=attended)
        logits = output.logits[:, 1:-1].float().mT
        losses = nn.functional.cross_entropy(logits, ids, reduction="none")
        return (losses * mask).sum()

    @torch.no_grad()
    def write(
        self, soft: Tensor, num_beams: int, max_new_tokens: int
    ) -> list[list[str]]:
        """Write captions from soft tokens [B, 1, H] by beam search in which no bigram
        occurs twice: B lists of ``num_beams`` captions, cut at a newline.
        """
        from transformers import GenerationConfig

        settings = GenerationConfig(
            num_beams=num_beams,
            num_return_sequences=num_beams,
            do_sample=False,
            no_repeat_ngram_size=2,
            max_new_tokens=min(max_new_tokens, self.room),
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
        )
        prefix = self._prefix(soft)
        attended = torch.ones(prefix.shape[:2], device=prefix.device, dtype=torch.long)
        ids = self.frozen.network.generate(
            inputs_embeds=prefix, attention_mask=attended, generation_config=settings
        )
        texts = self.frozen.tokenizer.batch_decode(ids, skip_special_tokens=True)
        cut = [" ".join(text.lstrip().partition("\n")[0].split()) for text in texts]
        starts = range(0, len(cut), num_beams)
        return [cut[start : start + num_beams] for start in starts]


def edit_similarity(first: str, second: str) -> float:
    """1 - edit distance / length of the longer one, in [0, 1]; 0 where both are empty.

    The distance is the fewest characters to insert, delete or replace to make
    ``second`` of ``first`` (Levenshtein 1966).
    """
    column = np.array([ord(character) for character in second], np.int64)
    steps = np.arange(len(column) + 1)
    row = steps.copy()  # from the empty beginning of ``first``
    for count, character in enumerate(first, start=1):
        best = np.minimum(row[1:] + 1, row[:-1] + (column != ord(character)))
        best = np.concatenate([[count], best])
        row = np.minimum.accumulate(best - steps) + steps  # insertions
    longest = max(len(first), len(second))
    return 1 - int(row[-1]) / longest if longest else 0.0


class EditSimilarity:
    """Similarity of a caption to the most similar of its references by
    ``edit_similarity``, in [0, 1].
    """

    __name__ = "edit_distance"
    columns = frozenset({"references"})
    bounds = (0.0, 1.0)
    signature = "edit distance of characters"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``references`` (N lists of captions)."""
        return [
            max(edit_similarity(source, text) for source in sources)
            for text, sources in zip(completions, columns["references"], strict=True)
        ]


def load_similarity(name: str, kwargs: Mapping[str, Any], owner: str) -> Reward:
    """Build the reward that compares captions with their rewritten texts:
    ``edit_distance``, or a reward whose only column is ``references``.

    Raises:
        ValueError: it cannot be built, or does not compare with references; the message
            names ``owner``.
    """
    if name == "edit_distance":
        return EditSimilarity()
    similarity: Reward = build(name, **kwargs)
    if similarity.columns != {"references"}:
        raise ValueError(
            f"{owner}: similarity {name!r} does not compare with references: expected "
            "edit_distance or a reward such as bertscore"
        )
    return similarity


def best_similarities(
    similarity: Reward, captions: Sequence[str], written: Sequence[Sequence[str]]
) -> list[float]:
    """Similarity of each of B captions to the most similar of its rewritten texts in
    ``written``, clipped to [0, 1].
    """
    references: list[list[str]] = []
    for caption, texts in zip(captions, written, strict=True):
        references += [[caption]] * len(texts)
    scores = similarity(None, list(chain.from_iterable(written)), references=references)
    # Checked before they are clipped, which makes 0 of NaN.
    values = iter(checked_scores(similarity, scores, len(references)))
    return [min(1.0, max(0.0, *(next(values) for _ in texts))) for texts in written]


class SemanticBottleneck:
    """SBA: similarity of a caption to what a language model writes from its text
    feature, in [0, 1]; no image.

    The similarity is 1 - (character edit distance) / (length of the longer text), of
    the best beam. The pooled feature of a dual encoder keeps what can be seen, so
    concrete words are written again and others are not. An empty caption scores 0.

    ``similarity`` compares by a reward with references instead, such as ``bertscore``
    (table 4 of the paper), clipped to [0, 1].

    Args:
        model: folder that the task ``semantic_bottleneck`` exported; it names the dual
            encoder and the language model.
        encoder: where the same dual encoder is, if not where the folder says.
        language_model: where the same language model is, if not where the folder says.
        num_beams: number of beams; the most similar text counts. 5 in the paper.
        max_new_tokens: length of the longest caption that is written, in tokens.
        similarity: a reward whose references are the caption; ``edit_distance`` is
            ``EditSimilarity``.
        similarity_kwargs: its arguments, such as ``{model: roberta-large}``.
        device: such as ``cuda``; None is the process's current CUDA device if there is
            one, else the CPU.
        batch_size: captions at once, at least 1.

    Raises:
        ValueError: an argument is wrong, or a model cannot be loaded or is not the
            model of the training.
    """

    __name__ = "sba"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, 1.0)

    def __init__(
        self,
        model: str,
        encoder: str | None = None,
        language_model: str | None = None,
        num_beams: int = 5,
        max_new_tokens: int = 64,
        device: str | None = None,
        batch_size: int = 32,
        similarity: str = "edit_distance",
        similarity_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._similarity = load_similarity(similarity, similarity_kwargs or {}, "sba")
        check_values(
            Count,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
        )
        bottleneck = Bottleneck.from_pretrained(model)
        config = bottleneck.config
        device = default_device(device)
        self._encoder = load_frozen_encoder(
            encoder or config.encoder,
            config.pretrained,
            device,
            precision=config.precision,
            batch_size=batch_size,
        )
        frozen = load_frozen(
            "AutoModelForCausalLM",
            language_model or config.language_model,
            "sba",
            device,
            config.precision,
        )
        for what, actual, expected in (
            ("dual encoder", self._encoder.fingerprint, config.encoder_fingerprint),
            ("language model", frozen.weights, config.language_model_fingerprint),
        ):
            if expected not in ("", actual):
                raise ValueError(
                    f"sba: the {what} has the fingerprint {actual}, but {model!r} was trained with "
                    f"one of fingerprint {expected}: name that one"
                )
        weights = f"{fingerprint(bottleneck.state_dict())[:12]},{frozen.weights},{self._encoder.signature}"
        compared = self._similarity.signature
        self.signature = (
            f"SBA[{weights},beams{num_beams},{max_new_tokens} tokens,{compared}]"
        )
        self._bottleneck = bottleneck.to(device).eval().requires_grad_(False)
        self._writer = CaptionWriter(frozen, config.ending)
        self.num_beams = num_beams
        self.max_new_tokens = max_new_tokens
        self.device = device
        self.batch_size = batch_size

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions. ``RewardError`` where a score is not finite."""
        texts = as_texts(completions)
        scores = [0.0] * len(texts)
        written = [row for row, text in enumerate(texts) if text.strip()]
        order = sorted(written, key=lambda row: len(texts[row]))
        what = "captions through the semantic bottleneck"
        for batch in chunks(order, self.batch_size, what):
            captions = [" ".join(texts[row].split()) for row in batch]
            rewritten = self.rewrite([texts[row] for row in batch])
            best = best_similarities(self._similarity, captions, rewritten)
            for row, score in zip(batch, best, strict=True):
                scores[row] = score
        return checked_scores(self, scores, len(texts))

    def rewrite(self, captions: Sequence[str]) -> list[list[str]]:
        """Write B captions again from their text features: B lists of ``num_beams``
        texts, the likeliest first.
        """
        features = self._encoder.encode_texts(captions, normalize=False).to(self.device)
        with torch.no_grad():
            soft = self._bottleneck(features)
        return self._writer.write(soft, self.num_beams, self.max_new_tokens)
