"""How much slower `attention(impl="auto")` is than the fastest implementation, over random shapes.

    python benchmarks/attention_regret.py --out regret.jsonl
    python benchmarks/attention_regret.py --shapes 20
    python benchmarks/attention_regret.py --read regret.jsonl      table, and the present rule
    python benchmarks/attention_regret.py --device cpu --shapes 3  without a GPU, tiny shapes

A shape has a dtype, head dimension, length, heads, key heads and a causal mask or none. The time is
that of a forward and a backward pass through the public call; calls follow each other without
synchronization, implementations take turns on the same tensors, and the fastest turn counts. Regret
is the time of auto's own calls over that of the fastest implementation, less one. A call of auto
runs the code of the implementation that it chooses: the regret of the choice has the time of that
implementation's own calls instead, and how far the two are apart is the noise of the host. No time
is the better of two. After `--seconds` no further shape is measured; shapes are in
random order, so that fewer are a smaller sample of the same. A process that is stuck ends itself
after twice that time; records are written one by one.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from parallel_compilation import run_in_processes

from stepscope.attention import attention, explain
from stepscope.attention.preference import COSTS, MULTIPROCESSORS, Costs, reason_against
from stepscope.attention.specialized import (
    CAPABILITY,
    Sizes,
    forward_kernel_of,
    refusal,
    speed_over,
)
from stepscope.errors import one_line
from stepscope.measure.device import pick_device
from stepscope.measure.environment import describe

RIVALS = ("triton", "hopper", "sdpa", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
FORMS = ("auto", *RIVALS)
FAR_BEHIND = 1.3
"""Implementations this much slower than the fastest at first sight are not timed further."""
TURN_SECONDS = 0.003
"""Short turns in changing order: the fastest one is little affected by what else the host does."""
FORM_SECONDS = 0.16
TURNS = (12, 48)
"""Fewest and most turns of a form; between them, as many as take `FORM_SECONDS`."""
COMPILE_SECONDS = 110
LONGEST_SECONDS = 0.008
"""Longest forward and backward pass of a shape, at a rate of 400 TFLOP/s."""
RATE = 400e12
CPU_RATE = 1e10


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

    def element_bytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return size

    def sizes(self) -> Sizes:
        lengths = (self.length, self.length)
        return Sizes(
            self.batch, self.heads, self.key_heads, *lengths, self.d_head, causal=self.causal
        )

    def compiled_kind(self) -> tuple[Any, ...]:
        """Return what distinguishes compiled kernels: Triton specializes integers that are one or
        a multiple of 16, and the heads of a group divide all heads."""
        integers = (self.batch, self.heads, self.heads // self.key_heads)
        specialized = tuple(n if n == 1 else n % 16 == 0 for n in integers)
        groups = (math.gcd(16, self.batch * n) for n in (self.heads, self.key_heads))
        return (self.dtype, self.d_head, self.causal, *specialized, *groups)


def shapes(count: int, seed: int, rate: float = RATE) -> list[Shape]:
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
            length=64 * round(2 ** generator.uniform(1, 8)) if rate == RATE else 32,
            d_head=generator.choice([64, 64, 64, 80, 96, 128, 128, 128]),
            causal=generator.random() < 0.6,
        )
        longest = LONGEST_SECONDS * rate / (8 if shape.dtype == "float32" else 1)
        if 1e-5 * longest < shape.flops() < longest:
            drawn.append(shape)
    return drawn


class Case:
    """The tensors of a shape, in the layout of a projection."""

    def __init__(self, shape: Shape, device: str) -> None:
        self._shape = shape
        dtype = getattr(torch, shape.dtype)
        generator = torch.Generator(device).manual_seed(0)

        def heads(count: int) -> torch.Tensor:
            size = (shape.batch, shape.length, count, shape.d_head)
            x = torch.randn(size, generator=generator, device=device, dtype=dtype)
            return x.transpose(1, 2)

        self._inputs = [heads(n) for n in (shape.heads, shape.key_heads, shape.key_heads)]
        for x in self._inputs:
            x.requires_grad_()
        self._grad = heads(shape.heads)

    def call(self, form: str) -> None:
        out = attention(*self._inputs, is_causal=self._shape.causal, impl=form)
        torch.autograd.grad(out, self._inputs, self._grad)

    def chosen(self) -> str | None:
        return explain(*self._inputs, is_causal=self._shape.causal).chosen


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], calls: int) -> float:
    """Return the time of a call. One before them is not timed: the caches have another form."""
    call()
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return (time.perf_counter() - start) / calls


def rotated(forms: Sequence[str], by: int) -> list[str]:
    """Return the forms of a turn: another one begins each time, and every second turn goes
    backwards, so that a form does not always follow the same one."""
    start = by % len(forms)
    order = [*forms[start:], *forms[:start]]
    return order[::-1] if by % 2 else order


def measure(shape: Shape, device: str) -> dict[str, Any]:
    """Return a record: microseconds of each form, and the reasons of those that did not run."""
    case = Case(shape, device)
    first: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for form in FORMS:
        try:
            seconds(functools.partial(case.call, form), 1)
            first[form] = min(seconds(functools.partial(case.call, form), 3) for _ in range(3))
        except Exception as error:
            # Whatever a form raises, among others a failed compilation, the others are measured.
            reasons[form] = one_line(error)
            synchronize()
    if not first:
        return {
            "shape": shape._asdict(), "us": {}, "timed": [], "chosen": None,
            "not_supported": reasons,
        }  # fmt: skip
    fastest = min(first.values())
    chosen = case.chosen()
    timed = [f for f in first if f in ("auto", chosen) or first[f] < FAR_BEHIND * fastest]
    counts = {form: max(3, round(TURN_SECONDS / first[form])) for form in timed}
    longest = max(counts[form] * first[form] for form in timed)
    turns = [
        {f: seconds(functools.partial(case.call, f), counts[f]) for f in rotated(timed, turn)}
        for turn in range(min(max(round(FORM_SECONDS / longest), TURNS[0]), TURNS[1]))
    ]
    us = {f: 1e6 * min(t[f] for t in turns) if f in timed else 1e6 * first[f] for f in first}
    return {
        "shape": shape._asdict(), "us": us, "timed": timed, "chosen": chosen,
        "not_supported": reasons,
    }  # fmt: skip


def compile_kernels(part: Sequence[Shape]) -> None:
    """Compile what a process of its own can compile: the kernels stay in Triton's cache."""
    for shape in part:
        try:
            Case(shape, "cuda").call("triton")
        except Exception as error:
            print(f"{shape}: {one_line(error)}", flush=True)


def compile_in_parallel(drawn: Sequence[Shape], processes: int, limit: float) -> None:
    """Compile the kernels of all shapes; what is not compiled in time is compiled when measured."""
    kinds = list({shape.compiled_kind(): shape for shape in drawn}.values())
    # float32 takes longest to compile: first, so that no process ends with several of them.
    kinds.sort(key=lambda shape: shape.dtype != "float32")
    parts = [(kinds[number::processes],) for number in range(min(processes, len(kinds)))]
    run_in_processes(compile_kernels, parts, limit)


class Regret(NamedTuple):
    of_auto: float
    """By the time of auto's own calls."""
    of_the_choice: float
    """By the time of the chosen implementation's own calls."""
    host: float
    """Time of auto's calls over that of the same implementation, less one."""
    line: dict[str, Any]


def regrets(lines: Sequence[dict[str, Any]]) -> list[Regret]:
    """Return the regret of each shape, the largest of auto first."""
    found = []
    for line in lines:
        rivals = {form: us for form, us in line["us"].items() if form != "auto"}
        if line["chosen"] in rivals and "auto" in line["us"]:
            auto, chosen = line["us"]["auto"], rivals[line["chosen"]]
            fastest = min(rivals.values())
            of_auto = max(0.0, auto / fastest - 1)
            found.append(Regret(of_auto, chosen / fastest - 1, auto / chosen - 1, line))
    return sorted(found, key=lambda one: -one.of_auto)


def quantiles(values: Sequence[float]) -> str:
    """Return median, 95th percentile and maximum of regrets."""
    ordered = sorted(values)
    p95 = (
        statistics.quantiles(ordered, n=20, method="inclusive")[-1]
        if len(ordered) > 1
        else ordered[0]
    )
    median = statistics.median(ordered)
    return f"{median:.1%} median, {p95:.1%} at the 95th percentile, {ordered[-1]:.1%} at worst"


def summary(lines: Sequence[dict[str, Any]]) -> str:
    found = regrets(lines)
    if not found:
        return "no shape was measured with auto and another implementation"
    hosts = sorted(one.host for one in found)
    out = [
        f"{len(found)} shapes: regret of auto {quantiles([r.of_auto for r in found])}",
        "by the calls of the implementation that it chooses"
        f" {quantiles([r.of_the_choice for r in found])}",
        "time of auto over that of the implementation that it runs, less one, from the 5th to the"
        f" 95th percentile: {hosts[len(hosts) // 20]:.1%} to {hosts[-1 - len(hosts) // 20]:.1%}",
        "largest:",
    ]
    for one in found[:12]:
        times = "  ".join(f"{form} {us:.0f}" for form, us in sorted(one.line["us"].items()))
        shape = Shape(**one.line["shape"])
        out.append(f"  {one.of_auto:6.1%}  {shape}  {one.line['chosen']}  µs: {times}")
    return "\n".join(out)


def hopper_runs(sizes: Sizes) -> bool:
    """Return whether `hopper` would have its own forward kernel on an H200, and not a slower one
    than cuDNN's."""
    on_h200 = {"element_bytes": 2, "capability": CAPABILITY, "programs": MULTIPROCESSORS}
    kernel = forward_kernel_of(sizes)
    refused = refusal(sizes, **on_h200, aligned=True, rules=False)
    return not refused and kernel is not None and speed_over("cudnn", sizes, kernel) >= 1


def by_rule(
    shape: Shape, us: Mapping[str, float], table: dict[tuple[str, int], Costs] = COSTS
) -> str:
    """Return what the rule of auto chooses among the implementations that were measured."""
    sizes, element_bytes = shape.sizes(), shape.element_bytes()
    for name in ("hopper", "triton"):
        runs = name in us and (name != "hopper" or hopper_runs(sizes))
        if runs and reason_against(name, sizes, element_bytes, table=table) is None:
            return name
    return "sdpa"


def rivals_of(line: dict[str, Any]) -> dict[str, float]:
    """Return the times of the implementations, that of the chosen one with the calls of auto: the
    estimate from all turns to which the rule is fitted, not one to judge a choice by."""
    rivals = {form: time for form, time in line["us"].items() if form != "auto"}
    if line["chosen"] in rivals and "auto" in line["us"]:
        rivals[line["chosen"]] = min(rivals[line["chosen"]], line["us"]["auto"])
    return rivals


def was_timed(line: dict[str, Any], form: str, us: Mapping[str, float]) -> bool:
    """Return whether a time is that of many turns, as those of auto are. Older records do not say
    so; there, a time far behind the fastest one is that of few calls."""
    return form in line.get("timed", us) and us[form] < FAR_BEHIND * min(us.values())


def time_of(line: dict[str, Any], form: str) -> float | None:
    """Return the time of an implementation by its own calls, or by those of auto if auto chose it
    and its own were few; None without either."""
    us = {name: time for name, time in line["us"].items() if name != "auto"}
    if was_timed(line, form, us):
        return us[form]
    return line["us"].get("auto") if form == line["chosen"] else None


def ruled_regrets(
    lines: Sequence[dict[str, Any]], table: dict[tuple[str, int], Costs] = COSTS
) -> list[float]:
    """Return the regret of each shape that the rule with these costs would have had, without the
    time that the choice itself takes."""
    found = []
    for line in lines:
        rivals = {form: us for form, us in line["us"].items() if form != "auto"}
        choice = by_rule(Shape(**line["shape"]), rivals, table)
        if choice in rivals and (time := time_of(line, choice)) is not None:
            found.append(max(0.0, time / min(rivals.values()) - 1))
    return found


def ruled(lines: Sequence[dict[str, Any]]) -> str:
    """Return the regret of the present rule on these records."""
    found = ruled_regrets(lines)
    if not found:
        return "no shape was measured with what the rule chooses"
    return f"the present rule, applied to the times of {len(found)} shapes: {quantiles(found)}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, default=200, help="number of shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=230, help="limit of the total time")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    processes = max(1, (os.cpu_count() or 2) - 2)
    parser.add_argument("--compilers", type=int, default=processes, help="compiling processes")
    parser.add_argument("--out", type=Path, help="file for one JSON line per shape")
    parser.add_argument("--read", type=Path, help="print the table of this file")
    args = parser.parse_args(words)
    if args.read:
        lines = [json.loads(line) for line in args.read.read_text().splitlines()]
        print(summary(lines), ruled(lines), sep="\n")
        return
    start = time.monotonic()
    stuck = threading.Timer(2 * args.seconds, lambda: os._exit(3))
    stuck.daemon = True
    stuck.start()
    drawn = shapes(args.shapes, args.seed, RATE if args.device == "cuda" else CPU_RATE)
    commit = describe(pick_device(args.device)).commit
    machine = {"device": "cpu", "torch": torch.__version__, "seed": args.seed, "commit": commit}
    if args.device == "cuda":
        compile_in_parallel(drawn, args.compilers, min(COMPILE_SECONDS, args.seconds / 2))
        machine["device"] = torch.cuda.get_device_name()
        print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    lines = []
    gc.freeze()
    gc.disable()  # as timeit does
    for shape in drawn:
        if time.monotonic() - start > args.seconds:
            break
        try:
            lines.append(measure(shape, args.device))
        except RuntimeError as error:
            # After an illegal access nothing runs in this process any more.
            print(f"stopped at {shape}: {one_line(error)}", flush=True)
            break
        gc.collect()
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(lines[-1] | machine) + "\n")
    print(summary(lines), ruled(lines), sep="\n")
    print(f"{len(lines)} of {len(drawn)} shapes in {time.monotonic() - start:.0f} s")
    stuck.cancel()


if __name__ == "__main__":
    main()
