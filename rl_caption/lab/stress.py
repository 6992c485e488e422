"""The stress program: how a reward can be hacked, by pairs of captions and by the choice among
samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from accelerate import Accelerator

from rewards.text.tokenize import TOKENIZER, tokenizer_of
from rl_caption.captioners.config import Decoding, SavedModelConfig
from rl_caption.config.build import (
    build_captioner,
    build_data,
    build_reward,
    check_positions,
    quiet_libraries,
    references_of,
    usable_split,
)
from rl_caption.data.base import DataError, Row
from rl_caption.data.files import write_json
from rl_caption.data.negatives import NegativeSource
from rl_caption.data.scenes import NEGATIVE_KINDS, oracle
from rl_caption.data.scenes.negatives import SceneNegatives
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.confidence import Floats
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import StressConfig
from rl_caption.monitoring.best_of_n import Curve, best_of_n, kl_of_best_of_n
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.monitoring.probes import (
    EDITS,
    PROBES,
    ProbeResult,
    probe_pairs,
    probe_result,
    score_pairs,
)
from rl_caption.monitoring.scoring import RowCaption, Score, Scorer
from rl_caption.runtime.engines import accelerator_kwargs
from rl_caption.runtime.errors import ConfigError
from rl_caption.training.validation import decode_candidates

SCENE_GOLD = "oracle"
REFERENCE_GOLD = "CIDEr-D, references held out"


def stress(config: StressConfig) -> str:
    """Test a reward, write ``stress.json``, and return the tables.

    Raises:
        ConfigError: the reward or the captioner cannot be made, or needs what the data lack.
        DataError: the data cannot be read, or an image has no caption, or none for the reward to
            see.
        RewardError: the reward failed; it names the image and the caption.
    """
    quiet_libraries()
    if config.reward.normalize != "none":
        raise ConfigError(
            "reward.normalize is set: expected none, as scores of calls are compared"
        )
    folder = check_writable(config.out)
    tokenizer = config.data.tokenizer
    data = build_data(config.data)
    references = references_of(data.split(usable_split(data, config.train_split)))
    reward = build_reward(config.reward, references, tokenizer=tokenizer)
    rows: list[Any] = []
    judged: list[Any] = []
    for row in data.split(usable_split(data, config.split))[: config.max_images]:
        held_out, seen = split_references(row, tokenizer)
        if not held_out or ("references" in reward.columns and not seen):
            raise DataError(
                f"image {row['image_id']!r} has too few references: one is judged, the reward "
                "needs another one"
            )
        rows.append({**row, "references": seen})
        judged.append({**row, "references": held_out})
    scorer = Scorer(reward, rows)
    gold = gold_scores(judged, references, tokenizer)
    judges = build_judges(config.judges, reward, references, "judges", tokenizer)
    for name, judge in judges.items():
        gold[name] = Scorer(judge, rows, f"judges.{name}")
    captions = [row["references"][0] for row in judged]
    probes = measure_pairs(scorer, rows, captions, tokenizer, config.seed)
    found: dict[str, Any] = {name: asdict(result) for name, result in probes.items()}
    found = {"signature": reward.signature, "images": len(rows), "probes": found}
    tables = [f"Stress test of {reward.signature}", probe_table(probes)]
    if config.model is not None:
        curves = measure_samples(config, rows, references, {"reward": scorer, **gold})
        found["best_of_n"] = {name: asdict(curve) for name, curve in curves.items()}
        tables.append(curve_table(curves))
    write_json(
        folder / "stress.json", found | {"config": config.model_dump(mode="json")}
    )
    return "\n\n".join(tables)


def split_references(
    row: Row, tokenizer: str = TOKENIZER
) -> tuple[list[str], list[str]]:
    """The references of a row that are held out, of which the first is judged, and those that the
    reward sees.

    Held out is the first and, of other images than generated scenes, half of all; the reward sees
    none that has the same tokens.
    """
    tokenize = tokenizer_of(tokenizer)
    texts = [text for text in row["references"] if text.strip()]
    held_out = texts[: 1 if row.get("scene") is not None else max(1, len(texts) // 2)]
    tokens = [tokenize(text) for text in held_out]
    return held_out, [text for text in texts if tokenize(text) not in tokens]


def gold_scores(
    rows: Sequence[Row], references: Sequence[list[str]], tokenizer: str = TOKENIZER
) -> dict[str, Score]:
    """Name -> what scores captions of R rows independently of the reward.

    Of generated scenes, F1 of claims and facts times the share of words that mean something: words
    that the oracle cannot use cost, too. Else CIDEr-D of their references, with the document
    frequencies of ``references``.
    """
    if all(row.get("scene") is not None for row in rows):

        def score(captions: Sequence[RowCaption]) -> Floats:
            judged = [oracle(one.text, rows[one.row]["scene"]) for one in captions]
            return np.array([one.f1 * (1 - one.unparsed) for one in judged], np.float64)

        return {SCENE_GOLD: score}
    judges = build_judges(
        {"cider": JudgeConfig()}, None, references, tokenizer=tokenizer
    )
    return {REFERENCE_GOLD: Scorer(judges["cider"], rows, REFERENCE_GOLD)}


def measure_pairs(
    scorer: Scorer,
    rows: Sequence[Row],
    captions: Sequence[str],
    tokenizer: str,
    seed: int,
) -> dict[str, ProbeResult]:
    """Probe -> whether the reward puts its pairs in the right order."""
    negatives: NegativeSource = _no_negatives
    if all(row.get("scene") is not None for row in rows):
        negatives = SceneNegatives([kind for kind in NEGATIVE_KINDS if kind in EDITS])
    english = tokenizer == TOKENIZER
    pairs = probe_pairs(rows, captions, negatives, english=english, seed=seed)
    pairs = {name: own for name, own in pairs.items() if own}
    scores = score_pairs(scorer, pairs)
    return {name: probe_result(own, scores[name]) for name, own in pairs.items()}


def _no_negatives(
    row: Row, caption: str, generator: np.random.Generator
) -> list[tuple[str, str]]:
    """None: what is false of a photo is not known."""
    return []


def probe_table(probes: Mapping[str, ProbeResult]) -> str:
    """A line for each probe: pairs, those in the right order, those with equal scores."""
    head = ["probe", "the worse caption", "pairs", "right, %", "interval", "equal, %"]
    lines = []
    for name, result in probes.items():
        shares = result.right, *result.interval, result.equal
        right, low, high, equal = (f"{100 * share:.1f}" for share in shares)
        pairs = str(result.pairs)
        lines.append([name, PROBES[name], pairs, right, f"{low} to {high}", equal])
    return markdown(head, lines)


def measure_samples(
    config: StressConfig,
    rows: Sequence[Row],
    references: Sequence[list[str]],
    scorers: Mapping[str, Score],
) -> dict[str, Curve]:
    """Each score of the best of n samples by the first one, the reward.

    Samples have temperature 1, and depend on the seed and the image ids only.
    """
    count, tokens, data = config.num_samples, config.max_new_tokens, config.data
    start = SavedModelConfig(init=config.model)
    captioner = build_captioner(start, references, data.cache_mb, data.tokenizer)
    check_positions(captioner, "max_new_tokens", tokens, rows)
    accelerator = Accelerator(**accelerator_kwargs())
    policy = captioner.policy.to(accelerator.device)
    decoding = Decoding(num_samples=count, max_new_tokens=tokens, batch_size=8)
    options = decoding, accelerator, "samples", config.seed
    candidates = decode_candidates(captioner, policy, rows, *options)
    images = [row["image_id"] for row in rows]
    captions = [
        RowCaption(number, candidate.caption, candidate.finished)
        for number, image_id in enumerate(images)
        for candidate in candidates[image_id]
    ]
    scores = {name: own(captions).reshape(-1, count) for name, own in scorers.items()}
    return best_of_n(scores["reward"], scores, images, config.bootstrap, config.seed)


def curve_table(curves: Mapping[str, Curve]) -> str:
    """A line for each n: every score of the best of n samples with its 95 % interval."""
    lines = []
    for at, n in enumerate(curves["reward"].n):
        line = [str(n), f"{kl_of_best_of_n(n):.2f}"]
        for curve in curves.values():
            ends = f"{curve.low[at]:.4g} to {curve.high[at]:.4g}"
            line.append(f"{curve.mean[at]:.4g} ({ends})")
        lines.append(line)
    return markdown(["n", "KL, nats", *curves], lines)
