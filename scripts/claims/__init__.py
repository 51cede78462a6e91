"""Numbers and lists in prose, each a named query of committed records or of the code.

A page contains `<!--=NAME-->value<!--/-->`. `python scripts/make_docs.py` writes the value of each
mark, and `--check` compares it. `python -m claims` in scripts/ lists names and values.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from claims import advice, attention, flags, memory, steps
from claims.records import Claim

CLAIMS: Mapping[str, Claim] = {
    **attention.CLAIMS,
    **steps.CLAIMS,
    **advice.CLAIMS,
    **memory.CLAIMS,
    **flags.CLAIMS,
}
MARK = re.compile(r"<!--=(?P<name>[a-z0-9.-]+)-->(?P<value>.*?)<!--/-->", re.DOTALL)


def filled(page: str, results: Path) -> str:
    """Return the page with the current value in every mark."""

    def mark(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in CLAIMS:
            raise KeyError(f"no claim is named {name}: add it to scripts/claims")
        return f"<!--={name}-->{CLAIMS[name](results)}<!--/-->"

    return MARK.sub(mark, page)
