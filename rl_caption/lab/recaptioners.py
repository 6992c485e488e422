"""Recaptioners, which write new captions of images: a captioner of ours, a vision-language model.

A recaptioner has a ``signature``, the model and its options, and a call: rows, which may have
captions and a prompt, to a new caption of each, or to a list of them.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from rewards.language.models import without_thinking
from rewards.model_files import load_complete, transformers_options
from rl_caption.captioners.config import Decoding
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.data.scenes.language import long_reference
from rl_caption.data.scenes.negatives import hard_negatives
from rl_caption.data.scenes.world import Draws
from rl_caption.runtime.errors import config_errors, errors_of_user_code
from rl_caption.runtime.options import check_type

PROMPTS = Path(__file__).with_name("prompts.yaml")
"""Named prompts of ``vision_language``."""


def answers_of(target: Any, items: Sequence[Any], kind: Any) -> list[Any]:
    """What a recaptioner, a writer of false captions or a text-to-image model makes of N items: N
    answers of the type ``kind``.

    Raises ``DataError`` where it fails, or answers with another type or number.
    """
    where = f"{type(target).__module__}:{type(target).__name__}"
    with errors_of_user_code(where, error=DataError):
        answers: Any = target(items)
        if isinstance(answers, Iterable):
            answers = list(answers)
    check_type(answers, list[kind], f"{where}: what it returned", DataError)
    if len(answers) != len(items):
        raise DataError(f"{where} gave {len(answers)} answers for {len(items)}")
    return list(answers)


def model_label(model: str) -> str:
    """The name of a model. A folder may have other weights later, so its name gets the start of
    their hash.
    """
    from rl_caption.captioners.loading import weights_hash

    weights = weights_hash(model)
    return model if weights == model else f"{model},{weights[:12]}"


class CaptionerRecaptioner:
    """Writes captions with a captioner.

    Args:
        model: folder of a saved captioner, or its name on the hub.
        num_beams: width of beam search; 1 decodes greedily.
        max_new_tokens: most tokens of a caption.
        batch_size: images that are captioned at a time.
        seed: of sampling. **decode: further options of ``Decoding``. ``num_return_sequences`` (of
        beam search) or ``num_samples``
            give several captions of each image.

    Raises:
        CaptionerError: ``model`` is no captioner.
        ConfigError: the options of decoding contradict each other.
    """

    def __init__(
        self,
        model: str,
        num_beams: int = 1,
        max_new_tokens: int = 64,
        batch_size: int = 32,
        seed: int = 0,
        **decode: Any,
    ) -> None:
        from accelerate import Accelerator

        from rl_caption.captioners.loading import load_captioner

        self.decoding = Decoding(
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            **decode,
        )
        self.captioner, self.seed = load_captioner(model), seed
        self.accelerator = Accelerator()
        self.policy = self.captioner.policy.to(self.accelerator.device)
        told = {"beams": num_beams, "tokens": max_new_tokens, "seed": seed} | decode
        self.signature = f"captioner[{model_label(model)},{told}]"

    def __call__(self, rows: Sequence[Row]) -> list[list[str]]:
        """Caption the images. Samples are a function of the seed and the image id, not of the
        batch.
        """
        from rl_caption.training.validation import decode_candidates

        decode = self.captioner, self.policy, rows, self.decoding, self.accelerator
        candidates = decode_candidates(*decode, seed=self.seed)
        return [
            [candidate.caption for candidate in candidates[row["image_id"]]]
            for row in rows
        ]


class VisionLanguageRecaptioner:
    """Asks a vision-language model of Transformers for a description.

    Args:
        name: folder of the model, or its name on the hub.
        prompt: the question, or the name of one in ``prompts.yaml``. ``{caption}`` stands for the
            image's first caption (alt text, for example), ``{prompt}`` for the row's own prompt (a
            page title, for example), ``{image_id}`` for the image's id.
        max_new_tokens: most tokens of an answer.
        batch_size: images that are described at a time.
        dtype: of the weights, such as ``bfloat16``; ``auto`` takes that of the file.
        device: such as ``cuda:0``; None takes a GPU if there is one.
        num_beams: width of beam search; 1 decodes greedily.
        num_return_sequences: how many of the best beams are kept, at most ``num_beams``.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        prompt: str = "detail",
        max_new_tokens: int = 256,
        batch_size: int = 8,
        dtype: str = "auto",
        device: str | None = None,
        num_beams: int = 1,
        num_return_sequences: int = 1,
    ) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        with config_errors(f"vision_language: the model {name!r} cannot be loaded"):
            options = transformers_options(name)
            self.processor: Any = AutoProcessor.from_pretrained(
                name, padding_side="left", **options
            )
            model: Any = load_complete(
                AutoModelForImageTextToText, name, dtype=dtype, **options
            )
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device).eval()
        named = yaml.safe_load(PROMPTS.read_text(encoding="utf-8"))
        self.prompt = prompt = named.get(prompt, prompt)
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.beams = {
            "num_beams": num_beams,
            "num_return_sequences": num_return_sequences,
        }
        told = {"tokens": max_new_tokens, **self.beams, "prompt": prompt}
        self.signature = f"vision_language[{model_label(name)},{told}]"

    def __call__(self, rows: Sequence[Row]) -> list[list[str]]:
        """Describe the images, by greedy or beam search."""
        answers: list[list[str]] = []
        for start in range(0, len(rows), self.batch_size):
            answers += self._answers(rows[start : start + self.batch_size])
        return answers

    @torch.inference_mode()
    def _answers(self, rows: Sequence[Row]) -> list[list[str]]:
        asked = []
        for row in rows:
            values = {
                "caption": next(iter(row["references"]), ""),
                "prompt": row.get("prompt", ""),
            }
            text = self.prompt.format(**values, image_id=row["image_id"])
            asked.append(
                [
                    {
                        "role": "user",
                        "content": [{"type": "image"}, {"type": "text", "text": text}],
                    }
                ]
            )
        template = {"add_generation_prompt": True, **without_thinking(self.processor)}
        texts = [self.processor.apply_chat_template(one, **template) for one in asked]
        images = [[load_image(row["image"])] for row in rows]
        inputs = self.processor(
            text=texts, images=images, padding=True, return_tensors="pt"
        ).to(self.device)
        token_ids = self.model.generate(
            **inputs, do_sample=False, max_new_tokens=self.max_new_tokens, **self.beams
        )
        answers = token_ids[:, inputs["input_ids"].shape[1] :]
        captions = [
            " ".join(text.split())
            for text in self.processor.batch_decode(answers, skip_special_tokens=True)
        ]
        per_image = self.beams["num_return_sequences"]
        return [
            captions[start : start + per_image]
            for start in range(0, len(captions), per_image)
        ]


class SceneRecaptioner:
    """Describes generated scenes from what is known of them, as well or badly as it is asked to.

    Args:
        keep: probability that a sentence of the full description is kept, in (0, 1]; at least one
            is.
        wrong: probability that a sentence is replaced by a false one (a hard negative), in [0, 1].
        seed: of these draws.
    """

    def __init__(self, keep: float = 1.0, wrong: float = 0.0, seed: int = 0) -> None:
        self.keep, self.wrong, self.seed = keep, wrong, seed
        self.signature = f"scenes[keep{keep:g},wrong{wrong:g},seed{seed}]"

    def __call__(self, rows: Sequence[Row]) -> list[str]:
        """Describe the scenes; a pure function of them and the options."""
        captions = []
        for row in rows:
            scene = row["scene"]
            draws = Draws("recaption", self.seed, repr(scene))
            clauses = long_reference(scene, self.seed).removesuffix(".").split(". ")
            sentences = [f"{clause}." for clause in clauses]
            kept = [sentence for sentence in sentences if draws.chance(self.keep)]
            told = []
            for sentence in kept or [draws.choice(sentences)]:
                false = [
                    text
                    for kind, text in hard_negatives(scene, sentence, self.seed)
                    if kind != "word_order"
                ]
                told.append(
                    draws.choice(false)
                    if false and draws.chance(self.wrong)
                    else sentence
                )
            captions.append(" ".join(told))
        return captions


TARGETS = {
    "captioner": "rl_caption.lab.recaptioners:CaptionerRecaptioner",
    "vision_language": "rl_caption.lab.recaptioners:VisionLanguageRecaptioner",
    "scenes": "rl_caption.lab.recaptioners:SceneRecaptioner",
    "language_model": "rl_caption.lab.negative_writers:LanguageModelWriter",
}
"""Name of a recaptioner or of a writer of false captions -> ``module:Name``."""
