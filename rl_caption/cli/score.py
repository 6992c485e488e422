"""Score captions in files with any reward."""

import math
from itertools import chain
from typing import Any

from rewards.base import score_captions
from rewards.build import RewardBuilder
from rewards.registry import parameters
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
    reward, captions, references = config.reward, config.captions, config.references
    if config.out is not None:
        check_writable_file(config.out)
    with config_errors("reward"):
        accepted = parameters(reward)
        given = {}
        for name in ("df", "eos", "tokenizer"):
            value = getattr(config, name)
            if value or (name in accepted and value is not None):
                given[name] = value
        scorer = RewardBuilder(counting=()).build(reward, given | config.kwargs)
    texts = read_captions(captions)
    columns: dict[str, Any] = {"image_id": (written := list(texts))}
    if references is not None:
        annotated = read_references(references, config.split, by=texts.by)
        texts = with_ids_of(texts, annotated, annotated.images, captions)
        columns["image_id"] = list(texts)
        columns["references"] = references_for(texts, annotated, references)
        if annotated.images:
            columns["image"] = [annotated.images[image_id] for image_id in texts]
    if config.images is not None:
        columns["image"] = find_images(config.images, written)
    for column in sorted(scorer.columns - columns.keys()):
        option = {"references": "--references", "image": "--images"}.get(column)
        raise DataError(
            f"reward {reward!r} needs the column {column!r}: give {option or 'another'}"
        )
    references_of = dict(zip(texts, columns.get("references", ()), strict=False))
    warn_of_forms(texts, references_of, getattr(scorer, "tokenizer", TOKENIZER))
    values = score_captions(scorer, reward, None, list(texts.values()), columns)
    result = {
        "reward": scorer.__name__,
        "signature": scorer.signature
        + untested_texts(scorer, [*texts.values(), *chain(*references_of.values())]),
        "mean": math.fsum(values) / len(values),
        "scores": dict(zip(texts, values, strict=True)),
    }
    if config.out is not None:
        write_json(config.out, result)
    return result


def main(config: ScoreConfig) -> int:
    """Score, and print the mean."""
    result = score_files(config)
    print(
        f"{result['reward']} {result['mean']:.6f} (mean of {len(result['scores'])} captions)"
    )
    print(f"signature {result['signature']}")
    if result["reward"] == "cider":
        print(f"({SIGNATURE_PARTS})\n{SCALE_OF_CIDER}")
    if config.out is not None:
        print(f"written to {config.out}")
    return 0
