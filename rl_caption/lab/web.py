"""A page in the browser that captions photos with several captioners side by side and scores the
captions. The page and its server are Gradio's, in the extra ``web``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from rewards.base import Reward, score_captions
from rl_caption.captioners.base import Captioner, CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.data.base import Row, load_image, reward_inputs
from rl_caption.evaluation.results import unique_names
from rl_caption.lab.config import WebConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.runtime.errors import ConfigError
from rl_caption.training.validation import decode_candidates


class SideBySide(NamedTuple):
    """The loaded captioners and judges, by their names on the page."""

    captioners: Mapping[str, Captioner]
    judges: Mapping[str, Reward]
    decoding: Decoding
    accelerator: Accelerator
    seed: int

    def table(self, photos: Sequence[str] | None, references: str) -> list[list[Any]]:
        """A line for each captioner and photo: photo, captioner, caption, scores of the judges.

        Args:
            photos: paths.
            references: of all photos, one in each line. Without any, a judge that compares with
                references gives no score.

        Raises:
            DataError: a photo cannot be read.
            RewardError: a judge failed; the message names it.
        """
        lines = [line.strip() for line in references.splitlines() if line.strip()]
        rows: list[Row] = []
        for photo in dict.fromkeys(photos or []):
            rows.append(
                {"image_id": photo, "image": load_image(photo), "references": lines}
            )
        table: list[list[Any]] = []
        for name, captioner in self.captioners.items() if rows else ():
            decoded = decode_candidates(
                captioner,
                captioner.policy,
                rows,
                self.decoding,
                self.accelerator,
                seed=self.seed,
            )
            first = [candidates[0] for candidates in decoded.values()]
            captions = [candidate.caption for candidate in first]
            prompts, inputs = reward_inputs(
                rows, [candidate.finished for candidate in first]
            )
            columns: list[Sequence[Any]] = [[Path(photo).name for photo in decoded]]
            columns += [[name] * len(rows), captions]
            for judge, reward in self.judges.items():
                scores: Sequence[float | None] = [None] * len(rows)
                if lines or "references" not in reward.columns:
                    scores = score_captions(reward, judge, prompts, captions, inputs)
                columns.append(scores)
            table += map(list, zip(*columns, strict=True))
        return table


def serve(config: WebConfig) -> None:
    """Load everything, print the page's address, and answer until Ctrl-C."""
    page = build_page(load_models(config))
    page.launch(
        server_name=config.host,
        server_port=config.port or None,
        share=False,
        show_error=True,
        max_file_size=f"{config.max_mb}mb",
    )


def build_page(models: SideBySide) -> Any:
    """The page of Gradio: photos and references in, captions and scores out."""
    import gradio

    def caption(
        photos: list[str] | None, references: str
    ) -> tuple[list[str], list[list[Any]]]:
        return photos or [], models.table(photos, references)

    return gradio.Interface(
        caption,
        inputs=[
            gradio.File(file_count="multiple", file_types=["image"], label="Photos"),
            gradio.Textbox(
                label="References of these photos, one in each line", lines=2
            ),
        ],
        outputs=[
            gradio.Gallery(label="Photos"),
            gradio.Dataframe(
                headers=["photo", "captioner", "caption", *models.judges],
                label="Captions",
                wrap=True,
            ),
        ],
        title="Captions side by side",
        flagging_mode="never",
        analytics_enabled=False,
        delete_cache=(600, 3600),
    )


def load_models(config: WebConfig) -> SideBySide:
    """Load the captioners and judges of a configuration.

    Raises:
        ConfigError: a judge cannot be built, or needs more than one photo.
        CaptionerError: a captioner cannot be loaded, or reads region features.
    """
    judges = build_judges(config.judges, None, [], key="judges")
    for name, judge in judges.items():
        unknown = judge.columns - {"image", "references"}
        if unknown or (
            "cider" in judge.__name__ and "df" not in config.judges[name].kwargs
        ):
            needed = ", ".join(unknown) or "document frequencies (kwargs.df)"
            raise ConfigError(
                f"judges.{name} needs {needed}: the page has photos and references"
            )
    folders = [
        Path(model.rstrip("/").removesuffix("/export/best")) for model in config.models
    ]
    accelerator = Accelerator()
    captioners = {}
    for name, model in zip(unique_names(folders), config.models, strict=True):
        captioners[name] = load_captioner(model)
        if captioners[name].input_kind != "pixels":
            raise CaptionerError(f"models: {model} reads region features, not photos")
        captioners[name].policy.to(accelerator.device)
    return SideBySide(captioners, judges, config.decode, accelerator, config.seed)
