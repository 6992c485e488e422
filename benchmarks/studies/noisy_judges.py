"""How noisy may a judge be before the policy learns its errors? Rewards by language models, played by the oracle.

    python -m benchmarks.studies.noisy_judges --start runs/demo/xe/export/best --out runs/noisy_judges [--minutes 9]

trains self-critical runs on generated scenes from one captioner: on ``caption_qa``, ``claims`` and ``vlm_judge``, whose
model is played by the oracle and errs at chosen rates, or in favour of long captions; and on CIDEr-D, and on SPECS
where ``--specs`` names its model. Finished runs are kept: the same command goes on until the table is complete.
"""

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.studies.hacking_study import Run, read_run, verdict
from rewards.base import Reward, RewardError
from rewards.language.caption_qa import NOT_SAID, CaptionQA
from rewards.language.claims import Claims
from rewards.language.judge import VlmJudge
from rewards.language.models import Question
from rl_caption.cli.configuration import parse as parse_configuration
from rl_caption.config.schema import ScstConfig
from rl_caption.data.files import write_text
from rl_caption.data.plain_files import hash_text
from rl_caption.data.scenes.oracle import Parse, claims, oracle, parse
from rl_caption.data.scenes.questions import read_answer
from rl_caption.data.scenes.render import SceneImage
from rl_caption.data.scenes.world import Scene
from rl_caption.evaluation.results import markdown
from rl_caption.programs.report.charts import Series, image
from rl_caption.programs.train import train_scst
from rl_caption.training.run_folder import is_complete

BIAS_WORDS = 40
"""Words of a caption in favour of which the biased model always answers; of shorter ones proportionally less often."""
ERRORS = (0.0, 0.05, 0.2, 0.35, 0.5, 0.65, 0.8)
FORMS = ("caption_qa", "claims", "vlm_judge")
_QA = re.compile(r"Caption: (.*)\n\nQuestion: (.*)\n((?:.\. .*\n)+)\nReply")
_IMAGE_CLAIM = re.compile(r'says: "(.*)"\n\nIs this detail of it true of the image: "(.*)"\? ')
_TEXT_CLAIM = re.compile(r'image:\n- (.*)\n\nAccording to them alone, .* image: "(.*)"\? ')
_RATED = re.compile(r"Caption: (.*)\n\nReply with one digit")


@dataclass(frozen=True)
class PlayedModel:
    """A language model that knows the scene, reads captions by the oracle's grammar, and errs; a pure function.

    Args:
        error: probability that a decision is wrong: another choice, the other of Yes and No, any digit.
        long_bias: instead, with probability words / ``BIAS_WORDS`` it answers in favour of the caption: Yes, 9, or one
            of the choices though the caption does not say (a reader does not know which one is right).
        seed: of the errors, which depend on it and on prompt and image alone.
    """

    error: float = 0.0
    long_bias: bool = False
    seed: int = 0

    @property
    def signature(self) -> str:
        """The options."""
        return f"oracle,error{self.error:g}{',long' * self.long_bias},seed{self.seed}"

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        """As ``LanguageModel.choose``, with certainty: one probability is 1."""
        return [
            [float(label == answer) for label in q.labels]
            for q in questions
            for answer in [self._answer(q)]
        ]

    def _answer(self, question: Question) -> str:
        scene = question.image.scene if isinstance(question.image, SceneImage) else None
        caption, right, flattering = _decide(question, scene)
        key = f"{self.seed}\0{question.text}\0{scene!r}"
        rate = min(1.0, len(caption.split()) / BIAS_WORDS) if self.long_bias else self.error
        if hash_text(f"{key}\0errs") / 2**64 >= rate:
            return right
        if self.long_bias:
            return right if right in flattering else flattering[hash_text(key) % len(flattering)]
        others = (
            question.labels
            if len(question.labels) == 10
            else [one for one in question.labels if one != right]
        )
        return others[hash_text(key) % len(others)]


def _decide(question: Question, scene: Scene | None) -> tuple[str, str, Sequence[str]]:
    """The caption that a question is about, its right label, and the labels in favour of the caption."""
    text = question.text
    if match := _QA.search(text):
        caption, asked, lines = match.groups()
        choices = {line[3:]: line[0] for line in lines.splitlines()}
        said = read_answer(caption, {"question": asked, "choices": [*choices], "answer": ""})
        return (
            caption,
            choices[said or NOT_SAID],
            [label for text, label in choices.items() if text != NOT_SAID],
        )
    if match := _IMAGE_CLAIM.search(text):
        caption, claim = match.groups()
        return caption, "Yes" if is_true(claim, scene) else "No", ["Yes"]
    if match := _TEXT_CLAIM.search(text):
        caption, claim = match.groups()
        return caption, "Yes" if is_told(parse(claim), parse(caption)) else "No", ["Yes"]
    if (match := _RATED.search(text)) and scene is not None:
        return match[1], str(round(9 * oracle(match[1], scene).f1)), ["9"]
    raise RewardError(f"{question.where}: the oracle cannot answer {text!r:.200}")


def is_true(claim: str, scene: Any) -> bool:
    """Whether a detail claims something and nothing false; "there is" claims nothing, but belongs to captions."""
    judged = claims(claim, scene)
    return all(one.true for one in judged) and (
        bool(judged) or claim.strip().lower() in ("there is", "there are")
    )


def is_told(claim: Parse, caption: Parse) -> bool:
    """Whether all things, attributes and backgrounds of a detail are in a caption; relations are not looked at."""
    backgrounds = set(claim.backgrounds) <= set(caption.backgrounds)
    return backgrounds and all(
        any(
            thing.shape in (None, other.shape)
            and set(thing.attributes) <= set(other.attributes)
            and thing.number in (None, 1, other.number)
            for other in caption.things
        )
        for thing in claim.things
    )


def build_played(form: str, **options: Any) -> Reward:
    """The reward of a ``form`` whose model is a ``PlayedModel`` with these options."""
    model = PlayedModel(**options)
    if form == "claims":
        return Claims(model=model, source="image")
    return CaptionQA(model=model) if form == "caption_qa" else VlmJudge(model=model)


@dataclass(frozen=True)
class Cell:
    """A reward of the study, and what it is called in the table."""

    form: str
    errors: str
    terms: dict[str, Any]


def cells(
    specs: str | None, errors: Sequence[float] = ERRORS, forms: Sequence[str] = FORMS
) -> Iterator[Cell]:
    """All rewards: those without a model of language first."""
    yield Cell("CIDEr-D", "", {"cider": {"weight": 1.0}})
    if specs:
        yield Cell(
            "SPECS", "", {"specs": {"weight": 1.0, "kwargs": {"backbone": specs, "truncate": True}}}
        )
    for error in (*errors, None):
        for form in forms:
            options = {"long_bias": True} if error is None else {"error": error}
            target = "benchmarks.studies.noisy_judges:build_played"
            term = {"weight": 1.0, "target": target, "kwargs": {"form": form, **options}}
            yield Cell(form, "long" if error is None else f"{100 * error:g} %", {form: term})


def train(cell: Cell, seed: int, folder: Path, start: str, changes: Sequence[str]) -> None:
    """One self-critical run; nothing where it is finished."""
    data = {"num_train": 6000, "num_val": 200, "num_test": 400, "num_unseen": 400, "questions": 6}
    words = [
        "--config=demo",
        "--warm_start=null",
        f"--model.init={start}",
        f"--data.kwargs={json.dumps(data)}",
        f"--reward.terms={json.dumps(cell.terms)}",
        f"--train.seed={seed}",
        f"--run.dir={folder}",
        *[
            "--train.max_steps=100",
            "--train.batch_size=16",
            "--train.lr=2e-4",
            "--train.threads=1",
            "--eval.every=25",
        ],
        *[
            "--eval.batch_size=200",
            "--rollout.max_new_tokens=32",
            "--monitor.best_by=val/reward",
            "--report=false",
        ],
        *["--run.keep_checkpoints=1", "--run.save_every=100"],
        *changes,
    ]
    if not is_complete(folder):
        train_scst(parse_configuration(ScstConfig, words, "rl-caption scst"))


def describe(runs: Sequence[Run]) -> dict[str, str]:
    """Columns of the table for the seeds of one reward."""
    verdicts = [verdict(run.points) for run in runs]
    lengths = [_mean_length(Path(run.folder), run.points[-1].step) for run in runs]
    alarms = [str(one.alarm_step or "none") for one in verdicts]
    return {
        "reward at the end": _spread([run.points[-1].reward for run in runs], 3),
        "its rise": _spread([run.points[-1].reward - run.points[0].reward for run in runs], 3),
        "oracle F1": _spread([100 * run.points[-1].f1 for run in runs], 1),
        "words": _spread(lengths, 1),
        "unparsed words, %": _spread([100 * run.points[-1].unparsed for run in runs], 1),
        "really worse": f"{sum(one.real_step is not None for one in verdicts)} of {len(runs)}",
        "first alarm, step": ", ".join(alarms),
    }


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation."""
    error = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{error}"


def _mean_length(folder: Path, step: int) -> float:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(
        line["val/length"] for line in lines if line.get("step") == step and "val/length" in line
    )


def main() -> None:
    """Train what is missing, for so many minutes, and write ``table.md`` and ``noisy_judges.svg``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", required=True, help="captioner that all runs start from")
    parser.add_argument("--specs", help="dual encoder of SPECS; without one there is no such row")
    parser.add_argument(
        "--out", required=True, type=Path, help="folder of all runs and of the table"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--errors", type=float, nargs="+", default=list(ERRORS), help="error rates of the models"
    )
    parser.add_argument(
        "--forms", nargs="*", choices=FORMS, default=FORMS, help="rewards of the models"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="no run is begun after so many minutes"
    )
    arguments, changes = parser.parse_known_args()
    end = time.monotonic() + 60 * arguments.minutes
    options = arguments.specs, arguments.errors, arguments.forms
    grid = [(cell, seed) for seed in arguments.seeds for cell in cells(*options)]
    results: dict[tuple[str, str], list[Path]] = {}
    for cell, seed in grid:
        folder = arguments.out / f"{cell.form}-{cell.errors.strip(' %') or 'exact'}" / f"seed{seed}"
        if time.monotonic() < end:
            train(cell, seed, folder, arguments.start, changes)
        if is_complete(folder):
            results.setdefault((cell.form, cell.errors), []).append(folder)
    report(results, arguments.out)
    if sum(map(len, results.values())) < len(grid):
        sys.exit(
            f"{sum(map(len, results.values()))} of {len(grid)} runs are finished: the same command goes on"
        )


def _rate(errors: str) -> float:
    """The wrong answers of a row, %; what errs in favour of long captions comes last."""
    return float(errors[:-2]) if "%" in errors else math.inf


def report(results: dict[tuple[str, str], list[Path]], out: Path) -> None:
    """Write the table, and the curves of oracle F1 over the steps: of random errors, and of the bias."""
    runs = {key: [read_run(folder) for folder in found] for key, found in results.items()}
    start = statistics.fmean(run.points[0].f1 for found in runs.values() for run in found)
    ordered = sorted(runs.items(), key=lambda item: (item[0][0], _rate(item[0][1])))
    rows = [[form, errors, *describe(found).values()] for (form, errors), found in ordered]
    table = markdown(["reward", "errors", *describe(next(iter(runs.values())))], rows)
    write_text(out / "table.md", f"{table}\n\nOracle F1 of the start: {100 * start:.1f}\n")
    charts: dict[str, list[Series]] = {}
    for form in FORMS:
        rates = [
            (_rate(errors), found)
            for (name, errors), found in ordered
            if name == form and "%" in errors
        ]
        charts[form] = [
            Series("oracle F1 of the start, x100", [(rate, 100 * start) for rate, _ in rates], 6)
        ]
        for colour, (name, part) in enumerate(
            (("oracle F1, x100", "f1"), ("reward, x100", "reward"))
        ):
            values = {
                rate: [100 * getattr(run.points[-1], part) for run in found]
                for rate, found in rates
            }
            errors_of = {
                rate: statistics.stdev(ends) for rate, ends in values.items() if len(ends) > 1
            }
            points = [(rate, statistics.fmean(ends)) for rate, ends in values.items()]
            charts[form].append(Series(name, points, colour, True, errors_of))
    write_text(out / "noisy_judges.svg", image(charts, "wrong answers, %"))
    print((out / "table.md").read_text())


if __name__ == "__main__":
    main()
