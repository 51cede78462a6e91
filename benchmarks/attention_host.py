"""Time of an attention call at short lengths, including host time.

    python benchmarks/attention_host.py

Calls follow each other without synchronization, as in a training loop, and the clock stops when the
GPU is idle. Compared are the public call with our kernels, with cuDNN's backward (`hopper`, where
it supports the input), with automatic choice, and torch's `scaled_dot_product_attention` called
directly, interleaved. Needs a GPU.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stepscope.attention import attention, explain

LENGTHS = (128, 256, 512, 1024)
HEADS = (64, 128)
CALLS = 200
ROUNDS = 9


def microseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS * 1e6


def interleaved(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    for call in calls.values():
        microseconds(call)
    rounds = [{name: microseconds(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(taken[name] for taken in rounds) for name in calls}


def main() -> None:
    implementations: dict[str, Callable[..., Tensor]] = {
        "triton": functools.partial(attention, impl="triton"),
        "hopper": functools.partial(attention, impl="hopper"),
        "auto": attention,
        "torch": scaled_dot_product_attention,
    }
    ratios: list[float] = []
    print("microseconds per call (1, 1, length, d), bfloat16, causal")
    print(
        f"{'pass':<10} {'d':>4} {'length':>7}" + "".join(f" {name:>9}" for name in implementations)
    )
    for head in HEADS:
        for length in LENGTHS:
            inputs = [
                torch.randn(1, 1, length, head, device="cuda", dtype=torch.bfloat16)
                for _ in range(4)
            ]
            q, k, v = (x.requires_grad_() for x in inputs[:3])

            def forward(attend: Callable[..., Tensor], q=q, k=k, v=v) -> Tensor:
                with torch.no_grad():
                    return attend(q, k, v, is_causal=True)

            def both(attend: Callable[..., Tensor], q=q, k=k, v=v, grad=inputs[3]) -> object:
                return torch.autograd.grad(attend(q, k, v, is_causal=True), (q, k, v), grad)

            verdicts = explain(q, k, v, is_causal=True).verdicts
            refused = {verdict.name for verdict in verdicts if verdict.refusal}
            for name, call in (("forward", forward), ("both", both)):
                times = interleaved(
                    {
                        key: functools.partial(call, attend)
                        for key, attend in implementations.items()
                        if key not in refused
                    }
                )
                ratios.append(times["auto"] / times["torch"])
                cells = "".join(
                    f" {times[key]:>9.1f}" if key in times else f" {'-':>9}"
                    for key in implementations
                )
                print(f"{name:<10} {head:>4} {length:>7}{cells}", flush=True)
    print(
        f"auto over torch: median {statistics.median(ratios):.3f},"
        f" {min(ratios):.3f} to {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
