from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_records import record, times
from stepscope.errors import StepscopeError
from stepscope.records import schema
from stepscope.records.memory import PhasePeak
from stepscope.records.schema import Quantity, Reading, Series, decode, encode

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(values=st.lists(finite), reason=st.text(), clock=st.sampled_from(["device", "host"]))
def test_a_record_survives_the_round_trip(values: list[float], reason: str, clock: Any) -> None:
    series = Series(name="step", unit="ms", values=tuple(values), warmup=(1e-300,), clock=clock)
    sample = record(
        series=(series,),
        reason=reason,
        readings=(Reading(at_s=0.5, throttle=("power-cap",)),),
        notes={"kernels": reason},
    )
    assert decode(encode(sample)) == sample


def test_a_newer_version_is_refused_with_a_hint() -> None:
    body = json.loads(encode(record())) | {"version": schema.SCHEMA_VERSION + 1, "novel": 1}
    with pytest.raises(StepscopeError, match=r"version 5, this .* up to 4.*install a newer"):
        decode(json.dumps(body))


def test_an_older_version_is_upgraded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(raw: dict[str, Any]) -> dict[str, Any]:
        raw["case"] = raw.pop("cell")
        return raw

    def mark(raw: dict[str, Any]) -> dict[str, Any]:
        return raw | {"reason": raw["case"] + " was renamed"}

    monkeypatch.setattr(schema, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(schema, "UPGRADES", {1: rename, 2: mark})
    body = json.loads(encode(record(case="here"))) | {"version": 1}
    body["cell"] = body.pop("case")
    upgraded = decode(json.dumps(body))
    assert (upgraded.case, upgraded.reason, upgraded.version) == ("here", "here was renamed", 3)


def test_an_older_version_without_upgrade_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 5)
    with pytest.raises(StepscopeError, match=r"version 4, which precedes .*record it again"):
        decode(encode(record()))


@pytest.mark.parametrize("path", [(), ("environment",), ("series", 0), ("quantities", 0)])
def test_an_unknown_field_is_refused_at_every_depth(path: tuple[str | int, ...]) -> None:
    body = json.loads(encode(record()))
    inner = body
    for step in path:
        inner = inner[step]
    inner["surprise"] = 1
    with pytest.raises(StepscopeError, match="surprise"):
        decode(json.dumps(body))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "{}", '{"version": "1"}', '{"version": 4}', "\ufffd"]
)
def test_text_that_is_not_a_record_is_refused(text: str) -> None:
    with pytest.raises(StepscopeError, match="not a record"):
        decode(text)


def test_find_prefers_the_device_clock() -> None:
    sample = record()
    step = sample.find("step")
    on_host = sample.find("step", "host")
    assert step is not None
    assert on_host is not None
    assert (step.clock, on_host.clock) == ("device", "host")
    assert sample.find("nothing") is None


def test_series_and_quantities_are_found_by_their_dimensions() -> None:
    parts = [
        {"name": "step"},
        {"name": "step", "variant": "ours"},
        {"name": "step", "phase": "forward"},
        {"name": "step", "rank": 1},
        {"name": "step", "size": 1024},
        {"name": "step", "variant": "ours", "phase": "forward", "rank": 2, "size": 1024},
    ]
    sample = record(
        series=tuple(
            Series(**one, unit="ms", values=(float(index),)) for index, one in enumerate(parts)
        ),
        quantities=tuple(Quantity(**one, unit="B", value=index) for index, one in enumerate(parts)),
    )
    for index, one in enumerate(parts):
        series = sample.find(**one)
        assert series is not None
        assert series.values == (index,)
        assert sample.quantity(**one) == index
    for missing in ({"variant": "peer"}, {"phase": "loss"}, {"rank": 7}, {"size": 1}):
        assert sample.find("step", **missing) is None
        assert sample.quantity("step", **missing) is None


def test_without_a_rank_find_returns_the_first_rank_with_the_series() -> None:
    sample = record(series=(times("step", 2.0, rank=1), times("step", 3.0, rank=2)))
    series = sample.find("step")
    assert series is not None
    assert series.rank == 1


def test_a_label_has_the_dimensions_in_words() -> None:
    assert times("step", 1.0).label == "step"
    assert times("step", 1.0, variant="ours", phase="forward").label == "step of ours forward"
    assert times("collective", 1.0, size=1024, rank=3).label == "collective of 1024"


def test_an_attachment_is_decoded_as_the_requested_type() -> None:
    given = {"peaks": [{"phase": "loss", "allocated": 3, "lines": {}, "operator": "mm"}]}
    sample = decode(encode(record(attachments=given)))
    (peak,) = sample.required("peaks", tuple[PhasePeak, ...])
    assert (peak.phase, peak.allocated) == ("loss", 3)
    assert sample.attachment("peaks", tuple[PhasePeak, ...]) == (peak,)
    assert sample.attachment("other", tuple[PhasePeak, ...]) is None
    with pytest.raises(StepscopeError, match=r"attachment 'peaks' of record .* is invalid"):
        sample.required("peaks", dict[str, str])
    with pytest.raises(StepscopeError, match=r"the attachments of record .* has no 'other'"):
        sample.required("other", dict[str, str])


def test_a_ceiling_is_the_measured_one_or_that_of_the_datasheet() -> None:
    sample = record()
    measured, sheet = (
        sample.ceiling("matmul.bfloat16"),
        sample.ceiling("matmul.bfloat16", measured=False),
    )
    assert measured is not None
    assert sheet is not None
    assert (measured.value, sheet.value) == (700e12, 989e12)
    assert sample.ceiling("matmul.float16") is None


def test_records_are_immutable() -> None:
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        record().status = "oom"  # type: ignore[misc]
