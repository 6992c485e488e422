"""What of this package's ways to score and to sample is exact for a model of Transformers.

When a model is loaded, and again after ``adapt``, captions of two images are scored and decoded in
every way from the fastest on, and compared with the logits that the model's own ``generate`` draws
from, one image alone and the caption forced. No table of models is needed, and none is trusted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rewards.base import naming
from rewards.files import atomic_write
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.decoding import Prefixes, select_rows
from rl_caption.captioners.generate import generate
from rl_caption.captioners.vlm_policy import Mode, collate
from rl_caption.runtime.engines import dropout_off

if TYPE_CHECKING:
    from rl_caption.captioners.vlm import VisionLanguageCaptioner
    from rl_caption.data.base import Row

logger = logging.getLogger(__name__)

FOLDER = "RL_CAPTION_CHECKS"
"""Environment variable: the folder in which verdicts are kept; empty keeps them in the process."""
TOLERANCE = 1e-3
"""Largest difference of log-probabilities in float32."""
LOW_PRECISION_TOLERANCE = 0.3
"""In a lower precision: at most this, and three times what ``generate`` differs from itself."""
WINDOW = 5
"""Length of sliding windows during the check, so that its short captions cross them."""
TEXTS = ("a dog runs on the green grass", "two people wait for a red train")
"""Captions that are compared, of ``TOKENS`` tokens each."""
TOKENS = 3
SIZES = ((64, 48), (96, 32))
"""Width and height of the images: most models that cut images up cut these into different numbers."""
SLOW = {
    "rows": "images and prompts are read one by one",
    "none": "image and prompt are read anew for every caption, about K times the cost",
}
DECODES = {
    "generate": "; Transformers' generate samples",
    "alone": "; Transformers' generate samples, each caption alone",
}


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        mode: the fastest exact one.
        difference: the largest difference of log-probabilities, in nats.
        tolerance: that was allowed.
        visual: names of the parameters that visual tokens depend on.
        unused: names of those that no caption depends on.
    """

    mode: Mode
    difference: float
    tolerance: float
    visual: list[str]
    unused: list[str]

    def __str__(self) -> str:
        how = SLOW.get(self.mode.prefix, "image and prompt are read once for all captions")
        sampled = DECODES.get(self.mode.decode, "")
        return f"{how}{sampled}; log-probabilities are Transformers' own within {self.difference:.1g} nats"


def check(captioner: VisionLanguageCaptioner) -> Verdict:
    """Compare the captioner's ways with Transformers' ``generate``; its policy gets the mode.

    Raises:
        CaptionerError: none is exact: samples would not be scored as they were drawn.
    """
    policy = captioner.policy
    device = _device(policy)

    def compare() -> Verdict:
        prepared = _prepared_for_check(policy.model)
        with _on(device, policy), torch.enable_grad(), dropout_off(policy), prepared:
            return _Check(captioner).run()

    verdict = _remembered(_key(captioner, device), compare)
    policy.mode, policy.visual_names = verdict.mode, frozenset(verdict.visual)
    captioner.verdict = verdict
    trained = [name for name in verdict.unused if policy.model.get_parameter(name).requires_grad]
    for name in trained:
        policy.model.get_parameter(name).requires_grad_(False)
    if os.environ.get("RANK", "0") == "0":
        logger.info("%s: %s", captioner.family.name, verdict)
        if trained:
            logger.info("no caption depends on %s (%d): frozen", trained[0], len(trained))
    return verdict


class _Check:
    """One comparison: ``expected`` are the logits of ``generate`` for each row and caption."""

    def __init__(self, captioner: VisionLanguageCaptioner) -> None:
        self.captioner, self.policy = captioner, captioner.policy
        self.rows = check_rows()
        encoded = captioner.encode(TEXTS, TOKENS + 1)
        self.captions = [(ids[:-1] * TOKENS)[:TOKENS] for ids in encoded]
        self.problem: Exception | None = None
        device = next(self.policy.parameters()).device
        prepared = collate([captioner.prepare(row) for row in self.rows], captioner.pad_token_id)
        self.inputs = {name: value.to(device) for name, value in prepared.items()}
        self.ids = torch.tensor([self.captions] * len(self.rows), device=device)  # [B, K, T]
        self.alone = self.policy.rows(self.inputs)
        with naming(
            f"generate of this {captioner.family.name!r} fails", (Exception,), CaptionerError
        ):
            alone = [
                torch.cat([self._forced(row, [ids]) for ids in self.captions]) for row in self.alone
            ]
        self.expected = torch.stack(alone).float().log_softmax(-1)  # [B, K, T, V]

    def run(self) -> Verdict:
        """The fastest exact mode."""
        tolerance = TOLERANCE
        if self.policy.model.dtype != torch.float32:
            itself = self._together(use_cache=False)
            tolerance = max(TOLERANCE, min(3 * itself, LOW_PRECISION_TOLERANCE))
        gaps: dict[Mode, float] = {}
        exact: Mode | None = None
        for mode in self._candidates():
            gaps[mode] = self._gap(partial(self._scored, mode))
            if gaps[mode] <= tolerance:
                exact = mode
                break
        if exact is None:
            least = min(gaps.values())
            what = f"differ by up to {least:.2g} nats from" if least < math.inf else "are none of"
            raise CaptionerError(
                f"a {self.captioner.family.name!r} cannot be trained: log-probabilities of captions "
                f"{what} those that Transformers' generate draws from (allowed: {tolerance:.1g})"
            ) from self.problem
        difference = gaps[exact]
        if exact.prefix == "rows":
            batch = replace(exact, prefix="batch", padded=self._differ_in_size())
            gap = self._gap(lambda: self._scored(batch))
            if batch.features:  # as where the vision tower is frozen
                gap = max(gap, self._gap(lambda: self._scored(batch, rows=True)))
            if gap <= tolerance:
                exact, difference = batch, max(gap, difference)
        gap = self._gap(partial(self._decoded, exact)) if exact.prefix != "none" else math.inf
        if gap <= tolerance:
            difference = max(gap, difference)
        else:
            in_batch = self._together() <= tolerance
            exact = replace(exact, decode="generate" if in_batch else "alone")
        visual, unused = self._dependencies(exact)
        return Verdict(exact, difference, tolerance, visual, unused)

    def _candidates(self) -> Iterator[Mode]:
        """Modes from the fastest on; where rows alone are exact, a batch is tried after that."""
        takes = bool(self.policy.image_inputs)
        for prefix in ("rows", "none"):
            for kind in (0, 1) if prefix == "none" else (0,):
                for features in ("tokens", "whole", "") if takes else ("",):
                    yield Mode(prefix, features, padded=False, caption_type=kind)  # type: ignore[arg-type]

    def _differ_in_size(self) -> bool:
        """Whether one image is padded in a batch of the two."""
        first, second = self.alone
        return any(
            first[name].shape[1:] != second[name].shape[1:]
            for name in first
            if first[name].shape != first["input_ids"].shape
        )

    def _gap(self, logits: Callable[[], Tensor]) -> float:
        """Largest difference of log-probabilities; infinite where they cannot be computed."""
        try:
            logprobs = logits().detach().float().log_softmax(-1)
            largest = float((logprobs - self.expected).abs().max())
        except Exception as error:  # noqa: BLE001 - whatever a model raises
            self.problem = error
            return math.inf
        return largest if math.isfinite(largest) else math.inf

    def _together(self, **how: Any) -> float:
        """What ``generate`` differs from itself, where captions of an image are a batch."""
        return self._gap(
            lambda: torch.stack([self._forced(row, self.captions, **how) for row in self.alone])
        )

    def _forced(self, row: dict[str, Any], captions: Sequence[list[int]], **how: Any) -> Tensor:
        """Logits [K, T, V] that ``generate`` draws the captions from."""
        calls = itertools.count()

        def allowed(*_: Any) -> list[int]:
            step, number = divmod(next(calls), len(captions))
            return [captions[number][step]]

        how["prefix_allowed_tokens_fn"] = allowed
        output = generate(self.policy.model, row, len(captions), TOKENS, **how)
        assert output.sequences[:, -TOKENS:].tolist() == list(captions), "they are not forced"
        return torch.stack(output.logits, 1)

    def _scored(self, mode: Mode, rows: bool = False) -> Tensor:
        """Logits by teacher forcing, perhaps with visual tokens of each row alone."""
        self.policy.mode = mode
        inputs = self.policy.encode(self.inputs, by_rows=True) if rows else self.inputs
        return self.policy(**inputs, token_ids=self.ids)

    @torch.no_grad()
    def _decoded(self, mode: Mode) -> Tensor:
        """Logits of a decode that is given the captions token by token."""
        self.policy.mode = mode
        inputs = self.inputs
        if self.policy.takes_features:
            inputs = self.policy(**inputs, encode=True)
        rows = torch.arange(len(self.rows))
        groups = [rows] if self.policy.joins(inputs) else rows.split(1)
        logits = []
        for group in groups:
            ids = self.ids[group].flatten(0, 1)
            image = torch.arange(len(group), device=ids.device).repeat_interleave(len(TEXTS))
            next_logits = self.captioner.next_logits(
                self.policy, select_rows(inputs, group), TOKENS
            )
            steps = [next_logits(None)[image]]
            for position in range(TOKENS - 1):
                parent = image if position == 0 else None
                steps.append(next_logits(Prefixes(ids[:, position], parent, image)))
            logits.append(torch.stack(steps, 1))
        return torch.cat(logits).unflatten(0, self.ids.shape[:2])

    def _dependencies(self, mode: Mode) -> tuple[list[str], list[str]]:
        """Names of the parameters that visual tokens depend on, and of those that nothing does.

        An expert that these captions did not meet may be met by others.
        """
        parameters = dict(self.policy.model.named_parameters())
        read = _leaves([self._scored(mode)])
        unused = [name for name, p in parameters.items() if id(p) not in read]
        visual: list[str] = []
        if mode.features:
            outputs = [self.policy.read_images(row) for row in self.alone]
            seen = _leaves(tree_leaves(outputs))
            visual = [name for name, p in parameters.items() if id(p) in seen]
        return visual, [name for name in unused if ".experts." not in name]


def check_rows() -> list[Row]:
    """Two rows with images of noise of different sizes; the second one has a prompt of its own."""
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for number, (width, height) in enumerate(SIZES):
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        image = Image.fromarray(pixels.numpy())
        rows.append({"image_id": f"noise {number}", "image": image, "references": []})
    rows[1]["prompt"] = "describe all that is in the photo"
    return rows


def _device(policy: nn.Module) -> torch.device:
    """The GPU of this process where the policy has room on it, else where it is."""
    parameters = list(policy.parameters())
    home = parameters[0].device
    if home.type != "cpu" or not torch.cuda.is_available():
        return home
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    size = sum(parameter.nbytes for parameter in parameters)
    return device if 2 * size < torch.cuda.mem_get_info(device)[0] else home


@contextmanager
def _on(device: torch.device, policy: nn.Module) -> Iterator[None]:
    """Within, the policy is on ``device``, and products in float32 are not rounded to TF32."""
    home = next(policy.parameters()).device
    backends: Any = torch.backends
    products = (backends.cudnn.conv, backends.cuda.matmul)
    precisions = [product.fp32_precision for product in products]
    try:
        for product in products:
            product.fp32_precision = "ieee"
        policy.to(device)
        yield
    finally:
        policy.to(home)
        for product, precision in zip(products, precisions, strict=True):
            product.fp32_precision = precision


@contextmanager
def _prepared_for_check(model: nn.Module) -> Iterator[None]:
    """Within, windows are short, adapters do something, and every weight asks for a gradient."""
    asked = {parameter: parameter.requires_grad for parameter in model.parameters()}
    kept = {
        parameter: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if ".lora_B." in name
    }
    generator = torch.Generator().manual_seed(0)
    owners: dict[int, Any] = {
        id(owner): owner
        for module in model.modules()
        for owner in (module, getattr(module, "config", None))
        if isinstance(getattr(owner, "sliding_window", None), int)
    }
    windows = [(owner, owner.sliding_window) for owner in owners.values()]
    try:
        for owner, _ in windows:
            owner.sliding_window = min(owner.sliding_window, WINDOW)
        for parameter in asked:
            parameter.requires_grad_(parameter.is_floating_point())
        with torch.no_grad():
            for parameter in kept:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 0.1)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept.items():
                parameter.copy_(value)
        for parameter, required in asked.items():
            parameter.requires_grad_(required)
        for owner, window in windows:
            owner.sliding_window = window


def _leaves(tensors: Iterable[Any]) -> set[int]:
    """``id`` of the parameters that tensors depend on, from the graph of their gradient."""
    nodes = [t.grad_fn for t in tensors if isinstance(t, Tensor) and t.grad_fn is not None]
    seen, leaves = set(nodes), set()
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return leaves


# Verdicts that are remembered

_verdicts: dict[str, Verdict] = {}


def _key(captioner: VisionLanguageCaptioner, device: torch.device) -> str:
    """Hash of what a verdict depends on: configuration, processor, names and types of weights,
    device, versions of libraries, and this package's code.
    """
    policy = captioner.policy
    parts = [
        f"{torch.__version__} {transformers.__version__} {device.type}",
        str(policy.config._attn_implementation),
        policy.config.to_json_string(),
        repr(captioner.processor),
        repr(captioner.messages),
    ]
    parts += (
        f"{name} {parameter.dtype} {tuple(parameter.shape)}"
        for name, parameter in policy.named_parameters()
    )
    parts += (name for name, m in policy.named_modules() if isinstance(m.forward, partial))
    parts += (file.read_text() for file in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _remembered(key: str, compare: Callable[[], Verdict]) -> Verdict:
    """The verdict of a key, of this process or another one; else that of ``compare``."""
    folder = os.environ.get(FOLDER, "~/.cache/rl_caption/checks")
    file = Path(folder).expanduser() / f"{key}.json" if folder else None
    if key not in _verdicts and file is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            values = json.loads(file.read_text())
            values["mode"] = Mode(**values["mode"])
            _verdicts[key] = Verdict(**values)
    if key not in _verdicts:
        _verdicts[key] = compare()
        if file is not None:
            with suppress(OSError), atomic_write(file, sync=False) as opened:
                opened.write(json.dumps(asdict(_verdicts[key])).encode())
    return _verdicts[key]
