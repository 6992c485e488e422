"""A local language model or vision-language model of Transformers."""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.base import RewardError, naming
from rewards.devices import Precision, chunks
from rewards.frozen_model import load_frozen
from rewards.images import open_image
from rewards.language.models import Calls, Question, check_probability


class LocalModel:
    """Answers by one forward pass for a batch of questions; writes texts one prompt at a time.

    Prompts go through the chat template; without one a prompt ends with ``Answer:``. Models that
    can think before they answer are told not to (``enable_thinking``).

    Args:
        model: folder with safetensors weights, or a name on the hub.
        reward: its name, for messages.
        vision: whether it is a vision-language model.
        device: None is the process's current CUDA device if there is one, else the CPU.
        precision: of weights and activations.
        batch_size: number of questions of one forward pass.
        chat_template_kwargs: variables of the chat template.

    Raises:
        ValueError: the model cannot be loaded, or reads images without a chat template.
    """

    def __init__(
        self,
        model: str,
        reward: str,
        vision: bool,
        device: str | None,
        precision: Precision,
        batch_size: int,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        head = "AutoModelForImageTextToText" if vision else "AutoModelForCausalLM"
        self.frozen = load_frozen(head, model, reward, device, precision)
        self.reader = self.frozen.tokenizer
        self.tokenizer = getattr(self.reader, "tokenizer", self.reader)
        self.reward, self.vision, self.batch_size = reward, vision, batch_size
        has_template = bool(getattr(self.reader, "chat_template", None))
        if vision and not has_template:
            raise ValueError(f"{reward}: the processor of {model!r} has no chat template")
        if self.tokenizer.pad_token is None:  # any will do, as no token sees the padding
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = "right"
        self.template_kwargs: dict[str, Any] | None = None
        if has_template:
            self.template_kwargs = without_thinking(self.reader) | (chat_template_kwargs or {})
        self.calls = Calls()
        self.signature = f"{Path(model).name},{self.frozen.weights},{precision}"
        if chat_template_kwargs:
            self.signature += f",{json.dumps(chat_template_kwargs, sort_keys=True)}"

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """Probabilities of the labels.

        Raises ``RewardError`` for a prompt that is longer than the model reads, and for an image
        that cannot be opened or is refused by the processor; the message names the row.
        """
        answers: list[list[float]] = [[] for _ in questions]
        order = sorted(range(len(questions)), key=lambda row: len(questions[row].text))
        for rows in chunks(order, self.batch_size, f"{self.reward}: answers"):
            batch = [questions[row] for row in rows]
            inputs = self.inputs(batch)
            logits = next_logits(self.frozen.network, inputs)
            for row, question, logits_of_row in zip(rows, batch, logits, strict=True):
                answers[row] = self._answer(question, logits_of_row)
            self.calls = self.calls.plus(len(batch), int(inputs["attention_mask"].sum()))
        return answers

    def write(self, questions: Sequence[Question], max_new_tokens: int) -> list[str]:
        """Texts, each by greedy decoding of one prompt, so that none depends on the others.

        Raises ``RewardError`` as ``choose``, also where a prompt leaves no room for the text.
        """
        import torch

        answers = []
        end = self.tokenizer.eos_token_id
        for (question,) in chunks(questions, 1, f"{self.reward}: texts"):
            inputs = self.inputs([question], max_new_tokens)
            with torch.no_grad():
                (ids,) = self.frozen.network.generate(
                    **inputs,
                    do_sample=False,
                    num_beams=1,
                    max_new_tokens=max_new_tokens,
                    pad_token_id=end,
                )
            self.calls = self.calls.plus(1, len(ids))
            new_ids = ids[inputs["input_ids"].shape[1] :]
            answers.append(str(self.tokenizer.decode(new_ids, skip_special_tokens=True)))
        return answers

    def inputs(self, questions: Sequence[Question], room: int = 0) -> Any:
        """Tensors of prompts with their images, padded on the right.

        Raises ``RewardError`` as ``choose``, also where ``room`` more tokens are too many.
        """
        try:
            encoded = self._encode(questions)
        except (ValueError, TypeError, RewardError) as error:
            if len(questions) == 1:
                raise RewardError(f"{questions[0].where}: {error}") from error
            for question in questions:  # the one that fails
                self.inputs([question], room)
            raise
        lengths = encoded["attention_mask"].sum(1).tolist()
        for question, length in zip(questions, lengths, strict=True):
            if length + room > self.frozen.longest:
                size = f"{length} tokens" + (f" and the answer up to {room}" if room else "")
                raise RewardError(
                    f"{question.where}: the prompt has {size}, "
                    f"the model reads {self.frozen.longest}"
                )
        if self.vision:
            return encoded.to(self.frozen.device, dtype=self.frozen.network.dtype)
        return encoded.to(self.frozen.device)

    def _encode(self, questions: Sequence[Question]) -> Any:
        texts = [question.text for question in questions]
        if self.template_kwargs is None:
            prompts = [f"{text}\nAnswer:" for text in texts]
            return self.reader(prompts, padding=True, return_tensors="pt")
        contents: list[Any] = [*texts]
        if self.vision:
            contents = [_content(question) for question in questions]
        padding = {"padding": True, "padding_side": "right"}
        return self.reader.apply_chat_template(
            [[{"role": "user", "content": content}] for content in contents],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **({"processor_kwargs": padding} if self.vision else {"padding": True}),
            **self.template_kwargs,
        )

    def _answer(self, question: Question, logits: Any) -> list[float]:
        """Probabilities of the labels among themselves, from the logits [V] of the next token."""
        import torch

        with naming(question.where, (ValueError,), RewardError):
            ids = label_ids(self.tokenizer, question.labels, self.reward)
        logits = logits.double()
        scores = torch.stack([torch.logsumexp(logits[pieces], dim=0) for pieces in ids])
        together = (scores.logsumexp(0) - logits.logsumexp(0)).exp().item()
        check_probability(question, together, self.tokenizer.decode([int(logits.argmax())]))
        return scores.softmax(dim=0).tolist()


def without_thinking(reader: Any) -> dict[str, Any]:
    """Variables of the chat template by which a model answers at once, if it can think before."""
    return {"enable_thinking": False} if "enable_thinking" in str(reader.chat_template) else {}


def _content(question: Question) -> list[dict[str, Any]]:
    """The parts of a message: the image, if there is one, before the text."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": question.text}]
    if question.image is not None:
        parts.insert(0, {"type": "image", "image": open_image(question.image)})
    return parts


def label_ids(tokenizer: Any, labels: Sequence[str], reward: str) -> list[list[int]]:
    """First tokens of each label, with and without a space before it.

    Raises ``ValueError`` where two labels share one.
    """
    ids = []
    for label in labels:
        first = set()
        for text in (label, f" {label}"):
            first |= set(tokenizer(text, add_special_tokens=False)["input_ids"][:1])
        ids.append(sorted(token for token in first if tokenizer.decode([token]).strip()))
    every = [token for tokens in ids for token in tokens]
    if len(set(every)) < len(every) or not all(ids):
        raise ValueError(
            f"{reward}: the tokenizer does not tell the labels {list(labels)} apart "
            "by their first tokens"
        )
    return ids


def next_logits(network: Any, inputs: Mapping[str, Any]) -> Any:
    """Logits [B, V] of the first token of the answers to B prompts.

    Prompts are padded on the right, where no token that counts sees the padding, so that an answer
    does not depend on the batch (but for rounding). Logits are made for the ends of prompts alone:
    logits of whole prompts take gigabytes.
    """
    import torch

    ends = inputs["attention_mask"].sum(1) - 1
    rows = torch.arange(len(ends), device=ends.device)
    keeps = "logits_to_keep" in inspect.signature(network.forward).parameters
    with torch.no_grad():
        if not keeps:  # a few models make all logits
            return network(**inputs, use_cache=False).logits[rows, ends]
        positions, place = torch.unique(ends, return_inverse=True)
        logits = network(**inputs, use_cache=False, logits_to_keep=positions).logits
    return logits[rows, place]
