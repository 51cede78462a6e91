"""`attention(q, k, v)`: one function for every implementation; `explain` reports which one runs and
why."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from stepscope.attention.call import AttentionCall, BoundAttention
from stepscope.attention.inputs import as_autocast_would, autocast_dtype, checked_call
from stepscope.attention.registry import (
    AUTO,
    IMPLEMENTATIONS,
    PREFERENCE,
    AttentionFunction,
    Implementation,
    implementation,
)
from stepscope.attention.rules import ScoreRules
from stepscope.torch_tools.derivatives import transforms_active

# Looked up once: a call with a known shape is little more than these.
_is_compiling = torch.compiler.is_compiling
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_deterministic_algorithms = torch._C._get_deterministic_algorithms
_cudnn_sdp_enabled = torch._C._get_cudnn_sdp_enabled
_DISPATCH_CACHE: dict[tuple[object, ...], BoundAttention] = {}
"""Dispatch cache: for short inputs dispatch costs more than the kernel."""
_MAX_DISPATCH_CACHE = 4096


def attention(
    q: Tensor,  # (..., heads, seq_q, d)
    k: Tensor,  # (..., key heads, seq_k, d)
    v: Tensor,  # (..., key heads, seq_k, d_v)
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
    rules: ScoreRules | None = None,
    impl: str = AUTO,
) -> Tensor:
    """Compute softmax(q kᵀ · scale) v with the implementation named by `impl`: one of
    `IMPLEMENTATION_NAMES`, or "auto" for the fastest that supports the input (see `explain`).

    The scale defaults to 1/√d. Tensors may have any number of leading dimensions, including none.
    With four or more dimensions, k and v may have fewer heads (dimension -3) than q: grouped-query
    attention, in which consecutive query heads share a key head.

    A causal mask over unequal lengths needs `causal_align`: "top-left" aligns the first query with
    the first key, "bottom-right" the last query with the last key. Rows without a visible key are
    zero.

    `rules` adds sliding windows, packed documents, prefixes, soft-capping, ALiBi, attention sinks,
    biases and dropout. Create one `ScoreRules` per step and pass it to every layer: what is derived
    from it is computed once.

    Raises ValueError for invalid inputs and for inputs that the named implementation does not
    support, and UsageError for an unknown name. A named implementation never falls back to another.
    """
    # torch.compile traces this once per graph, and its shapes may be symbolic. Under a transform
    # fewer implementations are supported.
    if _is_compiling() or transforms_active():
        call = AttentionCall(q, k, v, is_causal, scale, causal_align, rules)
        return _dispatch(call, impl, None)
    cast_to = None
    try:
        if _is_any_autocast_enabled():
            cast_to = autocast_dtype(q)
        # Strides and alignment are not in the key: dispatch does not depend on them, and an
        # implementation that caches by them has its own key.
        key = (
            impl,
            is_causal,
            scale,
            causal_align,
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.device,
            k.device,
            v.device,
            cast_to,
            None if rules is None else rules.key,
            _deterministic_algorithms(),
            _cudnn_sdp_enabled(),
        )
        bound = _DISPATCH_CACHE.get(key)
    except (AttributeError, TypeError):
        # Not a tensor, or not hashable: the check in _dispatch reports what is wrong.
        key, bound = None, None
    if bound is None:
        call = AttentionCall(q, k, v, is_causal, scale, causal_align, rules)
        return _dispatch(call, impl, key)
    if cast_to is not None:
        q, k, v = (as_autocast_would(x) for x in (q, k, v))
    return bound(q, k, v) if rules is None else bound(q, k, v, rules=rules)


def _dispatch(call: AttentionCall, impl: str, key: tuple[object, ...] | None) -> Tensor:
    """Check the inputs, choose an implementation, cache the choice under `key` and compute."""
    entry = None if impl == AUTO else implementation(impl)
    call = checked_call(call)
    if entry is None:
        entry = _first_supported(call)
    else:
        refusal = entry.load().refuses(call)
        if refusal is not None:
            raise ValueError(f"impl={impl!r} does not support this input: {refusal}")
    backend = entry.load()
    if key is not None and entry.decides_by_shape:
        if len(_DISPATCH_CACHE) >= _MAX_DISPATCH_CACHE:
            _DISPATCH_CACHE.clear()
        _DISPATCH_CACHE[key] = backend.bind(call)
    return backend.attend(call)


def _first_supported(call: AttentionCall) -> Implementation:
    refusals = []
    for name in PREFERENCE:
        entry = IMPLEMENTATIONS[name]
        backend = entry.load()
        refusal = backend.refuses(call) or backend.leaves(call)
        if refusal is None:
            return entry
        refusals.append(f"{name}: {refusal}")
    raise ValueError(f"no implementation supports this input ({'; '.join(refusals)})")


def attention_with(impl: str) -> AttentionFunction:
    """Bind `attention` to one implementation. Inputs are checked; an unsupported one raises."""
    return functools.partial(attention, impl=implementation(impl).name)


@dataclass(frozen=True)
class Support:
    """Support of one implementation for an input, with the reason if it has none."""

    name: str
    refusal: str | None
    """Reason why the input is not supported; None if it is."""
    leaves: str | None = None
    """Reason why `auto` prefers another implementation although this one supports the input."""
    details: str | None = None
    """What the implementation runs for this input, where it has a choice."""

    @property
    def takes(self) -> bool:
        return self.refusal is None


@dataclass(frozen=True)
class Explanation:
    """The implementation that `impl="auto"` chooses for an input, and which implementations support
    it."""

    chosen: str | None
    preference: tuple[str, ...]
    verdicts: tuple[Support, ...]

    def __str__(self) -> str:
        width = max(len(verdict.name) for verdict in self.verdicts)
        order = ", ".join(self.preference)
        lines = [f"auto chooses {self.chosen or 'nothing'}: the first suitable one of {order}"]
        for verdict in self.verdicts:
            text = verdict.refusal or "supports this input"
            if verdict.takes and verdict.leaves:
                text += f"; not chosen by auto: {verdict.leaves}"
            if verdict.takes and verdict.details:
                text += f"; {verdict.details}"
            lines.append(f"  {verdict.name:<{width}}  {text}")
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
    rules: ScoreRules | None = None,
) -> Explanation:
    """Report which implementation `impl="auto"` chooses for this input, and why not the others.

    The result is printable. An invalid input raises ValueError, as in `attention`.
    """
    call = checked_call(AttentionCall(q, k, v, is_causal, scale, causal_align, rules))
    verdicts = tuple(_support(entry, call) for entry in IMPLEMENTATIONS.values())
    suitable = {verdict.name for verdict in verdicts if verdict.takes and not verdict.leaves}
    chosen = next((name for name in PREFERENCE if name in suitable), None)
    return Explanation(chosen=chosen, preference=PREFERENCE, verdicts=verdicts)


def _support(entry: Implementation, call: AttentionCall) -> Support:
    backend = entry.load()
    refusal = backend.refuses(call)
    if refusal is not None:
        return Support(entry.name, refusal)
    return Support(entry.name, None, backend.leaves(call), backend.details(call))
