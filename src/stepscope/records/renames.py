"""Upgrade records of schema 3 to schema 4, which has the same parts under new names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = {"lints": "failed_checks"}
"""Fields of a record: former name and name."""


def upgrade_from_3(raw: dict[str, Any]) -> dict[str, Any]:
    """Upgrade the decoded JSON of a record. Malformed parts are unchanged, so that the decoder
    reports them."""
    return _with_new_keys(raw, FIELDS)


def with_former_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Add the former names of fields to the JSON of a record, for programs that read them; they
    are removed in the next version."""
    former = {old: raw[new] for old, new in FIELDS.items() if new in raw}
    return {**raw, **former}


def _with_new_keys(value: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {names.get(key, key): entry for key, entry in value.items()}
