"""Self-check: which of this package's ways to score and sample captions are exact for a
model of Transformers.

When a model is loaded, and again after ``adapt``, captions of two images are scored and
decoded in every way from the fastest on, and compared with the logits that the model's
own ``generate`` draws from, with one image at a time and the caption forced. No table
of models is needed or trusted.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from PIL import Image
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rewards.base import naming
from rewards.devices import is_main_process
from rewards.files import atomic_write
from rl_caption.captioners.base import CaptionerError, Inputs
from rl_caption.captioners.decoding import Prefixes
from rl_caption.captioners.generate import generate
from rl_caption.captioners.policy import IMAGES, Mode, Policy, by_rows
from rl_caption.runtime.engines import dropout_off

if TYPE_CHECKING:
    from rl_caption.captioners.huggingface import HuggingFaceCaptioner
    from rl_caption.data.base import Row

logger = logging.getLogger(__name__)

FOLDER = "RL_CAPTION_CHECKS"
"""Environment variable: the folder in which verdicts are kept."""
TOLERANCE = 1e-3
"""Largest accepted difference of log-probabilities in float32, in nats."""
LOW_PRECISION_TOLERANCE = 0.3
"""Upper limit of the tolerance in a lower precision, which is three times the
difference of ``generate`` from itself.
"""
WINDOW = 5
"""Length of sliding windows during the check, so that its short captions cross them."""
TEXTS = ("a dog runs on the green grass", "two people wait for a red train")
"""Captions that are compared, of ``TOKENS`` tokens each."""
TOKENS = 3
SIZES = ((64, 48), (96, 32))
"""Width and height of the two images. Models that tile images mostly cut them into
different numbers of tiles.
"""
COSTS = {
    "batch": "image and prompt are read once for all captions",
    "rows": "images and prompts are read one by one",
    "none": "image and prompt are read anew for every caption, about K times the cost; "
    "Transformers' generate samples",
}


@dataclass(frozen=True)
class Verdict:
    """Result of a check.

    Attributes:
        mode: the fastest exact mode.
        difference: the largest difference of log-probabilities, in nats.
        visual: names of the parameters that encoded images depend on.
        unused: names of the parameters that no caption depends on.
    """

    mode: Mode
    difference: float
    visual: list[str]
    unused: list[str]


VERDICT = TypeAdapter(Verdict)


def check(captioner: HuggingFaceCaptioner) -> None:
    """Compare the captioner's modes with Transformers' ``generate``; its policy gets
    the fastest exact mode.

    Raises:
        CaptionerError: no mode is exact: samples would not be scored as they were
            drawn.
    """
    policy = captioner.policy
    device = _device(policy)
    folder = Path(os.environ.get(FOLDER, "~/.cache/rl_caption/checks")).expanduser()
    file = folder / f"{_key(captioner, device)}.json"
    try:
        verdict = VERDICT.validate_json(file.read_bytes())
    except (OSError, ValueError):
        with _prepared_policy(policy, device), torch.enable_grad(), dropout_off(policy):
            verdict = _Check(captioner).run()
        with suppress(OSError), atomic_write(file, sync=False) as opened:
            opened.write(VERDICT.dump_json(verdict))
    policy.mode = verdict.mode
    policy.visual_names = frozenset(verdict.visual)
    for name in verdict.unused:
        policy.model.get_parameter(name).requires_grad_(False)
    if is_main_process():
        logger.info(
            "%s: %s; log-probabilities are Transformers' own within %.1g nats",
            captioner.family.name,
            COSTS[verdict.mode.prefix],
            verdict.difference,
        )
        if verdict.unused:
            logger.info("frozen, as no caption depends on them: %s", verdict.unused)


class _Check:
    """One comparison; ``expected`` are the log-probabilities of ``generate`` for each
    row and caption.
    """

    def __init__(self, captioner: HuggingFaceCaptioner) -> None:
        self.captioner = captioner
        self.policy = captioner.policy
        self.rows = check_rows(captioner.family.row_prompts)
        encoded = captioner.encode(TEXTS, TOKENS + 1)
        self.captions = [(ids[:-1] * TOKENS)[:TOKENS] for ids in encoded]
        policy = self.policy
        name = captioner.family.name
        device = policy.start.device
        inputs = captioner.preprocess(self.rows)
        self.inputs: Inputs = {n: t.to(device) for n, t in inputs.items()}
        self.ids = torch.tensor([self.captions] * len(self.rows), device=device)
        """Token ids of the captions, [B, K, T]."""
        self.alone = [policy.arguments(row) for _, row in by_rows(self.inputs)]
        if IMAGES not in self.inputs:
            self.alone = [policy.family.own_inputs(policy, **row) for row in self.alone]
        with naming(f"generate of this {name!r} fails", (Exception,), CaptionerError):
            alone = [
                self._force_captions(row, [ids])
                for row in self.alone
                for ids in self.captions
            ]
        logits = torch.cat(alone).unflatten(0, self.ids.shape[:2])
        self.expected = logits.float().log_softmax(-1)  # [B, K, T, V]

    def run(self) -> Verdict:
        """The fastest exact mode."""
        tolerance = TOLERANCE
        least = math.inf
        problem = None
        if self.policy.model.dtype != torch.float32:
            itself = self._difference(self._together(use_cache=False))
            tolerance = max(TOLERANCE, min(3 * itself, LOW_PRECISION_TOLERANCE))
        for mode in self._candidates():
            self.policy.mode = mode
            try:
                sampled = self._together() if mode.prefix == "none" else self._decode()
                scored, encoded = self._score_batch()
                difference = self._difference(scored, sampled)
            except Exception as error:  # noqa: BLE001 - whatever a model raises
                problem = error
                difference = math.inf
            if difference <= tolerance:
                return Verdict(mode, difference, *self._dependencies(scored, encoded))
            least = min(least, difference)
        raise CaptionerError(
            f"a {self.captioner.family.name!r} cannot be trained: log-probabilities of captions "
            f"differ by up to {least:.2g} nats from those that Transformers' generate draws from "
            f"(allowed: {tolerance:.1g})"
        ) from problem

    def _candidates(self) -> Iterator[Mode]:
        """Modes from the fastest on."""
        if IMAGES not in self.inputs:
            yield Mode()
            return
        first, second = self.alone
        padded = any(
            first[name].shape[1:] != second[name].shape[1:]
            for name in first
            if first[name].shape != first["input_ids"].shape
        )
        kinds = (True, False) if self.policy.image_inputs else (False,)
        for prefix, features in itertools.product(("batch", "rows", "none"), kinds):
            yield Mode(prefix, features, padded)

    def _difference(self, *logits: Tensor) -> float:
        """Largest difference of log-probabilities."""
        logprobs = torch.stack(logits).detach().float().log_softmax(-1)
        return float((logprobs - self.expected).abs().max())

    def _together(self, **how: Any) -> Tensor:
        """Logits of ``generate`` where the captions of an image are a batch."""
        rows = [self._force_captions(row, self.captions, **how) for row in self.alone]
        return torch.stack(rows)

    def _force_captions(
        self, row: Inputs, captions: Sequence[list[int]], **how: Any
    ) -> Tensor:
        """Logits [K, T, V] that ``generate`` draws the captions from."""
        calls = itertools.count()

        def next_token(*_: Any) -> list[int]:
            """The next token of a caption; called for each caption at each step."""
            step, number = divmod(next(calls), len(captions))
            return [captions[number][step]]

        how["prefix_allowed_tokens_fn"] = next_token
        options = {
            "num_return_sequences": len(captions),
            "max_new_tokens": TOKENS,
            "pad_token_id": 0,
        }
        output = generate(self.policy.model, row, options, **how)
        assert output.sequences[:, -TOKENS:].tolist() == list(captions), (
            "they are not forced"
        )
        return torch.stack(output.logits, 1)

    def _score_batch(self) -> tuple[Tensor, Inputs]:
        """Logits by teacher forcing, and the encoded images if the policy takes them.
        Each row is encoded alone, as with a frozen vision tower.
        """
        encoded: Inputs = {}
        if self.policy.takes_features:
            encoded = self.policy.encode(self.inputs, alone=True)
        inputs = encoded or self.inputs
        return self.policy(**inputs, token_ids=self.ids), encoded

    @torch.no_grad()
    def _decode(self) -> Tensor:
        """Logits of a decode that is given the captions token by token."""
        logits = []
        for rows, inputs in self.policy.parts(self.policy(**self.inputs, encode=True)):
            ids = self.ids[rows].flatten(0, 1)
            image = torch.arange(len(ids), device=ids.device) // len(TEXTS)
            next_logits = self.captioner.next_logits(self.policy, inputs, TOKENS)
            steps = [next_logits(None)[image]]
            for position in range(TOKENS - 1):
                parent = image if position == 0 else None
                steps.append(next_logits(Prefixes(ids[:, position], parent, image)))
            logits.append(torch.stack(steps, 1))
        return torch.cat(logits).unflatten(0, self.ids.shape[:2])

    def _dependencies(
        self, scored: Tensor, encoded: Inputs
    ) -> tuple[list[str], list[str]]:
        """Names of the parameters that encoded images depend on, and of the parameters
        that nothing depends on.

        Experts do not count as unused: other captions may be routed to them.
        """
        parameters = dict(self.policy.model.named_parameters())
        read = _leaves([scored])
        values = [getattr(value, "value", value) for value in encoded.values()]
        visual = _leaves(tree_leaves(values))
        unused = [name for name, p in parameters.items() if id(p) not in read]
        return (
            [name for name, p in parameters.items() if id(p) in visual],
            [name for name in unused if ".experts." not in name],
        )


def check_rows(prompted: bool) -> list[Row]:
    """Two rows with images of noise of different sizes; the second one may have its own prompt."""
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for number, (width, height) in enumerate(SIZES):
        pixels = torch.randint(256, (height, width, 3), generator=generator)
        image = Image.fromarray(pixels.byte().numpy())
        rows.append({"image_id": f"noise {number}", "image": image, "references": []})
    if prompted:
        rows[1]["prompt"] = "describe all that is in the photo"
    return rows


def _device(policy: Policy) -> torch.device:
    """This process's GPU, if the policy is on the CPU and has room on the GPU; else the
    policy's device.
    """
    home = policy.start.device
    if home.type == "cpu" and torch.cuda.is_available():
        needed = 2 * policy.model.get_memory_footprint()
        if needed < torch.cuda.mem_get_info()[0]:
            return torch.device("cuda")
    return home


@contextmanager
def _prepared_policy(policy: Policy, device: torch.device) -> Iterator[None]:
    """Context in which the policy is on ``device``, products in float32 are not rounded
    to TF32, windows are short, adapters do something, and every weight asks for a
    gradient.
    """
    generator = torch.Generator().manual_seed(0)
    backends: Any = torch.backends
    with ExitStack() as stack:

        def change(owner: Any, name: str, value: Any) -> None:
            """Set an attribute until the stack is closed."""
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        stack.callback(policy.to, policy.start.device)
        policy.to(device)
        for product in (backends.cudnn.conv, backends.cuda.matmul):
            change(product, "fp32_precision", "ieee")
        for module in policy.modules():
            for owner in (module, getattr(module, "config", None)):
                window = getattr(owner, "sliding_window", None)
                if isinstance(window, int):
                    change(owner, "sliding_window", min(window, WINDOW))
        for name, parameter in policy.named_parameters():
            change(parameter, "requires_grad", parameter.is_floating_point())
            if ".lora_B." in name:
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                change(parameter, "data", noise.to(parameter))
        yield


def _leaves(tensors: Iterable[Any]) -> set[int]:
    """``id`` of the parameters that tensors depend on, from the graph of their gradient."""
    nodes: list[Any] = [t.grad_fn for t in tensors if isinstance(t, Tensor)]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


def _key(captioner: HuggingFaceCaptioner, device: torch.device) -> str:
    """Hash of what a verdict depends on: configuration, processor, names and types of
    weights, device, versions of libraries, and this package's code.
    """
    policy = captioner.policy
    values = [
        torch.__version__,
        transformers.__version__,
        device.type,
        policy.config._attn_implementation,
        policy.config.to_json_string(),
        captioner.processors,
        captioner.prompt,
        [(n, p.dtype, p.shape) for n, p in policy.named_parameters()],
        [n for n, m in policy.named_modules() if isinstance(m.forward, partial)],
        [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))],
    ]
    return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()
