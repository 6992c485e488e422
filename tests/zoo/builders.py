"""Tiny random models of many families of vision-language models, saved as the real ones are.

Each is built of Transformers' own classes with two layers and a few words.
"""

import importlib
from pathlib import Path

import torch
import transformers as tf

from tests.zoo.families import (
    CHAT_TEMPLATE,
    CHATML,
    GEMMA_TEMPLATE,
    INTERN,
    QWEN,
    ROPE,
    TEXT,
    VISION,
    VLM_FAMILIES,
    _ids,
    _tokenizer,
    save_vlm,
)
from tests.zoo.vision_language import CONTENT, IDEFICS_TEMPLATE, QWEN_TEMPLATE


def cls(path):
    """A class of Transformers by ``model_type.module.Class``."""
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


BASE = ["<pad>", "<|im_start|>", "<|im_end|>"]


def tpl(image):
    return CHAT_TEMPLATE.replace("<image>\n", image)


def save(folder, model, processor, ends=None, std=0.25, tune=None):
    torch.manual_seed(0)
    for _n, p in model.named_parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=std)
    if tune:
        tune(model)
    model.generation_config.update(
        eos_token_id=ends or [processor.tokenizer.eos_token_id],
        do_sample=True,
        top_k=1,
        repetition_penalty=1.5,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


CLIPV = {**VISION, "model_type": "clip_vision_model"}


SIGV = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}


QTEXT = {**TEXT, "model_type": "qwen2"}


LTEXT = {**TEXT, "model_type": "llama"}


def save_llava_next(f: Path) -> None:
    tok = _tokenizer(CHATML, eos="<|im_end|>", pad="<pad>")
    pins = [[32, 64], [64, 32], [64, 64]]
    cfg = tf.LlavaNextConfig(
        text_config={**LTEXT, "vocab_size": len(tok)},
        vision_config=CLIPV,
        image_grid_pinpoints=pins,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        **_ids(tok, image_token_index="<image>"),
    )
    ip = cls("llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil")(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_grid_pinpoints=pins,
    )
    save(
        f,
        tf.LlavaNextForConditionalGeneration(cfg),
        tf.LlavaNextProcessor(
            ip,
            tok,
            patch_size=8,
            vision_feature_select_strategy="default",
            chat_template=CHAT_TEMPLATE,
            num_additional_image_tokens=1,
        ),
    )


def save_llava_next_video(f: Path) -> None:
    tok = _tokenizer(CHATML, eos="<|im_end|>", pad="<pad>")
    pins = [[32, 64], [64, 32], [64, 64]]
    cfg = tf.LlavaNextVideoConfig(
        text_config={**LTEXT, "vocab_size": len(tok)},
        vision_config=CLIPV,
        image_grid_pinpoints=pins,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        **_ids(tok, image_token_index="<image>", video_token_index="<video>"),
    )
    ip = cls("llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil")(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_grid_pinpoints=pins,
    )
    vp = cls(
        "llava_next_video.video_processing_llava_next_video.LlavaNextVideoVideoProcessor"
    )(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    save(
        f,
        tf.LlavaNextVideoForConditionalGeneration(cfg),
        tf.LlavaNextVideoProcessor(
            vp,
            ip,
            tok,
            patch_size=8,
            vision_feature_select_strategy="default",
            chat_template=CHAT_TEMPLATE,
            num_additional_image_tokens=1,
        ),
    )


def save_vipllava(f: Path) -> None:
    tok = _tokenizer(CHATML, eos="<|im_end|>", pad="<pad>")
    cfg = tf.VipLlavaConfig(
        text_config={**LTEXT, "vocab_size": len(tok)},
        vision_config=CLIPV,
        vision_feature_layer=[-1, -2],
        **_ids(tok, image_token_index="<image>"),
    )
    ip = cls("clip.image_processing_pil_clip.CLIPImageProcessorPil")(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    save(
        f,
        tf.VipLlavaForConditionalGeneration(cfg),
        tf.LlavaProcessor(
            ip,
            tok,
            patch_size=8,
            vision_feature_select_strategy="default",
            chat_template=CHAT_TEMPLATE,
            num_additional_image_tokens=1,
        ),
    )


PIX = ["<pad>", "</s>", "<s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]


PIX_T = (
    "<s>{% for message in messages %}{% if message['role'] == 'assistant' %}"
    + CONTENT.replace("IMAGE", "[IMG]")
    + "</s>{% else %}[INST]"
    + CONTENT.replace("IMAGE", "[IMG]")
    + "[/INST]{% endif %}{% endfor %}"
)


PIXV = {
    "model_type": "pixtral",
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 12,
    "image_size": 64,
    "patch_size": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def _pix(f, ctype, text, merge, **more):
    tok = _tokenizer(PIX, eos="</s>", pad="<pad>", bos="<s>")
    ip = cls("pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil")(
        size={"longest_edge": 48}, patch_size={"height": 8, "width": 8}
    )
    proc = tf.PixtralProcessor(
        ip, tok, patch_size=8, spatial_merge_size=merge, chat_template=PIX_T
    )
    extra = (
        {"spatial_merge_size": merge}
        if ctype == "Mistral3"
        else {"vision_feature_select_strategy": "full"}
    )
    cfg = getattr(tf, ctype + "Config")(
        text_config={**text, "vocab_size": len(tok)},
        vision_config=PIXV,
        vision_feature_layer=-1,
        **extra,
        **more,
        **_ids(tok, image_token_index="[IMG]"),
    )
    save(f, getattr(tf, ctype + "ForConditionalGeneration")(cfg), proc)


def save_mistral3(f: Path) -> None:
    _pix(f, "Mistral3", {**TEXT, "model_type": "mistral", "sliding_window": None}, 2)


def save_mistral3_window(f: Path) -> None:
    _pix(f, "Mistral3", {**TEXT, "model_type": "mistral", "sliding_window": 6}, 2)


def save_mistral3_ministral3(f: Path) -> None:
    _pix(
        f,
        "Mistral3",
        {
            **TEXT,
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
        2,
    )


def save_llava_pixtral(f: Path) -> None:
    _pix(f, "Llava", {**TEXT, "model_type": "mistral", "sliding_window": None}, 1)


def save_aya_vision(f: Path) -> None:
    sp = [
        *BASE,
        "<image>",
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "<|IMG_PATCH|>",
        "<|IMG_LINE_BREAK|>",
    ]
    tok = _tokenizer(sp, eos="<|im_end|>", pad="<pad>")
    cfg = tf.AyaVisionConfig(
        text_config={
            **TEXT,
            "model_type": "cohere2",
            "vocab_size": len(tok),
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config=SIGV,
        downsample_factor=2,
        **_ids(tok, image_token_index="<|IMG_PATCH|>"),
    )
    ip = cls("got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil")(
        size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4
    )
    save(
        f,
        tf.AyaVisionForConditionalGeneration(cfg),
        tf.AyaVisionProcessor(
            ip,
            tok,
            patch_size=8,
            img_size=32,
            downsample_factor=2,
            chat_template=tpl("<image>"),
        ),
    )


def save_cohere2_vision(f: Path) -> None:
    sp = [
        *BASE,
        "<|IMG_PATCH|>",
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "<|IMG_LINE_BREAK|>",
    ]
    tok = _tokenizer(
        sp,
        eos="<|im_end|>",
        pad="<pad>",
        image_token="<|IMG_PATCH|>",
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    cfg = tf.Cohere2VisionConfig(
        text_config={
            **TEXT,
            "model_type": "cohere2",
            "vocab_size": len(tok),
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config=SIGV,
        downsample_factor=2,
        alignment_intermediate_size=48,
        **_ids(tok, image_token_id="<|IMG_PATCH|>"),
    )
    ip = cls(
        "cohere2_vision.image_processing_cohere2_vision.Cohere2VisionImageProcessor"
    )(size={"height": 32, "width": 32}, max_patches=4)
    ip.patch_size = 2
    save(
        f,
        tf.Cohere2VisionForConditionalGeneration(cfg),
        tf.Cohere2VisionProcessor(ip, tok, chat_template=tpl("<|IMG_PATCH|>")),
    )


def save_idefics2(f: Path) -> None:
    sp = [
        "<pad>",
        "<|im_start|>",
        "<end_of_utterance>",
        "<image>",
        "<fake_token_around_image>",
    ]
    tok = _tokenizer(sp, eos="<end_of_utterance>", pad="<pad>", bos="<|im_start|>")
    ip = cls("idefics2.image_processing_pil_idefics2.Idefics2ImageProcessorPil")(
        size={"longest_edge": 48, "shortest_edge": 24}, do_image_splitting=False
    )
    proc = tf.Idefics2Processor(
        ip, tok, image_seq_len=4, chat_template=IDEFICS_TEMPLATE
    )
    cfg = tf.Idefics2Config(
        text_config={
            **TEXT,
            "model_type": "mistral",
            "vocab_size": len(proc.tokenizer),
            "sliding_window": None,
        },
        vision_config={**VISION, "image_size": 48},
        perceiver_config={
            "hidden_size": 32,
            "resampler_n_latents": 4,
            "resampler_depth": 2,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 2,
        },
        **_ids(proc.tokenizer, image_token_id="<image>"),
    )
    save(f, tf.Idefics2ForConditionalGeneration(cfg), proc)


def save_got_ocr2(f: Path) -> None:
    sp = [*BASE, "<image>", "<img>", "</img>", "<imgpad>"]
    tok = _tokenizer(sp, eos="<|im_end|>", pad="<pad>")
    vis = {
        "hidden_size": 24,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
        "window_size": 3,
        "global_attn_indexes": [1],
        "mlp_dim": 32,
        "initializer_range": 0.02,
    }
    cfg = tf.GotOcr2Config(
        text_config={**QTEXT, "vocab_size": len(tok)},
        vision_config=vis,
        image_seq_length=4,
        **_ids(tok, image_token_index="<imgpad>"),
    )
    ip = cls("got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil")(
        size={"height": 64, "width": 64}
    )
    proc = tf.GotOcr2Processor(
        ip, tok, chat_template=tpl("<img><imgpad><imgpad><imgpad><imgpad></img>")
    )
    save(f, tf.GotOcr2ForConditionalGeneration(cfg), proc)


def save_perception_lm(f: Path) -> None:
    tok = _tokenizer(
        CHATML,
        eos="<|im_end|>",
        pad="<pad>",
        image_token="<image>",
        video_token="<video>",
    )
    vis = {
        "model_type": "timm_wrapper",
        "architecture": "vit_pe_core_tiny_patch16_384",
        "num_classes": 0,
        "do_pooling": True,
        "model_args": {
            "embed_dim": 24,
            "depth": 2,
            "num_heads": 2,
            "global_pool": "",
            "img_size": [32, 32],
            "patch_size": 8,
            "ref_feat_shape": [4, 4],
            "init_values": 0.1,
            "use_post_transformer_norm": False,
        },
    }
    cfg = tf.PerceptionLMConfig(
        text_config={**LTEXT, "vocab_size": len(tok)},
        vision_config=vis,
        vision_use_cls_token=True,
        projector_pooling_ratio=2,
        **_ids(tok, image_token_id="<image>", video_token_id="<video>"),
    )
    ip = cls("perception_lm.image_processing_perception_lm.PerceptionLMImageProcessor")(
        tile_size=32, max_num_tiles=4, vision_input_type="thumb+tile"
    )
    vp = cls("perception_lm.video_processing_perception_lm.PerceptionLMVideoProcessor")(
        size={"height": 32, "width": 32}
    )
    save(
        f,
        tf.PerceptionLMForConditionalGeneration(cfg),
        tf.PerceptionLMProcessor(
            vp, ip, tok, patch_size=8, pooling_ratio=2, chat_template=CHAT_TEMPLATE
        ),
    )


def save_lighton_ocr(f: Path) -> None:
    sp = [*BASE, "<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"]
    tok = _tokenizer(
        sp,
        eos="<|im_end|>",
        pad="<pad>",
        image_token="<|image_pad|>",
        image_break_token="<|vision_pad|>",
        image_end_token="<|vision_end|>",
    )
    cfg = tf.LightOnOcrConfig(
        text_config={**TEXT, "model_type": "qwen3", "vocab_size": len(tok)},
        vision_config=PIXV,
        spatial_merge_size=2,
        **_ids(tok, image_token_id="<|image_pad|>"),
    )
    ip = cls("pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil")(
        size={"longest_edge": 48}, patch_size={"height": 16, "width": 16}
    )
    save(
        f,
        tf.LightOnOcrForConditionalGeneration(cfg),
        cls("lighton_ocr.processing_lighton_ocr.LightOnOcrProcessor")(
            ip,
            tok,
            patch_size=8,
            spatial_merge_size=2,
            chat_template=tpl("<|image_pad|>"),
        ),
    )


def save_deepseek_vl(f: Path) -> None:
    tok = _tokenizer(
        [*BASE, "<image_placeholder>"],
        eos="<|im_end|>",
        pad="<pad>",
        image_token="<image_placeholder>",
    )
    cfg = tf.DeepseekVLConfig(
        text_config={**LTEXT, "vocab_size": len(tok)},
        vision_config=SIGV,
        **_ids(tok, image_token_id="<image_placeholder>"),
    )
    ip = cls(
        "deepseek_vl.image_processing_pil_deepseek_vl.DeepseekVLImageProcessorPil"
    )(size={"height": 32, "width": 32}, min_size=14)
    save(
        f,
        tf.DeepseekVLForConditionalGeneration(cfg),
        tf.DeepseekVLProcessor(
            ip, tok, num_image_tokens=16, chat_template=tpl("<image_placeholder>")
        ),
    )


def save_deepseek_vl_hybrid(f: Path) -> None:
    tok = _tokenizer(
        [*BASE, "<image_placeholder>"],
        eos="<|im_end|>",
        pad="<pad>",
        image_token="<image_placeholder>",
    )
    high = {
        "model_type": "sam_vision_model",
        "hidden_size": 24,
        "output_channels": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
        "window_size": 3,
        "global_attn_indexes": [1],
        "mlp_dim": 32,
        "initializer_range": 0.02,
        "num_pos_feats": 8,
    }
    cfg = tf.DeepseekVLHybridConfig(
        text_config={**LTEXT, "vocab_size": len(tok)},
        vision_config=SIGV,
        high_res_vision_config=high,
        **_ids(tok, image_token_id="<image_placeholder>"),
    )
    ip = cls(
        "deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid.DeepseekVLHybridImageProcessorPil"
    )(
        size={"height": 32, "width": 32},
        high_res_size={"height": 64, "width": 64},
        min_size=14,
    )
    save(
        f,
        tf.DeepseekVLHybridForConditionalGeneration(cfg),
        tf.DeepseekVLHybridProcessor(
            ip, tok, num_image_tokens=16, chat_template=tpl("<image_placeholder>")
        ),
    )


def save_video_llava(f: Path) -> None:
    tok = _tokenizer(CHATML, eos="<|im_end|>", pad="<pad>")
    cfg = tf.VideoLlavaConfig(
        text_config={**LTEXT, "vocab_size": len(tok)},
        vision_config=CLIPV,
        vision_feature_layer=-1,
        **_ids(tok, image_token_index="<image>", video_token_index="<video>"),
    )
    ip = cls("video_llava.image_processing_video_llava.VideoLlavaImageProcessor")(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    vp = cls("video_llava.video_processing_video_llava.VideoLlavaVideoProcessor")(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    save(
        f,
        tf.VideoLlavaForConditionalGeneration(cfg),
        tf.VideoLlavaProcessor(
            ip,
            vp,
            tok,
            patch_size=8,
            vision_feature_select_strategy="default",
            chat_template=CHAT_TEMPLATE,
        ),
    )


def save_ovis2(f: Path) -> None:
    sp = [
        *BASE,
        "<image>",
        "<IMG_ATOM>",
        "<IMG_START>",
        "<IMG_GRID>",
        "<IMG_COL>",
        "<IMG_ROW>",
        "<IMG_END>",
    ]
    tok = _tokenizer(sp, eos="<|im_end|>", pad="<pad>")
    ind = tok.convert_tokens_to_ids(
        ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    )
    cfg = tf.Ovis2Config(
        text_config={**QTEXT, "vocab_size": len(tok)},
        vision_config={
            **VISION,
            "vocab_size": 40,
            "hidden_stride": 2,
            "num_visual_indicator_tokens": 5,
        },
        hidden_size=32,
        vocab_size=len(tok),
        visual_indicator_token_ids=ind,
        **_ids(tok, image_token_id="<IMG_ATOM>"),
    )
    ip = cls("ovis2.image_processing_pil_ovis2.Ovis2ImageProcessorPil")(
        size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4
    )
    save(
        f,
        tf.Ovis2ForConditionalGeneration(cfg),
        tf.Ovis2Processor(ip, tok, image_seq_length=4, chat_template=tpl("<image>")),
    )


def save_aria(f: Path) -> None:
    tok = _tokenizer(CHATML, eos="<|im_end|>", pad="<pad>", image_token="<image>")
    vis = {
        "model_type": "idefics3_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 980,
        "patch_size": 140,
    }
    cfg = tf.AriaConfig(
        text_config={
            **TEXT,
            "vocab_size": len(tok),
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
        vision_config=vis,
        projector_patch_to_query_dict={49: 8},
        vision_feature_layer=-1,
        **_ids(tok, image_token_index="<image>"),
    )
    ip = cls("aria.image_processing_pil_aria.AriaImageProcessorPil")(
        max_image_size=980, min_image_size=336
    )
    save(
        f,
        tf.AriaForConditionalGeneration(cfg),
        tf.AriaProcessor(
            ip, tok, chat_template=CHAT_TEMPLATE, size_conversion={980: 8}
        ),
        std=0.1,
    )


GLM = [
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
]


GLM_T = tpl("<|begin_of_image|><|image|><|end_of_image|>")


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


GLMV = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 8,
    "image_size": 32,
    "spatial_merge_size": 2,
}


def _glm(f, ctype, mtype, text, ip_path, vp_path, proc):
    tok = _tokenizer(GLM, eos="<|im_end|>", pad="<pad>")
    ids = _ids(
        tok,
        image_token_id="<|image|>",
        video_token_id="<|video|>",
        image_start_token_id="<|begin_of_image|>",
        image_end_token_id="<|end_of_image|>",
        video_start_token_id="<|begin_of_video|>",
        video_end_token_id="<|end_of_video|>",
    )
    cfg = getattr(tf, ctype)(
        text_config={
            **TEXT,
            "rope_parameters": MROPE,
            "pad_token_id": 0,
            **text,
            "vocab_size": len(tok),
        },
        vision_config=GLMV,
        **ids,
    )
    ip = cls(ip_path)(
        patch_size=8, size={"shortest_edge": 16 * 16, "longest_edge": 40 * 40}
    )
    vp = cls(vp_path)(patch_size=8)
    save(
        f, getattr(tf, mtype)(cfg), getattr(tf, proc)(ip, tok, vp, chat_template=GLM_T)
    )


G4 = (
    "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil",
    "glm4v.video_processing_glm4v.Glm4vVideoProcessor",
    "Glm4vProcessor",
)


G46 = (
    "glm46v.image_processing_pil_glm46v.Glm46VImageProcessorPil",
    "glm46v.video_processing_glm46v.Glm46VVideoProcessor",
    "Glm46VProcessor",
)


def save_glm4v(f: Path) -> None:
    _glm(f, "Glm4vConfig", "Glm4vForConditionalGeneration", {}, *G4)


def save_glm46v(f: Path) -> None:
    _glm(
        f,
        "Glm46VConfig",
        "Glm46VForConditionalGeneration",
        {"model_type": "glm4v_text"},
        *G46,
    )


def save_glm_ocr(f: Path) -> None:
    _glm(f, "GlmOcrConfig", "GlmOcrForConditionalGeneration", {}, *G46)


def save_glm4v_moe(f: Path) -> None:
    _glm(
        f,
        "Glm4vMoeConfig",
        "Glm4vMoeForConditionalGeneration",
        {
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
        },
        *G4,
    )


def save_paddleocr_vl(f: Path) -> None:
    sp = [
        "<pad>",
        "<|im_start|>",
        "<|im_end|>",
        "<|IMAGE_PLACEHOLDER|>",
        "<|IMAGE_START|>",
        "<|IMAGE_END|>",
        "<|video|>",
    ]
    tok = _tokenizer(
        sp, eos="<|im_end|>", pad="<pad>", image_token="<|IMAGE_PLACEHOLDER|>"
    )
    ids = _ids(
        tok,
        image_token_id="<|IMAGE_PLACEHOLDER|>",
        vision_start_token_id="<|IMAGE_START|>",
        vision_end_token_id="<|IMAGE_END|>",
        video_token_id="<|video|>",
    )
    cfg = cls("paddleocr_vl.configuration_paddleocr_vl.PaddleOCRVLConfig")(
        text_config={
            **TEXT,
            "vocab_size": len(tok),
            "rope_parameters": MROPE,
            "pad_token_id": 0,
        },
        vision_config={**VISION, "spatial_merge_size": 2},
        **ids,
    )
    ip = cls(
        "paddleocr_vl.image_processing_pil_paddleocr_vl.PaddleOCRVLImageProcessorPil"
    )(patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600})
    save(
        f,
        tf.PaddleOCRVLForConditionalGeneration(cfg),
        cls("paddleocr_vl.processing_paddleocr_vl.PaddleOCRVLProcessor")(
            ip,
            tok,
            chat_template=tpl("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
        ),
    )


def _qwen(folder, version, text, vision, proc="Qwen3VLProcessor"):
    tok = _tokenizer(QWEN, eos="<|im_end|>", pad="<|endoftext|>")
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"} | {
        f"vision_{w}_token_id": f"vision_{w}" for w in ("start", "end")
    }
    ids = _ids(tok, **{k: f"<|{n}|>" for k, n in names.items()})
    cfg = getattr(tf, f"{version}Config")(
        text_config={
            **TEXT,
            "vocab_size": len(tok) + 3,
            "rope_parameters": ROPE,
            **text,
        },
        vision_config=vision,
        **ids,
    )
    ip = cls("qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil")(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600}
    )
    vp = cls("qwen3_vl.video_processing_qwen3_vl.Qwen3VLVideoProcessor")(patch_size=8)
    save(
        folder,
        getattr(tf, f"{version}ForConditionalGeneration")(cfg),
        getattr(tf, proc)(ip, tok, vp, chat_template=QWEN_TEMPLATE),
        [tok.eos_token_id, tok.pad_token_id],
    )


Q3V = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 8,
    "num_position_embeddings": 64,
}


def save_qwen3_vl_moe(f: Path) -> None:
    _qwen(
        f,
        "Qwen3VLMoe",
        {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
        {**Q3V, "deepstack_visual_indexes": [0, 1]},
    )


LIN = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    },
}


def save_qwen3_5(f: Path) -> None:
    _qwen(f, "Qwen3_5", LIN, Q3V)


def save_qwen3_5_moe(f: Path) -> None:
    _qwen(
        f,
        "Qwen3_5Moe",
        {
            **LIN,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        Q3V,
    )


def _lfm2(f, kinds):
    sp = [*BASE, "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    tok = _tokenizer(
        sp,
        eos="<|im_end|>",
        pad="<pad>",
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )
    t = {k: v for k, v in TEXT.items() if k != "head_dim"}
    cfg = tf.Lfm2VlConfig(
        text_config={
            **t,
            "model_type": "lfm2",
            "vocab_size": len(tok),
            "layer_types": kinds,
            "block_auto_adjust_ff_dim": False,
        },
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_patches": 16,
            "patch_size": 8,
            "vision_use_head": False,
        },
        projector_hidden_size=48,
        downsample_factor=2,
        **_ids(tok, image_token_id="<image>"),
    )
    ip = cls("lfm2_vl.image_processing_lfm2_vl.Lfm2VlImageProcessor")(
        encoder_patch_size=8,
        tile_size=32,
        downsample_factor=2,
        min_image_tokens=1,
        max_image_tokens=4,
        max_num_patches=16,
        min_tiles=2,
        max_tiles=4,
        do_image_splitting=True,
    )
    save(
        f,
        tf.Lfm2VlForConditionalGeneration(cfg),
        tf.Lfm2VlProcessor(ip, tok, chat_template=tpl("<image>")),
    )


def save_lfm2_vl(f: Path) -> None:
    _lfm2(f, ["conv", "full_attention"])


def save_lfm2_vl_attention(f: Path) -> None:
    _lfm2(f, ["full_attention", "full_attention"])


G4S = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<boi>",
    "<eoi>",
    "<img>",
    "<aud>",
    "<boa>",
    "<eoa>",
    "<|video|>",
]


def _gemma4(f, text, version="Gemma4", vision=None):
    tok = _tokenizer(
        G4S,
        eos="<eos>",
        pad="<pad>",
        bos="<bos>",
        boi_token="<boi>",
        eoi_token="<eoi>",
        image_token="<img>",
        audio_token="<aud>",
        boa_token="<boa>",
        eoa_token="<eoa>",
    )
    t = dict(TEXT.items())
    base = {
        **t,
        "vocab_size": len(tok),
        "sliding_window": 8,
        "vocab_size_per_layer_input": len(tok),
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 5.0,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    cfg = getattr(tf, version + "Config")(
        text_config={**base, **text},
        vision_config=vision
        or {
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "patch_size": 4,
            "position_embedding_size": 64,
            "pooling_kernel_size": 3,
        },
        audio_config=None,
        **_ids(
            tok,
            boi_token_id="<boi>",
            eoi_token_id="<eoi>",
            image_token_id="<img>",
            video_token_id="<|video|>",
            audio_token_id="<aud>",
            boa_token_id="<boa>",
            eoa_token_index="<eoa>",
        ),
    )
    version.lower().replace("unified", "_unified")
    if version == "Gemma4":
        ip = cls("gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil")(
            patch_size=4, max_soft_tokens=70, pooling_kernel_size=3
        )
        vp = cls("gemma4.video_processing_gemma4.Gemma4VideoProcessor")(patch_size=4)
        fe = cls("gemma4.feature_extraction_gemma4.Gemma4AudioFeatureExtractor")()
    else:
        ip = cls(
            "gemma4_unified.image_processing_gemma4_unified.Gemma4UnifiedImageProcessor"
        )(patch_size=4, max_soft_tokens=70, pooling_kernel_size=3)
        vp = cls(
            "gemma4_unified.video_processing_gemma4_unified.Gemma4UnifiedVideoProcessor"
        )(patch_size=4)
        fe = cls(
            "gemma4_unified.feature_extraction_gemma4_unified.Gemma4UnifiedAudioFeatureExtractor"
        )()
    proc = getattr(tf, version + "Processor")(
        fe,
        ip,
        tok,
        vp,
        chat_template=GEMMA_TEMPLATE.replace("<boi>", "<img>"),
        image_seq_length=70,
    )
    ends = [tok.eos_token_id, tok.convert_tokens_to_ids("<end_of_turn>")]
    save(f, getattr(tf, version + "ForConditionalGeneration")(cfg), proc, ends, std=0.2)


def save_gemma4_31b(f: Path) -> None:
    _gemma4(
        f,
        {
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    )


def save_gemma4_26b_moe(f: Path) -> None:
    _gemma4(
        f,
        {
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    )


def save_gemma4_e4b(f: Path) -> None:
    _gemma4(
        f,
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "use_double_wide_mlp": True,
        },
    )


def save_gemma4_causal(f: Path) -> None:
    _gemma4(f, {"hidden_size_per_layer_input": 0})


def save_gemma4_ple(f: Path) -> None:
    _gemma4(f, {})


def save_llama4(f: Path) -> None:
    sp = [
        *BASE,
        "<|image|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|patch|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    ]
    tok = _tokenizer(sp, eos="<|im_end|>", pad="<pad>")
    cfg = tf.Llama4Config(
        text_config={
            **TEXT,
            "vocab_size": len(tok),
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 96,
            "vision_output_dim": 24,
            "image_size": 32,
            "patch_size": 8,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
            "pixel_shuffle_ratio": 0.5,
        },
        **_ids(
            tok,
            image_token_index="<|patch|>",
            boi_token_index="<|image_start|>",
            eoi_token_index="<|image_end|>",
        ),
    )
    ip = cls("llama4.image_processing_llama4.Llama4ImageProcessor")(
        size={"height": 32, "width": 32}, max_patches=4, resize_to_max_canvas=False
    )
    save(
        f,
        tf.Llama4ForConditionalGeneration(cfg),
        tf.Llama4Processor(
            ip,
            tok,
            patch_size=8,
            pixel_shuffle_ratio=0.5,
            chat_template=tpl("<|image|>"),
        ),
    )


def save_video_llama_3(f: Path) -> None:
    tok = _tokenizer(
        [*BASE, "<image>", "<video>"],
        eos="<|im_end|>",
        pad="<pad>",
        image_token="<image>",
        video_token="<video>",
    )
    cfg = tf.VideoLlama3Config(
        text_config={**QTEXT, "vocab_size": len(tok)},
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 8,
        },
        **_ids(tok, image_token_id="<image>", video_token_id="<video>"),
    )
    ip = cls(
        "video_llama_3.image_processing_pil_video_llama_3.VideoLlama3ImageProcessorPil"
    )(patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600}, merge_size=1)
    vp = cls("video_llama_3.video_processing_video_llama_3.VideoLlama3VideoProcessor")(
        patch_size=8
    )
    save(
        f,
        tf.VideoLlama3ForConditionalGeneration(cfg),
        tf.VideoLlama3Processor(ip, tok, vp, chat_template=tpl("<image>")),
    )


def save_exaone4_5(f: Path) -> None:
    tok = _tokenizer(QWEN, eos="<|im_end|>", pad="<|endoftext|>")
    cfg = tf.Exaone4_5_Config(
        text_config={
            **TEXT,
            "model_type": "exaone4",
            "vocab_size": len(tok),
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 32,
            "num_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 48,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        **_ids(tok, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
    )
    ip = cls("qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil")(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600}
    )
    vp = cls("qwen2_vl.video_processing_qwen2_vl.Qwen2VLVideoProcessor")(patch_size=8)
    save(
        f,
        tf.Exaone4_5_ForConditionalGeneration(cfg),
        cls("exaone4_5.processing_exaone4_5.Exaone4_5_Processor")(
            ip, tok, vp, chat_template=QWEN_TEMPLATE
        ),
    )


def save_kimi_k25(f: Path) -> None:
    sp = [
        *BASE,
        "<|media_pad|>",
        "<|media_begin|>",
        "<|media_end|>",
        "<|media_content|>",
        "<|kimi_k25_video_placeholder|>",
    ]
    tok = _tokenizer(sp, eos="<|im_end|>", pad="<pad>")
    text = {
        "model_type": "deepseek_v3",
        "vocab_size": len(tok),
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 512,
    }
    cfg = tf.Kimi_K25Config(
        text_config=text,
        vision_config={
            "patch_size": 8,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
        },
        projection_hidden_size=32,
        **_ids(
            tok,
            image_token_id="<|media_pad|>",
            video_token_id="<|kimi_k25_video_placeholder|>",
            vision_start_token_id="<|media_begin|>",
            vision_end_token_id="<|media_end|>",
        ),
    )
    ip = cls("kimi_k25.image_processing_kimi_k25.Kimi_K25ImageProcessor")(
        patch_size=8, size={"max_height": 40, "max_width": 40}
    )
    vp = cls("kimi_k25.video_processing_kimi_k25.Kimi_K25VideoProcessor")(patch_size=8)
    save(
        f,
        tf.Kimi_K25ForConditionalGeneration(cfg),
        cls("kimi_k25.processing_kimi_k25.Kimi_K25Processor")(
            ip, tok, vp, chat_template=tpl("<|media_begin|><|media_pad|><|media_end|>")
        ),
    )


def save_qianfan_ocr(f: Path) -> None:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    tok = _tokenizer(
        [*BASE, "<IMG_CONTEXT>", "<img>", "</img>"],
        eos="<|im_end|>",
        pad="<pad>",
        **names,
    )
    cfg = cls("qianfan_ocr.configuration_qianfan_ocr.QianfanOCRConfig")(
        text_config={**TEXT, "model_type": "qwen3", "vocab_size": len(tok)},
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        image_seq_length=4,
        **_ids(tok, image_token_id="<IMG_CONTEXT>"),
    )
    ip = cls("got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil")(
        size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4
    )
    save(
        f,
        tf.QianfanOCRForConditionalGeneration(cfg),
        cls("qianfan_ocr.processing_qianfan_ocr.QianfanOCRProcessor")(
            ip, tok, image_seq_length=4, chat_template=tpl("<image>")
        ),
    )


def save_hunyuan_vl(f: Path) -> None:
    names = {
        "image_token": "<img_pad>",
        "image_start_token": "<img>",
        "image_end_token": "</img>",
    }
    tok = _tokenizer(
        [*BASE, "<img_pad>", "<img>", "</img>", "<nl>"],
        eos="<|im_end|>",
        pad="<pad>",
        **names,
    )
    cfg = tf.HunYuanVLConfig(
        text_config={
            **TEXT,
            "vocab_size": len(tok),
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 1000.0,
                "factor": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 1, 1],
                "xdrope_section": [1, 1, 1, 1],
            },
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "out_hidden_size": 32,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "max_image_size": 64,
            "min_image_size": 16,
            "img_max_token_num": 64,
            "text_hidden_size": 32,
        },
        **_ids(
            tok,
            image_token_id="<img_pad>",
            im_start_id="<img>",
            im_end_id="</img>",
            im_newline_id="<nl>",
        ),
    )
    ip = cls("hunyuan_vl.image_processing_pil_hunyuan_vl.HunYuanVLImageProcessorPil")(
        patch_size=8, merge_size=2, size={"shortest_edge": 256, "longest_edge": 1600}
    )
    save(
        f,
        tf.HunYuanVLForConditionalGeneration(cfg),
        cls("hunyuan_vl.processing_hunyuan_vl.HunYuanVLProcessor")(
            ip, tok, chat_template=tpl("<img><img_pad></img>")
        ),
    )


def save_gemma3n(f: Path) -> None:
    sp = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<boi>",
        "<eoi>",
        "<img>",
        "<aud>",
        "<boa>",
        "<eoa>",
    ]
    tok = _tokenizer(
        sp,
        eos="<eos>",
        pad="<pad>",
        bos="<bos>",
        boi_token="<boi>",
        eoi_token="<eoi>",
        image_token="<img>",
        audio_token="<aud>",
        boa_token="<boa>",
        eoa_token="<eoa>",
    )
    n = len(tok)
    text = {
        **TEXT,
        "vocab_size": n + 4,
        "vocab_size_per_layer_input": n + 4,
        "hidden_size_per_layer_input": 8,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "sliding_window": 8,
        "intermediate_size": [48] * 4,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "final_logit_softcapping": 5.0,
    }
    cfg = tf.Gemma3nConfig(
        text_config=text,
        vision_config={
            "model_type": "gemma3n_vision",
            "architecture": "mobilenetv5_300m_enc",
            "hidden_size": 2048,
            "vocab_size": 8,
            "vocab_offset": n + 4 - 8 - 0,
            "do_pooling": False,
            "model_args": {"channel_multiplier": 0.125},
        },
        audio_config={
            "hidden_size": 16,
            "conf_num_hidden_layers": 1,
            "conf_num_attention_heads": 2,
            "vocab_size": 8,
            "vocab_offset": n + 4 - 8,
            "input_feat_size": 32,
            "sscp_conv_channel_size": [8, 4],
        },
        vision_soft_tokens_per_image=256,
        audio_soft_tokens_per_image=4,
        **_ids(
            tok,
            boi_token_id="<boi>",
            eoi_token_id="<eoi>",
            image_token_id="<img>",
            audio_token_id="<aud>",
            boa_token_id="<boa>",
            eoa_token_id="<eoa>",
        ),
    )
    ip = cls("siglip.image_processing_pil_siglip.SiglipImageProcessorPil")(
        size={"height": 128, "width": 128}
    )
    fe = cls("gemma3n.feature_extraction_gemma3n.Gemma3nAudioFeatureExtractor")(
        feature_size=32
    )
    proc = tf.Gemma3nProcessor(
        fe,
        ip,
        tok,
        chat_template=GEMMA_TEMPLATE.replace("<boi>", "<img>"),
        image_seq_length=256,
    )
    save(
        f,
        tf.Gemma3nForConditionalGeneration(cfg),
        proc,
        [tok.eos_token_id, tok.convert_tokens_to_ids("<end_of_turn>")],
        std=0.1,
    )


def save_molmo2(f: Path) -> None:
    sp = [
        *BASE,
        "<|image|>",
        "<|video|>",
        "<im_patch>",
        "<im_col>",
        "<im_start>",
        "<low_res_im_start>",
        "<frame_start>",
        "<im_end>",
        "<frame_end>",
        "<im_low>",
    ]
    tok = _tokenizer(
        sp,
        eos="<|im_end|>",
        pad="<pad>",
        image_token="<|image|>",
        video_token="<|video|>",
    )
    ids = _ids(
        tok,
        image_start_token_id="<im_start>",
        low_res_image_start_token_id="<low_res_im_start>",
        image_end_token_id="<im_end>",
        image_patch_id="<im_patch>",
        frame_start_token_id="<frame_start>",
        frame_end_token_id="<frame_end>",
    )
    v = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 12,
    }
    cfg = tf.Molmo2Config(
        vision_config={
            **v,
            "num_hidden_layers": 2,
            "image_size": [32, 32],
            "patch_size": 8,
        },
        adapter_config={
            **v,
            "vision_feature_layer": [1, 0],
            "intermediate_size": 48,
            "text_hidden_size": 32,
        },
        text_config={**TEXT, "vocab_size": len(tok), "additional_vocab_size": 8},
        **ids,
    )
    ip = cls("molmo2.image_processing_molmo2.Molmo2ImageProcessor")(
        size={"height": 32, "width": 32},
        max_crops=4,
        overlap_margins=[1, 1],
        patch_size=8,
        pooling_size=[2, 2],
    )
    vp = cls("molmo2.video_processing_molmo2.Molmo2VideoProcessor")(
        size={"height": 32, "width": 32}, patch_size=8
    )
    save(
        f,
        tf.Molmo2ForConditionalGeneration(cfg),
        cls("molmo2.processing_molmo2.Molmo2Processor")(
            ip, vp, tok, chat_template=tpl("<|image|>")
        ),
    )


def save_ernie4_5_vl_moe(f: Path) -> None:
    sp = [
        "<pad>",
        "<|im_start|>",
        "<|im_end|>",
        "<|IMAGE_PLACEHOLDER|>",
        "<|IMAGE_START|>",
        "<|IMAGE_END|>",
        "<|VIDEO_PLACEHOLDER|>",
        "<|VIDEO_START|>",
        "<|VIDEO_END|>",
    ]
    tok = _tokenizer(
        sp,
        eos="<|im_end|>",
        pad="<pad>",
        image_token="<|IMAGE_PLACEHOLDER|>",
        image_start_token="<|IMAGE_START|>",
        image_end_token="<|IMAGE_END|>",
        video_token="<|VIDEO_PLACEHOLDER|>",
        video_start_token="<|VIDEO_START|>",
        video_end_token="<|VIDEO_END|>",
    )
    ids = _ids(
        tok,
        image_token_id="<|IMAGE_PLACEHOLDER|>",
        image_start_token_id="<|IMAGE_START|>",
        image_end_token_id="<|IMAGE_END|>",
        video_token_id="<|VIDEO_PLACEHOLDER|>",
        video_start_token_id="<|VIDEO_START|>",
        video_end_token_id="<|VIDEO_END|>",
    )
    t = {k: v for k, v in TEXT.items() if k != "head_dim"}
    text = {
        **t,
        "vocab_size": len(tok),
        "moe_intermediate_size": [16, 12],
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "mlp_layer_types": ["sparse", "sparse"],
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    }
    cfg = tf.Ernie4_5_VLMoeConfig(
        text_config=text,
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_merge_size": 2,
        },
        **ids,
    )
    ip = cls(
        "ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe.Ernie4_5_VLMoeImageProcessorPil"
    )(patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600})
    vp = cls(
        "ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe.Ernie4_5_VLMoeVideoProcessor"
    )(patch_size=8, draw_on_frames=False)
    save(
        f,
        tf.Ernie4_5_VLMoeForConditionalGeneration(cfg),
        cls("ernie4_5_vl_moe.processing_ernie4_5_vl_moe.Ernie4_5_VLMoeProcessor")(
            ip,
            tok,
            vp,
            chat_template=tpl("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
        ),
    )


def save_step3p7(f: Path) -> None:
    sp = [
        *BASE,
        "<im_patch>",
        "<patch_start>",
        "<patch_end>",
        "<patch_newline>",
        "<im_start>",
        "<im_end>",
    ]
    tok = _tokenizer(sp, eos="<|im_end|>", pad="<pad>")
    text = {
        **TEXT,
        "vocab_size": len(tok),
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "share_expert_dim": 16,
    }
    cfg = tf.Step3p7Config(
        text_config=text,
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
            "mlp_ratio": 2.0,
            "max_position_embeddings": 64,
        },
        **_ids(tok, image_token_id="<im_patch>"),
    )
    ip = cls("step3p7.image_processing_step3p7.Step3p7ImageProcessor")(
        size={"height": 64, "width": 64},
        patch_size=32,
        vision_patch_size=8,
        downsampler_stride=4,
    )
    save(
        f,
        tf.Step3p7ForConditionalGeneration(cfg),
        cls("step3p7.processing_step3p7.Step3p7Processor")(
            ip, tok, chat_template=tpl("<im_patch>")
        ),
    )


def _muse(f, v, text):
    sp = [
        *BASE,
        "<|patch|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|video|>",
        "<|vid_frame_separator|>",
        "<|vid_start|>",
        "<|vid_end|>",
    ]
    tok = _tokenizer(sp, eos="<|im_end|>", pad="<pad>")
    m = "muse_glimmer"
    cfg = getattr(tf, v + "Config")(
        text_config={
            **TEXT,
            "vocab_size": len(tok),
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            **text,
        },
        vision_config={
            "patch_size": 8,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
        },
        out_hidden_size=128,
        projector_hidden_size=32,
        **_ids(tok, image_token_id="<|patch|>", video_token_id="<|video|>"),
    )
    ip = cls(f"{m}.image_processing_{m}.MuseGlimmerImageProcessor")(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600}
    )
    vp = cls(f"{m}.video_processing_{m}.MuseGlimmerVideoProcessor")(patch_size=8)
    save(
        f,
        getattr(tf, v + "ForConditionalGeneration")(cfg),
        cls(f"{m}.processing_{m}.MuseGlimmerProcessor")(
            ip, vp, tok, chat_template=tpl("<|image_start|><|patch|><|image_end|>")
        ),
    )


def save_muse_glimmer(f: Path) -> None:
    _muse(f, "MuseGlimmer", {})


def save_cohere_compass(f: Path) -> None:
    sp = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|IMG_START|>",
        "<|IMG_END|>",
        "<|IMAGE_PAD|>",
        "<|VIDEO_PAD|>",
    ]
    names = {
        "image_token": "<|IMAGE_PAD|>",
        "video_token": "<|VIDEO_PAD|>",
        "vision_start_token": "<|IMG_START|>",
        "vision_end_token": "<|IMG_END|>",
    }
    tok = _tokenizer(sp, eos="<|im_end|>", pad="<|endoftext|>", **names)
    ids = _ids(
        tok,
        image_token_id="<|IMAGE_PAD|>",
        video_token_id="<|VIDEO_PAD|>",
        vision_start_token_id="<|IMG_START|>",
        vision_end_token_id="<|IMG_END|>",
    )
    cfg = tf.CohereCompassConfig(
        text_config={
            **TEXT,
            "vocab_size": len(tok),
            "rope_parameters": {"full_attention": ROPE},
            "layer_types": ["full_attention", "full_attention"],
        },
        vision_config={**Q3V, "deepstack_visual_indexes": [0, 1]},
        **ids,
    )
    ip = cls("qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil")(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600}
    )
    vp = cls("qwen3_vl.video_processing_qwen3_vl.Qwen3VLVideoProcessor")(patch_size=8)
    save(
        f,
        tf.CohereCompassForConditionalGeneration(cfg),
        cls("cohere_compass.processing_cohere_compass.CohereCompassProcessor")(
            ip, tok, vp, chat_template=tpl("<|IMG_START|><|IMAGE_PAD|><|IMG_END|>")
        ),
    )


def save_gemma4_unified(f: Path) -> None:
    _gemma4(
        f,
        {"hidden_size_per_layer_input": 0},
        "Gemma4Unified",
        {
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "mm_embed_dim": 32,
            "mm_posemb_size": 64,
            "output_proj_dims": 32,
        },
    )


def save_minimax_m3_vl(f: Path) -> None:
    sp = [
        *BASE,
        "]<]image[>[",
        "]<]video[>[",
        "]<]start of image[>[",
        "]<]end of image[>[",
    ]
    tok = _tokenizer(sp, eos="<|im_end|>", pad="<pad>")
    text = {
        **TEXT,
        "vocab_size": len(tok),
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 16,
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "full_attention"],
    }
    cfg = tf.MiniMaxM3VLConfig(
        text_config=text,
        vision_config={
            "hidden_size": 48,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 8,
        },
        projector_hidden_size=32,
        **_ids(tok, image_token_index="]<]image[>[", video_token_index="]<]video[>["),
    )
    ip = cls("minimax_m3_vl.image_processing_minimax_m3_vl.MiniMaxM3VLImageProcessor")(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600}
    )
    vp = cls("minimax_m3_vl.video_processing_minimax_m3_vl.MiniMaxM3VLVideoProcessor")(
        patch_size=8
    )
    save(
        f,
        tf.MiniMaxM3SparseForConditionalGeneration(cfg),
        cls("minimax_m3_vl.processing_minimax_m3_vl.MiniMaxM3VLProcessor")(
            ip, tok, vp, chat_template=tpl("]<]image[>[")
        ),
    )


def save_step3p7_crops_first(f: Path) -> None:
    save_step3p7(f)


def save_hyperclovax(f: Path) -> None:
    tok = _tokenizer(
        QWEN,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
    )
    t = {k: v for k, v in TEXT.items() if k != "head_dim"}
    cfg = tf.HyperCLOVAXVisionV2Config(
        text_config={**t, "vocab_size": len(tok), "attention_multiplier": 0.3},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        **_ids(tok, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
    )
    ip = cls("qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil")(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 1600}
    )
    vp = cls("qwen2_vl.video_processing_qwen2_vl.Qwen2VLVideoProcessor")(patch_size=8)
    save(
        f,
        tf.HyperCLOVAXVisionV2ForConditionalGeneration(cfg),
        cls(
            "hyperclovax_vision_v2.processing_hyperclovax_vision_v2.HyperCLOVAXVisionV2Processor"
        )(ip, tok, vp, chat_template=QWEN_TEMPLATE),
    )


def save_janus(f: Path) -> None:
    names = {
        "image_token": "<image_placeholder>",
        "boi_token": "<begin_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tok = _tokenizer(
        BASE + list(names.values()), eos="<|im_end|>", pad="<pad>", **names
    )
    cfg = tf.JanusConfig(
        text_config={**LTEXT, "vocab_size": len(tok)},
        vision_config={
            **VISION,
            "projection_dim": 32,
            "num_image_tokens": 16,
            "depth": 2,
        },
        vq_config={
            "embed_dim": 8,
            "num_embeddings": 16,
            "latent_channels": 16,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "num_patches": 4,
            "projection_dim": 32,
            "image_token_embed_dim": 32,
        },
        **_ids(tok, image_token_id="<image_placeholder>"),
    )
    ip = cls("janus.image_processing_pil_janus.JanusImageProcessorPil")(
        size={"height": 32, "width": 32}, min_size=14
    )
    save(
        f,
        tf.JanusForConditionalGeneration(cfg),
        tf.JanusProcessor(
            ip, tok, num_image_tokens=16, chat_template=tpl("<image_placeholder>")
        ),
    )


def _internvl(f, text):
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    tok = _tokenizer(
        INTERN, eos="<|im_end|>", pad="<pad>", video_token="<video>", **names
    )
    cfg = tf.InternVLConfig(
        text_config={**TEXT, "vocab_size": len(tok), **text},
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        image_seq_length=4,
        **_ids(tok, image_token_id="<IMG_CONTEXT>"),
    )
    ip = cls("got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil")(
        size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4
    )
    save(
        f,
        tf.InternVLForConditionalGeneration(cfg),
        tf.InternVLProcessor(
            ip,
            tok,
            cls("internvl.video_processing_internvl.InternVLVideoProcessor")(
                size={"height": 32, "width": 32}
            ),
            image_seq_length=4,
            chat_template=CHAT_TEMPLATE.replace("<image>", "<IMG_CONTEXT>"),
        ),
    )


def save_internvl_gpt_oss(f: Path) -> None:
    _internvl(
        f,
        {
            "model_type": "gpt_oss",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )


def save_internvl_qwen3_moe(f: Path) -> None:
    _internvl(
        f,
        {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    )


def save_internvl_deepseek_v3(f: Path) -> None:
    _internvl(
        f,
        {
            "model_type": "deepseek_v3",
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_key_value_heads": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "qk_nope_head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    )


def save_internvl_mamba(f: Path) -> None:
    _internvl(
        f,
        {
            "model_type": "falcon_h1",
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 8,
        },
    )


ZOO = (
    *VLM_FAMILIES,
    *(
        name.removeprefix("save_")
        for name in [*globals()]
        if name.startswith("save_") and name != "save_vlm"
    ),
)


def make(name: str, folder: Path) -> Path:
    """Write the model of that name to ``folder``; return the folder."""
    if name in VLM_FAMILIES:
        return save_vlm(name, folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    globals()[f"save_{name}"](folder)
    return folder
