"""Upgrades of records of schema 3: names that became those of the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sample_records import record
from stepscope.records.renames import with_former_names
from stepscope.records.schema import FailedCheck, Record, decode, encode

Json = dict[str, Any]


def upgraded(**parts: Any) -> Record:
    """Decode a record of schema 3 with these parts."""
    raw: Json = json.loads(encode(record())) | {"version": 3}
    raw["lints"] = raw.pop("failed_checks")
    return decode(json.dumps(raw | parts))


def test_lints_become_failed_checks() -> None:
    busy = FailedCheck(code="busy-machine", message="threads waited for a core")
    assert upgraded(lints=[msgspec.to_builtins(busy)]).failed_checks == (busy,)


LINES = {
    ("", "residual"): "unattributed",
    ("idle", "host: nothing was launched"): "CPU: nothing was launched",
    ("idle", "synchronisation: the host waits"): "synchronization: the CPU waits for the GPU",
    ("forward", "matmul"): "matmul",
}
BAR = {"start": 0.0, "end": 1.0, "label": "host", "group": "host"}


def test_lines_and_rows_of_a_trace_have_new_names() -> None:
    profile = {
        "lines": [{"phase": phase, "kind": kind, "ms": 1.0} for phase, kind in LINES],
        "timeline": [
            {"label": "host", "bars": [BAR | {"label": "host", "group": "forward"}]},
            {"label": "device idle", "bars": [BAR]},
        ],
    }
    upgrade = upgraded(attachments={"profile": profile}).attachments["profile"]
    assert [line["kind"] for line in upgrade["lines"]] == list(LINES.values())
    cpu, idle = upgrade["timeline"]
    assert (cpu["label"], cpu["bars"][0]["label"]) == ("CPU", "host")
    assert (idle["bars"][0]["label"], idle["bars"][0]["group"]) == ("CPU", "CPU")


@pytest.mark.parametrize(
    "part",
    [
        {"profile": 7},
        {"profile": {"lines": 7, "timeline": [7, {"label": "device idle", "bars": [7]}]}},
        {"profile": {"lines": [7, {"kind": ["residual"]}], "timeline": None}},
    ],
)
def test_malformed_attachments_are_unchanged(part: Json) -> None:
    assert upgraded(attachments=part).attachments == part


def test_json_has_the_former_names_too() -> None:
    busy = FailedCheck(code="busy-machine", message="planted")
    raw = with_former_names(msgspec.to_builtins(record(failed_checks=(busy,))))
    assert raw["lints"] == raw["failed_checks"] != ()
