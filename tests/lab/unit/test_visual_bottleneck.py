"""VBA: captions through text-to-image and a captioner."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from rewards.registry import build
from rl_caption.lab.visual_bottleneck import DiffusionImages, VisualBottleneck
from tests.captioners_for_tests import tiny_captioner


class Colours:
    """Images of one colour each; counts its captions."""

    signature = "colours"

    def __init__(self) -> None:
        self.captions: list[str] = []

    def __call__(self, captions):
        self.captions += captions
        return [
            Image.new(
                "RGB",
                (16, 16),
                (10 * len(caption), 0, 0),
            )
            for caption in captions
        ]


@pytest.fixture(scope="module")
def captioner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captioner")
    made = tiny_captioner()
    made.save_pretrained(made.policy, folder)
    return str(folder)


def vba(captioner, **options):
    defaults = {"similarity": "rouge_l", "num_beams": 2, "max_new_tokens": 8}
    defaults["text_to_image"] = f"{__name__}:Colours"
    return VisualBottleneck(captioner, **defaults | options)


@pytest.mark.parametrize("beams", [1, 3])
def test_captions_through_images_and_the_most_similar_beam_counts(captioner, beams):
    reward = vba(captioner, batch_size=2, num_beams=3, num_return_sequences=beams)
    captions = ["a red circle on a grey field", "  ", "two blue squares", "the dog"]
    found = reward(None, captions)
    drawn = reward._images.captions  # type: ignore[attr-defined]
    assert drawn == [captions[0], *captions[2:]], "a blank caption is not drawn"
    assert found[1] == 0.0
    for row in (0, 2, 3):
        (written,) = reward.rewrite([captions[row]])
        assert len(set(written)) == beams
        references = [[captions[row]]] * beams
        scores = build("rouge_l")(None, written, references=references)
        assert found[row] == pytest.approx(max(scores))


class Pipeline:
    """Stands in for a pipeline of diffusers."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(config="config")
        self.to = lambda device: self
        self.set_progress_bar_config = lambda disable: None
        self.options: dict[str, Any] = {}
        self.noise: list[list[float]] = []

    def __call__(self, prompts, generator, **options):
        self.options = options
        self.noise.append([float(torch.rand(1, generator=own)) for own in generator])
        return SimpleNamespace(images=[Image.new("RGB", (8, 8)) for _ in prompts])


def test_diffusion_is_asked_as_in_the_paper(monkeypatch):
    parts = {"_class_name": "X", "unet": ["diffusers", "UNet"]}
    pipeline = Pipeline()
    loaded = SimpleNamespace(
        from_pretrained=lambda model, **options: pipeline,
        load_config=lambda model: parts,
    )
    scheduler = SimpleNamespace(from_config=lambda config: f"DPM of {config}")
    module = SimpleNamespace(
        __version__="0", DiffusionPipeline=loaded, DPMSolverMultistepScheduler=scheduler
    )
    monkeypatch.setitem(sys.modules, "diffusers", module)
    images = DiffusionImages("stabilityai/stable-diffusion-2", device="cpu")
    assert pipeline.scheduler == "DPM of config"
    assert len(images(["a dog", "a cat"])) == 2
    images(["a cat"])
    assert pipeline.options == {"guidance_scale": 9.0, "num_inference_steps": 20}
    (dog, cat), (again,) = pipeline.noise
    assert dog != cat == again, "of a caption, not of its batch"
    pipeline.scheduler = SimpleNamespace(config="config")
    run = DiffusionImages("a/b", device="cpu", noise="run", seed=3)
    run(["a dog", "a cat"])
    run(["a cat"])
    generator = torch.Generator().manual_seed(3)
    expected = [float(torch.rand(1, generator=generator)) for _ in range(3)]
    drawn = [*pipeline.noise[2], *pipeline.noise[3]]
    assert drawn == expected, "one generator for the run"
    parts["vae"] = ["os", "system"]
    with pytest.raises(ValueError, match="vae"):
        DiffusionImages("somebody/else", device="cpu")


def test_wrong_arguments_are_named(captioner, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ValueError, match="similarity 'repetition'"):
        vba(captioner, similarity="repetition")
    with pytest.raises(ValueError, match="package diffusers"):
        vba(captioner, text_to_image="diffusers:x")
