"""Score captions in files with any reward."""

import math
from itertools import chain
from typing import Any

from rewards.base import score_captions
from rewards.build import RewardBuilder
from rewards.text.cider import SIGNATURE_PARTS
from rewards.text.tokenize import TOKENIZER, untested_texts
from rl_caption.config.commands import ScoreConfig
from rl_caption.data.base import DataError
from rl_caption.data.files import (
    find_images,
    read_captions,
    read_references,
    references_for,
    with_ids_of,
    write_json,
)
from rl_caption.evaluation.metrics import warn_of_forms
from rl_caption.evaluation.results import check_writable_file
from rl_caption.runtime.errors import config_errors

SCALE_OF_CIDER = "CIDEr-D is on the scale [0, 10] of the COCO toolkit, where 1.30 is what papers print as CIDEr 130.0 (times 100)."


def score_files(config: ScoreConfig) -> dict[str, Any]:
    """Score every caption of a file.

    Returns:
        ``{"reward", "signature", "mean", "scores": {image_id: value}}``, on the reward's own scale
        (CIDEr-D: 0 to 10).

    Raises:
        DataError: a wrong file, or a captioned image without references or file.
        ConfigError: the reward cannot be built.
        EvaluationError, OSError: ``out`` cannot be written; found before anything is scored.
        RewardError: the reward failed.
    """
    if config.out is not None:
        check_writable_file(config.out)
    counting = ("cider", "diversity")
    builder = RewardBuilder((), config.tokenizer, config.eos, config.df, counting)
    with config_errors("reward"):
        reward = builder.build(config.reward, config.kwargs)
    texts = read_captions(config.captions)
    written, references = list(texts), {}
    columns: dict[str, Any] = {}
    if config.references is not None:
        corpus = read_references(config.references, config.split, by=texts.by)
        texts = with_ids_of(texts, corpus, corpus.images, config.captions)
        columns["references"] = references_for(texts, corpus, config.references)
        references = dict(zip(texts, columns["references"], strict=True))
        if corpus.images:
            columns["image"] = [corpus.images[image_id] for image_id in texts]
    if config.images is not None:
        columns["image"] = find_images(config.images, written)
    columns["image_id"] = list(texts)
    for column in sorted(reward.columns - columns.keys()):
        raise DataError(
            f"reward {config.reward!r} needs the column {column!r}: give --references or --images"
        )
    warn_of_forms(texts, references, getattr(reward, "tokenizer", TOKENIZER))
    values = score_captions(reward, config.reward, None, list(texts.values()), columns)
    scored = [*texts.values(), *chain(*references.values())]
    result = {
        "reward": reward.__name__,
        "signature": reward.signature + untested_texts(reward, scored),
        "mean": math.fsum(values) / len(values),
        "scores": dict(zip(texts, values, strict=True)),
    }
    if config.out is not None:
        write_json(config.out, result)
    return result


def main(config: ScoreConfig) -> int:
    """Score, and print the mean."""
    result = score_files(config)
    count = f"mean of {len(result['scores'])} captions"
    print(f"{result['reward']} {result['mean']:.6f} ({count})")
    print(f"signature {result['signature']}")
    if result["reward"] == "cider":
        print(f"({SIGNATURE_PARTS})\n{SCALE_OF_CIDER}")
    if config.out is not None:
        print(f"written to {config.out}")
    return 0
