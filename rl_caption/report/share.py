"""The sharing program: an exported model with its model card, in a folder and on the Hugging Face hub."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from rl_caption.report.model_card import model_card, read_export
from rl_caption.report.read import ReportError, read_evaluation, read_run

CARD = "README.md"


def find_export(path: Path) -> tuple[Path, Path | None]:
    """The exported model of a run's folder, or of an exported folder, and the run's folder where there is one.

    Raises:
        ReportError: there is no exported model.
    """
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder: name the folder of a run, or its export/best")
    if (path / "export" / "best").is_dir():
        return path / "export" / "best", path
    if not any((path / name).is_file() for name in ("config.json", "open_clip_config.json")):
        raise ReportError(
            f"{path} has neither export/best, which the first validation of a run writes, nor a config.json: name the "
            "folder of a run, or its export/best"
        )
    parents = path.resolve().parents
    is_of_run = len(parents) > 1 and parents[0].name == "export" and (parents[1] / "config.yaml").is_file()
    return path, parents[1] if is_of_run else None


def share(
    path: Path,
    repo_id: str | None = None,
    private: bool = False,
    out: Path | None = None,
    evaluation: Path | None = None,
    licence: str | None = None,
) -> str:
    """Write a copy of an exported model with its card to ``out``, and upload it; returns where it is.

    Args:
        path: folder of a run, or of an exported model.
        repo_id: ``USER/NAME`` on the hub, made where it is missing; None uploads nothing.
        private: of a repository that is made.
        out: folder, missing or empty; None writes to a temporary one.
        evaluation: folder of ``evaluate.py`` with ``scores.json``.
        licence: the hub's identifier.

    Raises:
        ReportError: something is missing, damaged or of another model; nothing is copied then.
        OSError: the hub refused, or cannot be reached. What was written to ``out`` stays.
    """
    if repo_id is None and out is None:
        raise ReportError("neither --out FOLDER nor --repo_id USER/NAME is given: say where the model goes")
    if repo_id is not None:
        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise ReportError(f"--repo_id {repo_id!r}: {error}") from error
        if "/" not in repo_id:
            raise ReportError(f"--repo_id is {repo_id!r}: expected USER/NAME")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ReportError(f"--out {out} exists and is not an empty folder: name another")
    export, run = find_export(path)
    known = read_run(run) if run is not None and (run / "config.yaml").is_file() else None
    judged = None if evaluation is None else read_evaluation(evaluation)
    card = model_card(read_export(export), known, judged, repo_id, licence)
    with ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        shutil.copytree(export, out, dirs_exist_ok=True)
        card.save(out / CARD)
        if repo_id is None:
            return str(out)
        api = huggingface_hub.HfApi()
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=out, commit_message="Model and card, by rl-caption")
        return str(url)


def main(argv: Sequence[str] | None = None) -> int:
    """``share RUN_OR_EXPORT --repo_id USER/NAME [--private] [--out FOLDER]``"""
    parser = argparse.ArgumentParser(prog="rl-caption share", description=__doc__)
    parser.add_argument("path", type=Path, metavar="RUN_OR_EXPORT", help="folder of a run, or its export/best")
    parser.add_argument("--repo_id", metavar="USER/NAME", help="on the hub; made where it is missing")
    parser.add_argument("--private", action="store_true", help="make a private repository")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also keep the model and its card here")
    parser.add_argument("--evaluation", type=Path, metavar="DIR", help="what evaluate.py wrote, with scores.json")
    parser.add_argument("--license", dest="licence", metavar="ID", help="the hub's name of a licence: apache-2.0")
    print(share(**vars(parser.parse_args(argv))))
    return 0
