"""The evaluation program: captions of a split, decoded here or read from a file, against references."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from rl_caption.build import ConfigError, build_data, quiet_libraries, references_of, usable_split
from rl_caption.captioners.base import Decoding
from rl_caption.config import EvaluateConfig
from rl_caption.data.base import DataModule, Row
from rl_caption.data.files import id_key, read_captions, read_references
from rl_caption.evaluation import Evaluation, check_writable, evaluate_captions, format_table, write_evaluation
from rl_caption.inference import caption_rows
from rl_caption.launch import accelerator_kwargs, check_processes
from rl_caption.tracking import announce


def evaluate_split(config: EvaluateConfig) -> str:
    """Decode (or read) captions, judge them, write ``predictions.json`` and ``scores.json``, return the table.

    Empty in every process but the main one.

    Raises:
        ConfigError: both or neither of ``model`` and ``predictions`` are set.
        EvaluationError, DataError: unusable captions, references or images.
    """
    judged = judge(config)
    if judged is None:
        return ""
    evaluation, captions = judged
    paths = write_evaluation(evaluation, captions, config.out)
    print(f"wrote {' and '.join(str(path) for path in paths)}", file=sys.stderr)
    return format_table({Path(config.predictions).stem if config.predictions else str(config.model): evaluation})


def judge(config: EvaluateConfig) -> tuple[Evaluation, dict[str, str]] | None:
    """Captions of ``config`` (decoded, or read) with what is to be said of them; None beside the main process."""
    if (config.model is None) == (config.predictions is None):
        raise ConfigError("set either model (a saved captioner) or predictions (a file in COCO result format)")
    check_writable(config.out)
    if config.predictions is not None and config.references is not None:
        captions = read_captions(config.predictions, allow_empty=True)
        references = read_references(config.references, by=id_key(config.predictions))
        evaluation = evaluate_captions(captions, references, metrics=config.metrics, tokenizer=config.tokenizer)
        return evaluation, captions
    data = build_data(config.data)
    rows = list(data.split(usable_split(data, config.split)))
    if config.predictions is not None:
        captions = read_captions(config.predictions, allow_empty=True)
    else:
        accelerator = Accelerator(**accelerator_kwargs())
        check_processes(accelerator.num_processes)
        captions = _decode(config, rows, accelerator)
        if not accelerator.is_main_process:
            return None
    evaluation = evaluate_captions(
        captions,
        {row["image_id"]: row["references"] for row in rows},
        metrics=config.metrics,
        tokenizer=config.tokenizer,
        training_captions=_training_captions(data),
        scenes={row["image_id"]: row["scene"] for row in rows} if all("scene" in row for row in rows) else None,
    )
    return evaluation, captions


def _decode(config: EvaluateConfig, rows: Sequence[Row], accelerator: Accelerator) -> dict[str, str]:
    from rl_caption.captioners.transformer import TransformerCaptioner

    folder = config.model or ""
    quiet_libraries()
    captioner = TransformerCaptioner.from_pretrained(folder)
    policy = captioner.policy.to(accelerator.device)
    decode = config.decode
    decoding = Decoding(
        max_new_tokens=decode.max_new_tokens, num_beams=decode.num_beams, length_penalty=decode.length_penalty
    )
    how = f"beam search of width {decode.num_beams}" if decode.num_beams > 1 else "greedy"
    announce(accelerator, f"captioning {len(rows)} images of {config.split!r} ({how}) with {folder}")
    return caption_rows(captioner, policy, rows, decoding, decode.batch_size, accelerator, progress="captioning")


def _training_captions(data: DataModule) -> set[str] | None:
    if "train" not in data.splits:
        return None
    return {caption for captions in references_of(data.split("train")) for caption in captions}
