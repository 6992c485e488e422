"""Captions of a split over all processes, and validation of a captioner by them during training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm

from rewards.base import RewardError
from rewards.text.tokenize import TOKENIZER, tokenizer_of
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.config.schema import CaptionEvalConfig
from rl_caption.data.base import Row
from rl_caption.data.files import write_json
from rl_caption.evaluation import validation_cider
from rl_caption.monitoring.monitor import HackingMonitor
from rl_caption.runtime.engines import autocast, dropout_off
from rl_caption.runtime.types import Validation
from rl_caption.scst.rollout import sampling_noise
from rl_caption.training.caption_tables import log_caption_table, read_first_captions
from rl_caption.training.setup import Context


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
    share = range(accelerator.process_index, len(rows), accelerator.num_processes)
    hidden = (
        None if progress is not None and accelerator.is_main_process else True
    )  # None: off a terminal
    decoded: list[tuple[str, list[Candidate]]] = []
    with torch.no_grad(), dropout_off(policy), autocast(accelerator):
        for start in tqdm(
            range(0, len(share), decoding.batch_size), desc=progress, unit="batch", disable=hidden
        ):
            batch = [rows[index] for index in share[start : start + decoding.batch_size]]
            ids = [row["image_id"] for row in batch]
            inputs = {
                key: value.to(accelerator.device)
                for key, value in captioner.preprocess(batch).items()
            }
            noise = None
            if decoding.num_samples:
                noise = sampling_noise(seed, 0, ids, decoding.num_samples, decoding.max_new_tokens)
                noise = noise.to(accelerator.device)
            if decoding.num_return_sequences > 1:
                token_ids, scores = captioner.generate_with_scores(policy, inputs, decoding, noise)
            else:
                token_ids, scores = captioner.generate(policy, inputs, decoding, noise), None
            decoded += zip(ids, _candidates(captioner, token_ids, scores), strict=True)
    gathered = dict(gather_object(decoded) if accelerator.num_processes > 1 else decoded)
    return {key: gathered[key] for key in (rows[index]["image_id"] for index in range(len(rows)))}


def _candidates(
    captioner: Captioner, token_ids: Tensor, scores: Tensor | None
) -> list[list[Candidate]]:
    """Captions of ``token_ids`` [B, R, T] by image. Beams that found no caption (score -inf) are
    left out.
    """
    per_image = token_ids.shape[1]
    texts = captioner.decode(token_ids.flatten(0, 1))
    finished = (token_ids == captioner.eos_token_id).any(-1).flatten().tolist()
    values: list[float | None] = (
        [None] * len(texts) if scores is None else scores.flatten().tolist()
    )
    flat = [Candidate(*candidate) for candidate in zip(texts, finished, values, strict=True)]
    groups = [flat[start : start + per_image] for start in range(0, len(flat), per_image)]
    return [
        [group[0], *(candidate for candidate in group[1:] if candidate.score != -math.inf)]
        for group in groups
    ]


class CaptionValidator:
    """Captions the validation images as ``config.eval`` says and scores the captions. Called by
    every process.

    Captions are written to ``eval/step-N/predictions.json`` in COCO result format. With a monitor
    of reward hacking, its judges' scores of every image are written to ``eval/step-N/judges.json``.
    """

    def __init__(
        self,
        context: Context,
        captioner: Captioner,
        max_new_tokens: int,
        monitor: HackingMonitor | None = None,
    ) -> None:
        settings = context.config.eval
        assert isinstance(settings, CaptionEvalConfig), "of a captioner"
        self.context, self.captioner, self.monitor = context, captioner, monitor
        self.decoding = Decoding(
            max_new_tokens=max_new_tokens,
            num_beams=settings.num_beams or 1,
            length_penalty=settings.length_penalty or 0.0,
            batch_size=settings.batch_size,
        )
        self.references = {row["image_id"]: row["references"] for row in context.val_rows}

    def __call__(self, step: int, logged: Mapping[str, float]) -> Validation:
        """Validate the policy as it is at ``step``; ``logged`` is what the newest step logged."""
        rows, accelerator, captioner = (
            self.context.val_rows,
            self.context.accelerator,
            self.captioner,
        )
        candidates_of = decode_candidates(
            captioner, captioner.policy, rows, self.decoding, accelerator
        )
        decoded = {image_id: candidates[0] for image_id, candidates in candidates_of.items()}
        captions = {image_id: candidate.caption for image_id, candidate in decoded.items()}
        if accelerator.is_main_process:
            records = [
                {"image_id": image_id, "caption": caption} for image_id, caption in captions.items()
            ]
            self._write(step, "predictions.json", records)
        tokenizer = self.context.config.data.tokenizer
        split = str.split if tokenizer == TOKENIZER else tokenizer_of(tokenizer)
        words = [len(split(caption)) for caption in captions.values()]
        cider = validation_cider(captions, self.references, tokenizer)
        metrics = {"val/cider": cider, "val/length": sum(words) / len(words)}
        verdict = (
            Validation({})
            if self.monitor is None
            else self._inspect(self.monitor, step, decoded, logged)
        )
        if (
            accelerator.is_main_process
            and accelerator.trackers
            and (count := self.context.config.run.log_captions)
        ):
            scores = {} if self.monitor is None else self.monitor.caption_scores
            first_captions = read_first_captions(self.context.folder)
            log_caption_table(accelerator, step, rows[:count], captions, first_captions, scores)
        return replace(verdict, metrics=metrics | verdict.metrics)

    def _inspect(
        self,
        monitor: HackingMonitor,
        step: int,
        decoded: Mapping[str, Candidate],
        logged: Mapping[str, float],
    ) -> Validation:
        """The main process's verdict, broadcast, so that scores that differ in a last bit cannot
        divide the processes.

        A RewardError of the main process is raised on every process.
        """
        accelerator, rows = self.context.accelerator, self.context.val_rows
        outcome: list[Validation | str | None] = [None]
        if accelerator.is_main_process:
            images = [rows[index] for index in range(len(rows))]
            texts, finished, _ = zip(*(decoded[row["image_id"]] for row in images), strict=True)
            policy = {
                key: logged[f"policy/{key}"]
                for key in ("entropy", "kl")
                if f"policy/{key}" in logged
            }
            try:
                verdict, findings = monitor.inspect(step, images, texts, finished, policy)
            except RewardError as error:
                if accelerator.num_processes == 1:
                    raise
                outcome = [str(error)]
            else:
                outcome = [verdict]
                self._write(
                    step,
                    "judges.json",
                    {"image_id": list(decoded), "judges": dict(findings.judges)},
                )
        if accelerator.num_processes > 1:
            broadcast_object_list(outcome)
        if not isinstance(outcome[0], Validation):
            raise RewardError(str(outcome[0]))
        return outcome[0]

    def _write(self, step: int, name: str, content: object) -> None:
        write_json(self.context.folder / "eval" / f"step-{step:08d}" / name, content)
