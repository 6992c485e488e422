"""A local language model or vision-language model of Transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewards.base import RewardError, naming
from rewards.devices import Precision, chunks
from rewards.frozen_model import load_frozen
from rewards.images import open_image
from rewards.language.models import Question, check_probability


class LocalModel:
    """Answers one prompt after the other, so that no answer depends on others.

    Prompts go through the chat template. Models that can think before they answer are told not to
    (``enable_thinking``).

    Args:
        model: folder with safetensors weights, or a name on the hub.
        reward: its name, for messages.
        vision: whether it is a vision-language model.
        device: None is the process's current CUDA device if there is one, else the CPU.
        precision: of weights and activations.
        chat_template_kwargs: variables of the chat template.

    Raises:
        ValueError: the model cannot be loaded, or has no chat template.
    """

    def __init__(
        self,
        model: str,
        reward: str,
        vision: bool,
        device: str | None,
        precision: Precision,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        head = "AutoModelForImageTextToText" if vision else "AutoModelForCausalLM"
        self.frozen = load_frozen(head, model, reward, device, precision)
        self.reader = self.frozen.tokenizer
        self.tokenizer = getattr(self.reader, "tokenizer", self.reader)
        self.reward = reward
        self.vision = vision
        if not getattr(self.reader, "chat_template", None):
            raise ValueError(f"{reward}: the model {model!r} has no chat template")
        self.template_kwargs = without_thinking(self.reader) | (
            chat_template_kwargs or {}
        )
        self.signature = f"{Path(model).name},{self.frozen.weights},{precision}"
        if chat_template_kwargs:
            self.signature += f",{json.dumps(chat_template_kwargs, sort_keys=True)}"

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of the labels, by one forward pass each.

        Raises ``RewardError`` for a prompt that is longer than the model reads, and for an image
        that cannot be opened or is refused by the processor; the message names the row.
        """
        answers = []
        for (question,) in chunks(questions, 1, f"{self.reward}: answers"):
            (logits,) = self._generate(question, 1).logits
            answers.append(self._read(question, logits[0].double()))
        return answers

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """Texts by greedy decoding.

        Raises ``RewardError`` as ``choose``, also where a prompt leaves no room for the text.
        """
        answers = []
        for (question,) in chunks(questions, 1, f"{self.reward}: texts"):
            output = self._generate(question, max_new_tokens)
            new_ids = output.sequences[0, -len(output.logits) :]
            answers.append(
                str(self.tokenizer.decode(new_ids, skip_special_tokens=True))
            )
        return answers

    def _generate(self, question: Question, max_new_tokens: int) -> Any:
        """Transformers' output: the tokens, and logits [1, V] of each new one."""
        with naming(question.where, (ValueError, TypeError, RewardError), RewardError):
            inputs = self._encode(question)
            length = inputs["input_ids"].shape[1]
            most = self.frozen.longest - max_new_tokens + 1
            if length > most:
                raise ValueError(
                    f"the prompt has {length} tokens, the model reads {most}"
                )
            return self.frozen.network.generate(
                **inputs,
                do_sample=False,
                num_beams=1,
                max_new_tokens=max_new_tokens,
                pad_token_id=self.tokenizer.eos_token_id,
                output_logits=True,
                return_dict_in_generate=True,
            )

    def _encode(self, question: Question) -> Any:
        content: Any = question.text
        if self.vision:
            content = [{"type": "text", "text": question.text}]
            if question.image is not None:
                content.insert(
                    0, {"type": "image", "image": open_image(question.image)}
                )
        encoded = self.reader.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **self.template_kwargs,
        )
        if self.vision:
            return encoded.to(self.frozen.device, dtype=self.frozen.network.dtype)
        return encoded.to(self.frozen.device)

    def _read(self, question: Question, logits: Any) -> list[float]:
        """Probabilities of the labels among themselves, from the logits [V] of the next token."""
        import torch

        with naming(question.where, (ValueError,), RewardError):
            ids = label_ids(self.tokenizer, question.labels)
        scores = torch.stack([torch.logsumexp(logits[pieces], dim=0) for pieces in ids])
        together = (scores.logsumexp(0) - logits.logsumexp(0)).exp().item()
        check_probability(
            question, together, self.tokenizer.decode([int(logits.argmax())])
        )
        return scores.softmax(dim=0).tolist()


def without_thinking(reader: Any) -> dict[str, Any]:
    """Variables of the chat template by which a model answers at once, if it can think before."""
    return (
        {"enable_thinking": False}
        if "enable_thinking" in str(reader.chat_template)
        else {}
    )


def label_ids(tokenizer: Any, labels: Sequence[str]) -> list[list[int]]:
    """First tokens of each label, with and without a space before it.

    Raises ``ValueError`` where two labels share one.
    """
    ids = []
    for label in labels:
        first = set()
        for text in (label, f" {label}"):
            first |= set(tokenizer(text, add_special_tokens=False)["input_ids"][:1])
        ids.append(
            sorted(token for token in first if tokenizer.decode([token]).strip())
        )
    if not all(ids) or len(set().union(*ids)) < sum(map(len, ids)):
        raise ValueError(
            f"the first tokens of the labels {list(labels)} are not different"
        )
    return ids
