"""Tiny decoder-only vision-language models with random weights, saved as the real ones are."""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AddedToken,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

WORDS = (
    "a an the and is are on in of left right red green blue yellow white black gray "
    "brown small large circle square triangle star diamond cross two three . describe "
    "this image in one sentence what do you see ? user assistant system User : "
    "Assistant"
)


BANNED = range(12, 48)
"""Ids that the generation settings of the tiny Qwen2-VL never write."""


CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in "
    "message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'text' %}{{ part['text'] }}{% "
    "endif %}{% endfor %}"
    "{% endif %}"
)


QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    + CONTENT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


IDEFICS_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }} : "
    + CONTENT.replace("IMAGE", "<image>")
    + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant :{% endif %}"
)


def tiny_qwen2_vl(folder: Path, patch_size: int = 8) -> Path:
    """Save a Qwen2-VL of 64 thousand parameters with its processor; return its folder."""
    names = "endoftext im_start im_end vision_start vision_end image_pad video_pad"
    tokenizer = word_tokenizer(
        [f"<|{name}|>" for name in names.split()], pad="<|endoftext|>", eos="<|im_end|>"
    )
    ids = dict(zip(names.split(), range(7), strict=True))
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
                       "patch_size": patch_size},
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"], vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )  # fmt: skip
    policy = Qwen2VLForConditionalGeneration(config)
    # As the real one: two ids that end, and sampling settings that a training must not inherit.
    policy.generation_config.update(
        eos_token_id=[ids["im_end"], ids["endoftext"]], pad_token_id=ids["endoftext"], do_sample=True, top_k=1,
        bad_words_ids=[[token] for token in BANNED],
    )  # fmt: skip
    policy.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        size={
            "shortest_edge": (2 * patch_size) ** 2,
            "longest_edge": (4 * patch_size) ** 2,
        },
    )
    videos = Qwen2VLVideoProcessor(patch_size=patch_size)
    Qwen2VLProcessor(
        images, tokenizer, videos, chat_template=QWEN_TEMPLATE
    ).save_pretrained(folder)
    return folder


def tiny_idefics3(folder: Path) -> Path:
    """Save an Idefics3 (the architecture of SmolVLM 1) of 42 thousand parameters with
    its processor.
    """
    specials = [
        "<|im_start|>",
        "<end_of_utterance>",
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<pad>",
    ]
    tokenizer = word_tokenizer(
        specials, pad="<pad>", eos="<end_of_utterance>", bos="<|im_start|>"
    )
    # As the real one: special, yet not in the list of special tokens.
    places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_tokens([AddedToken(place, special=True) for place in places])
    torch.manual_seed(0)
    config = Idefics3Config(
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0,
            "eos_token_id": 1, "pad_token_id": 5,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8,
        },
        image_token_id=2, scale_factor=2,
    )  # fmt: skip
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )  # 4 + 1 tiles
    Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=IDEFICS_TEMPLATE
    ).save_pretrained(folder)
    return folder


def word_tokenizer(
    specials: list[str],
    pad: str,
    eos: str,
    bos: str | None = None,
    words: str = "",
    **named: str,
) -> PreTrainedTokenizerFast:
    """A tokenizer of the whole words in ``WORDS`` and ``words``; ``named`` special
    tokens are attributes, too.
    """
    vocabulary = dict.fromkeys([*specials, "<unk>", *WORDS.split(), *words.split()])
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    others = [word for word in specials if word not in (pad, eos, bos)]
    names = {"pad_token": pad, "eos_token": eos, "bos_token": bos, "unk_token": "<unk>"}
    if not named:
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, additional_special_tokens=others, **names
        )
    tokenizer.add_special_tokens(others)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, extra_special_tokens=named, **names
    )


def answering_vlm(
    folder: Path, tiny_vlm: Callable[[Path], Path] = tiny_qwen2_vl
) -> Path:
    """A ``tiny_vlm`` whose vocabulary also has the digits, Yes and No; return its folder."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    tiny_vlm(folder)
    processor, policy = (
        AutoProcessor.from_pretrained(folder),
        AutoModelForImageTextToText.from_pretrained(folder),
    )
    processor.tokenizer.add_tokens([*"0123456789", "Yes", "No"])
    torch.manual_seed(1)
    policy.resize_token_embeddings(len(processor.tokenizer), mean_resizing=False)
    torch.nn.init.normal_(policy.get_output_embeddings().weight, std=0.5)
    policy.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
