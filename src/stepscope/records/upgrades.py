"""Rules that upgrade records of schema 2, in which names carried the dimensions, to schema 3.

A rule is a pattern for an old name; its groups give the fields of the new one. Names that no rule
of the record's study matches stay as they are.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from stepscope.records.decoding import from_json

Fields = dict[str, Any]

Rules = tuple[tuple[str, str], ...]
"""A pattern for an entire old name, and the new one; empty where the group `name` has it."""

_DIGITS = "[0-9]{1,19}"
"""As many as 64 bits have; Python refuses to convert very long numbers."""
_SIZE, _RANK = f"(?P<size>{_DIGITS})", f"rank(?P<rank>{_DIGITS})"
_PHASE = "(?P<phase>forward|loss|backward|optimizer|model built)"
_TRIAL = "(?P<variant>base|changed)"
_FORM = "(?P<variant>slow|fast)"
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
    "levers": ((rf"(?P<name>error|moved|flops|kept)\.{_FORM}", ""),),
    "memory": _MEMORY,
    "sharding": _SHARDED,
    "step": ((rf"{_SIDE}\.(?P<name>\w+)", ""),),
}
"""By study."""

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
    "levers": ((_FORM, "step"),),
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
        "advice", "backward", "collectives", "course", "ends", "formats", "forward", "ledger",
        "post_mortem", "profile", "recording", "saved", "setting", "standing", "timeline",
        "traced_longer", "traced_validations",
    }
)  # fmt: skip
"""Notes of JSON that became attachments of the same name."""

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
"""Patterns of notes, and the attachment that collects them by what the group matches."""

_STRUCTURED = "heats"
"""The collected attachment whose notes were JSON; the others are text."""

LISTED = {r"break\.\d+": "breaks", r"recompiled\.\d+": "recompiled"}
"""The same for numbered notes, which became a list."""


def upgrade_from_2(raw: dict[str, Any]) -> dict[str, Any]:
    """The decoded JSON of a record of schema 2 as schema 3. What is malformed stays for the
    decoder to report."""
    study = raw.get("study")
    quantities, series, notes = raw.get("quantities"), raw.get("series"), raw.get("notes")
    upgraded = dict(raw)
    if isinstance(quantities, dict):
        rules = QUANTITIES.get(str(study), ())
        upgraded["quantities"] = [
            _fields(name, rules) | one if isinstance(one, dict) else one
            for name, one in quantities.items()
        ]
    if isinstance(series, list):
        rules = SERIES.get(str(study), ())
        upgraded["series"] = [
            one | _fields(one["name"], rules)
            if isinstance(one, dict) and isinstance(one.get("name"), str)
            else one
            for one in series
        ]
    if isinstance(notes, dict):
        upgraded["notes"], upgraded["attachments"] = _split(notes)
    return upgraded


def _fields(name: str, rules: Rules) -> Fields:
    for pattern, renamed in rules:
        match = re.fullmatch(pattern, name)
        if match:
            groups: Fields = {key: text for key, text in match.groupdict().items() if text}
            for number in ("rank", "size"):
                if number in groups:
                    groups[number] = int(groups[number])
            return {"name": renamed} | groups if renamed else groups
    return {"name": name}


def _split(notes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Notes that stay, and attachments."""
    kept: dict[str, Any] = {}
    attachments: dict[str, Any] = {}
    for name, text in notes.items():
        if name in ATTACHED:
            attachments[name] = _decoded(text)
        elif found := _first(COLLECTED, name):
            match, attachment = found
            held = _decoded(text) if attachment == _STRUCTURED else text
            attachments.setdefault(attachment, {})[match[1]] = held
        elif found := _first(LISTED, name):
            attachments.setdefault(found[1], []).append(text)
        else:
            kept[name] = text
    return kept, attachments


def _first(patterns: dict[str, str], name: str) -> tuple[re.Match[str], str] | None:
    for pattern, attachment in patterns.items():
        if match := re.fullmatch(pattern, name):
            return match, attachment
    return None


def _decoded(text: Any) -> Any:
    """The data that JSON stands for; damaged JSON as it is, for the reader of the attachment to
    report."""
    if not isinstance(text, str):
        return text
    try:
        return from_json(text)
    except msgspec.DecodeError:
        return text
