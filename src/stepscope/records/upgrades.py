"""Rules that upgrade records of schema 2, where names contained the dimensions, to schema 3.

A rule is a pattern for an old name; its groups are the fields of the new one. Names that match no
rule of the record's study are unchanged.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from stepscope.records.decoding import from_json

Fields = dict[str, Any]

Rules = tuple[tuple[str, str], ...]
"""A pattern for a full old name, and the new name; empty if the group `name` is the new name."""

_DIGITS = "[0-9]{1,19}"
"""Digits of a 64-bit number; Python refuses to convert very long numbers."""
_SIZE, _RANK = f"(?P<size>{_DIGITS})", f"rank(?P<rank>{_DIGITS})"
_PHASE = "(?P<phase>forward|loss|backward|optimizer|model built)"
_TRIAL = "(?P<variant>base|changed)"
_LEVER_VARIANT = "(?P<variant>slow|fast)"
_SIDE = "(?P<variant>ours|peer|narrow|spare)"
_COMPILED = ((r"(?P<variant>eager|compiled)\.(?P<name>\w+)", ""),)
_MEMORY = ((rf"peak\.{_PHASE}", "peak_bytes"), (rf"predicted\.{_PHASE}", "predicted_bytes"))
_SHARDED = (
    (rf"(?P<variant>[^.]+)\.(?P<phase>[^.]+)\.(?P<name>[^.]+)\.{_RANK}", ""),
    (rf"(?P<variant>[^.]+)\.(?P<name>[^.]+)\.{_RANK}", ""),
)
_STRATEGY = ((r"(?P<variant>.+)\.(?P<name>[^.]+)", ""),)

QUANTITIES: dict[str, Rules] = {
    "advise": ((rf"peak\.{_TRIAL}", "peak_bytes"), (rf"loss_lost\.{_TRIAL}", "loss_lost")),
    "allreduce": ((rf"wrong\.{_SIZE}", "wrong"),),
    "autocast": ((r"norm_error\.(?P<variant>\w+)", "norm_error"),),
    "checkpointing": _MEMORY,
    "compile": _COMPILED,
    "ddp": ((r"reductions\.(?P<variant>.+)", "reductions"),),
    "flash": (
        (r"flops\.(?P<phase>forward|backward)", "flops"),
        (r"(?P<name>error|reference_error|last_place)\.(?P<variant>\w+)", ""),
        (r"(?P<variant>[^.]+)\.(?P<name>\w+)", ""),
    ),
    "fsdp": _SHARDED,
    "levers": ((rf"(?P<name>error|moved|flops|kept)\.{_LEVER_VARIANT}", ""),),
    "memory": _MEMORY,
    "sharding": _SHARDED,
    "step": ((rf"{_SIDE}\.(?P<name>\w+)", ""),),
}
"""Rules for the names of quantities, by study."""

SERIES: dict[str, Rules] = {
    "advise": ((_TRIAL, "step"), (rf"loss\.{_TRIAL}", "loss")),
    "allreduce": ((_SIZE, "collective"),),
    "compile": _COMPILED,
    "ddp": _STRATEGY,
    "flash": (
        (r"(?P<variant>.+)\.wall", "wall"),
        (r"(?!(?:both|forward|backward)$)(?P<variant>.+)", "step"),
    ),
    "fsdp": _STRATEGY,
    "inspect": ((r"issue\.(?P<phase>\w+)", "issue"),),
    "levers": ((_LEVER_VARIANT, "step"),),
    "parallel-against-torch": ((r"(?P<variant>ours|theirs)\.(?P<name>step|cpu)", ""),),
    "rehearsal": (
        (r"step\.(?P<variant>.+)", "step"),
        (rf"(?P<name>alone|pack)\.{_SIZE}", ""),
        (rf"(?P<name>burst|packed|beside)\.{_SIZE}\.(?P<variant>{_DIGITS})", ""),
    ),
    "sharding": _STRATEGY,
    "step": (
        (r"(?P<variant>\w+: .+)\.consecutive", "consecutive"),
        (r"(?P<variant>\w+: .+)", "step"),
    ),
}

ATTACHED = frozenset(
    {
        "advice",
        "backward",
        "collectives",
        "course",
        "ends",
        "formats",
        "forward",
        "ledger",
        "post_mortem",
        "profile",
        "recording",
        "saved",
        "setting",
        "standing",
        "timeline",
        "traced_longer",
        "traced_validations",
    }
)
"""Notes with JSON that became attachments of the same name."""

COLLECTED: dict[str, str] = {
    r"best\.(.+)": "best",
    r"card\.(.+)": "card",
    r"format\.(.+)": "dtypes",
    r"heat\.(.+)": "heats",
    r"kernels\.(.+)": "kernels",
    r"no_turns\.(.+)": "no_run_off",
    r"out\.(.+)": "excluded",
    r"refused\.(.+)": "refused",
    r"(\d+x\d+|chosen)": "refused",
}
"""Patterns of notes, and the attachment that collects them; the group is the key."""

_STRUCTURED = "heats"
"""The collected attachment whose notes were JSON; the others are text."""

LISTED = {r"break\.\d+": "breaks", r"recompiled\.\d+": "recompiled"}
"""Patterns of numbered notes, and the attachment that collects them as a list."""


def upgrade_from_2(raw: dict[str, Any]) -> dict[str, Any]:
    """Upgrade the decoded JSON of a record from schema 2 to 3. Malformed parts are unchanged, so
    that the decoder reports them."""
    study = raw.get("study")
    quantities, series, notes = raw.get("quantities"), raw.get("series"), raw.get("notes")
    upgraded = dict(raw)
    if isinstance(quantities, dict):
        rules = QUANTITIES.get(str(study), ())
        upgraded["quantities"] = [
            _fields(name, rules) | quantity if isinstance(quantity, dict) else quantity
            for name, quantity in quantities.items()
        ]
    if isinstance(series, list):
        rules = SERIES.get(str(study), ())
        upgraded["series"] = [
            entry | _fields(entry["name"], rules)
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
            else entry
            for entry in series
        ]
    if isinstance(notes, dict):
        upgraded["notes"], upgraded["attachments"] = _split(notes)
    return upgraded


def _fields(name: str, rules: Rules) -> Fields:
    for pattern, renamed in rules:
        match = re.fullmatch(pattern, name)
        if match:
            groups: Fields = {key: text for key, text in match.groupdict().items() if text}
            for field in ("rank", "size"):
                if field in groups:
                    groups[field] = int(groups[field])
            return {"name": renamed} | groups if renamed else groups
    return {"name": name}


def _split(notes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split notes into those that remain notes and those that become attachments."""
    remaining: dict[str, Any] = {}
    attachments: dict[str, Any] = {}
    for name, text in notes.items():
        if name in ATTACHED:
            attachments[name] = _decoded(text)
        elif rule := _first(COLLECTED, name):
            match, attachment = rule
            value = _decoded(text) if attachment == _STRUCTURED else text
            attachments.setdefault(attachment, {})[match[1]] = value
        elif rule := _first(LISTED, name):
            attachments.setdefault(rule[1], []).append(text)
        else:
            remaining[name] = text
    return remaining, attachments


def _first(patterns: dict[str, str], name: str) -> tuple[re.Match[str], str] | None:
    for pattern, attachment in patterns.items():
        if match := re.fullmatch(pattern, name):
            return match, attachment
    return None


def _decoded(text: Any) -> Any:
    """Decode JSON; return damaged JSON unchanged, so that the attachment's reader reports it."""
    if not isinstance(text, str):
        return text
    try:
        return from_json(text)
    except msgspec.DecodeError:
        return text
