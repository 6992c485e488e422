"""Evaluation of captions: metrics, bootstrap intervals, paired tests, tables, result
files (docs/evaluation.md).
"""

from rl_caption.evaluation.metrics import (
    DEFAULT_METRICS,
    Evaluation,
    EvaluationError,
    evaluate_captions,
    validation_cider,
)
from rl_caption.evaluation.results import check_writable, format_table, write_evaluation
from rl_caption.evaluation.toolkit import JavaError, java_version, ptb_tokenize

__all__ = [
    "DEFAULT_METRICS",
    "Evaluation",
    "EvaluationError",
    "JavaError",
    "check_writable",
    "evaluate_captions",
    "format_table",
    "java_version",
    "ptb_tokenize",
    "validation_cider",
    "write_evaluation",
]
