from __future__ import annotations

import re
from typing import Any

import pytest

from sample_records import ceilings, record, samples, step_series, times
from stepscope.analysis.checks import check_group, check_record, codes
from stepscope.records.schema import Quantity, Reading, Record, Series


def changed(name: str, values: tuple[float, ...]) -> tuple[Series, ...]:
    """Return the series of a sound step, with one replaced on the device's clock."""
    new = Series(name=name, unit="ms", values=values, clock="device")
    return tuple(new if (s.name, s.clock) == (name, "device") else s for s in step_series())


def step_of(*values: float) -> tuple[Series, ...]:
    return (Series(name="step", unit="ms", values=values, clock="device"),)


def clocks(*mhz: float | None, throttle: tuple[str, ...] = ()) -> tuple[Reading, ...]:
    return tuple(
        Reading(at_s=float(n), sm_clock_mhz=clock, throttle=throttle) for n, clock in enumerate(mhz)
    )


def waits(*seconds: float | None) -> tuple[Reading, ...]:
    return tuple(Reading(at_s=float(n), waited_s=waited) for n, waited in enumerate(seconds))


def count(value: float) -> tuple[Quantity, ...]:
    return (Quantity(name="gradients_missing", value=value, unit="parameters"),)


def flops(value: float) -> tuple[Quantity, ...]:
    return (Quantity(name="flops", value=value, unit="FLOP"),)


STEADY = (100.0, 101.0, 99.0, 100.5, 99.5, 100.2, 99.8)

PLANTED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "above-ceiling": [
        ({"ceilings": ceilings(bfloat16=260e12)}, "280 TFLOP/s is 108% of the measured"),
        ({"ceilings": ceilings(sheet=279e12)[1:]}, "100% of the NVIDIA H200 data sheet"),
    ],
    "few-samples": [({"series": step_of(*STEADY[:4])}, "step has 4 samples, and a spread needs 5")],
    "wide-spread": [
        ({"series": step_of(80.0, 120.0, 85.0, 115.0, 100.0, 90.0, 110.0)}, "spreads by 16%"),
        ({"series": step_of(*STEADY * 9, 151.0)}, "a sample 51% off the median of 100 ms"),
        (
            {"series": step_of(*(250.0 if n % 4 == 2 else 100.0 for n in range(12)))},
            "one in 4 samples of step takes 250 ms, the others 100 ms: something happens every 4",
        ),
    ],
    "first-call-inside": [
        ({"series": step_of(2500.0, *STEADY)}, "first sample of step took 2500 ms, the others 100")
    ],
    "busy-machine": [
        ({"readings": waits(0.5, 0.6, 1.1)}, "in 2 s threads of this process waited 0.6 s"),
        ({"readings": waits(9.0, 0.1, 0.6)}, "waited 0.5 s for a core"),
    ],
    "clocks-dropped": [
        ({"readings": clocks(1980, 1970, 1700, 1980)}, "from 1980 to 1700 MHz"),
        (
            {"readings": clocks(1980, 1980, throttle=("power-cap", "idle"))},
            "throttled by power-cap:",
        ),
    ],
    "backward-too-fast": [
        ({"series": changed("backward", samples(15.0))}, "backward took 15 ms and forward 30 ms")
    ],
    "no-gradient": [({"quantities": count(3)}, "3 parameters got no gradient")],
    "phases-do-not-add-up": [
        (
            {"series": changed("optimizer", samples(14.0))},
            r"forward \+ loss \+ backward \+ optimizer take 106 ms and the full step 100 ms",
        ),
        ({"series": changed("optimizer", samples(2.0))}, "take 94 ms and the full step 100"),
    ],
    "other-kernel": [
        (
            {
                "config": {"attention": "triton"},
                "attachments": {
                    "kernels": {"forward": "void pytorch_flash::flash_fwd_kernel<int>"}
                },
            },
            "triton ran kernels of sdpa_flash in the forward",
        ),
    ],
}


@pytest.mark.parametrize(
    ("code", "fault", "message"),
    [(code, *case) for code, cases in PLANTED.items() for case in cases],
)
def test_a_planted_fault_is_reported(code: str, fault: dict[str, Any], message: str) -> None:
    messages = {check.code: check.message for check in check_record(record(**fault))}
    assert code in messages
    assert re.search(message, messages[code])


@pytest.mark.parametrize(
    "clean",
    [
        pytest.param({}, id="a sound step"),
        pytest.param({"ceilings": ceilings(bfloat16=270e12)}, id="just above what was measured"),
        pytest.param({"ceilings": ceilings(sheet=281e12)[1:]}, id="just below the data sheet"),
        pytest.param({"ceilings": ()}, id="no ceiling known"),
        pytest.param({"series": step_of(*STEADY[:5])}, id="enough samples"),
        pytest.param({"series": step_of(120.0, *STEADY)}, id="a slightly slower first sample"),
        pytest.param({"readings": clocks(345, 1980, 1900, None)}, id="clocks that rise and waver"),
        pytest.param({"readings": clocks(1980, 345, throttle=("idle",))}, id="idle"),
        pytest.param({"readings": clocks(1500, throttle=("application-clocks",))}, id="set"),
        pytest.param({"readings": waits(5.0, 5.05, 5.1)}, id="available cores"),
        pytest.param({"readings": waits(None, None)}, id="cores without a counter"),
        pytest.param({"series": changed("optimizer", samples(11.0))}, id="phases within 5 %"),
        pytest.param({"series": (), "quantities": ()}, id="nothing measured"),
        pytest.param(
            {
                "series": (times("step", 55.0), times("forward", 40.0), times("backward", 15.0)),
                "config": {"loss": "fused"},
                "quantities": (),
            },
            id="a loss that computes its gradients in the forward",
        ),
        pytest.param(
            {"series": (Series(name="loss", unit="nat", values=(9.0, 1.0)),)}, id="not a time"
        ),
        pytest.param(
            {"status": "oom", "series": step_of(1.0), "quantities": count(9)}, id="not a result"
        ),
    ],
)
def test_a_clean_record_raises_nothing(clean: dict[str, Any]) -> None:
    assert check_record(record(**clean)) == ()


def test_a_first_call_is_not_reported_as_a_spread_too() -> None:
    failed = check_record(record(series=step_of(2500.0, *STEADY)))
    assert [check.code for check in failed] == ["first-call-inside"]


def pair(varied: str, small: Any, large: Any, **of_large: Any) -> list[Record]:
    return [
        record(config={varied: small}, quantities=flops(10e12)),
        record(config={varied: large}, quantities=flops(20e12), **of_large),
    ]


@pytest.mark.parametrize(("varied", "small", "large"), [("size", "s", "m"), ("context", 1, 2)])
def test_time_that_does_not_grow_with_the_work_is_flat(varied: str, small: Any, large: Any) -> None:
    records = pair(varied, small, large, series=step_series(105.0))
    failed = check_group(records)
    assert list(failed) == [records[1].id]
    (check,) = failed[records[1].id]
    assert check.code == "flat-in-size"
    assert f"2 times the FLOPs of {varied} {small} take 1.05 times its time" in check.message
    assert "all work is executed" in check.message


def test_a_flat_step_that_waits_for_the_host_is_reported_as_launch_bound() -> None:
    series = step_series(issued=0.99)
    (check,) = check_group(pair("size", "s", "m", series=series)).popitem()[1]
    assert "100% of the step ends with an empty launch queue" in check.message
    assert "launches are the likely limit" in check.message


def test_a_flat_step_is_detected_past_sizes_that_did_not_double() -> None:
    sizes = (("a", 10e12), ("b", 15e12), ("c", 20e12))
    records = [record(config={"size": s}, quantities=flops(f)) for s, f in sizes]
    assert list(check_group(records)) == [records[2].id]


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(pair("size", "s", "m", series=step_series(115.0)), id="time grew"),
        pytest.param(pair("batch", 4, 8), id="another setting varied"),
        pytest.param(
            [record(config={"size": "s", "batch": 1}, quantities=flops(1e12)), record()],
            id="two settings varied",
        ),
        pytest.param([record(), record(config={"size": "m"})], id="the work did not grow"),
        pytest.param(pair("size", "s", "m", status="error"), id="no result"),
        pytest.param([record(), record(config={"mode": "forward"})], id="equal peaks"),
        pytest.param([], id="none"),
    ],
)
def test_a_clean_group_raises_nothing(records: list[Record]) -> None:
    assert check_group(records) == {}


def test_forward_alone_cannot_need_more_than_the_full_step() -> None:
    peak = (Quantity(name="peak_bytes", value=41 << 30, unit="B"),)
    forward = record(config={"mode": "forward"}, quantities=peak)
    (check,) = check_group([record(), forward])[forward.id]
    assert check.code == "forward-peak-above-step"
    assert "peaks at 41984 MiB, the full step at 40960 MiB" in check.message
    assert check_group([record(quantities=peak), record(config={"mode": "forward"})]) == {}
    assert check_group([record(config={"batch": 1}), forward]) == {}


def test_every_lint_is_tested() -> None:
    assert set(codes()) == {*PLANTED, "flat-in-size", "forward-peak-above-step"}
