"""Writers of false captions (hard negatives): a language model that is shown a few examples.

A writer has a ``signature``, the model and its options, and a call: captions to false captions of
each, possibly none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rewards.model_files import load_complete, transformers_options
from rl_caption.lab.recaptioners import model_label
from rl_caption.runtime.errors import config_errors

EXAMPLES: dict[str, list[tuple[str, str]]] = {
    "relation": [
        ("a dog to the left of a red car", "a red car to the left of a dog"),
        ("a woman is feeding a goat", "a goat is feeding a woman"),
        (
            "The cup stands on the book beside a lamp.",
            "The book stands on the cup beside a lamp.",
        ),
    ],
    "attribute": [
        ("a young man in a white shirt", "a white man in a young shirt"),
        ("the paved road and the old house", "the old road and the paved house"),
        (
            "A small brown cat sleeps on a large blue sofa.",
            "A large blue cat sleeps on a small brown sofa.",
        ),
    ],
}
"""Kind of false caption -> pairs of a caption and a false one, in the manner of ARO's relations and
attributes.
"""


class LanguageModelWriter:
    """Asks a causal language model of Transformers, greedily, for one false caption of each kind.

    Args:
        name: folder of the model, or its name on the hub.
        examples: kind -> pairs of a caption and a false one, which the model is shown before the
            caption.
        max_new_tokens: most tokens of a false caption; one that is not ended by then is left out.
        batch_size: captions that are answered at a time.
        dtype: of the weights, such as ``bfloat16``; ``auto`` takes that of the file.
        device: such as ``cuda:0``; None takes a GPU if there is one.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        examples: dict[str, list[tuple[str, str]]] | None = None,
        max_new_tokens: int = 128,
        batch_size: int = 32,
        dtype: str = "auto",
        device: str | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.examples: Mapping[str, Sequence[tuple[str, str]]] = (
            EXAMPLES if examples is None else examples
        )
        with config_errors(f"language_model: the model {name!r} cannot be loaded"):
            options = transformers_options(name)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(
                name, padding_side="left", **options
            )
            model: Any = load_complete(
                AutoModelForCausalLM, name, dtype=dtype, **options
            )
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.max_new_tokens, self.batch_size = (
            model.to(self.device).eval(),
            max_new_tokens,
            batch_size,
        )
        self.signature = f"language_model[{model_label(name)},tokens{max_new_tokens}] {dict(self.examples)!r}"

    def __call__(self, captions: Sequence[str]) -> list[list[str]]:
        """One false caption of each kind, in the order of ``examples``."""
        answers: list[list[str]] = [[] for _ in captions]
        for pairs in self.examples.values():
            examples = "".join(
                f"Caption: {caption}\nFalse: {false}\n\n" for caption, false in pairs
            )
            for start in range(0, len(captions), self.batch_size):
                batch = captions[start : start + self.batch_size]
                texts = self._continue(
                    [
                        f"{examples}Caption: {' '.join(text.split())}\nFalse:"
                        for text in batch
                    ]
                )
                for answer, text in zip(answers[start:], texts, strict=False):
                    answer += [text] if text else []
        return answers

    @torch.inference_mode()
    def _continue(self, prompts: Sequence[str]) -> list[str]:
        """The first line after each prompt; "" where it is not ended."""
        inputs = self.tokenizer(list(prompts), padding=True, return_tensors="pt").to(
            self.device
        )
        options = {
            "do_sample": False,
            "max_new_tokens": self.max_new_tokens,
            "stop_strings": ["\n"],
        }
        ids = self.model.generate(
            **inputs,
            **options,
            tokenizer=self.tokenizer,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        new = ids[:, inputs["input_ids"].shape[1] :]
        ended = (new == self.tokenizer.eos_token_id).any(-1).tolist()
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return [
            text.partition("\n")[0].strip() if end or "\n" in text else ""
            for text, end in zip(texts, ended, strict=True)
        ]
