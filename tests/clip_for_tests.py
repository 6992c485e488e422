"""Tiny dual encoders with random weights, saved as the real ones are, and test images."""

import json

import numpy as np
import open_clip
import torch
from PIL import Image

from rewards.clip.student import LCLIP, LCLIPConfig

ARCHITECTURE = "rl-caption-test-tiny"
TINY = {
    "embed_dim": 16,
    "vision_cfg": {
        "image_size": 32,
        "layers": 1,
        "width": 64,
        "patch_size": 16,
        "head_width": 32,
    },
    "text_cfg": {
        "context_length": 77,
        "vocab_size": 49408,
        "width": 16,
        "heads": 2,
        "layers": 2,
    },
}


class Drawn:
    """A renderable image that counts how often it is drawn."""

    def __init__(self, shade):
        self.shade = shade
        self.drawn = 0

    def render(self):
        self.drawn += 1
        return Image.new("RGB", (40, 40), (self.shade, 10, 200))


class Counted:
    """An encoder that counts the images and texts that it encodes."""

    def __init__(self, encoder):
        self.encoder = encoder
        self.images = 0
        self.texts = 0
        for name in ("fingerprint", "signature", "context_length", "count_tokens"):
            setattr(self, name, getattr(encoder, name))

    def encode_images(self, images):
        self.images += len(images)
        return self.encoder.encode_images(images)

    def encode_texts(self, texts):
        self.texts += len(texts)
        return self.encoder.encode_texts(texts)


def tiny_checkpoint(folder, seed=0):
    """Make the architecture known to open_clip and save a checkpoint of it; return the file."""
    path = folder / f"seed{seed}.pt"
    if not path.exists():
        (folder / f"{ARCHITECTURE}.json").write_text(json.dumps(TINY))
        open_clip.add_model_config(folder / f"{ARCHITECTURE}.json")
        torch.manual_seed(seed)
        torch.save(open_clip.create_model(ARCHITECTURE).state_dict(), path)
    return str(path)


def weights():
    """A state of the tiny architecture, with OpenAI's keys."""
    # The cosines of all rows are above 0 under this seed, with and without updates.
    torch.manual_seed(19)
    state = open_clip.CLIP(**TINY).state_dict()
    return {key: value.clone() for key, value in state.items()}


def low_rank_weights():
    """A state as PAC-S++ saves it: rank 4, factors of every weight of the blocks and of
    the patches' kernel.
    """
    state = weights()
    draw = torch.Generator().manual_seed(7)
    for key, weight in list(state.items()):
        if key == "visual.conv1.weight":
            rows, columns, rank = weight.shape[0] * 16, weight.shape[1] * 16, 4 * 16
        elif ".resblocks." in key and weight.ndim == 2:
            (rows, columns), rank = weight.shape, 4
        else:
            continue
        separate = key.endswith("in_proj_weight")
        owner = f"{key}_" if separate else key.removesuffix("weight")
        state[f"{owner}lora_A"] = 0.5 * torch.randn(rank, columns, generator=draw)
        state[f"{owner}lora_B"] = 0.5 * torch.randn(rows, rank, generator=draw)
    return state


def tiny_student(folder, pad_attention="masked"):
    """Save a student; return its folder."""
    torch.manual_seed(2)  # the cosines of the tests' rows are above 0
    config = LCLIPConfig(
        embed_dim=16,
        image_size=32,
        patch_size=16,
        image_width=32,
        image_heads=4,
        image_blocks=1,
        text_width=32,
        text_heads=4,
        text_blocks=1,
        embedding_rank=8,
        pad_attention=pad_attention,
    )
    LCLIP(config).save_pretrained(folder)
    return folder


def noise_image(seed, size=(50, 37), mode="RGB"):
    """Make an image of random pixels."""
    shape = (size[1], size[0], 3)
    values = np.random.default_rng(seed).integers(
        0,
        256,
        shape,
        dtype=np.uint8,
    )
    return Image.fromarray(values).convert(mode)
