"""Which attentions there are. Loads without torch: an entry says how to load what it needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

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


class Refusal(Protocol):
    """Why an implementation cannot take a valid input; None where it can."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        scale: float | None,
        causal_align: str | None,
    ) -> str | None: ...


def takes_everything(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, causal_align: str | None
) -> None:
    del q, k, v, is_causal, scale, causal_align


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention."""

    name: str
    load: Callable[[], AttentionFunction]
    """Imports the implementation itself, which trusts its inputs; only here torch is needed."""
    saves_scores: bool
    """Keeps a seq_q × seq_k tensor for backward; otherwise the log-sum-exp of each row."""
    description: str
    refuses: Refusal = takes_everything

    @property
    def function(self) -> AttentionFunction:
        """`attention` by this implementation: inputs are checked, a refusal is an error."""
        from stepscope.attention.api import attention

        return functools.partial(attention, impl=self.name)


def _module(name: str) -> Any:
    return import_module(f"stepscope.attention.{name}")


def _asking(module: str) -> Refusal:
    """The `refuses` of that module."""
    return lambda *inputs: _module(module).refuses(*inputs)


def _sdpa_backend(name: str, backend: str, description: str, saves_scores: bool) -> Implementation:
    def load() -> AttentionFunction:
        from stepscope.attention.sdpa import backend_attention

        return backend_attention(backend)

    def refuses(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        scale: float | None,
        causal_align: str | None,
    ) -> str | None:
        from stepscope.attention.sdpa import refusal

        del scale
        return refusal(backend, q, k, v, is_causal, causal_align)

    return Implementation(
        name=name,
        load=functools.cache(load),
        refuses=refuses,
        saves_scores=saves_scores,
        description=description,
    )


IMPLEMENTATIONS: dict[str, Implementation] = {
    entry.name: entry
    for entry in (
        Implementation(
            name="reference",
            load=lambda: _module("reference").reference_attention,
            saves_scores=True,
            description="the formula written out, all scores in memory",
        ),
        Implementation(
            name="compiled",
            load=lambda: _module("compiled").compiled_attention,
            refuses=_asking("compiled"),
            saves_scores=True,
            description="the reference under torch.compile",
        ),
        Implementation(
            name="tiled",
            load=lambda: _module("tiled").tiled_attention,
            saves_scores=False,
            description="FlashAttention-2 in plain PyTorch",
        ),
        Implementation(
            name="sdpa",
            load=lambda: _module("sdpa").sdpa_attention,
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
            load=lambda: _module("flex").flex_attention_by_mask,
            refuses=_asking("flex"),
            saves_scores=False,
            description="torch's FlexAttention with a causal block mask, compiled",
        ),
    )
}

PREFERENCE: tuple[str, ...] = ("sdpa", "reference")
"""What `auto` takes: the first that does not refuse."""

_AUTO_ENTRY = Implementation(
    name=AUTO,
    load=lambda: _module("api").attention,
    saves_scores=False,
    description=f"the first that takes the input of: {', '.join(PREFERENCE)}",
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
