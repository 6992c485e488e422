"""Models of captions alone: a language model, the semantic bottleneck between a dual
encoder and a language model, and a regression.

Source of the last two: Yanuka et al., "ICC", Findings of ACL 2024 (docs/papers.md).
Losses are sums over the tokens, or the captions, of a batch, so that the gradient does
not depend on how the global batch is split.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rewards.clip.bottleneck import Bottleneck, BottleneckConfig, CaptionWriter, Ending
from rewards.frozen_model import load_frozen, most_tokens
from rewards.model_files import transformers_options
from rl_caption.config.reward_models import (
    CaptionTrainConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rl_caption.data.base import Row
from rl_caption.reward_models.batch import PairBatch, caption_index
from rl_caption.reward_models.teacher import Teacher, load_teacher
from rl_caption.runtime.engines import (
    Averages,
    autocast,
    backward_all,
    dropout_off,
    global_count,
)
from rl_caption.runtime.errors import ConfigError, naming
from rl_caption.runtime.options import Section
from rl_caption.runtime.types import TrainState, Validation
from rl_caption.training.loop import train
from rl_caption.training.run import Run

END = "<|endoftext|>"
"""Token before and after a caption of a language model."""


def negative_log_likelihood(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Sum of -ln p, in nats, of the tokens ``ids`` [B, L] after the first where
    ``mask`` [B, L] is true; a scalar.
    """
    ids = inputs["ids"]
    mask = inputs["mask"]
    logits = model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1].float()
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * mask[:, 1:]).sum()


def squared_error(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Sum of (logit - ``target`` [B])² over B captions ``ids``, ``mask`` [B, L]; a
    scalar. The model has one label.
    """
    outputs = model(input_ids=inputs["ids"], attention_mask=inputs["mask"].long())
    return ((outputs.logits[:, 0].float() - inputs["target"]) ** 2).sum()


class TextLoss(nn.Module):
    """A module whose output is a loss: a scalar function of a model and a batch's
    inputs.
    """

    def __init__(
        self, model: Any, loss: Callable[[Any, dict[str, Tensor]], Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """The loss, summed over tokens or captions."""
        return self.loss(self.model, inputs)


class LanguageModelShape(Section):
    """The language model to train: a GPT-2 with random weights."""

    vocab_size: Annotated[int, Field(ge=257, le=2**20)] = 8192
    """Size of its byte-level vocabulary, which is learned from the training captions."""
    kwargs: dict = {}
    """Options of Transformers' ``GPT2Config``."""


class BottleneckModelConfig(Section):
    """The linear layer to train, between two frozen models."""

    language_model: str | None = None
    """Folder or hub name of the frozen causal language model (Transformers)."""
    ending: Ending = "newline"
    """Token with which the language model ends a caption: ``newline`` (released code),
    or ``eos`` for a language model that was trained on captions.
    """


class RegressionModelConfig(Section):
    """The text encoder to fine-tune."""

    init: str | None = None
    """Folder or hub name of a text encoder, such as ``distilroberta-base``."""


class TextConfig(RewardModelConfig):
    """A model of captions alone."""

    train: CaptionTrainConfig = CaptionTrainConfig()
    needs = frozenset({"text"})


class LanguageModelConfig(TextConfig):
    """``reward_model --task language_model``: a causal language model of captions."""

    task: Literal["language_model"] = "language_model"
    model: LanguageModelShape = LanguageModelShape()
    """The model to train."""

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        from huggingface_hub.errors import StrictDataclassError
        from transformers import GPT2Config, GPT2LMHeadModel

        kwargs = self.model.kwargs
        captions = [caption for row in run.train_rows for caption in row["references"]]
        tokenizer = caption_tokenizer(captions, self.model.vocab_size)
        end = tokenizer.eos_token_id
        ids = {"vocab_size": len(tokenizer), "bos_token_id": end, "eos_token_id": end}
        # Transformers itself accepts unknown options silently.
        unknown = sorted(kwargs.keys() - GPT2Config().to_dict().keys())
        if unknown:
            raise ConfigError(f"model.kwargs has {unknown}: expected GPT2Config's")
        with naming("model.kwargs", (ValueError, TypeError, StrictDataclassError)):
            model = GPT2LMHeadModel(GPT2Config(**kwargs, **ids))
        longest = most_tokens(model.config, tokenizer)

        def encode(captions: Sequence[str]) -> list[list[int]]:
            """Token ids of captions between two end tokens, cut where the model ends."""
            token_ids = tokenizer(list(captions), add_special_tokens=False)["input_ids"]
            return [[end, *tokens, end][:longest] for tokens in token_ids]

        task = TextTask(run, self, encode, first=1)
        return task.fit(
            TextLoss(model, negative_log_likelihood),
            partial(_save_pretrained, model, tokenizer),
            vocabulary=tokenizer.get_vocab(),
        )


def caption_tokenizer(captions: Sequence[str], size: int) -> Any:
    """Byte-level BPE of at most ``size`` tokens, 256 bytes among them: a pure function."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        captions, size, min_frequency=0, show_progress=False, special_tokens=[END]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token=END,
        eos_token=END,
        unk_token=END,
    )


class SemanticBottleneckConfig(TextConfig):
    """``reward_model --task semantic_bottleneck``: a linear layer between the pooled
    text feature of a dual encoder and a language model.
    """

    task: Literal["semantic_bottleneck"] = "semantic_bottleneck"
    model: BottleneckModelConfig = BottleneckModelConfig()
    """The model to train."""
    teacher: TeacherConfig
    """The frozen dual encoder whose text features are read."""

    @model_validator(mode="after")
    def _check_semantic_bottleneck(self) -> Self:
        if self.model.language_model is None:
            raise ConfigError(
                "model.language_model is not set: a folder or hub name of a causal language model, "
                "such as gpt2"
            )
        return self

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        section = self.teacher
        name = str(self.model.language_model)
        teacher = load_teacher(run.accelerator, section, self.data, ("text",))
        with naming("semantic_bottleneck"), run.accelerator.main_process_first():
            frozen = load_frozen(
                "AutoModelForCausalLM",
                name,
                "model.language_model",
                str(run.accelerator.device),
                section.precision,
            )
            writer = CaptionWriter(frozen, self.model.ending)
        hidden = frozen.network.get_input_embeddings().weight.shape[1]
        shape = BottleneckConfig(
            width=teacher.width,
            hidden=int(hidden),
            ending=self.model.ending,
            encoder=str(section.name),
            pretrained=section.pretrained,
            language_model=name,
            precision=section.precision,
            encoder_fingerprint=teacher.backbone.fingerprint,
            language_model_fingerprint=frozen.weights,
        )
        bottleneck = Bottleneck(shape)
        budget = section.cache_mb * 2**20
        teacher.prepare(run.train_rows, self.train.captions, budget)

        def loss(bottleneck: Bottleneck, inputs: dict[str, Tensor]) -> Tensor:
            """Minus ln p of ``ids`` [B, L] after the soft token of the features ``text`` [B, D]."""
            soft = bottleneck(inputs["text"])
            return writer.negative_log_likelihood(soft, inputs["ids"], inputs["mask"])

        return TextTask(run, self, writer.token_ids, teacher).fit(
            TextLoss(bottleneck, loss),
            bottleneck.save_pretrained,
            f"semantic_bottleneck[{teacher.backbone.signature},{frozen.weights}]",
        )


class TextRegressionConfig(TextConfig):
    """``reward_model --task text_regression``: a text encoder with a head of one unit,
    which gives each caption a number, such as its concreteness (ICC, in the format of
    the released model).
    """

    task: Literal["text_regression"] = "text_regression"
    model: RegressionModelConfig = RegressionModelConfig()
    """The model to train."""

    @model_validator(mode="after")
    def _check_text_regression(self) -> Self:
        if self.model.init is None:
            raise ConfigError("model.init is not set: such as distilroberta-base")
        if self.data.target is None and self.data.format != "caption_targets":
            raise ConfigError(
                f"data.format is {self.data.format!r}: text_regression learns from caption_targets"
            )
        return self

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        name = str(self.model.init)
        with (
            run.accelerator.main_process_first(),
            naming(f"model.init is {name!r}, which cannot be loaded"),
        ):
            options = transformers_options(name)
            tokenizer: Any = AutoTokenizer.from_pretrained(name, **options)
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                name,
                use_safetensors=True,
                dtype="float32",
                num_labels=1,
                problem_type="regression",
                **options,
            )
        # Decoders often have no padding token, and the head reads the state before the padding.
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        padding = tokenizer.pad_token_id
        model.config.pad_token_id = padding
        longest = most_tokens(model.config, tokenizer)
        encode = partial(tokenizer, truncation=True, max_length=longest)
        targets = [row["target"] for row in run.val_rows]
        spread = float(np.var(targets))
        if not spread > 0:
            raise ConfigError(
                f"all {len(targets)} validation captions have the target {targets[0]:g}: there is "
                "no R²"
            )
        task = TextTask(
            run,
            self,
            lambda captions: encode(list(captions))["input_ids"],
            padding=padding,
            spread=spread,
        )
        return task.fit(
            TextLoss(model, squared_error),
            partial(_save_pretrained, model, tokenizer),
            vocabulary=tokenizer.get_vocab(),
        )


def _save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a plain folder of Transformers."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class TextTask:
    """Training on the mean over the global batch of a loss that the network gives as a
    sum over the tokens, or the captions, of a micro-batch.

    Args:
        encode: maps captions to the token ids that the model reads or learns to write.
        teacher: gives the embeddings ``text``, a further input of the network.
        first: position of the first token that the loss counts.
        padding: id of the padding token, by which some models find the end of a caption.
        spread: variance of the validation targets, for a loss that is a sum over
            captions; None: captions have no targets.
    """

    run: Run
    config: TextConfig
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]]
    teacher: Teacher | None = None
    first: int = 0
    padding: int = 0
    spread: float | None = None
    name: str = field(init=False)
    network: nn.Module = field(init=False)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def fit(
        self,
        network: TextLoss,
        export: Callable[[Path], None],
        signature: str = "",
        vocabulary: Mapping[str, int] | None = None,
    ) -> TrainState:
        """Train ``network``. A resumed run must have the same ``vocabulary``, token -> id."""
        starts_trained = self.spread is not None
        metric = "val/r_squared" if starts_trained else "val/token_logprob"
        self.name = self.config.task
        self.network = network
        self.run.restore(
            network,
            signature,
            vocabulary,
            decays=lambda name, parameter: parameter.ndim > 1,
        )
        return train(
            self.run,
            self,
            self.collate,
            self.validate,
            export,
            metric,
            signature,
            starts_trained,
        )

    def collate(self, items: Sequence[tuple[Row, int]]) -> PairBatch:
        """Make a batch of (row, step) pairs."""
        options = self.config.train
        texts = []
        for row, step in items:
            index = caption_index(row, options.captions, options.seed, step)
            texts.append(row["references"][index])
        return self.batch([row for row, _ in items], texts)

    def batch(self, rows: Sequence[Row], captions: Sequence[str]) -> PairBatch:
        """A batch of B captions of B rows: ``ids`` and ``mask`` [B, L], and ``target``
        [B] where rows have one.
        """
        ids = [torch.tensor(tokens) for tokens in self.encode(captions)]
        padded = pad_sequence(ids, batch_first=True, padding_value=self.padding)
        lengths = torch.tensor([len(tokens) for tokens in ids])
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        inputs = {"ids": padded, "mask": mask}
        if self.spread is not None:
            inputs["target"] = torch.tensor([row["target"] for row in rows])
        return PairBatch(rows, inputs, list(captions))

    def _loss(
        self, network: nn.Module, batch: PairBatch, count: Tensor | int = 1
    ) -> Tensor:
        inputs = dict(batch.inputs)
        if self.teacher is not None:
            inputs |= self.teacher(batch)
        return network(inputs) / count

    def _count(self, batch: PairBatch) -> Tensor:
        """Number of tokens, or captions, that the loss is a sum over."""
        mask = batch.inputs["mask"]
        counted = mask[:, self.first :] if self.spread is None else mask[:, 0]
        return counted.sum().float()

    def training_step(
        self, batches: Sequence[PairBatch], step: int
    ) -> Iterator[Averages]:
        """Leave the gradient of one optimizer step in the parameters. ``batches`` are
        this process's micro-batches.
        """
        run = self.run
        log = Averages()
        counts = torch.stack([self._count(batch) for batch in batches])
        count = global_count(run.accelerator, counts.sum())
        passes = [partial(self._loss, run.model, batch, count) for batch in batches]
        loss = backward_all(run.accelerator, run.model, passes)
        log.add_sum("loss/total", loss, 1 / run.accelerator.num_processes)
        yield log

    def validate(self, step: int, logged: Mapping[str, float]) -> Validation:
        """Metrics of all captions of the validation split: ``val/token_logprob`` (mean
        ln p of a token, nats), or ``val/r_squared`` and ``val/mse``.
        """
        run = self.run
        size = run.eval.batch_size
        accelerator = run.accelerator
        network = self.network
        pairs = [
            (row, caption) for row in run.val_rows for caption in row["references"]
        ]
        share = pairs[accelerator.process_index :: accelerator.num_processes]
        sums = torch.zeros(2, dtype=torch.float32, device=accelerator.device)
        with torch.no_grad(), dropout_off(network), autocast(accelerator):
            for start in range(0, len(share), size):
                rows, captions = zip(*share[start : start + size], strict=True)
                batch = self.batch(rows, captions).to(accelerator.device)
                sums[0] += self._loss(network, batch).float()
                sums[1] += self._count(batch)
        total, count = accelerator.reduce(sums, reduction="sum").tolist()
        loss = total / count
        if self.spread is None:
            return Validation({"val/token_logprob": -loss})
        return Validation({"val/r_squared": 1 - loss / self.spread, "val/mse": loss})
