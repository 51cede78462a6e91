"""A case in words, for progress lines: `tiny, context 32, float32, forward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_USUAL = ("", "no", "none", "reference", "default", "auto", "as is", "plain", 0, None, False)
"""Values that are not mentioned."""
_WORDS = {
    "how": "{}",
    "rung": "{}",
    "collective": "{}",
    "technique": "{}",
    "subject": "{}",
    "model": "{}",
    "size": "{}",
    "attention": "{}",
    "compile": "compiled by {}",
    "checkpoint": "checkpointed: {}",
    "seq": "length {}",
    "head": "head dimension {}",
    "context": "context {}",
    "dtype": "{}",
    "mib": "{} MiB",
    "ranks": "{} ranks",
    "mode": "{}",
    "part": "{}",
    "scaling": "{} scaling",
    "seed": "seed {}",
    "warmup": "{} warm-up steps",
}
"""Fields that identify a case, in the order of the words."""
_OF_WARMUP = "warmup"
_NAMES = ("model", "size", "attention", "collective", "technique", "subject")
"""Fields one of which names what is measured; a case without them is shown by its key."""


def case_words(study: str, key: str, config: Mapping[str, Any]) -> str:
    """The settings of a case that differ from the usual ones; else its key, made readable."""
    if isinstance(config.get("program"), Mapping):
        # The name of a script may have underscores; the code of a change has none.
        subject, _, change = key.rpartition("_")
        return f"{subject}, {change}"
    if not any(isinstance(config.get(name), str) for name in _NAMES):
        return key.replace("_", ", ")
    skipped = () if study == _OF_WARMUP else (_OF_WARMUP,)
    return ", ".join(
        _singular(text.format(config[name]))
        for name, text in _WORDS.items()
        if name in config and name not in skipped and _mentioned(name, config[name])
    )


def _singular(text: str) -> str:
    return text.removesuffix("s") if text.startswith("1 ") else text


def _mentioned(name: str, value: object) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return False
    return name in (_OF_WARMUP, "seed") or value not in _USUAL
