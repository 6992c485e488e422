"""The evaluation program: captions of a split, decoded here or read from a file, against references."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from rl_caption.build import ConfigError, build_data, references_of, usable_split
from rl_caption.captioners.base import Decoding
from rl_caption.config import EvaluateConfig
from rl_caption.data.base import DataModule, Row
from rl_caption.data.files import read_captions, read_references
from rl_caption.evaluation import Evaluation, check_writable, evaluate_captions, format_table, write_evaluation
from rl_caption.inference import caption_rows
from rl_caption.launch import accelerator_kwargs, check_processes
from rl_caption.tracking import announce


def evaluate_split(config: EvaluateConfig) -> str:
    """Decode (or read) captions, judge them, write ``predictions.json`` and ``scores.json``, return the table.

    Raises:
        ConfigError: both or neither of ``model`` and ``predictions`` are set.
        EvaluationError, DataError: unusable captions, references or images.
    """
    if (config.model is None) == (config.predictions is None):
        raise ConfigError("set either model (a saved captioner) or predictions (a file in COCO result format)")
    check_writable(config.out)
    if config.predictions is not None and config.references is not None:
        captions, references = read_captions(config.predictions), read_references(config.references)
        evaluation = evaluate_captions(captions, references, metrics=config.metrics, tokenizer=config.tokenizer)
        return _finish(config, evaluation, captions, Path(config.predictions).stem)
    data = build_data(config.data)
    rows = data.split(usable_split(data, config.split))
    known = {row["image_id"]: row for row in (rows[index] for index in range(len(rows)))}
    if config.predictions is not None:
        captions, name = read_captions(config.predictions), Path(config.predictions).stem
    else:
        accelerator = Accelerator(**accelerator_kwargs())
        check_processes(accelerator.num_processes)
        captions, name = _decode(config, rows, accelerator), config.split
        if not accelerator.is_main_process:
            return ""
    evaluation = evaluate_captions(
        captions,
        {image_id: row["references"] for image_id, row in known.items()},
        metrics=config.metrics,
        tokenizer=config.tokenizer,
        training_captions=_training_captions(data),
        scenes={i: row["scene"] for i, row in known.items()} if all("scene" in row for row in known.values()) else None,
    )
    return _finish(config, evaluation, captions, name)


def _decode(config: EvaluateConfig, rows: Sequence[Row], accelerator: Accelerator) -> dict[str, str]:
    from rl_caption.captioners.transformer import TransformerCaptioner

    folder = Path(config.model or "")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {str(folder)!r} is not a saved captioner: it has no config.json")
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


def _finish(config: EvaluateConfig, evaluation: Evaluation, captions: dict[str, str], name: str) -> str:
    paths = write_evaluation(evaluation, captions, config.out)
    print(f"wrote {' and '.join(str(path) for path in paths)}", file=sys.stderr)
    return format_table({name: evaluation})
