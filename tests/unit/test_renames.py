"""Upgrades of records of schema 3: names that became those of the field."""

from __future__ import annotations

import json
from typing import Any

import msgspec

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


def test_json_has_the_former_names_too() -> None:
    busy = FailedCheck(code="busy-machine", message="planted")
    raw = with_former_names(msgspec.to_builtins(record(failed_checks=(busy,))))
    assert raw["lints"] == raw["failed_checks"] != ()
