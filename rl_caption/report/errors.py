"""What a report cannot be made of."""


class ReportError(ValueError):
    """A folder or file cannot be reported on; the message names it, the line where there is one, and what is right."""
