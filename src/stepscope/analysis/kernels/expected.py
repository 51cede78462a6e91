"""Check that the kernels that ran belong to the attention implementation a record names."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.analysis.kernels.names import describe
from stepscope.records.schema import Record

SEPARATOR = "; "
_PASSES = ("forward", "backward")

_OWNERS = {
    "Stepscope": "triton",
    "cuDNN": "sdpa_cudnn",
    "FlashAttention": "sdpa_flash",
    "CUTLASS": "sdpa_efficient",
    "Inductor": "flex",
}
_FUSED = tuple(_OWNERS.values())
_UNFUSED = ("reference", "compiled", "tiled", "sdpa_math")
"""Implementations of matmuls and a softmax: a fused kernel among theirs is unexpected."""


def owner(kernel: str) -> str | None:
    """Return the implementation a fused attention kernel belongs to; None for any other kernel."""
    # Inductor compiles FlexAttention to a template whose name does not always say so.
    if kernel.startswith("triton_tem"):
        return "flex"
    described = describe(kernel)
    return _OWNERS.get(described.library) if described.kind == "attention" else None


def foreign_kernels(record: Record) -> str | None:
    """Describe unexpected kernels; None if there are none or no kernels were recorded."""
    for attention, where, kernels in _seen(record):
        owners = {name for kernel in kernels if (name := owner(kernel)) is not None}
        others = owners - {attention}
        if attention in (*_FUSED, *_UNFUSED) and others:
            return f"{attention} ran kernels of {', '.join(sorted(others))}{where}"
        if attention in _FUSED and not owners:
            shown = SEPARATOR.join(kernels[:3]) or "none at all"
            return f"{attention} did not run its own kernel{where} but {shown}"
    return None


def _seen(record: Record) -> Iterator[tuple[str, str, list[str]]]:
    """Yield implementation, pass, and kernels."""
    for key, text in (record.attachment("kernels", dict[str, str]) or {}).items():
        kernels = text.split(SEPARATOR) if text else []
        if key in _PASSES:
            yield str(record.config.get("attention")), f" in the {key}", kernels
        else:
            yield key, "", kernels
