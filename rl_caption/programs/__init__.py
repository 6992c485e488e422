"""Whole programs: everything that a command does once its configuration is parsed."""
