"""`attention(q, k, v)`: one call, any implementation; `explain` says which one and why."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from stepscope.attention.inputs import checked_inputs
from stepscope.attention.registry import (
    AUTO,
    IMPLEMENTATIONS,
    PREFERENCE,
    AttentionFunction,
    BoundAttention,
    Implementation,
    Inputs,
    implementation,
)

_DECIDED: dict[tuple[object, ...], BoundAttention] = {}
"""Where a call was sent: at short lengths deciding anew would take longer than the GPU does."""
_MOST_DECIDED = 4096


def attention(
    q: Tensor,  # (..., heads, seq_q, d)
    k: Tensor,  # (..., key heads, seq_k, d)
    v: Tensor,  # (..., key heads, seq_k, d_v)
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
    impl: str = AUTO,
) -> Tensor:
    """softmax(q kᵀ · scale) v; the scale is 1/√d unless given, `impl` names the implementation.

    Tensors may have any leading dimensions, none included. With four or more, k and v may have
    fewer heads than q (dimension -3), each shared by as many neighbouring heads of q.

    A causal mask over unequal lengths needs `causal_align`: "top-left" lets the first query see the
    first key, "bottom-right" the last query the last key. Rows that see no key are zero.

    Bad inputs, and inputs that the named implementation refuses, are a ValueError; an unknown name
    is a UsageError. A named implementation never falls back to another.
    """
    # The compiler runs this once for a graph, and its shapes may be symbols.
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        return _decide_and_attend(q, k, v, is_causal, scale, causal_align, impl, None)
    try:
        # Strides and alignment are no part of it: none of these functions is chosen by them, and
        # each that keeps something for them has a key of its own.
        key = (
            impl, is_causal, scale, causal_align, q.shape, k.shape, v.shape,
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
        )  # fmt: skip
        decided = _DECIDED.get(key)
    except (AttributeError, TypeError):
        # No tensor, or nothing that hashes: the check below says what is wrong.
        key, decided = None, None
    if decided is None:
        return _decide_and_attend(q, k, v, is_causal, scale, causal_align, impl, key)
    return decided(q, k, v)


def _decide_and_attend(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None,
    causal_align: str | None, impl: str, key: tuple[object, ...] | None,
) -> Tensor:  # fmt: skip
    """Check, decide, compute; what was decided is kept under the key, if there is one."""
    entry = None if impl == AUTO else implementation(impl)
    q, k, v = checked_inputs(q, k, v, is_causal, scale, causal_align)
    inputs = (q, k, v, is_causal, scale, causal_align)
    if entry is None:
        entry = _first_that_takes(*inputs)
    else:
        refusal = entry.refuses(*inputs)
        if refusal is not None:
            raise ValueError(f"impl={impl!r} cannot take this input: {refusal}")
    function = entry.load()
    if key is not None and entry.decides_by_shape:
        if len(_DECIDED) >= _MOST_DECIDED:
            _DECIDED.clear()
        _DECIDED[key] = (
            entry.bind(*inputs)
            if entry.bind
            else functools.partial(
                function, is_causal=is_causal, scale=scale, causal_align=causal_align
            )
        )
    return function(q, k, v, is_causal=is_causal, scale=scale, causal_align=causal_align)


def _first_that_takes(*inputs: *Inputs) -> Implementation:
    refusals = []
    for name in PREFERENCE:
        entry = IMPLEMENTATIONS[name]
        refusal = entry.refuses(*inputs) or entry.leaves(*inputs)
        if refusal is None:
            return entry
        refusals.append(f"{name}: {refusal}")
    raise ValueError(f"no implementation takes this input ({'; '.join(refusals)})")


def attention_with(impl: str) -> AttentionFunction:
    """`attention` by one implementation: inputs are checked, a refusal is an error."""
    return functools.partial(attention, impl=implementation(impl).name)


@dataclass(frozen=True)
class Verdict:
    """What one implementation says to an input."""

    name: str
    refusal: str | None
    """Why it cannot take the input; None where it can."""
    leaves: str | None = None
    """Why `auto` passes it by all the same."""

    @property
    def takes(self) -> bool:
        return self.refusal is None


@dataclass(frozen=True)
class Explanation:
    """What `impl="auto"` takes for an input, and what every implementation says to it."""

    chosen: str | None
    preference: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        width = max(len(verdict.name) for verdict in self.verdicts)
        order = ", ".join(self.preference)
        lines = [f"auto takes {self.chosen or 'nothing'}: the first that is good for it of {order}"]
        for verdict in self.verdicts:
            said = verdict.refusal or "can take this input"
            if verdict.takes and verdict.leaves:
                said += f"; auto passes it by: {verdict.leaves}"
            lines.append(f"  {verdict.name:<{width}}  {said}")
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
) -> Explanation:
    """Which implementation `impl="auto"` takes for this input, and why not the others. Printable.

    A bad input is a ValueError, as in `attention`.
    """
    inputs = (
        *checked_inputs(q, k, v, is_causal, scale, causal_align), is_causal, scale, causal_align
    )  # fmt: skip
    verdicts = tuple(
        Verdict(name, entry.refuses(*inputs), entry.leaves(*inputs))
        for name, entry in IMPLEMENTATIONS.items()
    )
    taking = {verdict.name for verdict in verdicts if verdict.takes and not verdict.leaves}
    chosen = next((name for name in PREFERENCE if name in taking), None)
    return Explanation(chosen=chosen, preference=PREFERENCE, verdicts=verdicts)
