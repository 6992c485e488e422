"""A page in the browser that captions photos with several captioners side by side and scores the
captions.

The server is Gradio's, in the extra ``web``. The captions are shown as a page of
``programs.report`` in a frame.
"""

import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from rewards.base import Reward, score_captions
from rewards.registry import short_name
from rl_caption.captioners.base import Captioner, CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.data.base import DataError, Row, load_image, reward_inputs
from rl_caption.evaluation.results import unique_names
from rl_caption.lab.config import WebConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.programs.report.charts import macros
from rl_caption.programs.report.gallery import gallery, source_of
from rl_caption.programs.report.pages import Page, render
from rl_caption.runtime.errors import ConfigError
from rl_caption.training.validation import decode_candidates

LOCAL = ("127.0.0.1", "localhost", "::1")


class SideBySide(NamedTuple):
    """The loaded captioners and judges, by their names on the page."""

    captioners: Mapping[str, Captioner]
    judges: Mapping[str, Reward]
    decoding: Decoding
    accelerator: Accelerator
    seed: int

    def page(self, photos: Sequence[str], references: str) -> str:
        """The captions of files of photos, with the scores of the judges, as a page of HTML.

        A judge that compares with references is left out where there are none. A photo that cannot
        be read has a sentence in its place.

        Args:
            photos: paths; the last parts are the names.
            references: of all photos, one in each line; may be empty.

        Raises:
            RewardError: a judge failed; the message names it.
        """
        if not photos:
            return render(Page("", "", {"Captions": macros().note("No photo yet.")}))
        rows: list[Row] = []
        notes = ""
        lines = [line.strip() for line in references.splitlines() if line.strip()]
        paths = [Path(photo) for photo in dict.fromkeys(photos)]
        for name, path in zip(unique_names(paths), paths, strict=True):
            try:
                rows.append({"image_id": name, "image": load_image(path), "references": lines})
            except DataError as error:
                notes += macros().verdict(str(error).replace(str(path), name), True)
        captions, scores = self._captions(rows) if rows else ({}, {})
        data = gallery(
            captions, scores, source_of(rows), f"Decoding: {self.decoding.describe()}.", len(rows)
        )
        return render(Page("", "", {"Captions": notes + macros().gallery(data)}))

    def _captions(self, rows: Sequence[Row]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Captions [captioner][image id], and scores [judge][captioner][image id]."""
        captions: dict[str, dict[str, str]] = {}
        scores: dict[str, dict[str, dict[str, float]]] = {}
        for name, captioner in self.captioners.items():
            decoded = decode_candidates(
                captioner, captioner.policy, rows, self.decoding, self.accelerator, seed=self.seed
            )
            first = [candidates[0] for candidates in decoded.values()]
            texts = [candidate.caption for candidate in first]
            captions[name] = dict(zip(decoded, texts, strict=True))
            prompts, columns = reward_inputs(rows, [candidate.finished for candidate in first])
            if not rows[0]["references"]:
                del columns["references"]
            for judge, reward in self.judges.items():
                if reward.columns <= columns.keys():
                    values = score_captions(reward, judge, prompts, texts, columns)
                    by_image = dict(zip(decoded, values, strict=True))
                    scores.setdefault(judge, {})[name] = by_image
        return captions, scores


def serve(config: WebConfig) -> None:
    """Load everything, print the page's address, and answer until Ctrl-C.

    Raises:
        ConfigError: the address cannot be listened on, or ``load_models`` raises it.
        CaptionerError: ``load_models`` raises it.
    """
    models = load_models(config)
    for number in (signal.SIGINT, signal.SIGTERM):  # either ends it, and removes the photos
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as photos:
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": photos}
        options = launch_options(config)
        blocks = build_page(models)
        try:
            _, url, _ = blocks.launch(**options)
        except OSError as error:
            raise ConfigError(f"host {config.host!r}, port {config.port}: {error}") from error
        print(f"{url}  (Ctrl-C ends it)", flush=True)
        blocks.block_thread()


def build_page(models: SideBySide) -> Any:
    """The page as Gradio's blocks: photos and references in, captions and scores out."""
    import gradio

    def caption(photos: list[str] | None, references: str) -> str:
        page = escape(models.page(photos or [], references))
        return f'<iframe title="Captions" srcdoc="{page}"></iframe>'

    names = ", ".join(models.captioners)
    about = f"Captions by {names}. Photos stay on this server, and are removed when it ends."
    with gradio.Blocks(title="Captions side by side", analytics_enabled=False) as blocks:
        gradio.Markdown("# Captions side by side")
        gradio.Textbox(about, show_label=False, interactive=False)
        photos = gradio.File(file_count="multiple", file_types=["image"], label="Photos")
        references = gradio.Textbox(label="References of these photos, one in each line", lines=2)
        button = gradio.Button("Caption", variant="primary")
        button.click(caption, [photos, references], gradio.HTML(), api_visibility="private")
    return blocks


def launch_options(config: WebConfig) -> dict[str, Any]:
    """Arguments of ``gradio.Blocks.launch``: nothing is shared, loaded from elsewhere or reported."""
    import gradio
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    hosts = [*LOCAL, config.host] if config.host in LOCAL else ["*"]
    return {
        "server_name": config.host,
        "server_port": config.port or None,
        "share": False,
        "quiet": True,
        "prevent_thread_lock": True,
        "show_error": True,
        "max_file_size": f"{config.max_mb}mb",
        "footer_links": [],
        "theme": gradio.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
        "css": "iframe { width: 100%; height: 85vh; border: 0 }",
        # Names that somebody else's DNS leads here are refused.
        "app_kwargs": {"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]},
    }


def load_models(config: WebConfig) -> SideBySide:
    """Load the captioners and judges of a configuration.

    Raises:
        ConfigError: there is no captioner, or one twice; or a judge cannot be built, or needs more
            than one photo.
        CaptionerError: a captioner cannot be loaded, or reads region features.
    """
    if not config.models:
        raise ConfigError("models is empty: expected captioners, such as runs/NAME/export/best")
    accelerator = Accelerator()
    for name, judge_config in config.judges.items():
        if short_name(judge_config.target or name) == "cider" and "df" not in judge_config.kwargs:
            option = f"--judges.{name}.kwargs.df runs/NAME/document_frequencies.npz"
            raise ConfigError(f"judges.{name} has no document frequencies: set {option}")
    judges = build_judges(config.judges, None, [], key="judges")
    for name, judge in judges.items():
        if unknown := sorted(judge.columns - {"image", "references"}):
            raise ConfigError(
                f"judges.{name} needs {', '.join(unknown)}: the page has only photos and references"
            )
    folders = [Path(model.rstrip("/").removesuffix("/export/best")) for model in config.models]
    captioners = {}
    for name, model in zip(unique_names(folders), config.models, strict=True):
        captioners[name] = load_captioner(model)
        if captioners[name].input_kind != "pixels":
            raise CaptionerError(f"models: {model} reads region features, not photos")
        captioners[name].policy.to(accelerator.device)
    return SideBySide(captioners, judges, config.decode, accelerator, config.seed)
