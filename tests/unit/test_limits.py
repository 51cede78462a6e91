from __future__ import annotations

import pytest

from sample_records import record, step_series, times
from stepscope.analysis.limits import (
    achieved_flops,
    host_bound,
    matrix_ceiling,
    mfu,
    step_ms,
    tokens_per_second,
)
from stepscope.records.schema import Series


def test_rates_and_shares_of_a_step() -> None:
    measured = record()
    step = step_ms(measured)
    assert step is not None
    assert step.median == pytest.approx(100.0)
    assert achieved_flops(measured) == pytest.approx(280e12)
    assert tokens_per_second(measured) == pytest.approx(20_480)
    assert mfu(measured) == pytest.approx(0.4)
    assert mfu(measured, measured=False) == pytest.approx(280 / 989)


def test_the_device_clock_is_preferred() -> None:
    host = times("step", 200.0, "host")
    on_both, on_host = step_ms(record(series=(host, times("step", 100.0)))), record(series=(host,))
    assert on_both is not None
    assert on_both.median == pytest.approx(100.0)
    assert achieved_flops(on_host) == pytest.approx(140e12)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bfloat16", "matmul.bfloat16"),
        ("bfloat16-pure", "matmul.bfloat16"),
        ("tf32", None),
        ("float8", None),
    ],
)
def test_the_ceiling_is_that_of_the_compute_dtype(dtype: str, name: str | None) -> None:
    ceiling = matrix_ceiling(record(config={"dtype": dtype}))
    assert (ceiling and ceiling.name) == name


def test_missing_inputs_give_no_number() -> None:
    bare = record(series=(), ceilings=())
    functions = (step_ms, achieved_flops, mfu, tokens_per_second, matrix_ceiling, host_bound)
    assert [function(bare) for function in functions] == [None] * len(functions)
    in_bytes = record(series=(Series(name="step", unit="B", values=(1.0,)),))
    assert step_ms(in_bytes) is None
    assert mfu(record(ceilings=())) is None


def test_a_device_that_waits_for_the_host_is_host_bound() -> None:
    hidden, exposed = host_bound(record()), host_bound(record(series=step_series(issued=1.0)))
    assert hidden is not None
    assert (hidden.fraction, hidden.bound) == (0.0, False)
    assert exposed is not None
    assert (exposed.fraction, exposed.bound) == (1.0, True)


def test_a_host_blocked_by_a_full_queue_does_not_bound_the_step() -> None:
    """It launches during nearly all of the step, but the queue is never empty."""
    behind = host_bound(record(series=step_series(issued=0.95)))
    assert behind is not None
    assert not behind.bound


def test_only_the_phases_that_end_with_an_empty_queue_count() -> None:
    def phase(name: str, on_device: float, on_host: float) -> tuple[Series, Series]:
        return times(name, on_device), times(name, on_host, "host")

    series = (
        times("step", 100.0),
        *phase("forward", 30.0, 30.0),
        *phase("backward", 60.0, 60.0),
        *phase("optimizer", 10.0, 2.0),
    )
    share = host_bound(record(series=series))
    assert share is not None
    assert share.phases == ("forward", "backward")
    assert share.fraction == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(("took", "bound"), [(20.0, True), (100.0, False)])
def test_one_long_kernel_at_the_end_of_a_phase_is_not_a_queue(took: float, bound: bool) -> None:
    """0.8 ms of 20 are one matmul of the head; 4 ms of 100 are more than any single kernel."""
    series = (times("step", took), times("forward", took), times("forward", 0.96 * took, "host"))
    share = host_bound(record(series=series))
    assert share is not None
    assert share.bound is bound


def test_the_named_variant_of_a_record_is_judged() -> None:
    series = (
        *(
            times(name, 30.0, clock, variant="eager")
            for name in ("step", "issue", "forward")
            for clock in ("device", "host")
        ),
        times("forward", 20.0, variant="compiled"),
        times("forward", 5.0, "host", variant="compiled"),
    )
    measured = record(series=series)
    eager, compiled = (host_bound(measured, variant) for variant in ("eager", "compiled"))
    assert eager is not None
    assert compiled is not None
    assert (eager.bound, compiled.bound) == (True, False)
    assert host_bound(measured) is None


def test_a_step_without_phases_is_judged_by_its_launch_time() -> None:
    alone = (times("step", 50.0), times("issue", 50.0, "host"))
    share = host_bound(record(series=alone))
    assert share is not None
    assert share.bound


def test_a_cpu_has_no_queue() -> None:
    alone = (times("step", 50.0, "host"), times("forward", 50.0, "host"))
    assert host_bound(record(series=alone)) is None
