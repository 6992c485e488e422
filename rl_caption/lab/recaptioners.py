"""Models that write new captions of images, or false captions: captioners and language
models.

A recaptioner has a ``signature`` (the model and its options), and is called with rows,
which may have captions and a prompt; it returns a new caption of each row, or a list of
captions. A writer of false captions has a signature, and is called with captions; it
returns a list of false captions of each, possibly empty.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rewards.language.models import Question, build_model
from rl_caption.captioners.config import Decoding
from rl_caption.data.base import DataError, Row
from rl_caption.data.plain_files import single_spaced
from rl_caption.data.scenes.language import long_reference
from rl_caption.runtime.errors import config_errors, errors_of_user_code
from rl_caption.runtime.options import check_type

PROMPTS = yaml.safe_load(
    Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8")
)
"""``captions``: prompts by name; ``negatives``: kind of false caption -> pairs of a
caption and a false caption.
"""
FALSE_PROMPT = (
    "Each caption is followed by a false one, which changes it as little as the examples do. "
    "Write only the last false caption, in one line.\n\n"
)


def answers_of(target: Any, items: Sequence[Any], answer_type: Any) -> list[Any]:
    """Call a recaptioner, a writer of false captions or a text-to-image model with N
    items; return N answers of the type ``answer_type``.

    Raises ``DataError`` where it fails, or returns another type or number of answers.
    """
    where = f"{type(target).__module__}:{type(target).__name__}"
    with errors_of_user_code(where, error=DataError):
        answers: Any = target(items)
        if isinstance(answers, Iterable):
            answers = list(answers)
    check_type(answers, list[answer_type], f"{where}: what it returned", DataError)
    if len(answers) != len(items):
        raise DataError(f"{where} gave {len(answers)} answers for {len(items)}")
    return list(answers)


def model_label(model: str) -> str:
    """Name of a model; for a folder, with 12 digits of the hash of its weights."""
    from rl_caption.captioners.loading import weights_hash

    weights = weights_hash(model)
    return model if weights == model else f"{model},{weights[:12]}"


class CaptionerRecaptioner:
    """Writes captions with a captioner, or with a vision-language model and a prompt.

    Args:
        model: folder of a saved captioner, or its name on the hub.
        prompt: prompt of a vision-language model, or the name of a prompt in
            ``prompts.yaml``. ``{caption}`` stands for the image's first caption (alt
            text, for example), ``{prompt}`` for the row's own prompt (a page title, for
            example), ``{image_id}`` for the image's id. None leaves the rows as they
            are.
        dtype: type of the weights of a model of Transformers, such as ``bfloat16``.
        seed: random seed of sampling.
        **decode: options of ``Decoding``, greedy with at most 64 tokens and 32 images at a time
            unless it says otherwise. ``num_return_sequences`` (of beam search) or ``num_samples``
            give several captions of each image.

    Raises:
        CaptionerError: ``model`` is no captioner.
        ConfigError: the options of decoding contradict each other.
    """

    def __init__(
        self,
        model: str,
        prompt: str | None = None,
        dtype: str = "float32",
        seed: int = 0,
        **decode: Any,
    ) -> None:
        from accelerate import Accelerator

        from rl_caption.captioners.loading import load_captioner

        options = {"max_new_tokens": 64, "batch_size": 32} | decode
        self.decoding = Decoding(**options)
        self.prompt = PROMPTS["captions"].get(prompt, prompt)
        self.captioner, self.seed = load_captioner(model, dtype=dtype), seed
        self.accelerator = Accelerator()
        self.policy = self.captioner.policy.to(self.accelerator.device)
        del options["batch_size"]
        told = options | {"seed": seed, "dtype": dtype, "prompt": self.prompt}
        self.signature = f"captioner[{model_label(model)},{told}]"

    def __call__(self, rows: Sequence[Row]) -> list[list[str]]:
        """Caption the images. Samples are a function of the seed and the image id, not
        of the batch.
        """
        from rl_caption.training.validation import decode_candidates

        asked: Any = rows
        if self.prompt is not None:
            asked = []
            for row in rows:
                fields = {"image_id": row["image_id"], "prompt": row.get("prompt", "")}
                caption = next(iter(row["references"]), "")
                text = self.prompt.format(caption=caption, **fields)
                asked.append({**row, "prompt": text})
        decode = self.captioner, self.policy, asked, self.decoding, self.accelerator
        candidates = decode_candidates(*decode, seed=self.seed)
        return [
            [single_spaced(one.caption) for one in candidates[row["image_id"]]]
            for row in rows
        ]


class SceneRecaptioner:
    """Describes generated scenes exactly, in words that ``seed`` chooses."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.signature = seed, f"scenes[seed{seed}]"

    def __call__(self, rows: Sequence[Row]) -> list[str]:
        """Describe the scenes; a pure function of the scenes and the seed."""
        return [long_reference(row["scene"], self.seed) for row in rows]


class LanguageModelWriter:
    """Asks a language model, greedily, for one false caption of each kind.

    Args:
        examples: kind -> pairs of a caption and a false caption for the prompt; None
            takes the pairs in ``prompts.yaml``, similar to ARO's relations and
            attributes.
        max_new_tokens: most tokens of a false caption.
        **options: ``model`` or ``endpoint`` and others of ``rewards.language.models.build_model``.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(
        self,
        examples: Mapping[str, Sequence[Sequence[str]]] | None = None,
        max_new_tokens: int = 128,
        **options: Any,
    ) -> None:
        with config_errors("language_model"):
            self.model = build_model("negatives", **options)
        self.examples = PROMPTS["negatives"] if examples is None else examples
        self.max_new_tokens = max_new_tokens
        told = f"{self.model.signature},tokens{max_new_tokens}"
        self.signature = f"language_model[{told}] {dict(self.examples)!r}"

    def __call__(self, captions: Sequence[str]) -> list[list[str]]:
        """One false caption of each kind, in the order of ``examples``."""
        questions = []
        for caption in captions:
            for pairs in self.examples.values():
                shots = [f"Caption: {true}\nFalse: {false}\n" for true, false in pairs]
                asked = f"Caption: {single_spaced(caption)}\nFalse:"
                text = FALSE_PROMPT + "\n".join([*shots, asked])
                questions.append(Question(text, (), f"caption {caption!r:.80}"))
        lines = []
        for answer in self.model.write(questions, self.max_new_tokens):
            line = answer.strip().partition("\n")[0]
            lines.append(line.removeprefix("False:").strip())
        count = len(self.examples)
        return [lines[place * count :][:count] for place in range(len(captions))]


TARGETS = {
    "captioner": "rl_caption.lab.recaptioners:CaptionerRecaptioner",
    "scenes": "rl_caption.lab.recaptioners:SceneRecaptioner",
    "language_model": "rl_caption.lab.recaptioners:LanguageModelWriter",
}
"""Name of a recaptioner or of a writer of false captions -> ``module:Name``."""
