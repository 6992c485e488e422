"""Hugging Face captioning models, one file a family.

A further family is one more file with an object of ``base.Family``, and one line in ``ADAPTERS``.
"""

from __future__ import annotations

import importlib

from rl_caption.captioners.families.base import Family

ADAPTERS = {
    "blip": "rl_caption.captioners.families.blip:BLIP",
    "git": "rl_caption.captioners.families.git:GIT",
    "vision-encoder-decoder": "rl_caption.captioners.families.vision_encoder_decoder:VISION_ENCODER_DECODER",
    "blip-2": "rl_caption.captioners.families.blip2:BLIP2",
    "instructblip": "rl_caption.captioners.families.blip2:INSTRUCT_BLIP",
}
"""``model_type`` of a ``config.json`` to where its adapter is."""


def family_of(model_type: str) -> Family:
    """The adapter of a ``model_type``.

    Raises:
        KeyError: there is none.
    """
    module, name = ADAPTERS[model_type].split(":")
    return getattr(importlib.import_module(module), name)
