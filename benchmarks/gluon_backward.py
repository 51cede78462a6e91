"""Check and time variants of the warp-specialized attention backward; `gluon_attention.py` runs
this in processes of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gluon_cases import CASES, Case, end_after, inputs, milliseconds, outputs, reference, say
from torch import Tensor

from stepscope.attention import attention
from stepscope.attention.specialized import FORWARD, BackwardVariant
from stepscope.attention.triton import launch as triton_launch
from stepscope.attention.triton.specialized import first_launch
from stepscope.attention.triton.specialized_gradients import PreparedBackward

HEAD = 128
CLOSE = 1.2e-2
VARIANTS: dict[str, BackwardVariant] = {
    "one dQ by 8 heads": BackwardVariant(heads=8),
    "overlap by 8 heads": BackwardVariant(overlap=True, heads=8),
    "overlap, three stages by 8 heads": BackwardVariant(stages=3, overlap=True, heads=8),
}


def prepared(tensors: list[Tensor], case: Case, causal: bool, name: str) -> PreparedBackward:
    _, q, k, *_ = tensors
    return PreparedBackward(q, k, causal=causal, shift=case.shift, variant=VARIANTS[name])


def run(ready: PreparedBackward, tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients of q, k and v."""
    grads = empty(tensors)
    grad, q, k, v, out, lse = tensors
    ready.run(grad, q, k, v, out, lse, grads, HEAD**-0.5)
    return list(grads)


def empty(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    _, q, k, v, *_ = tensors
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def saved(case: Case, causal: bool, seed: int) -> list[Tensor]:
    """Return gradient, q, k, v, and output and log-sum-exp of the plain kernel."""
    q, k, v = inputs(case, HEAD, seed)
    grad = inputs(case, HEAD, seed + 100)[0]
    out, lse = triton_launch.forward(q, k, v, scale=HEAD**-0.5, causal=causal, shift=case.shift)
    return [grad, q, k, v, out, lse]


def check(name: str, compile_seconds: float, seconds: float, *, launch: bool) -> None:
    """Print a JSON line: the largest errors of one variant, or what went wrong. Without `launch`
    its kernels are compiled only."""
    end_after(compile_seconds + seconds)
    cases = [
        (case, causal)
        for case in CASES
        for causal in (False, True)
        if not (causal and case.shift < 0)
    ]
    for case, causal in cases:
        tensors = saved(case, causal, 0)
        ready = prepared(tensors, case, causal, name)
        ready.compile(tuple(tensors[:4]), empty(tensors), 1.0)
    torch.cuda.synchronize()
    if not launch:
        return
    end_after(seconds)
    worst = 0.0
    for case, causal in cases:
        ready = prepared(saved(case, causal, 0), case, causal, name)
        for seed in (1, 2):  # the second call of a shape has other inputs
            tensors = saved(case, causal, seed)
            leaves = [x.detach().double().requires_grad_() for x in tensors[1:4]]
            expected = torch.autograd.grad(
                reference(*leaves, causal, case.shift)[0], leaves, tensors[0].double()
            )
            grads = run(ready, tensors)
            for which, actual, wanted in zip("qkv", grads, expected, strict=True):
                size = float(wanted.norm())
                error = float((actual.double() - wanted).norm()) / max(size, 1e-3)
                if not error < CLOSE:
                    say(check=name, backward=which, failed=[*case, causal], error=error)
                    return
                worst = max(worst, error)
        for _ in range(3):
            again = run(ready, tensors)
            if not all(map(torch.equal, grads, again)):
                say(check=name, backward=True, failed=[*case, causal], error="bits do not repeat")
                return
    say(check=name, backward=True, d=HEAD, error=worst)


def measure(
    shape: tuple[int, int, int, int], causal: bool, names: list[str], seconds: float
) -> None:
    """Print JSON lines: times of forward and backward together, and of backward alone."""
    batch, heads, rows, _ = shape
    end_after(seconds)
    case = Case(batch, heads, heads, rows, rows)
    tensors = saved(case, causal, 3)
    grad, q, k, v = tensors[:4]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    how: dict[str, Any] = {"scale": HEAD**-0.5, "causal": causal, "shift": 0}

    room, variant = outputs(q), FORWARD[HEAD, causal]

    def both(impl: str) -> None:
        attended = attention(*leaves, is_causal=causal, impl=impl)
        torch.autograd.grad(attended, leaves, grad)

    all_ready = {name: prepared(tensors, case, causal, name) for name in names}
    for ready in all_ready.values():
        ready.compile(tuple(tensors[:4]), empty(tensors), 1.0)
    calls: dict[str, Callable[[], object]] = {
        "both: sdpa_cudnn": lambda: both("sdpa_cudnn"),
        "both: triton": lambda: both("triton"),
        "forward": lambda: first_launch((q, k, v), *room, variant=variant, **how),
        "backward: triton": lambda: triton_launch.backward(*tensors, **how),
    }
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    for name in names:
        calls[f"backward: {name}"] = lambda name=name: run(all_ready[name], tensors)  # type: ignore[misc]
        say(launched=name)
        calls[f"backward: {name}"]()
        torch.cuda.synchronize()
    flops = 2.0 * batch * heads * rows * rows * HEAD * (0.5 if causal else 1.0)
    matmuls = {"forward": 2, "both": 7, "backward": 5}
    for label, ms in milliseconds(calls).items():
        line: dict[str, Any] = {"shape": list(shape), "causal": causal, "name": label, "ms": ms}
        kind, _, name = label.partition(": ")
        line |= {"of": "gradients", "tflops": matmuls[kind] * flops / ms * 1e-9}
        if name in all_ready:
            kernel = all_ready[name].launch.kernel
            line |= {"registers": kernel.n_regs, "spilled": kernel.n_spills}
        say(**line)
