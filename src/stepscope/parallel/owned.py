"""Parameters, or rows of them, with one owner each: the owner updates and broadcasts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

from stepscope.parallel.buckets import MEGABYTE, Item, OwnedRows, Rows, plan_buckets, share_out
from stepscope.parallel.collectives import start_broadcast
from stepscope.parallel.inner_optimizer import Make, as_views, follow, on_its_device
from stepscope.parallel.memory_order import in_logical_order, in_order_of
from stepscope.parallel.peers import finish
from stepscope.parallel.reshard import Saved, Span, concatenated


class Share(NamedTuple):
    """The part of a parameter that one rank owns."""

    parameter_index: int
    """Index of the parameter in the optimizer."""
    parameter: Tensor
    rows: Span | None
    """None for the full parameter."""
    own: Tensor
    """The inner optimizer's parameter: the parameter itself or a view of its rows."""


class Parcel(NamedTuple):
    """Shares of one group and one owner that are sent together."""

    owner: int
    group: int
    shares: list[Share]
    buffer: Tensor
    optimizer: Optimizer | None
    """None except on the owner's rank."""


class OwnedParameters:
    """The `broadcast` division: each parameter, or range of rows, has one owner."""

    def __init__(
        self, make: Make, bucket_mb: float, group: dist.ProcessGroup | None, by_rows: bool
    ) -> None:
        """`by_rows`: a matrix may be divided because the optimizer is element-wise."""
        self._make = make
        self._limit = bucket_mb * MEGABYTE
        self._group = group
        self._by_rows = by_rows
        self._rank = dist.get_rank(group)
        self._loads = [0] * dist.get_world_size(group)
        self._groups = 0
        self._parameters = 0
        self._rounds: list[list[Parcel]] = []
        """In each round every owner updates and sends one parcel, which overlaps with the update
        of the next."""

    def add_group(self, group: dict[str, Any]) -> None:
        params: list[Tensor] = group["params"]
        for parameter in params:
            # Rows are sent from the parameter itself. All ranks divide it alike, so its strides,
            # which may differ between them, do not matter.
            parameter.data = in_logical_order(parameter.data)
        options = {key: value for key, value in group.items() if key != "params"}
        pieces = share_out([self._rows(parameter) for parameter in params], self._loads)
        queues = [
            list(self._queue(owner, [p for p in pieces if p.owner == owner], params, options))
            for owner in range(len(self._loads))
        ]
        for round_index in range(max(map(len, queues), default=0)):
            self._rounds.append(
                [queue[round_index] for queue in queues if round_index < len(queue)]
            )
        self._groups += 1
        self._parameters += len(params)

    def _rows(self, parameter: Tensor) -> Rows:
        size = parameter.numel() * parameter.element_size()
        if not (self._by_rows and parameter.dim() and size):
            return Rows(1, size)
        return Rows(parameter.shape[0], size // parameter.shape[0])

    def _queue(
        self, owner: int, pieces: list[OwnedRows], params: list[Tensor], options: dict[str, Any]
    ) -> Iterator[Parcel]:
        """Yield complete parameters in buckets, then rows, which are sent without a copy."""
        complete = [piece for piece in pieces if piece.complete]
        items = [_item(params[piece.tensor_index]) for piece in complete]
        for bucket in plan_buckets(items, self._limit):
            own = [params[complete[index].tensor_index] for index in bucket.items]
            buffer = as_views(own)
            shares = [
                Share(self._parameters + complete[index].tensor_index, tensor, None, tensor)
                for index, tensor in zip(bucket.items, own, strict=True)
            ]
            yield self._parcel(owner, shares, buffer, options)
        for piece in pieces:
            if not piece.complete:
                tensor, rows = params[piece.tensor_index], Span(piece.begin, piece.end)
                own_rows = torch.nn.Parameter(rows.of(tensor.detach()))
                share = Share(self._parameters + piece.tensor_index, tensor, rows, own_rows)
                yield self._parcel(owner, [share], own_rows.detach(), options)

    def _parcel(
        self, owner: int, shares: list[Share], buffer: Tensor, options: dict[str, Any]
    ) -> Parcel:
        optimizer = None
        if owner == self._rank:
            optimizer = self._make([share.own for share in shares], options)
        return Parcel(owner, self._groups, shares, buffer, optimizer)

    def step(self, groups: list[dict[str, Any]]) -> None:
        in_flight = []
        for parcels in self._rounds:
            for parcel in parcels:
                if parcel.optimizer is not None:
                    _update(parcel, parcel.optimizer, groups[parcel.group])
            for parcel in parcels:
                in_flight.append(start_broadcast(parcel.buffer, parcel.owner, self._group))
        for work in in_flight:
            finish(work, self._group)

    def local_state(self) -> dict[str, Any]:
        return {
            Saved(share.parameter_index, share.rows, kind).name: value
            for share, optimizer in self._owned()
            for kind, value in optimizer.state[share.own].items()
        }

    def load(self, find: Callable[[str], Any], names: set[str]) -> None:
        saved = [Saved.parse(name) for name in sorted(names)]
        for share, optimizer in self._owned():
            state: dict[str, Any] = {}
            own = [part for part in saved if part.parameter_index == share.parameter_index]
            for kind in dict.fromkeys(part.kind for part in own):
                parts = [part for part in own if part.kind == kind and part.meets(share.rows)]
                value = concatenated(share.rows, [(part, find(part.name)) for part in parts])
                if isinstance(value, Tensor):
                    value = on_its_device(value, share.own, optimizer.param_groups[0])
                state[kind] = value
            optimizer.state[share.own] = state

    def empty_for(self, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        part = Saved.parse(name)
        same = [h for h, _ in self._owned() if h.parameter_index == part.parameter_index]
        meets = any(part.meets(h.rows) for h in same)
        return torch.empty(size, dtype=dtype) if meets else None

    def _owned(self) -> Iterator[tuple[Share, Optimizer]]:
        for parcels in self._rounds:
            for parcel in parcels:
                if parcel.optimizer is not None:
                    for share in parcel.shares:
                        yield share, parcel.optimizer


def _update(parcel: Parcel, optimizer: Optimizer, group: dict[str, Any]) -> None:
    follow(optimizer, group)
    divided = [(share, share.rows) for share in parcel.shares if share.rows is not None]
    for share, rows in divided:
        gradient = share.parameter.grad
        share.own.grad = None if gradient is None else in_order_of(share.own, rows.of(gradient))
    for share in parcel.shares:
        if share.rows is None and share.own.grad is not None:
            # A gradient that is older than the buffers has the strides of the original parameter.
            share.own.grad = in_order_of(share.own, share.own.grad)
    optimizer.step()
    for share, _ in divided:
        share.own.grad = None


def _item(tensor: Tensor) -> Item:
    return Item("", tensor.numel(), tensor.element_size(), f"{tensor.dtype} {tensor.device}")
