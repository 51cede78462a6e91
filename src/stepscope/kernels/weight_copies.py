"""Copies of the weights in the matmul dtype or in FP8, cached from step to step.

Under autocast every matmul casts its weight at every step: 6 bytes of traffic per parameter. Here
the cast is cached, and repeated only if the weight has changed. An optimizer that writes the copy
together with the weight (`FusedAdamW`) makes even that unnecessary; for copies in FP8 it writes the
largest magnitudes, from which the scale follows. Weights of matmuls that read the same input are
concatenated along their rows, so that one matmul serves them all.

A change is detected by a tensor's version counter or its memory address. A write through `.data`
changes neither, nor does the replay of a captured optimizer that writes no copy. After such a
write, call `refresh(all_of_them=True)`. With `keep=False` nothing is cached, and each call casts:
programs that write through `.data` need no call. Only a captured step reads cached casts then, and
compares them with the weights before each replay (`written_casts`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from stepscope.kernels.fp8.casts import Quantized, quantize_weights
from stepscope.kernels.fp8.recipe import E4M3, Recipe
from stepscope.kernels.fp8.reference import DTYPES
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.loss_chunks import matmul_columns
from stepscope.torch_tools.casts import cast_each
from stepscope.torch_tools.lasting_memory import LastingMemory

Weights = tuple[Tensor, ...]
_Key = tuple[Recipe | None, bool, tuple[int, ...]]
"""The recipe of copies in FP8 and whether the weights are stored transposed; and their identities.
"""


class Fp8Choice(Protocol):
    """Runs linear layers in FP8, or returns None for those that stay: `fp8.layers.Fp8Layers`."""

    @property
    def notes_amax(self) -> bool: ...

    @property
    def linear(self) -> Callable[..., Tensor | None]: ...

    @property
    def feed_forward(self) -> Callable[..., Tensor | None]: ...

    def left(self, weight: Tensor, reason: str) -> None: ...


class WeightCopies:
    """The copies of one model, or of several that share their weights. With `cached`, only these
    weights are: a wrapper that shards a model later shows gathered weights in their place, and
    writes these without a change of their version.

    `fp8` decides which linear layers that read these copies use FP8 GEMMs; None for no layer. With
    `keep=False`, copies are cached within `kept()` only.
    """

    def __init__(
        self,
        cached: Iterable[Tensor] | None = None,
        fp8: Fp8Choice | None = None,
        *,
        keep: bool = True,
    ) -> None:
        self.fp8 = fp8
        self.keeps = self.reads = keep
        """Whether copies are cached, and whether layers read them or cast in each call."""
        self._cached = None if cached is None else WeakTensorKeyDictionary()
        for weight in cached or ():
            assert self._cached is not None
            self._cached[weight] = True
        self._memory = LastingMemory()
        self._groups: dict[_Key, _Group] = {}
        self._positions: dict[int, list[_Position]] = {}

    @property
    def notes_amax(self) -> bool:
        """Whether norms should compute the largest magnitudes that casts to FP8 need."""
        return self.fp8 is not None and self.fp8.notes_amax

    def shared(self, fp8: Fp8Choice | None) -> WeightCopies:
        """Return the same copies for a model that may have other layers in FP8."""
        view = WeightCopies(fp8=fp8, keep=self.keeps)
        view._cached, view._groups, view._positions = self._cached, self._groups, self._positions
        view._memory = self._memory
        return view

    def owner(self, weight: Tensor) -> Tensor | None:
        """Return the parameter whose values a layer reads in this tensor; None if its copies are
        not here."""
        return weight

    @contextmanager
    def kept(self, *, read: bool) -> Iterator[None]:
        """Cache copies, which optimizers write, and let layers `read` them."""
        before = self.keeps, self.reads
        self.keeps, self.reads = True, self.reads or read
        try:
            yield
        finally:
            self.keeps, self.reads = before

    def narrow(self, weights: Weights, dtype: torch.dtype) -> Weights:
        """Return what matmuls in that dtype read: the weights themselves if they have the dtype,
        else a copy as one tensor with the rows of all of them."""
        if all(weight.dtype == dtype for weight in weights):
            return tuple(weight.detach() for weight in weights)
        if not self._caches(weights):
            return (_cast(weights, dtype),)
        key = (None, False, tuple(map(id, weights)))
        group = self._groups.get(key)
        if group is None or not group.fits(weights, dtype):
            with self._memory.allocations(weights[0].device):
                group = self._create(key, _Group(weights, dtype))
        group.update(weights)
        return (group.concatenated if self.reads else _cast(weights, dtype),)

    def narrow_each(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        """Return what `narrow` does for each of these weights, cast in one launch where they are
        not cached."""
        if self.keeps or any(weight.dtype == dtype for weight in weights):
            return [self.narrow((weight,), dtype)[0] for weight in weights]
        return cast_each([weight.detach() for weight in weights], dtype)

    def _caches(self, weights: Weights) -> bool:
        known = self._cached is None or all(weight in self._cached for weight in weights)
        return self.keeps and known

    def narrow_padded(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what matmuls in that dtype read, with `matmul_columns` rows; None if there is no
        such copy."""
        if weight.dtype != dtype and not self._caches((weight,)):
            return None
        narrow = self.narrow((weight,), dtype)[0]
        group = self._groups.get((None, False, (id(weight),)))
        if group is not None and group.concatenated is narrow:
            return group.padded
        return narrow if narrow.shape[0] == matmul_columns(narrow.shape[0]) else None

    def quantized(
        self, weights: Weights, recipe: Recipe, transposed: bool = False, *, cached: bool = True
    ) -> Quantized:
        """Return all these weights as operands of FP8 GEMMs (`quantize_weights`)."""
        if not cached or not self._caches(weights):
            return quantize_weights([weight.detach() for weight in weights], recipe, transposed)
        key = (recipe, transposed, tuple(map(id, weights)))
        group = self._groups.get(key)
        if not isinstance(group, _Fp8Group) or not group.fits(weights, DTYPES[E4M3]):
            with self._memory.allocations(weights[0].device):
                group = _Fp8Group(weights, recipe, transposed)
            self._create(key, group)
        group.update(weights)
        if not self.reads:
            return quantize_weights([weight.detach() for weight in weights], recipe, transposed)
        assert group.operands is not None
        return group.operands

    def find(self, weight: Tensor) -> Tensor | None:
        """Return the copy of this weight, for an optimizer to update; None if there is not exactly
        one, or nothing is cached now."""
        position = self._position_of(weight) if self.keeps else None
        return None if position is None else position.group.rows[position.member]

    def written(self, weight: Tensor) -> None:
        """Record that the copy returned by `find` has been written together with the weight."""
        position = self._position_of(weight)
        if position is not None:
            position.group.mark_current(position.member, weight)

    def amax_buffer(self, weight: Tensor, block: int) -> Tensor | None:
        """Return where an optimizer writes the largest magnitude of each block of that many values
        of the weight, for its next cast to FP8; None if it is not cast by one scale."""
        position = self._cast_position_of(weight) if self.keeps else None
        return None if position is None else position.group.amax_buffer(position.member, block)

    def amax_written(self, weight: Tensor) -> None:
        """Record that the buffer belongs to the current values of the weight."""
        position = self._cast_position_of(weight)
        if position is not None:
            position.group.amax_versions[position.member] = _Version.of(weight)

    def written_casts(self) -> list[WrittenCast]:
        """Return the copies that are marked as those of the current weights, and the largest
        magnitudes that are."""
        return [
            written
            for group in self._groups.values()
            if (weights := group.weights()) is not None
            for written in group.written(weights)
        ]

    def refresh_current(self) -> None:
        """Update the copies that are marked as current: a weight may have been written through
        `.data`. The others are updated when they are read."""
        for group in self._groups.values():
            weights = group.weights()
            if weights is not None and group.is_current(weights):
                group.update(weights, force=True)

    def _cast_position_of(self, weight: Tensor) -> _CastPosition | None:
        """Return the position of a weight in the one group that casts it by one scale."""
        found = [
            _CastPosition(group, member)
            for group, member in self._positions.get(id(weight), ())
            if isinstance(group, _Fp8Group) and group.one_scale and group.holds(member, weight)
        ]
        return found[0] if len(found) == 1 else None

    def _position_of(self, weight: Tensor) -> _Position | None:
        positions = self._positions.get(id(weight), ())
        # The id may have been reused by another tensor.
        valid = [
            position
            for position in positions
            if position.group.is_narrow and position.group.holds(position.member, weight)
        ]
        return valid[0] if len(valid) == 1 else None

    def refresh(self, all_of_them: bool = False) -> None:
        """Update the copies of changed weights; with `all_of_them` every copy, because not every
        change can be detected."""
        for group in self._groups.values():
            weights = group.weights()
            if weights is not None:
                group.update(weights, force=all_of_them)

    def clear(self) -> None:
        """Drop all copies; they are created again on demand."""
        self._groups.clear()
        self._positions.clear()

    def __reduce__(
        self,
    ) -> tuple[type[WeightCopies], tuple[None, Fp8Choice | None], dict[str, bool]]:
        """Pickle and copy as empty: the copies belong to these weights."""
        return WeightCopies, (None, self.fp8), {"keeps": self.keeps, "reads": self.reads}

    def _create(self, key: _Key, group: _Group) -> _Group:
        for old, other in [*self._groups.items()]:
            if other.weights() is None:
                del self._groups[old]
        self._groups[key] = group
        self._index()
        return group

    def _index(self) -> None:
        """Update the positions of the weights in the groups."""
        self._positions.clear()
        for (*_, owners), group in self._groups.items():
            for index, owner in enumerate(owners):
                self._positions.setdefault(owner, []).append(_Position(group, index))


@torch.no_grad()
def _cast(weights: Weights, dtype: torch.dtype) -> Tensor:
    """Return a copy of the weights in that dtype, with the rows of all of them."""
    if len(weights) == 1:
        return weights[0].detach().to(dtype, memory_format=torch.contiguous_format)
    rows = [weight.shape[0] for weight in weights]
    out = weights[0].new_empty(sum(rows), *weights[0].shape[1:], dtype=dtype)
    torch._foreach_copy_(list(torch.split(out, rows)), list(weights))
    return out


class WrittenCast(NamedTuple):
    """A weight, and what a captured step reads of it: a copy, or bounds of its magnitudes."""

    weight: Tensor
    copy: Tensor
    is_amax: bool


def with_padded_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in that dtype with `matmul_columns` rows, the last ones of which are zero."""
    rows = weight.shape[0]
    if matmul_columns(rows) == rows:
        return weight.to(dtype)
    padded = _with_zeros_at_end(weight, rows, dtype)
    padded[:rows].copy_(weight)
    return padded


def _with_zeros_at_end(like: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return uninitialized rows such as those of another tensor, and zeros after them."""
    padded = torch.empty(matmul_columns(rows), *like.shape[1:], device=like.device, dtype=dtype)
    padded[rows:].zero_()
    return padded


class _Position(NamedTuple):
    """A group, and the index of a weight in it."""

    group: _Group
    member: int


class _Group:
    is_narrow = True
    """An optimizer can write the copies: they are the weights in another dtype."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._owners = [weakref.ref(weight) for weight in weights]
        rows = [weight.shape[0] for weight in weights]
        # The first caller may run in inference mode, and training cannot save inference tensors.
        with torch.inference_mode(False):
            self.concatenated = self._allocate(sum(rows), weights[0], dtype)
            self.rows: Sequence[Tensor] = torch.split(self.concatenated, rows)
        self._versions: list[_Version | None] = [None] * len(weights)

    def _allocate(self, rows: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        # Only the weight of a head has such a number of rows.
        self.padded = _with_zeros_at_end(like, rows, dtype)
        return self.padded[:rows]

    def weights(self) -> Weights | None:
        """Return the weights of this group; None if one has been freed."""
        references = [owner() for owner in self._owners]
        alive = tuple(weight for weight in references if weight is not None)
        return alive if len(alive) == len(references) else None

    def fits(self, weights: Weights, dtype: torch.dtype) -> bool:
        same = all(owner() is weight for owner, weight in zip(self._owners, weights, strict=True))
        shapes = [weight.shape for weight in weights] == [row.shape for row in self.rows]
        placement = (self.concatenated.dtype, self.concatenated.device)
        return same and shapes and placement == (dtype, weights[0].device)

    def holds(self, index: int, weight: Tensor) -> bool:
        return self._owners[index]() is weight and self.rows[index].shape == weight.shape

    def mark_current(self, index: int, weight: Tensor) -> None:
        self._versions[index] = _Version.of(weight)

    def written(self, weights: Weights) -> Iterator[WrittenCast]:
        for weight, copy, version in zip(weights, self.rows, self._versions, strict=True):
            if version is not None and version.matches(weight):
                yield WrittenCast(weight, copy, is_amax=False)

    def is_current(self, weights: Weights) -> bool:
        return all(
            version is not None and version.matches(weight)
            for version, weight in zip(self._versions, weights, strict=True)
        )

    @torch.no_grad()
    def update(self, weights: Weights, force: bool = False) -> None:
        current = self.is_current(weights)
        capturing = _is_capturing(self.concatenated)
        # The captured update of an optimizer writes narrow copies only.
        if force or not current or (capturing and not self.is_narrow):
            self._copy(weights)
            # A captured copy has not run yet, and runs again at every replay.
            if not capturing:
                self._versions = [_Version.of(weight) for weight in weights]
            elif not self.is_narrow:
                self._versions = [None] * len(weights)

    def _copy(self, weights: Weights) -> None:
        torch._foreach_copy_(list(self.rows), list(weights))


class _Fp8Group(_Group):
    """Weights in FP8, as operands of the GEMMs that read them."""

    is_narrow = False

    def __init__(self, weights: Weights, recipe: Recipe, transposed: bool) -> None:
        self._recipe, self._transposed = recipe, transposed
        self.one_scale = recipe.one_scale
        super().__init__(weights, DTYPES[E4M3])
        self.operands: Quantized | None = None
        self._amax: list[Tensor | None] = [None] * len(weights)
        self.amax_versions: list[_Version | None] = [None] * len(weights)

    def amax_buffer(self, index: int, block: int) -> Tensor:
        """Return the same buffer in every step, so that a captured cast reads what a captured
        update writes."""
        blocks = -(-self.rows[index].numel() // block)
        buffer = self._amax[index]
        if buffer is None or buffer.numel() != blocks:
            buffer = self._amax[index] = torch.zeros(blocks, device=self.concatenated.device)
        return buffer

    def written(self, weights: Weights) -> Iterator[WrittenCast]:
        for weight, amax, version in zip(weights, self._amax, self.amax_versions, strict=True):
            if amax is not None and version is not None and version.matches(weight):
                yield WrittenCast(weight, amax, is_amax=True)

    def update(self, weights: Weights, force: bool = False) -> None:
        if force:
            self.amax_versions = [None] * len(weights)
        super().update(weights, force)

    def _allocate(self, rows: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        both = not self._recipe.one_scale
        out = torch.empty(rows, *like.shape[1:], device=like.device, dtype=dtype)
        self._rows = None if self._transposed and not both else out
        self._columns = out.new_empty(out.shape[::-1]) if self._transposed or both else None
        if self._rows is None and self._columns is not None:
            # Same shape, without the rows.
            return self._columns.T
        return out

    def _copy(self, weights: Weights) -> None:
        # Training cannot save scales that were created in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            known = [self._known_amax(index, weight) for index, weight in enumerate(weights)]
            self.operands = quantize_weights(
                weights, self._recipe, self._transposed, self._rows, self._columns, known
            )

    def _known_amax(self, index: int, weight: Tensor) -> Tensor | None:
        """Return largest magnitudes of parts of a weight, if an update has written them. After
        another change of the weight the buffer is written here, also in a capture, whose first cast
        may read it: the update of that capture may be another one."""
        buffer, version = self._amax[index], self.amax_versions[index]
        if buffer is None or (version is not None and version.matches(weight)):
            return buffer
        if not kernels_take(weight):
            return None
        from stepscope.kernels.triton import fp8

        partial, _ = fp8.amax(weight.detach().contiguous())
        buffer.copy_(partial.max().expand_as(buffer))
        if not _is_capturing(weight):
            self.amax_versions[index] = _Version.of(weight)
        return partial


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class _CastPosition(NamedTuple):
    """The same for a group in FP8."""

    group: _Fp8Group
    member: int


class _Version(NamedTuple):
    """Version of a weight when it was copied: everything that changes with its values."""

    version: int
    address: int
    storage: StorageWeakRef
    """Assigning to `.data` does not change the version counter, and new memory may have the address
    of freed memory. While this weak reference exists, no other storage has its identity."""

    @classmethod
    def of(cls, weight: Tensor) -> _Version | None:
        """Return the version; None in inference mode, where versions are not tracked."""
        if weight.is_inference():
            return None
        storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        return cls(weight._version, weight.data_ptr(), storage)

    def matches(self, weight: Tensor) -> bool:
        return (
            not weight.is_inference()
            and self.version == weight._version
            and self.address == weight.data_ptr()
            and self.storage.cdata == weight.untyped_storage()._cdata
        )
