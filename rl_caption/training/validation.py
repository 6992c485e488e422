"""Captions of a split over all processes, and validation of a captioner by them during training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm

from rewards.base import RewardError
from rewards.text.tokenize import TOKENIZER, tokenizer_of
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.data.base import Row
from rl_caption.data.files import write_json
from rl_caption.evaluation import validation_cider
from rl_caption.monitoring.monitor import HackingMonitor
from rl_caption.runtime.engines import autocast, dropout_off
from rl_caption.runtime.types import Validation
from rl_caption.scst.rollout import sampling_noise


class Candidate(NamedTuple):
    """A caption of an image, one of several."""

    caption: str
    finished: bool
    """Whether it ended with EOS."""
    score: float | None
    """Score of beam search (``Generated.scores``); None without beam search."""


def decode_candidates(
    captioner: Captioner,
    policy: nn.Module,
    rows: Sequence[Row],
    decoding: Decoding,
    accelerator: Accelerator,
    progress: str | None = None,
    seed: int = 0,
) -> dict[str, list[Candidate]]:
    """Decode ``captions_per_image`` captions of each row: image id -> candidates, ordered as
    ``rows``.

    Called by every process: each of N processes decodes every N-th row, in batches of
    ``decoding.batch_size``, and all return all captions. ``progress`` is the title of a progress
    bar, which is shown on a terminal or in a notebook. Samples depend on ``seed`` and the image id
    only.
    """
    is_main, device = accelerator.is_main_process, accelerator.device
    share = rows[accelerator.process_index :: accelerator.num_processes]
    starts = tqdm(
        range(0, len(share), decoding.batch_size),
        desc=progress,
        unit="batch",
        disable=None
        if progress is not None and is_main
        else True,  # None: off a terminal
    )
    decoded: list[tuple[str, list[Candidate]]] = []
    with torch.no_grad(), dropout_off(policy), autocast(accelerator):
        for start in starts:
            batch = share[start : start + decoding.batch_size]
            ids = [row["image_id"] for row in batch]
            inputs = {
                key: value.to(device)
                for key, value in captioner.preprocess(batch).items()
            }
            noise, scores = None, None
            if decoding.num_samples:
                noise = sampling_noise(
                    seed, 0, ids, decoding.num_samples, decoding.max_new_tokens
                )
                noise = noise.to(device)
            if decoding.num_return_sequences > 1:
                token_ids, scores = captioner.generate_with_scores(
                    policy, inputs, decoding, noise
                )
            else:
                token_ids = captioner.generate(policy, inputs, decoding, noise)
            decoded += zip(ids, _candidates(captioner, token_ids, scores), strict=True)
    gathered = dict(
        gather_object(decoded) if accelerator.num_processes > 1 else decoded
    )
    return {row["image_id"]: gathered[row["image_id"]] for row in rows}


def _candidates(
    captioner: Captioner, token_ids: Tensor, scores: Tensor | None
) -> list[list[Candidate]]:
    """Captions of ``token_ids`` [B, R, T] by image. Beams that found no caption (score -inf) are
    left out, but for the first of an image.
    """
    texts = captioner.decode(token_ids.flatten(0, 1))
    finished = (token_ids == captioner.eos_token_id).any(-1).flatten().tolist()
    values = [None] * len(texts) if scores is None else scores.flatten().tolist()
    per_image = token_ids.shape[1]
    groups: list[list[Candidate]] = []
    for index, candidate in enumerate(map(Candidate, texts, finished, values)):
        if index % per_image == 0:
            groups.append([candidate])
        elif candidate.score != -math.inf:
            groups[-1].append(candidate)
    return groups


@dataclass
class CaptionValidator:
    """Captions the validation images and scores the captions. Called by every process.

    Captions are written to ``eval/step-N/predictions.json`` in COCO result format. With a monitor
    of reward hacking, its judges' scores of every image are written to ``eval/step-N/judges.json``.

    Args:
        accelerator: of the run.
        captioner: whose policy is validated.
        rows: the validation images.
        decoding: how they are captioned.
        folder: of the run.
        tokenizer: name of the tokenizer of CIDEr-D and of lengths.
        monitor: of reward hacking; it may end the run.
    """

    accelerator: Accelerator
    captioner: Captioner
    rows: Sequence[Row]
    decoding: Decoding
    folder: Path
    tokenizer: str = TOKENIZER
    monitor: HackingMonitor | None = None

    def __call__(self, step: int, logged: Mapping[str, float]) -> Validation:
        """Validate the policy as it is at ``step``; ``logged`` is what the newest step logged."""
        captioner = self.captioner
        found = decode_candidates(
            captioner, captioner.policy, self.rows, self.decoding, self.accelerator
        )
        decoded = {image_id: candidates[0] for image_id, candidates in found.items()}
        captions = {
            image_id: candidate.caption for image_id, candidate in decoded.items()
        }
        folder = self.folder / "eval" / f"step-{step:08d}"
        if self.accelerator.is_main_process:
            records = [
                {"image_id": key, "caption": text} for key, text in captions.items()
            ]
            write_json(folder / "predictions.json", records)
        references = {row["image_id"]: row["references"] for row in self.rows}
        split = (
            str.split if self.tokenizer == TOKENIZER else tokenizer_of(self.tokenizer)
        )
        metrics = {
            "val/cider": validation_cider(captions, references, self.tokenizer),
            "val/length": fmean(len(split(caption)) for caption in captions.values()),
        }
        if self.monitor is None:
            return Validation(metrics)
        # The main process's verdict, or its RewardError, is broadcast, so that scores that differ
        # in a last bit cannot divide the processes.
        outcome: list[Any] = [None]
        if self.accelerator.is_main_process:
            outcome[0] = self._inspect(
                self.monitor, step, decoded, logged, folder / "judges.json"
            )
        if self.accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        verdict: Validation | RewardError = outcome[0]
        if isinstance(verdict, RewardError):
            raise verdict
        return replace(verdict, metrics=metrics | verdict.metrics)

    def _inspect(
        self,
        monitor: HackingMonitor,
        step: int,
        decoded: Mapping[str, Candidate],
        logged: Mapping[str, float],
        file: Path,
    ) -> Validation | RewardError:
        """The monitor's verdict; writes its judges' scores to ``file``."""
        texts = [candidate.caption for candidate in decoded.values()]
        finished = [candidate.finished for candidate in decoded.values()]
        names = [name for name in ("entropy", "kl") if f"policy/{name}" in logged]
        policy = {name: logged[f"policy/{name}"] for name in names}
        try:
            verdict, findings = monitor.inspect(
                step, list(self.rows), texts, finished, policy
            )
        except RewardError as error:
            return error
        write_json(file, {"image_id": list(decoded), "judges": dict(findings.judges)})
        return verdict
