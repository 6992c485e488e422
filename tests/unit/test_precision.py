"""``mixed_precision: auto`` is bf16 only where the device computes with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_caption.config.build import build_accelerator
from rl_caption.config.schema import RunConfig, TrainConfig
from rl_caption.training.distributed.precision import usable_precision


@pytest.fixture
def only_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)


@pytest.mark.parametrize("wanted", ["no", "bf16", "fp16"])
def test_a_stated_precision_is_kept(wanted: str) -> None:
    assert usable_precision(wanted) == wanted


@pytest.mark.usefixtures("only_a_cpu")
@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "bf16"),
        ({"avx512_bf16": False, "amx_bf16": True}, "bf16"),
        ({"avx512_bf16": False, "amx_bf16": False}, "no"),
        ({"architecture": "arm64"}, "no"),
    ],
)
def test_auto_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, object], expected: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert usable_precision("auto") == expected


@pytest.mark.usefixtures("only_a_cpu")
def test_auto_where_torch_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert usable_precision("auto") == "no"


@pytest.mark.usefixtures("only_a_cpu")
def test_what_auto_became_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    run, threads = RunConfig(dir=str(tmp_path)), torch.get_num_threads()
    for wanted, lines in (("auto", ["train.mixed_precision auto is 'no' on this device (cpu)"]), ("no", [])):
        build_accelerator(TrainConfig(mixed_precision=wanted, threads=threads), run)  # type: ignore[arg-type]
        assert capsys.readouterr().err.splitlines() == lines
