"""Configuration: dataclasses with the ranges of their values, checks, and what is built from them."""
