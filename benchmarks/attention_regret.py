"""How much slower `attention(impl="auto")` is than the fastest implementation, over random shapes.

    python benchmarks/attention_regret.py --out regret.jsonl
    python benchmarks/attention_regret.py --shapes 20
    python benchmarks/attention_regret.py --read regret.jsonl      print the table of a record

A shape has a dtype, head dimension, length, heads, key heads and a causal mask or none. The time is
that of a forward and a backward pass through the public call; calls follow each other without
synchronization, implementations take turns on the same tensors, and the fastest turn counts. Regret
is the time of auto over that of the fastest implementation, less one. Needs a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stepscope.attention import attention
from stepscope.errors import one_line

RIVALS = ("triton", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
FORMS = ("auto", *RIVALS)
TURNS = 4
TURN_SECONDS = 0.02
LONGEST_SECONDS = 0.008
"""Longest forward and backward pass of a shape, at a rate of 400 TFLOP/s."""
RATE = 400e12


class Shape(NamedTuple):
    dtype: str
    batch: int
    heads: int
    key_heads: int
    length: int
    d_head: int
    causal: bool

    def flops(self) -> float:
        forward = 4.0 * self.batch * self.heads * self.length**2 * self.d_head
        return 3.5 * forward * (0.5 if self.causal else 1.0)


def shapes(count: int, seed: int) -> list[Shape]:
    """Draw shapes that training uses and that take at most `LONGEST_SECONDS`."""
    generator = random.Random(seed)
    drawn: list[Shape] = []
    while len(drawn) < count:
        heads = generator.choice([8, 12, 16, 24, 32, 40, 64])
        shape = Shape(
            dtype=generator.choice(["bfloat16", "bfloat16", "bfloat16", "float16", "float32"]),
            batch=generator.choice([1, 2, 4, 8, 16, 32]),
            heads=heads,
            key_heads=heads // generator.choice([1, 1, 1, 2, 4, 8]) if heads % 8 == 0 else heads,
            length=64 * round(2 ** generator.uniform(1, 8)),
            d_head=generator.choice([64, 64, 64, 80, 96, 128, 128, 128]),
            causal=generator.random() < 0.6,
        )
        rate = RATE / (8 if shape.dtype == "float32" else 1)
        if 1e8 < shape.flops() < LONGEST_SECONDS * rate:
            drawn.append(shape)
    return drawn


class Case:
    """The tensors of a shape, in the layout of a projection."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        dtype = getattr(torch, shape.dtype)
        generator = torch.Generator("cuda").manual_seed(0)

        def heads(count: int) -> torch.Tensor:
            size = (shape.batch, shape.length, count, shape.d_head)
            x = torch.randn(size, generator=generator, device="cuda", dtype=dtype)
            return x.transpose(1, 2)

        self._inputs = [heads(n) for n in (shape.heads, shape.key_heads, shape.key_heads)]
        for x in self._inputs:
            x.requires_grad_()
        self._grad = heads(shape.heads)

    def call(self, form: str) -> None:
        out = attention(*self._inputs, is_causal=self._shape.causal, impl=form)
        torch.autograd.grad(out, self._inputs, self._grad)


def seconds(call: Callable[[], object], calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def measure(shape: Shape) -> dict[str, Any]:
    case = Case(shape)
    calls: dict[str, Callable[[], object]] = {}
    reasons: dict[str, str] = {}
    for form in FORMS:
        call = functools.partial(case.call, form)
        try:
            seconds(call, 2)
            calls[form] = call
        except (ValueError, RuntimeError) as error:
            reasons[form] = one_line(error)
    each = {form: seconds(call, 3) for form, call in calls.items()}
    counts = {form: max(3, round(TURN_SECONDS / taken)) for form, taken in each.items()}
    turns = [{f: seconds(calls[f], counts[f]) for f in calls} for _ in range(TURNS)]
    times = {form: 1e6 * min(turn[form] for turn in turns) for form in calls}
    return {"shape": shape._asdict(), "us": times, "not_supported": reasons}


def compile_kernels(part: Sequence[Shape]) -> None:
    """Compile what a process of its own can compile: the kernels stay in Triton's cache."""
    for shape in part:
        case = Case(shape)
        for form in ("auto", "triton"):
            try:
                case.call(form)
            except (ValueError, RuntimeError):
                continue


def compile_in_parallel(drawn: Sequence[Shape], processes: int) -> None:
    kinds = {(s.dtype, s.d_head, s.causal, s.heads == s.key_heads): s for s in drawn}.values()
    parts = [list(kinds)[number::processes] for number in range(processes)]
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=compile_kernels, args=(part,)) for part in parts if part]
    for process in running:
        process.start()
    for process in running:
        process.join()


def regrets(lines: Sequence[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    """Return auto's regret of each shape, largest first."""
    found = []
    for line in lines:
        rivals = [us for form, us in line["us"].items() if form != "auto"]
        if rivals and "auto" in line["us"]:
            found.append((max(0.0, line["us"]["auto"] / min(rivals) - 1), line))
    return sorted(found, key=lambda entry: -entry[0])


def summary(lines: Sequence[dict[str, Any]]) -> str:
    found = regrets(lines)
    values = [regret for regret, _ in found]
    p95 = statistics.quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
    out = [
        f"{len(found)} shapes: regret {statistics.median(values):.1%} median, {p95:.1%} at the 95th"
        f" percentile, {values[0]:.1%} at worst",
        "largest:",
    ]
    for regret, line in found[:12]:
        times = "  ".join(f"{form} {us:.0f}" for form, us in sorted(line["us"].items()))
        out.append(f"  {regret:6.1%}  {Shape(**line['shape'])}  µs: {times}")
    return "\n".join(out)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shapes", type=int, default=200, help="number of shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compilers", type=int, default=8, help="processes that compile kernels")
    parser.add_argument("--out", type=Path, help="file for one JSON line per shape")
    parser.add_argument("--read", type=Path, help="print the table of this file")
    args = parser.parse_args(words)
    if args.read:
        print(summary([json.loads(line) for line in args.read.read_text().splitlines()]))
        return
    drawn = shapes(args.shapes, args.seed)
    compile_in_parallel(drawn, args.compilers)
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    lines = []
    for shape in drawn:
        lines.append(measure(shape))
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(lines[-1] | machine) + "\n")
    print(summary(lines))


if __name__ == "__main__":
    main()
