"""Time tiles of the attention kernels on this machine's GPU, compared with torch's kernels.

    python scripts/tune_tiles.py --shape 1,16,16384,64 --out tiles.json
    python scripts/tune_tiles.py --shape 4,16,4096,128 --pass key_value --m 32 64 --warps 4 8
    python scripts/tune_tiles.py --full --pass forward --shape 2,16,16384,128 --m 64 128 --warps 4 8

Every combination of the values is a candidate. Candidates are compiled in several processes; those
that spill too much or do not fit are dropped. The others run interleaved, so that all see the same
clocks, and every result is compared with that of a peer: a fast but wrong tile is not listed. The
winners are entered into `src/stepscope/attention/tiles.py` by hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from stepscope.attention import attention
from stepscope.attention.tiles import Pass, Tile, tiles
from stepscope.attention.triton import launch as triton_launch

PASSES: tuple[Pass, ...] = ("forward", "query", "key_value")
FIELDS = ("m", "n", "warps", "stages", "group", "hold", "registers", "precision")
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
WAIT_CYCLES = 4_000_000


class Shape(NamedTuple):
    batch: int
    heads: int
    seq: int
    head: int


class Candidate(NamedTuple):
    kind: Pass
    tile: Tile


class Bench:
    """Tensors of one shape, the results of a peer, and each of our passes separately."""

    def __init__(self, shape: Shape, dtype: torch.dtype, causal: bool) -> None:
        torch.manual_seed(0)
        self.causal = causal
        self.scale = shape.head**-0.5
        self.q, self.k, self.v = (
            torch.randn(tuple(shape), device="cuda", dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        self.grad = torch.randn_like(self.q)
        self.inputs = (self.q.detach(), self.k.detach(), self.v.detach(), self.grad)
        options: dict[str, Any] = {"scale": self.scale, "causal": causal, "shift": 0}
        self.out, self.lse = triton_launch.forward(*self.inputs[:3], **options)
        self.delta = (self.out.float() * self.grad.float()).sum(-1)
        self.factor = torch.ones_like(self.delta)
        self.lean = torch.zeros_like(self.delta)
        self.outputs = [torch.empty_like(self.q) for _ in range(4)]

    def run(self, candidate: Candidate) -> tuple[Tensor, ...]:
        """Run one pass."""
        out, dq, dk, dv = self.outputs
        with triton_launch.forced_tiles({candidate.kind: candidate.tile}):
            inputs = self.inputs[:3] if candidate.kind == "forward" else self.inputs
            given = inputs if candidate.kind == "forward" else (*inputs, self.out, self.lse)
            read = triton_launch.readable(*inputs)
            problem = triton_launch.Problem.of(given, read, self.causal, 0)
            launch = partial(
                triton_launch.run_pass,
                candidate.kind,
                problem,
                triton_launch._launches(problem),
                read,
                scale=self.scale,
            )
            # The last tensors are those of rules.
            if candidate.kind == "forward":
                launch((out, torch.empty_like(self.lse), None, None, None), (out,))
                return (out,)
            if candidate.kind == "query":
                delta, factor, lean = (torch.empty_like(self.delta) for _ in range(3))
                rest = (self.out, self.lse, delta, factor, lean, dq, None, None, None)
                launch(rest, (self.out, dq))
                return (dq,)
            rest = (self.lse, self.delta, self.factor, self.lean, dk, dv, None, None)
            launch(rest, (dk, dv))
            return (dk, dv)

    def expected(self, peer: str, dtype: torch.dtype) -> dict[Pass, tuple[Tensor, ...]]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in (self.q, self.k, self.v)]
        out = attention(*inputs, is_causal=self.causal, impl=peer)
        dq, dk, dv = torch.autograd.grad(out, inputs, self.grad.to(dtype))
        return {"forward": (out.detach(),), "query": (dq,), "key_value": (dk, dv)}


def candidates(args: argparse.Namespace, shape: Shape, dtype: torch.dtype) -> Iterator[Candidate]:
    for kind in args.passes:
        capability = torch.cuda.get_device_capability()
        best = tiles(kind, shape.head, dtype.itemsize, capability, causal=args.causal)[0]
        values_of = [getattr(args, field) or [getattr(best, field)] for field in FIELDS]
        combined = (
            best._replace(**dict(zip(FIELDS, values, strict=True)))
            for values in itertools.product(*values_of)
        )
        yield from (Candidate(kind, tile) for tile in dict.fromkeys((best, *combined)))


def _warm(work: tuple[Shape, str, bool, list[Candidate]]) -> list[Candidate]:
    """Compile in a separate process, filling Triton's cache; return the candidates that ran."""
    shape, dtype, causal, share = work
    bench = Bench(shape, getattr(torch, dtype), causal)
    ran = []
    for candidate in share:
        try:
            bench.run(candidate)
            torch.cuda.synchronize()
        except torch.AcceleratorError as error:
            # The CUDA context is lost, and with it the rest of this share.
            print(f"{candidate.kind} {tuple(candidate.tile)}: {str(error).splitlines()[0]}")
            break
        except Exception as error:
            print(f"{candidate.kind} {tuple(candidate.tile)}: {str(error).splitlines()[0][:100]}")
        else:
            ran.append(candidate)
    return ran


def compile_all(
    shape: Shape, dtype: str, causal: bool, wanted: list[Candidate], jobs: int
) -> list[Candidate]:
    shares = [wanted[i::jobs] for i in range(jobs) if wanted[i::jobs]]
    with multiprocessing.get_context("spawn").Pool(len(shares)) as pool:
        ran = pool.map(_warm, [(shape, dtype, causal, share) for share in shares])
    return sorted(itertools.chain(*ran), key=wanted.index)


def error_of(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max(
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(outputs, expected, strict=True)
    )


def usable(
    bench: Bench, wanted: list[Candidate], expected: dict[Pass, tuple[Tensor, ...]], spills: int
) -> Iterator[tuple[Candidate, dict[str, Any]]]:
    for candidate in wanted:
        row: dict[str, Any] = {"pass": candidate.kind, **candidate.tile._asdict()}
        for tensor in bench.outputs:
            tensor.fill_(float("nan"))
        try:
            with triton_launch.recorded_launches() as launches:
                outputs = bench.run(candidate)
        except OutOfResources as error:
            print(f"{candidate.kind} {tuple(candidate.tile)}: does not fit ({error})")
            continue
        except Exception as error:
            print(f"{candidate.kind} {tuple(candidate.tile)}: {str(error).splitlines()[0][:100]}")
            continue
        kernel = next(x.kernel for x in launches if x.kind == candidate.kind)
        row |= {
            "registers_used": kernel.n_regs,
            "spills": kernel.n_spills,
            "shared": kernel.metadata.shared,
            "error": error_of(outputs, expected[candidate.kind]),
        }
        if not row["error"] < CLOSE[bench.q.dtype]:
            print(f"{candidate.kind} {tuple(candidate.tile)}: WRONG by {row['error']:.2e}")
        elif row["spills"] <= spills:
            yield candidate, row


def timed_interleaved(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median milliseconds of each call, run one after the other in every round."""
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(rounds):
        # The queue stays full, so that no kernel waits for the host within its interval.
        torch.cuda._sleep(WAIT_CYCLES)
        for call, events in zip(calls, spans, strict=True):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            events.append((first, last))
    torch.cuda.synchronize()
    return [statistics.median(a.elapsed_time(b) for a, b in events[1:]) for events in spans]


def tune(args: argparse.Namespace, shape: Shape) -> list[dict[str, Any]]:
    dtype = getattr(torch, args.dtype)
    wanted = list(candidates(args, shape, dtype))
    wanted = compile_all(shape, args.dtype, args.causal, wanted, args.jobs)
    bench = Bench(shape, dtype, args.causal)
    expected = bench.expected(args.peer, dtype)
    if dtype == torch.float32:
        # Errors of float32 are measured against float64, which has more digits.
        theirs, expected = expected, bench.expected("reference", torch.float64)
        for name, outputs in (
            (args.peer, theirs),
            ("reference", bench.expected("reference", dtype)),
        ):
            errors = ", ".join(
                f"{kind} {error_of(outputs[kind], expected[kind]):.2e}" for kind in outputs
            )
            print(f"error of {name}: {errors}")
    timed = list(usable(bench, wanted, expected, args.spills))
    calls: list[Callable[[], object]] = []
    for candidate, _ in timed:
        calls.append(lambda candidate=candidate: bench.run(candidate))  # type: ignore[misc]
    peer_out = attention(bench.q, bench.k, bench.v, is_causal=args.causal, impl=args.peer)
    inputs = (bench.q, bench.k, bench.v)
    calls.append(lambda: attention(*inputs, is_causal=args.causal, impl=args.peer))
    calls.append(lambda: torch.autograd.grad(peer_out, inputs, bench.grad, retain_graph=True))
    times = timed_interleaved(calls, args.rounds)
    rows = [row | {"ms": ms} for (_, row), ms in zip(timed, times, strict=False)]
    rows.sort(key=lambda row: (PASSES.index(row["pass"]), row["ms"]))
    mask = "causal" if args.causal else "full"
    print(f"\n{tuple(shape)} {args.dtype} {mask} {args.peer}: {times[-2]:.3f} + {times[-1]:.3f} ms")
    for kind in args.passes:
        for row in [row for row in rows if row["pass"] == kind][: args.top]:
            layout = " ".join(f"{field} {row[field]}" for field in FIELDS)
            print(
                f"  {kind:<10} {row['ms']:.3f} ms  {layout} | {row['registers_used']} registers,"
                f" {row['spills']} spilled, {row['shared'] >> 10} KiB, error {row['error']:.1e}"
            )
    peer_row = {"pass": args.peer, "forward_ms": times[-2], "backward_ms": times[-1]}
    common = {"shape": list(shape), "dtype": args.dtype, "causal": args.causal}
    return [common | row for row in (*rows, peer_row)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["1,16,16384,64"], help="B,H,S,D")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--pass", dest="passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--peer", default="sdpa_cudnn", help="the implementation to compare with")
    parser.add_argument("--full", dest="causal", action="store_false", help="without a causal mask")
    parser.add_argument("--spills", type=int, default=64, help="maximum of spilled registers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--top", type=int, default=8, help="rows to print per pass")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--out", type=Path, help="write every row to this JSON file")
    for field in FIELDS:
        kind = str if field == "precision" else int
        parser.add_argument(f"--{field}", type=kind, nargs="+", default=[])
    args = parser.parse_args()
    rows = [row for text in args.shape for row in tune(args, Shape(*map(int, text.split(","))))]
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
