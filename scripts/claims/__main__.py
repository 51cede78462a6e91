"""List the names and values of all claims."""

from __future__ import annotations

from pathlib import Path

from claims import CLAIMS

for name, claim in CLAIMS.items():
    print(f"{name:36} {claim(Path(__file__).resolve().parents[2] / 'results')}")
