"""The evaluation program: captions of a split, decoded here or read from a file, against references."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rewards.base import Reward
from rl_caption.build import ConfigError, build_data, quiet_libraries, references_of, usable_split
from rl_caption.captioners.base import Decoding
from rl_caption.config import EvaluateConfig
from rl_caption.data.base import DataModule, Row
from rl_caption.data.files import id_key, read_captions, read_references
from rl_caption.evaluation import Evaluation, check_writable, evaluate_captions, format_table, write_evaluation
from rl_caption.evaluation.comparison import check_same_images, folder_of, format_differences, write_comparison
from rl_caption.evaluation.confidence import compare, with_intervals
from rl_caption.evaluation.reward_scores import add_judges, check_judges
from rl_caption.hacking.judges import build_judges
from rl_caption.inference import caption_rows
from rl_caption.launch import accelerator_kwargs, check_processes
from rl_caption.report.program import write_report
from rl_caption.report.run_page import unique_names
from rl_caption.report.sources import Source, rows_of_config, rows_of_files
from rl_caption.tracking import announce


def evaluate_split(config: EvaluateConfig) -> str:
    """Decode (or read) captions, judge them, write ``predictions.json`` and ``scores.json``, return the table.

    Empty in every process but the main one.

    Raises:
        ConfigError, EvaluationError, DataError, RewardError: as for ``judge``.
    """
    judged = judge(config)
    if judged is None:
        return ""
    evaluation, captions = judged
    evaluation = with_intervals(evaluation, config.bootstrap, seed=config.seed)
    paths = write_evaluation(evaluation, captions, config.out)
    print(f"wrote {' and '.join(str(path) for path in paths)}", file=sys.stderr)
    _report(config)
    return format_table({Path(config.predictions).stem if config.predictions else str(config.model): evaluation})


def compare_systems(config: EvaluateConfig) -> str:
    """Judge two files of captions of the same images, test their differences, and return the tables.

    Writes a folder for each system as ``evaluate_split`` does, and ``comparison.json``.

    Raises:
        ConfigError: not two files, or a ``model`` or ``predictions`` besides.
        EvaluationError: the files have captions of different images; with counts.
        DataError, RewardError: as for ``judge``.
    """
    if len(config.compare) != 2 or config.model is not None or config.predictions is not None:
        raise ConfigError(f"compare names two files of captions, got {config.compare}, without model or predictions")
    first, second = config.compare
    if config.bootstrap < 1:
        raise ConfigError(f"bootstrap is {config.bootstrap}: a comparison needs at least 1 resample")
    out = check_writable(config.out)
    check_same_images(read_captions(first, allow_empty=True), read_captions(second, allow_empty=True), config.compare)
    names = unique_names([Path(path).with_suffix("") for path in config.compare])
    found: dict[str, Evaluation] = {}
    for name, path in zip(names, config.compare, strict=True):
        judged = judge(replace(config, predictions=path, compare=[]))
        assert judged is not None, "captions in files are judged by every process"
        evaluation, captions = judged
        found[name] = with_intervals(evaluation, config.bootstrap, seed=config.seed)
        write_evaluation(found[name], captions, out / folder_of(name))
    differences = compare(found[names[0]], found[names[1]], config.bootstrap, seed=config.seed)
    file = write_comparison(differences, names, config.bootstrap, config.seed, out)
    print(f"wrote {file} and a folder for each system", file=sys.stderr)
    _report(config)
    return "\n\n".join([format_table(found), format_differences(differences, names, config.bootstrap)])


def _report(config: EvaluateConfig) -> None:
    if config.report:
        page = write_report(Path(config.out), _report_source(config))
        if page is not None:
            print(f"wrote {page}", file=sys.stderr)


def judge(
    config: EvaluateConfig, judges: Mapping[str, Reward] | None = None
) -> tuple[Evaluation, dict[str, str]] | None:
    """Captions of ``config`` (decoded, or read) with what is to be said of them; None beside the main process.

    Args:
        config: of the evaluation.
        judges: name -> reward, in place of ``config.judges``: who evaluates several captioners loads them once.

    Raises:
        ConfigError: both or neither of ``model`` and ``predictions`` are set, or a judge cannot be built.
        EvaluationError, DataError: unusable captions, references or images.
        RewardError: a judge failed.
    """
    if (config.model is None) == (config.predictions is None):
        raise ConfigError("set either model (a saved captioner) or predictions (a file in COCO result format)")
    if config.bootstrap < 0:
        raise ConfigError(f"bootstrap is {config.bootstrap}: expected 0 (no intervals) or a number of resamples")
    if config.spice_jars is not None and not Path(config.spice_jars).is_dir():
        raise ConfigError(f"spice_jars {config.spice_jars!r} is not a folder: name the one with SPICE's two jars")
    check_writable(config.out)
    if config.predictions is not None and config.references is not None:
        return _judge_files(config, config.predictions, config.references, judges)
    data = build_data(config.data)
    rows = captioned = list(data.split(usable_split(data, config.split)))
    if config.predictions is not None:
        captions = read_captions(config.predictions, allow_empty=True)
        captioned = [row for row in rows if row["image_id"] in captions]
        judges = _usable_judges(config, judges, references_of(rows), captioned, f"split {config.split!r}")
    else:
        accelerator = Accelerator(**accelerator_kwargs())
        check_processes(accelerator.num_processes)
        if accelerator.is_main_process:
            judges = _usable_judges(config, judges, references_of(rows), rows, f"split {config.split!r}")
        captions = _decode(config, rows, accelerator)
        if not accelerator.is_main_process:
            return None
    evaluation = evaluate_captions(
        captions,
        {row["image_id"]: row["references"] for row in rows},
        metrics=metric_names(config.metrics),
        tokenizer=config.tokenizer,
        spice_jars=config.spice_jars,
        training_captions=_training_captions(data),
        scenes={row["image_id"]: row["scene"] for row in rows} if all("scene" in row for row in rows) else None,
    )
    return add_judges(evaluation, captioned, captions, judges or {}), captions


def _report_source(config: EvaluateConfig) -> Source:
    """Where the report finds references and images: the file of references, or the split."""
    predictions = config.compare[0] if config.compare else config.predictions
    if predictions is not None and config.references is not None:
        return rows_of_files(Path(config.references), by=id_key(predictions))
    return rows_of_config(asdict(config.data), config.split)


def _judge_files(
    config: EvaluateConfig, predictions: str, references: str, judges: Mapping[str, Reward] | None
) -> tuple[Evaluation, dict[str, str]]:
    captions = read_captions(predictions, allow_empty=True)
    known = read_references(references, by=id_key(predictions))
    rows = [{"image_id": image_id, "references": known[image_id]} for image_id in captions if image_id in known]
    judges = _usable_judges(config, judges, list(known.values()), rows, f"a file of references ({references})")
    evaluation = evaluate_captions(
        captions,
        known,
        metrics=metric_names(config.metrics),
        tokenizer=config.tokenizer,
        spice_jars=config.spice_jars,
    )
    return add_judges(evaluation, rows, captions, judges), captions


def metric_names(metrics: str | Sequence[str]) -> list[str]:
    """Metrics of a list, or of names with commas."""
    words = metrics.split(",") if isinstance(metrics, str) else metrics
    return [word.strip() for word in words if word.strip()]


def _usable_judges(
    config: EvaluateConfig,
    judges: Mapping[str, Reward] | None,
    references: Sequence[list[str]],
    rows: Sequence[Mapping[str, Any]],
    source: str,
) -> Mapping[str, Reward]:
    """The judges, built unless they are given, of whom each finds in ``rows`` what it needs."""
    if judges is None:
        judges = build_judges(config.judges, None, references, key="judges")
    check_judges(judges, rows, source)
    return judges


def _decode(config: EvaluateConfig, rows: Sequence[Row], accelerator: Accelerator) -> dict[str, str]:
    from rl_caption.captioners.loading import load_captioner

    folder = config.model or ""
    quiet_libraries()
    captioner = load_captioner(folder, prompt=config.prompt)
    for row in rows:
        captioner.room(row)
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
