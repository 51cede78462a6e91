"""PyTorch's own attention: with PyTorch's choice among its backends, or with one of them by name.

A named backend runs alone (`sdpa_kernel`), so that torch raises where it cannot run; `refusal` asks
beforehand and passes torch's reason on.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from stepscope.attention.inputs import as_four_dims, heads_per_key_head
from stepscope.attention.masking import Sight
from stepscope.attention.registry import AttentionFunction

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
    sight = Sight.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
    return _Call.of(q, k, v, sight, None).run(scale, (*q.shape[:-1], v.shape[-1]))


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
        sight = Sight.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
        with sdpa_kernel(backend):
            return _Call.of(q, k, v, sight, backend).run(scale, (*q.shape[:-1], v.shape[-1]))

    return attend


def refusal(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    causal_align: str | None,
) -> str | None:
    """Why that backend cannot take this input, in torch's words where it has some."""
    backend = getattr(SDPBackend, name)
    # Under the compiler nothing can be asked; torch raises when the graph runs.
    if backend == SDPBackend.MATH or torch.compiler.is_compiling():
        return None
    if backend in _CUDA_ONLY and q.device.type != "cuda":
        return f"torch has this backend for CUDA only, and q is on {q.device}"
    sight = Sight.of(q.shape[-2], k.shape[-2], is_causal, causal_align)
    call = _Call.of(q, k, v, sight, backend)
    if q.device.type == "cuda" and _CAN_USE[backend](call.params()):
        return None
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(backend):
        warnings.simplefilter("always")
        try:
            choice = call.choice()
        except RuntimeError as error:
            return _reasons([str(w.message) for w in caught], backend) or str(error)
    return None if choice == int(backend) else f"torch would take {SDPBackend(choice).name} instead"


@dataclass(frozen=True)
class _Call:
    """Arguments that say to torch what was meant: 4-D, and no row without a key."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    blind_rows: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, sight: Sight, backend: SDPBackend | None) -> _Call:
        q = q[..., sight.blind_rows :, :]
        seq_q, seq_k = q.shape[-2], k.shape[-2]
        mask: Tensor | None = None
        if sight.offset == 0 and seq_q < seq_k:
            # No query sees the keys past the last one; fused kernels want a square.
            k, v = (x[..., :seq_q, :] for x in (k, v))
        elif sight.offset and sight.offset > 0:
            if q.device.type == "cuda" and backend in _ALIGNS_LAST:
                mask = causal_lower_right(seq_q, seq_k)
            else:
                everything = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device)
                mask = everything.tril(diagonal=sight.offset)
        causal = sight.offset is not None and mask is None
        q, k, v = (as_four_dims(x) for x in (q, k, v))
        return cls(q, k, v, mask, causal, sight.blind_rows)

    @property
    def is_grouped(self) -> bool:
        return heads_per_key_head(self.q, self.k) > 1

    def run(self, scale: float | None, shape: tuple[int, ...]) -> Tensor:
        out = functional.scaled_dot_product_attention(
            self.q, self.k, self.v, attn_mask=self.mask, is_causal=self.is_causal, scale=scale,
            enable_gqa=self.is_grouped,
        )  # fmt: skip
        if self.blind_rows:
            out = functional.pad(out, (0, 0, self.blind_rows, 0))
        return out.reshape(shape)

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
