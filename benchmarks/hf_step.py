"""A self-critical step of pretrained captioners, in their real shapes with random
weights, against two baselines.

    python -m benchmarks.hf_step [--models blip vit_gpt2] [--device cuda] [--precision bf16]
    [--images 50] [--json FILE]

BLIP base at 384 pixels and ViT base with GPT-2 at 224; otherwise the step of
``benchmarks.scst_step``, except that most captions have 20 tokens, as random weights
write them. The baselines are its *generate twice*, with a second forward pass over

- images copied: K copies of each image, all of them encoded;
- states copied: K copies of the encoder's states of each image.

Peak memory is counted as in ``benchmarks.memory``. Images copied do not fit a GPU at 50
images: ``--copied states``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor

from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.memory import MIB, Step, count_peak
from benchmarks.scst_step import (
    Bench,
    Shapes,
    cider_of,
    generate_step,
    lengths_of,
    our_step,
    phase_rows,
    prepare,
    random_rows,
)
from rewards.mixed import MixedReward
from rl_caption.captioners.hf_families import FAMILIES
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.policy import Policy
from rl_caption.runtime.types import CaptionBatch

COPIED = ("images", "states")
TINY = {"images": 2, "samples": 2, "tokens": 5}
"""Sizes of a rehearsal."""
SHAPES = Shapes(images=2)


def blip() -> Any:
    """BLIP base. Its own initialisation, 1e-10, would ignore the image."""
    config = transformers.BlipConfig(
        vision_config={"image_size": 384, "initializer_range": 0.02}
    )
    return transformers.BlipForConditionalGeneration(config)


def vit_gpt2(
    vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None
) -> Any:
    """ViT base and GPT-2, or other sizes."""
    encoder = transformers.ViTConfig(**(vision or {}))
    decoder = transformers.GPT2Config(
        add_cross_attention=True, is_decoder=True, **(text or {})
    )
    pair = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        encoder, decoder
    )
    return transformers.VisionEncoderDecoderModel(pair)


def tiny_vit_gpt2() -> Any:
    """For a rehearsal, at 32 pixels."""
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**size, "intermediate_size": 32, "image_size": 32}
    return vit_gpt2(vision, {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 80})


MODELS: dict[str, tuple[str, Callable[[], Any], int]] = {
    "blip": ("BLIP base, 384 px", blip, 384),
    "vit_gpt2": ("ViT + GPT-2, 224 px", vit_gpt2, 224),
}
"""Name -> label, model, pixels of an image's width."""


class HuggingFaceBench(Bench):
    """``Bench`` of a model of Transformers."""

    @torch.no_grad()
    def encode(self, batch: CaptionBatch) -> None:
        """The image encoder alone."""
        with self.accelerator.autocast():
            self.policy.family.encode(self.policy.model, **batch.inputs, prompt=None)

    def generate(self, batch: CaptionBatch, **options: Any) -> Tensor:
        """Captions [N, 1 + T] by Transformers, BOS included."""
        options |= {
            "max_new_tokens": self.shapes.tokens,
            "suppress_tokens": list(self.captioner.forbidden),
        }
        return self.policy.model.generate(**batch.inputs, **options)

    def copied_logits(self, batch: CaptionBatch, ids: Tensor, copied: str) -> Tensor:
        """Logits [N, T, V] after each of ``ids`` [N, T], with copies of ``images`` or
        of the encoder's ``states``.
        """
        policy = self.policy
        samples = self.shapes.samples
        pixels = batch.inputs["pixel_values"]
        if copied == "images":
            pixels = pixels.repeat_interleave(samples, 0)
        states = policy.family.encode(policy.model, pixels, prompt=None)
        if copied == "states":
            states = states.repeat_interleave(samples, 0)
        decoder = policy.model.get_submodule(policy.family.text_model)
        return decoder(
            input_ids=ids, encoder_hidden_states=states, use_cache=False
        ).logits


def build_bench(
    make: Callable[[], Any], pixels: int, shapes: Shapes, device: str, precision: str
) -> HuggingFaceBench:
    """Random weights, pixels and captions; captions end where random weights end them."""
    torch.manual_seed(0)
    model = make()
    tokenizer = word_tokenizer(model)
    family = FAMILIES[model.config.model_type]
    policy = Policy(model, family, family.conventions(model, None, tokenizer, ""))
    policy.to(device).eval()
    captioner: Any = HuggingFaceCaptioner(policy, [tokenizer], tokenizer)
    pixel_values = torch.randn(shapes.images, 3, pixels, pixels, device=device)
    accelerator = prepare(policy, device, precision)
    rows = random_rows(
        [word for word in tokenizer.get_vocab() if word.startswith("word")],
        shapes.images,
    )
    reward = MixedReward({"cider": (cider_of(rows), 1.0)})
    return HuggingFaceBench(
        shapes,
        accelerator,
        captioner,
        reward,
        CaptionBatch(rows, {"pixel_values": pixel_values}),
    )


def word_tokenizer(model: Any) -> transformers.PreTrainedTokenizerFast:
    """One word for every token but BOS, EOS and padding."""
    if model.config.model_type == "blip":
        text = model.config.text_config
        special = {"pad_token": text.pad_token_id, "sep_token": text.sep_token_id}
        size = text.bos_token_id
    else:
        size = model.config.decoder.vocab_size
        special = {"bos_token": size - 2, "eos_token": size - 1}
        for config in (model.config, model.generation_config):
            config.decoder_start_token_id = size - 2
            config.eos_token_id = config.pad_token_id = size - 1
    names = {token: f"[{name}]" for name, token in special.items()}
    vocabulary = {names.get(token, f"word{token}"): token for token in range(size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=next(iter(names.values()))))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: f"[{name}]" for name in special}
    )


def measure(
    timing: Timing,
    models: Sequence[str] = tuple(MODELS),
    precision: str = "no",
    copied: Sequence[str] = COPIED,
    **sizes: Any,
) -> Iterator[Measurement]:
    """Steps of each model."""
    chosen = [MODELS[name] for name in models]
    if timing.tiny:
        chosen = [("tiny ViT + GPT-2", tiny_vit_gpt2, 32)]
        sizes = TINY
    for label, make, pixels in chosen:
        bench = build_bench(
            make, pixels, replace(SHAPES, **sizes), timing.device, precision
        )
        yield from measure_model(bench, label, timing, precision, copied)


def measure_model(
    bench: Bench, label: str, timing: Timing, precision: str, copied: Sequence[str]
) -> list[Measurement]:
    """Time and memory of one model's steps, and the parts of this package's step."""
    batch = bench.batch
    ours = f"step, {label}, {bench.shapes.images} images"
    steps: dict[str, Step] = {ours: our_step}
    steps |= {
        f"generate twice, {what} copied": partial(generate_step, copied=what)
        for what in copied
    }
    times = timed(
        {name: partial(step, bench, batch) for name, step in steps.items()},
        timing,
        ours,
    )
    note = f"; {bench.shapes.samples} samples and the greedy caption, {lengths_of(bench, batch)}, {precision}"
    rows = [compared(times, ours, name, note=note) for name in steps if name != ours]
    rows += phase_rows(bench, ours, timing.repeats)
    peaks = {name: count_peak(step, bench, batch) for name, step in steps.items()}
    held = (
        f"; weights, moments and inputs, {peaks[ours].held / MIB:.0f} MiB, not included"
    )
    for name in list(steps)[1:]:
        detail = f"{peaks[ours].step / MIB:.0f} MiB against {peaks[name].step / MIB:.0f} MiB{held}"
        rows.append(
            Measurement(
                f"{ours}: peak memory",
                name,
                peaks[name].step / peaks[ours].step,
                "x less",
                detail,
            )
        )
    return rows


if __name__ == "__main__":
    defaults = {"models": tuple(MODELS), "precision": "no", "copied": COPIED}
    command(__doc__, measure, repeats=3, **defaults, images=SHAPES.images, samples=5)
