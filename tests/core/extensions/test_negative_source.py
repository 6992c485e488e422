"""Hard negatives by a language model: the class of docs/reward_models.md, from outside the package."""

import numpy as np
from transformers import pipeline

from rl_caption.data.base import Row
from rl_caption.data.negatives import NEGATIVES
from rl_caption.runtime.options import load_target
from tests.zoo.language_models import tiny_gpt2

NAME = "tests.core.extensions.test_negative_source:LanguageModelNegatives"


class LanguageModelNegatives:
    """False captions that a causal language model of Transformers writes after
    examples, a caption each; greedy.
    """

    examples = (
        "Caption: a dog to the left of a red car\nFalse: a red car to the left of a dog\n"
        "Caption: a young man in a white shirt\nFalse: a white man in a young shirt\n"
    )

    def __init__(self, model: str, max_new_tokens: int = 40) -> None:
        self.write, self.max_new_tokens = (
            pipeline("text-generation", model=model),
            max_new_tokens,
        )
        self.known: dict[str, str] = {}

    def __call__(
        self, row: Row, caption: str, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        if caption not in self.known:
            prompt = f"{self.examples}Caption: {caption}\nFalse:"
            options = {
                "max_new_tokens": self.max_new_tokens,
                "do_sample": False,
                "return_full_text": False,
            }
            answer = self.write(prompt, **options)[0]["generated_text"]
            self.known[caption] = answer.strip().partition("\n")[0]
        false = self.known[caption]
        return (
            [("language_model", false)]
            if false and false.lower() != caption.lower()
            else []
        )


def test_a_language_model_writes_negatives(tmp_path):
    source = load_target(NAME, "negatives.source", NEGATIVES)(
        str(tiny_gpt2(tmp_path)), max_new_tokens=4
    )
    source.examples = ""  # the tiny model has 48 positions
    row = {"image_id": "1", "image": tmp_path, "references": ["a dog"]}
    written = source(row, "a dog", np.random.default_rng(0))
    assert all(kind == "language_model" and text for kind, text in written)
