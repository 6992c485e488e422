"""Programs and their command lines: configurations, pipelines, what a command needs, errors."""
