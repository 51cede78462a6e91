"""Speed of an implementation of one process, interleaved with Stepscope's and torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stepscope.errors import one_line
from stepscope.grading.check.cases import SpeedCase
from stepscope.grading.criteria.implementation import Implementation, as_attention, as_norm
from stepscope.grading.criteria.interpreter import Launches
from stepscope.measure.interleaved import time_interleaved
from stepscope.studies.base import Bench, CaseSkipped, Measurement

_ATTENTION = {"cpu": (4, 512, 64), "cuda": (64, 4096, 64)}
_NORM = {"cpu": (1024, 1024), "cuda": (16_384, 4096)}


def time_alone(case: SpeedCase, bench: Bench) -> Measurement:
    """Time forward and backward on the same tensors."""
    device = bench.device
    made = Implementation(case)
    of_kind = _attention if case.kind == "FlashAttention" else _norm
    sizes, dtype, calls = of_kind(made, device.kind)
    variants: dict[str, Callable[[], object]] = {}
    excluded: dict[str, str] = {}
    for name, call in calls.items():
        try:
            with Launches() as launches:
                call()
        except Exception as error:
            excluded[name] = one_line(error)
            continue
        if launches.interpreted:
            excluded[name] = "Triton's interpreter runs it here: time it on a GPU"
            continue
        variants[name] = call
    if "yours" not in variants:
        raise CaseSkipped(excluded["yours"])
    timing = time_interleaved(
        variants,
        device,
        rounds=case.rounds,
        progress=lambda done, total: bench.progress(done, total, "rounds"),
    )
    shape = "×".join(map(str, sizes))
    return Measurement(
        series=timing.series,
        readings=timing.readings,
        notes={"shape": f"{shape}, {str(dtype).removeprefix('torch.')}"},
        attachments={"excluded": excluded},
    )


Calls = dict[str, Callable[[], object]]


def _attention(made: Implementation, device: str) -> tuple[tuple[int, ...], torch.dtype, Calls]:
    from stepscope.attention import FlashAttentionTorch, FlashAttentionTriton

    own = as_attention(made).call
    ours = FlashAttentionTriton if device == "cuda" else FlashAttentionTorch
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = _ATTENTION[device]
    q, k, v, grad = (torch.randn(sizes, device=device, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Four dimensions: the fused kernels need them.
        heads = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        return heads[0]

    forward: dict[str, Callable[..., Any]] = {
        "yours": lambda q, k, v: own(q, k, v, True),
        "stepscope": lambda q, k, v: ours.apply(q, k, v, True),
        "torch": sdpa,
    }
    calls = {name: partial(_step, call, leaves, grad) for name, call in forward.items()}
    return (*sizes,), dtype, dict(calls)


def _norm(made: Implementation, device: str) -> tuple[tuple[int, ...], torch.dtype, Calls]:
    from stepscope.kernels.norm import plain_rms_norm, rms_norm

    # Without a GPU the kernel would run in the interpreter.
    ours = rms_norm if device == "cuda" else plain_rms_norm
    norm = as_norm(made)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    sizes = _NORM[device]
    x, grad = (torch.randn(sizes, device=device, dtype=dtype) for _ in range(2))
    weight = torch.ones(sizes[-1], device=device, dtype=dtype)
    leaves = [t.requires_grad_() for t in (x, weight)]
    eps = norm.eps or 1e-5
    forward: dict[str, Callable[..., Any]] = {
        "yours": lambda x, weight: norm.call(x, weight, eps),
        "stepscope": lambda x, weight: ours(x, weight, eps),
        "torch": lambda x, weight: functional.rms_norm(x, weight.shape, weight, eps),
    }
    calls = {name: partial(_step, call, leaves, grad) for name, call in forward.items()}
    return (*sizes,), dtype, dict(calls)


def _step(call: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(call(*leaves), leaves, grad)
