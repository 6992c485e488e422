"""Pages that show runs and evaluations (docs/report.md)."""
