"""Build objects from a configuration. They take plain parameters, and know nothing of
the configuration.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.utils import logging as transformers_logging

from rewards.base import naming
from rewards.build import RewardBuilder
from rewards.mixed import MixedReward
from rewards.text.tokenize import TOKENIZER
from rl_caption.captioners.base import Captioner, CaptionerError
from rl_caption.captioners.config import (
    Decoding,
    ModelConfig,
    NewModelConfig,
    SavedModelConfig,
)
from rl_caption.captioners.loading import load_captioner, new_captioner
from rl_caption.config.schema import (
    DataConfig,
    RewardConfig,
    RolloutConfig,
)
from rl_caption.data.base import Row, Splits
from rl_caption.data.checks import check_data
from rl_caption.data.formats import build_data as build_data
from rl_caption.runtime.engines import print_main
from rl_caption.runtime.errors import ConfigError as ConfigError
from rl_caption.runtime.errors import config_errors
from rl_caption.scst.advantages import AdvantageFn, needs_greedy


def quiet_libraries() -> None:
    """Leave the terminal to the run's own log: no progress bar for writing or reading
    one small file.
    """
    transformers_logging.disable_progress_bar()
    # Accelerate warns that tied weights are stored once, which is how they are meant to be stored.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)


def checked_splits(
    config: DataConfig,
    data: Splits,
    splits: Sequence[str],
    accelerator: Accelerator,
    cache: Path,
    needs: Collection[str] = ("image", "text"),
    scored: bool = True,
) -> dict[str, Sequence[Row]]:
    """Check the splits as ``data.on_bad`` says, and return their usable rows.

    ``cache`` is a file that remembers which images are good; ``needs`` is what every
    row must have (``check_data``); ``scored`` says whether captions are compared by
    their words.
    """
    with (
        accelerator.main_process_first()
    ):  # the others then find the verdicts in the cache
        report = check_data(
            data,
            splits,
            config.on_bad,
            check_pixels=config.check_images,
            check_images=config.features_root is None,
            cache=cache,
            needs=needs,
            tokenizer=config.tokenizer if scored else None,
        )
    print_main(accelerator, str(report))
    filtered = report.good_rows_of(data)
    return {split: filtered[split] for split in splits}


def references_of(rows: Sequence[Row]) -> list[list[str]]:
    """The references of every row, without opening an image."""
    return [row["references"] for row in rows]


def build_captioner(
    config: ModelConfig,
    references: Sequence[list[str]],
    cache_mb: int,
    tokenizer: str = TOKENIZER,
) -> Captioner:
    """Load ``model.init``, or make a captioner with random weights and a vocabulary
    from ``references``.

    ``tokenizer`` is ``data.tokenizer``.

    Raises:
        CaptionerError: ``model.init`` is not a saved captioner, or cannot be trained as asked.
        ConfigError: the shape or the vocabulary is not usable, or an option belongs to
            the other kind of captioner.
    """
    cache_bytes = cache_mb * 2**20
    if isinstance(config, NewModelConfig):
        if config.target is not None:
            return new_captioner(config.target, references, config.kwargs)
        from rl_caption.captioners.transformer import TransformerCaptioner

        with config_errors("model"):
            return TransformerCaptioner.from_scratch(
                references, config.min_count, cache_bytes, tokenizer, **config.kwargs
            )
    assert isinstance(config, SavedModelConfig), "the only other one"
    with naming("model.init", (CaptionerError,), CaptionerError):
        captioner = load_captioner(
            str(config.init),
            cache_bytes,
            config.prompt,
            config.dtype,
            config.target,
            config.processor_kwargs,
        )
    if hasattr(captioner, "adapt"):  # models of Transformers have it
        lora = config.lora.model_dump() if config.lora else None
        captioner.adapt(config.freeze, lora, config.gradient_checkpointing)
    split_by = getattr(captioner, "split_by", tokenizer)  # of one from scratch
    if split_by != tokenizer:
        raise ConfigError(
            f"model.init {config.init!r} has a vocabulary of words by {split_by!r}, data.tokenizer "
            f"is {tokenizer!r}: set data.tokenizer to {split_by}, or train from scratch"
        )
    return captioner


def check_positions(
    captioner: Captioner, key: str, tokens: int, rows: Iterable[Row] = ()
) -> None:
    """Check that the captioner has positions for captions of ``tokens`` tokens, the
    value of configuration ``key``.

    Raises ``ConfigError`` where fewer remain after its own prompt or a row's prompt.
    """
    rooms = [captioner.max_tokens]
    rooms += [captioner.max_tokens_of(row) for row in rows if "prompt" in row]
    for room in rooms:
        if room is not None and tokens > room:
            raise ConfigError(
                f"{key} is {tokens}: the captioner has positions for {room} tokens "
                "(max_positions, less the prompt)"
            )


def build_decoding(rollout: RolloutConfig, advantage: AdvantageFn) -> Decoding:
    """Decoding of a self-critical step: the samples, and the greedy caption where the
    baseline needs it.
    """
    if rollout.beam_search:
        width = rollout.num_samples
        return Decoding(
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=rollout.max_new_tokens,
        )
    return Decoding(
        num_samples=rollout.num_samples,
        with_greedy=needs_greedy(advantage),
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
    )


def build_reward(
    config: RewardConfig,
    references: Sequence[list[str]],
    folder: Path | None = None,
    tokenizer: str = TOKENIZER,
) -> MixedReward:
    """Build the mixture of rewards. Raises ``ConfigError`` where a term cannot be made.

    Where ``reward.df`` is null, document frequencies are counted from ``references``
    (one document an image). CLIP-based terms whose arguments ask for the same network
    and cache share one encoder.

    Args:
        references: captions of the training images, a list for each image.
        folder: the run's folder, where the document frequencies are written.
        tokenizer: ``data.tokenizer``, for terms whose arguments do not name another.
    """
    builder = RewardBuilder(
        references, tokenizer, config.eos, config.df or None, ("cider", "diversity")
    )
    terms: dict[str, tuple[Any, float]] = {}
    for name, term in config.terms.items():
        with config_errors(f"reward.terms.{name}"):
            reward = builder.build(term.target or name, term.kwargs)
        terms[name] = (reward, term.weight)
    if folder is not None and (config.eos, tokenizer) in builder.counted:
        builder.count(config.eos).save(folder / "document_frequencies.npz")
    with config_errors("reward"):
        return MixedReward(terms, config.normalize, tokenizer)
