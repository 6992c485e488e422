"""Tiny decoder-only vision-language models of many families, with random weights, saved
as the real ones are.
"""

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from PIL import Image
from tokenizers import AddedToken
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import (
    Gemma3ImageProcessorPil,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
)
from transformers.models.internvl.video_processing_internvl import (
    InternVLVideoProcessor,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.video_processing_llava_onevision import (
    LlavaOnevisionVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.siglip.image_processing_pil_siglip import (
    SiglipImageProcessorPil,
)
from transformers.models.smolvlm.image_processing_pil_smolvlm import (
    SmolVLMImageProcessorPil,
)
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

from rl_caption.captioners.loading import load_captioner
from tests.captioners_for_tests import REFERENCES
from tests.zoo.vision_language import (
    CONTENT,
    IDEFICS_TEMPLATE,
    QWEN_TEMPLATE,
    word_tokenizer,
)

QWEN = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
]
QWEN += ["<|video_pad|>"]
SPLIT = [
    "<pad>",
    "<|im_start|>",
    "<end_of_utterance>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
]
CHATML = ["<pad>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
INTERN = [
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<IMG_CONTEXT>",
    "<img>",
    "</img>",
    "<video>",
]
GEMMA = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<boi>",
    "<eoi>",
    "<img>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    + CONTENT.replace("IMAGE", "<image>\n")
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "<bos>{% for message in messages %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' "
    "else 'user' }}\n"
    + CONTENT.replace("IMAGE", "<boi>")
    + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def _tokenizer(
    specials: list[str], eos: str, pad: str, bos: str | None = None, **extra: str
) -> Any:
    words = " ".join(caption for captions in REFERENCES for caption in captions)
    return word_tokenizer(
        specials,
        pad=pad,
        eos=eos,
        bos=bos,
        words=f"{words} photo caption en :",
        **extra,
    )


def _ids(tokenizer: Any, **names: str) -> dict[str, int]:
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _save(folder: Path, model: Any, processor: Any, ends: list[int]) -> None:
    """Save a model with weights so large that images and words matter."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.generation_config.update(
        eos_token_id=ends, do_sample=True, top_k=1, repetition_penalty=1.5
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _qwen(
    folder: Path,
    version: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    videos: Any,
) -> None:
    tokenizer = _tokenizer(QWEN, eos="<|im_end|>", pad="<|endoftext|>")
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {
        f"vision_{where}_token_id": f"vision_{where}" for where in ("start", "end")
    }
    ids = _ids(tokenizer, **{key: f"<|{name}|>" for key, name in names.items()})
    text = {**TEXT, "vocab_size": len(tokenizer) + 3, "rope_parameters": ROPE, **text}
    config = getattr(tf, f"{version}Config")(
        text_config=text, vision_config=vision, **ids
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=8, size={"shortest_edge": 16 * 16, "longest_edge": 40 * 40}
    )
    processor = getattr(tf, f"{version.replace('_', '_')}Processor")
    processor = processor(
        images, tokenizer, videos(patch_size=8), chat_template=QWEN_TEMPLATE
    )
    model = getattr(tf, f"{version}ForConditionalGeneration")(config)
    _save(folder, model, processor, [tokenizer.eos_token_id, tokenizer.pad_token_id])


def save_qwen2_vl(folder: Path) -> None:
    """As Qwen/Qwen2-VL-2B-Instruct: M-RoPE, images of as many tokens as they need."""
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 8,
    }
    _qwen(folder, "Qwen2VL", {}, vision, Qwen2VLVideoProcessor)


def save_qwen2_5_vl(folder: Path) -> None:
    """As Qwen/Qwen2.5-VL-3B-Instruct: windows of attention in the vision tower."""
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
    }
    vision |= {"patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1]}
    _qwen(folder, "Qwen2_5_VL", {}, vision, Qwen2VLVideoProcessor)


def save_qwen3_vl(folder: Path) -> None:
    """As Qwen/Qwen3-VL-2B-Instruct: features of several layers of the tower go into
    several layers of the text.
    """
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
    }
    vision |= {
        "patch_size": 8,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    _qwen(folder, "Qwen3VL", {}, vision, Qwen3VLVideoProcessor)


def _split(
    folder: Path, version: str, processor: Any, images: Any, **more: Any
) -> None:
    tokenizer = _tokenizer(
        SPLIT, eos="<end_of_utterance>", pad="<pad>", bos="<|im_start|>"
    )
    # As the real one: special, yet not in the list of special tokens.
    places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_tokens([AddedToken(place, special=True) for place in places])
    ids = {
        name: getattr(tokenizer, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    text = {**TEXT, "model_type": "llama", "vocab_size": len(tokenizer), **ids}
    config = getattr(tf, f"{version}Config")(
        text_config=text,
        vision_config=VISION,
        scale_factor=2,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    sizes = {
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
    }  # up to 4 + 1 crops
    processor = processor(
        images(**sizes),
        tokenizer,
        image_seq_len=4,
        chat_template=IDEFICS_TEMPLATE,
        **more,
    )
    model = getattr(tf, f"{version}ForConditionalGeneration")(config)
    _save(folder, model, processor, [tokenizer.eos_token_id])


def save_smolvlm(folder: Path) -> None:
    """As HuggingFaceTB/SmolVLM2-256M-Video-Instruct: an image is split into crops;
    answers begin with a space.
    """
    videos = SmolVLMVideoProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}
    )
    _split(
        folder,
        "SmolVLM",
        tf.SmolVLMProcessor,
        SmolVLMImageProcessorPil,
        video_processor=videos,
    )


def save_idefics3(folder: Path) -> None:
    """As HuggingFaceM4/Idefics3-8B-Llama3."""
    _split(folder, "Idefics3", tf.Idefics3Processor, Idefics3ImageProcessorPil)


def save_llava_onevision(folder: Path) -> None:
    """As llava-hf/llava-onevision-qwen2-0.5b-ov-hf: patches in a grid that fits the
    image, without padding.
    """
    tokenizer = _tokenizer(CHATML, eos="<|im_end|>", pad="<pad>")
    config = tf.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config={
            **VISION,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        },
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
        **_ids(tokenizer, image_token_index="<image>", video_token_index="<video>"),
    )
    images = LlavaOnevisionImageProcessorPil(
        size={"height": 32, "width": 32},
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )
    processor = tf.LlavaOnevisionProcessor(
        images,
        tokenizer,
        LlavaOnevisionVideoProcessor(size={"height": 32, "width": 32}),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )
    _save(
        folder,
        tf.LlavaOnevisionForConditionalGeneration(config),
        processor,
        [tokenizer.eos_token_id],
    )


def save_llava(folder: Path) -> None:
    """As llava-hf/llava-interleave-qwen-0.5b-hf: an image has one size."""
    tokenizer = _tokenizer(CHATML, eos="<|im_end|>", pad="<pad>")
    config = tf.LlavaConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config={**VISION, "model_type": "clip_vision_model"},
        vision_feature_layer=-1,
        **_ids(tokenizer, image_token_index="<image>"),
    )
    processor = tf.LlavaProcessor(
        CLIPImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        num_additional_image_tokens=1,
    )
    _save(
        folder,
        tf.LlavaForConditionalGeneration(config),
        processor,
        [tokenizer.eos_token_id],
    )


def save_fast_vlm(folder: Path) -> None:
    """As apple/FastVLM-0.5B: a convolutional tower of timm."""
    tokenizer = _tokenizer(CHATML, eos="<|im_end|>", pad="<pad>")
    tower = {"model_type": "timm_wrapper", "architecture": "test_efficientnet", "hidden_size": 256, "num_classes": 0,
             "model_args": {"global_pool": ""}, "initializer_range": 0.02}  # fmt: skip
    config = tf.FastVlmConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config=tower,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    processor = tf.LlavaProcessor(
        CLIPImageProcessorPil(
            size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}
        ),
        tokenizer,
        patch_size=32,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )
    _save(
        folder,
        tf.FastVlmForConditionalGeneration(config),
        processor,
        [tokenizer.eos_token_id],
    )


def save_internvl(folder: Path) -> None:
    """As OpenGVLab/InternVL3-1B-hf: tiles of an image, and the whole."""
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    tokenizer = _tokenizer(
        INTERN, eos="<|im_end|>", pad="<pad>", video_token="<video>", **names
    )
    vision = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
    config = tf.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        vision_config=vision,
        image_seq_length=4,
        **_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
    )
    processor = tf.InternVLProcessor(
        GotOcr2ImageProcessorPil(
            size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4
        ),
        tokenizer,
        InternVLVideoProcessor(size={"height": 32, "width": 32}),
        image_seq_length=4,
        chat_template=CHAT_TEMPLATE.replace("<image>", "<IMG_CONTEXT>"),
    )
    _save(
        folder,
        tf.InternVLForConditionalGeneration(config),
        processor,
        [tokenizer.eos_token_id],
    )


def save_paligemma(folder: Path) -> None:
    """As google/paligemma-3b-pt-224: a plain prompt; prompt and image see each other in
    both directions.
    """
    _paligemma(folder, {"model_type": "gemma"})


def save_paligemma2(folder: Path) -> None:
    """As google/paligemma2-3b-pt-224, on Gemma 2: every second layer sees a window."""
    window = {
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 5.0,
    }
    _paligemma(folder, {"model_type": "gemma2", **window})


def _paligemma(folder: Path, text: dict[str, Any]) -> None:
    tokenizer = _tokenizer(
        ["<pad>", "<eos>", "<bos>", "\n"], eos="<eos>", pad="<pad>", bos="<bos>"
    )
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_length = 16
    processor = tf.PaliGemmaProcessor(images, tokenizer)
    config = tf.PaliGemmaConfig(
        text_config={**TEXT, **text, "vocab_size": len(tokenizer)},
        vision_config={
            **VISION,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        },
        projection_dim=32,
        **_ids(tokenizer, image_token_index="<image>"),
    )
    _save(
        folder,
        tf.PaliGemmaForConditionalGeneration(config),
        processor,
        [tokenizer.eos_token_id],
    )


def save_gemma3(folder: Path) -> None:
    """As google/gemma-3-4b-it: a turn ends with another token than a text; most layers
    see a window.
    """
    extra = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<img>"}
    tokenizer = _tokenizer(GEMMA, eos="<eos>", pad="<pad>", bos="<bos>", **extra)
    kinds = ["sliding_attention", "full_attention"]
    config = tf.Gemma3Config(
        text_config={**TEXT, "vocab_size": len(tokenizer), "sliding_window": 6, "layer_types": kinds,
                     "query_pre_attn_scalar": 8},
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=4,
        **_ids(tokenizer, boi_token_index="<boi>", eoi_token_index="<eoi>", image_token_index="<img>"),
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    processor = tf.Gemma3Processor(
        images, tokenizer, image_seq_length=4, chat_template=GEMMA_TEMPLATE
    )
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end_of_turn>")]
    _save(folder, tf.Gemma3ForConditionalGeneration(config), processor, ends)


VLM_FAMILIES = tuple(
    name.removeprefix("save_") for name in list(globals()) if name.startswith("save_")
)


def save_vlm(family: str, folder: Path, seed: int = 0) -> Path:
    """Write the family's tiny model to ``folder``; return the folder."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    globals()[f"save_{family}"](folder)
    return folder


def tiny_vlm(
    family: str, folder: Path, prompt: Any = "a photo of", seed: int = 0
) -> Any:
    """The family's tiny model, saved and loaded."""
    captioner = load_captioner(save_vlm(family, folder, seed), prompt=prompt)
    captioner.policy.eval()
    return captioner


SIZES = ((32, 32), (60, 30), (24, 56))
"""Sizes of images with different numbers of tokens in most families."""


def photo_rows() -> list[dict[str, Any]]:
    """Rows with noise of different sizes, the second and third with prompts of their own."""
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, Any]] = []
    for number, (width, height) in enumerate(SIZES):
        pixels = torch.randint(
            0, 256, (height, width, 3), generator=generator, dtype=torch.uint8
        )
        image = Image.fromarray(pixels.numpy())
        rows.append(
            {
                "image_id": f"image-{number}",
                "image": image,
                "references": REFERENCES[number],
            }
        )
    rows[1]["prompt"] = "a red circle on the tracks in a station"
    rows[2]["prompt"] = "two"
    return rows
