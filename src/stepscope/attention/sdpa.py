"""PyTorch's own attention: with PyTorch's choice among its backends, or with one of them by name.

A named backend runs alone (`sdpa_kernel`), so that torch raises where it cannot run; `refusal` asks
beforehand and passes torch's reason on.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from stepscope.attention.inputs import as_four_dims, heads_per_key_head, with_positive_scale
from stepscope.attention.masking import Sight
from stepscope.attention.reference import reference_attention

if TYPE_CHECKING:
    from stepscope.attention.registry import AttentionFunction, BoundAttention

_HEADLINES = {
    SDPBackend.FLASH_ATTENTION: "Flash attention kernel not used because",
    SDPBackend.EFFICIENT_ATTENTION: "Memory efficient kernel not used because",
    SDPBackend.CUDNN_ATTENTION: "CuDNN attention kernel not used because",
}
_CAN_USE = {
    SDPBackend.FLASH_ATTENTION: cuda.can_use_flash_attention,
    SDPBackend.EFFICIENT_ATTENTION: cuda.can_use_efficient_attention,
    SDPBackend.CUDNN_ATTENTION: cuda.can_use_cudnn_attention,
}
_CUDA_ONLY = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
# These know a mask aligned to the last key; the others read one from memory.
_ALIGNS_LAST = (None, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def sdpa_attention(
    q: Tensor,  # (..., heads, seq_q, d)
    k: Tensor,  # (..., key heads, seq_k, d)
    v: Tensor,  # (..., key heads, seq_k, d_v)
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_align: str | None = None,
) -> Tensor:
    """softmax(q kᵀ · scale) v by `scaled_dot_product_attention`, backend by torch's choice."""
    return _attend(q, k, v, is_causal, scale, causal_align, None)


def bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    causal_align: str | None,
) -> BoundAttention:
    """For inputs like these: torch's function itself where it takes them as they are."""
    if q.numel() and k.numel() and (scale is None or scale > 0):
        call = _Call.of(q, k, v, is_causal, causal_align, None)
        if call.q is q and call.k is k and call.mask is None:
            settings = (call.is_causal, scale, call.is_grouped)
            return functools.partial(_torch_attention, *settings)
    return functools.partial(
        sdpa_attention, is_causal=is_causal, scale=scale, causal_align=causal_align
    )


def _torch_attention(
    is_causal: bool, scale: float | None, is_grouped: bool, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    # Looked up at each call: a program may have replaced torch's function since the first one.
    return functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )


def backend_attention(name: str) -> AttentionFunction:
    """The same with that backend of torch's `SDPBackend` and no other."""
    backend = getattr(SDPBackend, name)

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        causal_align: str | None = None,
    ) -> Tensor:
        with sdpa_kernel(backend):
            return _attend(q, k, v, is_causal, scale, causal_align, backend)

    return attend


def refusal(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    causal_align: str | None,
) -> str | None:
    """Why that backend cannot take this input, in torch's words where it has some."""
    del scale
    backend = getattr(SDPBackend, name)
    # Under the compiler nothing can be asked; torch raises when the graph runs.
    if backend == SDPBackend.MATH or torch.compiler.is_compiling():
        return None
    if backend in _CUDA_ONLY and q.device.type != "cuda":
        return f"torch has this backend for CUDA only, and q is on {q.device}"
    call = _Call.of(q, k, v, is_causal, causal_align, backend)
    if q.device.type == "cuda" and _CAN_USE[backend](call.params()):
        return None
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(backend):
        warnings.simplefilter("always")
        try:
            choice = call.choice()
        except RuntimeError as error:
            said = _reasons([str(w.message) for w in caught], backend)
            return said or f"torch has no kernel of it for {q.dtype} on {q.device} ({error})"
    return None if choice == int(backend) else f"torch would take {SDPBackend(choice).name} instead"


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    causal_align: str | None,
    backend: SDPBackend | None,
) -> Tensor:
    if not q.numel() or not k.numel():
        # Nothing to compute, and torch's CPU kernel divides by a count of zero heads: a crash.
        return reference_attention(
            q, k, v, is_causal=is_causal, scale=scale, causal_align=causal_align
        )
    if scale is not None:
        q, scale = with_positive_scale(q, scale)
    call = _Call.of(q, k, v, is_causal, causal_align, backend)
    out = functional.scaled_dot_product_attention(
        call.q, call.k, call.v, attn_mask=call.mask, is_causal=call.is_causal, scale=scale,
        enable_gqa=call.is_grouped,
    )  # fmt: skip
    if call.blind_rows:
        out = functional.pad(out, (0, 0, call.blind_rows, 0))
    return out if q.dim() == 4 else out.reshape(*q.shape[:-1], v.shape[-1])


class _Call(NamedTuple):
    """Arguments that say to torch what was meant: 4-D, and no row without a key."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    blind_rows: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        causal_align: str | None,
        backend: SDPBackend | None,
    ) -> _Call:
        mask: Tensor | None = None
        blind_rows = 0
        if is_causal and q.shape[-2] != k.shape[-2]:
            sight = Sight.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
            blind_rows = sight.blind_rows
            q = q[..., blind_rows:, :]
            if sight.offset == 0:
                # No query sees the keys past the last one; fused kernels want a square.
                k, v = (x[..., : q.shape[-2], :] for x in (k, v))
            elif sight.offset is not None and sight.offset > 0:
                mask = _aligned_to_last(q, k, sight.offset, backend)
        if q.dim() != 4:
            q, k, v = as_four_dims(q), as_four_dims(k), as_four_dims(v)
        return cls(q, k, v, mask, is_causal and mask is None, blind_rows)

    @property
    def is_grouped(self) -> bool:
        return heads_per_key_head(self.q, self.k) > 1

    def _read_mask(self) -> Tensor | None:
        """A mask by rule is none to the kernels that know the rule."""
        return self.mask if type(self.mask) is Tensor else None

    def params(self) -> cuda.SDPAParams:
        return cuda.SDPAParams(
            self.q, self.k, self.v, self._read_mask(), 0.0, self.is_causal, self.is_grouped
        )

    def choice(self) -> int:
        return torch._fused_sdp_choice(
            self.q, self.k, self.v, self._read_mask(), 0.0, self.is_causal,
            enable_gqa=self.is_grouped,
        )  # fmt: skip


def _aligned_to_last(q: Tensor, k: Tensor, offset: int, backend: SDPBackend | None) -> Tensor:
    if q.device.type == "cuda" and backend in _ALIGNS_LAST:
        return causal_lower_right(q.shape[-2], k.shape[-2])
    everything = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    return everything.tril(diagonal=offset)


def _reasons(messages: list[str], backend: SDPBackend) -> str:
    """What torch says below the headline of that backend."""
    own, reasons = False, []
    for message in messages:
        said = message.split(" (Triggered internally")[0].strip()
        if said.rstrip(":").endswith("not used because"):
            own = said.startswith(_HEADLINES[backend])
        elif own:
            reasons.append(said)
    return " ".join(reasons)
