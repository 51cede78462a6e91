"""Gain of GEMMs from the cuBLAS kernels that are the most energy-efficient.

    python benchmarks/gemms_at_power_cap.py
    python benchmarks/gemms_at_power_cap.py xl-512 2.7b-2048 --seconds 0.4

torch uses the first kernel of cuBLAS's heuristic for a GEMM; `stepscope.kernels.autotune` tries all
of them. The fused GEMMs of one block, forward and backward, in the dtypes of our step, run without
a pause long enough for the power cap to act, with either kernel. Then the full block runs both
ways, interleaved, for time and energy. About half a minute per race on an H200.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from energy_by_part import Call, repeated
from step_matmuls import block_groups
from step_race.energy import Energy, measure_energy
from step_race.races import RACES as ALL_RACES
from step_race.races import racers
from torch import Tensor

from stepscope.kernels.autotune import autotuned_matmuls
from stepscope.kernels.matmul import matmul_to_dtype
from stepscope.measure.device import Device, pick_device
from stepscope.model.config import ModelConfig

SETS = 3
"""Sets of operands, so that none is in the cache because of the previous launch."""
LEAD_S, BLOCK_S, ROUNDS = 0.1, 3.0, 2
RACES = ("xl-512", "2.7b-512", "xl-2048", "2.7b-2048")


class Case(NamedTuple):
    """One GEMM of a block."""

    name: str
    pairs: list[tuple[Tensor, Tensor]]
    dtype: torch.dtype

    def by_heuristic(self) -> None:
        for a, b in self.pairs:
            matmul_to_dtype(a, b, self.dtype)

    def autotuned(self) -> None:
        with autotuned_matmuls():
            self.by_heuristic()

    @property
    def flops(self) -> int:
        a, b = self.pairs[0]
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def cases(config: ModelConfig, tokens: int) -> Iterator[Case]:
    def drawn(rows: int, columns: int) -> list[Tensor]:
        shape = (rows, columns)
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]

    def case_of(name: str, left: list[Tensor], right: list[Tensor], dtype: torch.dtype) -> Case:
        return Case(name, list(zip(left, right, strict=True)), dtype)

    for group in block_groups(config, fused_projections=True):
        x, weight = drawn(tokens, group.into), drawn(group.out, group.into)
        grad = drawn(tokens, group.out)
        narrow, wide = torch.bfloat16, torch.float32
        yield case_of(f"{group.name}, forward", x, [w.T for w in weight], narrow)
        yield case_of(f"{group.name}, towards the input", grad, weight, narrow)
        yield case_of(f"{group.name}, towards the weight", [g.T for g in grad], x, wide)


def sustained_ms(replay: Call, seconds: float) -> float:
    """Milliseconds of one replay among others, after a warm-up."""
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    replay()
    torch.cuda.synchronize()
    each_s = time.perf_counter() - began
    lead, counted = (max(2, int(s / each_s)) for s in (LEAD_S, seconds))
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(lead):
        replay()
    first.record()
    for _ in range(counted):
        replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / counted


def compared_line(case: Case, device: Device, seconds: float) -> str:
    case.autotuned()
    default, best = (
        sustained_ms(repeated(call, device), seconds) / SETS
        for call in (case.by_heuristic, case.autotuned)
    )
    rates = [case.flops / ms * 1e-9 for ms in (default, best)]
    return (
        f"{case.name:<30} {default * 1e3:>8.1f} {rates[0]:>8.0f} {best * 1e3:>8.1f}"
        f" {rates[1]:>8.0f} {default / best:>7.3f}"
    )


def in_a_row(calls: list[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def compared(name: str, device: Device, seconds: float) -> None:
    work = racers(name)[0].workload
    gemms = list(cases(work.model(), work.batch * work.context))
    print(f"\n{name}, a block{'':<17} {'rule µs':>8} {'TFLOP/s':>8} {'best µs':>8} {'TFLOP/s':>8}")
    for case in gemms:
        print(compared_line(case, device, seconds), flush=True)
    graphs = {
        "heuristic": repeated(in_a_row([case.by_heuristic for case in gemms]), device),
        "autotuned": repeated(in_a_row([case.autotuned for case in gemms]), device),
    }
    energies: dict[str, list[Energy]] = {side: [] for side in graphs}
    for _ in range(ROUNDS):
        for side, replay in graphs.items():
            energy = measure_energy(replay, device, BLOCK_S)
            if isinstance(energy, str):
                print(energy)
                return
            energies[side].append(energy)
    for side, taken_by in energies.items():
        ms, joules, watts = (
            statistics.mean(getattr(each, field) for each in taken_by)
            for field in ("step_ms", "joules", "watts")
        )
        print(f"{side:<30} {ms / SETS:.3f} ms {joules / SETS:.3f} J {watts:.0f} W")
    times = [statistics.mean(each.step_ms for each in energies[side]) for side in graphs]
    print(f"autotuned they are {times[0] / times[1]:.3f} times as fast")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("races", nargs="*", default=list(RACES), help=f"of {', '.join(RACES)}")
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds per kernel (0.2)")
    options = parser.parse_args()
    unknown = [name for name in options.races if name not in ALL_RACES]
    if unknown:
        print(f"no such race: {', '.join(unknown)}; choose from {', '.join(RACES)}")
        return 2
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    device = pick_device("cuda")
    print(f"{device.name}, torch {torch.__version__}")
    for name in options.races:
        compared(name, device, options.seconds)
        device.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
