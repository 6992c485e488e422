"""What a run looks like: pictures and pages for people (docs/report.md)."""
