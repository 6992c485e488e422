"""A text encoder with a grammar head: is a caption a sentence that a person would write, or a broken one?

Source: Cho et al., "Fine-grained Image Captioning with CLIP Reward", Findings of NAACL 2022, whose head is an MLP over
CLIP's pooled text feature, trained together with the text encoder. Here the head sees the state of every token and of
its neighbours, because the pooled feature of a frozen encoder that was trained to match images tells little of the
order of words.

Shapes: B batch, L tokens, D width of the encoder, H hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from rewards.clip.preprocessing import clip_tokenizer
from rewards.clip.pretrained import (
    ClipText,
    load_text_encoder,
    local_encoder,
    save_encoder_config,
    text_width,
)
from rewards.clip.student import LCLIPConfig, TextStudent
from rewards.model_files import (
    check_folder,
    check_sizes,
    check_state,
    float_state,
    load_weights,
    read_config,
    read_object,
    read_weights,
    save_model,
    state_shapes,
)
from rewards.options import Range, check_fields

MODEL_TYPE = "grammar_head"
STUDENT = "rewards.clip.grammar_head:StudentText"
"""Name of the text encoder that is the text tower of an L-CLIP; its arguments are those of ``LCLIPConfig``."""
_TOWERS = {"l_clip": "text.", "l_clip_text": ""}
"""``model_type`` of what has such a tower -> prefix of its weights."""


class StudentText(ClipText):
    """The text tower of an L-CLIP as a ``TextEncoder`` (``rewards.clip.pretrained``): its states, without its head."""

    def __init__(self, **shape: Any) -> None:
        config = LCLIPConfig(**shape)
        super().__init__(clip_tokenizer(), config.context_length)
        self.model = TextStudent(config)
        self.model.add_module(
            "head", nn.Identity()
        )  # of joint embeddings, which nothing here reads

    def tokenize(self, texts: Sequence[str], context_length: int) -> Tensor:
        """See ``TextEncoder``; where padding is attended, to the longest that the tower reads."""
        if self.model.config.pad_attention == "full":
            return self.tokenizer(list(texts), context_length=self.context_length)
        return super().tokenize(texts, context_length)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, L] -> [B, L, D]."""
        return self.model.norm(self.model.states(ids))


@dataclass(frozen=True)
class GrammarConfig:
    """Encoder and shape of a ``GrammarModel``. Raises ``ValueError`` for values out of range."""

    text: str
    """Text encoder (``rewards.clip.pretrained``), or ``STUDENT``."""
    text_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``text`` if it is a class."""
    hidden: Annotated[int, Range(min=1, max=2**16)] = 256
    """Hidden units H."""
    kernel: Annotated[int, Range(min=1, max=31)] = 3
    """Tokens that a hidden unit sees, odd: 3 is a token and its neighbours, 1 the token alone."""
    dropout: Annotated[float, Range(min=0, max=0.99)] = 0.1
    """Dropout of the hidden units, in training."""
    context_length: Annotated[int, Range(min=3, max=2**16)] = 77
    """Most tokens of a caption, special ones included; fewer where the text encoder has fewer positions."""

    def __post_init__(self) -> None:
        check_sizes(asdict(self))
        check_fields(self)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel is {self.kernel}: expected an odd number")


class GrammarModel(nn.Module):
    """Logit of the probability that a caption is well-formed.

    z = wᵀ [max_t h_t; mean_t h_t] + b with h_t = GELU(Conv(LN(x))_t), over the states x of the caption's tokens,
    special ones included.

    Args:
        config: encoder and shape.
        pretrained: False leaves the encoder's weights random if the library allows it, for weights loaded later.

    Raises:
        ValueError: the encoder cannot be loaded.
    """

    def __init__(self, config: GrammarConfig, pretrained: bool = True) -> None:
        super().__init__()
        self.config = config
        self.text_encoder: Any = load_text_encoder(config.text, config.text_kwargs, pretrained)
        width = text_width(self.text_encoder)
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, config.hidden, config.kernel, padding=config.kernel // 2)
        self.dropout = nn.Dropout(config.dropout)
        self.out = nn.Linear(2 * config.hidden, 1)

    @property
    def context_length(self) -> int:
        """Longest caption in tokens."""
        return min(self.config.context_length, self.text_encoder.context_length)

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Captions -> ids [B, L], padded; longer ones are cut to ``context_length``."""
        return self.text_encoder.tokenize(texts, self.context_length)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [B, L] -> logits [B]."""
        states, lengths = self.text_encoder(ids), self.text_encoder.lengths(ids)
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None])[..., None]
        hidden = self.conv((self.norm(states) * mask).transpose(1, 2)).transpose(1, 2)
        hidden = self.dropout(nn.functional.gelu(hidden))
        largest = hidden.masked_fill(~mask, float("-inf")).amax(dim=1)
        mean = (hidden * mask).sum(dim=1) / lengths[:, None].to(hidden.dtype)
        return self.out(torch.cat([largest, mean], dim=1))[:, 0]

    def train(self, mode: bool = True) -> GrammarModel:
        """Set the mode; an encoder without trainable parameters stays in evaluation mode (dropout)."""
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.text_encoder.parameters()):
            self.text_encoder.eval()
        return self

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``model.safetensors``, ``config.json`` and the files that the encoder is built from to ``path``."""
        folder = Path(path)
        save_encoder_config(self.text_encoder, folder / "text_encoder")
        save_model(float_state(self), {"model_type": MODEL_TYPE, **asdict(self.config)}, folder)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> GrammarModel:
        """Load a folder that ``save_pretrained`` wrote, on the CPU, in evaluation mode.

        Raises as ``read_config``, ``load_weights`` and ``load_text_encoder``.
        """
        folder = Path(path)
        config = read_config(GrammarConfig, folder, MODEL_TYPE)
        text, text_kwargs = local_encoder(config.text, config.text_kwargs, folder / "text_encoder")
        model = cls(replace(config, text=text, text_kwargs=text_kwargs), pretrained=False)
        model.config = config
        return load_weights(model, folder).requires_grad_(False).eval()

    @classmethod
    def over_student(cls, path: str | Path, **options: Any) -> GrammarModel:
        """Put a random head on the text tower of a saved L-CLIP, or of the text model of its stage 1.

        ``options`` are fields of ``GrammarConfig``.

        Raises:
            OSError: a file is missing.
            ValueError: the folder holds another model, or differs from its manifest.
        """
        folder = Path(path)
        check_folder(folder)
        values = read_object(folder / "config.json")
        prefix = _TOWERS.get(str(values.get("model_type")))
        if prefix is None:
            raise ValueError(
                f"{str(folder)!r} is a {values.get('model_type')!r}: expected one of {sorted(_TOWERS)}"
            )
        keys = {option.name for option in fields(LCLIPConfig)}
        shape = {
            key: value
            for key, value in values.items()
            if key in keys and not key.startswith(("image", "patch"))
        }
        model = cls(GrammarConfig(STUDENT, shape, **options))
        tower = model.text_encoder.model
        weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in read_weights(folder / "model.safetensors").items()
            if name.startswith(prefix) and not name.removeprefix(prefix).startswith("head.")
        }
        check_state(weights, state_shapes(tower, floats_only=True), f"weights in {str(folder)!r}")
        tower.load_state_dict(weights)
        return model
