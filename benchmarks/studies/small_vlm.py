"""A vision-language model of FastVLM's architecture that one CPU thread can train, for photos of a data set.

    python -m benchmarks.studies.small_vlm --data data/flickr8k --out runs/flickr8k/vlm/start

Its vision tower is EfficientNet-Lite0 with ImageNet weights (``benchmarks.studies.efficientnet_lite`` says where from),
its projector the principal components of the tower's features of training photos: both are to be frozen. The language
model has random weights, and a byte-level BPE of the training captions. Needs timm.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks.studies.efficientnet_lite import EfficientNetLite

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<image>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SIDE, CELL = 160, 32
"""Pixels of a photo's side, and of a visual token's."""
TEXT = {"model_type": "qwen2", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
        "tie_word_embeddings": True}  # fmt: skip
TOWER = {"model_type": "timm_wrapper", "architecture": "tf_efficientnet_lite0", "hidden_size": 1280, "num_classes": 0,
         "model_args": {"global_pool": ""}, "initializer_range": 0.02}  # fmt: skip


def train_tokenizer(captions: Sequence[str], size: int) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE of at most ``size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(captions, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<|im_start|>", eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip


def pretrained_tower() -> dict[str, Tensor]:
    """The weights of EfficientNet-Lite0 by timm's names, which come in the same order."""
    import timm

    networks = timm.create_model(TOWER["architecture"], num_classes=0), EfficientNetLite(0).model
    states = [network.state_dict() for network in networks]
    names, tensors = (
        [key for key in state if not key.endswith("num_batches_tracked")] for state in states
    )
    return dict(zip(names, (states[1][key] for key in tensors), strict=True))


@torch.no_grad()
def principal_components(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [D, 1280] and bias [D]: of the features' components, each with the root of its deviation."""
    features = model.vision_tower(pixels).last_hidden_state.flatten(2).movedim(1, 2).flatten(0, 1)
    mean, width = features.mean(0), TEXT["hidden_size"]
    _, deviations, components = torch.linalg.svd(features - mean, full_matrices=False)
    weight = components[:width] / deviations[:width, None].sqrt()
    weight *= 0.05 / ((features - mean) @ weight.T).std()
    return weight, -weight @ mean


def save_model(
    folder: str | Path, captions: Sequence[str], photos: Sequence[Path], vocabulary: int, seed: int
) -> int:
    """Write the model and its processor; return the number of its weights."""
    tokenizer = train_tokenizer(captions, vocabulary)
    images = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
    )
    config = transformers.FastVlmConfig(
        vision_config=TOWER, text_config={**TEXT, "vocab_size": len(tokenizer)}, projector_hidden_act="linear",
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.FastVlmForConditionalGeneration(config).eval()
    tower = model.model.vision_tower
    tower.timm_model.load_state_dict(pretrained_tower(), strict=False)
    pixels = images([Image.open(photo).convert("RGB") for photo in photos], return_tensors="pt")[
        "pixel_values"
    ]
    projector = model.model.multi_modal_projector
    weight, bias = principal_components(model.model, pixels)
    second = torch.eye(len(bias)), torch.zeros_like(bias)
    for linear, values in ((projector.linear_1, (weight, bias)), (projector.linear_2, second)):
        linear.weight.data, linear.bias.data = values
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, help="a folder with dataset.json in Karpathy's format, and images/"
    )
    parser.add_argument("--out", required=True, help="folder of the model")
    options = parser.parse_args()
    rows = json.loads((Path(options.data) / "dataset.json").read_text(encoding="utf-8"))["images"]
    rows = [row for row in rows if row["split"] == "train"]
    photos = [Path(options.data) / "images" / row["filename"] for row in rows[:200]]
    captions = [sentence["raw"] for row in rows for sentence in row["sentences"]]
    count = save_model(options.out, captions, photos, vocabulary=3000, seed=0)
    print(f"{options.out}: {count / 1e6:.1f} M weights")


if __name__ == "__main__":
    main()
