"""Upgrade records of schema 3 to schema 4, which has the same parts under new names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = {"lints": "failed_checks"}
"""Fields of a record: former name and name."""
_CAUSES = {
    "residual": "unattributed",
    "host: nothing was launched": "CPU: nothing was launched",
    "synchronisation: the host waits": "synchronization: the CPU waits for the GPU",
}
"""Lines of the ledger of a trace."""
_ROWS = {"host": "CPU"}
"""Rows of the timeline of a trace."""
_BARS = {"host": "CPU", "synchronisation": "synchronization", "no launch": "unattributed"}
"""Bars of the idle time in that timeline."""


def upgrade_from_3(raw: dict[str, Any]) -> dict[str, Any]:
    """Upgrade the decoded JSON of a record. Malformed parts are unchanged, so that the decoder
    reports them."""
    upgraded: dict[str, Any] = _with_new_keys(raw, FIELDS)
    attachments = upgraded.get("attachments")
    if isinstance(attachments, dict) and isinstance(attachments.get("profile"), dict):
        profile = _profile(attachments["profile"])
        upgraded["attachments"] = attachments | {"profile": profile}
    return upgraded


def with_former_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Add the former names of fields to the JSON of a record, for programs that read them; they
    are removed in the next version."""
    former = {old: raw[new] for old, new in FIELDS.items() if new in raw}
    return {**raw, **former}


def _profile(summary: dict[str, Any]) -> dict[str, Any]:
    """Upgrade the summary of a trace."""
    upgraded = dict(summary)
    if "lines" in summary:
        upgraded["lines"] = _with_new_values(summary["lines"], {"kind": _CAUSES})
    if "timeline" in summary:
        upgraded["timeline"] = _with_new_values(summary["timeline"], {"label": _ROWS})
        for row in _dicts(upgraded["timeline"]):
            if row.get("label") == "device idle" and "bars" in row:
                row["bars"] = _with_new_values(row["bars"], {"label": _BARS, "group": _BARS})
    return upgraded


def _with_new_values(entries: Any, names: Mapping[str, Mapping[str, str]]) -> Any:
    """Replace the values of some keys of each dictionary in a list."""
    if not isinstance(entries, list):
        return entries
    return [
        {
            key: names[key].get(value, value) if key in names and isinstance(value, str) else value
            for key, value in entry.items()
        }
        if isinstance(entry, dict)
        else entry
        for entry in entries
    ]


def _dicts(entries: Any) -> list[dict[str, Any]]:
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def _with_new_keys(value: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {names.get(key, key): entry for key, entry in value.items()}
