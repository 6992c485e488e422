"""Captions of a split over all processes, and validation of a captioner by them during training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from rl_caption.training.caption_tables import log_caption_table, read_first_captions


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
        disable=None if progress is not None and is_main else True,  # None: off a terminal
    )
    decoded: list[tuple[str, list[Candidate]]] = []
    with torch.no_grad(), dropout_off(policy), autocast(accelerator):
        for start in starts:
            batch = share[start : start + decoding.batch_size]
            ids = [row["image_id"] for row in batch]
            inputs = {key: value.to(device) for key, value in captioner.preprocess(batch).items()}
            noise, scores = None, None
            if decoding.num_samples:
                noise = sampling_noise(seed, 0, ids, decoding.num_samples, decoding.max_new_tokens)
                noise = noise.to(device)
            if decoding.num_return_sequences > 1:
                token_ids, scores = captioner.generate_with_scores(policy, inputs, decoding, noise)
            else:
                token_ids = captioner.generate(policy, inputs, decoding, noise)
            decoded += zip(ids, _candidates(captioner, token_ids, scores), strict=True)
    gathered = dict(gather_object(decoded) if accelerator.num_processes > 1 else decoded)
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
        log_captions: number of images whose captions trackers show.
        monitor: of reward hacking; it may end the run.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        captioner: Captioner,
        rows: Sequence[Row],
        decoding: Decoding,
        folder: Path,
        tokenizer: str = TOKENIZER,
        log_captions: int = 0,
        monitor: HackingMonitor | None = None,
    ) -> None:
        self.accelerator, self.captioner, self.rows = accelerator, captioner, rows
        self.decoding, self.folder, self.tokenizer = decoding, folder, tokenizer
        self.log_captions, self.monitor = log_captions, monitor
        self.references = {row["image_id"]: row["references"] for row in rows}

    def __call__(self, step: int, logged: Mapping[str, float]) -> Validation:
        """Validate the policy as it is at ``step``; ``logged`` is what the newest step logged."""
        accelerator, policy = self.accelerator, self.captioner.policy
        candidates = decode_candidates(
            self.captioner, policy, self.rows, self.decoding, accelerator
        )
        decoded = {image_id: found[0] for image_id, found in candidates.items()}
        captions = {image_id: candidate.caption for image_id, candidate in decoded.items()}
        if accelerator.is_main_process:
            records = [{"image_id": key, "caption": text} for key, text in captions.items()]
            self._write(step, "predictions.json", records)
        split = str.split if self.tokenizer == TOKENIZER else tokenizer_of(self.tokenizer)
        metrics = {
            "val/cider": validation_cider(captions, self.references, self.tokenizer),
            "val/length": fmean(len(split(caption)) for caption in captions.values()),
        }
        verdict = Validation({})
        if self.monitor is not None:
            verdict = self._inspect(self.monitor, step, decoded, logged)
        if accelerator.is_main_process and accelerator.trackers and self.log_captions:
            scores = {} if self.monitor is None else self.monitor.caption_scores
            first = read_first_captions(self.folder)
            shown = self.rows[: self.log_captions]
            log_caption_table(accelerator, step, shown, captions, first, scores)
        return replace(verdict, metrics=metrics | verdict.metrics)

    def _inspect(
        self,
        monitor: HackingMonitor,
        step: int,
        decoded: Mapping[str, Candidate],
        logged: Mapping[str, float],
    ) -> Validation:
        """The main process's verdict, broadcast, so that scores that differ in a last bit cannot
        divide the processes; so is its RewardError.
        """
        outcome: list[Any] = [None]
        if self.accelerator.is_main_process:
            images = [self.rows[index] for index in range(len(self.rows))]
            texts, finished, _ = zip(*(decoded[row["image_id"]] for row in images), strict=True)
            policy = {
                key: logged[f"policy/{key}"]
                for key in ("entropy", "kl")
                if f"policy/{key}" in logged
            }
            try:
                outcome[0], findings = monitor.inspect(step, images, texts, finished, policy)
            except RewardError as error:
                outcome[0] = error
            else:
                scores = {"image_id": list(decoded), "judges": dict(findings.judges)}
                self._write(step, "judges.json", scores)
        if self.accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        if isinstance(outcome[0], RewardError):
            raise outcome[0]
        verdict: Validation = outcome[0]
        return verdict

    def _write(self, step: int, name: str, content: object) -> None:
        write_json(self.folder / "eval" / f"step-{step:08d}" / name, content)
