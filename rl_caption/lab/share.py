"""The sharing program: an exported model with its model card, in a folder and on the Hugging Face
hub.

Every number on the card comes from the files of the run and of its evaluation.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rewards.model_files import MANIFEST, damage, read_object
from rl_caption.captioners.hf_families import check_architectures
from rl_caption.captioners.loading import is_captioner, weights_hash
from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import CAPTION_COLUMNS, column_of, markdown
from rl_caption.lab.config import ShareConfig
from rl_caption.programs.report.pages import (
    score_notes,
    score_tables,
    validations_table,
)
from rl_caption.programs.report.read import (
    EvaluationFolder,
    ReportError,
    RunFolder,
    read_evaluation,
    read_run,
)
from rl_caption.training.checkpoint import new_folder

TEMPLATE = Path(__file__).with_name("model_card.md")


def share(config: ShareConfig) -> str:
    """Write a copy of an exported model with its card to ``out``, and upload it; return where it
    is.

    Raises:
        ReportError: something is missing, damaged, or belongs to another model. Nothing is copied
            then.
        CheckpointError: ``out`` cannot be written; nothing is left there.
        OSError: the hub refused, or cannot be reached. What was written to ``out`` stays.
    """
    export, run = find_export(Path(config.path))
    model = read_export(export)
    judged = (
        None if config.evaluation is None else read_evaluation(Path(config.evaluation))
    )
    if judged is not None and judged.settings.get("weights") != weights_hash(export):
        raise ReportError(
            f"the evaluation is not of the weights of {export}: evaluate that model"
        )
    card = model_card(config, model, run, judged)
    out = Path(config.out)
    with new_folder(out) as partial:
        shutil.copytree(export, partial, dirs_exist_ok=True)
        card.save(partial / "README.md")
    if config.repo_id is None:
        return str(out)
    api = huggingface_hub.HfApi()
    url = api.create_repo(config.repo_id, private=config.private, exist_ok=True)
    api.upload_folder(
        repo_id=config.repo_id, folder_path=out, commit_message="Model and card"
    )
    return str(url)


def find_export(path: Path) -> tuple[Path, RunFolder | None]:
    """The exported model in a run's folder or in an exported folder, and its run where there is
    one.
    """
    for name in ("best", "last"):  # the latter of grpo_vlm
        if (path / "export" / name).is_dir():
            return path / "export" / name, read_run(path)
    run = path.resolve().parent.parent
    return path, read_run(run) if (run / "config.yaml").is_file() else None


def read_export(path: Path) -> dict[str, Any]:
    """What an exported folder holds, as the template needs it; raises ``ReportError`` if no model,
    or not as it was written.
    """
    reason = damage(path) if (path / MANIFEST).is_file() else None
    if reason is not None:
        raise ReportError(
            f"{path} has changed since it was exported: {reason}. Export it again"
        )
    if not any(path.glob("*.safetensors")):
        raise ReportError(
            f"{path} has no weights: expected the folder of a run, or its export"
        )
    if (path / "open_clip_config.json").is_file():
        return {"model_type": "CLIP", "library": "open_clip", "is_captioner": False}
    config = read_object(path / "config.json")
    model_type = str(config.get("model_type"))
    in_transformers = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if in_transformers:
        check_architectures(path, model_type, config.get("architectures"))
    return {
        "model_type": model_type,
        "library": "transformers" if in_transformers else "rl-caption",
        "is_captioner": not model_type.startswith(("l_clip", "pretrained_dual")),
    }


def model_card(
    config: ShareConfig,
    model: Mapping[str, Any],
    run: RunFolder | None,
    evaluation: EvaluationFolder | None,
) -> ModelCard:
    """The card of an exported model, of the run that trained it, and of an evaluation of its
    captions; None where that is not known.
    """
    settings = {} if run is None else _without_folders({**run.config, "run": None})
    start = (run.config.get("model") or {}).get("init") if run else None
    is_on_hub = start is not None and is_captioner(start) and not Path(start).exists()
    judged = {} if evaluation is None else {"this model": [evaluation]}
    data = ModelCardData(
        model_name=Path(config.path).resolve().name,
        library_name=model["library"],
        pipeline_tag="image-to-text" if model["is_captioner"] else None,
        tags=[
            "rl-caption",
            "image-captioning" if model["is_captioner"] else "image-caption-scoring",
        ],
        license=config.license,
        base_model=start if is_on_hub else None,
        eval_results=_results(evaluation) or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=data.model_name,
        where=config.repo_id or "FOLDER",
        model=model,
        run=run,
        licence=config.license,
        start=Path(start).name if start and not is_on_hub else start,
        config=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True),
        validations=markdown(*validations_table(run)[1:])
        if run and run.validations
        else "",
        scores=[markdown(head, rows) for _, head, rows in score_tables(judged)],
        notes=score_notes(judged),
        settings={} if evaluation is None else _without_folders(evaluation.settings),
    )


def _results(evaluation: EvaluationFolder | None) -> list[EvalResult]:
    results = []
    metrics = {} if evaluation is None else evaluation.scores["metrics"]
    for key, value in metrics.items():
        if evaluation is not None and (key in CAPTION_COLUMNS or key.startswith(JUDGE)):
            data, column = evaluation.settings.get("data", {}), column_of(key)
            name = Path(data.get("path") or data.get("format", "unknown")).name
            result = EvalResult(
                task_type="image-to-text",
                dataset_type=name,
                dataset_name=name,
                dataset_split=evaluation.settings.get("split"),
                metric_type=key.removeprefix(JUDGE),
                metric_name=column.heading,
                metric_value=round(column.factor * value, column.decimals),
            )
            results.append(result)
    return results


def _without_folders(value: Any) -> Any:
    """Absolute paths by their last part: where files lie is no one's business."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value
