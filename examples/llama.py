"""A Llama: RMSNorm, RoPE, SwiGLU, grouped-query attention. A language model over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama. ``heads`` query heads share ``kv_heads`` keys and values."""

    dim: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 256
    max_length: int = 1024
    rope_base: float = 10_000.0
    tied: bool = True


SIZES = {
    "tiny": Config(dim=32, depth=2, heads=4, kv_heads=2, hidden=64),  # 27 thousand parameters
    "small": Config(dim=96, depth=3, heads=6, kv_heads=2, hidden=256),  # 0.3 million
    "medium": Config(dim=384, depth=8, heads=6, kv_heads=2, hidden=1024),  # 13 million
    "large": Config(dim=1024, depth=16, heads=16, kv_heads=4, hidden=2816, tied=False),  # 181 million
}


def rope_table(length: int, width: int, base: float) -> Tensor:
    """Cosines and sines of the rotations, ``[2, length, width / 2]``."""
    frequency = base ** (-torch.arange(0, width, 2) / width)
    angle = torch.outer(torch.arange(length), frequency)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair ``(x[i], x[i + width / 2])`` of ``[..., length, width]`` by its position's angle."""
    cos, sin = table[:, : x.size(-2)]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention. Query head ``h`` reads key and value head ``h // (heads / kv_heads)``."""

    rope: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.width = width = config.dim // config.heads
        self.query = nn.Linear(config.dim, config.heads * width, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * width, bias=False)
        self.out = nn.Linear(config.heads * width, config.dim, bias=False)
        # One per layer: as an argument of the block, FSDP's mixed precision would round it to bf16.
        self.register_buffer("rope", rope_table(config.max_length, width, config.rope_base), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, dim]`` to the same."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = rotate(q, self.rope), rotate(k, self.rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, dim]`` to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and SwiGLU, each on a normalised input and added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, dim]`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """A language model. Raises ValueError for sizes that do not fit each other."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        if config.dim % (2 * config.heads) or config.heads % config.kv_heads:
            raise ValueError(
                f"dim must be a multiple of 2 * heads, and heads of kv_heads, but they are {config}"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self._init_weights()
        if config.tied:
            self.head.weight = self.embedding.weight

    def _init_weights(self) -> None:
        """Each map keeps the scale of its input; what is added to the residual stream shrinks with depth."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                scale = (2 * self.config.depth) ** -0.5 if name.endswith(("out", "down")) else 1.0
                nn.init.trunc_normal_(module.weight, std=scale * module.in_features**-0.5)
        nn.init.normal_(self.embedding.weight, std=0.02)  # small, so that the first logits are nearly equal
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits ``[batch, length, vocab]`` of ``tokens [batch, length]``; or the mean loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
