"""The keys that a query sees under a causal mask and `ScoreRules`, in two forms.

`visible_keys` is the definition: a dense boolean mask. `key_intervals` is what kernels read: under
every rule the visible keys of a query are one interval, and both of its ends never decrease from a
query to the next, so that the ends of a tile are those of its first and last row. The queries that
see a key are therefore an interval as well (`query_intervals`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from stepscope.attention.masking import BOTTOM_RIGHT
from stepscope.attention.rules import VISIBILITY
from stepscope.torch_tools.capturing import is_capturing
from stepscope.torch_tools.derivatives import transforms_active

if TYPE_CHECKING:
    from stepscope.attention.rules import ScoreRules


class Lengths(NamedTuple):
    """Sizes and settings on which visibility depends, besides the rules."""

    seq_q: int
    seq_k: int
    is_causal: bool
    causal_align: str | None
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, is_causal: bool, causal_align: str | None) -> Lengths:
        return cls(q.shape[-2], k.shape[-2], is_causal, causal_align, q.device)


def _document_numbers(rules: ScoreRules, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Return the document of each query and of each key, (1 or batch, seq), never decreasing."""
    if rules.documents is not None:
        ids = rules.documents if rules.documents.dim() == 2 else rules.documents[None]
        starts = torch.zeros_like(ids)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        numbers = starts.cumsum(-1)
        return numbers, numbers
    rows = torch.arange(lengths.seq_q, device=lengths.device)[None]
    keys = torch.arange(lengths.seq_k, device=lengths.device)[None]
    if rules.cu_seqlens is None:
        return torch.zeros_like(rows), torch.zeros_like(keys)
    pair = rules.cu_seqlens if isinstance(rules.cu_seqlens, tuple) else (rules.cu_seqlens,) * 2
    of_q, of_k = (
        _position_in(bounds.to(x.dtype).contiguous(), x, right=True)
        for bounds, x in zip(pair, (rows, keys), strict=True)
    )
    return of_q, of_k


def _prefix(rules: ScoreRules) -> int | Tensor | None:
    return rules.prefix[:, None] if isinstance(rules.prefix, Tensor) else rules.prefix


def distances(rules: ScoreRules, lengths: Lengths) -> Tensor:
    """Return p - j, (1 or batch, seq_q, seq_k): the distance from each query's position to each
    key, counted within the document."""
    of_q, of_k = _document_numbers(rules, lengths)
    row, key = _position(of_q), _position(of_k)
    shift = torch.zeros_like(row)
    if lengths.causal_align == BOTTOM_RIGHT:
        together = of_q[:, :, None] == of_k[:, None, :]
        same = of_q[:, :, None] == of_q[:, None, :]
        shift = together.sum(-1) - same.sum(-1)
    return (row + shift)[:, :, None] - key[:, None, :]


def _position(documents: Tensor) -> Tensor:
    """Return the number of earlier tokens of the same document."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril(-1).sum(-1)


def visible_keys(rules: ScoreRules, lengths: Lengths) -> Tensor:
    """Return the mask, (1 or batch, seq_q, seq_k), that is True where the query sees the key."""
    of_q, of_k = _document_numbers(rules, lengths)
    together = of_q[:, :, None] == of_k[:, None, :]
    distance = distances(rules, lengths)
    visible = together
    if lengths.is_causal:
        visible = visible & (distance >= 0)
    if rules.window is not None:
        visible = visible & (distance.abs() < rules.window)
    prefix = _prefix(rules)
    if prefix is not None:
        limit = prefix[:, None] if isinstance(prefix, Tensor) else prefix
        visible = visible | (together & (_position(of_k)[:, None, :] < limit))
    return visible


def key_intervals(rules: ScoreRules, lengths: Lengths) -> Tensor:
    """Return the first visible key of each query and the one after the last, int32 of
    (1 or batch, 2, seq_q)."""
    return cached(rules, "keys", lengths, _key_intervals)


def query_intervals(rules: ScoreRules, lengths: Lengths) -> Tensor:
    """Return the first query that sees each key and the one after the last, int32 of
    (1 or batch, 2, seq_k)."""
    return cached(rules, "queries", lengths, _query_intervals)


def _key_intervals(rules: ScoreRules, lengths: Lengths) -> Tensor:
    of_q, of_k = _document_numbers(rules, lengths)
    of_q, of_k = of_q.contiguous(), of_k.contiguous()
    start, stop = (_position_in(of_k, of_q, right=right) for right in (False, True))
    first_row = _position_in(of_q, of_q)
    rows = torch.arange(lengths.seq_q, device=lengths.device)
    position = start + rows - first_row
    if lengths.causal_align == BOTTOM_RIGHT:
        count = _position_in(of_q, of_q, right=True) - first_row
        position = position + (stop - start) - count
    low, high = start, stop
    if lengths.is_causal:
        high = torch.minimum(high, position + 1)
    if rules.window is not None:
        low = torch.maximum(low, position - rules.window + 1)
        if not lengths.is_causal:
            high = torch.minimum(high, position + rules.window)
    prefix = _prefix(rules)
    if prefix is not None:
        high = torch.maximum(high, start + prefix)
    high = torch.maximum(torch.minimum(high, stop), start)
    low = torch.minimum(low.expand_as(high), high)
    return torch.stack((low, high), 1).to(torch.int32)


def _query_intervals(rules: ScoreRules, lengths: Lengths) -> Tensor:
    return intervals_of_queries(key_intervals(rules, lengths), lengths.seq_k)


def intervals_of_queries(intervals: Tensor, seq_k: int) -> Tensor:
    """Return the intervals of queries, (1 or batch, 2, seq_k), for those of keys."""
    keys = torch.arange(seq_k, device=intervals.device, dtype=torch.int32)
    keys = keys.expand(intervals.shape[0], -1).contiguous()
    # The first query whose interval ends after the key, and the first whose interval starts after.
    low, high = (_position_in(intervals[:, end].contiguous(), keys, right=True) for end in (1, 0))
    return torch.stack((low, high), 1).to(torch.int32)


def _position_in(ascending: Tensor, values: Tensor, *, right: bool = False) -> Tensor:
    """Return `searchsorted`, as an operator of ours in a compiled graph: on a GPU, Inductor of
    torch 2.11 returns other positions in a fused kernel."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        found: Tensor = _searchsorted(ascending, values, right)
        return found
    return torch.searchsorted(ascending, values, right=right)


@torch.library.custom_op("stepscope::searchsorted", mutates_args=())
def _searchsorted(ascending: Tensor, values: Tensor, right: bool) -> Tensor:
    return torch.searchsorted(ascending, values, right=right)


@_searchsorted.register_fake
def _(ascending: Tensor, values: Tensor, right: bool) -> Tensor:  # noqa: ARG001
    return torch.empty_like(values, dtype=torch.int64, memory_format=torch.contiguous_format)


_Made = TypeVar("_Made")
_BY_NUMBERS: dict[tuple[object, ...], Any] = {}
_MAX_BY_NUMBERS = 256
_IN_GRAPHS: dict[tuple[object, ...], Any] = {}
"""Entries of `_BY_NUMBERS` that CUDA graphs read: they are never freed."""


def cached(
    rules: ScoreRules, name: str, lengths: Lengths, create: Callable[[ScoreRules, Lengths], _Made]
) -> _Made:
    """Return what `create` derives from the rules that hide keys, created once for all layers that
    share the rules.

    Nothing is added in a trace, a capture, a dispatch mode or a transform. Tensors created while a
    CUDA graph is captured have no values before the first replay, and live in the graph's memory;
    those of a mode or a transform may be fake or wrapped, and useless after it. A capture uses what
    earlier calls derived from numbers; tensors may change between replays.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or transforms_active():
        return create(rules, lengths)
    inputs = [x for which, x in rules.tensors if which in VISIBILITY]
    by_numbers: tuple[object, ...] = (name, lengths, rules.window, rules.prefix)
    if is_capturing():
        earlier = None if inputs else _BY_NUMBERS.get(by_numbers)
        if earlier is None:
            return create(rules, lengths)
        _IN_GRAPHS[by_numbers] = earlier
        of_earlier: _Made = earlier[1]
        return of_earlier
    if any(x.is_inference() for x in inputs):
        return create(rules, lengths)
    # An in-place change of a tensor increments its version.
    versions = [x._version for x in inputs]
    cache: dict[Any, Any] = rules._cache
    key: tuple[object, ...] = (name, lengths)
    if not inputs:
        cache, key = _BY_NUMBERS, by_numbers
    known, found = cache.get(key, (None, None))
    if known != versions:
        # The first caller may run in inference mode, and a training step cannot save its tensors.
        with torch.inference_mode(False):
            found = create(rules, lengths)
        if len(cache) >= _MAX_BY_NUMBERS:
            cache.clear()
        cache[key] = versions, found
    made: _Made = found
    return made


def visible_pairs(
    rules: ScoreRules,
    q: Tensor,
    k: Tensor,
    *,
    is_causal: bool = False,
    causal_align: str | None = None,
) -> int:
    """Return the number of query and key pairs of one head, over the batch, that are visible: what
    `attention.cost.pair_flops` counts. Waits for the device."""
    rules.check(q, k, is_causal, causal_align)
    intervals = key_intervals(rules, Lengths.of(q, k, is_causal, causal_align))
    of_all = (intervals[:, 1] - intervals[:, 0]).sum().item()
    return int(of_all) * (q.shape[0] if q.dim() == 4 and intervals.shape[0] == 1 else 1)
