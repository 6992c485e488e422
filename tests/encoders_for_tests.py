"""Tiny pretrained encoders: saved by Transformers, and classes of one's own."""

import re
from itertools import pairwise

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from rewards.clip.preprocessing import Preprocessing
from rl_caption.data.scenes import ScenesData

SIDE = 32
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
VISION = {
    **TOWER,
    "image_size": SIDE,
    "patch_size": 8,
    "initializer_range": 0.3,
}
HALF = (0.5, 0.5, 0.5)


def save_vit(folder, seed=0, pooler=True):
    """Save a ViT with its image processor; return its name as an encoder."""
    torch.manual_seed(seed)
    ViTModel(ViTConfig(**VISION), add_pooling_layer=pooler).save_pretrained(folder)
    ViTImageProcessor(
        size={
            "height": SIDE,
            "width": SIDE,
        }
    ).save_pretrained(folder)
    return f"transformers:{folder}"


class MeanColours(nn.Module):
    """An encoder of one's own: the mean colour of each cell of a grid, times ``gain``,
    which is its one weight.
    """

    preprocessing = Preprocessing(
        SIDE,
        (0.0,) * 3,
        (1.0,) * 3,
        "bilinear",
        "squash",
    )

    def __init__(self, gain=1.0):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(float(gain)))

    def forward(self, pixels):
        return self.gain * nn.functional.avg_pool2d(pixels, 8).permute(0, 2, 3, 1)


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


class TinyImageEncoder(nn.Module):
    """Three convolutions with batch norm, their weights given by ``seed``: [B, 3, 32,
    32] -> [B, 4, 4, 12].
    """

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            widths = (3, 6, 8, 12)
            self.stages = nn.ModuleList(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(widths)
            )
        self.preprocessing = Preprocessing(
            32, (0.5,) * 3, (0.5,) * 3, "bilinear", "squash"
        )

    def forward(self, pixels):
        for stage in self.stages:
            pixels = stage(pixels)
        return pixels.permute(0, 2, 3, 1)


def save_text_encoder(folder):
    """Save a random BERT of two layers, with a tokenizer of the generated world's
    words; returns its name.
    """
    rows = ScenesData(num_train=32, num_val=6, num_test=0, num_unseen=0, image_size=32)[
        "train"
    ]
    captions = " ".join(caption for row in rows for caption in row["references"])
    words = [*SPECIAL, *sorted(set(re.findall(r"\w+|[^\w\s]+", captions)))]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(ids, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=48,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    shape = TOWER | {
        "num_hidden_layers": 2,
        "max_position_embeddings": 48,
    }
    config = BertConfig(vocab_size=len(words), **shape)
    BertModel(config).save_pretrained(folder)
    return f"transformers:{folder}"
