"""The captioning program: photos and folders of photos in, captions out."""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from accelerate import Accelerator

from rewards.base import RewardError
from rewards.devices import is_main_process
from rewards.images import IMAGE_SUFFIXES, list_images
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.ensemble import Average
from rl_caption.config.evaluation import check_choice
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import json_object
from rl_caption.data.refused import usable_rows
from rl_caption.evaluation.results import check_writable_file
from rl_caption.programs.captions import (
    Captions,
    build_reranker,
    caption_rows,
    load_captioners,
    rerank_captions,
)
from rl_caption.runtime.engines import accelerator_kwargs
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Seed, add_trust, wrong_values


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
    if not bad:
        return list(paths)
    listed = "\n".join(f"  {str(path)!r}: {error}" for path, error in bad.items())
    if on_bad == "fail" or len(bad) == len(paths):
        way_out = "; --on_bad skip captions the others" if len(bad) < len(paths) else ""
        raise DataError(
            f"{len(bad)} of {len(paths)} images cannot be captioned{way_out}:\n{listed}"
        )
    if is_main_process():
        print(
            f"WARNING: {len(bad)} of {len(paths)} images cannot be captioned and are left "
            f"out:\n{listed}",
            file=sys.stderr,
        )
    return [path for path in paths if path not in bad]


def caption_files(
    models: Sequence[str],
    paths: Sequence[Path],
    decode: Decoding,
    prompt: str | None = None,
    ensemble: Average = "probabilities",
    rerank: str | None = None,
    rerank_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    on_bad: str = "fail",
) -> Captions:
    """Captions of image files by path, of one captioner (saved, or from the hub) or of an ensemble
    of ``models``.

    The main process alone chooses by ``rerank``; if that fails, it prints all captions.

    Raises:
        CaptionerError: one of ``models`` is not a captioner over pixels, or they have different
            vocabularies.
        ConfigError: ``rerank`` is not a reward that can choose, or options of ``decode`` contradict
            each other.
        DataError: an image cannot be read, unless ``on_bad`` is ``skip``.
    """
    reward = None if rerank is None else build_reranker(rerank, rerank_kwargs or {}, ())
    captioner = load_captioners(models, prompt, ensemble)
    if captioner.input_kind != "pixels":
        raise CaptionerError(
            f"--model {', '.join(models)} reads region features, not photos: use evaluate"
        )
    rows: list[Row] = [{"image_id": str(path), "image": path, "references": []} for path in paths]
    accelerator = Accelerator(**accelerator_kwargs())
    rows = [*usable_rows({"": rows}, captioner, on_bad, accelerator)[""]]
    captions = caption_rows(captioner, rows, decode, accelerator, seed)
    if reward is None or not accelerator.is_main_process:
        return captions
    try:
        return rerank_captions(captions, rows, reward)
    except RewardError:
        for name, candidates in captions.candidates.items():
            print(*(f"{name}\t{candidate.caption}" for candidate in candidates), sep="\n")
        raise


def main(argv: list[str] | None = None) -> int:
    """``caption --model RUN/export/best PHOTO|FOLDER ...``"""
    summary = "Caption photos with a trained captioner."
    parser = argparse.ArgumentParser(
        prog="rl-caption caption", description=summary, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        action="append",
        help="folder of a captioner, such as RUN/export/best, or hub name; several are an ensemble",
    )
    add(
        "--ensemble",
        default="probabilities",
        choices=["probabilities", "log_probabilities"],
        help="what is averaged",
    )
    add("--prompt", help="prompt of a model of Transformers (default: as saved with it, if any)")
    add(
        "--beams",
        type=int,
        default=1,
        dest="num_beams",
        help="beam width; 1 is greedy (default: 1)",
    )
    add("--max_new_tokens", type=int, default=24, help="length limit in tokens (default: 24)")
    documented = re.findall(
        r"^ {8}(\w+): (.+?)\.$(?=\n {8}\w|\n? {4}\Z)",
        str(Decoding.__doc__),
        re.MULTILINE | re.DOTALL,
    )
    meanings = {name: " ".join(text.replace("``", "").split()) for name, text in documented}
    for name, annotation in get_type_hints(Decoding).items():
        if name not in ("num_beams", "max_new_tokens", "fixed_shapes"):
            action: dict[str, Any] = (
                {"action": "store_true"} if annotation is bool else {"type": annotation}
            )
            add(
                f"--{name}",
                default=getattr(Decoding, name),
                help=meanings.get(name, f"decode.{name} of evaluate"),
                **action,
            )
    add(
        "--rerank",
        help="choose among several captions: consensus, or a reward that needs no references",
    )
    add("--rerank_kwargs", default="{}", metavar="JSON", help="arguments of --rerank, as an object")
    add("--seed", type=int, default=0, help="of samples (default: 0)")
    add(
        "--on_bad",
        default="fail",
        choices=["fail", "skip"],
        help="an image that cannot be read: fail (default), skip",
    )
    add("--out", help="also write the captions to this JSON file, in COCO result format")
    add(
        "--candidates",
        help="write all captions of a photo with their scores to this JSON lines file",
    )
    add_trust(parser)
    add("paths", nargs="+", metavar="PHOTO|FOLDER")
    arguments = vars(parser.parse_args(argv))
    try:
        decode = Decoding(
            **{name: arguments[name] for name in get_type_hints(Decoding) if name in arguments}
        )
        check_choice(decode, arguments["rerank"], arguments["candidates"] is not None)
    except ConfigError as error:
        parser.error(str(error))
    if wrong := list(wrong_values(arguments["seed"], Seed, "--seed")):
        parser.error("; ".join(wrong))
    options = {name: arguments[name] for name in ("prompt", "ensemble", "rerank", "seed", "on_bad")}
    options["rerank_kwargs"] = json_object(arguments["rerank_kwargs"], "--rerank_kwargs")
    for file in filter(None, (arguments["out"], arguments["candidates"])):
        check_writable_file(file)
    paths = readable_images(find_images(arguments["paths"]), arguments["on_bad"])
    captions = caption_files(arguments["model"], paths, decode, **options)
    if not is_main_process():
        return 0
    if arguments["out"]:  # before they are printed, which may fail
        write_json(
            arguments["out"],
            [{"image_id": path, "caption": text} for path, text in captions.texts().items()],
        )
    if arguments["candidates"]:
        captions.write(arguments["candidates"])
    for path, caption in captions.texts().items():
        print(f"{path}\t{caption}")
    return 0
