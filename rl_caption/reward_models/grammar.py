"""The task ``grammar``: a head over a text encoder learns to tell references from forms that rules have broken.

Source: Cho et al., "Fine-grained Image Captioning with CLIP Reward", Findings of NAACL 2022, where words are repeated,
removed, inserted, swapped and shuffled at random. How many of them is our choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from rewards.clip.grammar_head import MODEL_TYPE, GrammarModel
from rewards.clip.grammar_head import GrammarConfig as HeadConfig
from rewards.clip.pretrained import open_blocks
from rewards.model_files import has_model_type
from rl_caption.config.reward_models import CaptionTrainConfig, RewardModelConfig
from rl_caption.data.base import Row
from rl_caption.data.loader import row_generator
from rl_caption.reward_models.batch import Captions, PairBatch, Texts, caption_index, plain_form
from rl_caption.reward_models.encoders import TrainedTowers, check_shape
from rl_caption.reward_models.losses import Embeddings
from rl_caption.reward_models.task import EmbeddingTask
from rl_caption.reward_models.validation import embed_all
from rl_caption.runtime.engines import autocast, dropout_off
from rl_caption.runtime.errors import ConfigError, naming
from rl_caption.runtime.options import Range
from rl_caption.runtime.types import Validation
from rl_caption.training.fit import Recipe
from rl_caption.training.loop import NonFiniteError
from rl_caption.training.setup import Context

METRIC = "val/grammar_accuracy"
Kind: TypeAlias = Literal["repeat", "remove", "insert", "swap", "shuffle"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_TRIES = 10
_LONGEST = 3


@dataclass
class GrammarEncoderConfig:
    """The text encoder below a grammar head.

    Args:
        encoder: ``transformers:NAME``, ``open_clip:ARCHITECTURE/TAG``, or ``package.module:Class``.
        kwargs: options of that class. For a decoder language model (``transformers:NAME``): ``{bidirectional_blocks:
            N}`` lets every token attend to all tokens of the caption in the last N blocks.
        train_blocks: number of blocks to train, the last, also of an encoder from ``init``; 0 freezes the encoder, null
            trains all of it.
    """

    encoder: str | None = None
    kwargs: dict = field(default_factory=dict)
    train_blocks: Annotated[int, Range(min=0, max=1024)] | None = 0


@dataclass
class GrammarModelConfig:
    """The model to train: a head on a text encoder.

    Args:
        kwargs: ``{hidden, kernel, dropout, context_length}`` of a new head.
        text: the pretrained text encoder below the head, unless ``init`` is set.
        init: an L-CLIP or its text tower, below a new head; or a trained head.
    """

    kwargs: dict = field(default_factory=dict)
    text: GrammarEncoderConfig = field(default_factory=GrammarEncoderConfig)
    init: str | None = None

    def __post_init__(self) -> None:
        if self.init is not None and self.text.kwargs:
            raise ConfigError(
                "model.text.kwargs is set, but model.text.encoder is not: leave it out"
            )
        check_shape(self.kwargs, HeadConfig, "a grammar head", text="", text_kwargs={})


@dataclass
class GrammarConfig(RewardModelConfig):
    """``reward_model --task grammar``: a head on a text encoder, for the reward ``grammar``. Further arguments:

    Args:
        model: the model to train.
    """

    task: Literal["grammar"] = "grammar"
    model: GrammarModelConfig = field(default_factory=GrammarModelConfig)
    train: CaptionTrainConfig = field(default_factory=CaptionTrainConfig)

    needs = frozenset({"text"})
    unpaired = frozenset({"captions"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model.init is None) == (self.model.text.encoder is None):
            raise ConfigError(
                "a grammar head needs one text encoder: set either model.init (an L-CLIP, its text tower, or a head) "
                "or model.text.encoder"
            )

    def folders(self) -> dict[str, str | None]:
        """See ``RewardModelConfig.folders``."""
        return {"model.init": self.model.init}

    def recipe(self, context: Context) -> Recipe:
        """See ``RewardModelConfig.recipe``."""
        accelerator, train = context.accelerator, self.train
        with accelerator.main_process_first():  # which downloads, where that is needed
            model = grammar_model(self.model)
        tokens = Texts(model.text_encoder, model.context_length)
        corpus = Corpus.of([*context.train_rows, *context.val_rows])
        network, init = TrainedTowers({"text": model}), self.model.init
        return Recipe(
            network,
            lambda prepared: EmbeddingTask(accelerator, prepared, grammar_loss, name=self.task),
            GrammarCollate(tokens, corpus, train.captions, train.seed),
            grammar_validator(
                accelerator, network, context.val_rows, tokens, corpus, self.eval.batch_size
            ),
            model.save_pretrained,
            METRIC,
            "0 to 1",
            validate_first=init is not None and has_model_type(init, MODEL_TYPE),
            decays=lambda _, parameter: parameter.ndim > 1,
        )


def grammar_model(model: GrammarModelConfig) -> GrammarModel:
    """The model of a configuration. Its head is trained, and the last ``text.train_blocks`` blocks of its encoder.

    Raises:
        ConfigError: the encoder or ``init`` cannot be loaded, ``kwargs`` are not those of a head, or there are fewer
            blocks than ``text.train_blocks``.
    """
    with naming("model", (TypeError, ValueError, OSError)):
        if model.init is None:
            built = GrammarModel(
                HeadConfig(str(model.text.encoder), model.text.kwargs, **model.kwargs)
            )
        elif has_model_type(model.init, MODEL_TYPE):
            if model.kwargs:
                raise ConfigError(
                    "model.kwargs and model.init are both set, but init is a head with a shape: leave kwargs out"
                )
            built = GrammarModel.from_pretrained(model.init)
        else:
            built = GrammarModel.over_student(model.init, **model.kwargs)
    built.requires_grad_(True)
    with naming(f"model.text.train_blocks is {model.text.train_blocks}"):
        open_blocks(built.text_encoder, model.text.train_blocks)
    return built


def grammar_loss(outputs: Embeddings, targets: Embeddings) -> tuple[Tensor, dict[str, Tensor]]:
    """Binary cross-entropy of B references (label 1) and B negatives (0), mean over all 2B, in nats (an ``Objective``).

    ``outputs`` has the logits z of ``text`` and ``text_negative``, [B] each: the mean of ln(1 + e^-z) and ln(1 + e^z).
    """
    references, negatives = outputs["text"], outputs["text_negative"]
    loss = (F.softplus(-references).mean() + F.softplus(negatives).mean()) / 2
    accuracy = ((references > 0).float().mean() + (negatives < 0).float().mean()) / 2
    return loss, {"grammar/accuracy": accuracy}


def corrupt(
    words: Sequence[str], defect: Kind, vocabulary: Sequence[str], draws: np.random.Generator
) -> list[str]:
    """A caption's words, changed at random; the result may be equal to ``words``.

    - ``repeat``: one to three successive words occur two to four times;
    - ``remove``: up to a third of the words, at least one, are removed; a single word stays;
    - ``insert``: one to three words of ``vocabulary`` are inserted;
    - ``swap``: two words change places;
    - ``shuffle``: the words are put in random order.

    ``words`` has one word or more.
    """
    count, changed = len(words), list(words)
    if defect == "repeat":
        length = int(draws.integers(1, min(_LONGEST, count) + 1))
        end = int(draws.integers(length, count + 1))
        return [
            *changed[:end],
            *changed[end - length : end] * int(draws.integers(1, 4)),
            *changed[end:],
        ]
    if defect == "insert":
        for _ in range(int(draws.integers(1, _LONGEST + 1))):
            changed.insert(
                int(draws.integers(len(changed) + 1)),
                vocabulary[int(draws.integers(len(vocabulary)))],
            )
        return changed
    if count == 1:
        return changed
    if defect == "remove":
        gone = draws.choice(
            count, int(draws.integers(1, max(count // 3, 1) + 1)), replace=False
        ).tolist()
        return [word for index, word in enumerate(changed) if index not in gone]
    if defect == "swap":
        one, other = draws.choice(count, 2, replace=False).tolist()
        changed[one], changed[other] = changed[other], changed[one]
        return changed
    return [changed[index] for index in draws.permutation(count).tolist()]


def negative_of(
    caption: str,
    vocabulary: Sequence[str],
    references: Collection[str],
    draws: np.random.Generator,
    kinds: Sequence[Kind] = KINDS,
) -> str | None:
    """A caption in plain form, broken by a random one of ``kinds``; None where ten tries find no negative.

    A text of ``references``, in plain form, is no negative: "a red dog runs" without "red" is as grammatical.
    """
    words = caption.split()
    for _ in range(_TRIES):
        text = " ".join(corrupt(words, kinds[int(draws.integers(len(kinds)))], vocabulary, draws))
        if text != caption and text not in references:
            return text
    return None


@dataclass(frozen=True)
class Corpus:
    """All references in plain form (``references``), and their words, sorted (``vocabulary``)."""

    references: Collection[str]
    vocabulary: Sequence[str]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Corpus:
        """The corpus of the references of rows; ``ConfigError`` where a reference has no word."""
        references = set()
        for row in rows:
            for text in row["references"]:
                plain = plain_form(text)
                if not plain:
                    raise ConfigError(
                        f"image {row['image_id']!r} has the reference {text!r}, without a word: remove it"
                    )
                references.add(plain)
        return cls(references, sorted({word for text in references for word in text.split()}))


@dataclass
class GrammarCollate:
    """Collate function: from (row, step) pairs to a ``PairBatch`` of references ``text`` and their ``text_negative``.

    Caption and negative are pure functions of (seed, step, image id).
    """

    tokens: Texts
    corpus: Corpus
    captions: Captions = "random"
    seed: int = 0

    def __call__(self, items: Sequence[tuple[Row, int]]) -> PairBatch:
        texts = [
            plain_form(row["references"][caption_index(row, self.captions, self.seed, step)])
            for row, step in items
        ]
        negatives = []
        for text, (row, step) in zip(texts, items, strict=True):
            draws = row_generator(self.seed, step, f"grammar/{row['image_id']}")
            negative = negative_of(text, self.corpus.vocabulary, self.corpus.references, draws)
            negatives.append(f"{text} {text}" if negative is None else negative)
        inputs = {"text": self.tokens(texts), "text_negative": self.tokens(negatives)}
        return PairBatch([row for row, _ in items], inputs, texts)


def validation_texts(rows: Sequence[Row], corpus: Corpus) -> dict[str, list[str]]:
    """``references``, in plain form, and one negative of each for every kind; the same at every validation.

    Captions for which a kind finds no negative are left out of it, and so is a kind without any negative.
    """
    references = [plain_form(text) for row in rows for text in row["references"]]
    texts = {"references": references}
    for defect in KINDS:
        negatives = (
            negative_of(
                text,
                corpus.vocabulary,
                corpus.references,
                row_generator(0, index, f"grammar/{defect}"),
                [defect],
            )
            for index, text in enumerate(references)
        )
        texts[defect] = [text for text in negatives if text is not None]
    return {name: column for name, column in texts.items() if column}


def grammar_validator(
    accelerator: Accelerator,
    network: Any,
    rows: Sequence[Row],
    tokens: Texts,
    corpus: Corpus,
    batch_size: int,
) -> Callable[[int, Mapping[str, float]], Validation]:
    """A function of the step that validates the model; called by every process, with equal results in all.

    ``val/grammar_references`` is the fraction of references with a probability above 0.5, ``val/grammar_KIND`` that of
    negatives of a kind with one below, and ``val/grammar_accuracy`` the mean of the first and the mean of the others.
    ``NonFiniteError`` where a logit is not finite.
    """
    texts = validation_texts(rows, corpus)

    def validate(step: int, logged: Mapping[str, float]) -> Validation:
        """Score the split with the network as it is at ``step``."""
        rates = {}
        with torch.no_grad(), dropout_off(network), autocast(accelerator):
            for name, column in texts.items():
                logits = embed_all(accelerator, network, batch_size, "text", tokens, column)
                if not logits.isfinite().all():
                    raise NonFiniteError(
                        f"validation at step {step}: logits of {name} are NaN or infinite"
                    )
                right = logits > 0 if name == "references" else logits < 0
                rates[name] = float(right.float().mean())
        kinds = [rate for name, rate in rates.items() if name != "references"]
        accuracy = (rates["references"] + sum(kinds) / len(kinds)) / 2
        return Validation(
            {METRIC: accuracy} | {f"val/grammar_{name}": rate for name, rate in rates.items()}
        )

    return validate
