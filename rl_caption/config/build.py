"""Configuration to objects. Behind this file nothing knows about configuration."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from transformers.utils import logging as transformers_logging

from rewards.clip.clipscore import ClipScore
from rewards.clip.encoder import CachedEncoder
from rewards.mixed import MixedReward
from rewards.registry import build as build_term
from rewards.registry import load as load_term
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import tokenize
from rl_caption.captioners.base import Captioner, CaptionerError, Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.config.schema import DataConfig, ModelConfig, RewardConfig, RunConfig, ScstConfig, TrainConfig
from rl_caption.data.base import DataError, DataModule, Row
from rl_caption.data.checks import check_data
from rl_caption.data.formats import build_data as build_data
from rl_caption.errors import ConfigError as ConfigError
from rl_caption.launch import accelerator_kwargs, check_processes
from rl_caption.scst.advantages import needs_greedy
from rl_caption.scst.registry import build_advantage
from rl_caption.training.distributed.engines import engine_of, fsdp_arguments, settle_engine, use_fsdp, wanted_engine
from rl_caption.training.distributed.precision import asked_precision, usable_precision
from rl_caption.training.tracking import announce


def build_accelerator(train: TrainConfig, run: RunConfig) -> Accelerator:
    """Devices and processes, with as many of them as were asked for, seeded.

    Raises:
        LaunchError: another number of processes trains together than was asked for.
        ConfigError: the mixed precision does not run on this device, or the launcher asks for another.
        EngineError: the engine cannot do what ``train`` asks for.
    """
    # A program that trains twice, as with warm_start, may change the precision; the process group stays.
    AcceleratorState._reset_state()
    try:
        asked = asked_precision(train.mixed_precision)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    precision, fsdp = usable_precision(asked), fsdp_arguments(usable_precision(asked))
    accelerator = Accelerator(
        # DeepSpeed gets it in its own configuration (``fill_deepspeed_config``).
        mixed_precision="no" if wanted_engine() == "deepspeed" else precision,
        log_with=run.trackers or None,
        project_dir=run.dir,
        **(accelerator_kwargs() | fsdp),
    )
    use_fsdp(accelerator, fsdp)
    check_processes(accelerator.num_processes, train.num_processes)
    if precision == "fp16" and accelerator.device.type == "cpu":
        raise ConfigError("train.mixed_precision is fp16, which a CPU cannot train in: use no or bf16")
    settle_engine(accelerator, precision, train.grad_clip_value)
    if accelerator.device.type == "cpu":
        # Launchers set OMP_NUM_THREADS=1, which would leave the other cores idle.
        here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
        torch.set_num_threads(train.threads or max((os.cpu_count() or 1) // here, 1))
        # On a CPU the fused attention's backward pass is several times slower in bf16 than products written out.
        torch.backends.cuda.enable_flash_sdp(precision != "bf16")
    set_seed(train.seed)
    quiet_libraries()
    if train.mixed_precision != precision:  # a run that goes on elsewhere may change it
        announce(
            accelerator,
            f"train.mixed_precision {train.mixed_precision} is {precision!r} on this device ({accelerator.device})",
        )
    return accelerator


def quiet_libraries() -> None:
    """Leave the terminal to the run's own log: no progress bar for writing or reading one small file."""
    transformers_logging.disable_progress_bar()
    # Accelerate warns that tied weights are stored once, which is how they are meant to be stored.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    # DeepSpeed, imported by Transformers where it is installed, says that a CPU is a CPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def checked_splits(
    config: DataConfig, data: DataModule, splits: Sequence[str], accelerator: Accelerator, cache: Path
) -> dict[str, Sequence[Row]]:
    """Check the splits together (``data.on_bad``) and return their usable rows; ``cache`` remembers good images.

    Raises:
        DataError: unusable images or captions, with counts and the first offenders.
    """
    with accelerator.main_process_first():  # the others then find the verdicts in the cache
        try:
            report = check_data(
                data,
                splits,
                on_bad=config.on_bad,
                check_pixels=config.check_images,
                check_images=config.features_root is None,
                cache=cache,
            )
        except DataError as error:
            hint = "\nOr leave them out: data.on_bad skip" if config.on_bad == "fail" else ""
            raise DataError(f"{error}{hint}") from error
    announce(accelerator, str(report))
    filtered = report.filtered(data)
    return {split: filtered.split(split) for split in splits}


def references_of(rows: Sequence[Row]) -> list[list[str]]:
    """The references of every row, without opening an image."""
    return [row["references"] for row in rows]


def build_captioner(config: ModelConfig, references: Sequence[list[str]], cache_mb: int) -> Captioner:
    """Load ``model.init``, or make a captioner with random weights whose words are those of ``references``.

    Raises:
        CaptionerError: ``model.init`` is not a saved captioner, or cannot be trained as asked.
        ConfigError: the shape or the vocabulary is not usable, or an option belongs to the other kind of captioner.
    """
    cache_bytes = cache_mb * 2**20
    if config.init is None:
        _refuse_pretrained_options(config)
        try:
            return TransformerCaptioner.from_scratch(
                references, config.min_count, config.tokenizer, cache_bytes=cache_bytes, **config.kwargs
            )
        except ValueError as error:
            raise ConfigError(f"model: {error}") from error
    for key in ("kwargs", "tokenizer"):
        if getattr(config, key):
            raise ConfigError(f"model.{key} is set beside model.init {config.init!r}, which has its own: leave one out")
    if config.dtype != "float32" and config.lora is None:
        raise ConfigError(
            f"model.dtype is {config.dtype!r}: weights that are trained are float32; set model.lora, or compute in "
            "less with train.mixed_precision"
        )
    try:
        captioner = load_captioner(config.init, cache_bytes, config.prompt, config.dtype)
    except CaptionerError as error:
        raise CaptionerError(f"model.init: {error}") from error
    if isinstance(captioner, TransformerCaptioner):
        _refuse_pretrained_options(replace(config, name="transformer"))
    else:
        captioner.adapt(config.freeze, asdict(config.lora) if config.lora else None, config.gradient_checkpointing)
    return captioner


def _refuse_pretrained_options(config: ModelConfig) -> None:
    if config.name == "huggingface":
        raise ConfigError(
            "model.init is not set: name a model on the hub, such as Salesforce/blip-image-captioning-base"
        )
    default = ModelConfig()
    for key in ("prompt", "freeze", "lora", "gradient_checkpointing", "dtype"):
        if getattr(config, key) != getattr(default, key):
            raise ConfigError(f"model.{key} is for a model of Transformers (model.name huggingface), not for this one")


def check_positions(captioner: Captioner, key: str, tokens: int, rows: Iterable[Row] = ()) -> None:
    """Check that the captioner has positions for captions of ``tokens`` tokens, the value of configuration ``key``.

    Raises:
        ConfigError: it has fewer, with its own prompt or with that of one of ``rows``.
        DataError: one of ``rows`` has a prompt that the captioner does not read.
    """
    rooms = [("the prompt", captioner.max_tokens)]
    rooms += ((f"the prompt of image {row['image_id']!r}", captioner.room(row)) for row in rows if "prompt" in row)
    for what, longest in rooms:
        if longest is not None and tokens > longest:
            raise ConfigError(
                f"{key} is {tokens}: the captioner has positions for {longest} tokens (max_positions, less {what})"
            )


def build_decoding(config: ScstConfig) -> Decoding:
    """How a self-critical step decodes: the samples, and the greedy caption where the baseline needs it."""
    rollout, train = config.rollout, config.train
    return Decoding(
        num_samples=rollout.num_samples,
        with_greedy=needs_greedy(build_advantage(train.advantage, train.advantage_kwargs)),
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
    )


def check_cuda_graph(accelerator: Accelerator) -> None:
    """Look whether decoding can be recorded at all.

    Raises:
        ConfigError: there is no GPU, or the engine moves the weights.
    """
    engine = engine_of(accelerator)
    if accelerator.device.type != "cuda":
        raise ConfigError(f"rollout.cuda_graph is on: it needs a CUDA device, this run is on {accelerator.device}")
    if engine in ("zero3", "fsdp2"):
        raise ConfigError(f"rollout.cuda_graph is on: {engine} gathers the weights anew at every step; turn it off")


def build_reward(config: RewardConfig, references: Sequence[list[str]], folder: Path | None = None) -> MixedReward:
    """The mixture of rewards.

    Where ``reward.df`` is null, document frequencies are counted from ``references`` (one document an image) and
    written to ``folder/document_frequencies.npz``, if there is a folder (of a run: then CLIP-based terms also log what
    their caches of embeddings take). CLIP-based terms whose arguments ask for the same network and cache share one.

    Raises:
        ConfigError: no terms, an unknown reward or argument, weights that are not there, or document frequencies made
            with another EOS setting.
    """
    if not config.terms:
        raise ConfigError("reward.terms is empty: name at least one reward, such as cider")
    terms = {}
    encoders: dict[str, CachedEncoder] = {}
    for name, term in config.terms.items():
        arguments = dict(term.kwargs)
        if name == "cider" and term.target is None:
            arguments = {"df": config.df or _frequencies(config, references, folder), "eos": config.eos} | arguments
        try:
            wanted = _encoder_wanted(term.target or name, arguments)
            if wanted is not None and wanted in encoders:
                arguments["backbone"] = encoders[wanted]
            reward = build_term(term.target or name, **arguments)
        except (ValueError, OSError) as error:
            raise ConfigError(f"reward.terms.{name}: {error}") from error
        if wanted is not None and isinstance(reward, ClipScore):
            encoders[wanted] = reward.backbone
        terms[name] = (reward, term.weight)
    if folder is not None:
        _plan_caches([reward for reward, _ in terms.values()], references)
    try:
        return MixedReward(terms, config.normalize)
    except ValueError as error:
        raise ConfigError(f"reward: {error}") from error


def _plan_caches(rewards: Sequence[Any], references: Sequence[list[str]]) -> None:
    """Let CLIP-based rewards say what the embeddings of the training data take; a shared encoder says it once."""
    scores = [reward for reward in rewards if isinstance(reward, ClipScore)]
    texts = len({text for own in references for text in own}) if scores else 0
    seen: set[int] = set()
    for score in scores:
        score.plan_caches(0 if id(score.backbone) in seen else len(references), texts)
        seen.add(id(score.backbone))


def _encoder_wanted(name: str, arguments: dict[str, Any]) -> str | None:
    """What a CLIP-based reward loads and caches, defaults filled in; None for other rewards."""
    kind = load_term(name)
    if not (isinstance(kind, type) and issubclass(kind, ClipScore)):
        return None
    given = {key: parameter.default for key, parameter in inspect.signature(kind).parameters.items()} | arguments
    keys = ("backbone", "pretrained", "tuned_from", "mlp_deltas", "device", "precision", "batch_size", "truncate")
    return repr([given.get(key) for key in (*keys, "context_length", "cache_dir", "cache_images")])


def _frequencies(config: RewardConfig, references: Sequence[list[str]], folder: Path | None) -> DocumentFrequencies:
    tokens = ([tokenize(caption) for caption in captions] for captions in references)
    frequencies = DocumentFrequencies.from_references(tokens, eos=config.eos)
    if folder is not None:
        frequencies.save(folder / "document_frequencies.npz")
    return frequencies


def usable_split(data: DataModule, split: str) -> str:
    """``split`` itself.

    Raises:
        DataError: the dataset has no such split.
    """
    if split not in data.splits:
        raise DataError(f"split {split!r} is not in the data: it has {list(data.splits)}")
    return split
