"""Validation during training: how captions are decoded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_caption.captioners.base import Decoding
from rl_caption.cli.main import parse
from rl_caption.config.schema import XeConfig
from rl_caption.training import validation
from tests.captions_for_tests import CAPTIONS, REFERENCES


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (1, 0.0)),
        (["--eval.num_beams", "3"], (3, 0.0)),
        (["--eval.num_beams", "3", "--eval.length_penalty", "1"], (3, 1.0)),
    ],
)
def test_validation_decodes_as_configured(
    words: list[str], expected: tuple[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def decoded(*arguments: Any) -> dict[str, list[validation.Candidate]]:
        seen.extend(part for part in arguments if isinstance(part, Decoding))
        return {key: [validation.Candidate(text, True, None)] for key, text in CAPTIONS.items()}

    monkeypatch.setattr(validation, "decode_candidates", decoded)
    context: Any = SimpleNamespace(
        config=parse(XeConfig, words, "test"),
        val_rows=[{"image_id": key, "references": texts} for key, texts in REFERENCES.items()],
        accelerator=SimpleNamespace(is_main_process=True),
        folder=tmp_path,
    )
    captioner: Any = SimpleNamespace(policy=None)
    found = validation.CaptionValidator(context, captioner, 20)(0, {})
    assert found.metrics["val/cider"] > 0
    assert [(decoding.num_beams, decoding.length_penalty, decoding.max_new_tokens) for decoding in seen] == [
        (*expected, 20)
    ]
