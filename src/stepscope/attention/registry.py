"""Registry of attention implementations. Imports without torch: an entry imports its module when it
is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stepscope.errors import unknown_name

if TYPE_CHECKING:
    from torch import Tensor

    from stepscope.attention.call import Backend
    from stepscope.attention.rules import ScoreRules

AUTO = "auto"


class AttentionFunction(Protocol):
    """Signature of `attention`: tensors of (..., seq, d) in, (..., seq_q, d_v) out."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        causal_align: str | None = None,
        rules: ScoreRules | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Implementation:
    """One implementation of attention."""

    name: str
    load: Callable[[], Backend]
    """Imports the implementation. Only this needs torch."""
    description: str
    saves_scores: bool = False
    """Saves a seq_q × seq_k tensor for backward; otherwise the log-sum-exp of each row."""
    decides_by_shape: bool = True
    """Support and choice depend only on shapes, dtypes, devices and settings, so that one cached
    decision serves all calls that have them in common."""


# Import statements, not importlib: torch.compile traces only through the former.


def _reference() -> Backend:
    from stepscope.attention.reference import REFERENCE

    return REFERENCE


def _compiled() -> Backend:
    from stepscope.attention.compiled import COMPILED

    return COMPILED


def _tiled() -> Backend:
    from stepscope.attention.tiled import TILED

    return TILED


def _triton() -> Backend:
    from stepscope.attention.ops import TRITON

    return TRITON


def _hopper() -> Backend:
    from stepscope.attention.hopper import HOPPER

    return HOPPER


def _sdpa() -> Backend:
    from stepscope.attention.sdpa import SDPA

    return SDPA


def _flex() -> Backend:
    from stepscope.attention.flex import FLEX

    return FLEX


def _auto() -> Backend:
    raise TypeError("auto chooses among implementations; it cannot be loaded itself")


def _sdpa_backend(name: str, backend: str, description: str, saves_scores: bool) -> Implementation:
    def load() -> Backend:
        from stepscope.attention.sdpa import ONE_BACKEND

        return ONE_BACKEND[backend]

    return Implementation(name, load, description, saves_scores, decides_by_shape=False)


IMPLEMENTATIONS: dict[str, Implementation] = {
    entry.name: entry
    for entry in (
        Implementation(
            "reference", _reference, "naive attention, all scores in memory", saves_scores=True
        ),
        Implementation(
            "compiled", _compiled, "the reference under torch.compile", saves_scores=True
        ),
        Implementation("tiled", _tiled, "FlashAttention-2 in plain PyTorch"),
        Implementation("triton", _triton, "FlashAttention-2 in Triton, forward and backward"),
        Implementation(
            "hopper", _hopper, "warp-specialized forward for Hopper GPUs, cuDNN's backward"
        ),
        Implementation(
            "sdpa", _sdpa, "torch's scaled_dot_product_attention, backend chosen by torch"
        ),
        _sdpa_backend("sdpa_flash", "FLASH_ATTENTION", "torch's FlashAttention-2", False),
        _sdpa_backend("sdpa_cudnn", "CUDNN_ATTENTION", "cuDNN's attention through torch", False),
        _sdpa_backend(
            "sdpa_efficient", "EFFICIENT_ATTENTION", "torch's memory-efficient attention", False
        ),
        _sdpa_backend("sdpa_math", "MATH", "torch's unfused attention", True),
        Implementation("flex", _flex, "torch's FlexAttention with a block mask, compiled"),
    )
}

PREFERENCE: tuple[str, ...] = ("hopper", "triton", "sdpa", "reference")
"""Order in which `auto` tries implementations: the first that neither refuses nor leaves the input.
"""

_AUTO_ENTRY = Implementation(AUTO, _auto, f"the first suitable one of: {', '.join(PREFERENCE)}")

IMPLEMENTATION_NAMES: tuple[str, ...] = (AUTO, *IMPLEMENTATIONS)
"""Every valid value of `impl=`."""


def implementation(name: str) -> Implementation:
    """Return the implementation of that name; that of `auto` chooses at each call."""
    if name == AUTO:
        return _AUTO_ENTRY
    if name not in IMPLEMENTATIONS:
        raise unknown_name("attention", name, IMPLEMENTATION_NAMES)
    return IMPLEMENTATIONS[name]
