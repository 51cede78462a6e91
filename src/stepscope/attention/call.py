"""One attention to compute, and the interface of what computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor

from stepscope.attention.masking import CausalMask, causal_offset
from stepscope.attention.visibility import Lengths

if TYPE_CHECKING:
    from stepscope.attention.rules import ScoreRules

BoundAttention: TypeAlias = Callable[..., Tensor]
"""An implementation bound to inputs of one shape and dtype, with no dispatch left: (q, k, v), and
`rules` if there are any."""

NO_TRANSFORMS = "torch.func transforms are not supported (impl='sdpa' and 'reference' have them)"


def default_scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


class AttentionCall(NamedTuple):
    """The arguments of `attention`."""

    q: Tensor  # (..., heads, seq_q, d)
    k: Tensor  # (..., key heads, seq_k, d)
    v: Tensor  # (..., key heads, seq_k, d_v)
    is_causal: bool = False
    scale: float | None = None
    causal_align: str | None = None
    rules: ScoreRules | None = None

    @property
    def factor(self) -> float:
        """The scale of the scores."""
        return default_scale(self.q) if self.scale is None else self.scale

    @property
    def shift(self) -> int:
        """A row sees key j iff j <= row + shift, if the attention is causal."""
        if not self.is_causal:
            return 0
        return causal_offset(self.q.shape[-2], self.k.shape[-2], self.causal_align)

    @property
    def causal_mask(self) -> CausalMask:
        lengths = self.q.shape[-2], self.k.shape[-2]
        return CausalMask.of(*lengths, self.is_causal, self.causal_align)

    @property
    def lengths(self) -> Lengths:
        return Lengths.of(self.q, self.k, self.is_causal, self.causal_align)


class Backend:
    """What an implementation computes, and which inputs it supports. `attend` trusts its inputs:
    they are valid, cast as autocast would, and supported."""

    def attend(self, call: AttentionCall) -> Tensor:
        raise NotImplementedError

    def refuses(self, call: AttentionCall) -> str | None:  # noqa: ARG002
        """Return why a valid input is not supported, or None."""
        return None

    def leaves(self, call: AttentionCall) -> str | None:  # noqa: ARG002
        """Return why `auto` prefers the next implementation for a supported input, or None."""
        return None

    def details(self, call: AttentionCall) -> str | None:  # noqa: ARG002
        """Return what runs for a supported input, or None if there is no choice within."""
        return None

    def bind(self, call: AttentionCall) -> BoundAttention:
        """Return `attend` for inputs of these shapes, dtypes and devices. It must not keep the
        tensors."""
        _, _, _, is_causal, scale, causal_align, _ = call

        def attend(q: Tensor, k: Tensor, v: Tensor, rules: ScoreRules | None = None) -> Tensor:
            return self.attend(AttentionCall(q, k, v, is_causal, scale, causal_align, rules))

        return attend
