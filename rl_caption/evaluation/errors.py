"""What cannot be evaluated."""


class EvaluationError(ValueError):
    """Captions cannot be evaluated as they are; the message says which, and what would be right."""
