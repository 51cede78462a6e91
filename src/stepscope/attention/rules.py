"""Rules of an attention besides its causal mask: which keys a query sees, and how its scores change
before the softmax. Imports without torch.

Every implementation gets the same `ScoreRules`. The naive form is in `reference.py`; the visible
keys as a mask and as intervals are in `visibility.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stepscope.attention.masking import causal_offset

if TYPE_CHECKING:
    from torch import Tensor

VISIBILITY = ("window", "prefix", "documents", "cu_seqlens")
"""Rules that decide which keys are visible; the others change scores."""
DROPOUT = ("dropout", "dropout_seed")
NAMES = (*VISIBILITY, "softcap", "alibi_slopes", "sinks", "bias", *DROPOUT)
_TENSORS = ("documents", "cu_seqlens", "alibi_slopes", "sinks", "bias", "dropout_seed")
_INTEGERS = ("int32", "int64")


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreRules:
    """Rules of an attention besides its causal mask: hidden keys, changed scores, dropout.

    The scaled score s of a query at position p and a key at position j becomes
    `softcap · tanh(s / softcap) - slope · |p - j| + bias`, and -inf if the key is hidden; positions
    are aligned by `causal_align`. Rules that are tensors need q, k and v of (batch, heads, seq, d).
    """

    window: int | None = None
    """A query sees the `window` keys up to and including its own position: p - j < window. Without
    a causal mask it sees as many after it: |p - j| < window."""
    prefix: int | Tensor | None = None
    """Number of leading keys that every query sees despite the causal mask, of each document if
    there are several; one for all, or an int tensor (batch,)."""
    documents: Tensor | None = None
    """Int tensor (seq,) or (batch, seq): a query sees only keys of its document, which is a run of
    equal numbers. Positions count from the start of the document."""
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None = None
    """The same for concatenated documents: int tensor of the start of each document and the end of
    the last one, or a pair of such tensors, for queries and for keys."""
    softcap: float | None = None
    """Bound of the scores: softcap · tanh(s / softcap)."""
    alibi_slopes: Tensor | None = None
    """ALiBi: float tensor (heads,), the penalty per position of distance. It gets no gradient."""
    sinks: Tensor | None = None
    """Attention sinks: float tensor (heads,) of scores that take part in the softmax and have no
    value."""
    bias: Tensor | None = None
    """Float tensor that is added to the scores, broadcastable to (batch, heads, seq_q, seq_k)."""
    dropout: float | None = None
    """Probability with which a weight, after the softmax, becomes zero; the others are divided by
    1 - dropout."""
    dropout_seed: Tensor | None = None
    """Int64 tensor (2,), a seed and an offset, that determines which weights become zero: the same
    ones in every implementation that supports it. Without it torch's generator draws one in every
    call, and torch's own implementations use their own random numbers."""
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and (not _is_int(self.window) or self.window < 1):
            raise ValueError(f"window={self.window!r} is not a positive integer")
        if self.softcap is not None and not (
            isinstance(self.softcap, int | float)
            and math.isfinite(self.softcap)
            and self.softcap > 0
        ):
            raise ValueError(f"softcap={self.softcap!r} is not a positive number")
        self._check_dropout()
        if not (self.prefix is None or _is_tensor(self.prefix)) and (
            not _is_int(self.prefix) or self.prefix < 0
        ):
            raise ValueError(f"prefix={self.prefix!r} is neither a number of keys nor a tensor")
        for name in _TENSORS:
            value = getattr(self, name)
            pair = isinstance(value, tuple) and name == "cu_seqlens" and len(value) == 2
            if value is not None and not all(map(_is_tensor, value if pair else (value,))):
                raise ValueError(f"{name} is a {type(value).__name__}; it must be a tensor")
        if self.documents is not None and self.cu_seqlens is not None:
            raise ValueError("documents and cu_seqlens describe the same: give one of them")
        if self.window is not None and self.prefix is not None:
            raise ValueError("a window and a prefix cannot be combined")
        if self.unequal_documents and self.alibi_slopes is not None:
            raise ValueError("ALiBi needs the same documents for queries and keys")

    def _check_dropout(self) -> None:
        probability = self.dropout
        if probability is None:
            if self.dropout_seed is not None:
                raise ValueError("dropout_seed needs dropout")
        elif not (isinstance(probability, int | float) and 0 <= probability < 1):
            raise ValueError(f"dropout={probability!r} is not a probability below 1")
        elif not probability:
            for name in DROPOUT:
                object.__setattr__(self, name, None)

    @property
    def names(self) -> tuple[str, ...]:
        """The rules that are set."""
        return tuple(name for name in NAMES if getattr(self, name) is not None)

    @property
    def hides_keys(self) -> bool:
        return any(getattr(self, name) is not None for name in VISIBILITY)

    @property
    def only_drops(self) -> bool:
        """True if it neither hides keys nor changes scores."""
        return not set(self.names) - set(DROPOUT)

    @property
    def unequal_documents(self) -> bool:
        """True if documents may have different numbers of queries and keys."""
        return isinstance(self.cu_seqlens, tuple) and self.cu_seqlens[0] is not self.cu_seqlens[1]

    @property
    def has_positions(self) -> bool:
        """True if a rule depends on the distance between a query and a key."""
        return self.window is not None or self.alibi_slopes is not None

    @property
    def tensors(self) -> tuple[tuple[str, Tensor], ...]:
        """Its tensors by name."""
        found = []
        for name in NAMES:
            value = getattr(self, name)
            parts = value if isinstance(value, tuple) else (value,)
            found += [(name, part) for part in parts if _is_tensor(part)]
        return tuple(found)

    def with_scores(
        self, *, softcap: float | None = None, sinks: Tensor | None = None
    ) -> ScoreRules:
        """Return rules with the same visible keys, soft-capping and sinks; they share what has been
        derived from the visible keys."""
        changed = replace(self, softcap=softcap, sinks=sinks)
        object.__setattr__(changed, "_cache", self._cache)
        return changed

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that the choice of an implementation depends on."""
        prefix = self.prefix if _is_int(self.prefix) else None
        numbers = (self.window, self.softcap, prefix, self.dropout, self.unequal_documents)
        return numbers + tuple(
            (name, x.shape, x.dtype, x.device, x.requires_grad) for name, x in self.tensors
        )

    def check(self, q: Tensor, k: Tensor, is_causal: bool, causal_align: str | None) -> None:
        """Raise ValueError if the rules do not fit the inputs."""
        seq_q, seq_k = q.shape[-2], k.shape[-2]
        if self.prefix is not None and not is_causal:
            raise ValueError("prefix needs is_causal=True: otherwise every key is visible")
        if self.has_positions:
            causal_offset(seq_q, seq_k, causal_align)
        if self.unequal_documents and (is_causal or self.has_positions) and causal_align is None:
            raise ValueError("documents with their own lengths of q and k need causal_align")
        if self.tensors and q.dim() != 4:
            raise ValueError(
                f"rules with tensors need inputs of (batch, heads, seq, d); q has {q.dim()} dims"
            )
        for name, x in self.tensors:
            if x.device != q.device:
                raise ValueError(f"{name} is on {x.device} and q is on {q.device}")
            _check_dtype(name, x)
        self._check_shapes(q, seq_q, seq_k)

    def _check_shapes(self, q: Tensor, seq_q: int, seq_k: int) -> None:
        if self.documents is not None:
            if seq_q != seq_k:
                raise ValueError(
                    f"documents need as many queries as keys, not {seq_q} and {seq_k}; cu_seqlens"
                    " takes one tensor for each"
                )
            _check_shape("documents", self.documents, (seq_q,), (q.shape[0], seq_q))
        if self.cu_seqlens is not None:
            if seq_q != seq_k and not isinstance(self.cu_seqlens, tuple):
                raise ValueError("cu_seqlens needs one tensor for queries and one for keys")
            shapes = {x.shape for name, x in self.tensors if name == "cu_seqlens"}
            if len(shapes) > 1 or any(len(shape) != 1 or shape[0] < 2 for shape in shapes):
                found = " and ".join(str(tuple(shape)) for shape in shapes)
                raise ValueError(f"cu_seqlens has shape {found}; it needs (documents + 1,)")
        if _is_tensor(self.prefix):
            _check_shape("prefix", self.prefix, (q.shape[0],))
        if self.dropout_seed is not None:
            _check_shape("dropout_seed", self.dropout_seed, (2,))
        for name in ("alibi_slopes", "sinks"):
            if getattr(self, name) is not None:
                _check_shape(name, getattr(self, name), (q.shape[-3],))
        if self.alibi_slopes is not None and self.alibi_slopes.requires_grad:
            raise ValueError("alibi_slopes requires a gradient, which it does not get")
        if self.bias is not None:
            full = (*q.shape[:-1], seq_k)
            shape = tuple(self.bias.shape)
            if len(shape) > 4 or any(
                size not in (1, of) for size, of in zip(shape[::-1], full[::-1], strict=False)
            ):
                raise ValueError(f"bias of shape {shape} cannot be broadcast to {full}")


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_tensor(x: object) -> bool:
    return hasattr(x, "requires_grad")


def _check_dtype(name: str, x: Tensor) -> None:
    dtype = str(x.dtype).removeprefix("torch.")
    if name == "dropout_seed":
        if dtype != "int64":
            raise ValueError(f"{name} is {dtype}; it must be int64")
    elif name in VISIBILITY:
        if dtype not in _INTEGERS:
            raise ValueError(f"{name} is {dtype}; it must be one of {', '.join(_INTEGERS)}")
    elif not x.is_floating_point():
        raise ValueError(f"{name} is {dtype}; it must be a floating-point tensor")


def _check_shape(name: str, x: Any, *allowed: tuple[int, ...]) -> None:
    if tuple(x.shape) not in allowed:
        expected = " or ".join(map(str, allowed))
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it needs {expected}")
