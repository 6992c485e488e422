"""The sharing program: an exported model with its model card, in a folder and on the
Hugging Face hub.

Every number on the card comes from the files of the run and of its evaluation.
"""

import shutil
from pathlib import Path

import huggingface_hub
from huggingface_hub import ModelCard, ModelCardData
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rewards.base import naming
from rewards.model_files import check_folder, read_object
from rl_caption.captioners.hf_families import check_architectures
from rl_caption.captioners.loading import is_captioner, weights_hash
from rl_caption.evaluation import format_table
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import ShareConfig
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
    """Write a copy of an exported model with its card to ``out``, and upload it; return
    where it is.

    Raises:
        ReportError: a file is missing, has changed, or belongs to another model; raised
            before anything is copied.
        CheckpointError: ``out`` cannot be written; nothing is left there.
        OSError: the hub refused, or cannot be reached. What was written to ``out`` stays.
    """
    export, run = find_export(Path(config.path))
    with naming(config.path, (ValueError,), ReportError):
        check_folder(export)
    if not any(export.glob("*.safetensors")):
        raise ReportError(
            f"{export} has no weights: expected the folder of a run, or its export"
        )
    judged = read_evaluation(Path(config.evaluation)) if config.evaluation else None
    if judged is not None and judged.settings.get("weights") != weights_hash(export):
        raise ReportError(
            f"the evaluation is not of the weights of {export}: evaluate that model"
        )
    card = model_card(config, export, run, judged)
    out = Path(config.out)
    with new_folder(out) as partial:
        shutil.copytree(export, partial, dirs_exist_ok=True)
        card.save(partial / "README.md")
    if config.repo_id is None:
        return str(out)
    api = huggingface_hub.HfApi()
    url = api.create_repo(
        config.repo_id,
        private=config.private,
        exist_ok=True,
    )
    api.upload_folder(
        repo_id=config.repo_id, folder_path=out, commit_message="Model and card"
    )
    return str(url)


def find_export(path: Path) -> tuple[Path, RunFolder | None]:
    """The exported model in a run's folder, or the folder itself, and its run, if any."""
    for name in ("best", "last"):  # the latter of grpo_vlm
        if (path / "export" / name).is_dir():
            return path / "export" / name, read_run(path)
    run = path.resolve().parent.parent
    return path, read_run(run) if (run / "config.yaml").is_file() else None


def model_card(
    config: ShareConfig,
    export: Path,
    run: RunFolder | None,
    evaluation: EvaluationFolder | None,
) -> ModelCard:
    """Model card of an exported model, with the run that trained it and an evaluation
    of its captions, if known.
    """
    is_open_clip = (export / "open_clip_config.json").is_file()
    model = {} if is_open_clip else read_object(export / "config.json")
    model_type = str(model.get("model_type", "CLIP"))
    library = "rl-caption"
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        check_architectures(export, model_type, model.get("architectures"))
        library = "transformers"
    is_scorer = model_type.startswith(("CLIP", "l_clip", "pretrained_dual"))
    start = (run.config.get("model") or {}).get("init") if run else None
    is_on_hub = start is not None and is_captioner(start) and not Path(start).exists()
    data = ModelCardData(
        model_name=Path(config.path).resolve().name,
        library_name="open_clip" if is_open_clip else library,
        pipeline_tag=None if is_scorer else "image-to-text",
        tags=["rl-caption", f"image-caption{'-scoring' if is_scorer else 'ing'}"],
        license=config.license,
        base_model=start if is_on_hub else None,
    )
    table = run.validations() if run else []
    scores = format_table({"this model": evaluation.scores}) if evaluation else ""
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=data.model_name,
        library=data.library_name,
        licence=config.license,
        where=config.repo_id or "FOLDER",
        model_type=model_type,
        is_captioner=not is_scorer,
        run=run,
        start=start if is_on_hub or not start else Path(start).name,
        validations=markdown(table[0], table[1:]) if table else "",
        scores=scores,
        split=evaluation.settings.get("split") if evaluation else "",
    )
