"""Models of captions alone: a language model, the semantic bottleneck between a dual encoder and
one, a regression.

Source of the last two: Yanuka et al., "ICC", Findings of ACL 2024 (docs/papers.md). Losses, which come
first, are sums over the tokens, or the captions, of a batch, so that the gradient does not depend
on how the global batch is split.
"""

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from accelerate import Accelerator
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rewards.clip.bottleneck import Bottleneck, BottleneckConfig, CaptionWriter
from rewards.frozen_model import load_frozen, most_tokens
from rewards.model_files import transformers_options
from rl_caption.config.reward_models import (
    CaptionTrainConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rl_caption.data.base import Row
from rl_caption.reward_models.batch import Captions, PairBatch, caption_index
from rl_caption.reward_models.teacher import Teacher, check_teacher, load_teacher
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
from rl_caption.training.loop import Metric, train
from rl_caption.training.run import Run

TOKENIZER = "tokenizer"
"""Folder in the run's folder: the tokenizer that was trained on the captions; a resumed run reads
it.
"""
VOCABULARY = 8192
"""Default size of such a tokenizer."""
LIKELIHOOD = "nats a token, up to 0"
"""Range of the metric of models that write captions."""
Ids = Sequence[Sequence[int]]
Encode = Callable[[Sequence[str]], Ids]
"""From captions to the token ids that the model reads or learns to write."""


def negative_log_likelihood(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Minus ln p of the tokens ``ids`` [B, L] after the first, where ``mask`` [B, L] is true,
    summed, in nats.
    """
    ids, mask = inputs["ids"], inputs["mask"]
    logits = model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1].float()
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * mask[:, 1:]).sum()


def squared_error(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Sum over B captions ``ids``, ``mask`` [B, L] of (logit - ``target``)²; the model has one
    label.
    """
    logits = model(
        input_ids=inputs["ids"], attention_mask=inputs["mask"].long()
    ).logits[:, 0]
    return ((logits.float() - inputs["target"]) ** 2).sum()


class TextLoss(nn.Module):
    """A model whose output is its loss: a scalar, a function of the model and a batch's inputs."""

    def __init__(
        self, model: Any, loss: Callable[[Any, dict[str, Tensor]], Tensor]
    ) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """The loss, summed over tokens or captions."""
        return self.loss(self.model, inputs)


class TextModelConfig(Section):
    """The model to train, of captions alone."""

    kwargs: dict = {}
    """Shape of a model with random weights, options of its configuration in Transformers; and
    ``tokenizer``, or ``vocab_size`` of one that is made from the captions.
    """
    init: str | None = None
    """Weights to start from: a folder, or a name on the hub."""


class BottleneckModelConfig(Section):
    """The linear layer to train, between two frozen models."""

    kwargs: dict = {}
    """Options of a new layer, ``{soft_tokens, ending}``."""
    init: str | None = None
    """Weights to start from: the export of such a run."""
    language_model: str | None = None
    """Folder or hub name of the frozen causal language model (Transformers)."""

    @model_validator(mode="after")
    def _check_bottleneck_model(self) -> Self:
        options = asdict(BottleneckConfig(1, 1)).items()
        others = {
            key: value for key, value in options if key not in ("soft_tokens", "ending")
        }
        with naming("model.kwargs", (TypeError, ValueError)):
            BottleneckConfig(**others, **self.kwargs)
        return self


class TextConfig(RewardModelConfig):
    """A model of captions alone."""

    needs = frozenset({"text"})
    unpaired = frozenset({"captions", "caption_targets"})


class LanguageModelConfig(TextConfig):
    """``reward_model --task language_model``: a causal language model of captions."""

    task: Literal["language_model"] = "language_model"
    model: TextModelConfig = Field(default_factory=TextModelConfig)
    """The model to train."""
    train: CaptionTrainConfig = Field(default_factory=CaptionTrainConfig)

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        return train_text_model(
            run, self, _language_model(run, self.model), self.train.captions
        )


class SemanticBottleneckConfig(TextConfig):
    """``reward_model --task semantic_bottleneck``: between a dual encoder and a language model."""

    task: Literal["semantic_bottleneck"] = "semantic_bottleneck"
    model: BottleneckModelConfig = Field(default_factory=BottleneckModelConfig)
    """The model to train."""
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    """The frozen dual encoder whose text features are read."""
    train: CaptionTrainConfig = Field(default_factory=CaptionTrainConfig)

    @model_validator(mode="after")
    def _check_semantic_bottleneck(self) -> Self:
        check_teacher(self.teacher, f"{self.task} reads the text features of a")
        if self.model.language_model is None:
            raise ConfigError(
                "model.language_model is not set: a folder or hub name of a causal language model, "
                "such as gpt2"
            )
        return self

    def folders(self) -> dict[str, str | None]:
        """See ``RewardModelConfig.folders``."""
        return {"teacher.name": self.teacher.folder}

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        return train_text_model(run, self, _bottleneck(run, self), self.train.captions)


class TextRegressionConfig(TextConfig):
    """``reward_model --task text_regression``: a number of each caption, as ICC."""

    task: Literal["text_regression"] = "text_regression"
    model: TextModelConfig = Field(default_factory=TextModelConfig)
    """The model to train."""
    unpaired = frozenset({"caption_targets"})

    @model_validator(mode="after")
    def _check_text_regression(self) -> Self:
        if self.data.target is None and self.data.format != "caption_targets":
            raise ConfigError(
                f"data.format is {self.data.format!r}: text_regression learns from caption_targets"
            )
        return self

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        return train_text_model(run, self, _regression(run, self.model))


@dataclass(frozen=True)
class TextModel:
    """What is trained, and what it reads."""

    network: nn.Module
    """From the ``inputs`` of a batch to its loss, a scalar: the sum over tokens, or captions."""
    encode: Encode
    export: Callable[[Path], None]
    metrics: Callable[[float], dict[str, float]]
    """From the mean loss of validation to metrics; the first one chooses the best model, higher is
    better.
    """
    metric_range: str
    starts_trained: bool = False
    target: Callable[[PairBatch], dict[str, Tensor]] = lambda batch: {}
    """Further inputs, by name."""
    signature: str = ""
    counted_from: int | None = 0
    """What the loss is a sum over: tokens from this position on; None: captions."""
    padding: int = 0
    """Id of the padding token, by which some models find the end of a caption."""
    vocabulary: Mapping[str, int] | None = None
    """Token -> id, where the model learns embeddings of tokens; a resumed run must have the same.
    """


def train_text_model(
    run: Run, config: RewardModelConfig, model: TextModel, captions: Captions = "random"
) -> TrainState:
    """Train a model of captions; ``captions`` is which reference a step learns."""
    collate = TextCollate(model, captions, config.train.seed)
    (metric, *_) = model.metrics(1.0)
    network = run.restore(
        model.network,
        model.signature,
        model.vocabulary,
        decays=lambda name, parameter: parameter.ndim > 1,
    )
    return train(
        run,
        SummedLossTask(run.accelerator, network, model.target, config.task),
        collate,
        partial(_validate, run, model, collate),
        model.export,
        Metric(metric, model.metric_range, model.signature),
        model.starts_trained,
    )


@dataclass
class TextCollate:
    """Collate function: from (row, step) pairs to ``ids`` and ``mask`` [B, L], and ``target`` [B]
    where rows have one.

    Args:
        model: tokenises captions, and says what its loss is a sum over.
        captions: which reference of a row a step learns.
        seed: of that choice.
    """

    model: TextModel
    captions: Captions = "random"
    seed: int = 0

    def __call__(self, items: Sequence[tuple[Row, int]]) -> PairBatch:
        texts = []
        for row, step in items:
            texts.append(
                row["references"][caption_index(row, self.captions, self.seed, step)]
            )
        return self.batch([row for row, _ in items], texts)

    def batch(self, rows: Sequence[Row], captions: Sequence[str]) -> PairBatch:
        """A batch of B captions of B rows."""
        model = self.model
        ids = [torch.tensor(tokens) for tokens in model.encode(captions)]
        lengths = torch.tensor([len(tokens) for tokens in ids])
        inputs = {
            "ids": pad_sequence(ids, batch_first=True, padding_value=model.padding)
        }
        inputs["mask"] = torch.arange(inputs["ids"].shape[1]) < lengths[:, None]
        if all("target" in row for row in rows):
            inputs["target"] = torch.tensor([row["target"] for row in rows])
        start = model.counted_from
        count = torch.ones(len(rows)) if start is None else lengths - start
        return PairBatch(rows, inputs, list(captions), {"count": count.float()})


@dataclass
class SummedLossTask:
    """One training step on the mean over the global batch of a loss that the model gives as a sum
    over a micro-batch.

    Args:
        accelerator: owns devices, processes and the backward pass.
        model: as prepared for (distributed) training; from a batch's inputs to the sum of its
            losses.
        target: from a batch to further inputs of the model, by name.
        name: for log lines.
    """

    accelerator: Accelerator
    model: nn.Module
    target: Callable[[PairBatch], dict[str, Tensor]]
    name: str
    samples: list[dict[str, Any]] = field(default_factory=list)

    def training_step(
        self, batches: Sequence[PairBatch], step: int
    ) -> Iterator[Averages]:
        """Leave the gradient of one optimizer step in the parameters. ``batches`` are this
        process's micro-batches.
        """
        log = Averages()
        counts = torch.stack([batch.targets["count"].sum() for batch in batches])
        count = global_count(self.accelerator, counts.sum())

        def loss_of(batch: PairBatch) -> Tensor:
            return self.model(batch.inputs | self.target(batch)) / count

        passes = [partial(loss_of, batch) for batch in batches]
        loss = backward_all(self.accelerator, self.model, passes)
        log.add_sum("loss/total", loss, 1 / self.accelerator.num_processes)
        yield log


def _validate(
    run: Run,
    model: TextModel,
    collate: TextCollate,
    step: int,
    logged: Mapping[str, float],
) -> Validation:
    """Validate a model by its mean loss over all captions of the validation split."""
    accelerator, size = run.accelerator, run.eval_batch_size
    pairs = [(row, caption) for row in run.val_rows for caption in row["references"]]
    share = pairs[accelerator.process_index :: accelerator.num_processes]
    sums = torch.zeros(2, dtype=torch.float32, device=accelerator.device)
    with torch.no_grad(), dropout_off(model.network), autocast(accelerator):
        for start in range(0, len(share), size):
            rows, captions = zip(*share[start : start + size], strict=True)
            batch = collate.batch(rows, captions).to(accelerator.device)
            sums[0] += model.network(batch.inputs | model.target(batch)).float()
            sums[1] += batch.targets["count"].sum()
    total, count = accelerator.reduce(sums, reduction="sum").tolist()
    return Validation(model.metrics(total / count))


def _token_metrics(loss: float) -> dict[str, float]:
    return {"val/token_logprob": -loss}


def _language_model(run: Run, config: TextModelConfig) -> TextModel:
    """A causal language model: from a folder, or GPT-2 with random weights."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    tokenizer, kwargs = _tokenizer(run, config, "<|endoftext|>", "<|endoftext|>")
    end = tokenizer.eos_token_id
    start = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if config.init is not None:
        model = _load_pretrained(AutoModelForCausalLM, config.init)
    else:
        ids = {"vocab_size": len(tokenizer), "bos_token_id": start, "eos_token_id": end}
        model = GPT2LMHeadModel(_shape(GPT2Config, kwargs, ids))
    longest = most_tokens(model.config, tokenizer)

    def encode(captions: Sequence[str]) -> Ids:
        token_ids = tokenizer(list(captions), add_special_tokens=False)["input_ids"]
        return [[start, *tokens, end][:longest] for tokens in token_ids]

    return TextModel(
        TextLoss(model, negative_log_likelihood),
        encode,
        partial(_save_pretrained, model, tokenizer),
        _token_metrics,
        LIKELIHOOD,
        config.init is not None,
        counted_from=1,
        vocabulary=tokenizer.get_vocab(),
    )


def _bottleneck(run: Run, config: SemanticBottleneckConfig) -> TextModel:
    """A linear layer between the pooled text feature of ``teacher`` and ``model.language_model``,
    both frozen.
    """
    accelerator, options, section = run.accelerator, config.model, config.teacher
    teacher: Teacher = load_teacher(accelerator, section, config.data, ("text",))
    with naming("semantic_bottleneck"):
        with accelerator.main_process_first():
            frozen = load_frozen(
                "AutoModelForCausalLM",
                str(options.language_model),
                "model.language_model",
                str(accelerator.device),
                section.precision,
            )
        fingerprints = {
            "encoder_fingerprint": teacher.backbone.fingerprint,
            "language_model_fingerprint": frozen.weights,
        }
        names: dict[str, Any] = {
            "encoder": str(section.name),
            "pretrained": section.pretrained,
            "language_model": options.language_model,
            "precision": section.precision,
            **fingerprints,
        }
        if options.init is not None:
            bottleneck = Bottleneck.from_pretrained(options.init)
            for name, value in fingerprints.items():
                if getattr(bottleneck.config, name) != value:
                    raise ConfigError(
                        f"model.init was trained with another {name} than {value}: set the models "
                        f"it had"
                    )
            # The same models, perhaps in other folders.
            bottleneck.config = replace(bottleneck.config, **names)
        else:
            hidden = int(frozen.network.get_input_embeddings().weight.shape[1])
            shape = BottleneckConfig(teacher.width, hidden, **options.kwargs, **names)
            bottleneck = Bottleneck(shape)
        writer = CaptionWriter(
            frozen, bottleneck.config.ending, bottleneck.config.soft_tokens
        )
    teacher.prepare(run.train_rows, config.train.captions, section.cache_mb * 2**20)

    def loss(bottleneck: Bottleneck, inputs: dict[str, Tensor]) -> Tensor:
        """Minus ln p of ``ids`` [B, L] after the soft tokens of the features ``text`` [B, D]."""
        soft = bottleneck(inputs["text"])
        return writer.negative_log_likelihood(soft, inputs["ids"], inputs["mask"])

    return TextModel(
        TextLoss(bottleneck, loss),
        writer.token_ids,
        bottleneck.save_pretrained,
        _token_metrics,
        LIKELIHOOD,
        options.init is not None,
        teacher,
        f"semantic_bottleneck[{teacher.backbone.signature},{frozen.weights}]",
    )


def _regression(run: Run, config: TextModelConfig) -> TextModel:
    """A text encoder with a head of one unit, in the format of the released ICC; ``icc`` loads what
    is exported.
    """
    from transformers import (
        AutoModelForSequenceClassification,
        RobertaConfig,
        RobertaForSequenceClassification,
    )

    tokenizer, kwargs = _tokenizer(run, config, "<s>", "</s>", "<pad>")
    padding = tokenizer.pad_token_id
    if padding is None:
        raise ConfigError(
            f"the tokenizer of {config.init or kwargs} has no padding token, which icc needs"
        )
    head = {"num_labels": 1, "problem_type": "regression"}
    if config.init is not None:
        model = _load_pretrained(
            AutoModelForSequenceClassification, config.init, **head
        )
        model.config.pad_token_id = (
            padding  # which many decoders' config.json does not say
        )
    else:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {"vocab_size": len(tokenizer)} | {
            name: getattr(tokenizer, name) for name in names
        }
        model = RobertaForSequenceClassification(
            _shape(RobertaConfig, kwargs, ids | head)
        )
    longest = most_tokens(model.config, tokenizer)
    targets = torch.tensor([row["target"] for row in run.val_rows], dtype=torch.float64)
    spread = float(targets.var(correction=0))
    if not spread > 0:
        raise ConfigError(
            f"all {len(targets)} validation captions have the target {targets[0]:g}: there is no R²"
        )

    def encode(captions: Sequence[str]) -> Ids:
        return tokenizer(list(captions), truncation=True, max_length=longest)[
            "input_ids"
        ]

    return TextModel(
        TextLoss(model, squared_error),
        encode,
        partial(_save_pretrained, model, tokenizer),
        lambda loss: {"val/r_squared": 1 - loss / spread, "val/mse": loss},
        "up to 1",
        counted_from=None,
        padding=padding,
        vocabulary=tokenizer.get_vocab(),
    )


def _load_pretrained(head: Any, name: str, **options: Any) -> Any:
    with naming(f"model.init is {name!r}, which cannot be loaded"):
        options |= transformers_options(name)
        return head.from_pretrained(
            name, use_safetensors=True, dtype="float32", **options
        )


def _shape(
    config_class: Any, kwargs: Mapping[str, Any], fixed: Mapping[str, Any]
) -> Any:
    """A configuration of Transformers from ``model.kwargs``, which may not set the keys of
    ``fixed``; Transformers itself takes unknown ones without a word.
    """
    from huggingface_hub.errors import StrictDataclassError

    options = set(inspect.signature(config_class).parameters) - set(fixed)
    unknown = sorted(set(kwargs) - options)
    if unknown:
        raise ConfigError(
            f"model.kwargs has {unknown}: expected tokenizer, vocab_size or those of "
            f"{config_class.__name__}"
        )
    with naming("model.kwargs", (ValueError, TypeError, StrictDataclassError)):
        return config_class(**kwargs, **fixed)


def _save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a plain folder of Transformers."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(
    run: Run, config: TextModelConfig, bos: str, eos: str, pad: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """The tokenizer of ``model.init``, of ``model.kwargs.tokenizer``, or a byte-level BPE of the
    training captions.

    Returns it with ``model.kwargs`` less what is its own: ``tokenizer`` and ``vocab_size``.
    """
    from transformers import AutoTokenizer

    kwargs, folder = dict(config.kwargs), run.folder / TOKENIZER
    size = kwargs.pop("vocab_size", VOCABULARY)
    source = config.init or kwargs.pop("tokenizer", None)
    is_new = run.checkpoint is None or not folder.is_dir()
    with run.accelerator.main_process_first():
        if source is None and run.accelerator.is_main_process and is_new:
            shutil.rmtree(folder, ignore_errors=True)
            captions = [
                caption for row in run.train_rows for caption in row["references"]
            ]
            caption_tokenizer(captions, size, bos, eos, pad).save_pretrained(folder)
        source = source or str(folder)
        with naming(f"the tokenizer {source!r} cannot be loaded"):
            tokenizer: Any = AutoTokenizer.from_pretrained(
                source, trust_remote_code=False
            )
    return tokenizer, kwargs


def caption_tokenizer(
    captions: Sequence[str], size: int, bos: str, eos: str, pad: str | None = None
) -> Any:
    """Byte-level BPE of at most ``size`` tokens, 256 bytes among them. With ``pad``, it adds BOS
    and EOS to texts.
    """
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    special = list(dict.fromkeys(token for token in (bos, pad, eos) if token))
    tokenizer.train_from_iterator(
        captions, size, min_frequency=0, show_progress=False, special_tokens=special
    )
    names = {"bos_token": bos, "eos_token": eos, "unk_token": eos}
    if pad is not None:
        tokens = [(token, tokenizer.token_to_id(token)) for token in (bos, eos)]
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A {eos}", special_tokens=tokens
        )
        names["pad_token"] = pad
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **names)
