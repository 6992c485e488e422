"""Metrics and captions of a captioner, kept on disk until what they depend on changes; the policy of a last step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_model

from rewards.base import Reward
from rl_caption.ablation.config import AblateConfig
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.loading import load_captioner, weights_hash
from rl_caption.config.schema import DataConfig, DecodeConfig, EvaluateConfig
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import check_type, read_json, read_yaml
from rl_caption.evaluation import write_evaluation
from rl_caption.evaluation.metrics import signed
from rl_caption.programs.evaluate import score_captions, settings_of
from rl_caption.report.read import EvaluationFolder, read_evaluation
from rl_caption.training.checkpoint import (
    CheckpointError,
    is_intact,
    newest_checkpoint,
    remove_tree,
    replace_folder,
    write_errors,
)


def evaluate_captioner(
    model: str | Path,
    data: DataConfig,
    max_new_tokens: int,
    config: AblateConfig,
    judges: Mapping[str, Reward],
    folder: Path,
    prompt: str | None = None,
) -> EvaluationFolder:
    """Metrics and captions of a model on the grid's split.

    Those in ``folder``, unless the model's weights, the data, the decoding, the metrics or a judge has changed.
    ``prompt`` is that of a model that was not exported with one.

    Raises:
        EvaluationError, CaptionerError, DataError, RewardError: as for ``evaluate.py`` and the judges.
        ReportError: what is in ``folder`` is damaged.
    """
    evaluate = EvaluateConfig(
        model=str(model),
        prompt=prompt,
        data=data,
        split=config.split,
        decode=DecodeConfig(config.num_beams, max_new_tokens, config.length_penalty),
        metrics=config.metrics,
        tokenizer=config.tokenizer,
        out=str(folder),
    )
    note, signatures = folder / "settings.json", {name: reward.signature for name, reward in judges.items()}
    settings = settings_of(evaluate) | {"metrics": config.metrics, "judges": signatures}
    noted = {"prompt": None} | (_read(note) or {})
    if "data" in noted:  # an option that an earlier version did not have has its default
        noted["data"] = json.loads(json.dumps(asdict(DataConfig()))) | noted["data"]
    if noted != settings:
        note.unlink(missing_ok=True)
        judged = score_captions(evaluate, judges)
        assert judged is not None, "this program is one process"
        write_evaluation(*judged, folder)
        write_json(note, settings)  # last
    found = read_evaluation(folder)
    # Files of earlier versions lack the judges' signatures.
    found.scores["signature"] = signed(found.scores["signature"], signatures)
    return found


def last_policy(run: Path, folder: Path) -> Path:
    """The captioner after the last step of a finished run, saved in ``folder`` unless it is there.

    ``checkpoint.json`` in it has the hash of the weights that it was made of; after another training it is made anew.

    Raises:
        CheckpointError: the run has no intact checkpoint, or ``folder`` cannot be written.
    """
    newest, note = newest_checkpoint(run / "checkpoints"), "checkpoint.json"
    trained = None if newest is None else {"sha256": weights_hash(newest)}
    # Checkpoints may have been removed to save space.
    if is_intact(folder) and (trained is None or _read(folder / note) == trained):
        return folder
    if newest is None:
        raise CheckpointError(f"{run / 'checkpoints'} has no intact checkpoint: judge policy best, or train it again")
    captioner = load_captioner(run / "export" / "best")
    config = run / "config.yaml"
    model = read_yaml(config, CheckpointError, dict[str, Any]).get("model", {}) if config.is_file() else {}
    check_type(model, dict[str, Any], f"{config}, 'model'", CheckpointError)
    lora = model.get("lora")
    check_type(lora, dict[str, Any] | None, f"{config}, 'model', 'lora'", CheckpointError)
    if lora is not None and isinstance(captioner, HuggingFaceCaptioner):
        # The export has merged adapters, the checkpoint separate ones.
        captioner.adapt([], lora | {"export_adapters": False}, checkpointed=False)
    load_model(captioner.policy, newest / "model.safetensors")
    partial = folder.with_name(f".partial-{folder.name}")
    with write_errors(f"model {folder}", partial, run / "checkpoints"):
        remove_tree(partial)
        captioner.save_pretrained(captioner.policy, partial)
        write_json(partial / note, trained)
        replace_folder(partial, folder)
    return folder


def _read(file: Path) -> Any:
    """What a JSON file of this program holds; None where there is none."""
    return read_json(file, CheckpointError) if file.is_file() else None
