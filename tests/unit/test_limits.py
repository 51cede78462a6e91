from __future__ import annotations

import pytest

from sample_records import environment, record, step_series, times
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
    made = record()
    step = step_ms(made)
    assert step is not None
    assert step.median == pytest.approx(100.0)
    assert achieved_flops(made) == pytest.approx(280e12)
    assert tokens_per_second(made) == pytest.approx(20_480)
    assert mfu(made) == pytest.approx(0.4)
    assert mfu(made, measured=False) == pytest.approx(280 / 989)


def test_the_device_clock_is_used_where_there_is_one() -> None:
    host = times("step", 200.0, "host")
    on_both, on_host = step_ms(record(series=(host, times("step", 100.0)))), record(series=(host,))
    assert on_both is not None
    assert on_both.median == pytest.approx(100.0)
    assert achieved_flops(on_host) == pytest.approx(140e12)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("bfloat16", "matmul.bfloat16"), ("bfloat16-pure", "matmul.bfloat16"), ("tf32", None),
     ("float8", None)],
)  # fmt: skip
def test_the_ceiling_is_that_of_the_products(dtype: str, name: str | None) -> None:
    ceiling = matrix_ceiling(record(config={"dtype": dtype}))
    assert (ceiling and ceiling.name) == name


def test_what_is_unknown_gives_no_number() -> None:
    bare = record(series=(), ceilings=())
    answers = (step_ms, achieved_flops, mfu, tokens_per_second, matrix_ceiling, host_bound)
    assert [ask(bare) for ask in answers] == [None] * len(answers)
    in_bytes = record(series=(Series(name="step", unit="B", values=(1.0,)),))
    assert step_ms(in_bytes) is None
    assert mfu(record(ceilings=())) is None


def test_a_device_that_waits_for_the_host_is_host_bound() -> None:
    hidden = host_bound(record())
    assert hidden is not None
    assert (round(hidden.fraction, 2), hidden.bound) == (0.4, False)
    exposed = host_bound(record(series=(*step_series()[:-1], times("issue", 95.0, "host"))))
    assert exposed is not None
    assert exposed.bound
    assert host_bound(record(environment=environment(device_kind="cpu"))) is None
