"""Tiny captioners with random weights, saved as the real ones are: BLIP, GIT, pairs of
encoder and decoder, Q-Formers, Florence-2.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Florence2Processor,
    GitConfig,
    GitForCausalLM,
    GitProcessor,
    GPT2Config,
    InstructBlipConfig,
    InstructBlipForConditionalGeneration,
    InstructBlipProcessor,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessor,
)

from tests.zoo.language_models import bert_tokenizer, byte_tokenizer

SIDE = 16


SIZE = {"height": SIDE, "width": SIDE}


VISION = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
    "initializer_range": 0.5,  # BLIP's own 1e-10 would leave a random model blind
}


TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}


Q_FORMER = {**TEXT, "hidden_size": 20, "intermediate_size": 32, "vocab_size": 64}


def save_blip(folder: Path) -> None:
    """As Salesforce/blip-image-captioning-base: two tokens beyond BERT's vocabulary, EOS is [SEP]."""
    tokenizer = bert_tokenizer()
    size = len(tokenizer)
    text = {
        **TEXT,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.1,
    }
    text |= {
        "vocab_size": size + 2,
        "bos_token_id": size,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    text["sep_token_id"] = tokenizer.sep_token_id
    config = BlipConfig(
        text_config=text,
        vision_config=VISION,
        label_smoothing=0.1,
        initializer_range=0.3,
    )
    BlipForConditionalGeneration(config).save_pretrained(folder)
    BlipProcessor(BlipImageProcessor(size=SIZE), tokenizer).save_pretrained(folder)


def save_git(folder: Path) -> None:
    """As microsoft/git-base-coco: the image as a prefix, [CLS] and [SEP]."""
    tokenizer = bert_tokenizer()
    config = GitConfig(
        **TEXT,
        vision_config={**VISION, "num_channels": 3},
        vocab_size=len(tokenizer),
        intermediate_size=48,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )
    GitForCausalLM(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIZE)
    GitProcessor(images, tokenizer).save_pretrained(folder)


def save_vit_gpt2(folder: Path) -> None:
    """As nlpconnect/vit-gpt2-image-captioning: one token starts, ends and pads; widths differ."""
    end = "<|endoftext|>"
    tokenizer = byte_tokenizer(end, end, None, starts=False)
    decoder = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        add_cross_attention=True,
        is_decoder=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    save_pair(folder, decoder, tokenizer, start=0, eos=0, pad=0)


def save_vit_bert(folder: Path) -> None:
    """A BERT decoder: [CLS] starts, [SEP] ends, [PAD] pads."""
    tokenizer = bert_tokenizer()
    decoder = BertConfig(
        **TEXT,
        vocab_size=len(tokenizer),
        intermediate_size=48,
        max_position_embeddings=32,
        add_cross_attention=True,
        is_decoder=True,
    )
    save_pair(
        folder, decoder, tokenizer, tokenizer.cls_token_id, tokenizer.sep_token_id, 0
    )


def save_pair(
    folder: Path, decoder: Any, tokenizer: Any, start: int, eos: int, pad: int
) -> None:
    encoder = ViTConfig(**VISION)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.eos_token_id, config.pad_token_id = (
        start,
        eos,
        pad,
    )
    VisionEncoderDecoderModel(config).save_pretrained(folder)
    ViTImageProcessor(size=SIZE).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_blip2(folder: Path) -> None:
    """As Salesforce/blip2-opt-2.7b: </s> starts, a line break ends, <image> tokens
    stand for the queries.
    """
    tokenizer = byte_tokenizer("</s>", "</s>", "<pad>", starts=True)
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    processor = Blip2Processor(
        BlipImageProcessor(size=SIZE), tokenizer, num_query_tokens=3
    )
    config = Blip2Config(
        vision_config=VISION,
        qformer_config=Q_FORMER,
        text_config=OPTConfig(
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=40,
            init_std=0.3,
            vocab_size=len(tokenizer)
            + 5,  # OPT's output layer is wider than its vocabulary
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=newline,
            pad_token_id=tokenizer.pad_token_id,
        ).to_dict(),
        num_query_tokens=3,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    save_with_queries(Blip2ForConditionalGeneration(config), folder)
    processor.save_pretrained(folder)


def save_instructblip(folder: Path) -> None:
    """As Salesforce/instructblip-vicuna-7b, on Llama: the configuration's EOS does not
    fit the tokenizer.
    """
    tokenizer = byte_tokenizer("<s>", "</s>", "<pad>", starts=True)
    images = BlipImageProcessor(size=SIZE)
    processor = InstructBlipProcessor(
        images, tokenizer, bert_tokenizer(), num_query_tokens=3
    )
    config = InstructBlipConfig(
        vision_config=VISION,
        qformer_config=Q_FORMER,
        text_config=LlamaConfig(
            **TEXT,
            intermediate_size=48,
            vocab_size=len(tokenizer) + 5,
            max_position_embeddings=40,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=9,
            pad_token_id=tokenizer.pad_token_id,
        ).to_dict(),
        num_query_tokens=3,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    save_with_queries(InstructBlipForConditionalGeneration(config), folder)
    processor.save_pretrained(folder)


def save_florence2(folder: Path) -> None:
    """As florence-community/Florence-2-base: DaViT, BART; ``generate`` forces <s> after </s>."""
    plain = byte_tokenizer("<s>", "</s>", "<pad>", starts=True)
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "pad_token": "<pad>",
    }
    words = plain.backend_tokenizer
    words.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, extra_special_tokens={"image_token": "<image>"}, **names
    )
    images = CLIPImageProcessor(size=SIZE, crop_size=SIZE)
    images.image_seq_length = 5
    ids = {
        name: getattr(tokenizer, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    text = {
        "model_type": "bart",
        "vocab_size": len(tokenizer),
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
        "init_std": 0.3,
        "decoder_start_token_id": ids["eos_token_id"],
        "forced_bos_token_id": ids["bos_token_id"],
        **ids,
    }
    vision = {
        "depths": [1, 1],
        "patch_size": [3, 3],
        "patch_stride": [4, 2],
        "patch_padding": [1, 1],
    }
    vision |= {
        "patch_prenorm": [False, True],
        "embed_dim": [8, 16],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
    }
    vision |= {
        "window_size": 2,
        "drop_path_rate": 0.0,
        "projection_dim": 32,
        "initializer_range": 0.3,
    }
    config = Florence2Config(
        text_config=text, vision_config=vision, image_token_id=tokenizer.image_token_id
    )
    model = Florence2ForConditionalGeneration(config)
    model.generation_config.update(
        decoder_start_token_id=ids["eos_token_id"],
        forced_bos_token_id=ids["bos_token_id"],
        no_repeat_ngram_size=3,
    )
    model.save_pretrained(folder)
    Florence2Processor(images, tokenizer).save_pretrained(folder)


def save_with_queries(model: Any, folder: Path) -> None:
    torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(folder)
