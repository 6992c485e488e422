"""The image encoder of a trained captioner, as the image tower of a dual encoder."""

from pathlib import Path

from torch import Tensor, nn

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import as_grid
from rl_caption.captioners.modeling import CaptionTransformer
from rl_caption.captioners.transformer import PIXEL_MEAN, PIXEL_STD, TransformerCaptioner, read_config


class CaptionerImage(nn.Module):
    """An ``ImageEncoder``: pixels [B, 3, S, S] -> states [B, H, W, D] of a from-scratch captioner over pixels.

    ``model.image: {encoder: "rl_caption.captioners.image_encoder:CaptionerImage", kwargs: {model: FOLDER}}``. The
    captioner has learnt to name what is in an image, which a small set of pairs hardly teaches a contrastive loss.

    Args:
        model: an exported captioner.
        pretrained: False takes its ``config.json`` alone; the weights are random, those of a file follow.

    Raises:
        OSError, ValueError: the folder holds no such captioner, or one over region features or over several frames.
    """

    def __init__(self, model: str, pretrained: bool = True) -> None:
        super().__init__()
        if pretrained:
            policy = TransformerCaptioner.from_pretrained(model).policy
        else:
            policy = CaptionTransformer(read_config(Path(model) / "config.json"))
        config = policy.config
        if config.input_kind != "pixels" or config.num_frames != 1:
            raise ValueError(f"{model} reads {config.input_kind} of {config.num_frames} images: expected pixels of one")
        self.encoder, self.built_from = policy.encoder, (config,)
        self.preprocessing = Preprocessing(
            config.image_size, (PIXEL_MEAN,) * 3, (PIXEL_STD,) * 3, "bicubic", resize="squash"
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """The states of the patches, in their places."""
        return as_grid(self.encoder(pixel_values=pixels).last_hidden_state)
