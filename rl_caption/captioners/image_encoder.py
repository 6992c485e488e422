"""The image encoder of a trained captioner, as the image tower of a dual encoder."""

from pathlib import Path

from torch import Tensor, nn

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import as_grid
from rl_caption.captioners.modeling import CaptionTransformer
from rl_caption.captioners.transformer import (
    PIXEL_MEAN,
    PIXEL_STD,
    TransformerCaptioner,
    read_config,
)


class CaptionerImage(nn.Module):
    """The encoder of a from-scratch captioner as an ``ImageEncoder``: pixels [B, 3, S, S] to states
    [B, H, W, D].

    In a configuration: ``model.image: {encoder:
    "rl_caption.captioners.image_encoder:CaptionerImage", kwargs: {model: FOLDER}}``. A captioner
    has learnt to name what is in an image, which a contrastive loss hardly learns from a small set
    of pairs.

    Args:
        model: folder of an exported captioner.
        pretrained: False reads its ``config.json`` alone and leaves the weights random, for others
            to be loaded.

    Raises:
        OSError, ValueError: the folder holds no such captioner, or one that reads region features.
    """

    def __init__(self, model: str, pretrained: bool = True) -> None:
        super().__init__()
        if pretrained:
            policy = TransformerCaptioner.from_pretrained(model).policy
        else:
            policy = CaptionTransformer(read_config(Path(model) / "config.json"))
        config = policy.config
        if config.input_kind != "pixels":
            raise ValueError(f"{model} reads {config.input_kind}: expected pixels")
        self.encoder, self.built_from = policy.encoder, (config,)
        self.preprocessing = Preprocessing(
            config.image_size,
            (PIXEL_MEAN,) * 3,
            (PIXEL_STD,) * 3,
            "bicubic",
            resize="squash",
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """States [B, H, W, D] of the patches of ``pixels`` [B, 3, S, S]."""
        return as_grid(self.encoder(pixel_values=pixels).last_hidden_state)
