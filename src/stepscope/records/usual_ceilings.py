"""Usual ceilings of known GPUs, from the records of this project.

A ceiling far below the usual one was measured while something else used the device. GPUs of one
name and power limit are alike; CPUs of one name are not, so they have no usual ceilings.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

FILE = "usual_ceilings.json"
"""Written by scripts/make_usual_ceilings.py: rates by device, power limit and ceiling."""
TOO_LOW = 0.9
"""Share of the usual rate below which a ceiling is doubtful. On an idle H200 ceilings are within
6 % of their median, except at another clock."""

Table = dict[str, dict[str, dict[str, float]]]


def below_usual(device: str, power_limit_w: float | None, name: str, value: float) -> str:
    """Return why a measured ceiling is doubtful; empty if it is as usual, or nothing is known."""
    usual = _table().get(device, {}).get(power_key(power_limit_w), {}).get(name)
    if usual is None or value >= TOO_LOW * usual:
        return ""
    return f"{name} {100 * (1 - value / usual):.0f} % below usual"


def usual_rates(device: str) -> dict[str, float]:
    """Return the usual ceilings of a device, at its highest known power limit."""
    by_power = _table().get(device, {})
    return by_power[max(by_power, key=float)] if by_power else {}


def power_key(power_limit_w: float | None) -> str:
    return "" if power_limit_w is None else f"{power_limit_w:.0f}"


@cache
def _table() -> Table:
    return msgspec.json.decode(Path(__file__).with_name(FILE).read_bytes(), type=Table)
