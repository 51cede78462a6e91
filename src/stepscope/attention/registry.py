"""Registry of attention implementations. Imports without torch: an entry imports its module when it
is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, Unpack

from stepscope.errors import unknown_name

if TYPE_CHECKING:
    from torch import Tensor

    from stepscope.attention.rules import ScoreRules

AUTO = "auto"


class AttentionFunction(Protocol):
    """Signature of every implementation: tensors of (..., seq, d) in, (..., seq_q, d_v) out."""

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


BoundAttention: TypeAlias = "Callable[..., Tensor]"
"""An implementation bound to inputs of one shape and dtype, with no dispatch left: (q, k, v), and
`rules` if there are any."""

Inputs: TypeAlias = (
    "tuple[Tensor, Tensor, Tensor, bool, float | None, str | None, ScoreRules | None]"
)
"""q, k, v, is_causal, scale, causal_align, rules."""


def supports_all(*inputs: *Inputs) -> None:
    del inputs


@dataclass(frozen=True)
class Implementation:
    """One implementation of attention."""

    name: str
    load: Callable[[], AttentionFunction]
    """Imports the implementation, which trusts its inputs. Only this needs torch."""
    description: str
    saves_scores: bool = False
    """Saves a seq_q × seq_k tensor for backward; otherwise the log-sum-exp of each row."""
    refuses: Callable[[Unpack[Inputs]], str | None] = supports_all
    """`Inputs` to the reason why a valid input is not supported, or None."""
    leaves: Callable[[Unpack[Inputs]], str | None] = supports_all
    """Reason why `auto` prefers the next implementation for a supported input, or None."""
    details: Callable[[Unpack[Inputs]], str | None] = supports_all
    """What runs for a supported input, for `explain`, or None if there is no choice within."""
    bind: Callable[[Unpack[Inputs]], BoundAttention] | None = None
    """Returns a cheaper function than `load` for such inputs, if there is one."""
    decides_by_shape: bool = True
    """Support and choice depend only on shapes, dtypes, devices and settings, so that one cached
    decision serves all calls that have them in common."""


# Import statements, not importlib: torch.compile traces only through the former.


def _load_reference() -> AttentionFunction:
    from stepscope.attention.reference import reference_attention

    return reference_attention


def _load_compiled() -> AttentionFunction:
    from stepscope.attention.compiled import compiled_attention

    return compiled_attention


def _compiled_refuses(*inputs: *Inputs) -> str | None:
    from stepscope.attention.compiled import refuses

    return refuses(*inputs)


def _load_tiled() -> AttentionFunction:
    from stepscope.attention.tiled import tiled_attention

    return tiled_attention


def _tiled_refuses(*inputs: *Inputs) -> str | None:
    from stepscope.attention.tiled import refuses

    return refuses(*inputs)


def _sdpa_refuses(*inputs: *Inputs) -> str | None:
    from stepscope.attention.sdpa import refuses_rules

    return refuses_rules(inputs[-1])


def _load_sdpa() -> AttentionFunction:
    from stepscope.attention.sdpa import sdpa_attention

    return sdpa_attention


def _bind_sdpa(*inputs: *Inputs) -> BoundAttention:
    from stepscope.attention.sdpa import bind

    return bind(*inputs)


def _load_triton() -> AttentionFunction:
    from stepscope.attention.ops import triton_attention

    return triton_attention


def _bind_triton(*inputs: *Inputs) -> BoundAttention:
    from stepscope.attention.ops import bind

    return bind(*inputs)


def _triton_refuses(*inputs: *Inputs) -> str | None:
    from stepscope.attention.ops import refuses

    return refuses(*inputs)


def _triton_leaves(*inputs: *Inputs) -> str | None:
    from stepscope.attention.ops import leaves

    return leaves(*inputs)


def _triton_details(*inputs: *Inputs) -> str | None:
    from stepscope.attention.ops import details

    return details(*inputs)


def _load_hopper() -> AttentionFunction:
    from stepscope.attention.hopper import hopper_attention

    return hopper_attention


def _bind_hopper(*inputs: *Inputs) -> BoundAttention:
    from stepscope.attention.hopper import bind

    return bind(*inputs)


def _hopper_refuses(*inputs: *Inputs) -> str | None:
    from stepscope.attention.hopper import refuses

    return refuses(*inputs)


def _hopper_leaves(*inputs: *Inputs) -> str | None:
    from stepscope.attention.hopper import leaves

    return leaves(*inputs)


def _load_flex() -> AttentionFunction:
    from stepscope.attention.flex import flex_attention_by_mask

    return flex_attention_by_mask


def _flex_refuses(*inputs: *Inputs) -> str | None:
    from stepscope.attention.flex import refuses

    return refuses(*inputs)


def _load_auto() -> AttentionFunction:
    raise TypeError("auto chooses among implementations; it cannot be loaded itself")


def _sdpa_backend(name: str, backend: str, description: str, saves_scores: bool) -> Implementation:
    def load() -> AttentionFunction:
        from stepscope.attention.sdpa import backend_attention

        return backend_attention(backend)

    def refuses(*inputs: *Inputs) -> str | None:
        from stepscope.attention.sdpa import refusal

        return refusal(backend, *inputs)

    return Implementation(
        name=name,
        load=load,
        refuses=refuses,
        saves_scores=saves_scores,
        description=description,
        decides_by_shape=False,
    )


IMPLEMENTATIONS: dict[str, Implementation] = {
    entry.name: entry
    for entry in (
        Implementation(
            name="reference",
            load=_load_reference,
            saves_scores=True,
            description="naive attention, all scores in memory",
        ),
        Implementation(
            name="compiled",
            load=_load_compiled,
            refuses=_compiled_refuses,
            saves_scores=True,
            description="the reference under torch.compile",
        ),
        Implementation(
            name="tiled",
            load=_load_tiled,
            refuses=_tiled_refuses,
            description="FlashAttention-2 in plain PyTorch",
        ),
        Implementation(
            name="triton",
            load=_load_triton,
            bind=_bind_triton,
            refuses=_triton_refuses,
            leaves=_triton_leaves,
            details=_triton_details,
            description="FlashAttention-2 in Triton, forward and backward",
        ),
        Implementation(
            name="hopper",
            load=_load_hopper,
            bind=_bind_hopper,
            refuses=_hopper_refuses,
            leaves=_hopper_leaves,
            description="warp-specialized forward for Hopper GPUs, cuDNN's backward",
        ),
        Implementation(
            name="sdpa",
            load=_load_sdpa,
            refuses=_sdpa_refuses,
            bind=_bind_sdpa,
            description="torch's scaled_dot_product_attention, backend chosen by torch",
        ),
        _sdpa_backend("sdpa_flash", "FLASH_ATTENTION", "torch's FlashAttention-2", False),
        _sdpa_backend("sdpa_cudnn", "CUDNN_ATTENTION", "cuDNN's attention through torch", False),
        _sdpa_backend(
            "sdpa_efficient", "EFFICIENT_ATTENTION", "torch's memory-efficient attention", False
        ),
        _sdpa_backend("sdpa_math", "MATH", "torch's unfused attention", True),
        Implementation(
            name="flex",
            load=_load_flex,
            refuses=_flex_refuses,
            description="torch's FlexAttention with a block mask, compiled",
        ),
    )
}

PREFERENCE: tuple[str, ...] = ("hopper", "triton", "sdpa", "reference")
"""Order in which `auto` tries implementations: the first that neither refuses nor leaves the input.
"""

_AUTO_ENTRY = Implementation(
    name=AUTO,
    load=_load_auto,
    description=f"the first suitable one of: {', '.join(PREFERENCE)}",
)

IMPLEMENTATION_NAMES: tuple[str, ...] = (AUTO, *IMPLEMENTATIONS)
"""Every valid value of `impl=`."""


def implementation(name: str) -> Implementation:
    """Return the implementation of that name; that of `auto` chooses at each call."""
    if name == AUTO:
        return _AUTO_ENTRY
    if name not in IMPLEMENTATIONS:
        raise unknown_name("attention", name, IMPLEMENTATION_NAMES)
    return IMPLEMENTATIONS[name]
