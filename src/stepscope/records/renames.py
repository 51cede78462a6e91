"""Upgrade records of schema 3 to schema 4, which has the same parts under new names.

Malformed parts are left unchanged, so that the decoder reports them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]
Rules = tuple[tuple[str, str], ...]
"""Patterns and their replacements, applied in order."""

FIELDS = {"lints": "failed_checks"}
"""Fields of a record: former name and name."""
STUDIES = {"levers": "techniques"}
"""Studies: former name and name."""
_SETTINGS = {
    "joined": "fused_projections",
    "keep": "activation_policy",
    "searched": "autotune_gemms",
    "lever": "technique",
}
"""Settings of a case."""
_RUNGS = {
    "joined": "fused-projections",
    "searched": "autotune-gemms",
    "as-made": "low-precision-grads",
}
_VALUES = {
    "optimizer": {"stepscope-as-made": "stepscope-low-precision-grads"},
    "rung": _RUNGS,
}
"""Values of settings."""
_KEYS: Rules = (
    *((rf"\b((?:first|alone|so-far)-){old}(?=_)", rf"\1{new}") for old, new in _RUNGS.items()),
    (r"(?<=[_=])stepscope-as-made(?=_|$)", "stepscope-low-precision-grads"),
    (r"(?<=_)joined(?=_|$)", "fused-projections"),
    (r"(?<=_)searched(?=_|$)", "autotune-gemms"),
    (r"(?<=_)keep=", "activation-policy="),
)
"""Parts of the keys of cases."""
_SIDES = {
    "ours": "stepscope",
    "peer": "baseline",
    "theirs": "baseline",
    "narrow": "low-precision",
    "spare": "low-memory",
}
"""Sides of a comparison."""
_VARIANTS: Rules = (
    (r"\bnarrow updates(?: in backward)?", "low-precision optimizer-in-backward"),
    (r"\bupdates in backward\b", "optimizer-in-backward"),
    (r"\bnarrow stream\b", "low-precision stream"),
    (r"\bjoined\b", "fused projections"),
    (r"\bsearched\b", "autotuned GEMMs"),
    (r"\bkeeps (?=\w)", "saves "),
)
"""Words in the names of compared steps."""
_RACE_KEYS: Rules = (
    *((rf"(?<=_){old}(?=[-_]|$)", new) for old, new in _SIDES.items()),
    *((old.replace(" ", "-"), new.replace(" ", "-")) for old, new in _VARIANTS),
)
"""Parts of such names in the keys of cases."""
_ADVICE: Rules = (
    (r"^float32 products on tensor cores \(TF32\)$", "TF32 matmuls (tensor cores for float32)"),
    (r"^the optimizer in one kernel$", "fused optimizer"),
    (r"^attention as one kernel$", "fused attention"),
    (r"^batches loaded ahead by workers$", "DataLoader workers that load batches ahead"),
    (r"^twice the batch$", "twice the batch size"),
    (
        r"^head and loss by chunks, without all logits$",
        "fused linear cross-entropy (chunked, without full logits)",
    ),
    (r"\bproducts take\b", "matmuls take"),
    (r"\bits products are\b", "its matmuls are"),
    (r"\bwritten out\b", "naive"),
    (r"\bkernels that only move memory\b", "memory-bound kernels"),
    (r"\bthe whole model\b", "the full model"),
    (r"8 bits of mantissa in products and activations", "matmuls and activations have 8 bits"),
    (r"products keep 10 bits of the mantissa", "matmul inputs are rounded to 10 mantissa bits"),
    (r"sums in another order", "another summation order"),
    (r"your own update rule is taken for", "your update rule is assumed to be"),
    (r"\bmemory of the host\b", "host memory"),
    (r"\boptimisation\b", "optimization"),
    (
        r"the loss has to be given what the head is given, and not its logits",
        "the loss must receive the input of the head, not its logits",
    ),
    (r"\bstepscope\.model\.kernels\.linear_cross_entropy\b", "stepscope.kernels"),
)
"""Words in the advice on a step."""
_BY_VARIANT = ("best", "heats", "excluded", "no_run_off")
"""Attachments whose keys, and in part values, are names of sides or variants."""
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


def upgrade_from_3(raw: Json) -> Json:
    """Upgrade the decoded JSON of a record."""
    upgraded: Json = _with_new_keys(raw, FIELDS)
    if isinstance(raw.get("study"), str):
        upgraded["study"] = STUDIES.get(raw["study"], raw["study"])
    if "config" in raw:
        upgraded["config"] = _settings(raw["config"])
    if isinstance(raw.get("case"), str):
        upgraded["case"] = _replaced(raw["case"], _KEYS)
    upgrade = _UPGRADES.get(str(raw.get("study")))
    if upgrade is not None:
        upgraded |= upgrade(upgraded)
    for part in ("config", "attachments"):
        if isinstance(upgraded.get(part), dict) and "advice" in upgraded[part]:
            upgraded[part] = upgraded[part] | {"advice": _advice(upgraded[part]["advice"])}
    attachments = upgraded.get("attachments")
    if isinstance(attachments, dict) and isinstance(attachments.get("profile"), dict):
        upgraded["attachments"] = attachments | {"profile": _profile(attachments["profile"])}
    return upgraded


def with_former_names(raw: Mapping[str, Any]) -> Json:
    """Add the former names of fields to the JSON of a record, for programs that read them; they
    are removed in the next version."""
    former = {old: raw[new] for old, new in FIELDS.items() if new in raw}
    config = raw.get("config", {})
    settings = {old: config[new] for old, new in _SETTINGS.items() if new in config}
    return {**raw, **former, "config": {**config, **settings}}


def _settings(config: Any) -> Any:
    """Upgrade the settings of a case, and of the steps that it compares."""
    if isinstance(config, list):
        return [_settings(entry) for entry in config]
    if not isinstance(config, dict):
        return config
    upgraded = {}
    for key, value in config.items():
        new = _VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value
        upgraded[_SETTINGS.get(key, key)] = _settings(new) if key == "racers" else new
    return upgraded


def _advice(value: Any) -> Any:
    """Upgrade all texts of the advice; codes and settings do not match the rules."""
    if isinstance(value, str):
        return _replaced(value, _ADVICE)
    if isinstance(value, list):
        return [_advice(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _advice(entry) for key, entry in value.items()}
    return value


def _compared_steps(raw: Json) -> Json:
    """Upgrade the names of sides and variants in a record of the study `step`."""
    upgraded = _with_new_variants(raw)
    attachments, config = raw.get("attachments"), raw.get("config")
    if isinstance(attachments, dict):
        named = {name: attachments[name] for name in _BY_VARIANT if name in attachments}
        upgraded["attachments"] = attachments | {
            name: {_variant(key): _variant(entry) for key, entry in entries.items()}
            if isinstance(entries, dict)
            else entries
            for name, entries in named.items()
        }
    if isinstance(config, dict) and config.get("kind") == "race":
        upgraded["config"] = config | _race(config)
        if isinstance(raw.get("case"), str):
            upgraded["case"] = _replaced(raw["case"], _RACE_KEYS)
    return upgraded


def _race(config: Json) -> Json:
    upgraded: Json = {}
    if isinstance(config.get("racers"), list):
        upgraded["racers"] = [
            [_variant(racer[0]), *racer[1:]] if isinstance(racer, list) and racer else racer
            for racer in config["racers"]
        ]
    if isinstance(config.get("forms"), list):
        upgraded["forms"] = [_variant(form) for form in config["forms"]]
    return upgraded


def _compared_parallel(raw: Json) -> Json:
    """Upgrade a record of `benchmarks/parallel_against_torch.py`."""
    return _with_new_variants(raw) | {"config": _with_new_keys(raw.get("config"), _SIDES)}


_UPGRADES: dict[str, Callable[[Json], Json]] = {
    "step": _compared_steps,
    "parallel-against-torch": _compared_parallel,
}
"""Further upgrades, by study: a function of the record that returns its changed parts."""


def _with_new_variants(raw: Json) -> Json:
    return {
        part: [
            entry | {"variant": _variant(entry["variant"])}
            if isinstance(entry, dict) and "variant" in entry
            else entry
            for entry in raw[part]
        ]
        for part in ("series", "quantities")
        if isinstance(raw.get(part), list)
    }


def _variant(text: Any) -> Any:
    """Upgrade the name of a side, or of a variant such as `ours: eager auto joined graph`, or a
    part of such a name."""
    if not isinstance(text, str):
        return text
    side, colon, words = text.partition(": ")
    return f"{_SIDES.get(side, _replaced(side, _VARIANTS))}{colon}{_replaced(words, _VARIANTS)}"


def _profile(summary: Json) -> Json:
    """Upgrade the summary of a trace."""
    upgraded = dict(summary)
    if "lines" in summary:
        upgraded["lines"] = _with_new_values(summary["lines"], {"kind": _CAUSES})
    if "timeline" in summary:
        upgraded["timeline"] = _with_new_values(summary["timeline"], {"label": _ROWS})
        rows = upgraded["timeline"] if isinstance(upgraded["timeline"], list) else []
        for row in rows:
            if isinstance(row, dict) and row.get("label") == "device idle" and "bars" in row:
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


def _with_new_keys(value: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {names.get(key, key): entry for key, entry in value.items()}


def _replaced(text: str, rules: Rules) -> str:
    for pattern, new in rules:
        text = re.sub(pattern, new, text)
    return text
