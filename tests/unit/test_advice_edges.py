"""Advice on facts that are incomplete or mixed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stepscope.analysis.advice.changes import advise
from stepscope.analysis.advice.facts import Facts, PhaseWork
from stepscope.analysis.predict.fit import changes_that_fit
from stepscope.analysis.predict.plan import StepPlan
from stepscope.analysis.predict.step import predict
from stepscope.errors import UsageError
from stepscope.model.sizes import find_size, with_overrides

GIB = 1 << 30
NAIVE = Facts(
    on_gpu=True,
    step_ms=20,
    dtype="bfloat16",
    compiled=True,
    phases=(PhaseWork(name="forward", classes={"matmul": 12.0, "softmax": 8.0}),),
    attention=(PhaseWork(name="forward", classes={"matmul": 2.0, "softmax": 8.0}),),
)


def gains(facts: Facts) -> dict[str, float]:
    return {advice.code: advice.gain_ms for advice in advise(facts)}


def test_tf32_without_measured_rates_still_gives_advice() -> None:
    """As in float32: its attention kernel runs on the same cores."""
    own, wide = (gains(replace(NAIVE, dtype=dtype)) for dtype in ("tf32", "float32"))
    assert own["fused-attention"] == pytest.approx(wide["fused-attention"])


def test_existing_attention_kernels_stay() -> None:
    mixed = {"matmul": 12.0, "softmax": 8.0, "attention": 5.0}
    with_kernel = replace(NAIVE, step_ms=25, phases=(PhaseWork(name="forward", classes=mixed),))
    own, others = gains(NAIVE), gains(with_kernel)
    assert own
    assert others["fused-attention"] == pytest.approx(own["fused-attention"])


def test_checkpointing_that_frees_nothing_is_not_advised() -> None:
    facts = Facts(
        on_gpu=True,
        step_ms=40,
        dtype="bfloat16",
        compiled=True,
        phases=(PhaseWork(name="forward", classes={"matmul": 10.0}),),
        memory_bytes=80 * GIB,
        peak_bytes=76 * GIB,
        model_peak_bytes=60 * GIB,
        floor_bytes=76 * GIB,
        saved_bytes=20 * GIB,
    )
    assert "checkpoint" not in gains(facts)
    assert "checkpoint" in gains(replace(facts, floor_bytes=50 * GIB, model_peak_bytes=76 * GIB))


def test_a_change_that_fits_names_everything_it_changes() -> None:
    plan = StepPlan(model=with_overrides(find_size("large"), context=128), context=128)
    for change in changes_that_fit(plan, int(0.9 * predict(plan).peak.allocated)):
        named = "fused AdamW" in change.words
        assert (change.plan.optimizer != plan.optimizer) == named, change.words


def test_attention_with_unknown_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="sdpa_math computes in float32 whatever the dtype"):
        StepPlan(model=find_size("small"), dtype="bfloat16", attention="sdpa_math")
