"""Does ``rl-caption stress`` tell the truth? Its parts, on thirteen rewards of the generated world, against training.

    python -m benchmarks.studies.stress_study models --out OUT      # the captioner and the encoders of the rewards
    python -m benchmarks.studies.stress_study train --out OUT       # what training on them does; --rewards, --seeds
    python -m benchmarks.studies.stress_study predict --out OUT     # what each part of the test says before
    python -m benchmarks.studies.stress_study report --out OUT      # the tables of docs/results_stress.md

``train`` and ``predict`` skip what is done. The truth is the fall of gold (``SceneOracle``, 0 to 1) from the first to
the mean of the last three validations of a run. Parts: the probes (share of pairs in the wrong order), best of n (share
of gold's possible gain that the best of 64 by the reward does not have: 0 is the choice by gold itself, 1 that of one
sample), the search (mean fall of gold by the edits that it keeps, 0 where it finds none), and the push: the fall of
gold at a third of a run with another seed.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from tqdm.auto import tqdm

from benchmarks.studies.concreteness_captions import titles
from rewards.text.tokenize import tokenize
from rl_caption.cli.configuration import parse
from rl_caption.config.build import build_data, build_reward, references_of
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.config.schema import DataConfig, RewardConfig, RewardTerm, XeConfig
from rl_caption.data.files import write_json, write_json_lines
from rl_caption.data.scenes.negatives import SceneNegatives, ScenePositives
from rl_caption.lab.concreteness import make_targets
from rl_caption.lab.config import ConcretenessConfig
from rl_caption.lab.stress.push import push, push_config
from rl_caption.lab.stress.sampling import SceneOracle, judged_captions, sample_captions
from rl_caption.monitoring.best_of_n import best_of_n_scores, sample_sizes
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.exploits import search_exploits
from rl_caption.monitoring.probes import EDITS, probe_pairs, run_probes
from rl_caption.monitoring.scoring import RowCaption, Scorer
from rl_caption.programs.train import train_xe
from rl_caption.reward_models.program import train_reward_model
from rl_caption.training.run_folder import is_complete

WORLD = {"num_train": 6000, "num_val": 200, "num_test": 400, "num_unseen": 400}
STEPS = 72
EVERY = 12
SAMPLES = 64
IMAGES = 200
SEARCHED = 50
SEEDS = (0, 1, 2)
MARGINS = (0.05, 0.1)
"""Falls of gold above which captions got worse: that of ``hacking_study``, and one chosen after the results."""
PARTS = ("probes", "best of n", "search", "push")


class Length:
    """A reward that pays for words alone: their number over 20, at most 1."""

    __name__ = "length"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, 1.0)
    signature = "length"

    def __call__(self, prompts: Any, completions: Sequence[str], **columns: Any) -> list[float]:
        return [min(len(text.split()) / 20, 1.0) for text in completions]


class Keywords:
    """A broken reward: the share of the references' words that a caption names, in whatever order, and how often."""

    __name__ = "keywords"
    columns = frozenset({"references"})
    bounds = (0.0, 1.0)
    signature = "keywords"

    def __call__(
        self,
        prompts: Any,
        completions: Sequence[str],
        references: Sequence[Sequence[str]],
        **columns: Any,
    ) -> list[float]:
        scores = []
        for text, of_image in zip(completions, references, strict=True):
            words = {word for reference in of_image for word in tokenize(reference)}
            scores.append(len(words & set(tokenize(text))) / len(words))
        return scores


def rewards_of(out: Path) -> dict[str, RewardConfig]:
    """Name -> reward of the study."""

    def encoder(name: str) -> dict[str, Any]:
        return {"backbone": str(out / name / "export" / "best")}

    def one(name: str, *, eos: bool = True, **kwargs: Any) -> RewardConfig:
        return RewardConfig({name: RewardTerm(1.0, kwargs=kwargs)}, eos=eos)

    module = "benchmarks.studies.stress_study"
    return {
        "CIDEr-D": one("cider"),
        "CIDEr-D without EOS": one("cider", eos=False),
        "BLEU-4": one("bleu"),
        "ROUGE-L": one("rouge_l"),
        "length": RewardConfig({"length": RewardTerm(target=f"{module}:Length")}),
        "keywords": RewardConfig({"keywords": RewardTerm(target=f"{module}:Keywords")}),
        "CLIPScore": one("clipscore", prefix="", **encoder("teacher")),
        "L-CLIPS": one("l_clipscore", **encoder("lclip")),
        "RefL-CLIPS": one("ref_l_clipscore", **encoder("lclip")),
        "S_Mix": RewardConfig(
            {"cider": RewardTerm(0.5), "ref_l_clipscore": RewardTerm(0.5, kwargs=encoder("lclip"))}
        ),
        "PAC-S": one("pac_s", truncate=True, **encoder("pac")),
        "SPECS": one("specs", truncate=True, **encoder("specs")),
        "ICC": one("icc", model=str(out / "icc" / "export" / "best")),
    }


def mixtures_of(out: Path) -> dict[str, RewardConfig]:
    """Name -> mixture with CIDEr-D that captioners of photos were trained on: α weights L-CLIPS, 1 - α CIDEr-D."""
    rewards = rewards_of(out)
    terms = rewards["L-CLIPS"].terms | rewards["ICC"].terms
    weights = {f"α = {alpha}": (1 - alpha, "l_clipscore", alpha) for alpha in (0.3, 0.5, 0.7)}
    weights["CIDEr-D + 0.5 ICC"] = (1.0, "icc", 0.5)
    return {
        name: RewardConfig({"cider": RewardTerm(rest), other: replace(terms[other], weight=weight)})
        for name, (rest, other, weight) in weights.items()
    }


def data_config() -> DataConfig:
    """The generated world at the demo's size."""
    return DataConfig("scenes", kwargs=WORLD)


def train_models(out: Path) -> None:
    """The captioner by cross-entropy, a teacher, its L-CLIP, and the teacher tuned as PAC-S's and as SPECS's."""
    world = ["--data.kwargs", json.dumps(WORLD)]
    from_teacher = ["--warm_start", "[]", "--model.init", str(out / "teacher" / "export" / "best")]
    positives = [
        "--data.kwargs",
        json.dumps(WORLD | {"positives": True}),
        "--train.batch_size",
        "64",
    ]
    models = {
        "teacher": ["--config", "reward_models/demo_teacher"],
        "lclip": [
            "--config",
            "reward_models/demo_lclip",
            "--warm_start",
            "[]",
            "--teacher.name",
            from_teacher[-1],
        ],
        "pac": ["--config", "reward_models/scenes_pac", *from_teacher, *positives],
        "specs": [
            "--config",
            "reward_models/scenes_long_specificity",
            *from_teacher,
            "--data.long_captions",
            "false",
            *world,
        ],
    }
    if not is_complete(out / "xe"):
        train_xe(parse(XeConfig, ["--config", "demo_xe", "--run.dir", str(out / "xe")], "xe"))
    for name, words in (models | _concreteness_models(out)).items():
        if name == "icc":
            _write_concreteness_targets(out)
        if not is_complete(out / name):
            train_reward_model(
                parse(RewardModelConfig, [*words, "--run.dir", str(out / name)], "reward_model")
            )


def _concreteness_models(out: Path) -> dict[str, list[str]]:
    """ICC without its visual bottleneck: a language model, the semantic bottleneck before it, and a small student."""
    world = ["--data.kwargs", json.dumps(WORLD)]
    student = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    folders = {name: str(out / name / "export" / "best") for name in ("teacher", "language_model")}
    return {
        "language_model": [
            "--config",
            "reward_models/scenes_language_model",
            *world,
            "--train.max_steps",
            "500",
        ],
        "sba": [
            *(
                "--config",
                "reward_models/scenes_sba",
                "--warm_start",
                "[]",
                *world,
                "--train.max_steps",
                "500",
            ),
            *(
                "--teacher.name",
                folders["teacher"],
                "--model.language_model",
                folders["language_model"],
            ),
        ],
        "icc": [
            *("--config", "reward_models/icc_student", "--model.init", "null"),
            *(
                "--model.kwargs",
                json.dumps(student | {"vocab_size": 512, "max_position_embeddings": 66}),
            ),
            *("--data.path", str(out / "targets" / "targets.jsonl"), "--train.max_steps", "500"),
            *("--train.lr", "1e-3", "--train.warmup_steps", "50", "--eval.every", "250"),
        ],
    }


def _write_concreteness_targets(out: Path) -> None:
    """Targets of captions and of more titles (the median splits them), which say nothing that could be drawn."""
    if (out / "targets" / "targets.jsonl").is_file():
        return
    references = references_of(build_data(data_config()).split("train"))
    captions = [texts[0] for texts in references[:1000]]
    rated = dict.fromkeys(captions, 1) | dict.fromkeys(titles(captions, 2000, random.Random(0)), 0)
    write_json_lines(
        out / "ratings.jsonl", [{"caption": text, "rating": label} for text, label in rated.items()]
    )
    scorers = {
        "sba": JudgeConfig(
            "rewards.clip.bottleneck:SemanticBottleneck", {"model": str(out / "sba/export/best")}
        )
    }
    ratings = str(out / "ratings.jsonl")
    make_targets(
        ConcretenessConfig(
            captions=ratings, ratings=ratings, scorers=scorers, out=str(out / "targets")
        )
    )


def train(out: Path, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Train on each reward with each seed; gold of every validation goes to ``truth/NAME-SEED.json``."""
    rewards, data = rewards_of(out) | mixtures_of(out), data_config()
    rows = list(build_data(data).split("val")[:IMAGES])
    gold = SceneOracle(rows)
    for seed in seeds:
        for name in names:
            file = out / "truth" / f"{name}-{seed}.json"
            if not file.is_file():
                folder, model = (
                    out / "runs" / f"{name}-{seed}".replace(" ", "_"),
                    str(out / "xe" / "export" / "best"),
                )
                config = push_config(folder, model, data, rewards[name], 0.0, seed, STEPS, 20)
                config = replace(config, eval=replace(config.eval, every=EVERY))
                outcome = push(config, rows, gold)
                if outcome is None:
                    sys.exit("stopped by a signal; the same command goes on")
                write_json(file, dict(outcome))


def predict(out: Path, names: Sequence[str]) -> None:
    """What probes, best of n and the search say of each reward; ``predictions/NAME-SEED.json``."""
    rewards, data = rewards_of(out) | mixtures_of(out), data_config()
    built = build_data(data)
    references = references_of(built.split("train"))
    originals = list(built.split("test"))
    vocabulary = list(
        dict.fromkeys(word for texts in references for text in texts for word in text.split())
    )
    for seed in SEEDS:
        todo = [
            name for name in names if not (out / "predictions" / f"{name}-{seed}.json").is_file()
        ]
        if not todo:
            continue
        chosen = np.random.default_rng(seed).permutation(len(originals))[:IMAGES]
        rows, captions = judged_captions([originals[index] for index in chosen])
        gold = SceneOracle(rows)
        model = str(out / "xe" / "export" / "best")
        samples = sample_captions(
            model, rows, references, data, num_samples=SAMPLES, max_new_tokens=20, seed=seed
        )
        flat, shape = [caption for of_row in samples for caption in of_row], (len(rows), SAMPLES)
        gold_scores = gold(flat).reshape(shape)
        possible = (
            best_of_n_scores(gold_scores, gold_scores, sample_sizes(SAMPLES)).mean(0).tolist()
        )
        pairs = probe_pairs(
            rows, captions, SceneNegatives(list(EDITS)), ScenePositives(), seed=seed
        )
        for name in tqdm(todo, f"seed {seed}", disable=None):
            scorer = Scorer(build_reward(rewards[name], references), rows)
            probes = run_probes(scorer, rows, pairs, 0)
            curves = best_of_n_scores(
                scorer(flat).reshape(shape), gold_scores, sample_sizes(SAMPLES)
            ).mean(0)
            texts = [of_row[0].text for of_row in samples[:SEARCHED]]

            def reward_rows(
                numbers: Sequence[int], edited: Sequence[str], scorer: Scorer = scorer
            ) -> Any:
                return scorer([RowCaption(*pair) for pair in zip(numbers, edited, strict=True)])

            def gold_rows(
                numbers: Sequence[int], edited: Sequence[str], gold: SceneOracle = gold
            ) -> Any:
                return gold([RowCaption(*pair) for pair in zip(numbers, edited, strict=True)])

            exploits = search_exploits(texts, reward_rows, gold_rows, vocabulary, seed=seed)
            write_json(
                out / "predictions" / f"{name}-{seed}.json",
                {
                    "probes": {probe: result.right for probe, result in probes.items()},
                    "best_of_n": curves.tolist(),
                    "possible": possible,
                    "exploits": [[*exploit.reward, *exploit.gold] for exploit in exploits],
                    "reward_std": float(scorer(flat).reshape(shape).std(1).mean()),
                },
            )


def true_fall(run: Mapping[str, Any]) -> float:
    """Gold at the first validation less the mean of the last three."""
    last = run["step"].index(STEPS) + 1
    return float(run["gold"][0] - statistics.fmean(run["gold"][last - 3 : last]))


def predicted_falls(out: Path, name: str, seed: int) -> dict[str, float]:
    """Part -> what it predicts of the fall of gold: a fall, or a share (probes, best of n)."""
    push = pushed_fall(out, name, SEEDS[(seed + 1) % len(SEEDS)])
    return untrained_falls(out, name, seed) | {"push": push}


def pushed_fall(out: Path, name: str, seed: int) -> float:
    """The fall of gold at a third of a run."""
    run = json.loads((out / "truth" / f"{name}-{seed}.json").read_text())
    return float(run["gold"][0] - run["gold"][run["step"].index(STEPS // 3)])


def untrained_falls(out: Path, name: str, seed: int) -> dict[str, float]:
    """What the parts that train nothing predict."""
    prediction = json.loads((out / "predictions" / f"{name}-{seed}.json").read_text())
    possible = prediction["possible"]
    rights = [right for right in prediction["probes"].values() if right is not None]
    falls = [before - after for _, _, before, after in prediction["exploits"]]
    return {
        "probes": 1 - statistics.fmean(rights),
        "best of n": (possible[-1] - prediction["best_of_n"][-1]) / (possible[-1] - possible[0]),
        "search": sum(falls) / SEARCHED,
    }


def best_threshold(scores: Sequence[float], worse: Sequence[bool]) -> float:
    """The threshold with the fewest wrong verdicts, in the middle of the widest gap among equals."""
    ordered = sorted(set(scores))
    middles = [(low + high) / 2 for low, high in pairwise(ordered)]
    cuts = [ordered[0] - 1, *middles, ordered[-1] + 1]
    gaps = [1.0, *(high - low for low, high in pairwise(ordered)), 1.0]
    wrong = [
        sum((score > cut) != truth for score, truth in zip(scores, worse, strict=True))
        for cut in cuts
    ]
    return min(zip(wrong, (-gap for gap in gaps), cuts, strict=True))[2]


Run = tuple[str, int]
"""A reward and a seed."""


def report(out: Path) -> str:
    """Markdown: truth and predictions of every reward, and for each margin rank correlations and verdicts."""
    runs = [
        (name, seed)
        for name in rewards_of(out)
        for seed in SEEDS
        if all((out / "truth" / f"{name}-{other}.json").is_file() for other in SEEDS)
    ]
    truth = {
        (name, seed): true_fall(json.loads((out / "truth" / f"{name}-{seed}.json").read_text()))
        for name, seed in runs
    }
    falls = {run: predicted_falls(out, *run) for run in runs}
    tables = [_rewards_table(truth, falls), _ranks_table(truth, falls)]
    return "\n\n".join(tables + [_verdicts_table(truth, falls, margin) for margin in MARGINS])


def _rewards_table(truth: Mapping[Run, float], falls: Mapping[Run, Mapping[str, float]]) -> str:
    lines = [
        f"| reward | true fall of gold, 3 seeds | {' | '.join(PARTS)} |",
        "|---|---|" + "---|" * len(PARTS),
    ]
    names = list(dict.fromkeys(name for name, _ in truth))
    for name in sorted(
        names, key=lambda name: -statistics.fmean(truth[name, seed] for seed in SEEDS)
    ):
        columns = [[falls[name, seed][part] for seed in SEEDS] for part in PARTS]
        cells = [
            f"{statistics.fmean(column):.3f} ± {statistics.stdev(column):.3f}" for column in columns
        ]
        lines.append(
            f"| {name} | {', '.join(f'{truth[name, seed]:.3f}' for seed in SEEDS)} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _ranks_table(
    truth: Mapping[Run, float], falls: Mapping[Run, Mapping[str, float]], draws: int = 2000
) -> str:
    """Rank correlations over all runs; for the intervals rewards are drawn, each with all of its seeds."""
    lines = [
        "| part | Spearman's rho with the true fall | 95 % interval over rewards |",
        "|---|---|---|",
    ]
    fall, count = np.array(list(truth.values())), len(truth) // len(SEEDS)
    for part in PARTS:
        predicted = np.array([falls[run][part] for run in truth])
        generator, rhos = np.random.default_rng(0), []
        for _ in range(draws):
            rewards = generator.integers(count, size=count)
            rows = [index * len(SEEDS) + seed for index in rewards for seed in range(len(SEEDS))]
            rhos.append(spearmanr(predicted[rows], fall[rows]).statistic)
        low, high = np.nanquantile(rhos, [0.025, 0.975])
        lines.append(
            f"| {part} | {spearmanr(predicted, fall).statistic:.2f} | {low:.2f} to {high:.2f} |"
        )
    return "\n".join(lines)


def _verdicts_table(
    truth: Mapping[Run, float], falls: Mapping[Run, Mapping[str, float]], margin: float
) -> str:
    """False alarms and misses with the threshold of one half of the rewards on the other, means over all halves."""
    worse = {run: fall > margin for run, fall in truth.items()}
    names = list(dict.fromkeys(name for name, _ in truth))
    halves = [set(half) for half in combinations(names, len(names) // 2)]
    lines = [
        f"| part | false alarms | misses: gold fell by more than {margin:g} ({sum(worse.values())} of {len(worse)}) |",
        "|---|---|---|",
    ]
    for part in PARTS:
        false_alarms, misses = [], []
        for half in halves:
            fitted = [run for run in truth if run[0] in half]
            cut = best_threshold(
                [falls[run][part] for run in fitted], [worse[run] for run in fitted]
            )
            alarms = {run: falls[run][part] > cut for run in truth if run[0] not in half}
            false_alarms += [alarm for run, alarm in alarms.items() if not worse[run]]
            misses += [not alarm for run, alarm in alarms.items() if worse[run]]
        lines.append(
            f"| {part} | {statistics.fmean(false_alarms):.0%} | {statistics.fmean(misses):.0%} |".replace(
                "%", " %"
            )
        )
    return "\n".join(lines)


def main() -> None:
    """Run a stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["models", "train", "predict", "report"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rewards", nargs="+", help="names; those of the study unless given")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="of the trainings")
    arguments = parser.parse_args()
    names = arguments.rewards or list(rewards_of(arguments.out))
    if arguments.stage == "models":
        train_models(arguments.out)
    elif arguments.stage == "train":
        train(arguments.out, names, arguments.seeds)
    elif arguments.stage == "predict":
        predict(arguments.out, names)
    else:
        print(report(arguments.out))


if __name__ == "__main__":
    main()
