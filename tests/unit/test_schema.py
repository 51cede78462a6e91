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
    made = record(
        series=(series,), reason=reason, readings=(Reading(at_s=0.5, throttle=("power-cap",)),),
        notes={"kernels": reason},
    )  # fmt: skip
    assert decode(encode(made)) == made


def test_a_newer_version_is_refused_with_what_to_do() -> None:
    body = json.loads(encode(record())) | {"version": schema.SCHEMA_VERSION + 1, "novel": 1}
    with pytest.raises(StepscopeError, match=r"version 4, this .* up to 3.*install a newer"):
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
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 4)
    with pytest.raises(StepscopeError, match="version 3, which has no upgrade"):
        decode(encode(record()))


@pytest.mark.parametrize("place", [(), ("environment",), ("series", 0), ("quantities", 0)])
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


def test_series_and_quantities_are_found_by_their_dimensions() -> None:
    parts = [
        {"name": "step"},
        {"name": "step", "variant": "ours"},
        {"name": "step", "phase": "forward"},
        {"name": "step", "rank": 1},
        {"name": "step", "size": 1024},
        {"name": "step", "variant": "ours", "phase": "forward", "rank": 2, "size": 1024},
    ]
    made = record(
        series=tuple(
            Series(**one, unit="ms", values=(float(place),)) for place, one in enumerate(parts)
        ),
        quantities=tuple(Quantity(**one, unit="B", value=place) for place, one in enumerate(parts)),
    )
    for place, one in enumerate(parts):
        found = made.find(**one)
        assert found is not None
        assert found.values == (place,)
        assert made.quantity(**one) == place
    for missing in ({"variant": "peer"}, {"phase": "loss"}, {"rank": 7}, {"size": 1}):
        assert made.find("step", **missing) is None
        assert made.quantity("step", **missing) is None


def test_without_a_rank_the_first_that_has_a_series_is_found() -> None:
    made = record(series=(times("step", 2.0, rank=1), times("step", 3.0, rank=2)))
    found = made.find("step")
    assert found is not None
    assert found.rank == 1


def test_a_label_has_the_dimensions_in_words() -> None:
    assert times("step", 1.0).label == "step"
    assert times("step", 1.0, variant="ours", phase="forward").label == "step of ours forward"
    assert times("collective", 1.0, size=1024, rank=3).label == "collective of 1024"


def test_an_attachment_is_decoded_as_the_type_that_is_asked_for() -> None:
    given = {"peaks": [{"phase": "loss", "allocated": 3, "lines": {}, "operator": "mm"}]}
    made = decode(encode(record(attachments=given)))
    (peak,) = made.required("peaks", tuple[PhasePeak, ...])
    assert (peak.phase, peak.allocated) == ("loss", 3)
    assert made.attachment("peaks", tuple[PhasePeak, ...]) == (peak,)
    assert made.attachment("other", tuple[PhasePeak, ...]) is None
    with pytest.raises(StepscopeError, match=r"attachment 'peaks' of record .* is invalid"):
        made.required("peaks", dict[str, str])
    with pytest.raises(StepscopeError, match=r"the attachments of record .* has no 'other'"):
        made.required("other", dict[str, str])


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
