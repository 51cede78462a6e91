"""A training loop in the style of nanoGPT: gradient accumulation, clipping, a schedule, autocast.

    stepscope inspect --stop-early examples/nano_gpt.py
    stepscope inspect --stop-early examples/nano_gpt.py --device cuda --layers 12 --width 768
    python examples/nano_gpt.py --accelerate     with stepscope.accelerate, as a CUDA graph on a GPU
    python examples/nano_gpt.py --accelerate --device cuda --size real     the shape of GPT-2

Autocast and the fused optimizer are used on a GPU; on a CPU the step is plain.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional

import stepscope

VOCAB = 512
SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "context": 64, "vocab": VOCAB},
    "real": {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50_304},
}


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, context: int, vocab: int = VOCAB
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, logits


def build(
    layers: int = 2, width: int = 64, heads: int = 2, context: int = 64, vocab: int = VOCAB
) -> tuple[nn.Module, Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor]]]:
    """Entry point for `stepscope run own --model examples.nano_gpt:build`."""
    text = torch.randint(vocab, (100_000,))

    def make_batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - context - 1, (size,)).tolist()
        tokens = torch.stack([text[start : start + context] for start in starts])
        targets = torch.stack([text[start + 1 : start + 1 + context] for start in starts])
        if device.type == "cuda":
            return (
                tokens.pin_memory().to(device, non_blocking=True),
                targets.pin_memory().to(device, non_blocking=True),
            )
        return tokens, targets

    return GPT(layers, width, heads, context, vocab), make_batch


def learning_rate(step: int, steps: int) -> float:
    if step < 5:
        return 6e-4 * (step + 1) / 5
    return 6e-5 + 0.5 * (1 + math.cos(math.pi * step / steps)) * 5.4e-4


def main() -> None:
    from harness import Meter  # Next to this file; `build` does not need it.

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    for name in ("layers", "width", "heads", "context"):
        parser.add_argument(f"--{name}", type=int, help="instead of that of the size")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--accelerate", action="store_true", help="use stepscope.accelerate")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    given = {name: value for name, value in vars(args).items() if name in SIZES["tiny"] and value}
    sizes = SIZES[args.size] | given
    model, make_batch = build(**sizes)
    model.to(device)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=6e-4,
        betas=(0.9, 0.95),
        fused=on_gpu,
    )
    if args.compile:
        model = torch.compile(model)
    autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()
    step = report = None
    if args.accelerate:
        report = stepscope.accelerate(model, optimizer)
        step = stepscope.TrainStep(
            model,
            optimizer,
            max_grad_norm=1.0,
            accumulate=args.accumulate,
            dtype=torch.bfloat16 if on_gpu else None,
        )
    meter = Meter(device, "tokens", args.batch * args.accumulate * sizes["context"])
    tokens, targets = make_batch(args.batch, device)
    for number in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, args.steps)
        for _ in range(args.accumulate):
            if step is not None:
                loss = step((tokens, targets))
            else:
                with autocast:
                    loss, _ = model(tokens, targets)
                (loss / args.accumulate).backward()
            tokens, targets = make_batch(args.batch, device)
        if step is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        meter.step(loss)
        if number % 10 == 0:
            print(f"iter {number}: loss {loss.item():.4f}")
    print(meter)
    if report is not None:
        print(report)
        print(f"step: {step}")


if __name__ == "__main__":
    main()
