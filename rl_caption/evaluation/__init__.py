"""Evaluation of captions: the COCO toolkit's metrics, signs of bad captions, the oracle, tables and result files."""

from rl_caption.evaluation.java import Java, JavaError, find_java
from rl_caption.evaluation.judge import (
    DEFAULT_METRICS,
    Evaluation,
    EvaluationError,
    evaluate_captions,
    evaluate_rows,
    validation_cider,
)
from rl_caption.evaluation.results import check_writable, write_evaluation
from rl_caption.evaluation.table import format_table
from rl_caption.evaluation.toolkit import ptb_tokenize

__all__ = [
    "DEFAULT_METRICS",
    "Evaluation",
    "EvaluationError",
    "Java",
    "JavaError",
    "check_writable",
    "evaluate_captions",
    "evaluate_rows",
    "find_java",
    "format_table",
    "ptb_tokenize",
    "validation_cider",
    "write_evaluation",
]
