"""Validation of the inputs of `attention`. An invalid input raises a ValueError that names the
argument and its value; implementations may trust inputs that passed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stepscope.attention.call import AttentionCall
from stepscope.attention.masking import causal_offset

TINY_SCALE = 1e-30
"""Replaces a scale of zero, which would turn the -inf of a masked score into NaN."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked_call(call: AttentionCall) -> AttentionCall:
    """Validate the inputs and cast them as autocast would, if it is on."""
    q, k, v, is_causal, scale, causal_align, rules = call
    _check_tensor("q", q)
    if not _all_equal(q, k, v):
        _check_tensor("k", k)
        _check_tensor("v", v)
        _check_shapes_match(*(as_autocast_would(x) for x in (q, k, v)))
    if isinstance(scale, Tensor):
        # Its gradient would be lost, and the dispatch cache would keep its current value.
        raise ValueError("scale is a tensor; it must be a number: multiply q by the tensor instead")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not a finite number")
    if is_causal or causal_align is not None:
        causal_offset(q.shape[-2], k.shape[-2], causal_align)
    if rules is not None:
        rules.check(q, k, is_causal, causal_align)
    if autocast_dtype(q) is None:
        return call
    return call._replace(q=as_autocast_would(q), k=as_autocast_would(k), v=as_autocast_would(v))


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return queries and a positive scale that give the same scores. In kernels that mask before
    they scale, a negative scale would turn -inf into +inf."""
    if scale < 0:
        return -q, -scale
    return q, scale or TINY_SCALE


def heads_per_key_head(q: Tensor, k: Tensor) -> int:
    """Return the number of consecutive query heads that share one key head."""
    if q.dim() < 4 or q.shape[-3] == k.shape[-3]:
        return 1
    return q.shape[-3] // k.shape[-3]


def as_four_dims(x: Tensor) -> Tensor:
    """Reshape to (batch, heads, seq, d): torch's fused kernels take only 4-D tensors."""
    if x.dim() < 4:
        return x.reshape(math.prod(x.shape[:-2]), 1, *x.shape[-2:])
    return x.flatten(0, -4) if x.dim() > 4 else x


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, not a tensor")
    if x.dim() < 2:
        raise ValueError(f"{name} has shape {_shape(x)}; it needs (..., seq, d)")
    if x.dtype not in DTYPES:
        known = ", ".join(_name(dtype) for dtype in DTYPES)
        raise ValueError(f"{name} is {_name(x.dtype)}; it must be one of {known}")
    if x.shape[-1] == 0:
        raise ValueError(f"the head dimension of {name} is 0 (shape {_shape(x)})")


def _all_equal(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Fast path of one to two microseconds: equal shape, dtype and device need no further check."""
    return (
        isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and q.shape == k.shape == v.shape
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
    )


def _check_shapes_match(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        _check_against_query(name, x, q)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"the head dimension of k is {k.shape[-1]}, that of q is {q.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        mismatch = "lengths" if v.shape[:-2] == k.shape[:-2] else "heads"
        raise ValueError(f"k and v have different {mismatch}: {_shape(k)} and {_shape(v)}")


def _check_against_query(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise ValueError(f"{name} is {_name(x.dtype)} and q is {_name(q.dtype)}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q is on {q.device}")
    shapes = f"{name} has shape {_shape(x)} and q {_shape(q)}"
    if x.dim() != q.dim():
        raise ValueError(f"{shapes}: they need the same number of dimensions")
    if q.dim() < 4:
        if x.shape[:-2] != q.shape[:-2]:
            raise ValueError(f"{shapes}: their batch dimensions differ")
        return
    if x.shape[:-3] != q.shape[:-3]:
        raise ValueError(f"{shapes}: their batch dimensions differ")
    heads, query_heads = x.shape[-3], q.shape[-3]
    if heads != query_heads and (heads == 0 or query_heads % heads):
        raise ValueError(f"{shapes}: {heads} heads do not divide the {query_heads} of q")


# Some devices, such as meta, have no autocast, and torch raises when queried for them. Queried once
# at import: the compiler cannot trace the call.
_WITH_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind)
)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the autocast dtype for the device of x; None if autocast is off."""
    device_type = x.device.type
    on = device_type in _WITH_AUTOCAST and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matmul reads x: the autocast dtype if autocast is on, which never
    casts float64."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x) or x.dtype


def as_autocast_would(x: Tensor) -> Tensor:
    """Cast x as autocast does for torch's own matmuls, which it does not do for custom kernels."""
    return x.to(matmul_dtype(x))


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
