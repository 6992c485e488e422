"""Averaged weights: the sum that it should be, a captioner that all programs take, and what cannot be averaged."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rl_caption.captioners.averaging import average_weights
from rl_caption.captioners.base import Captioner, CaptionerError, Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.cli.main import main
from tests.captioners_for_tests import tiny_captioner, tiny_rows
from tests.hf_models_for_tests import save_model


def saved(captioner: Captioner, folder: Path) -> str:
    captioner.save_pretrained(captioner.policy, folder)
    return str(folder)


def moved(captioner: Captioner, by: float, folder: Path) -> str:
    """``captioner``, each of whose weights is moved by about ``by``, in a folder."""
    torch.manual_seed(int(1000 * by))
    with torch.no_grad():
        for parameter in captioner.policy.parameters():
            parameter += by * torch.randn_like(parameter)
    return saved(captioner, folder)


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    return [moved(tiny_captioner(0), by, tmp_path / f"moved-{by}") for by in (0.001, 0.002, 0.003)]


def test_the_mean_is_that_of_every_weight(models: list[str]) -> None:
    shares = [0.2, 0.3, 0.5]
    states = [load_captioner(model).policy.state_dict() for model in models]
    found = average_weights(models, shares)
    for name, tensor in found.captioner.policy.state_dict().items():
        expected = sum(share * state[name].double() for share, state in zip(shares, states, strict=True))
        torch.testing.assert_close(tensor, expected.float(), rtol=0, atol=0)
    between = sum((states[1][name] - states[0][name]).square().sum() for name in states[0]).sqrt()
    norm = sum(tensor.square().sum() for tensor in states[0].values()).sqrt()
    assert found.distances[0] == 0
    assert found.distances[1] == pytest.approx(float(between / norm), rel=1e-5)


def test_equal_weights_are_the_default_and_the_programs_take_the_result(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = tmp_path / "photo.png"
    tiny_rows(1)[0]["image"].save(photo)
    out = tmp_path / "mean"
    assert main(["average", "--models", *models[:2], "--out", str(out)]) == 0
    assert "WARNING" not in capsys.readouterr().out
    assert [(m["model"], m["weight"]) for m in json.loads((out / "average.json").read_text())] == [
        (models[0], 0.5),
        (models[1], 0.5),
    ]
    assert main(["caption", "--model", str(out), str(photo)]) == 0
    inputs = (mean := average_weights(models[:2]).captioner).preprocess(tiny_rows(1))
    with torch.no_grad():
        ids = mean.generate(mean.policy, inputs, Decoding(max_new_tokens=15))
    assert f"{photo}\t{mean.decode(ids.flatten(0, 1))[0]}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["average", "--models", *models, "--out", str(out)])
    assert "is there already" in capsys.readouterr().err


def test_merged_adapters_are_averaged_as_full_weights(tmp_path: Path) -> None:
    """The mean of two products of adapters is not the product of two means."""
    base = save_model("blip", tmp_path / "base")
    folders = []
    for seed in (0, 1):
        captioner = load_captioner(base)
        captioner.adapt([], {"r": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": ["query", "value"]}, False)
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in captioner.policy.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter))
        folders.append(saved(captioner, tmp_path / f"lora{seed}"))
    plain = [AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in folders]
    assert main(["average", "--models", *folders, "--out", str(tmp_path / "mean")]) == 0
    mean = AutoModelForImageTextToText.from_pretrained(tmp_path / "mean").state_dict()
    assert any(not torch.equal(plain[0][name], plain[1][name]) for name in mean)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (plain[0][name] + plain[1][name]) / 2)


def test_captioners_of_other_starts_get_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [saved(tiny_captioner(seed), tmp_path / f"seed{seed}") for seed in (0, 1)]
    assert main(["average", "--models", *models, "--out", str(tmp_path / "mean")]) == 0
    assert "WARNING" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"num_heads": 2}, "attention_heads is 4 and 2"),
        ({"d_model": 16}, "d_model is 32 and 16"),
        ({"image_size": 32}, "image_size"),
        ({"dropout": 0.5}, None),
    ],
)
def test_what_computes_otherwise_is_not_averaged(shape: dict[str, float], named: str | None, tmp_path: Path) -> None:
    """The number of heads is in no weight's shape."""
    models = [saved(tiny_captioner(0), tmp_path / "one"), saved(tiny_captioner(0, **shape), tmp_path / "two")]
    if named is None:
        average_weights(models)
        return
    with pytest.raises(CaptionerError, match=named):
        average_weights(models)


def test_weights_that_do_not_fit(models: list[str], tmp_path: Path) -> None:
    for names, shares in ((models[:1], None), ([models[0]] * 2, None), (models, [0.5, 0.5]), (models, [1.5, -0.5, 0])):
        with pytest.raises(CaptionerError, match="expected"):
            average_weights(names, shares)
    with pytest.raises(CaptionerError, match="sum to 1"):
        average_weights(models, [float("nan"), 0.5, 0.5])
    with pytest.raises(CaptionerError, match="class"):
        average_weights([models[0], save_model("blip", tmp_path / "blip")])
