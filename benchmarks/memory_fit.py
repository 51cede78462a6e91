"""`stepscope.predict` and `stepscope.fit` against CUDA's allocator and clock.

    python benchmarks/memory_fit.py predictions --out results/memory-predictions.jsonl
    python benchmarks/memory_fit.py budgets --out results/memory-fit.jsonl
    python benchmarks/memory_fit.py predictions --without-gpu     # only what is predicted
    python benchmarks/memory_fit.py predictions --measured results/memory-predictions.jsonl

`predictions`: 20 models of more than 4 GiB are predicted on the meta device, then built on the GPU
and trained for two steps. `budgets`: a decoder with blocks of the shape of an 8B model under eight
budgets, against checkpointing all blocks and every k-th one. A line of JSON for each. With
`--measured`, the models are predicted again and compared with the peaks of that record.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import stepscope

VOCAB = 32_000
BUDGETS = 8
STEPS = 10


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
        self, layers: int, width: int, heads: int, groups: int, hidden: int, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, heads, groups, hidden) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCAB, bias=False)
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
    build: partial[nn.Module]
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


def predictions(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    known = {} if options.measured is None else measured_before(options.measured)
    for name, row in ROWS.items():
        started = time.perf_counter()
        model, optimizer = on_meta(row)
        found = stepscope.predict(model, optimizer, row.batch("cpu"), dtype=row.dtype)
        line = {
            "row": name,
            "predicted_bytes": found.peak.allocated,
            "predicted_reserved_bytes": found.reserved,
            "seconds": time.perf_counter() - started,
        }
        if options.measured is not None or not options.without_gpu:
            measured = known[name] if options.measured is not None else measured_step(row)
            line |= measured | {"error": found.peak.allocated / measured["peak_bytes"] - 1}
        yield line


def measured_before(record: Path) -> dict[str, dict[str, Any]]:
    """What an earlier run measured, by row."""
    lines = map(json.loads, record.read_text().splitlines())
    kept = ("peak_bytes", "step_ms", "device", "torch")
    return {line["row"]: {name: line[name] for name in kept} for line in lines}


def measured_step(
    row: Row, prepare: Callable[[nn.Module, torch.optim.Optimizer, Any], Any] | None = None
) -> dict[str, Any]:
    """The allocator's peak and the median time of a step on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = row.build().train()
    optimizer, batch = row.make_optimizer(model), row.batch("cuda")
    if prepare is not None:
        prepare(model, optimizer, batch)
    scaler = torch.amp.GradScaler(enabled=row.dtype is torch.float16)
    times = []
    for number in range(STEPS + 2):
        if number == 1:
            torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.autocast("cuda", row.dtype or torch.bfloat16, enabled=row.dtype is not None):
            loss = model(batch)
        scaler.scale(loss).backward()
        del loss
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "step_ms": sorted(times[2:])[STEPS // 2],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def budgets(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    layers = 8
    row = Row(partial(Decoder, layers, 4096, 32, 8, 14336), (4, 8192))
    model, optimizer = on_meta(row)
    probe = stepscope.fit(model, optimizer, row.batch("cpu"), budget="100TiB", dtype=row.dtype)
    smallest, largest = probe.plans[-1].peak, probe.plans[0].peak
    for number in range(BUDGETS):
        share = number / (BUDGETS - 1)
        budget = int(1.03 * (smallest + share * (largest - smallest)))
        line: dict[str, Any] = {"form": "fit", "budget_bytes": budget}
        if options.without_gpu:
            model, optimizer = on_meta(row)
            fitted = stepscope.fit(
                model, optimizer, row.batch("cpu"), budget=budget, dtype=row.dtype
            )
        else:
            kept: list[Any] = []
            line |= measured_step(row, partial(_fit, budget=budget, dtype=row.dtype, kept=kept))
            (fitted,) = kept
        line |= {"predicted_bytes": fitted.peak, "predicted_ms": 1e3 * fitted.seconds}
        yield line | {"plan": str(fitted)}
    for every in () if options.without_gpu else (1, 2, 4):
        change = partial(_checkpoint, every=every)
        yield {"form": f"checkpoint-every-{every}", **measured_step(row, change)}


def _fit(
    model: Any, optimizer: Any, batch: Any, *, budget: int, dtype: Any, kept: list[Any]
) -> None:
    kept.append(stepscope.fit(model, optimizer, batch, budget=budget, dtype=dtype))


def _checkpoint(model: Any, optimizer: Any, batch: Any, *, every: int) -> None:
    del optimizer, batch
    model.every = every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["predictions", "budgets"])
    parser.add_argument("--without-gpu", action="store_true")
    parser.add_argument("--measured", type=Path, help="record to take measured peaks from")
    parser.add_argument("--out", type=Path, help="write a line of JSON for each row")
    options = parser.parse_args()
    lines = []
    for line in {"predictions": predictions, "budgets": budgets}[options.part](options):
        lines.append(line)
        print(json.dumps({key: value for key, value in line.items() if key != "plan"}), flush=True)
        if options.out is not None:
            options.out.write_text("".join(json.dumps(one) + "\n" for one in lines))


if __name__ == "__main__":
    main()
