"""The stress program: how a reward can be hacked, before training on it."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypedDict

import numpy as np
from tqdm.auto import tqdm

from rewards.base import leaf_rewards
from rewards.build import RewardBuilder
from rewards.text.tokenize import TOKENIZER
from rl_caption import __version__
from rl_caption.config.build import (
    build_data,
    build_reward,
    quiet_libraries,
    references_of,
    usable_split,
)
from rl_caption.config.overrides import Parse
from rl_caption.config.schema import RewardConfig
from rl_caption.config.shipped import find_config
from rl_caption.data.base import DataModule, Row, reward_inputs
from rl_caption.data.files import write_json, write_text
from rl_caption.data.fingerprint import fingerprint
from rl_caption.data.negatives import EDITS as RULES
from rl_caption.data.negatives import ColumnPositives, NegativeSource, PositiveSource, RuleNegatives
from rl_caption.data.parts import check_settings
from rl_caption.data.plain_files import hash_text, read_json
from rl_caption.data.scenes.moving import MovingScene
from rl_caption.data.scenes.negatives import SceneNegatives, ScenePositives
from rl_caption.evaluation import Evaluation, check_writable
from rl_caption.evaluation.confidence import compare
from rl_caption.lab.config import StressConfig
from rl_caption.lab.stress.page import stress_page, stress_report, verdict
from rl_caption.lab.stress.push import push, push_config
from rl_caption.lab.stress.sampling import (
    SceneOracle,
    gold_scores,
    judged_captions,
    sample_captions,
    starting_captioner,
)
from rl_caption.monitoring.best_of_n import (
    best_of_n,
    best_of_n_scores,
    kl_of_best_of_n,
    needed_kl_coef,
    sample_sizes,
)
from rl_caption.monitoring.exploits import ScoreRows, search_exploits
from rl_caption.monitoring.mixing import FEWEST_IMAGES, best_mixtures
from rl_caption.monitoring.probes import EDITS, Pair, probe_pairs, run_probes
from rl_caption.monitoring.scoring import RowCaption, Score, Scorer
from rl_caption.programs.report.pages import render
from rl_caption.runtime.errors import ConfigError, section_errors
from rl_caption.training.run_folder import read_config

OTHERS = ("cider", "rouge_l", "repetition")
"""Rewards to mix the tested one with, those that it does not have."""


class Budget(NamedTuple):
    """How much is computed beyond probes and best of n."""

    kl_coefs: tuple[float, ...] = ()
    """Of the push, in standard deviations of the reward among the samples of an image."""
    push_seeds: int = 0
    searched_images: int = 0
    """Images whose captions are edited in the search for exploits."""


BUDGETS = {
    "fast": Budget(),
    "normal": Budget((0.0, 0.1, 0.5), 1),
    "thorough": Budget((0.0, 0.05, 0.1, 0.2, 0.5), 3, 200),
}


class StoppedError(Exception):
    """A signal ended a training; the command goes on when it is called again."""


@dataclass(frozen=True)
class Bench:
    """What all stages share: R rows with the references that the reward sees, [R] captions of people, the scores."""

    config: StressConfig
    data: DataModule
    rows: Sequence[Row]
    captions: Sequence[str]
    references: Sequence[list[str]]
    """Of the training images."""
    scorer: Scorer
    gold: Mapping[str, Score]
    rival: Scorer | None
    """Scores by the reward that the tested one is compared with."""

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    @property
    def budget(self) -> Budget:
        return BUDGETS[self.config.budget]

    @property
    def in_world(self) -> bool:
        """Whether the images are of the generated world, of which there is a captioner, and the truth is known."""
        return self.config.data.target is None and self.config.data.format == "scenes"

    @property
    def has_samples(self) -> bool:
        return self.config.model is not None or self.in_world


Results = dict[str, Any]
"""Stage -> what it found, as JSON. A stage's name has what it depends on beside the settings of the folder."""


class _Stage(TypedDict):
    seconds: float
    result: Any
    hash: int
    """Of the result as JSON."""


def stress(config: StressConfig, parse: Parse) -> str | int:
    """Test a reward, write ``stress.html``, ``stress.json`` and ``stress.md``, and return the report.

    Stages that are finished in ``config.out`` are not computed again. Returns 1 where a signal ended a training.

    Raises:
        ConfigError: the reward or the captioner cannot be made, or needs what the data lack; or the folder holds a test
            with other settings.
        DataError: the data cannot be read, or an image has no caption, or none for the reward to see.
        RewardError: the reward failed; it names the image and the caption. What was finished before is written.
    """
    quiet_libraries()
    bench = set_up(config, parse)
    results: Results = {}
    seconds: dict[str, float] = {}
    try:
        for name, compute in tqdm(_stages(bench, parse), "stress", unit="stage", disable=None):
            file = bench.folder / "stages" / f"{name}.json"
            if not file.is_file():
                started = time.monotonic()
                value = compute(results)
                stage = {
                    "seconds": time.monotonic() - started,
                    "result": value,
                    "hash": hash_text(json.dumps(value)),
                }
                write_json(file, stage)
            stage = read_json(file, ConfigError, _Stage)
            if hash_text(json.dumps(stage["result"])) != stage["hash"]:
                raise ConfigError(f"{file} is damaged: remove it, and the stage is computed again")
            results[name], seconds[name] = stage["result"], stage["seconds"]
            if is_constant(results) and name not in ("probes", "samples"):
                break
    except StoppedError:
        return 1
    finally:
        report = _write(bench, results, seconds)
    print(f"wrote stress.html, stress.json and stress.md in {bench.folder}", file=sys.stderr)
    return report


def set_up(config: StressConfig, parse: Parse) -> Bench:
    """Build data, rewards and gold scores, and check them and the folder; raises as ``stress``."""
    if config.reward.normalize != "none":
        raise ConfigError(
            f"reward.normalize is {config.reward.normalize!r}: expected none, as scores of different calls are compared"
        )
    out = check_writable(config.out)
    data = build_data(config.data)
    split, train = (
        data.split(usable_split(data, name)) for name in (config.split, config.train_split)
    )
    references = references_of(train)
    reward = build_reward(config.reward, references, tokenizer=config.data.tokenizer)
    originals = list(split[: config.max_images])
    in_world = all(row.get("scene") is not None for row in originals)
    rows, captions = judged_captions(
        originals,
        config.data.tokenizer,
        needs_references="references" in reward.columns,
        halve=not in_world,
    )
    seen = [set(row["references"]) for row in rows]
    held_out = [
        [text for text in row["references"] if text not in texts]
        for row, texts in zip(originals, seen, strict=True)
    ]
    scorer = Scorer(reward, rows)
    gold = gold_scores(rows, held_out, references, config.judges, reward, config.data.tokenizer)
    rival = None
    if config.compare is not None:
        with section_errors("compare"):
            rival_reward = build_reward(
                _rival_config(config, parse), references, tokenizer=config.data.tokenizer
            )
        rival = Scorer(rival_reward, rows, "the reward of compare")
    bench = Bench(config, data, rows, captions, references, scorer, gold, rival)
    if rival is not None and not bench.has_samples:
        raise ConfigError(
            "compare is set, but model is not: rewards are compared on a captioner's samples, name one"
        )
    free = ("out", "trust", "budget", "compare")
    settings = {key: value for key, value in asdict(config).items() if key not in free}
    settings = {"version": __version__, "signature": reward.signature} | settings
    settings = json.loads(json.dumps(settings))
    settings |= {"data": fingerprint({config.split: rows}), "data_config": settings["data"]}
    check_settings(out, settings)
    return bench


def _rival_config(config: StressConfig, parse: Parse) -> RewardConfig:
    """The second reward: that of a file, or the section itself. Raises ``ConfigError``."""
    section = config.compare
    if isinstance(section, str):
        section = read_config(find_config(section)).get("reward")
    if not isinstance(section, dict):
        raise ConfigError(
            f"reward is {section!r}: {config.compare!r} has to be a file with it, or the section itself"
        )
    rival: RewardConfig = parse(
        StressConfig, ["--reward", json.dumps(section)], "the reward of compare"
    ).reward
    if rival.normalize != "none":
        raise ConfigError(f"reward.normalize is {rival.normalize!r}: expected none")
    return rival


def is_constant(results: Results) -> bool:
    """Whether the reward gave all captions so far, those of the probes and the samples, the same score."""
    samples = results.get("scores", {"reward": []})["reward"]
    return (
        len(
            {
                *results.get("probes", {"range": (0, 1)})["range"],
                *(score for own in samples for score in own),
            }
        )
        == 1
    )


def _stages(bench: Bench, parse: Parse) -> list[tuple[str, Callable[[Results], Any]]]:
    """Name and computation of the stages that the configuration asks for, in their order."""
    stages: list[tuple[str, Callable[[Results], Any]]] = [("probes", lambda _: _probes(bench))]
    if not bench.has_samples:
        return stages
    stages += [
        ("samples", lambda _: _samples(bench, parse)),
        ("scores", lambda results: _scores(bench, results)),
        ("best_of_n", lambda results: _best_of_n(bench, results)),
    ]
    rival = ""
    if bench.rival is not None:
        rival = f"-{hash_text(bench.rival.reward.signature):x}"
        stages.append((f"comparison{rival}", partial(_comparison, bench, bench.rival)))
    if bench.budget.searched_images:
        stages.append(
            (f"exploits-{bench.budget.searched_images}", lambda results: _exploits(bench, results))
        )
    if bench.budget.kl_coefs:
        stages.append((f"mixing{rival}", lambda results: _mixing(bench, results)))
    if bench.in_world:
        stages += [
            (f"push-kl{factor:g}-seed{seed}", partial(_push, bench, parse, factor, seed))
            for seed in range(bench.budget.push_seeds)
            for factor in bench.budget.kl_coefs
        ]
    return stages


def _probes(bench: Bench) -> Any:
    """What the probes found, and the lowest and the highest score of all their captions."""
    probes = run_probes(bench.scorer, bench.rows, _pairs(bench), bench.config.examples)
    scores = bench.scorer.scores.values()
    return {
        "range": [min(scores), max(scores)],
        "results": {name: asdict(found) for name, found in probes.items()},
    }


def _pairs(bench: Bench) -> dict[str, list[Pair]]:
    negatives, positives = _sources(bench.rows, bench.captions)
    english = bench.config.data.tokenizer == TOKENIZER
    return probe_pairs(
        bench.rows, bench.captions, negatives, positives, english=english, seed=bench.config.seed
    )


def _sources(
    rows: Sequence[Row], captions: Sequence[str]
) -> tuple[NegativeSource, PositiveSource | None]:
    """False captions and paraphrases: exact ones of generated scenes, else rules and the data's own paraphrases."""
    if all(row.get("scene") is not None for row in rows):
        moving = any(isinstance(row["scene"], MovingScene) for row in rows)
        return SceneNegatives(list(EDITS)), None if moving else ScenePositives()
    rules = RuleNegatives(
        captions, [rule for rule in RULES if rule in EDITS or rule.startswith("add_")]
    )
    return rules, ColumnPositives() if all(row.get("positive_captions") for row in rows) else None


def _model(bench: Bench, parse: Parse) -> str:
    """The captioner's folder or name. Raises ``StoppedError`` where its training was stopped."""
    if bench.config.model is not None:
        return bench.config.model
    start = starting_captioner(parse)
    if start is None:
        raise StoppedError
    return str(start)


def _samples(bench: Bench, parse: Parse) -> Any:
    config = bench.config
    samples = sample_captions(
        _model(bench, parse),
        bench.rows,
        bench.references,
        config.data,
        num_samples=config.num_samples,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )
    return [[[caption.text, caption.finished] for caption in captions] for captions in samples]


def row_captions(results: Results) -> list[RowCaption]:
    """The samples, image by image."""
    return [
        RowCaption(row, text, finished)
        for row, captions in enumerate(results["samples"])
        for text, finished in captions
    ]


def _scores(bench: Bench, results: Results) -> Any:
    """Reward and gold scores of the samples, as lists of K for each image."""
    captions, shape = row_captions(results), (len(bench.rows), bench.config.num_samples)
    gold = {name: score(captions).reshape(shape).tolist() for name, score in bench.gold.items()}
    return {"reward": bench.scorer(captions).reshape(shape).tolist(), "gold": gold}


def _push(bench: Bench, parse: Parse, factor: float, seed: int, results: Results) -> Any:
    """A run whose KL coefficient is ``factor`` times the reward's mean standard deviation among an image's samples."""
    config, spread = bench.config, float(np.std(results["scores"]["reward"], axis=1).mean())
    kl_coef = float(f"{factor * spread:.3g}")
    folder = bench.folder / "push" / f"kl{factor:g}-seed{seed}"
    run = push_config(
        folder,
        _model(bench, parse),
        config.data,
        config.reward,
        kl_coef,
        config.seed + seed,
        config.push_steps,
        config.max_new_tokens,
    )
    rows = list(bench.data.split("val")[: run.eval.max_images])
    outcome = push(run, rows, SceneOracle(rows))
    if outcome is None:
        raise StoppedError
    return outcome | {"factor": factor}


def _best_of_n(bench: Bench, results: Results) -> Any:
    """Reward and gold of the best of n samples by the reward, and the KL penalty that would keep it from turning."""
    config, rewards = bench.config, np.array(results["scores"]["reward"])
    gold = {name: np.array(scores) for name, scores in results["scores"]["gold"].items()}
    sizes, images = sample_sizes(config.num_samples), [row["image_id"] for row in bench.rows]
    curves = best_of_n(
        rewards, {"reward": rewards} | gold, sizes, images, config.bootstrap, seed=config.seed
    )
    return {
        "n": sizes,
        "kl": [kl_of_best_of_n(n) for n in sizes],
        "images": len(images),
        "samples": config.num_samples,
        "reward": asdict(curves["reward"]),
        "gold": {name: asdict(curves[name]) | {"turns": curves[name].turns} for name in gold},
        "needed_kl_coef": needed_kl_coef(curves["reward"], curves[next(iter(gold))], sizes),
    }


def _comparison(bench: Bench, rival: Scorer, results: Results) -> Any:
    """Paired tests between both rewards: gold of the best of n by each, and the share of probes in the right order."""
    config, pairs = bench.config, _pairs(bench)
    shape, sizes = (len(bench.rows), config.num_samples), sample_sizes(config.num_samples)[1:]
    rewards = {
        bench.scorer: np.array(results["scores"]["reward"]),
        rival: rival(row_captions(results)).reshape(shape),
    }
    evaluations = []
    for scorer, scores in rewards.items():
        columns = {
            f"{name}, best of {n}": best_of_n_scores(scores, np.array(gold), [n])[:, 0].tolist()
            for name, gold in results["scores"]["gold"].items()
            for n in sizes
        }
        ordered: list[list[float]] = [[] for _ in bench.rows]
        for of_probe in pairs.values():
            better = scorer([RowCaption(pair.row, pair.better) for pair in of_probe])
            worse = scorer([RowCaption(pair.row, pair.worse) for pair in of_probe])
            for pair, is_right in zip(of_probe, (better > worse).tolist(), strict=True):
                ordered[pair.row].append(float(is_right))
        columns["probes in the right order"] = [fmean(of_row) for of_row in ordered]
        ids = [row["image_id"] for row in bench.rows]
        per_image = {
            image_id: {key: values[at] for key, values in columns.items()}
            for at, image_id in enumerate(ids)
        }
        metrics = {key: fmean(values) for key, values in columns.items()}
        evaluations.append(
            Evaluation(metrics, scorer.reward.signature, len(ids), per_image=per_image)
        )
    return {
        "second": rival.reward.signature,
        "differences": compare(evaluations[0], evaluations[1], config.bootstrap, seed=config.seed),
    }


def _exploits(bench: Bench, results: Results) -> Any:
    """Edits of the first sample of some images that raise the reward while gold falls, the worst first."""
    gold_name, gold = next(iter(bench.gold.items()))
    words = dict.fromkeys(
        word for texts in bench.references for text in texts for word in text.split()
    )
    texts = [captions[0][0] for captions in results["samples"][: bench.budget.searched_images]]

    def of(score: Score) -> ScoreRows:
        return lambda rows, captions: score(
            [RowCaption(*pair) for pair in zip(rows, captions, strict=True)]
        )

    edits = search_exploits(texts, of(bench.scorer), of(gold), list(words), seed=bench.config.seed)
    return {
        "gold": gold_name,
        "images": len(texts),
        "edits": [
            edit._asdict() | {"image_id": bench.rows[edit.row]["image_id"]} for edit in edits
        ],
    }


def _mixing(bench: Bench, results: Results) -> Any:
    """What the reward gains by being mixed with others, by the gold of the best of all samples."""
    captions, shape = row_captions(results), (len(bench.rows), bench.config.num_samples)
    builder = RewardBuilder(bench.references, bench.config.data.tokenizer)
    columns = reward_inputs(bench.rows)[1].keys()
    leaves = {leaf.signature for leaf in leaf_rewards(bench.scorer.reward)}
    rewards = {name: builder.build(name, {}) for name in OTHERS}
    rewards = {
        name: reward
        for name, reward in rewards.items()
        if reward.signature not in leaves and reward.columns - {"finished"} <= columns
    }
    others = {
        name: Scorer(reward, bench.rows, name)(captions).reshape(shape)
        for name, reward in rewards.items()
    }
    if bench.rival is not None:
        others["the reward of compare"] = bench.rival(captions).reshape(shape)
    gold = np.array(next(iter(results["scores"]["gold"].values())))
    images = [row["image_id"] for row in bench.rows]
    if len(images) < FEWEST_IMAGES:
        return []
    mixtures = best_mixtures(
        np.array(results["scores"]["reward"]),
        others,
        gold,
        images,
        bench.config.bootstrap,
        seed=bench.config.seed,
    )
    return [asdict(mixture) for mixture in mixtures]


def _write(bench: Bench, results: Results, seconds: Mapping[str, float]) -> str:
    """Write the report, its JSON and its page, of the stages that are finished, and return the report."""
    if "probes" not in results:
        return ""
    config = bench.config
    found: Results = {
        "config": asdict(config),
        "signature": bench.scorer.reward.signature,
        "images": len(bench.rows),
        "version": __version__,
        "seconds": dict(seconds),
        "constant": is_constant(results),
        "probes": results["probes"]["results"],
        "push": [result for name, result in results.items() if name.startswith("push")],
    }
    for name, result in results.items():
        if (stage := name.partition("-")[0]) in ("best_of_n", "comparison", "exploits", "mixing"):
            found[stage] = result
    found["verdict"] = verdict(found)
    report = stress_report(found)
    write_text(bench.folder / "stress.md", report + "\n")
    write_json(bench.folder / "stress.json", found)
    write_text(bench.folder / "stress.html", render(stress_page(found, bench.rows)))
    return report
