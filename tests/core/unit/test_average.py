"""Averaged weights: the sum that it should be, a captioner that all programs take, and what cannot
be averaged.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rl_caption.captioners.averaging import average_weights
from rl_caption.captioners.base import Captioner, CaptionerError
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.cli.main import main
from tests.captioners_for_tests import tiny_captioner, tiny_rows
from tests.hf_models_for_tests import save_model


def saved(captioner: Captioner, folder: Path) -> str:
    captioner.save_pretrained(captioner.policy, folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Captioners from one start, each of whose weights has moved a little."""
    folders = []
    for number in (1, 2, 3):
        captioner = tiny_captioner(0)
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in captioner.policy.parameters():
                parameter += 0.001 * number * torch.randn_like(parameter)
        folders.append(saved(captioner, tmp_path_factory.mktemp("moved") / str(number)))
    return folders


def test_the_mean_is_that_of_every_weight(models: list[str]) -> None:
    shares = [0.2, 0.3, 0.5]
    states = [load_captioner(model).policy.state_dict() for model in models]
    found = average_weights(models, shares)
    for name, tensor in found.captioner.policy.state_dict().items():
        expected = sum(
            share * state[name].double() for share, state in zip(shares, states, strict=True)
        )
        torch.testing.assert_close(tensor, expected.float(), rtol=0, atol=0)
    between = sum((states[1][name] - states[0][name]).square().sum() for name in states[0]).sqrt()
    norm = sum(tensor.square().sum() for tensor in states[0].values()).sqrt()
    assert found.distances[0] == 0
    assert found.distances[1] == pytest.approx(float(between / norm), rel=1e-5)


def test_equal_weights_are_the_default_and_the_programs_take_the_result(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photo, out = tmp_path / "photo.png", str(tmp_path / "mean")
    tiny_rows(1)[0]["image"].save(photo)
    assert main(["average", "--models", *models[:2], "--out", out]) == 0
    assert "WARNING" not in capsys.readouterr().out
    written = json.loads((tmp_path / "mean" / "average.json").read_text())
    assert [(member["model"], member["weight"]) for member in written] == [
        (models[0], 0.5),
        (models[1], 0.5),
    ]
    assert main(["caption", "--model", out, str(photo)]) == 0
    inputs = (mean := average_weights(models[:2]).captioner).preprocess(tiny_rows(1))
    with torch.no_grad():
        ids = mean.generate(mean.policy, inputs, Decoding(max_new_tokens=15))
    assert f"{photo}\t{mean.decode(ids.flatten(0, 1))[0]}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["average", "--models", *models, "--out", out])
    assert f"--out {out}" in capsys.readouterr().err
    stranger = saved(tiny_captioner(1), tmp_path / "other-start")
    assert (
        main(["average", "--models", models[0], stranger, "--out", str(tmp_path / "no-use")]) == 0
    )
    assert "WARNING" in capsys.readouterr().out


def test_merged_adapters_are_averaged_as_full_weights(tmp_path: Path) -> None:
    """The mean of two products of adapters is not the product of two means."""
    base = save_model("blip", tmp_path / "base")
    folders = []
    for seed in (0, 1):
        captioner = load_captioner(base)
        captioner.adapt(
            [], {"r": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": ["query", "value"]}, False
        )
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in captioner.policy.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter))
        folders.append(saved(captioner, tmp_path / f"lora{seed}"))
    mean = average_weights(folders).captioner.policy.model.state_dict()
    plain = [AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in folders]
    assert any(not torch.equal(plain[0][name], plain[1][name]) for name in mean)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (plain[0][name] + plain[1][name]) / 2)


def test_what_does_not_fit_is_not_averaged(models: list[str], tmp_path: Path) -> None:
    for names, shares in (
        (models[:1], None),
        ([models[0]] * 2, None),
        (models, [0.5, 0.5]),
        (models, [1.5, -0.5, 0]),
        (models, [0.5, 0.4, 0]),
    ):
        with pytest.raises(CaptionerError, match="expected"):
            average_weights(names, shares)
    with pytest.raises(CaptionerError, match="sum to 1"):
        average_weights(models, [float("nan"), 0.5, 0.5])
    with pytest.raises(CaptionerError, match="class"):
        average_weights([models[0], save_model("blip", tmp_path / "blip")])
    fewer_heads = saved(
        tiny_captioner(0, num_heads=2), tmp_path / "heads"
    )  # which shows in no weight's shape
    with pytest.raises(CaptionerError, match="attention_heads is 4 and 2"):
        average_weights([models[0], fewer_heads])
    average_weights([models[0], saved(tiny_captioner(0, dropout=0.5), tmp_path / "dropout")])


def test_a_full_disk_leaves_no_half_of_a_captioner(
    models: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_caption.cli.average.write_json", fail)
    with pytest.raises(SystemExit):
        main(["average", "--models", *models[:2], "--out", str(tmp_path / "mean")])
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
