"""Evaluation of captions: metrics, bootstrap intervals, paired tests, tables, result files
(docs/evaluation.md).
"""

from rl_caption.evaluation.metrics import (
    DEFAULT_METRICS,
    Evaluation,
    EvaluationError,
    evaluate_captions,
    validation_cider,
)
from rl_caption.evaluation.results import check_writable, format_table, write_evaluation
from rl_caption.evaluation.toolkit import Java, JavaError, find_java, ptb_tokenize

__all__ = [
    "DEFAULT_METRICS",
    "Evaluation",
    "EvaluationError",
    "Java",
    "JavaError",
    "check_writable",
    "evaluate_captions",
    "find_java",
    "format_table",
    "ptb_tokenize",
    "validation_cider",
    "write_evaluation",
]
