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
from stepscope.grading.criteria.implementation import EPS, Implementation, as_attention, as_norm
from stepscope.grading.criteria.interpreter import Launches
from stepscope.measure.interleaved import time_interleaved
from stepscope.studies.base import Bench, CaseSkipped, Measurement

Sizes = tuple[int, ...]
Tensors = list[Tensor]
Variants = dict[str, Callable[..., Any]]

_ATTENTION: dict[str, Sizes] = {"cpu": (4, 512, 64), "cuda": (64, 4096, 64)}
_NORM: dict[str, Sizes] = {"cpu": (1024, 1024), "cuda": (16_384, 4096)}


def time_alone(case: SpeedCase, bench: Bench) -> Measurement:
    """Time forward and backward on the same tensors."""
    device = bench.device
    made = Implementation(case)
    of_kind = _attention if case.kind == "FlashAttention" else _norm
    sizes, tensors, forward = of_kind(made, device.kind)
    dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
    leaves = [x.to(device.kind, dtype).requires_grad_() for x in tensors]
    grad = torch.randn(sizes, device=device.kind, dtype=dtype)
    variants: dict[str, Callable[[], object]] = {}
    excluded: dict[str, str] = {}
    for name, function in forward.items():
        call = partial(_step, function, leaves, grad)
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


def _attention(made: Implementation, device: str) -> tuple[Sizes, Tensors, Variants]:
    from stepscope.attention import FlashAttentionTorch, FlashAttentionTriton

    own = as_attention(made).call
    ours = FlashAttentionTriton if device == "cuda" else FlashAttentionTorch

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Four dimensions: the fused kernels need them.
        heads = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        return heads[0]

    sizes = _ATTENTION[device]
    return (
        sizes,
        [torch.randn(sizes) for _ in range(3)],
        {
            "yours": lambda q, k, v: own(q, k, v, True),
            "stepscope": lambda q, k, v: ours.apply(q, k, v, True),
            "torch": sdpa,
        },
    )


def _norm(made: Implementation, device: str) -> tuple[Sizes, Tensors, Variants]:
    from stepscope.kernels.norm import plain_rms_norm, rms_norm

    # Without a GPU the kernel would run in the interpreter.
    ours = rms_norm if device == "cuda" else plain_rms_norm
    norm = as_norm(made)
    sizes, eps = _NORM[device], norm.eps or EPS
    return (
        sizes,
        [torch.randn(sizes), torch.ones(sizes[-1])],
        {
            "yours": lambda x, weight: norm.call(x, weight, eps),
            "stepscope": lambda x, weight: ours(x, weight, eps),
            "torch": lambda x, weight: functional.rms_norm(x, weight.shape, weight, eps),
        },
    )


def _step(call: Callable[..., Tensor], leaves: Tensors, grad: Tensor) -> None:
    torch.autograd.grad(call(*leaves), leaves, grad)
