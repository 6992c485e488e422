"""The captioning program: photos and folders of photos in, captions out."""

import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from rewards.base import RewardError
from rewards.devices import is_main_process
from rewards.images import IMAGE_SUFFIXES, list_images
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.loading import load_captioner
from rl_caption.config.build import quiet_libraries
from rl_caption.config.commands import CaptionConfig
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.data.files import write_json
from rl_caption.evaluation.results import check_writable_file
from rl_caption.programs.captions import (
    Captions,
    build_reranker,
    caption_rows,
    rerank_captions,
)
from rl_caption.runtime.engines import accelerator_kwargs


def find_images(paths: Sequence[str]) -> list[Path]:
    """Files among ``paths`` and, ordered by name, the images (``list_images``) in folders among
    them; each file once.

    Raises:
        DataError: there is no image.
    """
    paths_of_images: list[Path] = []
    for name in paths:
        path = Path(name)
        paths_of_images += sorted(list_images(path)) if path.is_dir() else [path]
    if not paths_of_images:
        raise DataError(
            f"no image in {list(paths)}: looked for {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    return list(dict.fromkeys(paths_of_images))


def readable_images(paths: Sequence[Path], on_bad: str = "fail") -> list[Path]:
    """Those of ``paths`` that are images which can be decoded, and whose names can be written.

    Raises:
        DataError: there are others, unless ``on_bad`` is ``skip``, which names them in a warning;
            or none is left. The message has all of them.
    """
    bad: dict[Path, str] = {}
    for path in paths:
        try:
            str(path).encode()  # it is written to the file of captions
            load_image(path)
        except (DataError, UnicodeEncodeError) as error:
            bad[path] = str(error)
    listed = "\n".join(f"  {str(path)!r}: {error}" for path, error in bad.items())
    said = f"{len(bad)} of {len(paths)} images cannot be captioned (--on_bad skip):\n{listed}"
    if bad and (on_bad == "fail" or len(bad) == len(paths)):
        raise DataError(said)
    if bad and is_main_process():
        print(f"WARNING: {said}", file=sys.stderr)
    return [path for path in paths if path not in bad]


def caption_files(config: CaptionConfig, paths: Sequence[Path]) -> Captions:
    """Captions of image files by path, of a captioner (saved, or from the hub).

    The main process alone chooses by ``rerank``; if that fails, it prints all captions.

    Raises:
        CaptionerError: ``model`` is not a captioner over pixels.
        ConfigError: ``rerank`` is not a reward that can choose.
        DataError: an image cannot be read.
    """
    reward = None
    if config.rerank is not None:
        reward = build_reranker(config.rerank, config.rerank_kwargs, ())
    quiet_libraries()
    captioner = load_captioner(config.model, prompt=config.prompt)
    if captioner.input_kind != "pixels":
        raise CaptionerError(
            f"--model {config.model} reads region features, not photos: use evaluate"
        )
    rows: list[Row] = [
        {"image_id": str(path), "image": path, "references": []} for path in paths
    ]
    accelerator = Accelerator(**accelerator_kwargs())
    captions = caption_rows(captioner, rows, config, accelerator, config.seed)
    if reward is None or not accelerator.is_main_process:
        return captions
    try:
        return rerank_captions(captions, rows, reward)
    except RewardError:
        for name, candidates in captions.candidates.items():
            for candidate in candidates:
                print(f"{name}\t{candidate.caption}")
        raise


def caption(config: CaptionConfig) -> int:
    """Caption photos, print the captions, and write them where that is asked for."""
    for file in filter(None, (config.out, config.candidates)):
        check_writable_file(file)
    paths = readable_images(find_images(config.photos), config.on_bad)
    captions = caption_files(config, paths)
    if not is_main_process():
        return 0
    texts = captions.texts()
    if config.out:  # before they are printed, which may fail
        records = [{"image_id": path, "caption": texts[path]} for path in texts]
        write_json(config.out, records)
    if config.candidates:
        captions.write(config.candidates)
    for path, text in texts.items():
        print(f"{path}\t{text}")
    return 0
