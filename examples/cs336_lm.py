"""A language model of classes of its own, as CS336 asks for, before and after `accelerate`.

    python examples/cs336_lm.py                 as it is
    python examples/cs336_lm.py --accelerate    on a GPU compiled, as a CUDA graph
    python examples/cs336_lm.py --accelerate --size real     450 million parameters, on a GPU

Linear layers, embedding, norm, rotary positions, SwiGLU, softmax and attention are written with
elementary operations; nothing of `torch.nn` but `Module` and `Parameter`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope

SIZES = {
    "tiny": {"vocab": 512, "context": 64, "width": 64, "layers": 2, "heads": 2, "hidden": 128},
    "real": {
        "vocab": 10_000, "context": 512, "width": 1024, "layers": 24, "heads": 16, "hidden": 4096,
    },
}  # fmt: skip
BATCH = {"tiny": 4, "real": 8}


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        deviation = math.sqrt(2 / (inputs + outputs))
        weight = torch.empty(outputs, inputs)
        nn.init.trunc_normal_(weight, std=deviation, a=-3 * deviation, b=3 * deviation)
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = Linear(width, hidden), Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class RoPE(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, d_head: int, context: int, theta: float = 10_000.0) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, d_head, 2) / d_head)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        first, second = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos[positions], self.sin[positions]
        rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
        return rotated.flatten(-2)


def softmax(x: Tensor, dim: int) -> Tensor:
    exponentials = torch.exp(x - x.max(dim=dim, keepdim=True).values)
    return exponentials / exponentials.sum(dim=dim, keepdim=True)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
    weights = softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            Linear(width, width) for _ in range(4)
        )
        self.rope = RoPE(width // heads, context)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        positions = torch.arange(length, device=x.device)
        visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mixed = attention(self.rope(q, positions), self.rope(k, positions), v, visible)
        return self.output_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, context: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = RMSNorm(width), RMSNorm(width)
        self.attn, self.ffn = SelfAttention(width, heads, context), SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class LanguageModel(nn.Module):
    def __init__(
        self, vocab: int, context: int, width: int, layers: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.embed = Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, heads, hidden, context) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), Linear(width, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    from harness import Meter, options  # Next to this file; the model does not need it.

    args = options(__doc__)
    sizes, batch = SIZES[args.size], BATCH[args.size]
    vocab, context = sizes["vocab"], sizes["context"]
    model = LanguageModel(**sizes).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    meter = Meter(args.device, "tokens", batch * context)
    dtype = torch.bfloat16 if args.device == "cuda" else None

    if args.accelerate:
        report = stepscope.accelerate(model, optimizer)
        step = stepscope.TrainStep(model, optimizer, max_grad_norm=1.0, dtype=dtype)

    generator = torch.Generator(args.device).manual_seed(0)
    for _ in range(args.steps):
        half = torch.randint(vocab, (batch, context // 2), generator=generator, device=args.device)
        text = torch.cat([half, half, half[:, :1]], dim=1)
        tokens, targets = text[:, :-1], text[:, 1:]
        if args.accelerate:
            loss = step((tokens, targets))
        else:
            with torch.autocast(args.device, dtype, enabled=dtype is not None):
                loss = model(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        meter.step(loss)

    print(meter)
    if args.accelerate:
        print(report)
        print(f"step: {step}")


if __name__ == "__main__":
    main()
