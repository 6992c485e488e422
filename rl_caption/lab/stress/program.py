"""The stress program: how a reward can be hacked, before training on it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from rewards.text.tokenize import TOKENIZER, tokenizer_of
from rl_caption.config.build import build_data, build_reward, quiet_libraries, references_of, usable_split
from rl_caption.data.base import DataError, Row
from rl_caption.data.files import write_json, write_text
from rl_caption.data.negatives import EDITS as RULES
from rl_caption.data.negatives import ColumnPositives, NegativeSource, PositiveSource, RuleNegatives
from rl_caption.data.plain_files import single_spaced
from rl_caption.data.scenes.moving import MovingScene
from rl_caption.data.scenes.negatives import SceneNegatives, ScenePositives
from rl_caption.errors import ConfigError
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import StressConfig
from rl_caption.lab.stress.probes import EDITS, PROBES, ProbeResult, probe_pairs, run_probes
from rl_caption.lab.stress.scoring import Scorer


def stress(config: StressConfig) -> str:
    """Test a reward, write ``stress.md`` and ``stress.json``, and return the report.

    Raises:
        ConfigError: the reward cannot be made, or needs what the data lack.
        DataError: the data cannot be read, or an image has no caption, or none for the reward to see.
        RewardError: the reward failed; it names the image and the caption.
    """
    quiet_libraries()
    if config.reward.normalize != "none":
        raise ConfigError(
            f"reward.normalize is {config.reward.normalize!r}: expected none, as scores of different calls are compared"
        )
    folder = check_writable(config.out)
    data = build_data(config.data)
    split, train = (data.split(usable_split(data, name)) for name in (config.split, config.train_split))
    reward = build_reward(config.reward, references_of(train), tokenizer=config.data.tokenizer)
    rows, captions = judged_captions(
        split[: config.max_images], config.data.tokenizer, needs_references="references" in reward.columns
    )
    scorer = Scorer(reward, rows)
    negatives, positives = _sources(rows, captions)
    pairs = probe_pairs(
        rows, captions, negatives, positives, english=config.data.tokenizer == TOKENIZER, seed=config.seed
    )
    probes = run_probes(scorer, pairs, config.examples)
    scores = scorer.scores.values()
    report = "\n".join(
        [
            f"# Stress test of {reward.signature}",
            "",
            _verdict(probes, constant=min(scores) == max(scores)),
            "",
            "## Probes",
            "",
            *_probe_table(probes, len(rows)),
            *_probe_examples(probes),
        ]
    )
    results: dict[str, Any] = {"probes": {name: asdict(result) for name, result in probes.items()}}
    write_text(folder / "stress.md", report + "\n")
    signature = {"config": asdict(config), "signature": reward.signature, "images": len(rows)}
    write_json(folder / "stress.json", signature | results)
    print(f"wrote {folder / 'stress.md'}, {folder / 'stress.json'}", file=sys.stderr)
    return report


def judged_captions(
    rows: Sequence[Row], tokenizer: str = TOKENIZER, *, needs_references: bool = True
) -> tuple[list[Row], list[str]]:
    """Split the references of R rows: the rows with those that a reward sees, and [R] the one that is judged.

    The first is judged; the reward sees those with other tokens. Raises ``DataError`` without images, where an image
    has no reference or, with ``needs_references``, none that the reward could see.
    """
    tokenize, seen, captions = tokenizer_of(tokenizer), [], []
    for row in rows:
        first, *rest = row["references"] or [""]
        others = [text for text in rest if tokenize(text) != tokenize(first)]
        if not first.strip() or (needs_references and not others):
            raise DataError(
                f"image {row['image_id']!r} has {len(row['references'])} references, of which the first is judged: "
                f"expected at least {1 + needs_references} different ones"
            )
        seen.append(cast("Row", {**row, "references": others}))
        captions.append(first)
    if not seen:
        raise DataError("the split has no images: expected at least one")
    return seen, captions


def _sources(rows: Sequence[Row], captions: Sequence[str]) -> tuple[NegativeSource, PositiveSource | None]:
    """False captions and paraphrases: exact ones of generated scenes, else rules and the data's own paraphrases."""
    if all(row.get("scene") is not None for row in rows):
        moving = any(isinstance(row["scene"], MovingScene) for row in rows)
        return SceneNegatives(list(EDITS)), None if moving else ScenePositives()
    rules = RuleNegatives(captions, [kind for kind in RULES if kind in EDITS or kind.startswith("add_")])
    return rules, ColumnPositives() if all(row.get("positive_captions") for row in rows) else None


def _verdict(probes: Mapping[str, ProbeResult], *, constant: bool) -> str:
    """One paragraph: what the reward is blind to, as far as the intervals say so."""
    if constant:
        return "The reward gave every caption the same score: it is constant here, and says nothing."
    tested = {name: result for name, result in probes.items() if result.interval and result.tied is not None}
    sound = [name for name, result in tested.items() if result.interval and result.interval[0] > 0.5]
    blind = [name for name, result in tested.items() if result.tied and result.tied > 0.5]
    wrong = [name for name, result in tested.items() if result.interval and result.interval[1] < 0.5]
    wrong = [name for name in wrong if name not in blind]
    return (
        f"Of {len(tested)} probes, the reward orders {len(sound)} better than chance. It prefers the worse caption in "
        f"{', '.join(wrong) or 'none'}; it gives both mostly equal scores in {', '.join(blind) or 'none'}."
    )


def _probe_table(probes: Mapping[str, ProbeResult], images: int) -> list[str]:
    lines = []
    for name, result in probes.items():
        if result.right is None or result.interval is None or result.tied is None:
            lines.append([name, PROBES[name], "0", "does not apply", "", "", ""])
            continue
        low, high = result.interval
        effect = "" if result.effect is None else f"{result.effect:+.2f}"
        shares = [f"{100 * result.right:.1f}", f"{100 * low:.1f} to {100 * high:.1f}", f"{100 * result.tied:.1f}"]
        lines.append([name, PROBES[name], str(result.pairs), *shares, effect])
    head = ["probe", "the worse caption", "pairs", "right, %", "95 % interval", "equal, %", "effect"]
    note = (
        f"{images} images, at most one pair each. right: the better caption scores higher, equal scores do not count; "
        "Wilson's interval. effect: mean difference over its standard deviation."
    )
    return [markdown(head, lines), "", note]


def _probe_examples(probes: Mapping[str, ProbeResult]) -> list[str]:
    lines = ["", "Pairs that the reward orders worst:", ""]
    for name, result in probes.items():
        wrong = [one for one in result.examples if one["score_of_better"] <= one["score_of_worse"]]
        lines += [
            f"- {name}, {one['image_id']}: {one['score_of_better']:.4g} for “{single_spaced(one['better'])}”, "
            f"{one['score_of_worse']:.4g} for “{single_spaced(one['worse'])}”"
            for one in wrong
        ]
    return lines if len(lines) > 3 else []
