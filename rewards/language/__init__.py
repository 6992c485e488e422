"""Rewards by what a language model, or a vision-language model, can do with a caption."""
