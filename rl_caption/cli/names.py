"""The programs of ``python -m rl_caption NAME``: what they are for, and where those with a parser of their own are."""

from __future__ import annotations

MODULES = {
    "score": "rl_caption.cli.score",
    "caption": "rl_caption.cli.caption",
    "doctor": "rl_caption.cli.doctor",
    "demo": "rl_caption.cli.demo",
    "prepare_coco": "rl_caption.data.prepare_coco",
    "prepare_features": "rl_caption.data.prepare_features",
    "report": "rl_caption.report.program",
}
"""Name -> module whose ``main`` reads the command line; the others are functions of ``cli.py``."""

SUMMARIES = {
    "xe": "train a captioner by cross-entropy",
    "scst": "fine-tune a captioner by self-critical sequence training",
    "reward_model": "train a model that scores captions: contrastive, or distilled",
    "evaluate": "judge captions of a split or of a file",
    "judge": "how well metrics agree with human judgements of captions",
    "ablate": "compare rewards: a grid of self-critical runs from one checkpoint",
    "grpo_vlm": "fine-tune a vision-language model with TRL's GRPO or RLOO trainer",
    "score": "score captions in files with any reward",
    "caption": "caption photos with a trained captioner",
    "report": "a page of a run, an ablation, or several runs or evaluations",
    "doctor": "versions, devices, what is missing and what that costs",
    "demo": "the whole job on a generated world",
    "prepare_coco": "COCO captions: from the downloads to a checked folder",
    "prepare_features": "unpack published region features",
}
"""Name -> one line."""
