from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_records import record
from stepscope.errors import StepscopeError
from stepscope.records import schema
from stepscope.records.schema import Reading, Series, decode, encode

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(values=st.lists(finite), reason=st.text(), clock=st.sampled_from(["device", "host"]))
def test_a_record_survives_the_round_trip(values: list[float], reason: str, clock: Any) -> None:
    series = Series(name="step", unit="ms", values=tuple(values), warmup=(1e-300,), clock=clock)
    made = record(
        series=(series,), reason=reason, readings=(Reading(at_s=0.5, throttle=("power-cap",)),),
        notes={"kernels": reason},
    )  # fmt: skip
    assert decode(encode(made)) == made


def test_a_newer_version_is_refused_with_what_to_do() -> None:
    body = json.loads(encode(record())) | {"version": schema.SCHEMA_VERSION + 1, "novel": 1}
    with pytest.raises(StepscopeError, match=r"version 3, this .* up to 2.*install a newer"):
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
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 3)
    with pytest.raises(StepscopeError, match="version 2, which has no upgrade"):
        decode(encode(record()))


def test_a_record_of_version_1_has_no_notes_and_still_loads() -> None:
    body = json.loads(encode(record())) | {"version": 1}
    del body["notes"]
    assert decode(json.dumps(body)) == record()


@pytest.mark.parametrize("place", [(), ("environment",), ("series", 0), ("quantities", "flops")])
def test_an_unknown_field_is_refused_at_every_depth(place: tuple[str | int, ...]) -> None:
    body = json.loads(encode(record()))
    inner = body
    for step in place:
        inner = inner[step]
    inner["surprise"] = 1
    with pytest.raises(StepscopeError, match="surprise"):
        decode(json.dumps(body))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "{}", '{"version": "1"}', '{"version": 1}', "\ufffd"]
)
def test_what_is_no_record_is_said_to_be_none(text: str) -> None:
    with pytest.raises(StepscopeError, match="not a record"):
        decode(text)


def test_find_prefers_the_clock_of_the_device() -> None:
    made = record()
    step = made.find("step")
    on_host = made.find("step", "host")
    assert step is not None
    assert on_host is not None
    assert (step.clock, on_host.clock) == ("device", "host")
    assert made.find("nothing") is None


def test_a_ceiling_is_the_measured_one_or_the_data_sheet() -> None:
    made = record()
    measured, sheet = (
        made.ceiling("matmul.bfloat16"),
        made.ceiling("matmul.bfloat16", measured=False),
    )
    assert measured is not None
    assert sheet is not None
    assert (measured.value, sheet.value) == (700e12, 989e12)
    assert made.ceiling("matmul.float16") is None


def test_records_are_immutable() -> None:
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        record().status = "oom"  # type: ignore[misc]
