"""The stress program: how a reward can be hacked, by pairs, by the choice among samples, and by a
short training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

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
from rl_caption.config.schema import ScstConfig
from rl_caption.data.base import DataError, Row, Splits
from rl_caption.data.files import write_json, write_text
from rl_caption.data.negatives import EDITS as RULES
from rl_caption.data.negatives import RuleNegatives
from rl_caption.data.scenes import NEGATIVE_KINDS, oracle
from rl_caption.data.scenes.negatives import SceneNegatives
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.confidence import Estimate, Floats, Weights, estimates
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import StressConfig
from rl_caption.monitoring.best_of_n import (
    Interval,
    best_of_n,
    kl_of_best_of_n,
)
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.monitoring.probes import (
    EDITS,
    PROBES,
    orders,
    probe_pairs,
    probe_result,
    score_pairs,
)
from rl_caption.monitoring.scoring import RowCaption, Score, Scorer
from rl_caption.programs.ablation.grid import Parse
from rl_caption.programs.report.charts import macros
from rl_caption.programs.report.pages import Page, render
from rl_caption.programs.report.program import REPORT
from rl_caption.programs.report.read import RunFolder, read_run
from rl_caption.programs.train import train_scst
from rl_caption.runtime.engines import accelerator_kwargs
from rl_caption.runtime.errors import ConfigError
from rl_caption.training.run_folder import is_complete
from rl_caption.training.validation import decode_candidates

SCENE_GOLD = "oracle"
REFERENCE_GOLD = "CIDEr-D, references held out"
Table = tuple[list[str], list[list[str]]]
"""Head and lines."""


class Verdict(NamedTuple):
    """What the strongest evidence says: training on the reward, else the choice among samples, else
    pairs.
    """

    outcome: str
    """``better``, ``worse``, or ``open`` where the interval does not tell; ``constant`` for a
    reward that gave all captions one score.
    """
    measure: str
    """What was measured."""
    value: float
    interval: Interval
    """95 %, by bootstrap over images."""

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.outcome}: {self.measure} {self.value:.3f} (95 % interval {low:.3f} to "
            f"{high:.3f})"
        )


class Bench(NamedTuple):
    """R rows with the references that the reward sees, [R] captions of people, the reward's and the
    gold scores.
    """

    config: StressConfig
    data: Splits
    references: Sequence[list[str]]
    """Of the training images."""
    rows: Sequence[Row]
    captions: Sequence[str]
    scorer: Scorer
    gold: Mapping[str, Score]

    def estimates(
        self,
        rows: Sequence[Row],
        statistic: Callable[[Weights], Sequence[float] | Floats],
    ) -> list[Estimate]:
        """Of how often each of N rows is drawn, with 95 % intervals over images."""
        images = [row["image_id"] for row in rows]
        return estimates(statistic, images, self.config.bootstrap, self.config.seed)


def stress(config: StressConfig, parse: Parse) -> str | int:
    """Test a reward, write ``stress.json`` and ``report.html``, and return the report.

    Returns 1 where a signal ended the training, which goes on at the next call.

    Raises:
        ConfigError: the reward or the captioner cannot be made, or needs what the data lack.
        DataError: the data cannot be read, or an image has no caption, or none for the reward to
            see.
        RewardError: the reward failed; it names the image and the caption.
    """
    quiet_libraries()
    folder = check_writable(config.out)
    bench = set_up(config)
    found: dict[str, Any] = {}
    tables = {}
    found["probes"], tables["Probes"], verdict = _probes(bench)
    if config.model is not None:
        found["best_of_n"], tables["Best of n"], verdict = _best_of_n(
            bench, config.model
        )
    if len(set(bench.scorer.scores.values())) == 1:
        verdict = Verdict(
            "constant", "all captions have one score; differences are", 0, (0, 0)
        )
    elif config.push is not None:
        run = _trained(config, config.push, parse)
        if run is None:
            return 1
        tables["Push"], verdict = _judged_run(bench, run)
    signature = bench.scorer.reward.signature
    found |= {"verdict": verdict._asdict(), "tables": tables, "signature": signature}
    found |= {"images": len(bench.rows), "config": config.model_dump(mode="json")}
    write_json(folder / "stress.json", found)
    sections = {"Verdict": macros().verdict(str(verdict), verdict.outcome != "better")}
    sections |= {
        heading: macros().table("", *table) for heading, table in tables.items()
    }
    write_text(folder / REPORT, render(Page("Stress test", signature, sections)))
    printed = [f"{heading}\n\n{markdown(*table)}" for heading, table in tables.items()]
    return "\n\n".join([f"Stress test of {signature}", str(verdict), *printed])


def set_up(config: StressConfig) -> Bench:
    """Build data, reward and gold scores, and check them; raises as ``stress``."""
    if config.reward.normalize != "none":
        raise ConfigError(
            "reward.normalize is set: expected none, as scores of calls are compared"
        )
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
    gold = gold_scores(judged, references, tokenizer)
    judges = build_judges(config.judges, reward, references, "judges", tokenizer)
    for name, judge in judges.items():
        gold[name] = Scorer(judge, rows, f"judges.{name}")
    captions = [row["references"][0] for row in judged]
    return Bench(config, data, references, rows, captions, Scorer(reward, rows), gold)


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
            judged = [
                oracle(caption.text, rows[caption.row]["scene"]) for caption in captions
            ]
            return np.array(
                [found.f1 * (1 - found.unparsed) for found in judged], np.float64
            )

        return {SCENE_GOLD: score}
    judges = build_judges(
        {"cider": JudgeConfig()}, None, references, tokenizer=tokenizer
    )
    return {REFERENCE_GOLD: Scorer(judges["cider"], rows, REFERENCE_GOLD)}


def _probes(bench: Bench) -> tuple[dict[str, Any], Table, Verdict]:
    """Whether most pairs are in the right order, or most in the wrong one; equal scores are
    neither.
    """
    negatives: SceneNegatives | RuleNegatives
    if SCENE_GOLD in bench.gold:
        negatives = SceneNegatives([kind for kind in NEGATIVE_KINDS if kind in EDITS])
    else:
        kinds = [kind for kind in RULES if kind in EDITS or kind.startswith("add_")]
        negatives = RuleNegatives(bench.captions, kinds)
    english = bench.config.data.tokenizer == TOKENIZER
    made = probe_pairs(
        bench.rows, bench.captions, negatives, english=english, seed=bench.config.seed
    )
    pairs = {name: own for name, own in made.items() if own}
    scores = score_pairs(bench.scorer, pairs)
    results = {name: probe_result(own, scores[name]) for name, own in pairs.items()}
    lines = []
    for name, result in results.items():
        shares = result.right, *result.interval, result.equal
        right, low, high, equal = (f"{100 * share:.1f}" for share in shares)
        lines.append(
            [name, PROBES[name], str(result.pairs), right, f"{low} to {high}", equal]
        )
    head = [
        "probe",
        "the worse caption",
        "pairs",
        "right, %",
        "95 % interval",
        "equal, %",
    ]

    rows = [pair.row for own in pairs.values() for pair in own]
    order = orders(np.concatenate([scores[name] for name in pairs]))
    size = len(bench.rows)
    count = np.bincount(rows, minlength=size)
    won, lost = (np.bincount(rows, which, size) for which in (order > 0, order < 0))
    right_ends, wrong_ends = (
        estimate.interval
        for estimate in bench.estimates(
            bench.rows, lambda drawn: np.array([won, lost]) @ drawn / (drawn @ count)
        )
    )
    outcome = (
        "better" if right_ends[0] > 0.5 else "worse" if wrong_ends[0] > 0.5 else "open"
    )
    measure = "share of pairs that the reward puts in the right order:"
    verdict = Verdict(outcome, measure, float((order > 0).mean()), right_ends)
    return (
        {name: asdict(result) for name, result in results.items()},
        (head, lines),
        verdict,
    )


def _best_of_n(bench: Bench, model: str) -> tuple[dict[str, Any], Table, Verdict]:
    """Reward and gold of the best of n samples by the reward; the change of gold from one sample to
    the best of all or, where it turns, from its peak.

    Samples have temperature 1, and depend on the seed and the image ids only.
    """
    config = bench.config
    count, tokens, data = config.num_samples, config.max_new_tokens, config.data
    start = SavedModelConfig(init=model)
    captioner = build_captioner(start, bench.references, data.cache_mb, data.tokenizer)
    check_positions(captioner, "max_new_tokens", tokens, bench.rows)
    accelerator = Accelerator(**accelerator_kwargs())
    policy = captioner.policy.to(accelerator.device)
    decoding = Decoding(num_samples=count, max_new_tokens=tokens, batch_size=8)
    options = decoding, accelerator, "samples", config.seed
    candidates = decode_candidates(captioner, policy, bench.rows, *options)
    captions = []
    for number, row in enumerate(bench.rows):
        for candidate in candidates[row["image_id"]]:
            captions.append(RowCaption(number, candidate.caption, candidate.finished))
    scorers: dict[str, Score] = {"reward": bench.scorer, **bench.gold}
    scores = {
        name: score(captions).reshape(-1, count) for name, score in scorers.items()
    }
    images = [row["image_id"] for row in bench.rows]
    curves = best_of_n(scores["reward"], scores, images, config.bootstrap, config.seed)
    lines = []
    for at, n in enumerate(curves["reward"].n):
        line = [str(n), f"{kl_of_best_of_n(n):.2f}"]
        for curve in curves.values():
            line.append(
                f"{curve.mean[at]:.4g} ({curve.low[at]:.4g} to {curve.high[at]:.4g})"
            )
        lines.append(line)
    name, curve = list(curves.items())[1]
    first, change, ends = 1, curve.change, curve.change_interval
    if curve.turns:
        low, high = curve.fall_interval
        first, change, ends = curve.peak, -curve.fall, (-high, -low)
    measure = f"from the best of {first} samples by the reward to that of {curve.n[-1]}, {name} changes by"
    found = {name: asdict(curve) for name, curve in curves.items()}
    return found, (["n", "KL, nats", *curves], lines), _verdict(measure, change, ends)


def _verdict(measure: str, change: float, ends: Interval) -> Verdict:
    """The verdict on a change of a gold score."""
    outcome = "better" if ends[0] > 0 else "worse" if ends[1] < 0 else "open"
    return Verdict(outcome, measure, change, ends)


def _trained(config: StressConfig, recipe: str, parse: Parse) -> RunFolder | None:
    """A run of ``scst`` on the reward, whose other options are those of ``recipe``; None where a
    signal ended it.
    """
    folder = Path(config.out) / "push"
    run: ScstConfig = parse(
        ScstConfig, ["--config", recipe], "rl-caption stress --push"
    )
    run = run.replace(
        reward=config.reward, data=config.data, run=run.run.replace(dir=str(folder))
    )
    if config.model is not None:
        run = run.replace(model=SavedModelConfig(init=config.model))
    if not is_complete(folder):
        train_scst(run)
    return read_run(folder) if is_complete(folder) else None


def _judged_run(bench: Bench, run: RunFolder) -> tuple[Table, Verdict]:
    """Gold of the greedy captions of every validation, and its change from the first to the last."""
    rewards, gold, lines = dict(run.series("val/reward")), [], []
    rows = [
        row for row in bench.data.split("val") if row["image_id"] in run.predictions(0)
    ]
    ((name, score),) = gold_scores(
        rows, bench.references, bench.config.data.tokenizer
    ).items()
    for step, reward in rewards.items():
        captions = run.predictions(step)
        texts = [
            RowCaption(at, captions[row["image_id"]]) for at, row in enumerate(rows)
        ]
        gold.append(score(texts))
        alarm = "alarm" if step in run.alarms else ""
        lines.append([str(step), f"{reward:.4g}", f"{gold[-1].mean():.4g}", alarm])
    changes = gold[-1] - gold[0]
    (change,) = bench.estimates(
        rows, lambda drawn: np.array([drawn @ changes]) / len(drawn)
    )
    measure = f"{max(rewards)} steps of training on the reward change {name} by"
    table = ["step", "reward", name, "monitor"], lines
    return table, _verdict(measure, change.value, change.interval)
