"""The captioning program: photos and folders of photos in, captions out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from rewards.images import IMAGE_SUFFIXES
from rl_caption.captioners.base import CaptionerError, Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.config.build import quiet_libraries
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.data.files import write_json
from rl_caption.options import Beams, Tokens, wrong_values
from rl_caption.training.validation import decode_rows


def find_images(paths: Sequence[str]) -> list[Path]:
    """The image files among ``paths``; folders are searched through, in the order of names.

    Raises:
        DataError: a path does not exist, or nothing is found.
    """
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{name!r} does not exist: expected an image or a folder of images")
    if not found:
        raise DataError(f"no image in {list(paths)}: looked for {', '.join(sorted(IMAGE_SUFFIXES))}")
    return list(dict.fromkeys(found))


def caption_files(
    model: str | Path, paths: Sequence[Path], decoding: Decoding, batch_size: int = 32, prompt: str | None = None
) -> dict[str, str]:
    """Caption image files with a saved captioner, or one on the hub: path -> caption.

    Raises:
        CaptionerError: ``model`` is not a captioner over pixels.
        DataError: an image cannot be read; nothing is captioned then.
    """
    quiet_libraries()
    captioner = load_captioner(model, prompt=prompt)
    if captioner.input_kind != "pixels":
        raise CaptionerError(f"--model {str(model)!r} reads region features, not photos: use evaluate")
    for path in paths:
        load_image(path)
    accelerator = Accelerator()
    rows: list[Row] = [{"image_id": str(path), "image": path, "references": []} for path in paths]
    policy = captioner.policy.to(accelerator.device)
    decoded = decode_rows(captioner, policy, rows, decoding, batch_size, accelerator, progress="captioning")
    return {image_id: caption for image_id, (caption, _) in decoded.items()}


def main(argv: list[str] | None = None) -> int:
    """``caption --model RUN/export/best PHOTO|FOLDER ...``"""
    parser = argparse.ArgumentParser(prog="caption", description="Caption photos with a trained captioner.")
    parser.add_argument("--model", required=True, help="folder of a captioner, such as RUN/export/best, or hub name")
    parser.add_argument("--prompt", help="what captions of a hub model go on from (default: as exported, or none)")
    parser.add_argument("--beams", type=int, default=1, help="beam width; 1 is greedy (default: 1)")
    parser.add_argument("--max_new_tokens", type=int, default=24, help="length limit in tokens (default: 24)")
    parser.add_argument("--out", help="also write the captions to this JSON file, in COCO result format")
    parser.add_argument("paths", nargs="+", metavar="PHOTO|FOLDER")
    arguments = parser.parse_args(argv)
    beams, limit = arguments.beams, arguments.max_new_tokens
    wrong = [*wrong_values(beams, Beams, "--beams"), *wrong_values(limit, Tokens, "--max_new_tokens")]
    if wrong:
        parser.error("; ".join(wrong))
    decoding = Decoding(num_beams=beams, max_new_tokens=limit)
    captions = caption_files(arguments.model, find_images(arguments.paths), decoding, prompt=arguments.prompt)
    for path, caption in captions.items():
        print(f"{path}\t{caption}")
    if arguments.out:
        write_json(arguments.out, [{"image_id": path, "caption": text} for path, text in captions.items()])
    return 0
