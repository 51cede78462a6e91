"""torch's scaled_dot_product_attention: with the backend that torch chooses, or with a named one.

A named backend is the only one enabled (`sdpa_kernel`), so that torch raises if it cannot run;
`refusal` checks in advance and returns torch's reason.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from stepscope.attention.call import AttentionCall, Backend, BoundAttention
from stepscope.attention.inputs import as_four_dims, heads_per_key_head, with_positive_scale
from stepscope.attention.reference import changed_scores, reference_attention
from stepscope.attention.visibility import Lengths, key_intervals

if TYPE_CHECKING:
    from stepscope.attention.rules import ScoreRules

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
# These have a bottom-right causal mask built in; the others read a mask from memory.
_BOTTOM_RIGHT_BUILT_IN = (None, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


class _Sdpa(Backend):
    """torch's SDPA with the backend that torch chooses."""

    def attend(self, call: AttentionCall) -> Tensor:
        return _attend(call, None)

    def refuses(self, call: AttentionCall) -> str | None:
        return _refuses_rules(call.rules)

    def bind(self, call: AttentionCall) -> BoundAttention:
        """Return torch's function itself if it takes such inputs unchanged."""
        supported = call.q.numel() and call.k.numel() and (call.scale is None or call.scale > 0)
        if supported and call.rules is None:
            torchs = _Arguments.of(call, None)
            if torchs.q is call.q and torchs.k is call.k and torchs.mask is None:
                return _torch_attention(torchs.is_causal, call.scale, torchs.is_grouped)
        return super().bind(call)


SDPA = _Sdpa()


def _torch_attention(is_causal: bool, scale: float | None, is_grouped: bool) -> BoundAttention:
    """Return a call of torch's function with these settings: only those that are not the default,
    since torch reads every argument at every call."""
    more: dict[str, Any] = {"is_causal": True} if is_causal else {}
    if scale is not None:
        more["scale"] = scale
    if is_grouped:
        more["enable_gqa"] = True

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Looked up at each call: the user's program may replace torch's function between calls.
        return functional.scaled_dot_product_attention(q, k, v, **more)

    return attend


class OneBackend(Backend):
    """torch's SDPA restricted to one backend of torch's `SDPBackend`."""

    def __init__(self, name: str) -> None:
        self._backend = getattr(SDPBackend, name)

    def attend(self, call: AttentionCall) -> Tensor:
        with sdpa_kernel(self._backend):
            return _attend(call, self._backend)

    def refuses(self, call: AttentionCall) -> str | None:
        return refusal(self._backend, call)


ONE_BACKEND = {
    name: OneBackend(name)
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
}


def _refuses_rules(rules: ScoreRules | None) -> str | None:
    """Return which rule torch's SDPA does not have. The others become a mask in memory."""
    if rules is not None and rules.softcap is not None:
        return "torch's SDPA has no soft-capping"
    if rules is not None and rules.sinks is not None:
        return "torch's SDPA has no attention sinks"
    if rules is not None and rules.dropout_seed is not None:
        return "the dropout of torch's SDPA has random numbers of its own, not of a seed"
    return None


def refusal(backend: Any, call: AttentionCall) -> str | None:
    """Return why that backend does not support this input, with torch's own message if there is
    one."""
    if reason := _refuses_rules(call.rules):
        return reason
    # Under the compiler support cannot be queried; torch raises when the graph runs.
    if backend == SDPBackend.MATH or torch.compiler.is_compiling():
        return None
    device = call.q.device
    if backend in _CUDA_ONLY and device.type != "cuda":
        return f"torch has this backend for CUDA only, and q is on {device}"
    torchs = _Arguments.of(call, backend)
    if device.type == "cuda" and _CAN_USE[backend](torchs.params()):
        return None
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(backend):
        warnings.simplefilter("always")
        try:
            choice = torchs.choice()
        except RuntimeError as error:
            reasons = _reasons([str(w.message) for w in caught], backend)
            return reasons or f"torch has no such kernel for {call.q.dtype} on {device} ({error})"
    return None if choice == int(backend) else f"torch would use {SDPBackend(choice).name} instead"


def _attend(call: AttentionCall, backend: SDPBackend | None) -> Tensor:
    q, k, v, is_causal, scale, causal_align, rules = call
    if not q.numel() or not k.numel():
        # Nothing to compute, and torch's CPU kernel crashes with a division by zero heads.
        return reference_attention(
            q, k, v, is_causal=is_causal, scale=scale, causal_align=causal_align, rules=rules
        )
    if scale is not None:
        q, scale = with_positive_scale(q, scale)
    torchs = _Arguments.of(call._replace(q=q), backend)
    out = functional.scaled_dot_product_attention(
        torchs.q,
        torchs.k,
        torchs.v,
        attn_mask=torchs.mask,
        dropout_p=torchs.dropout,
        is_causal=torchs.is_causal,
        scale=scale,
        enable_gqa=torchs.is_grouped,
    )
    if torchs.empty_rows is not None:
        out = out.masked_fill(torchs.empty_rows, 0.0)
    if torchs.fully_masked_rows:
        out = functional.pad(out, (0, 0, torchs.fully_masked_rows, 0))
    return out if q.dim() == 4 else out.reshape(*q.shape[:-1], v.shape[-1])


class _Arguments(NamedTuple):
    """Arguments of an equivalent call of torch's SDPA: 4-D, and no row without a visible key."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    fully_masked_rows: int
    """Number of leading queries without a visible key, which are not in `q`."""
    empty_rows: Tensor | None = None
    """Queries that see no key, for which the mask shows all; their output is zero."""
    dropout: float = 0.0

    @classmethod
    def of(cls, call: AttentionCall, backend: SDPBackend | None) -> _Arguments:
        q, k, v, is_causal, _, _, rules = call
        dropout = 0.0 if rules is None else rules.dropout or 0.0
        if rules is not None and not rules.only_drops:
            mask_of_rules, empty = _mask_of_rules(q, call.lengths, rules)
            q, k, v = as_four_dims(q), as_four_dims(k), as_four_dims(v)
            return cls(q, k, v, mask_of_rules, False, 0, empty, dropout)
        mask: Tensor | None = None
        fully_masked_rows = 0
        if is_causal and q.shape[-2] != k.shape[-2]:
            causal_mask = call.causal_mask
            fully_masked_rows = causal_mask.fully_masked_rows
            q = q[..., fully_masked_rows:, :]
            if causal_mask.offset == 0:
                # No query sees the keys past the last one, and fused kernels need a square mask.
                k, v = (x[..., : q.shape[-2], :] for x in (k, v))
            elif causal_mask.offset is not None and causal_mask.offset > 0:
                mask = _bottom_right_mask(q, k, causal_mask.offset, backend)
        if q.dim() != 4:
            q, k, v = as_four_dims(q), as_four_dims(k), as_four_dims(v)
        causal = is_causal and mask is None
        return cls(q, k, v, mask, causal, fully_masked_rows, dropout=dropout)

    @property
    def is_grouped(self) -> bool:
        return heads_per_key_head(self.q, self.k) > 1

    def _mask_in_memory(self) -> Tensor | None:
        """Return the mask unless it is a `CausalBias`, which the kernels build in."""
        return self.mask if type(self.mask) is Tensor else None

    def params(self) -> cuda.SDPAParams:
        return cuda.SDPAParams(
            self.q,
            self.k,
            self.v,
            self._mask_in_memory(),
            self.dropout,
            self.is_causal,
            self.is_grouped,
        )

    def choice(self) -> int:
        return torch._fused_sdp_choice(
            self.q,
            self.k,
            self.v,
            self._mask_in_memory(),
            self.dropout,
            self.is_causal,
            enable_gqa=self.is_grouped,
        )


def _mask_of_rules(q: Tensor, lengths: Lengths, rules: ScoreRules) -> tuple[Tensor, Tensor | None]:
    """Return the mask in memory, boolean or additive, and the rows that it would hide entirely."""
    low, high = key_intervals(rules, lengths)[:, None, :, :, None].unbind(2)
    key = torch.arange(lengths.seq_k, device=lengths.device)
    visible = (key >= low) & (key < high)
    empty = None
    if lengths.seq_q != lengths.seq_k or rules.unequal_documents:
        empty = ~visible.any(-1, keepdim=True)
        visible = visible | empty
    if rules.alibi_slopes is None and rules.bias is None:
        return visible, empty
    zeros = torch.zeros((), dtype=q.dtype, device=q.device)
    added = changed_scores(zeros, lengths, rules)
    return added.masked_fill(~visible, float("-inf")), empty


def _bottom_right_mask(q: Tensor, k: Tensor, offset: int, backend: SDPBackend | None) -> Tensor:
    if q.device.type == "cuda" and backend in _BOTTOM_RIGHT_BUILT_IN:
        return causal_lower_right(q.shape[-2], k.shape[-2])
    all_true = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    return all_true.tril(diagonal=offset)


def _reasons(messages: list[str], backend: SDPBackend) -> str:
    """Return torch's warnings that follow the headline of that backend."""
    of_backend, reasons = False, []
    for message in messages:
        text = message.split(" (Triggered internally")[0].strip()
        if text.rstrip(":").endswith("not used because"):
            of_backend = text.startswith(_HEADLINES[backend])
        elif of_backend:
            reasons.append(text)
    return " ".join(reasons)
