"""A page in the browser that captions photos with several captioners side by side and
scores the captions. The page and its server are Gradio's, in the extra ``web``.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from accelerate import Accelerator

from rewards.base import score_captions
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.loading import load_captioner
from rl_caption.data.base import Row, load_image, reward_inputs
from rl_caption.evaluation.results import unique_names
from rl_caption.lab.config import WebConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.runtime.errors import ConfigError
from rl_caption.training.validation import decode_candidates

Table: TypeAlias = Callable[[Sequence[str] | None, str], list[list[Any]]]


def serve(config: WebConfig) -> None:
    """Load everything, print the page's address, and answer until Ctrl-C."""
    build_page(config, make_table(config)).launch(
        server_name=config.host,
        server_port=config.port or None,
        share=False,
        show_error=True,
        max_file_size=f"{config.max_mb}mb",
    )


def build_page(config: WebConfig, table: Table) -> Any:
    """The page of Gradio: photos and references in, captions and scores out."""
    import gradio

    heads = ["photo", "captioner", "caption", *config.judges]
    return gradio.Interface(
        lambda photos, references: (photos or [], table(photos, references)),
        inputs=[
            gradio.File(file_count="multiple", file_types=["image"], label="Photos"),
            gradio.Textbox(label="References of all photos, one a line", lines=2),
        ],
        outputs=[
            gradio.Gallery(label="Photos"),
            gradio.Dataframe(headers=heads, label="Captions", wrap=True),
        ],
        title="Captions side by side",
        flagging_mode="never",
        analytics_enabled=False,
        delete_cache=(600, 3600),
    )


def make_table(config: WebConfig) -> Table:
    """Load the captioners and judges, and return a function that captions photos.

    The function takes paths of photos, and references of all photos, one in each line.
    It returns a row for each captioner and photo: photo, captioner, caption, scores of
    the judges. Without references, a judge that needs references gives no score.

    Raises:
        ConfigError: a judge cannot be built, or needs more than one photo.
        CaptionerError: a captioner cannot be loaded, or reads region features.
    """
    judges = build_judges(config.judges, None, [], key="judges")
    for name, judge in judges.items():
        needed = ", ".join(judge.columns - {"image", "references"})
        if "cider" in judge.__name__ and "df" not in config.judges[name].kwargs:
            needed = "document frequencies (kwargs.df)"
        if needed:
            raise ConfigError(
                f"judges.{name} needs {needed}: the page has photos and references"
            )
    paths = [
        Path(model.rstrip("/").removesuffix("/export/best")) for model in config.models
    ]
    accelerator = Accelerator()
    captioners = {}
    for name, model in zip(unique_names(paths), config.models, strict=True):
        captioners[name] = load_captioner(model)
        if captioners[name].input_kind != "pixels":
            raise CaptionerError(f"models: {model} reads region features, not photos")
        captioners[name].policy.to(accelerator.device)

    def table(photos: Sequence[str] | None, references: str) -> list[list[Any]]:
        """A row for each captioner and photo: caption, and scores of the judges."""
        texts = [line.strip() for line in references.splitlines() if line.strip()]
        rows: list[Row] = []
        for photo in dict.fromkeys(photos or []):
            image = load_image(photo)
            rows.append({"image_id": photo, "image": image, "references": texts})
        lines: list[list[Any]] = []
        for name, captioner in captioners.items() if rows else ():
            decoding, policy = config.decode, captioner.policy
            options = (decoding, accelerator, "captions", config.seed)
            decoded = decode_candidates(captioner, policy, rows, *options)
            first = [candidates[0] for candidates in decoded.values()]
            captions = [one.caption for one in first]
            prompts, inputs = reward_inputs(rows, [one.finished for one in first])
            columns: list[Sequence[Any]] = [[Path(photo).name for photo in decoded]]
            columns += [[name] * len(rows), captions]
            for label, judge in judges.items():
                scores: Sequence[float | None] = [None] * len(rows)
                if texts or "references" not in judge.columns:
                    scores = score_captions(judge, label, prompts, captions, inputs)
                columns.append(scores)
            lines += map(list, zip(*columns, strict=True))
        return lines

    return table
