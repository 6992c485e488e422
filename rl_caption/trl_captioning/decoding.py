"""Captions of a split by a vision-language model, and what is to be said of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import GenerationConfig

from rewards.base import Reward
from rl_caption.data.base import Row, load_image
from rl_caption.evaluation import Evaluation, evaluate_rows, write_evaluation
from rl_caption.evaluation.judge import JUDGE
from rl_caption.evaluation.reward_scores import add_judges
from rl_caption.training.accumulation import dropout_off
from rl_caption.trl_captioning.config import GrpoVlmConfig
from rl_caption.trl_captioning.model import Vlm, decoding_from_nothing
from rl_caption.trl_captioning.rows import messages


def caption_images(
    vlm: Vlm,
    policy: Any,
    rows: Sequence[Row],
    prompt: str,
    max_new_tokens: int,
    num_beams: int = 1,
    batch_size: int = 8,
) -> dict[str, str]:
    """Decode one caption for each row, greedy or by beam search; every process decodes its share and gets all.

    Args:
        vlm: processor, and ids that end a caption or are no part of one.
        policy: the model, on its device; the same weights in every process.
        rows: what to caption.
        prompt: for rows without their own.
        max_new_tokens: length limit in tokens, EOS included.
        num_beams: 1 is greedy.
        batch_size: images at a time, in each process.

    Returns:
        image id -> caption, in the order of ``rows``.
    """
    state = PartialState()
    settings = GenerationConfig(
        do_sample=False,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        eos_token_id=vlm.eos_token_ids,
        pad_token_id=vlm.processor.tokenizer.pad_token_id,
        suppress_tokens=vlm.suppressed or None,
    )
    mine = range(state.process_index, len(rows), state.num_processes)
    captions: list[tuple[str, str]] = []
    shows = state.is_main_process and sys.stderr.isatty()
    bar = tqdm(range(0, len(mine), batch_size), desc="captioning", unit="batch", disable=not shows)
    with torch.no_grad(), dropout_off(policy), decoding_from_nothing(policy, settings):
        for start in bar:
            batch = [rows[index] for index in mine[start : start + batch_size]]
            inputs = _inputs(vlm.processor, batch, prompt).to(policy.device, policy.dtype)
            written = policy.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]
            texts = vlm.processor.batch_decode(written, skip_special_tokens=True)
            captions += [(row["image_id"], text.strip()) for row, text in zip(batch, texts, strict=True)]
    known = dict(gather_object(captions) if state.num_processes > 1 else captions)
    return {row["image_id"]: known[row["image_id"]] for row in rows}


def _inputs(processor: Any, rows: Sequence[Row], prompt: str) -> Any:
    """A batch exactly as TRL makes it in training, padded on the left."""
    from trl.data_utils import prepare_multimodal_messages

    asked = [prepare_multimodal_messages(messages(row, prompt), images=[load_image(row["image"])]) for row in rows]
    return processor.apply_chat_template(
        asked,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True},
    )


def evaluate_vlm(
    config: GrpoVlmConfig,
    vlm: Vlm,
    policy: Any,
    rows: Sequence[Row],
    training_captions: set[str],
    judges: Mapping[str, Reward],
    folder: Path,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Evaluation | None:
    """Caption ``rows``, judge the captions, write ``predictions.json`` and ``scores.json``; None beside process 0.

    Args:
        config: what to evaluate, and how.
        vlm, policy, rows: as for ``caption_images``.
        training_captions: as for ``evaluate_rows``.
        judges: heading to reward.
        folder: for the files.
        autocast: the precision that captions are written in (that of the training), before it and after it alike; not
            that of judges.

    Raises:
        EvaluationError, JavaError, RewardError: as for ``evaluate_rows`` and ``add_judges``.
    """
    eval_config = config.eval
    with autocast():
        captions = caption_images(
            vlm,
            policy,
            rows,
            config.model.prompt,
            config.rollout.max_new_tokens,
            eval_config.num_beams,
            eval_config.batch_size,
        )
    if not PartialState().is_main_process:
        return None
    evaluation = evaluate_rows(
        rows,
        list(captions.values()),
        metrics=eval_config.metrics,
        tokenizer=eval_config.tokenizer,
        training_captions=training_captions,
    )
    evaluation = add_judges(evaluation, rows, captions, judges)
    write_evaluation(evaluation, captions, folder)
    return evaluation


def read_scores(folder: Path, judges: Mapping[str, Reward]) -> Evaluation | None:
    """What ``evaluate_vlm`` wrote into ``folder``, without captions; None where it is not there.

    Args:
        folder: of one evaluation.
        judges: their bounds are not in the file.
    """
    file = folder / "scores.json"
    if not file.is_file():
        return None
    scores = json.loads(file.read_bytes())
    bounds = {f"{JUDGE}{name}": reward.bounds for name, reward in judges.items()}
    return Evaluation(scores["metrics"], scores["signature"], scores["n"], scores["left_out"], bounds=bounds)
