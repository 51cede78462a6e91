"""Typical third-party models, and build functions with invalid results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCAB, LENGTH, WIDTH, HEADS = 64, 16, 32, 2


@dataclass
class CausalLMOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv_proj(self.input_layernorm(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(x)


class CausalLM(nn.Module):
    """The interface of a Hugging Face model: keywords in, an object with a loss out."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(layers))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> CausalLMOutput:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss, logits)


def causal_lm() -> tuple[nn.Module, Any]:
    def make_batch(size: int, device: torch.device) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCAB, (size, LENGTH), device=device)
        return {"input_ids": tokens, "labels": tokens}

    return CausalLM(), make_batch


def causal_lm_flops(batch: int, layers: int = 2) -> int:
    """FLOPs of a step: the embedding has no matmul, attention is causal, and the scores recomputed
    in the backward are not counted."""
    rows = batch * LENGTH
    linear = 2 * rows * WIDTH * (3 * WIDTH + WIDTH + 8 * WIDTH)
    scores = 2 * batch * HEADS * LENGTH**2 * (WIDTH // HEADS)
    # Two matmuls forward and four backward; half of each is masked.
    attention = (2 * scores) // 2 + (4 * scores) // 2
    head = 2 * rows * WIDTH * VOCAB
    return 3 * (layers * linear + head) + layers * attention


class NaiveLayer(DecoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv_proj(self.input_layernorm(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(hidden, float("-inf"))
        mixed = scores.softmax(-1) @ v
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(x)


def naive_lm() -> tuple[nn.Module, Any]:
    model, make_batch = causal_lm()
    model.layers = nn.ModuleList(NaiveLayer() for _ in range(2))
    return model, make_batch


class VisionTransformer(nn.Module):
    """A model of torch.nn layers that returns logits and needs a loss function."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(x).mean(1))


def vision_transformer() -> tuple[nn.Module, Any, Any]:
    def make_batch(size: int, device: torch.device) -> torch.Tensor:
        return torch.randn(size, 3, 16, 16, device=device)

    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            output, torch.zeros(len(batch), dtype=torch.long, device=batch.device)
        )

    return VisionTransformer(), make_batch, loss


class ConvNet(nn.Module):
    """Images and labels in, (loss, logits) out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = functional.relu(self.second(functional.relu(self.first(images))))
        logits = self.head(x.mean((2, 3)))
        return functional.cross_entropy(logits, labels), logits


def conv_net() -> tuple[nn.Module, Any]:
    def make_batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 3, 8, 8, device=device), torch.zeros(
            size, dtype=torch.long, device=device
        )

    return ConvNet(), make_batch


def conv_net_flops(batch: int) -> int:
    """FLOPs of a step; the input of the first convolution needs no gradient."""
    first, second = (2 * batch * 64 * c * 8 * 9 for c in (3, 8))
    head = 2 * batch * 8 * 10
    return 2 * first + 3 * second + 3 * head


def returns_nothing() -> None:
    return None


def returns_numbers() -> tuple[int, int]:
    return 1, 2


def no_batch() -> tuple[nn.Module, None]:
    return ConvNet(), None


def nothing_to_train() -> tuple[nn.Module, Any]:
    return nn.ReLU(), lambda size, device: torch.randn(size, device=device)


def no_loss() -> tuple[nn.Module, Any]:
    return VisionTransformer(), lambda size, device: torch.randn(size, 3, 16, 16, device=device)


def raises() -> None:
    raise RuntimeError("planned")


not_a_function = 3


def inputs_and_targets() -> object:
    """A batch of inputs and targets, which the model does not accept as two arguments."""

    def make_batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 4, device=device), torch.zeros(size, device=device)

    return (
        torch.nn.Linear(4, 1),
        make_batch,
        lambda out, batch: (out[:, 0] - batch[1]).square().mean(),
    )
