"""Whether the kernels that ran are those of the attention that a record names."""

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
"""Made of products and a softmax: a fused kernel among theirs is a surprise."""


def owner(kernel: str) -> str | None:
    """The implementation that a fused attention kernel belongs to; None for any other kernel."""
    # What Inductor makes of FlexAttention is a template, and does not always say of what.
    if kernel.startswith("triton_tem"):
        return "flex"
    described = describe(kernel)
    return _OWNERS.get(described.library) if described.kind == "attention" else None


def foreign_kernels(record: Record) -> str | None:
    """What is wrong with the kernels that were seen; None where nothing is or none were seen."""
    for attention, where, kernels in _seen(record):
        owners = {held for kernel in kernels if (held := owner(kernel)) is not None}
        others = owners - {attention}
        if attention in (*_FUSED, *_UNFUSED) and others:
            return f"{attention} ran kernels of {', '.join(sorted(others))}{where}"
        if attention in _FUSED and not owners:
            shown = SEPARATOR.join(kernels[:3]) or "none at all"
            return f"{attention} ran no kernel of its own{where} but {shown}"
    return None


def _seen(record: Record) -> Iterator[tuple[str, str, list[str]]]:
    """Implementation, where it ran, and its kernels."""
    for what, text in (record.attachment("kernels", dict[str, str]) or {}).items():
        kernels = text.split(SEPARATOR) if text else []
        if what in _PASSES:
            yield str(record.config.get("attention")), f" in the {what}", kernels
        else:
            yield what, "", kernels
