"""Rules of attention for tests, each with the settings and lengths that it is tested at."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_inputs import draw
from stepscope.attention import ScoreRules

BATCH, HEADS = 2, 2


class RuleCase(NamedTuple):
    rules: dict[str, Any]
    how: dict[str, Any]
    seq_q: int = 70
    seq_k: int = 70

    def on(self, device: str, dtype: torch.dtype | None = None) -> ScoreRules:
        """Create the rules with copies of their tensors; floating-point ones of a dtype."""

        def moved(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(moved, value))
            if isinstance(value, Tensor):
                return value.to(device, dtype if value.is_floating_point() else None, copy=True)
            return value

        return ScoreRules(**{name: moved(value) for name, value in self.rules.items()})


CAUSAL: dict[str, Any] = {"is_causal": True}
BOTTOM: dict[str, Any] = CAUSAL | {"causal_align": "bottom-right"}
TOP: dict[str, Any] = CAUSAL | {"causal_align": "top-left"}
RUNS = torch.tensor([5] * 30 + [6] + [2] * 21 + [5] * 18)
PER_BATCH = torch.stack((RUNS, torch.arange(70) // 25))
SLOPES = torch.tensor([0.5, 0.0625])
SINKS = torch.tensor([-1.0, 2.0])
BOUNDS = torch.tensor([0, 9, 41, 42, 70], dtype=torch.int32)
SEED = torch.tensor([8_123_456_789_012_345_678, -3])
DROPOUT: dict[str, Any] = {"dropout": 0.3, "dropout_seed": SEED}
UNEQUAL = (torch.tensor([0, 9, 9, 60, 70]), torch.tensor([0, 40, 50, 53, 97]))

VISIBLE: dict[str, RuleCase] = {
    "window": RuleCase({"window": 20}, CAUSAL),
    "window of one": RuleCase({"window": 1}, CAUSAL),
    "wide window": RuleCase({"window": 1000}, CAUSAL),
    "window without a causal mask": RuleCase({"window": 20}, {}),
    "window, more keys": RuleCase({"window": 20}, BOTTOM, 33, 97),
    "window, more keys, top-left": RuleCase({"window": 20}, TOP, 33, 97),
    "window, fewer keys": RuleCase({"window": 20}, BOTTOM, 97, 33),
    "window, fewer keys, not causal": RuleCase({"window": 9}, {"causal_align": "top-left"}, 97, 33),
    "documents": RuleCase({"documents": RUNS}, CAUSAL),
    "documents without a causal mask": RuleCase({"documents": RUNS}, {}),
    "documents of each batch": RuleCase({"documents": PER_BATCH}, CAUSAL),
    "documents and a window": RuleCase({"documents": PER_BATCH, "window": 12}, CAUSAL),
    "cu_seqlens": RuleCase({"cu_seqlens": BOUNDS}, CAUSAL),
    "cu_seqlens that end early": RuleCase({"cu_seqlens": BOUNDS[:-1]}, CAUSAL),
    "cu_seqlens of both": RuleCase({"cu_seqlens": UNEQUAL}, BOTTOM, 70, 97),
    "cu_seqlens of both, top-left": RuleCase({"cu_seqlens": UNEQUAL}, TOP, 70, 97),
    "cu_seqlens of both, full": RuleCase({"cu_seqlens": UNEQUAL}, {}, 70, 97),
    "prefix": RuleCase({"prefix": 25}, CAUSAL),
    "prefix of each batch": RuleCase({"prefix": torch.tensor([3, 50])}, CAUSAL),
    "prefix of each document": RuleCase({"prefix": 7, "documents": PER_BATCH}, CAUSAL),
}
"""Rules that hide keys."""
SCORES: dict[str, RuleCase] = {
    "soft cap": RuleCase({"softcap": 1.5}, CAUSAL),
    "soft cap without a causal mask": RuleCase({"softcap": 30.0}, {}),
    "ALiBi": RuleCase({"alibi_slopes": SLOPES}, CAUSAL),
    "ALiBi without a causal mask": RuleCase({"alibi_slopes": SLOPES}, {}),
    "ALiBi, more keys": RuleCase({"alibi_slopes": SLOPES}, BOTTOM, 33, 97),
    "sinks": RuleCase({"sinks": SINKS}, CAUSAL),
    "sinks without a visible key": RuleCase({"sinks": SINKS}, BOTTOM, 97, 33),
    "all": RuleCase(
        {"sinks": SINKS, "softcap": 4.0, "alibi_slopes": SLOPES, "documents": PER_BATCH,
         "window": 12}, CAUSAL,
    ),
    "dropout": RuleCase(DROPOUT, CAUSAL),
    "dropout, more keys": RuleCase(DROPOUT, BOTTOM, 33, 97),
    "dropout, fewer keys, not causal": RuleCase(DROPOUT, {}, 97, 33),
    "dropout and all": RuleCase(
        DROPOUT | {"sinks": SINKS, "softcap": 4.0, "alibi_slopes": SLOPES, "documents": PER_BATCH,
         "window": 12}, CAUSAL,
    ),
    "all over a single key": RuleCase({"sinks": SINKS, "softcap": 4.0, "window": 5}, TOP, 40, 1),
}  # fmt: skip
"""Rules that change scores, and combinations."""
BIASES: dict[str, RuleCase] = {
    "bias": RuleCase({"bias": draw(70, 70, seed=7)}, CAUSAL),
    "bias of each head": RuleCase({"bias": draw(HEADS, 1, 70, seed=7)}, {}),
    "bias of each batch and a window": RuleCase(
        {"bias": draw(BATCH, 1, 70, 70, seed=7), "window": 20}, CAUSAL
    ),
}
IN_KERNELS = VISIBLE | SCORES
ALL = IN_KERNELS | BIASES
FLEX = ("window, fewer keys", "documents of each batch", "cu_seqlens of both", "prefix",
        "ALiBi, more keys", "all", "bias of each batch and a window")  # fmt: skip
"""One of each kind: FlexAttention is slow to compile, and its block masks are on a CPU."""


def inputs(
    case: RuleCase,
    d: int = 16,
    *,
    key_heads: int = HEADS // 2,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and a gradient of the output; two query heads share a key head."""
    sizes = ((HEADS, case.seq_q), (key_heads, case.seq_k), (key_heads, case.seq_k),
             (HEADS, case.seq_q))  # fmt: skip
    q, k, v, grad = (
        draw(BATCH, heads, seq, d, seed=seed).to(device, dtype)
        for seed, (heads, seq) in enumerate(sizes)
    )
    return q, k, v, grad
