"""Block sizes of our small kernels: SwiGLU and the gradient of the embedding.

    python benchmarks/piece_sizes.py
    python benchmarks/piece_sizes.py embedding

Forward and backward interleaved with those of torch.compile, device time only; the ratio is over
the compiled variant. The constants in `stepscope/kernels/triton` were chosen with this. The
embedding is timed with uniformly distributed words and with the word frequencies of a language.
Needs a GPU: about two minutes on an H200.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from fused_pieces import SHAPES, Call, gated, variants_of
from torch import Tensor
from torch.nn import functional

from stepscope.kernels import embedding
from stepscope.kernels.triton import embedding as triton_embedding
from stepscope.kernels.triton import launches
from stepscope.measure.device import Device, pick_device
from stepscope.measure.interleaved import time_interleaved
from stepscope.records.stats import paired_ratio, summarize

ROUNDS = 15
TABLES = (
    (10_000, 768, 2048),
    (10_000, 2560, 2048),
    (10_000, 2560, 8192),
    (10_000, 1600, 8192),
    (50_257, 768, 16_384),
    (151_936, 4096, 32_768),
)
"""Rows, width, tokens."""
SIZES = {
    ("_BLOCK_K", "_MAX_BLOCK_D", "_WARPS", "_FREQUENT_BLOCK_K", "_FREQUENT_MAX_BLOCK_D"): (
        (4, 1024, 4, 64, 64),
        (2, 1024, 2, 32, 64),
        (1, 1024, 1, 16, 64),
        (1, 1024, 2, 32, 64),
        (1, 1024, 4, 64, 64),
        (2, 512, 2, 32, 64),
        (8, 1024, 8, 64, 128),
        (4, 1024, 4, 32, 128),
    ),
    ("_FREQUENT",): ((8,), (16,), (64,)),
    ("_BLOCK_I", "_BLOCK_J"): ((8, 512), (32, 128)),
}
"""Values of the constants of the embedding gradient that are tried together."""


def with_values(module: ModuleType, run: Call, **values: object) -> Call:
    """The same call with other values of the module's attributes."""

    def changed() -> object:
        before = {name: getattr(module, name) for name in values}
        vars(module).update(values)
        try:
            return run()
        finally:
            vars(module).update(before)

    return changed


def swiglu_sizes(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    for shape in SHAPES:
        variants = gated(shape, device).variants
        calls = {"compiled": variants["compiled"]}
        for block, warps in itertools.product((512, 1024, 2048, 4096), (2, 4, 8)):
            if 4 <= block // (32 * warps) <= 32:
                sizes = launches.Block(block, warps)
                calls[f"{block} by {warps}"] = with_values(
                    launches, variants["stepscope"], activation=lambda _, sizes=sizes: sizes
                )
        yield f"swiglu {shape.name}", calls


def embedding_sizes(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    def plain(tokens: Tensor, weight: Tensor) -> Tensor:
        return functional.embedding(tokens, weight)

    for (rows, width, tokens), zipf in itertools.product(TABLES, (False, True)):
        frequency = torch.arange(1, rows + 1, device=device).float().pow(-1.0 if zipf else 0.0)
        drawn = torch.multinomial(frequency, tokens, replacement=True)
        weight = torch.randn(rows, width, device=device)
        grads = [torch.randn(tokens, width, device=device)]
        variants = variants_of(plain, embedding.embedded, [drawn, weight], grads)
        calls = {name: variants[name] for name in ("compiled", "eager")}
        for names, candidates in SIZES.items():
            for sizes in candidates:
                values = dict(zip(names, sizes, strict=True))
                name = " ".join(f"{key.lower()[1:]}={size}" for key, size in values.items())
                calls[name] = with_values(triton_embedding, variants["stepscope"], **values)
        yield f"embedding {rows} × {width}, {tokens} {'zipf' if zipf else 'even'}", calls


PIECES: dict[str, Callable[[torch.device], Iterator[tuple[str, dict[str, Call]]]]] = {
    "swiglu": swiglu_sizes,
    "embedding": embedding_sizes,
}


def timed(title: str, calls: dict[str, Call], device: Device) -> Iterator[str]:
    timing = time_interleaved(calls, device, warmup=4, rounds=ROUNDS, host_ahead=True)
    samples = {one.variant: one.values for one in timing.series if one.clock == "device"}
    for name, values in samples.items():
        ratio = paired_ratio(samples["compiled"], values)
        yield (
            f"{title:<38} {name:<72} {1e3 * summarize(values).median:>9.1f} µs"
            f" {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pieces", nargs="*", choices=[*PIECES, []], help="all by default")
    wanted = parser.parse_args().pieces or list(PIECES)
    if not torch.cuda.is_available():
        print("needs a GPU: without one the kernels would run in Triton's interpreter")
        return 1
    device = pick_device("cuda")
    for piece in wanted:
        for title, calls in PIECES[piece](device.torch_device):
            for line in timed(title, calls, device):
                print(line, flush=True)
            device.release()
            torch.compiler.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main())
