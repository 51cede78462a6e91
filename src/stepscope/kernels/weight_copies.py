"""Weights in the format of the products that read them, kept from step to step.

Under autocast every product casts its weight anew: 6 bytes moved for each parameter in each step.
Here the cast is kept, and made again only where a weight has changed since. An optimizer that
writes the copy together with the weight (`FusedAdamW`) never lets that happen. Weights of products
that read the same input lie one under the other, so that one product serves them all.

A change is what moves a tensor's version or gives it other memory. A write through `.data` does
neither, nor does the replay of a captured optimizer that writes no copy. After such,
`refresh(all_of_them=True)`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Weights = tuple[Tensor, ...]


class WeightCopies:
    """The copies of one model, or of several that share their weights."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._places: dict[int, list[_Place]] = {}

    def narrow(self, weights: Weights, dtype: torch.dtype) -> Weights:
        """What products in that format read: one tensor with all rows where it is a copy, the
        weights themselves where they have the format."""
        if all(weight.dtype == dtype for weight in weights):
            return tuple(weight.detach() for weight in weights)
        key = tuple(map(id, weights))
        group = self._groups.get(key)
        if group is None or not group.fits(weights, dtype):
            group = self._made(key, weights, dtype)
        group.follow(weights)
        return (group.joined,)

    def find(self, weight: Tensor) -> Tensor | None:
        """The copy of this weight, for whoever updates it; None where there are several."""
        place = self._place_of(weight)
        return None if place is None else place.group.rows[place.number]

    def written(self, weight: Tensor) -> None:
        """What `find` gave is written together with the weight, whose version has moved."""
        place = self._place_of(weight)
        if place is not None:
            place.group.saw(place.number, weight)

    def _place_of(self, weight: Tensor) -> _Place | None:
        places = self._places.get(id(weight), ())
        # A number may have a new owner.
        alive = [place for place in places if place.group.holds(place.number, weight)]
        return alive[0] if len(alive) == 1 else None

    def refresh(self, all_of_them: bool = False) -> None:
        """Follow what others did to the weights since; all of them, whether or not it shows."""
        for group in self._groups.values():
            weights = group.weights()
            if weights is not None:
                group.follow(weights, anyway=all_of_them)

    def clear(self) -> None:
        """Let go of all copies; who asks again gets a new one."""
        self._groups.clear()
        self._places.clear()

    def __reduce__(self) -> tuple[type[WeightCopies], tuple[()]]:
        """Neither saved nor copied along: they belong to these weights."""
        return WeightCopies, ()

    def _made(self, key: tuple[int, ...], weights: Weights, dtype: torch.dtype) -> _Group:
        self._groups = {k: held for k, held in self._groups.items() if held.weights() is not None}
        group = self._groups[key] = _Group(weights, dtype)
        self._places = {}
        for k, held in self._groups.items():
            for number, owner in enumerate(k):
                self._places.setdefault(owner, []).append(_Place(held, number))
        return group


class _Place(NamedTuple):
    """A weight among those of a group."""

    group: _Group
    number: int


class _Group:
    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._owners = [weakref.ref(weight) for weight in weights]
        rows = [weight.shape[0] for weight in weights]
        # Who asks first may be an evaluation, and training keeps what it reads for its backward.
        with torch.inference_mode(False):
            self.joined = torch.empty(
                sum(rows), weights[0].shape[1], device=weights[0].device, dtype=dtype
            )
            self.rows: Sequence[Tensor] = torch.split(self.joined, rows)
        self._seen: list[_Seen | None] = [None] * len(weights)

    def weights(self) -> Weights | None:
        """Those it was made for; None where one is gone, or where its number has a new owner."""
        alive = [owner() for owner in self._owners]
        found = tuple(weight for weight in alive if weight is not None)
        return found if len(found) == len(alive) else None

    def fits(self, weights: Weights, dtype: torch.dtype) -> bool:
        same = all(owner() is weight for owner, weight in zip(self._owners, weights, strict=True))
        shapes = [weight.shape for weight in weights] == [row.shape for row in self.rows]
        return same and shapes and (self.joined.dtype, self.joined.device) == (
            dtype, weights[0].device,
        )  # fmt: skip

    def holds(self, number: int, weight: Tensor) -> bool:
        return self._owners[number]() is weight and self.rows[number].shape == weight.shape

    def saw(self, number: int, weight: Tensor) -> None:
        self._seen[number] = _Seen.of(weight)

    @torch.no_grad()
    def follow(self, weights: Weights, anyway: bool = False) -> None:
        current = all(
            seen is not None and seen.shows(weight)
            for seen, weight in zip(self._seen, weights, strict=True)
        )
        if anyway or not current:
            torch._foreach_copy_(list(self.rows), list(weights))
            # A captured copy has not happened yet, and happens again with every replay.
            if not (self.joined.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._seen = [_Seen.of(weight) for weight in weights]


class _Seen(NamedTuple):
    """The state of a weight when it was copied: whatever changes with its values."""

    version: int
    address: int
    storage: StorageWeakRef
    """Assigning to `.data` keeps the version, and new memory may have the address of memory that
    was freed. As long as this is kept, no other storage has its identity."""

    @classmethod
    def of(cls, weight: Tensor) -> _Seen | None:
        """None in inference mode, where nothing changes with the values."""
        if weight.is_inference():
            return None
        storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(weight._version, weight.data_ptr(), storage)

    def shows(self, weight: Tensor) -> bool:
        return (
            not weight.is_inference()
            and self.version == weight._version
            and self.address == weight.data_ptr()
            and self.storage.cdata == weight.untyped_storage()._cdata
        )
