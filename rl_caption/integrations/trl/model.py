"""Vision-language captioners for TRL, and repairs of what TRL and Transformers do
wrong.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import translate
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from rewards.model_files import load_complete
from rl_caption.captioners.config import SavedModelConfig
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.loading import load_captioner
from rl_caption.captioners.vlm_families import as_messages, with_images
from rl_caption.data.base import Row
from rl_caption.runtime.errors import ConfigError


def load_vlm(config: SavedModelConfig) -> HuggingFaceCaptioner:
    """Load ``model.init``.

    Raises:
        ConfigError: TRL cannot train the model, or would train it wrongly.
        CaptionerError: it cannot be loaded.
    """
    captioner: Any = load_captioner(
        str(config.init),
        prompt=config.prompt,
        dtype=config.dtype,
        processor_kwargs=config.processor_kwargs,
    )
    name = f"model.init {config.init!r}"
    if not getattr(getattr(captioner, "family", None), "chat_prompts", False):
        raise ConfigError(
            f"{name} is no decoder-only model with a chat template, such as Qwen2-VL, "
            "or it is a PaliGemma, whose captions TRL would let see the tokens after "
            "them (token_type_ids): use rl-caption scst"
        )
    if not hasattr(captioner.policy.config, "image_token_id"):
        raise ConfigError(
            f"{name} has no image_token_id, which TRL keeps from being sampled"
        )
    if captioner.tokenizer.pad_token_id is None:
        captioner.tokenizer.pad_token = captioner.tokenizer.eos_token
    return captioner


def adapters(captioner: HuggingFaceCaptioner, config: SavedModelConfig) -> Any:
    """Freeze the parts in ``model.freeze``; return the ``peft.LoraConfig`` of
    ``model.lora``, or None.

    Modules of frozen parts have no adapters.
    """
    if config.lora is None:
        captioner.adapt(config.freeze, None, checkpointed=False)
        return None
    from peft import LoraConfig

    frozen = captioner.family.frozen if config.freeze is None else config.freeze
    return LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]
        lora_dropout=config.lora.dropout,
        target_modules=config.lora.target_modules or captioner.family.lora_targets,
        exclude_modules="|".join(map(translate, frozen)) or None,
    )


def load_weights(model: Any, checkpoint: str | Path, *_: Any) -> None:
    """Load all weights of a checkpoint.

    Many models, Qwen2-VL among them, have other parameter names in files than in
    memory. Transformers' trainer does not translate the names, and leaves out their
    weights without an error.
    """
    if (Path(checkpoint) / "zero_to_fp32.py").is_file():
        from deepspeed.utils.zero_to_fp32 import (
            get_fp32_state_dict_from_zero_checkpoint,
        )

        weights = get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint), lazy_mode=False
        )
        model.load_state_dict(weights, strict=False)  # with LoRA, adapters alone
        return
    model.load_state_dict(
        load_complete(type(model), str(checkpoint), dtype=model.dtype).state_dict()
    )


def skip_epochs(trainer: Any, epochs: int) -> None:
    """Let ``trainer`` order the images as if it had already gone through them ``epochs`` times.

    TRL's sampler draws the order of each epoch from a generator that no checkpoint
    holds, so a resumed run would begin with the order of the first epoch.
    """
    make = trainer._get_train_sampler

    def sampler(dataset: Any = None) -> Any:
        """The trainer's own sampler, after ``epochs`` epochs."""
        order = make(dataset)
        for _ in range(epochs):
            next(iter(order))  # draws the order of an epoch
        return order

    trainer._get_train_sampler = sampler


def suppression(
    token_ids: Collection[int], vocabulary: int, vllm: str | None
) -> dict[str, Any]:
    """Generation arguments that keep tokens from being sampled, for Transformers or for
    vLLM's mode ``vllm``.

    vLLM has no ``suppress_tokens``. In mode ``colocate`` the tokens get a bias of -100
    nats. A server gets JSON, whose keys are text, so it gets the list of allowed ids.
    """
    if vllm is None:
        return {"suppress_tokens": list(token_ids)}
    if vllm == "colocate":
        return {"logit_bias": dict.fromkeys(token_ids, -100.0)}
    return {
        "allowed_token_ids": [i for i in range(vocabulary) if i not in {*token_ids}]
    }


def collapse_runs(token_ids: Sequence[int], token: int) -> list[int]:
    """Replace each run of ``token`` in ``token_ids`` by a single one."""
    ids = list(token_ids)
    return [t for i, t in enumerate(ids) if t != token or i == 0 or ids[i - 1] != token]


def check_vllm_prompt(captioner: HuggingFaceCaptioner, row: Row) -> None:
    """Raise ``ConfigError`` where the processor writes an image as more than a run of
    one token.

    vLLM would expand the image token of this prompt, such as SmolVLM's, once more.
    """
    ids = captioner.preprocess([row])["input_ids"][0].tolist()
    asked = as_messages(captioner.prompt, row.get("prompt"))
    messages = with_images(asked, [Image.new("RGB", (1, 1))])
    text = captioner.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    expected = captioner.tokenizer(text, add_special_tokens=False)["input_ids"]
    collapsed_ids = collapse_runs(ids, captioner.policy.config.image_token_id)
    if collapsed_ids[-len(expected) :] != expected:
        raise ConfigError(
            f"trl.use_vllm: the prompts of a {captioner.family.name!r} have more than "
            "one kind of token for an image, which vLLM would expand again; leave it "
            "out"
        )


@contextmanager
def vllm_in_float32() -> Iterator[None]:
    """Context in which TRL makes a vLLM that computes in float32; otherwise TRL takes
    bfloat16 for float32 weights.
    """
    from trl.generation import vllm_generation

    if not hasattr(vllm_generation, "LLM"):
        yield  # TRL says itself that vLLM is not installed
        return
    llm_class = vllm_generation.LLM
    vllm_generation.LLM = partial(llm_class, dtype="float32")
    try:
        yield
    finally:
        vllm_generation.LLM = llm_class


def prompt_once(trainer: Any, image_token: int) -> None:
    """Give a colocated vLLM prompts with one image token for each image.

    TRL passes ids with expanded image tokens, and vLLM would expand each of these
    again.
    """
    generate = trainer.vllm_generation.generate

    def generate_collapsed(prompts: Any, images: Any, **options: Any) -> Any:
        """TRL's ``generate`` with collapsed prompts."""
        prompts = [collapse_runs(ids, image_token) for ids in prompts]
        return generate(prompts=prompts, images=images, **options)

    trainer.vllm_generation.generate = generate_collapsed
