"""Which attentions there are. Loads without torch: an entry says how to load what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, Unpack

from stepscope.errors import unknown_name

if TYPE_CHECKING:
    from torch import Tensor

AUTO = "auto"


class AttentionFunction(Protocol):
    """What every implementation is: tensors of (..., seq, d) in, (..., seq_q, d_v) out."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        causal_align: str | None = None,
    ) -> Tensor: ...


BoundAttention: TypeAlias = "Callable[[Tensor, Tensor, Tensor], Tensor]"
"""One for inputs of one shape and format, which has nothing more to decide."""

Inputs: TypeAlias = "tuple[Tensor, Tensor, Tensor, bool, float | None, str | None]"
"""q, k, v, is_causal, scale, causal_align: what a refusal is asked about."""


def takes_everything(*inputs: *Inputs) -> None:
    del inputs


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention."""

    name: str
    load: Callable[[], AttentionFunction]
    """Imports the implementation itself, which trusts its inputs; only here torch is needed."""
    saves_scores: bool
    """Keeps a seq_q × seq_k tensor for backward; otherwise the log-sum-exp of each row."""
    description: str
    refuses: Callable[[Unpack[Inputs]], str | None] = takes_everything
    """(q, k, v, is_causal, scale, causal_align): why it cannot take a valid input, or None."""
    leaves: Callable[[Unpack[Inputs]], str | None] = takes_everything
    """Why `auto` passes it by for an input that it could take, or None."""
    bind: Callable[[Unpack[Inputs]], BoundAttention] | None = None
    """The shortest way to it for such inputs, where that is shorter than `load`'s."""
    decides_by_shape: bool = True
    """All these follow from shapes, formats, devices and settings, so that one answer serves all
    calls that have them in common."""


# Import statements and not importlib: torch.compile traces through the former only.


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


def _load_sdpa() -> AttentionFunction:
    from stepscope.attention.sdpa import sdpa_attention

    return sdpa_attention


def _bind_sdpa(*inputs: *Inputs) -> BoundAttention:
    from stepscope.attention.sdpa import bind

    return bind(*inputs)


def _load_triton() -> AttentionFunction:
    from stepscope.attention.ops import triton_attention

    return triton_attention


def _triton_refuses(*inputs: *Inputs) -> str | None:
    from stepscope.attention.ops import refuses

    return refuses(*inputs)


def _triton_leaves(*inputs: *Inputs) -> str | None:
    from stepscope.attention.ops import leaves

    return leaves(*inputs)


def _load_flex() -> AttentionFunction:
    from stepscope.attention.flex import flex_attention_by_mask

    return flex_attention_by_mask


def _flex_refuses(*inputs: *Inputs) -> str | None:
    from stepscope.attention.flex import refuses

    return refuses(*inputs)


def _load_auto() -> AttentionFunction:
    raise TypeError("auto is a choice among implementations and not one to load")


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
            description="the formula written out, all scores in memory",
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
            saves_scores=False,
            description="FlashAttention-2 in plain PyTorch",
        ),
        Implementation(
            name="triton",
            load=_load_triton,
            refuses=_triton_refuses,
            leaves=_triton_leaves,
            saves_scores=False,
            description="FlashAttention-2 in Triton, forward and backward",
        ),
        Implementation(
            name="sdpa",
            load=_load_sdpa,
            bind=_bind_sdpa,
            saves_scores=False,
            description="torch's scaled_dot_product_attention, backend by its own choice",
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
            saves_scores=False,
            description="torch's FlexAttention with a causal block mask, compiled",
        ),
    )
}

PREFERENCE: tuple[str, ...] = ("triton", "sdpa", "reference")
"""What `auto` takes: the first that neither refuses the input nor leaves it to the next."""

_AUTO_ENTRY = Implementation(
    name=AUTO,
    load=_load_auto,
    saves_scores=False,
    description=f"the first that is good for the input of: {', '.join(PREFERENCE)}",
)

IMPLEMENTATION_NAMES: tuple[str, ...] = (AUTO, *IMPLEMENTATIONS)
"""Every name that `impl=` takes."""


def implementation(name: str) -> Implementation:
    """The implementation of that name; `auto` is one too, and chooses at each call."""
    if name == AUTO:
        return _AUTO_ENTRY
    if name not in IMPLEMENTATIONS:
        raise unknown_name("attention", name, IMPLEMENTATION_NAMES)
    return IMPLEMENTATIONS[name]
