"""Rotary positions in modules of a user's own class: one kernel for each pass.

Such a module has no parameters, and its class is named after RoPE. Its tables come from the module:
in every call the original forward runs on one head, which has one in the first entry of each pair
and zero in the second, and returns the cosines and sines of the positions, whatever they are
computed from, also those of each sequence. Which entries are pairs is found in the first call, on
random heads. The original runs where its tables have another shape, or are learned.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.acceleration.attention.deferred import materialized
from stepscope.acceleration.checks import NotReplacedError
from stepscope.acceleration.forward_registry import forward_below
from stepscope.acceleration.replacement import Found, Replacement
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.rope import plain_rotate, rotated
from stepscope.torch_tools.capturing import is_capturing
from stepscope.torch_tools.kernel_compilation import compiles_only

PIECE = "rotary positions"
_CLASSES = re.compile("RoPE|Rope|ROPE|^_*rope|(?i:rotary)")
"""Not DropEdge or Property."""
_RETURN_TABLES = ("transformers", "timm")
"""Packages whose modules of these names return cosines and sines."""
_NOT_HEADS = "its first argument is not (batch, heads, seq, d_head) or (batch, seq, d_head)"
_ROUNDING, _ROUNDING_OF_16_BITS = 1e-5, 2e-2
"""Relative errors of the original and of the formula. Another layout has one of about 1."""

Call = Callable[[Tensor], Any]
"""The original forward on other heads, with the other arguments of a call."""


def find(model: nn.Module, known: Sequence[str]) -> Found:
    """`known` has the names of modules of other pieces, which apply rotary positions themselves."""
    replacements = []
    for name, module in model.named_modules():
        kind = type(module)
        if not _CLASSES.search(kind.__name__) or any(True for _ in module.parameters()):
            continue
        if kind.__module__.partition(".")[0] in _RETURN_TABLES:
            continue
        if any(name.startswith(f"{one}.") for one in known):
            continue
        rotation = _Rotation(module)
        replacements.append(Replacement(PIECE, name, module, rotation.forward, rotation.declines))
    return replacements, []


class _Layout(NamedTuple):
    """Pairs of a head: (2i, 2i + 1) if interleaved, else (i, i + pairs)."""

    interleaved: bool
    pairs: int
    contiguous: bool = False
    """Whether the output is contiguous for heads that are not."""

    def first(self, x: Tensor) -> Tensor:
        return x[..., : 2 * self.pairs : 2] if self.interleaved else x[..., : self.pairs]

    def second(self, x: Tensor) -> Tensor:
        start, step = (1, 2) if self.interleaved else (self.pairs, 1)
        return x[..., start : 2 * self.pairs : step]


class _Rotation:
    def __init__(self, module: nn.Module) -> None:
        self._original = forward_below(module)
        self._is_compared = False
        self._layouts: dict[tuple[int, bool], _Layout | None] = {}
        """By the size of a head and whether heads are contiguous; None if it is another
        function."""
        self._dtypes: dict[tuple[Any, ...], torch.dtype] = {}
        """Dtypes of the output, by those of the input and of autocast."""
        names = inspect.signature(module.forward).parameters
        self._name = next(iter(names), "")

    def declines(self, module: nn.Module, *args: Any, **kwargs: Any) -> str:
        del module
        x = args[0] if args else kwargs.get(self._name)
        x = materialized((x,))[0]
        is_heads = isinstance(x, Tensor) and x.is_floating_point() and x.dim() in (3, 4)
        return "" if is_heads else _NOT_HEADS

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del module
        args, kwargs = materialized(args), materialized(kwargs)
        original = partial(self._original, *args, **kwargs)
        x = args[0] if args else kwargs[self._name]

        def call(heads: Tensor) -> Any:
            if args:
                out = self._original(heads, *args[1:], **kwargs)
            else:
                out = self._original(**{**kwargs, self._name: heads})
            return materialized((out,))[0]

        layout = self._layout(x, call)
        # On a CPU the original is faster than the formula in plain PyTorch.
        if layout is None or not kernels_take(x) or x.stride(-1) != 1:
            return original()
        tables = _tables(layout, x, call)
        if tables is None:
            return original()
        heads = x if x.dim() == 4 else x[:, None]
        cos, sin = (_by_sequence(table) for table in tables)
        dtype = self._dtype(x, call)
        out = rotated(
            heads, cos, sin, interleaved=layout.interleaved, dtype=dtype,
            contiguous=layout.contiguous,
        )  # fmt: skip
        return out if x.dim() == 4 else out[:, 0]

    def _layout(self, x: Tensor, call: Call) -> _Layout | None:
        """Return the layout of the pairs; None if it is not known. Raise in the first call, which
        is the comparison with the original, if it is another function."""
        key = (x.shape[-1], x.is_contiguous())
        if key in self._layouts or not x.numel() or is_capturing() or compiles_only():
            return self._layouts.get(key)
        is_first, self._is_compared = not self._is_compared, True
        try:
            layout = _matching_layout(x, call)
        except Exception:
            if is_first:
                raise
            # The original may not take heads in float32.
            self._layouts[key] = None
            return None
        if layout is not None:
            self._layouts[key] = layout
        return layout

    def _dtype(self, x: Tensor, call: Call) -> torch.dtype:
        """Return the dtype of the original's output: tables may be wider than x."""
        device = x.device.type
        key = (x.dtype, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        if key not in self._dtypes:
            self._dtypes[key] = call(x.new_zeros(_one_head(x))).dtype
        return self._dtypes[key]


def _one_head(x: Tensor) -> tuple[int, ...]:
    return (*(1 for _ in x.shape[:-2]), *x.shape[-2:])


_UNITS: dict[tuple[Any, ...], Tensor] = {}
"""Ones in the first entries of pairs, by layout, size and device. Kept: CUDA graphs read them."""


def _unit(layout: _Layout, x: Tensor) -> Tensor:
    seq, d = x.shape[-2:]
    key = (layout, d, x.device)
    unit = _UNITS.get(key)
    if unit is None:
        unit = torch.zeros(d, device=x.device)
        layout.first(unit).fill_(1)
        if not is_capturing() and type(unit) is Tensor:
            _UNITS[key] = unit
    # Expanded to several tokens it cannot be written in place.
    return unit if seq > 1 else unit.clone()


def _tables(layout: _Layout, x: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
    """Return the cosines and sines of the positions, (1 or batch, 1, seq, pairs), or without the
    dimension of heads if x has none; None if they differ between heads, or are learned."""
    shape = _one_head(x)
    try:
        turned = call(_unit(layout, x).expand(shape))
    except torch.OutOfMemoryError:
        raise
    except Exception:
        # The module may not take one head. An error of x itself is raised again.
        return None
    shapes = (shape, (x.shape[0], *shape[1:]))
    if not any(_is_like(turned, one) for one in shapes) or turned.requires_grad:
        return None
    return layout.first(turned.float()), layout.second(turned.float())


def _by_sequence(table: Tensor) -> Tensor:
    """Return a table as (batch, seq, pairs), or (seq, pairs) if all sequences have the same."""
    table = table[:, 0] if table.dim() == 4 else table
    return table[0] if table.shape[0] == 1 else table


def _is_like(out: Any, shape: Sequence[int]) -> bool:
    return isinstance(out, Tensor) and out.is_floating_point() and out.shape == (*shape,)


def _matching_layout(x: Tensor, call: Call) -> _Layout | None:
    """Return the layout with which the rotation of random heads is that of the original; None if
    these positions do not show it. Raise if there is none."""
    generator = torch.Generator(x.device).manual_seed(0)
    # In the memory layout of x.
    heads = torch.empty_like(x, dtype=torch.float32).normal_(generator=generator)
    out = call(heads.clone())
    if not _is_like(out, x.shape):
        raise NotReplacedError("it does not return rotated heads")
    pairs = x.shape[-1] // 2
    if x.dim() == 4 and x.shape[1] == 1:
        # One head, or one token of (batch, seq, heads, d_head).
        return None
    if pairs and _tables(_Layout(True, pairs), x, call) is None:
        raise NotReplacedError("its angles are learned, or differ between heads")
    fits = partial(_fits, x, call, heads, out)
    matching = [one for one in (_Layout(True, pairs), _Layout(False, pairs)) if fits(one)]
    if not matching:
        # The last entries may stay. With adjacent pairs their angles are zero.
        changed = (out != heads).flatten(0, -2).any(0).nonzero()
        matching = [_Layout(False, (int(changed[-1]) + 1) // 2)] if len(changed) else []
        if not matching or not fits(matching[0]):
            raise NotReplacedError("it computes something else than a rotation of pairs")
    # At position zero alone, nothing rotates. A single pair has one layout.
    if len(matching) > 1 and pairs != 1:
        return None
    return matching[0]._replace(contiguous=out.is_contiguous())


def _fits(x: Tensor, call: Call, heads: Tensor, out: Tensor, layout: _Layout) -> bool:
    tables = _tables(layout, x, call) if layout.pairs else None
    if tables is None:
        return False
    error = (plain_rotate(heads, *tables, layout.interleaved) - out).norm() / out.norm()
    return bool(error <= (_ROUNDING if out.dtype.itemsize > 2 else _ROUNDING_OF_16_BITS))
