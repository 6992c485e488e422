"""Transformer blocks with weight multiplexing, as in MiniViT (Zhang et al. 2022), for the towers of L-CLIP.

Each block is run several times in a row. The projections and the MLP are the same each time; the norms and the head
mixers before and after the softmax belong to one repeat. Dropout and relative positions are off in L-CLIP, and so is
MiniViT's transformation of the MLP: they are not here.

Shapes: B batch, N tokens, H heads, D head width, W tower width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02
"""Standard deviation of the truncated normal that linear layers, head mixers, positions and the class token start at.

The mixers do not start as the identity: attention is nearly off at first."""


def head_mixed_attention(
    q: Tensor, k: Tensor, v: Tensor, mix_before: Tensor, mix_after: Tensor, blocked: Tensor | None = None
) -> Tensor:
    """Attention whose heads are mixed linearly before and after the softmax.

    S = mix_before · (q kᵀ / √D), P = mix_after · softmax(S), output P v. Rows of P do not sum to 1. The products are
    written out because ``F.scaled_dot_product_attention`` keeps heads apart.

    Args:
        q: Queries [B, H, N, D]; ``k`` and ``v`` have the same shape.
        k: Keys.
        v: Values.
        mix_before: Weights [H, H, 1, 1] of a 1x1 convolution over heads, [to, from].
        mix_after: The same for after the softmax.
        blocked: Keys that get no weight, bool [B, 1, 1, N]; at least one key of each item has to remain.

    Returns:
        [B, H, N, D].
    """
    scores = mix_heads((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), mix_before)
    if blocked is not None:  # after the mixing, which would add up infinities of both signs
        scores = scores.masked_fill(blocked, float("-inf"))
    return mix_heads(scores.softmax(dim=-1), mix_after) @ v


def mix_heads(maps: Tensor, weight: Tensor) -> Tensor:
    """Mix maps [B, H, N, N] over heads with ``weight`` [H, H, 1, 1]: ``F.conv2d``, but about twice as fast on a CPU."""
    return (weight.flatten(1) @ maps.flatten(2)).unflatten(2, maps.shape[2:])


class SharedAttention(nn.Module):
    """Self-attention [B, N, W] -> [B, N, W]; the projections serve all repeats, each repeat has its own head mixers."""

    def __init__(self, width: int, heads: int, repeats: int, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.mix_before = nn.ModuleList(nn.Conv2d(heads, heads, 1, bias=False) for _ in range(repeats))
        self.mix_after = nn.ModuleList(nn.Conv2d(heads, heads, 1, bias=False) for _ in range(repeats))
        self.proj = nn.Linear(width, width)
        for weight in (*self.mix_before.parameters(), *self.mix_after.parameters()):
            nn.init.trunc_normal_(weight, std=INIT_STD)

    def forward(self, x: Tensor, repeat: int, blocked: Tensor | None = None) -> Tensor:
        """[B, N, W] -> [B, N, W] with the mixers of round ``repeat``; ``blocked`` as in ``head_mixed_attention``."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        before, after = (
            self.mix_before.get_parameter(f"{repeat}.weight"),
            self.mix_after.get_parameter(f"{repeat}.weight"),
        )
        return self.proj(head_mixed_attention(q, k, v, before, after, blocked).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Linear, exact GELU, linear: [B, N, W] -> [B, N, W]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class SharedBlock(nn.Module):
    """One pre-LN block, run ``repeats`` times in a row: [B, N, W] -> [B, N, W]."""

    def __init__(self, width: int, heads: int, repeats: int, qkv_bias: bool, mlp_ratio: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.norm1 = nn.ModuleList(nn.LayerNorm(width) for _ in range(repeats))
        self.attn = SharedAttention(width, heads, repeats, qkv_bias)
        self.norm2 = nn.ModuleList(nn.LayerNorm(width) for _ in range(repeats))
        self.mlp = MLP(width, mlp_ratio * width)

    def forward(self, x: Tensor, blocked: Tensor | None = None) -> Tensor:
        for repeat in range(self.repeats):
            x = x + self.attn(self.norm1[repeat](x), repeat, blocked)
            x = x + self.mlp(self.norm2[repeat](x))
        return x


def init_linear(module: nn.Module) -> None:
    """Set a linear layer to the truncated normal and its bias to 0; leave other modules alone."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
