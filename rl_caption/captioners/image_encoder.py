"""The image encoder of a trained captioner, as the image tower of a dual encoder."""

from __future__ import annotations

from torch import Tensor, nn

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import as_grid
from rl_caption.captioners.transformer import PIXEL_MEAN, PIXEL_STD, TransformerCaptioner


class CaptionerImage(nn.Module):
    """An ``ImageEncoder``: pixels [B, 3, S, S] -> states [B, H, W, D] of a from-scratch captioner over pixels.

    ``model.image: {encoder: "rl_caption.captioners.image_encoder:CaptionerImage", kwargs: {model: FOLDER}}``. The
    captioner has learnt to name what is in an image, which a small set of pairs hardly teaches a contrastive loss. A
    dual encoder that was trained from it names the folder, which has to stay where it is.

    Args:
        model: an exported captioner.

    Raises:
        OSError, ValueError: the folder holds no such captioner, or one over region features or over several frames.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        policy = TransformerCaptioner.from_pretrained(model).policy
        config = policy.config
        if config.input_kind != "pixels" or config.num_frames != 1:
            raise ValueError(f"{model} reads {config.input_kind} of {config.num_frames} images: expected pixels of one")
        self.encoder = policy.encoder
        self.preprocessing = Preprocessing(
            config.image_size, (PIXEL_MEAN,) * 3, (PIXEL_STD,) * 3, "bicubic", resize="squash"
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """The states of the patches, in their places."""
        return as_grid(self.encoder(pixel_values=pixels).last_hidden_state)
