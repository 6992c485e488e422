"""Dual encoders as judges: retrieval on a split and, on generated scenes, agreement of metrics with the truth.

python -m benchmarks.reward_models --data configs/scenes_scst_cider.yaml --models teacher=FOLDER student=FOLDER \
    --captioner runs/scenes/xe/export/best --out runs/reward_models

Prints the tables and writes them to OUT/reward_models.md and, unrounded, OUT/reward_models.json. docs/judging.md says
what is judged against what.
"""

from __future__ import annotations

import argparse

from benchmarks.judged import judged, options, run_program, write_tables
from benchmarks.studies.encoder_report import Report, judge_metrics, judge_model, texts_of
from rl_caption.build import ConfigError
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.data.base import Row
from rl_caption.evaluation import check_writable
from rl_caption.meta_evaluation.scenes import SceneCaptions, rate_captions, sample_at_temperatures


def judged_scenes(arguments: argparse.Namespace, rows: list[Row]) -> SceneCaptions:
    """Sample captions, where there is a captioner, and judge them with the references and hard negatives."""
    samples = {}
    if arguments.captioner:
        captioner = TransformerCaptioner.from_pretrained(arguments.captioner)
        captioner.policy.to(arguments.device)
        samples = sample_at_temperatures(
            captioner, rows, arguments.temperatures, arguments.num_samples, arguments.max_new_tokens,
            device=arguments.device, seed=arguments.seed,
        )  # fmt: skip
    return rate_captions(rows, samples, arguments.judged_references, arguments.seed)


def run(arguments: argparse.Namespace) -> None:
    """Judge everything that was asked for, print and write it."""
    check_writable(arguments.out)
    found = judged(arguments, arguments.models)
    rows = found.rows
    report = Report(arguments.split, len(rows), len(texts_of(rows)[0]))
    captions = None
    if rows and all(row.get("scene") is not None for row in rows):
        captions = judged_scenes(arguments, rows)
        judge_metrics(report, found.metrics, captions)
    elif arguments.captioner:
        raise ConfigError("--captioner: captions are judged on generated scenes only; this data has no known truth")
    elif not found.models:
        raise ConfigError("nothing to judge: give --models, or data of generated scenes")
    for label, backbone in found.models.items():
        judge_model(report, label, backbone, rows, captions)
    write_tables(arguments, "reward_models", report.markdown(captions), report.content())


def main() -> None:
    """Read the command line."""
    parser = options(__doc__, ["cider", "bleu", "rouge_l"])
    parser.add_argument("--captioner", help="folder of a saved captioner whose samples are judged (scenes)")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.5, 1.0, 1.5])
    parser.add_argument("--num-samples", type=int, default=1, help="samples of an image at each temperature")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--judged-references", type=int, default=1, help="references of an image that are judged")
    arguments = parser.parse_args()
    counts = (arguments.num_samples, arguments.max_new_tokens, arguments.judged_references, arguments.max_images or 1)
    if min(counts) < 1 or arguments.max_images == 0:
        parser.error("numbers of images, samples, tokens and references must be at least 1")
    if min(arguments.temperatures) <= 0 or len(set(arguments.temperatures)) < len(arguments.temperatures):
        parser.error(f"--temperatures {arguments.temperatures}: expected different numbers above 0")
    run_program(run, arguments)


if __name__ == "__main__":
    main()
