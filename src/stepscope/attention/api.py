"""`attention(q, k, v)`: one call, any implementation; `explain` says which one and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from stepscope.attention.inputs import checked_inputs
from stepscope.attention.registry import (
    AUTO,
    IMPLEMENTATIONS,
    PREFERENCE,
    AttentionFunction,
    Implementation,
    implementation,
)

_LOADED: dict[Callable[[], AttentionFunction], AttentionFunction] = {}
"""Import statements take microseconds even the second time."""


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
    entry = None if impl == AUTO else implementation(impl)
    q, k, v = checked_inputs(q, k, v, is_causal, scale, causal_align)
    if entry is None:
        entry = _first_that_takes(q, k, v, is_causal, scale, causal_align)
    else:
        refusal = entry.refuses(q, k, v, is_causal, scale, causal_align)
        if refusal is not None:
            raise ValueError(f"impl={impl!r} cannot take this input: {refusal}")
    function = _LOADED.get(entry.load)
    if function is None:
        function = _LOADED[entry.load] = entry.load()
    return function(q, k, v, is_causal=is_causal, scale=scale, causal_align=causal_align)


def _first_that_takes(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, causal_align: str | None
) -> Implementation:
    refusals = []
    for name in PREFERENCE:
        entry = IMPLEMENTATIONS[name]
        refusal = entry.refuses(q, k, v, is_causal, scale, causal_align)
        if refusal is None:
            return entry
        refusals.append(f"{name}: {refusal}")
    raise ValueError(f"no implementation takes this input ({'; '.join(refusals)})")


@dataclass(frozen=True)
class Verdict:
    """What one implementation says to an input."""

    name: str
    refusal: str | None
    """Why it cannot take the input; None where it can."""

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
        lines = [f"auto takes {self.chosen or 'nothing'}: the first that can of {order}"]
        for verdict in self.verdicts:
            lines.append(f"  {verdict.name:<{width}}  {verdict.refusal or 'can take this input'}")
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
    q, k, v = checked_inputs(q, k, v, is_causal, scale, causal_align)
    verdicts = tuple(
        Verdict(name, entry.refuses(q, k, v, is_causal, scale, causal_align))
        for name, entry in IMPLEMENTATIONS.items()
    )
    taking = {verdict.name for verdict in verdicts if verdict.takes}
    chosen = next((name for name in PREFERENCE if name in taking), None)
    return Explanation(chosen=chosen, preference=PREFERENCE, verdicts=verdicts)
