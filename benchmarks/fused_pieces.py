"""The fused pieces of a step compared with eager and torch.compile: time and memory.

    python benchmarks/fused_pieces.py
    python benchmarks/fused_pieces.py adamw swiglu --out results/pieces_h200.jsonl

Forward and backward together (for an optimizer: one step), in bfloat16 as under autocast: the
residual stream and all weights in float32, weight gradients too. The variants are interleaved,
because a GPU lowers its clock under load, and each starts behind work that lasts until the host has
issued it, for at most 20 ms: up to that, times are device times. `cublasLt` makes torch prefer that
library. Memory is the peak above the inputs, including stored copies of weights. With --out,
measured pieces replace those in the file. Needs a GPU: about four minutes on an H200, half of it
compilation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.kernels import add_rms_norm, linear_cross_entropy, rotated_heads_, swiglu
from stepscope.kernels.embedding import MAX_TOKENS, embedded
from stepscope.kernels.feed_forward import feed_forward
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.norm import plain_rms_norm
from stepscope.kernels.rope import plain_rotate, rotated_parts_
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.measure.device import Device, pick_device
from stepscope.measure.environment import describe
from stepscope.measure.interleaved import time_interleaved
from stepscope.model.layers import RotaryEmbedding
from stepscope.optim import AdamW, FusedAdamW
from stepscope.records.stats import paired_ratio, summarize

Call = Callable[[], object]
Function = Callable[..., Tensor | tuple[Tensor, ...]]
ROUNDS = 15


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    d_model: int
    d_ff: int
    heads: int
    vocab: int


SHAPES = (
    Shape("small, 4 × 512", 2048, 768, 3072, 12, 10_000),
    Shape("2.7b, 4 × 2048", 8192, 2560, 10_240, 32, 10_000),
    Shape("8B, 1 × 32768", 32_768, 4096, 11_008, 32, 151_936),
)


@dataclass(frozen=True)
class Race:
    piece: str
    shape: str
    variants: dict[str, Call]


def both_passes(function: Function, inputs: list[Tensor], grads: list[Tensor] | None) -> Call:
    """A call of the function and its backward, which frees the graph."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    learn = [x for x in leaves if x.requires_grad]

    def run() -> object:
        result = function(*leaves)
        outputs = result if isinstance(result, tuple) else (result,)
        return torch.autograd.grad(outputs, learn, grads)

    return run


def variants_of(
    plain: Function, fused: Function, inputs: list[Tensor], grads: list[Tensor] | None
) -> dict[str, Call]:
    return {
        "eager": both_passes(plain, inputs, grads),
        "compiled": both_passes(torch.compile(plain), inputs, grads),
        "stepscope": both_passes(fused, inputs, grads),
    }


def head_and_loss(shape: Shape, device: torch.device) -> Race:
    x = torch.randn(shape.tokens, shape.d_model, device=device, dtype=torch.bfloat16)
    weight = torch.randn(shape.vocab, shape.d_model, device=device) * shape.d_model**-0.5
    targets = torch.randint(shape.vocab, (shape.tokens,), device=device)

    def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(x, weight), targets)

    variants = variants_of(
        autocast(plain), autocast(linear_cross_entropy), [x, weight, targets], None
    )
    return Race("linear-cross-entropy", shape.name, variants)


def embedding(shape: Shape, device: torch.device) -> Race:
    return _embedding("embedding", shape, torch.ones(shape.vocab, device=device))


def embedding_of_a_text(shape: Shape, device: torch.device) -> Race:
    """Tokens with the frequencies of a language, by Zipf's law."""
    frequency = 1 / torch.arange(1, shape.vocab + 1, device=device)
    return _embedding("embedding-text", shape, frequency)


def _embedding(piece: str, shape: Shape, frequency: Tensor) -> Race:
    """With at most as many tokens as the kernel supports."""
    tokens = min(shape.tokens, MAX_TOKENS)
    weight = torch.randn(shape.vocab, shape.d_model, device=frequency.device)
    drawn = torch.multinomial(frequency, tokens, replacement=True)

    def plain(tokens: Tensor, weight: Tensor) -> Tensor:
        return functional.embedding(tokens, weight)

    grads = [torch.randn(tokens, shape.d_model, device=frequency.device)]
    variants = variants_of(plain, embedded, [drawn, weight], grads)
    return Race(piece, f"{shape.name.partition(',')[0]}, {tokens} tokens", variants)


def sum_and_norm(shape: Shape, device: torch.device) -> Race:
    stream = torch.randn(shape.tokens, shape.d_model, device=device)
    branch = torch.randn_like(stream, dtype=torch.bfloat16)
    weight = torch.ones(shape.d_model, device=device)

    def plain(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + branch
        return stream, plain_rms_norm(stream, weight, 1e-5).bfloat16()

    def fused(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, branch, weight, 1e-5, out_dtype=torch.bfloat16)

    grads = [torch.randn_like(stream), torch.randn_like(branch)]
    return Race("add-norm", shape.name, variants_of(plain, fused, [stream, branch, weight], grads))


def gated(shape: Shape, device: torch.device) -> Race:
    gate, up, grad = (
        torch.randn(shape.tokens, shape.d_ff, device=device, dtype=torch.bfloat16) for _ in range(3)
    )

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    return Race("swiglu", shape.name, variants_of(plain, swiglu, [gate, up], [grad]))


def rotated(shape: Shape, device: torch.device) -> Race:
    """Rotation of a copy of x, which stands for the output of the projection."""
    x = torch.randn(1, shape.tokens, shape.d_model, device=device, dtype=torch.bfloat16)
    d_head = shape.d_model // shape.heads
    table = RotaryEmbedding(d_head, shape.tokens, device=device)

    def heads(x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], shape.heads, d_head).transpose(1, 2)

    def plain(x: Tensor) -> Tensor:
        return plain_rotate(heads(x.clone()), table.cos, table.sin)

    def fused(x: Tensor) -> Tensor:
        return rotated_heads_(x.clone(), table.cos, table.sin, shape.heads)

    return Race("rotary", shape.name, variants_of(plain, fused, [x], [torch.randn_like(heads(x))]))


def autocast(function: Function) -> Function:
    def run(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            return function(*inputs)

    return run


def by_cublaslt(run: Call) -> Call:
    """The same call with cuBLASLt as torch's preferred BLAS library."""

    def other() -> object:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            return run()
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return other


def projections(shape: Shape, device: torch.device) -> Race:
    """Queries, keys and values of one input in the layout of attention, including the casts of
    weights that are not stored."""
    x = torch.randn(1, shape.tokens, shape.d_model, device=device, dtype=torch.bfloat16)
    weights = [torch.randn(shape.d_model, shape.d_model, device=device) * 0.02 for _ in range(3)]
    d_head = shape.d_model // shape.heads
    table = RotaryEmbedding(d_head, shape.tokens, device=device)
    like = (1, shape.heads, shape.tokens, d_head)
    grads = [torch.randn(like, device=device, dtype=torch.bfloat16) for _ in range(3)]

    def plain(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (
            functional.linear(x, weight).view(*x.shape[:-1], shape.heads, d_head).transpose(1, 2)
            for weight in weights
        )
        return plain_rotate(q, table.cos, table.sin), plain_rotate(k, table.cos, table.sin), v

    copies = WeightCopies()

    def fused(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        parts = fused_linear(x, weights, copies)
        return rotated_parts_(parts, table.cos, table.sin, shape.heads)

    variants = variants_of(autocast(plain), autocast(fused), [x, *weights], grads)
    variants["stepscope, cublasLt"] = by_cublaslt(variants["stepscope"])
    return Race("projections", shape.name, variants)


def full_feed_forward(shape: Shape, device: torch.device) -> Race:
    x = torch.randn(shape.tokens, shape.d_model, device=device, dtype=torch.bfloat16)
    wide = [torch.randn(shape.d_ff, shape.d_model, device=device) * 0.02 for _ in range(2)]
    back = torch.randn(shape.d_model, shape.d_ff, device=device) * 0.02

    def plain(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        gate, up = functional.linear(x, w1), functional.linear(x, w3)
        return functional.linear(functional.silu(gate) * up, w2)

    def ours(policy: str) -> Function:
        copies = WeightCopies()
        return autocast(lambda x, w1, w3, w2: feed_forward(x, w1, w3, w2, copies, policy))

    inputs, grads = [x, *wide, back], [torch.randn_like(x)]
    variants = variants_of(autocast(plain), ours("all"), inputs, grads)
    variants["stepscope, cublasLt"] = by_cublaslt(variants["stepscope"])
    variants |= {
        f"stepscope, {k}": both_passes(ours(k), inputs, grads) for k in ("gates", "inputs")
    }
    return Race("feed-forward", shape.name, variants)


def optimizers(shape: Shape, device: torch.device) -> Race:
    """AdamW on matrices and norms of four blocks; state in float32 except in the last variant."""

    def step(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Call:
        d, f = shape.d_model, shape.d_ff
        sizes = [(d,), (d, d), (d, d), (d, d), (d, d), (d,), (f, d), (f, d), (d, f)] * 4
        params = [nn.Parameter(torch.randn(size, device=device)) for size in sizes]
        for each in params:
            each.grad = torch.randn_like(each)
        return make(params).step

    def compiled(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params, lr=torch.tensor(1e-3, device=device), capturable=True)
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
        return optimizer

    def copied(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        copies = WeightCopies()
        for each in params:
            if each.dim() == 2:
                copies.narrow((each,), torch.bfloat16)
        return FusedAdamW(params, copies=copies)

    return Race(
        "adamw",
        shape.name,
        {
            "naive": step(AdamW),
            "eager": step(torch.optim.AdamW),
            "torch's fused": step(lambda params: torch.optim.AdamW(params, fused=True)),
            "compiled": step(compiled),
            "stepscope": step(FusedAdamW),
            "stepscope with copies": step(copied),
            "stepscope, bf16 state": step(
                lambda params: FusedAdamW(params, stochastic_bfloat16_state=True)
            ),
        },
    )


PIECES: dict[str, Callable[[Shape, torch.device], Race]] = {
    "linear-cross-entropy": head_and_loss,
    "adamw": optimizers,
    "embedding": embedding,
    "embedding-text": embedding_of_a_text,
    "add-norm": sum_and_norm,
    "swiglu": gated,
    "rotary": rotated,
    "projections": projections,
    "feed-forward": full_feed_forward,
}


def peak_bytes(run: Call, device: Device) -> int:
    """Peak above the inputs in a second call, so that what the first call stores is included."""
    before = torch.cuda.memory_allocated()
    run()
    device.synchronize()
    device.reset_peak()
    result = run()
    device.synchronize()
    del result
    return (device.peak_bytes() or 0) - before


def measured(race: Race, device: Device) -> Iterator[dict[str, Any]]:
    """One line per variant: its samples and its peak, or the reason why there are none."""
    peaks: dict[str, int] = {}
    for name, run in list(race.variants.items()):
        try:
            peaks[name] = peak_bytes(run, device)
        except Exception as error:
            full = isinstance(error, torch.cuda.OutOfMemoryError)
            reason = "out of memory" if full else f"{type(error).__name__}: {error}".splitlines()[0]
            del race.variants[name], error
            device.release()
            yield {"variant": name, "lost": reason}
    timing = time_interleaved(race.variants, device, warmup=4, rounds=ROUNDS, host_ahead=True)
    samples = {(one.variant, one.clock): one.values for one in timing.series}
    for name in race.variants:
        host_ms = summarize(samples[name, "host"]).median
        yield {
            "variant": name,
            "ms": samples[name, "device"],
            "host_ms": host_ms,
            "peak_bytes": peaks[name],
        }


def formatted(lines: list[dict[str, Any]]) -> Iterator[str]:
    ours = next(
        (line["ms"] for line in lines if line["variant"] == "stepscope" and "ms" in line), None
    )
    for line in lines:
        named = f"{line['piece']:<21} {line['shape']:<18} {line['variant']:<17}"
        if "lost" in line:
            yield f"{named} {line['lost']}"
            continue
        over = ""
        if ours is not None:
            ratio = paired_ratio(ours, line["ms"])
            over = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        yield (
            f"{named} {summarize(line['ms']).median:>9.3f} {line['host_ms']:>8.3f} {over:>20}"
            f" {line['peak_bytes'] / 2**20:>10.1f}"
        )


def lines_of(piece: str, shape: Shape, device: Device) -> list[dict[str, Any]]:
    race = PIECES[piece](shape, device.torch_device)
    named = {"piece": piece, "shape": race.shape}
    return [named | line for line in measured(race, device)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pieces", nargs="*", help=f"of {', '.join(PIECES)}; all by default")
    parser.add_argument("--out", type=Path, help="a JSON Lines file, one line per variant")
    options = parser.parse_args()
    unknown = sorted(set(options.pieces) - set(PIECES))
    if unknown:
        print(f"no such piece: {', '.join(unknown)}; choose from {', '.join(PIECES)}")
        return 2
    if not torch.cuda.is_available():
        print("needs a GPU: without one the kernels would run in Triton's interpreter")
        return 1
    device = pick_device("cuda")
    about = describe(device)
    here = {"device": device.name, "torch": torch.__version__, "commit": about.commit or "unknown"}
    print(f"{device.name}, torch {torch.__version__}")
    print(
        f"{'piece':<21} {'shape':<18} {'variant':<17} {'median ms':>9} {'host ms':>8}"
        f" {'relative time':>20} {'peak MiB':>10}"
    )
    wanted = options.pieces or list(PIECES)
    written = others(options.out, wanted)
    # The cuBLAS workspace is allocated before, so that no variant is charged for it.
    operand = torch.ones(16, 16, device=device.torch_device)
    operand.mm(operand)
    for piece in wanted:
        for shape in SHAPES:
            lines = lines_of(piece, shape, device)
            for row in formatted(lines):
                print(row, flush=True)
            device.release()
            torch.compiler.reset()
            written += [line | here for line in lines]
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text("".join(json.dumps(line) + "\n" for line in written))
    return 0


def others(out: Path | None, wanted: list[str]) -> list[dict[str, Any]]:
    """Lines of the file for pieces that are not measured now."""
    if out is None or not out.exists():
        return []
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [line for line in lines if line["piece"] not in wanted]


if __name__ == "__main__":
    sys.exit(main())
