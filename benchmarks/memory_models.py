"""Models of the memory benchmarks: decoders, encoders, convolutions and mixers of many sizes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCAB = 32_000


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.groups < self.heads
        )
        return self.out(y.transpose(1, 2).flatten(-2))


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.attention = Attention(width, heads, groups)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, groups: int, hidden: int, tied: bool = False,
        vocab: int = VOCAB,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, heads, groups, hidden) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.every = 0
        """Checkpoint each block whose number is a multiple; 0 for none."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if self.every and number % self.every == 0:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Encoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(self.embedding(tokens)).float().square().mean()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        parts = [
            part
            for _ in range(2)
            for part in (nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        ]
        self.first, self.norm, self.second, self.last = parts

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.first(x)), inplace=True)
        return functional.relu(x + self.last(self.second(y)))


class Convolutions(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(layers)))

    def forward(self, images: Tensor) -> Tensor:
        return self.blocks(self.stem(images)).float().square().mean()


class Mixer(nn.Module):
    """Perceptrons over wide rows."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                          nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


class Row(NamedTuple):
    build: partial[Any]
    shape: tuple[int, ...]
    dtype: torch.dtype | None = torch.bfloat16
    optimizer: str = "fused"

    def batch(self, device: str) -> Tensor:
        is_tokens = len(self.shape) == 2 and self.build.func is not Mixer
        dtype = torch.long if is_tokens else torch.float32
        return torch.zeros(self.shape, dtype=dtype, device=device)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), 1e-5, fused=self.optimizer == "fused")


ROWS = {
    "decoder-0.3b": Row(partial(Decoder, 24, 1024, 16, 16, 2816), (8, 1024)),
    "decoder-0.3b-f32": Row(partial(Decoder, 24, 1024, 16, 16, 2816), (4, 1024), None),
    "decoder-0.3b-foreach": Row(
        partial(Decoder, 24, 1024, 16, 16, 2816), (8, 1024), optimizer="foreach"
    ),
    "decoder-0.3b-sgd": Row(partial(Decoder, 24, 1024, 16, 16, 2816), (8, 1024), optimizer="sgd"),
    "decoder-0.3b-tied": Row(partial(Decoder, 24, 1024, 16, 16, 2816, True), (8, 1024)),
    "decoder-0.3b-long": Row(partial(Decoder, 24, 1024, 16, 16, 2816), (1, 16384)),
    "decoder-1b": Row(partial(Decoder, 16, 2048, 32, 8, 8192), (4, 2048)),
    "decoder-1b-f16": Row(partial(Decoder, 16, 2048, 32, 8, 8192), (4, 2048), torch.float16),
    "decoder-3b": Row(partial(Decoder, 28, 3072, 24, 8, 8192), (2, 2048)),
    "decoder-8b-blocks": Row(partial(Decoder, 4, 4096, 32, 8, 14336), (2, 4096)),
    "encoder-0.1b": Row(partial(Encoder, 12, 768, 12, 0.1), (32, 512)),
    "encoder-0.1b-no-dropout": Row(partial(Encoder, 12, 768, 12, 0.0), (32, 512)),
    "encoder-0.3b": Row(partial(Encoder, 24, 1024, 16, 0.1), (16, 512)),
    "encoder-0.3b-f32": Row(partial(Encoder, 24, 1024, 16, 0.1), (16, 512), None),
    "convolutions-64": Row(partial(Convolutions, 16, 64), (64, 3, 224, 224)),
    "convolutions-64-f32": Row(partial(Convolutions, 16, 64), (32, 3, 224, 224), None),
    "convolutions-256": Row(partial(Convolutions, 24, 256), (32, 3, 112, 112)),
    "mixer-2k": Row(partial(Mixer, 24, 2048), (8192, 2048)),
    "mixer-4k-f32": Row(partial(Mixer, 12, 4096), (4096, 4096), None),
    "mixer-4k-foreach": Row(partial(Mixer, 12, 4096), (8192, 4096), optimizer="foreach"),
}


def on_meta(row: Row) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = row.build().train()
    return model, row.make_optimizer(model)
