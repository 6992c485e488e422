"""The ablation program: train the missing runs of a grid, evaluate every captioner, and
write a table.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import flatten_dict

from rewards.base import Reward
from rewards.model_files import damage
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import is_captioner, weights_hash
from rl_caption.config.build import (
    build_data,
    build_reward,
    quiet_libraries,
    references_of,
)
from rl_caption.config.commands import EvaluateConfig
from rl_caption.config.schema import ScstConfig
from rl_caption.data.base import Row
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation import Evaluation, check_writable, write_evaluation
from rl_caption.evaluation.metrics import words_tokenizer
from rl_caption.evaluation.results import Column, column_of
from rl_caption.monitoring.judges import build_judges
from rl_caption.programs.ablation.config import AblateConfig
from rl_caption.programs.ablation.grid import (
    START,
    Parse,
    Result,
    Run,
    make_runs,
    train_runs,
    write_tables,
)
from rl_caption.programs.evaluate import score_captions, settings_of
from rl_caption.programs.report.read import read_evaluation, read_run
from rl_caption.runtime.errors import ConfigError, config_errors
from rl_caption.runtime.launch import run_lock, stop_requests
from rl_caption.runtime.options import as_words
from rl_caption.runtime.threads import cpu_threads
from rl_caption.training.checkpoint import CheckpointError

ALARM = "first_alarm"
"""Key of the step of the monitor's first alarm."""


def run_ablation(config: AblateConfig, parse: Parse) -> int:
    """Run the grid, or go on with it; return 0, or 1 where a cell failed.

    Raises:
        ConfigError, DataError: as for ``make_plan``, before the first run starts.
        LaunchError: another process runs this grid.
    """
    quiet_libraries()
    # One line a captioner is enough here.
    logging.getLogger("rl_caption.evaluation").setLevel(logging.WARNING)
    out = check_writable(config.out)
    with run_lock(out, wait_seconds=10.0), stop_requests(leave=True):
        base, rows, runs = make_plan(config, parse)
        check_start(out, str(base.model.init), runs)
        tokenizer = words_tokenizer(config.tokenizer, base.data.tokenizer)
        references = references_of(rows)
        judges = build_judges(config.judges, None, references, "judges", tokenizer)
        notes = {f"split {config.split!r}; policies: {config.policy}": None}

        def scores_of(
            model: str | Path, trained: ScstConfig, folder: Path
        ) -> dict[str, float]:
            """Metrics of a captioner. Notes the decoding, the signature and what is
            left out.
            """
            scores = evaluate_captioner(model, trained, config, judges, folder)
            for key, why in scores.left_out.items():
                notes[f"{key} is left out: {why}"] = None
            notes[f"decoding: {scores.decoding}"] = None
            # Two signatures are not comparable.
            notes[f"signature: {scores.signature}"] = None
            return scores.metrics

        def measure(run: Run) -> dict[str, float | None]:
            """Metrics of a trained run, and the step of its first alarm."""
            model = run.folder / "export" / config.policy
            if damage(model) is not None:
                raise CheckpointError(
                    f"{model} is damaged or not there: remove {run.folder}"
                )
            folder = run.parent / f"{config.split}_{config.policy}"
            alarms = read_run(run.folder).alarms
            first = alarms[0] if alarms else None
            return scores_of(model, run.config, folder) | {ALARM: first}

        start = scores_of(str(base.model.init), base, out / START / config.split)
        results, failures = train_runs(runs, config.jobs, measure)
        results.insert(0, Result(START, None, start))
        for label, cell in config.cells.items():
            settings = cell.model_dump(mode="json", exclude_defaults=True)
            notes[f"{label}: {json.dumps(settings)}"] = None
        return write_tables(out, results, _column, list(notes), failures)


def _column(key: str) -> Column:
    return Column("first alarm, step", 1, 0) if key == ALARM else column_of(key)


def make_plan(
    config: AblateConfig, parse: Parse
) -> tuple[ScstConfig, Sequence[Row], list[Run]]:
    """Read and check all configurations, the data and existing runs; return the recipe,
    the rows of the images to caption, and the runs.

    Raises:
        ConfigError: a value is wrong (the message names the cell), a cell has another
            model or other data, or a run that is already there has another
            configuration.
        DataError: the data cannot be read, or has no such split.
    """
    words = ["--config", config.recipe, *as_words(flatten_dict(config.all))]
    base: ScstConfig = parse(ScstConfig, words, "rl-caption scst")
    if not is_captioner(str(base.model.init)):
        raise ConfigError(
            f"{config.recipe}: model.init is {base.model.init!r}: expected the policy that all "
            "cells start from, a saved captioner or a name on the hub"
        )
    data = build_data(base.data)
    rows = data[config.split]
    words.append(f"--train.threads={base.train.threads or cpu_threads(config.jobs)}")
    runs = make_runs(config, words, parse)
    for run in runs:
        if (run.config.model, run.config.data) != (base.model, base.data):
            raise ConfigError(
                f"cell {run.label!r} changes model or data: use all, or another grid"
            )
    return base, rows, runs


def check_start(out: Path, start: str, runs: Sequence[Run]) -> None:
    """Write the hash of the starting policy and the signatures of the rewards into
    ``start.json``, or compare them with it where a run has begun.

    Raises:
        ConfigError: a reward cannot be made, or the starting policy or a reward has
            changed since the first run began.
    """
    now = {START: weights_hash(start)}
    for run in runs:
        with config_errors(f"cell {run.label!r}"):
            settings, texts = run.config, [["a dog"], ["a cat"]]
            reward = build_reward(
                settings.reward, texts, tokenizer=settings.data.tokenizer
            )
        now[run.label] = reward.signature
    begun = any((run.folder / "config.yaml").is_file() for run in runs)
    note = out / "start.json"
    before = read_json(note, ConfigError) if begun and note.is_file() else {}
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise ConfigError(
                f"{name} was {before[name]} and is {now[name]}: all cells of a grid start from one "
                f"checkpoint, and each keeps its reward. Choose another out, or remove {out}"
            )
    write_json(note, before | now)


def evaluate_captioner(
    model: str | Path,
    trained: ScstConfig,
    config: AblateConfig,
    judges: Mapping[str, Reward],
    folder: Path,
) -> Evaluation:
    """Evaluate a model on the grid's split, or read its evaluation in ``folder``.

    Data, prompt and ``max_new_tokens`` come from ``trained``. Scores in ``folder`` are
    kept as long as the model's weights, the data, the decoding, the metrics and the
    judges are the same.
    """
    evaluate = EvaluateConfig(
        model=str(model),
        prompt=getattr(trained.model, "prompt", None),
        data=trained.data,
        split=config.split,
        decode=Decoding(
            num_beams=config.num_beams,
            max_new_tokens=trained.rollout.max_new_tokens,
            length_penalty=config.length_penalty,
        ),
        metrics=config.metrics,
        tokenizer=config.tokenizer,
        out=str(folder),
    )
    note = folder / "settings.json"
    signatures = {name: reward.signature for name, reward in judges.items()}
    settings: dict[str, Any] = settings_of(evaluate)
    settings |= {"metrics": config.metrics, "judges": signatures}
    if not note.is_file() or read_json(note, CheckpointError) != settings:
        note.unlink(missing_ok=True)
        judged = score_captions(evaluate, judges)
        assert judged is not None, "this program is one process"
        write_evaluation(judged[0], judged[1], folder)
        write_json(note, settings)  # last
    return read_evaluation(folder).scores
