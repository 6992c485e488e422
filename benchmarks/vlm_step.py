"""A self-critical step of a vision-language model against a step of TRL's ``GRPOTrainer``.

    python -m benchmarks.vlm_step [--frozen] [--images 2] [--samples 5] [--tokens 24] [--repeats 3]
    [--json FILE]

A model of SmolVLM's shape with random weights, cut to what a CPU can do: images in 4
crops and the whole, of 64 tokens. Both generate as many captions of as many tokens,
score them with CIDEr-D, compute their log-probabilities with gradient and update the
weights by Adam, in float32 without recomputed activations. ``--frozen`` freezes vision
tower and connector in both; our step is then taken with and without the visual tokens
of an epoch before. Steps of a round follow each other. Needs TRL and num2words.
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import cider_of, prepare
from rewards.mixed import MixedReward
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.loading import load_captioner
from rl_caption.integrations.trl.rows import trl_dataset
from rl_caption.runtime.types import CaptionBatch
from rl_caption.scst.advantages import leave_one_out
from rl_caption.scst.step import SelfCriticalTask

TRL = "TRL's GRPOTrainer"
PROMPT = "Describe this image in one sentence ."
WORDS = 4000
SPECIAL = [
    "<pad>",
    "<|im_start|>",
    "<end_of_utterance>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<unk>",
]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }} : "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in "
    "message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% "
    "endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant :{% endif %}"
)
VISION = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 3,
          "image_size": 512, "patch_size": 16}  # fmt: skip
TEXT = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}  # fmt: skip
OPTIONS = {"images": 2, "samples": 5, "tokens": 24}


def save_model(folder: str) -> None:
    """Write the model with its processor."""
    places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    named = ["User", "Assistant", ":", *PROMPT.split()]
    words = dict.fromkeys(
        [*SPECIAL, *places, *named, *(f"word{number}" for number in range(WORDS))]
    )
    table = Tokenizer(
        WordLevel(
            {word: number for number, word in enumerate(words)}, unk_token="<unk>"
        )
    )
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=table, pad_token="<pad>", bos_token="<|im_start|>", eos_token="<end_of_utterance>",
        unk_token="<unk>", additional_special_tokens=[*SPECIAL[3:6], *places],
    )  # fmt: skip
    images = transformers.SmolVLMImageProcessor(
        size={"longest_edge": 1024}, max_image_size={"longest_edge": 512}
    )
    videos = transformers.SmolVLMVideoProcessor(
        size={"longest_edge": 512}, max_image_size={"longest_edge": 512}
    )
    processor = transformers.SmolVLMProcessor(
        images, tokenizer, videos, image_seq_len=64, chat_template=TEMPLATE
    )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.SmolVLMConfig(
        text_config={**TEXT, **ids, "vocab_size": len(tokenizer)}, vision_config=VISION, scale_factor=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.SmolVLMForConditionalGeneration(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def noise_rows(images: int) -> list[Any]:
    """Rows with photos of noise, 1024 pixels wide, and references of the model's words."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (images, 768, 1024, 3), dtype=np.uint8)
    words = generator.integers(0, WORDS, (images, 5, 10))
    references = [
        [" ".join(f"word{word}" for word in caption) for caption in captions]
        for captions in words.tolist()
    ]
    return [
        {"image_id": str(number), "image": Image.fromarray(photo), "references": texts}
        for number, (photo, texts) in enumerate(zip(pixels, references, strict=True))
    ]


def load(folder: str, frozen: bool, cache_bytes: int = 0) -> HuggingFaceCaptioner:
    """The captioner; with ``frozen``, only its text model is trained."""
    captioner = load_captioner(folder, cache_bytes, prompt=PROMPT)
    assert isinstance(captioner, HuggingFaceCaptioner)
    captioner.adapt(["*vision*", "*connector*"] if frozen else [], None, False)
    return captioner


def our_step(
    folder: str,
    rows: list[Any],
    frozen: bool,
    samples: int,
    tokens: int,
    cache_bytes: int = 0,
) -> Callable[[], object]:
    """Make a function that takes a step of this package. It includes preprocessing,
    which workers do in training, as TRL's step does.
    """
    captioner = load(folder, frozen, cache_bytes)
    accelerator = prepare(captioner.policy, "cpu", "no")
    optimizer = torch.optim.Adam(
        [p for p in captioner.policy.parameters() if p.requires_grad], lr=1e-6
    )
    decoding = Decoding(num_samples=samples, with_greedy=False, max_new_tokens=tokens)
    reward = MixedReward({"cider": (cider_of(rows), 1.0)})
    task = SelfCriticalTask(
        accelerator, captioner, captioner.policy, reward, leave_one_out, decoding
    )

    def step() -> None:
        """Take a step of this package."""
        batch = CaptionBatch(rows, captioner.preprocess(rows))
        for _ in task.training_step([batch], 0):
            optimizer.step()
            optimizer.zero_grad()
        task.samples = []

    return step


def trl_step(
    folder: str, rows: list[Any], frozen: bool, samples: int, tokens: int
) -> Callable[[], object]:
    """Make a function that takes a step of ``GRPOTrainer``: generation, reward,
    log-probabilities, update.
    """
    from trl import GRPOConfig, GRPOTrainer

    captioner = load(folder, frozen)
    reward = cider_of(rows)
    size = len(rows) * samples
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], seed=0,
        per_device_train_batch_size=size, num_generations=samples, max_completion_length=tokens, max_steps=1000,
        learning_rate=1e-6, steps_per_generation=1, num_iterations=1, beta=0.0, optim="adamw_torch",
        disable_dropout=True, top_k=0, temperature=1.0, logging_steps=1000,
        generation_kwargs={"suppress_tokens": list(captioner.forbidden)},
    )  # fmt: skip
    trainer: Any = GRPOTrainer(
        model=captioner.policy.model, reward_funcs=[reward], args=arguments, processing_class=captioner.processor,
        train_dataset=trl_dataset(rows, PROMPT),
    )  # fmt: skip
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    batches = iter(trainer.get_train_dataloader())

    def step() -> None:
        """Take a step of TRL's trainer."""
        nonlocal batches
        inputs = next(batches, None)
        if inputs is None:
            batches = iter(trainer.get_train_dataloader())
            inputs = next(batches)
        trainer.model.train()
        trainer.training_step(trainer.model, inputs, None)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        trainer._buffered_inputs = None

    return step


def steps_of(
    folder: str, images: int, frozen: bool, samples: int, tokens: int
) -> dict[str, Callable[[], Any]]:
    """Name -> function that makes a step, which is a function, too."""
    arguments = (folder, noise_rows(images), frozen, samples, tokens)
    steps: dict[str, Callable[[], Any]] = {
        f"step, {'frozen' if frozen else 'trained'} tower": lambda: our_step(*arguments)
    }
    if frozen:
        steps["step, visual tokens kept"] = lambda: our_step(
            *arguments, cache_bytes=2**30
        )
    return steps | {TRL: lambda: trl_step(*arguments)}


def measure(
    timing: Timing,
    frozen: bool = False,
    images: int = 2,
    samples: int = 5,
    tokens: int = 24,
) -> Iterator[Measurement]:
    """Time of the steps."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        arguments = (folder, images, frozen, samples, tokens)
        steps = {name: make() for name, make in steps_of(*arguments).items()}
        times = timed(steps, timing, "steps")
        count = sum(
            parameter.numel() for parameter in load(folder, frozen).policy.parameters()
        )
        note = f"; {images} images x {samples} captions of {tokens} tokens, {count / 1e6:.1f} M parameters"
        for step in list(steps)[:-1]:
            yield compared(times, step, TRL, note=note)


if __name__ == "__main__":
    command(__doc__, measure, repeats=3, frozen=False, **OPTIONS)
