"""The sharing program: an exported model with its model card, in a folder and on the Hugging Face hub.

Every number on the card comes from the files of the run and of its evaluation. What these lack, the card says.
"""

import argparse
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import huggingface_hub
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rewards.model_files import MANIFEST, damage, read_object
from rewards.registry import REWARDS
from rl_caption.captioners.hf_families import FAMILIES, check_architectures
from rl_caption.captioners.huggingface import saved_prompt
from rl_caption.captioners.loading import is_captioner, weights_hash
from rl_caption.captioners.vlm_families import as_messages, family_of, text_of, with_images
from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import (
    CAPTION_COLUMNS,
    LEFT_OUT,
    column_of,
    factor_of,
    format_value,
)
from rl_caption.programs.report.charts import title_of
from rl_caption.programs.report.read import (
    EvaluationFolder,
    ReportError,
    RunFolder,
    read_evaluation,
    read_run,
)
from rl_caption.training.checkpoint import new_folder

CARD = "README.md"
TEMPLATE = str(Path(__file__).with_name("model_card.md"))
CAPTIONER, REWARD_MODEL = "image captioner", "model of images and captions, for scoring captions"
PAPERS: dict[str, dict[str, Any]] = yaml.safe_load(
    resources.files("rl_caption.lab").joinpath("papers.yaml").read_text(encoding="utf-8")
)
"""Short name -> ``authors``, ``title``, ``year`` and, where there are such, ``venue`` and ``arxiv``."""
PAPERS_OF = {
    "caption_qa": ("caprl",),
    "claims": ("dcscore",),
    "pac_s": ("pac_s", "pac_s_plus"),
    "pac_s_video": ("pac_s", "emscore"),
    "vlm_judge": ("fleur",),
    "retrieval": ("retrieval_margin", "retrieval_show_tell", "retrieval_log_softmax"),
}
"""Reward -> names of its papers, where that is not the reward's own; ``ref_NAME`` has those of NAME."""
NO_PAPER = ("repetition", "perplexity", "length_router")
"""Rewards of this package without a paper of their own."""


def find_export(path: Path) -> tuple[Path, Path | None]:
    """The exported model in a run's folder or in an exported folder, and the run's folder where there is one.

    Raises:
        ReportError: there is no exported model.
    """
    if not path.is_dir():
        raise ReportError(
            f"{path} is not a folder: expected the folder of a run, or its export/best"
        )
    for name in ("best", "last"):  # the latter of grpo_vlm
        if (path / "export" / name).is_dir():
            return path / "export" / name, path
    if not any((path / name).is_file() for name in ("config.json", "open_clip_config.json")):
        raise ReportError(
            f"{path} has neither export/best, which the first validation of a run writes, nor a config.json: "
            "expected the folder of a run, or its export/best"
        )
    parents = path.resolve().parents
    is_of_run = (
        len(parents) > 1 and parents[0].name == "export" and (parents[1] / "config.yaml").is_file()
    )
    return path, parents[1] if is_of_run else None


def share(
    path: Path,
    repo_id: str | None = None,
    private: bool = False,
    out: Path | None = None,
    evaluation: Path | None = None,
    licence: str | None = None,
) -> str:
    """Write a copy of an exported model with its card to ``out``, and upload it; return where it is.

    Args:
        path: folder of a run, or of an exported model.
        repo_id: repository ``USER/NAME`` on the hub, which is made where it is missing; None uploads nothing.
        private: whether a repository that is made is private.
        out: a folder that is missing or empty; None writes to a temporary one.
        evaluation: folder that ``evaluate`` wrote, with ``scores.json``.
        licence: the hub's identifier of a licence, such as ``apache-2.0``.

    Raises:
        ReportError: something is missing, damaged, or belongs to another model. Nothing is copied then.
        CheckpointError: ``out`` cannot be written; nothing is left there.
        OSError: the hub refused, or cannot be reached. What was written to ``out`` stays.
    """
    if repo_id is None and out is None:
        raise ReportError(
            "neither --out FOLDER nor --repo_id USER/NAME is given: set at least one of them"
        )
    if repo_id is not None:
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise ReportError(f"--repo_id {repo_id!r}: {error}") from error
        if "/" not in repo_id:
            raise ReportError(f"--repo_id is {repo_id!r}: expected USER/NAME")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ReportError(f"--out {out} exists and is not an empty folder: choose another one")
    export, run = find_export(path)
    check_links(export)
    run_folder = read_run(run) if run is not None and (run / "config.yaml").is_file() else None
    judged = None if evaluation is None else read_evaluation(evaluation)
    card = model_card(read_export(export), run_folder, judged, repo_id, licence)
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
        api.upload_folder(
            repo_id=repo_id, folder_path=out, commit_message="Model and card, by rl-caption"
        )
        return str(url)


def check_links(export: Path) -> None:
    """Raise ``ReportError`` for a link that leads out of the folder: what it points to would be published."""
    root = export.resolve()
    for file in sorted(export.rglob("*")):
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            raise ReportError(
                f"{file} is a link to {file.resolve()}, outside the model, which would be uploaded: replace it by a "
                "copy of the file if you want that, or remove it"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """``share RUN_OR_EXPORT --repo_id USER/NAME [--private] [--out FOLDER]``"""
    parser = argparse.ArgumentParser(
        prog="rl-caption share", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="RUN_OR_EXPORT",
        help="folder of a run, or of an exported model (RUN/export/best)",
    )
    parser.add_argument(
        "--repo_id",
        metavar="USER/NAME",
        help="repository on the Hugging Face hub to upload to; created if it does not exist",
    )
    parser.add_argument("--private", action="store_true", help="create the repository as private")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write the model and its card to this folder; without --repo_id, nothing is uploaded",
    )
    parser.add_argument(
        "--evaluation",
        type=Path,
        metavar="DIR",
        help="output folder of evaluate (with scores.json): its scores go on the card",
    )
    parser.add_argument(
        "--license",
        dest="licence",
        metavar="ID",
        help="licence of the model, by its identifier on the hub, such as apache-2.0",
    )
    print(share(**vars(parser.parse_args(argv))))
    return 0


Loading = Literal[
    "transformers", "prompted", "vision_language", "captioner", "open_clip", "reward", "tower"
]


class Export(NamedTuple):
    """An exported model. One that is no captioner scores captions."""

    path: Path
    what: str
    """What it is, in words."""
    library: str
    """Library and task are in the hub's words; the task is None where the hub has none for it."""
    task: str | None
    loading: Loading
    """Which lines of Python in ``model_card.md`` load it."""
    is_captioner: bool = False
    target: str | None = None
    """Class of the captioner, where it is not of this package."""
    prompt: Any = ""
    """What a model of Transformers goes on from or answers: a text, or messages with the image ``photo.jpg``."""


def read_export(path: Path) -> Export:
    """Find out what an exported folder holds.

    Raises:
        ReportError: it holds no model, or is not as it was written.
    """
    reason = damage(path) if (path / MANIFEST).is_file() else None
    if reason is not None:
        raise ReportError(
            f"{path} has changed since it was exported: {reason}. Export it again, or copy the whole folder again"
        )
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ReportError(
            f"{path} has no weights (*.safetensors): expected the folder of a run, or its export/best"
        )
    if (path / "open_clip_config.json").is_file():
        task = "zero-shot-image-classification"
        return Export(path, f"{REWARD_MODEL} (open_clip)", "open_clip", task, "open_clip")
    try:
        config = read_object(path / "config.json")
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} holds no model: {error}") from error
    model_type = str(config.get("model_type"))
    if not re.fullmatch(r"[\w.:-]+", model_type):  # the card quotes it, in Python, too
        raise ReportError(
            f"{path} holds no model: its config.json has model_type {model_type!r:.80}, which is no name"
        )
    if model_type in FAMILIES:
        check_architectures(path, model_type, config.get("architectures"))
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return _transformers_export(path, model_type)
    if model_type in ("l_clip", "pretrained_dual"):
        name = {"l_clip": "L-CLIP", "pretrained_dual": "a dual encoder of pretrained parts"}[
            model_type
        ]
        return Export(path, f"{REWARD_MODEL} ({name})", "rl-caption", None, "reward")
    if model_type.startswith("l_clip_"):
        tower = model_type.removeprefix("l_clip_")
        what = f"{tower} tower of an L-CLIP, from which a whole one is distilled; no reward yet"
        return Export(path, what, "rl-caption", None, "tower")
    # A class outside the package: naming it in the code is the reader's consent to run it.
    target = model_type if ":" in model_type else None
    return Export(
        path,
        f"{CAPTIONER} ({model_type})",
        "rl-caption",
        "image-to-text",
        "captioner",
        True,
        target,
    )


def _transformers_export(path: Path, model_type: str) -> Export:
    """A captioner of Transformers' ``model_type``, with its prompt, which the lines that load it give it."""
    what, prompt = f"{CAPTIONER} ({model_type}, a model of Transformers)", saved_prompt(str(path))
    if model_type in FAMILIES:
        prompt = FAMILIES[model_type].default_prompt if prompt is None else prompt
        # Whether image and prompt are read together.
        loading: Loading = (
            "prompted" if model_type in ("blip-2", "instructblip", "florence2") else "transformers"
        )
        return Export(path, what, "transformers", "image-to-text", loading, True, prompt=prompt)
    family = family_of(model_type)
    messages = as_messages(family.default_prompt if prompt is None else prompt, None)
    task, loading = "image-text-to-text", "vision_language" if family.chat_prompts else "prompted"
    asked = (
        with_images(messages, ["photo.jpg"])
        if family.chat_prompts
        else f"<image>{text_of(messages, model_type)}"
    )
    return Export(path, what, "transformers", task, loading, True, prompt=asked)


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
        ReportError: the evaluation is of another model, or of a model that does not caption.
    """
    if evaluation is not None:
        _check_evaluation(export, evaluation)
    name = (
        repo_id.rpartition("/")[2]
        if repo_id
        else run.name
        if run is not None
        else export.path.resolve().name
    )
    return ModelCard.from_template(
        _card_data(name, export, run, evaluation, licence),
        template_path=TEMPLATE,
        name=name,
        export=export,
        run=run,
        evaluation=evaluation,
        repo_id=repo_id,
        licence=licence,
        prompt_literal=repr(export.prompt),
        has_record=evaluation is not None and has_record(evaluation),
        evaluated_on=None if evaluation is None else _dataset(evaluation.settings),
        metrics_table=[] if evaluation is None else _metrics_table(evaluation),
        papers=_papers(export, run),
        **(_run_values(run) if run is not None else {}),
    )


def _check_evaluation(export: Export, evaluation: EvaluationFolder) -> None:
    if not export.is_captioner:
        raise ReportError(
            f"--evaluation is set, but {export.path} is not a captioner: leave it out"
        )
    if not has_record(evaluation):
        return  # of an older version: the card says so
    judged, weights = evaluation.settings.get("weights"), weights_hash(export.path)
    if judged == weights:
        return
    source = f"a model with weights {str(judged)[:8]}"
    if judged is None:
        source = f"captions in a file (SHA-256 {evaluation.settings['predictions'][:8]}) of an unknown model"
    elif isinstance(judged, list):
        source = f"an ensemble of {len(judged)} models"
    raise ReportError(
        f"the evaluation is of {source}, and the weights of {export.path} are {weights[:8]}: evaluate this model "
        f"(rl-caption evaluate --model {export.path})"
    )


def has_record(evaluation: EvaluationFolder) -> bool:
    """Whether an evaluation says whose captions it is of: the weights of the model, or the file."""
    return not evaluation.settings.keys().isdisjoint(("weights", "predictions"))


def _card_data(
    name: str,
    export: Export,
    run: RunFolder | None,
    evaluation: EvaluationFolder | None,
    licence: str | None,
) -> ModelCardData:
    tags = ["rl-caption", "image-captioning" if export.is_captioner else "image-caption-scoring"]
    if run is not None and run.terms:
        tags += [
            "reinforcement-learning",
            *["self-critical-sequence-training"] * ("trainer" not in run.config),
        ]
    metrics = (
        {} if evaluation is None or not has_record(evaluation) else evaluation.scores["metrics"]
    )
    scores = {
        key: value
        for key, value in metrics.items()
        if key in CAPTION_COLUMNS or key.startswith(JUDGE)
    }
    dataset = None if evaluation is None else _dataset(evaluation.settings)
    results = [
        EvalResult(
            task_type="image-to-text",
            dataset_type=dataset or "unknown",
            dataset_name=dataset or "not recorded by the evaluation",
            dataset_split=evaluation.settings.get("split") if evaluation is not None else None,
            metric_type=_metric_type(key),
            metric_name=column_of(key).heading,
            metric_value=float(format_value(value, column_of(key))),
        )
        for key, value in scores.items()
    ]
    trained_on = None if run is None else _dataset(run.config)
    return ModelCardData(
        library_name=export.library,
        pipeline_tag=export.task,
        tags=tags,
        license=licence,
        datasets=[trained_on] if trained_on else None,
        base_model=None if run is None else _base_model(run),
        metrics=list(dict.fromkeys(_metric_type(key) for key in scores if key in CAPTION_COLUMNS))
        or None,
        model_name=name,
        eval_results=results or None,
    )


def _metric_type(key: str) -> str:
    """The hub's name of a metric, ``bleu`` for ``BLEU-4``; a judge has its own."""
    return key.partition("-")[0].lower() if key in CAPTION_COLUMNS else key.removeprefix(JUDGE)


def _run_values(run: RunFolder) -> dict[str, Any]:
    """What the card says of a run, beside what the run itself has."""
    method = (
        "self-critical sequence training" if run.terms else run.config.get("task", "cross-entropy")
    )
    if run.terms and "trainer" in run.config:
        method = f"{str(run.config['trainer']).upper()} (TRL)"
    versions = run.env.get("versions", {})
    packages = ("rl-caption", "torch", "transformers", "open_clip_torch", "trl")
    config = {key: value for key, value in run.config.items() if key != "run"}
    return {
        "method": method,
        "chosen": _chosen(run),
        "start": _start(run),
        "trained_on": _dataset(run.config),
        "software": ", ".join(
            f"{name} {versions[name]}" for name in packages if versions.get(name)
        ),
        "config": yaml.safe_dump(_without_folders(config), sort_keys=False, allow_unicode=True)
        if run.config
        else "",
        "validations": _validations_table(run),
        "validation_split": run.config.get("eval", {}).get("split", "val"),
    }


def _chosen(run: RunFolder) -> str:
    metric, step = run.state.get("metric"), run.state.get("best_step")
    if "trainer" in run.config:
        return "the last step"
    if not metric or step is None:
        return "which step it is of was not recorded"
    of = "the start: no step of the training was better" if step == 0 else f"step {step}"
    return f"{of}, the best validation by `{metric}`"


def _base_model(run: RunFolder) -> str | None:
    """The name on the hub of the captioner that a run started from; None where it started from a folder."""
    start = _start(run)
    try:
        return (
            start
            if start is not None and is_captioner(start) and not Path(start).exists()
            else None
        )
    except OSError as error:  # a name that is too long
        raise ReportError(
            f"{run.path / 'config.yaml'}: model.init is {start!r:.80}: {error.strerror}"
        ) from error


def _start(run: RunFolder) -> str | None:
    model = run.config.get("model") or {}
    start = model.get("init") or (model.get("name") if "trainer" in run.config else None)
    return None if start is None else _without_folders(str(start))


def _dataset(settings: Mapping[str, Any]) -> str | None:
    """The name of the file or folder of data, or its format where it is generated; None where it is not known."""
    data = settings.get("data", {})
    return Path(data["path"]).name if data.get("path") else data.get("format")


def _metrics_table(evaluation: EvaluationFolder) -> list[tuple[str, str, str]]:
    """Heading, value and interval of every metric."""
    rows = []
    for key, value in evaluation.scores["metrics"].items():
        column, ends = column_of(key), evaluation.scores.get("intervals", {}).get(key, ())
        rows.append(
            (
                column.heading,
                format_value(value, column),
                " to ".join(format_value(end, column) for end in ends),
            )
        )
    return rows


def _validations_table(run: RunFolder) -> list[list[str]]:
    """The validations of the start and of this model: a line of headings, then one for each metric."""
    steps: dict[int, dict[str, float]] = {}
    for line in run.validations:
        if line["step"] in (0, run.state.get("best_step")):
            steps.setdefault(line["step"], {}).update(line)
    if not steps:
        return []
    keys = dict.fromkeys(
        key for values in steps.values() for key in values if key.startswith("val/")
    )
    keys.pop("val/seconds", None)
    rows = [
        [
            title_of(key),
            *(f"{factor_of(key) * x[key]:.4g}" if key in x else LEFT_OUT for x in steps.values()),
        ]
        for key in keys
    ]
    return [["validation", *(f"step {step}" for step in steps)], *rows]


def cite(*names: str) -> str:
    """Authors, title, venue, year and number on arXiv of some of ``PAPERS``, in one line."""
    lines = []
    for paper in (PAPERS[name] for name in names):
        authors = " and ".join(paper["authors"].rsplit(", ", 1))
        where = " ".join(str(paper[key]) for key in ("venue", "year") if key in paper)
        number = f" (arXiv {paper['arxiv']})" if "arxiv" in paper else ""
        lines.append(f"{authors}, {paper['title']}, {where}{number}")
    return "; ".join(lines)


def _papers(export: Export, run: RunFolder | None) -> list[str]:
    """The papers of the method and of the reward's terms."""
    names = {target: name for name, target in REWARDS.items()}
    terms = {} if run is None else run.terms
    papers, unknown = [], []
    if run is not None and terms and "trainer" not in run.config:
        papers.append(cite("scst"))
    for name, term in terms.items():
        target = str(term.get("target") or name)
        reward_name = names.get(target, target).removeprefix("ref_")
        if reward_name in names.values() and reward_name not in NO_PAPER:
            papers.append(f"{name}: {cite(*PAPERS_OF.get(reward_name, (reward_name,)))}")
        elif reward_name not in NO_PAPER:
            unknown.append(
                f"{name}: `{reward_name}`, a reward from outside the package, whose authors say what to cite"
            )
    if "L-CLIP" in export.what:
        papers.append(cite("l_clipscore"))
    return [*dict.fromkeys(papers), *unknown]


def _without_folders(value: Any) -> Any:
    """Absolute paths by their last part: where files lie is no one's business."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value
