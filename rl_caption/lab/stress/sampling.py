"""What a reward is stressed with: a captioner, its samples, and gold scores that the reward does not see."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from accelerate import Accelerator

from rewards.text.tokenize import TOKENIZER, tokenizer_of
from rl_caption import __version__
from rl_caption.captioners.config import Decoding, SavedModelConfig
from rl_caption.config.build import build_captioner, check_positions
from rl_caption.config.overrides import Parse
from rl_caption.config.schema import DataConfig, XeConfig
from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes import oracle
from rl_caption.evaluation.confidence import Floats
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.monitoring.scoring import RowCaption, Score, Scorer
from rl_caption.programs.train import train_xe
from rl_caption.runtime.engines import accelerator_kwargs
from rl_caption.training.run_folder import is_complete
from rl_caption.training.validation import decode_candidates

START = "demo_xe"
"""Recipe of the captioner of the generated world that the command trains and keeps."""
SCENE_GOLD = "oracle"
REFERENCE_GOLD = "CIDEr-D, references held out"


def starting_captioner(parse: Parse) -> Path | None:
    """The folder of a captioner of the generated world: trained by ``START`` at the first call, then kept.

    It is in the user's cache (``XDG_CACHE_HOME``, ``~/.cache``) under a hash of the recipe and the package's version.
    None where a signal ended the training, which goes on at the next call.
    """
    config: XeConfig = parse(XeConfig, ["--config", START], "rl-caption xe")
    recipe = {key: value for key, value in asdict(config).items() if key != "run"}
    digest = hashlib.sha256(json.dumps([__version__, recipe], sort_keys=True).encode()).hexdigest()[
        :16
    ]
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "rl_caption"
        / "start"
        / digest
    )
    if not is_complete(folder):
        train_xe(parse(XeConfig, ["--config", START, "--run.dir", str(folder)], "rl-caption xe"))
    return folder / "export" / "best" if is_complete(folder) else None


def sample_captions(
    model: str,
    rows: Sequence[Row],
    references: Sequence[list[str]],
    data: DataConfig,
    *,
    num_samples: int,
    max_new_tokens: int,
    seed: int,
) -> list[list[RowCaption]]:
    """Sample K captions of each of R rows at temperature 1: [R][K]. They depend on ``seed`` and the image ids only.

    ``references`` are those of the training images. Raises ``CaptionerError`` where ``model`` is no captioner, and
    ``ConfigError`` where its words are those of another tokenizer than ``data.tokenizer``, or it has too few positions.
    """
    captioner = build_captioner(
        SavedModelConfig(init=model), references, data.cache_mb, data.tokenizer
    )
    check_positions(captioner, "max_new_tokens", max_new_tokens, rows)
    accelerator = Accelerator(**accelerator_kwargs())
    policy = captioner.policy.to(accelerator.device)
    decoding = Decoding(num_samples=num_samples, max_new_tokens=max_new_tokens, batch_size=8)
    candidates = decode_candidates(captioner, policy, rows, decoding, accelerator, "samples", seed)
    return [
        [
            RowCaption(number, candidate.caption, candidate.finished)
            for candidate in candidates[row["image_id"]]
        ]
        for number, row in enumerate(rows)
    ]


def judged_captions(
    rows: Sequence[Row],
    tokenizer: str = TOKENIZER,
    *,
    needs_references: bool = True,
    halve: bool = False,
) -> tuple[list[Row], list[str]]:
    """Split the references of R rows: the rows with those that a reward sees, and [R] the one that is judged.

    The first is judged. The reward does not see it or, with ``halve``, the first half of them, nor any with the same
    tokens. Raises ``DataError`` without images, where an image has no reference or, with ``needs_references``, none
    that the reward could see.
    """
    tokenize, seen, captions = tokenizer_of(tokenizer), [], []
    for row in rows:
        first, *rest = row["references"] or [""]
        held_out = [first, *rest[: (len(rest) - 1) // 2 if halve else 0]]
        unseen = [tokenize(text) for text in held_out]
        others = [text for text in rest if tokenize(text) not in unseen]
        if not first.strip() or (needs_references and not others):
            raise DataError(
                f"references of image {row['image_id']!r}: {len(row['references'])}, of which the first is judged: "
                f"expected at least {1 + needs_references} with words, all different"
            )
        seen.append(cast("Row", {**row, "references": others}))
        captions.append(first)
    if not seen:
        raise DataError("the split has no images: expected at least one")
    return seen, captions


def gold_scores(
    rows: Sequence[Row],
    held_out: Sequence[list[str]],
    references: Sequence[list[str]],
    judges: Mapping[str, JudgeConfig],
    reward: Any,
    tokenizer: str = TOKENIZER,
) -> dict[str, Score]:
    """Name -> what scores captions of R rows independently of the reward; the first one decides.

    Of generated scenes, that of ``SceneOracle``; else CIDEr-D of the references ``held_out`` of each row, with the
    document frequencies of ``references``, those of the training images. Then the ``judges``, which see the rows as the
    reward does. Raises ``ConfigError`` for a judge that is a term of the reward, or needs what the rows lack.
    """
    gold: dict[str, Score] = {}
    if all(row.get("scene") is not None for row in rows):
        gold[SCENE_GOLD] = SceneOracle(rows)
    else:
        unseen = [
            cast("Row", {**row, "references": texts})
            for row, texts in zip(rows, held_out, strict=True)
        ]
        cider = build_judges({"cider": JudgeConfig()}, None, references, tokenizer=tokenizer)[
            "cider"
        ]
        gold[REFERENCE_GOLD] = Scorer(cider, unseen, REFERENCE_GOLD)
    for name, judge in build_judges(judges, reward, references, "judges", tokenizer).items():
        gold[name] = Scorer(judge, rows, f"judges.{name}")
    return gold


class SceneOracle:
    """How true and complete captions of generated scenes are, in [0, 1]; each caption of a row is judged once.

    F1 of claims and facts times the share of words that mean something: words that the oracle cannot use cost, too.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.scenes = [row["scene"] for row in rows]
        self.scores: dict[tuple[int, str], float] = {}

    def __call__(self, captions: Sequence[RowCaption]) -> Floats:
        """[N] scores of N captions."""
        for row, text in {(caption.row, caption.text) for caption in captions} - self.scores.keys():
            judgement = oracle(text, self.scenes[row])
            self.scores[row, text] = judgement.f1 * (1 - judgement.unparsed)
        return np.array(
            [self.scores[caption.row, caption.text] for caption in captions], np.float64
        )
