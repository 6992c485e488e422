"""Captions of a split over all processes, and validation of a captioner by them during training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, send_to_device
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
from rl_caption.training.run import Run


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
    """Decode ``captions_per_image`` captions of each row: image id -> candidates,
    ordered as ``rows``.

    Called by every process: each of N processes decodes every N-th row, in batches of
    ``decoding.batch_size``, and all return all captions. ``progress`` is the title of a
    progress bar, which is shown on a terminal or in a notebook. Samples depend on
    ``seed`` and the image id only.
    """
    device = accelerator.device
    share = rows[accelerator.process_index :: accelerator.num_processes]
    starts = tqdm(
        range(0, len(share), decoding.batch_size),
        desc=progress,
        unit="batch",
        # None: shown on a terminal only
        disable=None if progress and accelerator.is_main_process else True,
    )
    decoded: list[tuple[str, list[Candidate]]] = []
    with torch.no_grad(), dropout_off(policy), autocast(accelerator):
        for start in starts:
            batch = share[start : start + decoding.batch_size]
            ids = [row["image_id"] for row in batch]
            inputs = send_to_device(captioner.preprocess(batch), device)
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
    gathered = dict(gather_object(decoded))
    return {row["image_id"]: gathered[row["image_id"]] for row in rows}


def _candidates(
    captioner: Captioner, token_ids: Tensor, scores: Tensor | None
) -> list[list[Candidate]]:
    """Captions of ``token_ids`` [B, R, T] by image. Beams that found no caption (score
    -inf) are left out, but for the first of an image.
    """
    texts = captioner.decode(token_ids.flatten(0, 1))
    finished = (token_ids == captioner.eos_token_id).any(-1).flatten().tolist()
    values = [None] * len(texts) if scores is None else scores.flatten().tolist()
    candidates = map(Candidate, texts, finished, values)
    groups = []
    for _ in token_ids:
        first, *others = islice(candidates, token_ids.shape[1])
        groups.append([first, *(one for one in others if one.score != -math.inf)])
    return groups


def validate_captions(
    run: Run,
    captioner: Captioner,
    decoding: Decoding,
    tokenizer: str,
    monitor: HackingMonitor | None,
    step: int,
    logged: Mapping[str, float],
) -> Validation:
    """Caption the validation images and score the captions. Called by every process.

    Captions are written to ``eval/step-N/predictions.json`` in COCO result format, the
    scores of every image by the monitor's judges to ``eval/step-N/judges.json``.

    Args:
        run: the run, for its validation images and its folder.
        captioner, decoding: the captioner whose policy is validated, and how it
            decodes.
        tokenizer: name of the tokenizer of CIDEr-D and of ``val/length``, which splits
            at white space for ``ptb``.
        monitor: monitor of reward hacking, which may end the run; or None.
        step: step that the policy has reached.
        logged: what the newest step logged.
    """
    accelerator, rows = run.accelerator, run.val_rows
    decoded = decode_candidates(
        captioner, captioner.policy, rows, decoding, accelerator
    )
    captions = {key: candidates[0].caption for key, candidates in decoded.items()}
    folder = run.folder / "eval" / f"step-{step:08d}"
    if accelerator.is_main_process:
        records = [{"image_id": key, "caption": text} for key, text in captions.items()]
        write_json(folder / "predictions.json", records)
    references = {row["image_id"]: row["references"] for row in rows}
    split = str.split if tokenizer == TOKENIZER else tokenizer_of(tokenizer)
    metrics = {
        "val/cider": validation_cider(captions, references, tokenizer),
        "val/length": fmean(len(split(caption)) for caption in captions.values()),
    }
    if monitor is None:
        return Validation(metrics)
    # The main process's verdict, or its RewardError, is broadcast, so that scores that differ in a
    # last bit cannot divide the processes.
    verdict: Any = None
    if accelerator.is_main_process:
        finished = [candidates[0].finished for candidates in decoded.values()]
        policy = {
            name: logged[f"policy/{name}"]
            for name in ("entropy", "kl")
            if f"policy/{name}" in logged
        }
        texts = list(captions.values())
        try:
            verdict, judged = monitor.inspect(step, rows, texts, finished, policy)
            judges = {"image_id": list(captions), "judges": dict(judged.judges)}
            write_json(folder / "judges.json", judges)
        except RewardError as error:
            verdict = error
    (verdict,) = broadcast_object_list([verdict])
    if isinstance(verdict, RewardError):
        raise verdict
    return replace(verdict, metrics=metrics | verdict.metrics)
