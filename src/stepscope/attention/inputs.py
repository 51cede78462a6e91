"""The one check of what `attention` is given. Everything wrong is a ValueError that names the
argument and its value; an implementation behind it may trust its inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepscope.attention.masking import causal_offset

TINY_SCALE = 1e-30
"""Stands in for a scale of zero, which would turn the -inf of a masked score into NaN."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    causal_align: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as an implementation gets them: valid together, cast where autocast is on."""
    _check_alone("q", q)
    if not _alike(q, k, v):
        _check_alone("k", k)
        _check_alone("v", v)
        _check_together(*(_as_autocast_would(x) for x in (q, k, v)))
    if isinstance(scale, Tensor):
        # Its gradient would be lost, and a decision for its value would outlive the value.
        raise ValueError("scale is a tensor; it must be a number: multiply q by the tensor instead")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not a finite number")
    if is_causal or causal_align is not None:
        causal_offset(q.shape[-2], k.shape[-2], causal_align)
    if autocast_dtype(q) is None:
        return q, k, v
    return _as_autocast_would(q), _as_autocast_would(k), _as_autocast_would(v)


def default_scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a scale above zero that give the same scores: kernels that mask before they scale
    would turn -inf round."""
    if scale < 0:
        return -q, -scale
    return q, scale or TINY_SCALE


def heads_per_key_head(q: Tensor, k: Tensor) -> int:
    """How many query heads share one key head; they are neighbours."""
    if q.dim() < 4 or q.shape[-3] == k.shape[-3]:
        return 1
    return q.shape[-3] // k.shape[-3]


def as_four_dims(x: Tensor) -> Tensor:
    """(batch, heads, seq, d): only such tensors reach torch's fused kernels."""
    if x.dim() < 4:
        return x.reshape(math.prod(x.shape[:-2]), 1, *x.shape[-2:])
    return x.flatten(0, -4) if x.dim() > 4 else x


def _check_alone(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, not a tensor")
    if x.dim() < 2:
        raise ValueError(f"{name} has shape {_shape(x)}; it needs (..., seq, d)")
    if x.dtype not in DTYPES:
        known = ", ".join(_name(dtype) for dtype in DTYPES)
        raise ValueError(f"{name} is {_name(x.dtype)}; it must be one of {known}")
    if x.shape[-1] == 0:
        raise ValueError(f"the head dimension of {name} is 0 (shape {_shape(x)})")


def _alike(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """The common case in a microsecond or two: nothing can be wrong between them."""
    return (
        isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and q.shape == k.shape == v.shape
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
    )


def _check_together(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        _check_against_query(name, x, q)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"the head dimension of k is {k.shape[-1]}, that of q is {q.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        what = "lengths" if v.shape[:-2] == k.shape[:-2] else "heads"
        raise ValueError(f"k and v have different {what}: {_shape(k)} and {_shape(v)}")


def _check_against_query(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise ValueError(f"{name} is {_name(x.dtype)} and q is {_name(q.dtype)}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q is on {q.device}")
    shapes = f"{name} has shape {_shape(x)} and q {_shape(q)}"
    if x.dim() != q.dim():
        raise ValueError(f"{shapes}: they need as many dimensions")
    if q.dim() < 4:
        if x.shape[:-2] != q.shape[:-2]:
            raise ValueError(f"{shapes}: their batch dimensions differ")
        return
    if x.shape[:-3] != q.shape[:-3]:
        raise ValueError(f"{shapes}: their batch dimensions differ")
    heads, of_query = x.shape[-3], q.shape[-3]
    if heads != of_query and (heads == 0 or of_query % heads):
        raise ValueError(f"{shapes}: {heads} heads do not divide the {of_query} of q")


# The meta device, for one, has no autocast, and torch raises when asked. Asked once: the compiler
# cannot trace the question.
_WITH_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind)
)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast casts to where x is; None where it is off."""
    kind = x.device.type
    on = kind in _WITH_AUTOCAST and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def matmul_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product will read x in: the format of autocast where that is on. It never casts
    float64."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x) or x.dtype


def _as_autocast_would(x: Tensor) -> Tensor:
    """Autocast casts what torch's own products read; an implementation of ours is none of them."""
    return x.to(matmul_dtype(x))


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
