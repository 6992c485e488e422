"""VBA: similarity of a caption to the caption of an image that was generated from it
(docs/papers.md).

Source: Yanuka, Alper, Averbuch-Elor and Giryes, "ICC: Quantifying Image Caption
Concreteness for Multimodal Dataset Curation", Findings of ACL 2024, section 2: the
visual bottleneck autoencoder.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from rewards.base import as_texts, checked_scores, naming, optional
from rewards.clip.bottleneck import best_similarities, load_similarity
from rewards.devices import DTYPES, Precision, chunks, default_device
from rewards.images import ImageSource
from rewards.options import Count, check_values
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import load_captioner
from rl_caption.data.base import Row
from rl_caption.lab.recaptioners import answers_of, model_label
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import build_target, load_target

Noise = Literal["caption", "run"]


class TextToImage(Protocol):
    """Makes one image of each caption."""

    signature: str

    def __call__(self, captions: Sequence[str]) -> Sequence[ImageSource]: ...


class DiffusionImages:
    """A pipeline of the package ``diffusers`` with the DPM-Solver++ multistep scheduler.

    Args:
        model: folder or hub name, such as ``stabilityai/stable-diffusion-2``.
        guidance: classifier-free guidance scale, 9 in the paper.
        steps: denoising steps, 20 in the paper.
        precision: precision of the weights: ``fp32``, ``fp16`` or ``bf16``.
        seed: random seed of the noise.
        noise: ``caption`` draws the noise of an image from ``seed`` and the caption, so
            that an image depends neither on the captions before it nor on its batch;
            ``run`` draws all noise one after the other from one generator, as the
            released code does.
        device: None is the process's current CUDA device if there is one, else the CPU.

    Raises:
        ValueError: ``diffusers`` is not installed, or the pipeline cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        guidance: float = 9.0,
        steps: int = 20,
        precision: Precision = "fp16",
        seed: int = 0,
        noise: Noise = "caption",
        device: str | None = None,
    ) -> None:
        check_values(Noise, noise=noise)
        diffusers = optional("diffusers", f"diffusers:{model} needs", "diffusers")
        self._device = default_device(device)
        with naming(
            f"diffusers:{model} cannot be loaded", (OSError, ValueError, KeyError)
        ):
            check_pipeline(
                diffusers.DiffusionPipeline.load_config(model),
                getattr(diffusers, "pipelines", None),
            )
            pipeline = diffusers.DiffusionPipeline.from_pretrained(
                model,
                trust_remote_code=False,
                torch_dtype=getattr(torch, DTYPES[precision]),
                use_safetensors=True,
            )
        pipeline.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(
            pipeline.scheduler.config
        )
        self._pipeline = pipeline.to(self._device)
        self._pipeline.set_progress_bar_config(disable=True)
        self.options = {"guidance_scale": guidance, "num_inference_steps": steps}
        self.seed = seed
        self._generator = (
            torch.Generator(self._device).manual_seed(seed) if noise == "run" else None
        )
        options = f"guidance{guidance:g},{steps} steps,{precision},seed{seed} a {noise}"
        self.signature = f"{model}[{options},diffusers{diffusers.__version__}]"

    def __call__(self, captions: Sequence[str]) -> Sequence[ImageSource]:
        """Generate B images."""
        generators = []
        for caption in captions:
            text = f"{self.seed} {caption}".encode(errors="surrogatepass")
            seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
            seeded = torch.Generator(self._device).manual_seed(seed)
            generators.append(self._generator or seeded)
        prompts = list(captions)
        return self._pipeline(prompts, generator=generators, **self.options).images


def check_pipeline(index: Mapping[str, Any], pipelines: Any) -> None:
    """Check the ``model_index.json`` of a pipeline: each part is a pair of library and
    class.

    Raises:
        ValueError: a library, which diffusers would import, is not diffusers,
            Transformers or one of ``pipelines``.
    """
    for name, component in index.items():
        library = component[0] if isinstance(component, list | tuple) else None
        is_known = library in (None, "diffusers", "transformers")
        if not is_known and not hasattr(pipelines, str(library)):
            raise ValueError(
                f"model_index.json: {name} is {component!r:.80}: expected a class of diffusers or "
                f"transformers"
            )


def load_text_to_image(name: str, kwargs: Mapping[str, Any]) -> TextToImage:
    """Build ``diffusers:NAME`` or ``package.module:Class``. Raises ``ValueError``."""
    with naming(f"text_to_image {name}", (ConfigError, TypeError)):
        if name.startswith("diffusers:"):
            return DiffusionImages(name.removeprefix("diffusers:"), **kwargs)
        target = load_target(name, "text_to_image", {})
        return build_target(target, 1, name, kwargs, "text_to_image_kwargs")


class VisualBottleneck:
    """VBA: similarity of a caption to the caption of an image generated from it, in [0,
    1]. It needs no image.

    Blank captions get 0.

    Args:
        captioner: folder of a captioner, or its name on the hub.
        text_to_image: ``diffusers:NAME``, or ``package.module:Class``, a ``TextToImage``.
        text_to_image_kwargs: arguments of ``text_to_image``.
        similarity: a reward whose references are the caption, or ``edit_distance``;
            clipped to [0, 1].
        similarity_kwargs: arguments of ``similarity``, such as ``{model:
            roberta-large}``.
        num_beams: beam width of the captioner.
        num_return_sequences: number of beams whose most similar caption counts: 1 in
            the released code, 5 in the paper.
        max_new_tokens: longest caption of the captioner, in tokens.
        prompt: prompt of the captioner, ``a photo of `` in the released code; None is
            its own.
        device: None is the process's current CUDA device if there is one, else the CPU.
        batch_size: images at once, at least 1.

    Raises:
        ValueError: an argument is wrong, or a model cannot be loaded
            (``CaptionerError`` for the captioner).
    """

    __name__ = "vba"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, 1.0)

    def __init__(
        self,
        captioner: str,
        text_to_image: str = "diffusers:stabilityai/stable-diffusion-2",
        text_to_image_kwargs: Mapping[str, Any] | None = None,
        similarity: str = "bertscore",
        similarity_kwargs: Mapping[str, Any] | None = None,
        num_beams: int = 5,
        num_return_sequences: int = 1,
        max_new_tokens: int = 24,
        prompt: str | None = None,
        device: str | None = None,
        batch_size: int = 16,
    ) -> None:
        check_values(Count, batch_size=batch_size)
        self._similarity = load_similarity(similarity, similarity_kwargs or {}, "vba")
        self._images = load_text_to_image(text_to_image, text_to_image_kwargs or {})
        self._device = torch.device(default_device(device))
        self._captioner: Captioner = load_captioner(captioner, prompt=prompt)
        self._captioner.policy.to(self._device).eval()
        self._decoding = Decoding(
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            max_new_tokens=max_new_tokens,
        )
        self.batch_size = batch_size
        decoding = f"{self._decoding.describe()},best of {num_return_sequences}"
        self.signature = (
            f"VBA[{self._images.signature},{model_label(captioner)},{decoding},{prompt!r},"
            f"{self._similarity.signature}]"
        )

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions. Raises ``RewardError`` where the similarity fails."""
        texts = as_texts(completions)
        scores = [0.0] * len(texts)
        rows = [row for row, text in enumerate(texts) if text.strip()]
        for batch in chunks(
            rows, self.batch_size, "captions through the visual bottleneck"
        ):
            sources = [texts[row] for row in batch]
            best = best_similarities(self._similarity, sources, self.rewrite(sources))
            for row, score in zip(batch, best, strict=True):
                scores[row] = score
        return checked_scores(self, scores, len(texts))

    @torch.no_grad()
    def rewrite(self, captions: Sequence[str]) -> list[list[str]]:
        """B lists of ``num_return_sequences`` captions, best first, of the images
        generated from B captions.
        """
        images = answers_of(self._images, captions, Any)
        rows: list[Row] = [
            {"image_id": "", "image": image, "references": []} for image in images
        ]
        pixels = self._captioner.preprocess(rows)
        inputs = {name: value.to(self._device) for name, value in pixels.items()}
        ids = self._captioner.generate(
            self._captioner.policy, inputs, self._decoding, None
        )
        return [self._captioner.decode(beams) for beams in ids]
