"""Calls that differ in one property each, for the launch and dispatch caches on a GPU.

    python tests/launch_cases.py 3 results.pt

computes the fourth variant of every family, in a process that has not run any other variant.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stepscope.attention import ScoreRules, attention
from stepscope.kernels import (
    add_rms_norm,
    embedded,
    linear_cross_entropy,
    rms_norm,
    rotated_heads_,
    swiglu,
)
from stepscope.kernels.autotune import autotuned_matmuls
from stepscope.kernels.matmul import add_matmul, matmul_to_dtype
from stepscope.kernels.rope import rotated_parts_

Results = list[Tensor]
Variants = dict[str, Callable[[], Results]]
TRANSPOSED, UNALIGNED = "transposed", "unaligned"


def clear_caches() -> None:
    from stepscope.attention import api
    from stepscope.attention.triton import launch as triton_launch
    from stepscope.kernels import autotune

    caches = (
        triton_launch._PREPARED,
        triton_launch._SPLITTERS,
        api._DISPATCH_CACHE,
        autotune._chosen,
    )
    for cache in caches:
        cache.clear()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def placed(x: Tensor, dtype: torch.dtype, layout: str = "") -> Tensor:
    """Copy to the GPU: dense, with dimensions -2 and -3 swapped in memory, or at an address two
    bytes past a multiple of 16."""
    if layout == TRANSPOSED:
        room = torch.empty_like(x.transpose(-3, -2), device="cuda", dtype=dtype,
                                memory_format=torch.contiguous_format)  # fmt: skip
        return room.transpose(-3, -2).copy_(x)
    if layout == UNALIGNED:
        return torch.empty(x.numel() + 1, device="cuda", dtype=dtype)[1:].view(x.shape).copy_(x)
    return x.to("cuda", dtype)


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def attended(
    impl: str, dtype: torch.dtype, *, layouts: dict[str, str] | None = None, tf32: bool = False,
    backward: bool = True, heads: int = 4, key_heads: int = 4, length: int = 256, d: int = 64,
    contiguous_when_saved: bool = False, rules: dict[str, Any] | None = None,
    projected: bool = False, autocast: torch.dtype | None = None, **how: Any,
) -> Results:  # fmt: skip
    """Compute output and gradients of attention."""
    if rules is not None:
        how["rules"] = score_rules(heads, length, **rules)
    counts = {"q": heads, "k": key_heads, "v": key_heads, "grad": heads}
    q, k, v, grad = (
        placed(draw(2, count, length, d, seed=n), dtype, (layouts or {}).get(name, ""))
        for n, (name, count) in enumerate(counts.items())
    )
    if projected:
        one = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
        q, k, v = (x.transpose(1, 2) for x in one.unbind(2))
    leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    saving: Any = nullcontext()
    if contiguous_when_saved:
        saving = torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x)
    autocasting = torch.autocast("cuda", autocast, enabled=autocast is not None)
    with precision(tf32), saving:
        with autocasting:
            out = attention(*leaves, impl=impl, **how)
        gradients = torch.autograd.grad(out, leaves, grad.to(out.dtype)) if backward else ()
    return [x.detach().cpu() for x in (out, *gradients)]


def score_rules(heads: int, length: int, **fields: Any) -> ScoreRules:
    """Create rules on the GPU: `documents` and `cu_seqlens` are lengths of documents, `sinks` and
    `alibi_slopes` seeds."""
    for name in ("sinks", "alibi_slopes"):
        if name in fields:
            fields[name] = placed(draw(heads, seed=fields[name]).abs(), torch.float32)
    if "cu_seqlens" in fields:
        bounds = torch.arange(0, length + 1, fields["cu_seqlens"], device="cuda")
        fields["cu_seqlens"] = bounds
    if "documents" in fields:
        sizes = fields["documents"]
        ids = torch.stack([torch.arange(length, device="cuda") // size for size in sizes])
        fields["documents"] = ids[0] if len(sizes) == 1 else ids
    for name in ("prefix", "dropout_seed"):
        if isinstance(fields.get(name), tuple):
            fields[name] = torch.tensor(fields[name], device="cuda")
    return ScoreRules(**fields)


RULES: dict[str, dict[str, Any]] = {
    "window": {"window": 40},
    "another window": {"window": 130},
    "documents": {"documents": (50,)},
    "other documents": {"documents": (70,)},
    "documents of each batch": {"documents": (50, 70)},
    "cu_seqlens": {"cu_seqlens": 50},
    "prefix": {"prefix": 60},
    "prefix of each batch": {"prefix": (60, 10)},
    "soft cap": {"softcap": 2.0},
    "another soft cap": {"softcap": 3.0},
    "integer soft cap": {"softcap": 1},
    "slopes": {"alibi_slopes": 1},
    "other slopes": {"alibi_slopes": 2},
    "sinks": {"sinks": 1},
    "other sinks": {"sinks": 2},
    "dropout": {"dropout": 0.5, "dropout_seed": (1, 2)},
    "another dropout": {"dropout": 0.25, "dropout_seed": (1, 2)},
    "another seed": {"dropout": 0.5, "dropout_seed": (3, 2)},
    "another offset": {"dropout": 0.5, "dropout_seed": (1, 3)},
}


def attention_variants(impl: str, dtype: torch.dtype) -> Variants:
    everything = ("q", "k", "v", "grad")
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    changes: dict[str, dict[str, Any]] = {
        "base": {},
        **{f"{name} transposed": {"layouts": {name: TRANSPOSED}} for name in everything},
        "all transposed": {"layouts": dict.fromkeys(everything, TRANSPOSED)},
        "made contiguous when saved": {
            "layouts": dict.fromkeys(everything, TRANSPOSED), "contiguous_when_saved": True,
        },
        **{f"{name} unaligned": {"layouts": {name: UNALIGNED}} for name in everything},
        "one projection": {"projected": True},
        "dtype": {"dtype": other},
        "tf32": {"tf32": True},
        "autocast": {"autocast": torch.float16},
        "autocast from float32": {"dtype": torch.float32, "autocast": torch.bfloat16},
        "causal": {"is_causal": True},
        "scale 1": {"scale": 1},
        "scale 0.5": {"scale": 0.5},
        "negative scale": {"scale": -0.5},
        "key heads": {"key_heads": 2},
        "length": {"length": 200},
        "head dimension": {"d": 80},
    }  # fmt: skip
    if impl == "auto":
        # torch's backwards are not bitwise reproducible, and its kernels do not promise to support
        # unaligned addresses.
        changes = {name: x | {"backward": False} for name, x in changes.items() if
                   not name.endswith(UNALIGNED)}  # fmt: skip
    base = {"impl": impl, "dtype": dtype}
    return {name: partial(attended, **(base | change)) for name, change in changes.items()}


def rule_variants(impl: str, dtype: torch.dtype) -> Variants:
    base = partial(attended, impl, dtype, is_causal=True)
    return {"causal": base} | {name: partial(base, rules=x) for name, x in RULES.items()}


def fused(
    dtype: torch.dtype = torch.float32, layout: str = "", d: int = 64, eps: float = 1e-5,
    heads: int = 4, rows: int = 24,
) -> Results:  # fmt: skip
    """Compute every bitwise reproducible fused kernel, with its gradients."""

    def leaf(*shape: int, seed: int) -> Tensor:
        kind = "" if layout == TRANSPOSED and len(shape) < 3 else layout
        return placed(draw(*shape, seed=seed), dtype, kind).detach().requires_grad_()

    x, y = leaf(2, rows, d, seed=0), leaf(2, rows, d, seed=1)
    weight, table = leaf(d, seed=2), leaf(50, d, seed=3)
    tokens = torch.arange(2 * rows, device="cuda").view(2, rows) * 7 % 50
    cos, sin = (placed(draw(rows, 8, seed=n), torch.float32) for n in (4, 5))
    heads_in, parts_in = leaf(2, rows, heads * 16, seed=6), leaf(2, rows, 3 * heads * 16, seed=7)
    outputs = (
        rms_norm(x, weight, eps),
        *add_rms_norm(x, y, weight, eps),
        swiglu(x, y),
        embedded(tokens, table),
        rotated_heads_(heads_in * 1.0, cos, sin, heads),
        *rotated_parts_((parts_in * 1.0).contiguous(), cos, sin, heads),
    )
    total = sum((out.float() * math.pi ** (n % 3)).square().sum() for n, out in enumerate(outputs))
    leaves = [x, y, weight, table, heads_in, parts_in]
    return [t.detach().cpu() for t in (*outputs, *torch.autograd.grad(total, leaves))]


def loss(
    dtype: torch.dtype = torch.float32, layout: str = "", vocab: int = 512, d: int = 64,
    tf32: bool = False, factor: float = 1.0, **how: Any,
) -> Results:  # fmt: skip
    x = placed(draw(2, 24, d), dtype, layout).detach().requires_grad_()
    weight = placed(draw(vocab, d, seed=1), dtype).detach().requires_grad_()
    targets = torch.arange(48, device="cuda").view(2, 24) * 5 % vocab
    with precision(tf32):
        out = linear_cross_entropy(x, weight, targets, **how)
        gradients = torch.autograd.grad(out * factor, (x, weight))
    return [t.detach().cpu() for t in (out, *gradients)]


def matmul(
    dtype: torch.dtype = torch.bfloat16, a_layout: str = "", b_layout: str = "", n: int = 256,
    out_dtype: torch.dtype | None = None, adds: bool = False, reduces: bool = True,
) -> Results:  # fmt: skip
    def matrix(seed: int, layout: str) -> Tensor:
        x = draw(n, 256, seed=seed)
        if layout == TRANSPOSED:
            return placed(x.T.contiguous(), dtype).T
        return placed(x, dtype, layout)

    a, b = matrix(0, a_layout), matrix(1, b_layout).T
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = reduces
    try:
        with autotuned_matmuls():
            out = matmul_to_dtype(a, b, out_dtype or dtype)
            if adds:
                add_matmul(out, a, b)
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
    return [out.cpu()]


FAMILIES: dict[str, Variants] = {
    "attention in float32": attention_variants("triton", torch.float32),
    "attention in bfloat16": attention_variants("triton", torch.bfloat16),
    "dispatch by auto": attention_variants("auto", torch.bfloat16),
    "rules in float32": rule_variants("triton", torch.float32),
    "rules in bfloat16": rule_variants("triton", torch.bfloat16),
    "rules by auto": rule_variants("auto", torch.bfloat16),
    "fused kernels": {
        "base": fused,
        "bfloat16": partial(fused, dtype=torch.bfloat16),
        "float16": partial(fused, dtype=torch.float16),
        "transposed": partial(fused, layout=TRANSPOSED),
        "unaligned": partial(fused, layout=UNALIGNED),
        "width": partial(fused, d=63),
        "width of one": partial(fused, d=1),
        "eps": partial(fused, eps=1.0),
        "heads": partial(fused, heads=1),
        "rows": partial(fused, rows=1),
    },
    "loss": {
        "base": loss,
        "bfloat16": partial(loss, dtype=torch.bfloat16),
        "float16": partial(loss, dtype=torch.float16),
        "transposed": partial(loss, layout=TRANSPOSED),
        "unaligned": partial(loss, layout=UNALIGNED),
        "tf32": partial(loss, tf32=True),
        "vocabulary": partial(loss, vocab=509),
        "long rows": partial(loss, vocab=20_000),
        "sum": partial(loss, reduction="sum"),
        "ignored": partial(loss, ignore_index=5),
        "chunks": partial(loss, chunk_rows=16),
        "a factor": partial(loss, factor=3.0),
    },
    "autotuned matmuls": {
        "base": matmul,
        "float16": partial(matmul, dtype=torch.float16),
        "a transposed": partial(matmul, a_layout=TRANSPOSED),
        "b transposed": partial(matmul, b_layout=TRANSPOSED),
        "a unaligned": partial(matmul, a_layout=UNALIGNED),
        "b unaligned": partial(matmul, b_layout=UNALIGNED),
        "wide output": partial(matmul, out_dtype=torch.float32),
        "adds": partial(matmul, adds=True),
        "size": partial(matmul, n=128),
        "no reduction in 16 bits": partial(matmul, reduces=False),
    },
}
EXACT = (
    "attention in float32",
    "attention in bfloat16",
    "dispatch by auto",
    "rules in float32",
    "rules in bfloat16",
    "fused kernels",
)
"""Families that are bit-identical in every process; in the others cuBLAS or timing chooses kernels.
"""
MAX_VARIANTS = max(map(len, FAMILIES.values()))


def main(number: int, path: str) -> None:
    results = {}
    for family, variants in FAMILIES.items():
        if number < len(variants):
            clear_caches()
            name = list(variants)[number]
            results[family, name] = variants[name]()
    torch.save(results, path)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
