"""The sharing program: an exported model with its model card, in a folder and on the Hugging Face
hub.

Every number on the card comes from the files of the run and of its evaluation.
"""

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rewards.model_files import MANIFEST, damage, read_object
from rl_caption.captioners.hf_families import FAMILIES, check_architectures
from rl_caption.captioners.loading import is_captioner, weights_hash
from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import CAPTION_COLUMNS, column_of, format_value
from rl_caption.lab.config import ShareConfig
from rl_caption.programs.report.pages import score_notes, score_tables, validations_table
from rl_caption.programs.report.read import (
    EvaluationFolder,
    ReportError,
    RunFolder,
    read_evaluation,
    read_run,
)
from rl_caption.training.checkpoint import new_folder

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md")
PAPERS = Path(__file__).with_name("papers.yaml")


class Export(NamedTuple):
    """An exported model; ``target`` is the class of a captioner of another package."""

    path: Path
    model_type: str
    library: str
    task: str | None
    is_captioner: bool
    target: str | None = None


def share(
    path: Path,
    repo_id: str | None = None,
    private: bool = False,
    out: Path | None = None,
    evaluation: Path | None = None,
    licence: str | None = None,
) -> str:
    """Write a copy of an exported model with its card to ``out``, and upload it; return where it
    is.

    Args:
        path: folder of a run, or of an exported model.
        repo_id: repository ``USER/NAME`` on the hub, which is made where it is missing; None
            uploads nothing.
        private: whether a repository that is made is private.
        out: a folder that is missing or empty; None writes to a temporary one.
        evaluation: folder that ``evaluate`` wrote, with ``scores.json``.
        licence: the hub's identifier of a licence, such as ``apache-2.0``.

    Raises:
        ReportError: something is missing, damaged, or belongs to another model. Nothing is copied
            then.
        CheckpointError: ``out`` cannot be written; nothing is left there.
        OSError: the hub refused, or cannot be reached. What was written to ``out`` stays.
    """
    if repo_id is None and out is None:
        raise ReportError("set at least one of --out FOLDER and --repo_id USER/NAME")
    export, run = find_export(path)
    judged = None if evaluation is None else read_evaluation(evaluation)
    card = model_card(read_export(export), run, judged, repo_id, licence)
    with ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        with new_folder(out) as partial:
            shutil.copytree(export, partial, dirs_exist_ok=True)
            card.save(partial / CARD)
        if repo_id is None:
            return str(out)
        api = huggingface_hub.HfApi()
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=out, commit_message="Model and card")
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


def read_export(path: Path) -> Export:
    """Find out what an exported folder holds; raises ``ReportError`` if no model, or not as it was
    written.
    """
    reason = damage(path) if (path / MANIFEST).is_file() else None
    if reason is not None:
        raise ReportError(f"{path} has changed since it was exported: {reason}. Export it again")
    if not any(path.glob("*.safetensors")):
        raise ReportError(f"{path} has no weights: expected the folder of a run, or its export")
    if (path / "open_clip_config.json").is_file():
        return Export(path, "CLIP", "open_clip", "zero-shot-image-classification", False)
    config = read_object(path / "config.json")
    model_type = str(config.get("model_type"))
    if model_type in FAMILIES:
        check_architectures(path, model_type, config.get("architectures"))
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        task = "image-to-text" if model_type in FAMILIES else "image-text-to-text"
        return Export(path, model_type, "transformers", task, True)
    if model_type.startswith(("l_clip", "pretrained_dual")):
        return Export(path, model_type, "rl-caption", None, False)
    target = model_type if ":" in model_type else None
    return Export(path, model_type, "rl-caption", "image-to-text", True, target)


def model_card(
    export: Export,
    run: RunFolder | None,
    evaluation: EvaluationFolder | None,
    repo_id: str | None = None,
    licence: str | None = None,
) -> ModelCard:
    """The card of an exported model.

    Args:
        export: the model.
        run: the run that trained it; None where that is not known.
        evaluation: an evaluation of its captions; None where there is none.
        repo_id: repository ``USER/NAME`` on the hub; None writes FOLDER in its place.
        licence: the hub's identifier, such as ``apache-2.0``; None says that none was named.

    Raises:
        ReportError: the evaluation is not of this model.
    """
    if evaluation is not None and evaluation.settings.get("weights") != weights_hash(export.path):
        raise ReportError(
            f"the evaluation is not of the weights of {export.path}: rl-caption evaluate --model "
            f"{export.path}"
        )
    name = run.name if run is not None else export.path.resolve().name
    config = {} if run is None else {**run.config}
    config.pop("run", None)
    judged = {} if evaluation is None else {"this model": [evaluation]}
    return ModelCard.from_template(
        _card_data(export, run, evaluation, licence),
        template_path=str(TEMPLATE),
        name=repo_id.rpartition("/")[2] if repo_id else name,
        where=repo_id or "FOLDER",
        export=export,
        run=run,
        licence=licence,
        start=_without_folders((config.get("model") or {}).get("init")),
        config=yaml.safe_dump(_without_folders(config), sort_keys=False, allow_unicode=True),
        versions={} if run is None else run.env.get("versions", {}),
        validations=None if run is None else validations_table(run),
        scores=score_tables(judged),
        notes=score_notes(judged),
        settings={} if evaluation is None else evaluation.settings,
        papers=[] if run is None else _papers(run),
    )


def _card_data(
    export: Export, run: RunFolder | None, evaluation: EvaluationFolder | None, licence: str | None
) -> ModelCardData:
    tags = ["rl-caption", "image-captioning" if export.is_captioner else "image-caption-scoring"]
    tags += ["reinforcement-learning"] if run is not None and run.terms else []
    start = (run.config.get("model") or {}).get("init") if run is not None else None
    is_on_hub = start is not None and is_captioner(start) and not Path(start).exists()
    results = []
    if evaluation is not None:
        for key, value in evaluation.scores["metrics"].items():
            if key in CAPTION_COLUMNS or key.startswith(JUDGE):
                data = evaluation.settings.get("data", {})
                name = (
                    Path(data["path"]).name if data.get("path") else data.get("format", "unknown")
                )
                is_judge = key not in CAPTION_COLUMNS
                result = EvalResult(
                    task_type="image-to-text",
                    dataset_type=name,
                    dataset_name=name,
                    dataset_split=evaluation.settings.get("split"),
                    metric_type=key[len(JUDGE) :] if is_judge else key.partition("-")[0].lower(),
                    metric_name=column_of(key).heading,
                    metric_value=float(format_value(value, column_of(key))),
                )
                results.append(result)
    return ModelCardData(
        model_name=export.path.name if run is None else run.name,
        library_name=export.library,
        pipeline_tag=export.task,
        tags=tags,
        license=licence,
        base_model=start if is_on_hub else None,
        eval_results=results or None,
    )


def _papers(run: RunFolder) -> list[str]:
    """The papers of self-critical training and of the rewards of this package."""
    papers = yaml.safe_load(PAPERS.read_text(encoding="utf-8"))
    names = [term.get("target") or name for name, term in run.terms.items()]
    lines = []
    for name in ["scst", *(name.removeprefix("ref_") for name in names)] if names else []:
        if name in papers:
            paper = papers[name]
            lines.append(f"{paper['authors']}, {paper['title']}, {paper['year']}")
    return lines


def _without_folders(value: Any) -> Any:
    """Absolute paths by their last part: where files lie is no one's business."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def main(config: ShareConfig) -> int:
    """Share what a command line names, and print where it is."""
    out, evaluation = (
        None if name is None else Path(name) for name in (config.out, config.evaluation)
    )
    print(share(Path(config.path), config.repo_id, config.private, out, evaluation, config.license))
    return 0
