"""Which attentions there are. Loads without torch: an entry says how to load its function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stepscope.errors import unknown_name

if TYPE_CHECKING:
    from torch import Tensor


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
    ) -> Tensor: ...


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention."""

    name: str
    load: Callable[[], AttentionFunction]
    """Imports the implementation; only here torch is needed."""
    saves_scores: bool
    """Keeps a seq_q × seq_k tensor for backward; otherwise the log-sum-exp of each row."""
    description: str

    @property
    def function(self) -> AttentionFunction:
        return self.load()


def _load_reference() -> AttentionFunction:
    from stepscope.attention.reference import reference_attention

    return reference_attention


def _load_sdpa() -> AttentionFunction:
    from stepscope.attention.sdpa import sdpa_attention

    return sdpa_attention


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
            name="sdpa",
            load=_load_sdpa,
            saves_scores=False,
            description="torch's scaled_dot_product_attention, backend by its own choice",
        ),
    )
}

AUTO = "auto"
_AUTO_CHOICE = "sdpa"

IMPLEMENTATION_NAMES: tuple[str, ...] = (AUTO, *IMPLEMENTATIONS)
"""Every name that `impl=` takes."""


def implementation(name: str) -> Implementation:
    """The implementation of that name; `auto` is the best one that is here."""
    chosen = _AUTO_CHOICE if name == AUTO else name
    if chosen not in IMPLEMENTATIONS:
        raise unknown_name("attention", name, IMPLEMENTATION_NAMES)
    return IMPLEMENTATIONS[chosen]
