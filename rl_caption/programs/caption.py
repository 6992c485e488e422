"""The captioning program: photos and folders of photos in, captions out."""

from pathlib import Path

from accelerate import Accelerator

from rewards.devices import is_main_process
from rewards.images import list_images
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.loading import load_captioner
from rl_caption.config.build import quiet_libraries
from rl_caption.config.commands import CaptionConfig
from rl_caption.data.base import DataError, Row
from rl_caption.data.checks import check_row_images
from rl_caption.data.files import write_json
from rl_caption.evaluation.results import check_writable_file
from rl_caption.programs.captions import (
    Captions,
    build_reranker,
    caption_rows,
    rerank_captions,
)
from rl_caption.runtime.engines import accelerator_kwargs


def caption_files(config: CaptionConfig) -> Captions:
    """Caption photos, and the photos in folders (``list_images``), each once; ids are
    paths.

    Only the main process reranks.

    Raises:
        CaptionerError: ``model`` is not a captioner over pixels.
        ConfigError: ``rerank`` is not a reward that can choose.
        DataError: there is no photo, or one cannot be read (``on_bad``).
    """
    reward = None
    if config.rerank is not None:
        reward = build_reranker(config.rerank, config.rerank_kwargs, ())
    paths: list[Path] = []
    for name in config.photos:
        path = Path(name)
        paths += sorted(list_images(path)) if path.is_dir() else [path]
    if not paths:
        raise DataError(f"there is no image in {config.photos}")
    rows: list[Row] = [
        {"image_id": str(path), "image": path, "references": []}
        for path in dict.fromkeys(paths)
    ]
    rows = check_row_images(rows, "the captioner", on_bad=config.on_bad)
    quiet_libraries()
    captioner = load_captioner(config.model, prompt=config.prompt)
    if captioner.input_kind != "pixels":
        raise CaptionerError(
            f"--model {config.model} reads region features, not photos: use evaluate"
        )
    accelerator = Accelerator(**accelerator_kwargs())
    captions = caption_rows(captioner, rows, config, accelerator, config.seed)
    if reward is not None and accelerator.is_main_process:
        captions = rerank_captions(captions, rows, reward)
    return captions


def caption(config: CaptionConfig) -> None:
    """Caption photos, print the captions, and write them to ``out`` and ``candidates``."""
    for file in filter(None, (config.out, config.candidates)):
        check_writable_file(file)
    captions = caption_files(config)
    if not is_main_process():
        return
    texts = captions.texts()
    if config.out:  # before they are printed, which may fail
        records = [{"image_id": path, "caption": texts[path]} for path in texts]
        write_json(config.out, records)
    if config.candidates:
        captions.write(config.candidates)
    for path, text in texts.items():
        print(f"{path}\t{text}")
