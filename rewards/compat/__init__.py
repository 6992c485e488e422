"""Scores of this package under the interfaces of other packages: pycocoevalcap and torchmetrics."""
