"""Pages that are written by hand. Measured numbers in their prose come from records: they are in
marks that `scripts/claims` fills, or in generated parts. `ALLOWED` lists the phrases with other
numbers: settings of the code, definitions, versions and names."""

from __future__ import annotations

import re
from collections.abc import Iterator

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/README.md",
    "docs/accelerate.md",
    "docs/architecture.md",
    "docs/check.md",
    "docs/commands.md",
    "docs/cs336.md",
    "docs/glossary.md",
    "docs/integrations.md",
    "docs/library.md",
    "docs/limits.md",
    "docs/own-step.md",
    "docs/studies.md",
    "docs/techniques.md",
    "docs/traces.md",
)
"""The log, `docs/log/`, is a history of measurements and is not checked; nor is the changelog."""

ALLOWED: dict[str, tuple[str, ...]] = {
    "README.md": ("Python 3.11", "Apache-2.0"),
    "CONTRIBUTING.md": ("Python 3.11", "Apache License 2.0"),
    "docs/architecture.md": (
        "Mean power from 95 % of the limit",
        "Above 2 % of unattributed time",
        "within 25 % of the program's own time",
        "the oldest update beyond 1 GiB",
    ),
    "docs/commands.md": ("its 95 % interval",),
    "docs/glossary.md": ("above 2 % of a step",),
    "docs/integrations.md": (
        "by at least 2 % of the step",
        "at least 5 % slower than the first 30 lines",
        "at least 5 % and 64 MiB",
    ),
    "docs/library.md": ("compute capability 8.9",),
    "docs/limits.md": (
        "in 95 % of them",
        "with one program left out, at least 80 % do",
        "at most 25 % of the program's own time",
        "the last fifth of the timeout (at most 10 s)",
        "are assumed to differ by 0.7 %",
    ),
    "docs/own-step.md": ("would gain 3 % or more", "Llama 3.1 8B", "64 GPUs of 40 GB"),
    "docs/studies.md": ("broadcast from 1 KiB up",),
    "docs/techniques.md": ("tiles of 64 × 64", "is used 64 times per load"),
    "docs/traces.md": ("at least 1 % of the step",),
}
"""Phrases by page: thresholds and settings of the code, definitions, versions, names."""

_PART = re.compile(r"<!-- [^>]*?(?:made by|: benchmarks/).*?<!-- until here -->", re.DOTALL)
_NOT_PROSE = re.compile(
    r"^```.*?^```|^    .*?$|`[^`\n]*`|<!--=.*?<!--/-->|\]\([^)]*\)", re.DOTALL | re.MULTILINE
)
_UNIT = (
    r"(?:[mµn]?s|minutes?|seconds?|hours?|%|×|times|[KMGT]i?B(?:/s)?|kB|[GT]?FLOPs?(?:/s)?|k?W|m?J)"
)
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_TYPED = re.compile(
    rf"(?<![\w.,])(?:{_NUMBER}(?:\s*(?:to|and|±|–)\s*{_NUMBER})*\s*{_UNIT}(?!\w)"
    rf"|\d+\.\d+(?!\w|\.\d|,\d)|\d[\d,]* of (?:the )?\d[\d,]*)"
)


def typed_numbers(name: str, text: str) -> Iterator[str]:
    """Yield numbers with a unit, decimals and counts ("8 of 9") in the prose of a page that are
    neither generated nor allowed, each with the words around it."""
    for phrase in ALLOWED.get(name, ()):
        text = text.replace(phrase, "")
    prose = _NOT_PROSE.sub(" ", _PART.sub("", text))
    for found in _TYPED.finditer(prose):
        start = prose.rfind("\n", 0, found.start()) + 1
        yield prose[max(start, found.start() - 40) : found.end() + 30].strip()
