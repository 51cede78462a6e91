"""Inputs, references and timing of the benchmarks of the warp-specialized attention forward."""

from __future__ import annotations

import json
import os
import statistics
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda"
ROUNDS = 12
WAIT_CYCLES = 8_000_000


class Case(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    rows: int
    keys: int
    shift: int = 0


CASES = (
    Case(1, 2, 2, 128, 128),
    Case(1, 1, 1, 1, 1),
    Case(2, 4, 2, 256, 384),
    Case(1, 2, 1, 200, 200),
    Case(1, 2, 2, 64, 1000, 960),
    Case(1, 2, 2, 320, 192, -128),
    Case(1, 2, 2, 500, 1000, 192),
    Case(1, 2, 1, 448, 300, -64),
    Case(1, 3, 3, 1000, 1000),
    Case(4, 16, 16, 1024, 1024),
    Case(2, 8, 4, 777, 2048, 1280),
)


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, shift: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in float64; rows without a visible key are zero."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None]
        keys = torch.arange(k.shape[2], device=q.device)[None, :]
        scores = scores.masked_fill(keys > rows + shift, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def inputs(case: Case, head: int, seed: int) -> list[Tensor]:
    """Draw q, k and v in the layout of a projection: (B, rows, H, D) transposed."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [
        torch.randn(
            (case.batch, rows, heads, head),
            generator=generator,
            device=DEVICE,
            dtype=torch.bfloat16,
        ).transpose(1, 2)
        for heads, rows in (
            (case.heads, case.rows),
            (case.key_heads, case.keys),
            (case.key_heads, case.keys),
        )
    ]


def outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate output and log-sum-exp, filled with NaN."""
    out = torch.full_like(q, float("nan"))
    return out, torch.full(q.shape[:-1], float("nan"), device=DEVICE, dtype=torch.float32)


def end_after(seconds: float) -> None:
    """End this process if it is still running then, whatever the GPU does."""
    timer = threading.Timer(seconds, lambda: os._exit(3))
    timer.daemon = True
    timer.start()


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def milliseconds(calls: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median time of each call on the GPU, run one after the other in every round."""
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(rounds + 2):
        # The queue stays full, so that no kernel waits for the host within its interval.
        torch.cuda._sleep(WAIT_CYCLES)
        for name, call in calls.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            spans[name].append((first, last))
    torch.cuda.synchronize()
    return {n: statistics.median(a.elapsed_time(b) for a, b in s[2:]) for n, s in spans.items()}
