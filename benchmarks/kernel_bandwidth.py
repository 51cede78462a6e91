"""Memory bandwidth of the memory-bound kernels, by launch parameters.

    python benchmarks/kernel_bandwidth.py --out bandwidth.jsonl
    python benchmarks/kernel_bandwidth.py norm_backward fp8_cast
    python benchmarks/kernel_bandwidth.py --read bandwidth.jsonl     table of the records

Each kernel runs at shapes of training steps (ViT-B/16 and GPT-2 under autocast, a 2.7B model) with
each variant of its launch parameters. A variant is compared with PyTorch first, and with a second
run of itself, bit for bit. Then all variants of a shape take turns: CUDA graphs of consecutive
launches over rotating tensors, larger than the L2 cache together, timed with CUDA events; the
median counts. GB/s are those of the bytes that have to be read and written once. Kernels are
compiled in parallel processes first. Needs a GPU: less than a minute on an H200; after `--seconds`
no further shape is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from parallel_compilation import run_in_processes
from torch import Tensor
from torch.nn import functional

from stepscope.errors import one_line
from stepscope.kernels.fp8.recipe import E4M3, LARGEST, TENSORWISE
from stepscope.kernels.triton import activation, fp8, launches, norm
from stepscope.kernels.triton.launches import Block, Rows, Tile

ROUNDS, LAUNCHES = 11, 10
ROTATED_BYTES = 400 << 20
"""Bytes that the launches of a graph read and write before they come back to the same tensors."""
MOST_SETS = 100
COMPILE_SECONDS = 40
EPS = 1e-5

Tensors = tuple[Tensor, ...]


class Case(NamedTuple):
    """A kernel at a shape."""

    kernel: str
    shape: str
    rule: str
    """The function of `launches` whose result is varied."""
    variants: Mapping[str, Any]
    inputs: Callable[[], Tensors]
    call: Callable[..., Tensors]
    """Launches the kernel and returns its outputs."""
    expected: Callable[..., Tensors]
    tolerance: float
    """Largest error of an output, relative to its largest magnitude."""
    moved: int
    """Bytes read and written."""


def named(variants: Sequence[Any]) -> dict[str, Any]:
    """Return variants by their fields."""
    return {
        " ".join(f"{name}={value}" for name, value in variant._asdict().items()): variant
        for variant in variants
    }


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module within the context."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def partial_sums(module: ModuleType) -> Iterator[list[Tensor]]:
    """Collect the partial sums of a kernel within the context. They are not added up: that is
    another kernel."""
    partial: list[Tensor] = []

    with replaced(module, "add_up", lambda sums, _: partial.append(sums)):
        yield partial


def norm_backward(
    rows: int, d: int, layer: bool, variants: Sequence[Rows], amax: bool = False
) -> Case:
    """Float32 stream and bfloat16 branch. A LayerNorm reads the stream and sums the gradient of the
    branch, an RMSNorm reads unit rows. `amax` is for FP8."""
    shape = f"{rows}x{d} {'LayerNorm' if layer else 'RMSNorm'}{' amax' if amax else ''}"
    kept = torch.float32 if layer else torch.bfloat16

    def inputs() -> Tensors:
        stream, weight = draw(rows, d, dtype=torch.float32), draw(d, dtype=torch.float32)
        inverse = stream.square().mean(1).add(EPS).rsqrt()
        mean = torch.zeros_like(inverse)
        if layer:
            mean = stream.mean(1)
            inverse = stream.var(1, correction=0).add(EPS).rsqrt()
        else:
            stream = stream * inverse[:, None]
        grad_stream = draw(rows, d, dtype=torch.float32)
        return draw(rows, d), grad_stream, stream.to(kept), weight, inverse, mean

    def call(
        grad: Tensor, grad_stream: Tensor, saved: Tensor, weight: Tensor, inverse: Tensor, mean: Any
    ) -> Tensors:
        with partial_sums(norm) as partial:
            grad_sum, grad_branch, *_ = norm.backward(
                grad, grad_stream, saved, weight, inverse, torch.float32, torch.bfloat16,
                units=not layer, mean=mean if layer else None, bias=layer, summed=layer, amax=amax,
            )  # fmt: skip
        return grad_sum, grad_branch, *partial

    def expected(
        grad: Tensor, grad_stream: Tensor, saved: Tensor, weight: Tensor, inverse: Tensor, mean: Any
    ) -> Tensors:
        unit = saved.float()
        if layer:
            unit = (unit - mean[:, None]) * inverse[:, None]
        wide = grad.float()
        scaled = wide * weight
        grad_x = scaled - unit * (scaled * unit).mean(1, keepdim=True)
        if layer:
            grad_x = grad_x - scaled.mean(1, keepdim=True)
        out = grad_x * inverse[:, None] + grad_stream
        sums = (wide * unit).double().sum(0)
        if layer:
            sums = torch.cat([sums, wide.double().sum(0), out.double().sum(0)])
        return out, out.bfloat16(), sums

    return Case(
        "norm_backward", shape, "norm_backward", named(variants), inputs, call, expected,
        8e-3, rows * d * (2 + 4 + kept.itemsize + 4 + 2),
    )  # fmt: skip


def sum_of_parts(parts: int, d: int, variants: Sequence[Tile]) -> Case:
    def call(partial: Tensor) -> Tensors:
        out = torch.empty(partial.shape[1], device=partial.device)
        norm.add_up(partial, out)
        return (out,)

    return Case(
        "sum_of_parts", f"{parts}x{d}", "sum_of_parts", named(variants),
        lambda: (draw(parts, d, dtype=torch.float32),), call, lambda x: (x.double().sum(0),),
        1e-5, 4 * (parts + 1) * d,
    )  # fmt: skip


def gelu_forward(rows: int, width: int, variants: Sequence[Block]) -> Case:
    return Case(
        "gelu_forward", f"{rows}x{width}", "activation", named(variants),
        lambda: (draw(rows, width),), lambda x: (activation.forward(x, None, "gelu"),),
        lambda x: (functional.gelu(x),), 8e-3, 4 * rows * width,
    )  # fmt: skip


def swiglu_forward(rows: int, width: int, variants: Sequence[Block]) -> Case:
    def call(both: Tensor) -> Tensors:
        gate, up = both.chunk(2, dim=1)
        return (activation.forward(gate, up, "silu"),)

    def expected(both: Tensor) -> Tensors:
        gate, up = both.float().chunk(2, dim=1)
        return (functional.silu(gate) * up,)

    return Case(
        "swiglu_forward", f"{rows}x{width}", "activation", named(variants),
        lambda: (draw(rows, 2 * width),), call, expected, 8e-3, 6 * rows * width,
    )  # fmt: skip


def gelu_backward(rows: int, width: int, variants: Sequence[Rows]) -> Case:
    """With the sum over rows, as partial sums."""

    def call(grad: Tensor, x: Tensor) -> Tensors:
        grad_x = torch.empty_like(x)
        bias = torch.empty(width, device=x.device)
        with partial_sums(activation) as partial:
            activation.backward(grad, x, None, grad_x, None, "gelu", grad_bias=bias)
        return grad_x, *partial

    def expected(grad: Tensor, x: Tensor) -> Tensors:
        wide = x.float().requires_grad_()
        (grad_x,) = torch.autograd.grad(functional.gelu(wide), wide, grad.float())
        return grad_x, grad_x.double().sum(0)

    return Case(
        "gelu_backward", f"{rows}x{width}", "activation_summed", named(variants),
        lambda: (draw(rows, width), draw(rows, width)), call, expected, 8e-3, 6 * rows * width,
    )  # fmt: skip


def fp8_amax(rows: int, columns: int, dtype: torch.dtype, variants: Sequence[Tile]) -> Case:
    return Case(
        "fp8_amax", f"{rows}x{columns} {dtype}", "fp8_amax", named(variants),
        lambda: (draw(rows, columns, dtype=dtype),), lambda x: (fp8.amax(x)[0],),
        lambda x: (x.abs().amax().float(),), 0.0, rows * columns * dtype.itemsize,
    )  # fmt: skip


def fp8_scale(parts: int, variants: Sequence[Block]) -> Case:
    """The scale and its inverse, by one program."""
    return Case(
        "fp8_scale", f"{parts}", "fp8_scale", named(variants),
        lambda: (draw(parts, dtype=torch.float32).abs(),), lambda x: tuple(fp8.scale(x, E4M3)),
        lambda x: (LARGEST[E4M3] / x.amax(), x.amax() / LARGEST[E4M3]), 1e-6, 4 * parts,
    )  # fmt: skip


def fp8_cast(rows: int, columns: int, dtype: torch.dtype, variants: Sequence[Tile]) -> Case:
    """Both copies, with a known scale."""

    def inputs() -> Tensors:
        x = draw(rows, columns, dtype=dtype)
        return x, (LARGEST[E4M3] / x.abs().amax().float())

    def call(x: Tensor, scale: Tensor) -> Tensors:
        both = fp8.empty((rows, columns), x, E4M3), fp8.empty((columns, rows), x, E4M3)
        fp8.cast(x, *both, E4M3, TENSORWISE, scale)
        return both

    def expected(x: Tensor, scale: Tensor) -> Tensors:
        cast = (x.float() * scale).to(torch.float8_e4m3fn)
        return cast, cast.T.contiguous()

    return Case(
        "fp8_cast", f"{rows}x{columns} {dtype}", "fp8_cast", named(variants), inputs, call,
        expected, 0.0, rows * columns * (dtype.itemsize + 2),
    )  # fmt: skip


def cases() -> list[Case]:
    """Return all shapes and variants, among them the present defaults."""

    def rows(block: int, *variants: tuple[int, int, int]) -> list[Rows]:
        return [Rows(warps, resident, block, stages) for warps, resident, stages in variants]

    narrow = rows(1024, (8, 4, 3), (8, 5, 1), (8, 5, 2), (4, 8, 1), (4, 5, 2), (4, 7, 3), (2, 8, 1))
    wide = rows(4096, (8, 1, 3), (8, 2, 1), (8, 2, 2), (16, 1, 3), (16, 2, 3), (32, 1, 3))
    sums = [
        Tile(*sizes)
        for sizes in ((1024, 8, 16), (512, 8, 8), (512, 16, 16), (1024, 16, 16), (256, 16, 8))
    ]
    blocks = [
        Block(*sizes)
        for sizes in ((1024, 2), (2048, 4), (1024, 4), (2048, 8), (4096, 8), (512, 1), (512, 2))
    ]
    summed = [
        Rows(*sizes)
        for sizes in ((4, 8, 1024), (4, 10, 1024), (4, 12, 1024), (2, 24, 512), (4, 9, 2048))
    ]
    maxima = [
        Tile(*sizes)
        for sizes in ((16, 256, 4), (8, 512, 4), (32, 128, 4), (32, 256, 8), (64, 128, 8))
    ]
    scales = [
        Block(*sizes)
        for sizes in ((4096, 8), (4096, 16), (8192, 16), (16_384, 16), (16_384, 32), (32_768, 32))
    ]
    tiles = [
        Tile(*sizes)
        for sizes in ((64, 128, 8), (64, 128, 4), (64, 64, 4), (32, 128, 4), (128, 64, 8))
    ]
    half, single = torch.bfloat16, torch.float32
    return [
        norm_backward(25_216, 768, True, narrow),
        norm_backward(8192, 768, True, narrow),
        norm_backward(8192, 2560, False, wide),
        norm_backward(8192, 2560, False, wide, amax=True),
        fp8_cast(8192, 2560, half, tiles),
        fp8_cast(8192, 10_240, half, tiles),
        fp8_cast(10_240, 2560, half, tiles),
        fp8_cast(10_240, 2560, single, tiles),
        fp8_amax(10_240, 2560, half, maxima),
        fp8_amax(10_240, 2560, single, maxima),
        fp8_amax(2560, 2560, single, maxima),
        gelu_forward(25_216, 3072, blocks),
        gelu_forward(8192, 3072, blocks),
        gelu_backward(25_216, 3072, summed),
        gelu_backward(8192, 3072, summed),
        swiglu_forward(8192, 10_240, blocks),
        sum_of_parts(1056, 1536, sums),
        sum_of_parts(660, 1536, sums),
        sum_of_parts(264, 2560, sums),
        sum_of_parts(352, 3072, sums),
        fp8_scale(6400, scales),
        fp8_scale(40_960, scales),
    ]


def launched_with(case: Case, variant: Any) -> AbstractContextManager[None]:
    """Let the kernel use these launch parameters within the context."""
    return replaced(launches, case.rule, lambda *_: variant)


def largest_error(outputs: Tensors, expected: Tensors) -> float:
    """Return the largest error of an output over its largest magnitude. Partial sums and maxima
    are combined first."""
    worst = 0.0
    for out, want in zip(outputs, expected, strict=True):
        got = out.double()
        if got.shape != want.shape:
            got = got.sum(0) if want.dim() else got.amax()
        reference = want.double()
        error = (got - reference).abs().amax() / reference.abs().amax()
        worst = max(worst, math.inf if bool(error.isnan()) else error.item())
    return worst


def checked(case: Case, inputs: Tensors, expected: Tensors) -> dict[str, Any]:
    """Return the error of the kernel, and whether two runs have the same bits."""
    first, second = case.call(*inputs), case.call(*inputs)
    same = all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )
    error = largest_error(first, expected)
    return {"error": error, "repeatable": same, "correct": error <= case.tolerance and same}


def captured(case: Case, sets: Sequence[Tensors], count: int) -> torch.cuda.CUDAGraph:
    """Return a graph of launches over all sets of inputs, each with outputs of its own."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        case.call(*sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    kept: list[Tensors] = []
    with torch.cuda.graph(graph):
        for number in range(count):
            kept.append(case.call(*sets[number % len(sets)]))
            if len(kept) == len(sets):
                kept.clear()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def measure(case: Case) -> list[dict[str, Any]]:
    """Return one record per variant."""
    count = min(MOST_SETS, math.ceil(ROTATED_BYTES / case.moved))
    sets = [case.inputs() for _ in range(count)]
    launched = count * math.ceil(LAUNCHES / count)
    expected = case.expected(*sets[0])
    records: dict[str, dict[str, Any]] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, variant in case.variants.items():
        record = {"kernel": case.kernel, "shape": case.shape, "variant": name}
        records[name] = record
        try:
            with launched_with(case, variant):
                record |= checked(case, sets[0], expected)
                if record["correct"]:
                    graphs[name] = captured(case, sets, launched)
        except Exception as error:
            # Among others a variant that does not compile or does not fit: the others are measured.
            record["failed"] = one_line(error)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS + 1):
        for name, graph in graphs.items():
            ms = milliseconds(graph)
            if turn:
                samples[name].append(ms)
    for name, own in samples.items():
        us = 1e3 * statistics.median(own) / launched
        fastest = 1e3 * min(own) / launched
        records[name] |= {"us": us, "fastest_us": fastest, "gb_per_s": case.moved / us / 1e3}
    return list(records.values())


def compile_part(names: Sequence[str], part: Sequence[tuple[int, str]]) -> None:
    """Launch variants once: the compiled kernels stay in Triton's cache."""
    chosen = selected(names)
    for number, variant in part:
        case = chosen[number]
        try:
            with launched_with(case, case.variants[variant]):
                case.call(*case.inputs())
                torch.cuda.synchronize()
        except Exception as error:
            print(f"{case.kernel} {case.shape} {variant}: {one_line(error)}", flush=True)


def compile_in_parallel(names: Sequence[str], processes: int) -> None:
    """Compile all variants; what is not compiled in time is compiled when it is measured."""
    work = [(n, variant) for n, case in enumerate(selected(names)) for variant in case.variants]
    parts = [(names, work[n::processes]) for n in range(processes)]
    run_in_processes(compile_part, parts, COMPILE_SECONDS)


def selected(names: Sequence[str]) -> list[Case]:
    return [case for case in cases() if not names or case.kernel in names]


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the variants of each shape, fastest first."""
    lines = []
    shapes = dict.fromkeys((record["kernel"], record["shape"]) for record in records)
    for kernel, shape in shapes:
        own = [r for r in records if (r["kernel"], r["shape"]) == (kernel, shape)]
        lines.append(f"{kernel} {shape}")
        for record in sorted(own, key=lambda r: r.get("us", math.inf)):
            if "us" in record:
                result = f"{record['us']:8.1f} µs {record['gb_per_s']:6.0f} GB/s"
            else:
                result = record.get("failed") or f"wrong: {record['error']:.1e}"
            lines.append(f"  {result}  {record['variant']}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", help="kernels to measure; all if none is given")
    parser.add_argument("--seconds", type=float, default=75, help="limit of the total time")
    processes = max(1, (os.cpu_count() or 2) - 2)
    parser.add_argument("--compilers", type=int, default=processes, help="compiling processes")
    parser.add_argument("--out", type=Path, help="file for one JSON line per variant")
    parser.add_argument("--read", type=Path, help="print the table of this file")
    args = parser.parse_args(words)
    if args.read:
        print(table([json.loads(line) for line in args.read.read_text().splitlines()]))
        return
    start = time.monotonic()
    # A process that is stuck ends itself.
    stuck = threading.Timer(2 * args.seconds, lambda: os._exit(3))
    stuck.daemon = True
    stuck.start()
    compile_in_parallel(args.kernels, args.compilers)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    records = []
    for case in selected(args.kernels):
        if time.monotonic() - start > args.seconds:
            break
        try:
            found = measure(case)
        except Exception as error:
            # After an illegal access nothing runs in this process any more.
            print(f"stopped: {one_line(error)}", flush=True)
            break
        records += found
        torch.cuda.empty_cache()
        if args.out:
            with args.out.open("a") as file:
                file.writelines(json.dumps(record | machine) + "\n" for record in found)
    print(table(records))
    print(f"{len(records)} records in {time.monotonic() - start:.0f} s")
    stuck.cancel()


if __name__ == "__main__":
    main()
