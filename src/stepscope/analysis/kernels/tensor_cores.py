"""Dtypes for which a device has tensor cores."""

from __future__ import annotations

import re

_AMD = re.compile(r"AMD|Radeon|Instinct|gfx\d", re.IGNORECASE)
_WITHOUT = re.compile(r"GTX 16\d\d|MX[45]\d0|T(?:400|600|1000|1200)\b")
"""GPUs of compute capability 7.5 that have no tensor cores."""
_BY_NAME = (
    (re.compile(r"V100|TITAN V|GV100|Jetson.*Xavier"), "7.0"),
    (re.compile(r"\bT4\b|RTX 20\d\d|TITAN RTX|Quadro RTX"), "7.5"),
    (re.compile(r"P100|P40\b|P4\b|GTX 10\d\d|TITAN X"), "6.0"),
    (re.compile(r"K80|K40|M60|M40|GTX 9\d\d"), "5.0"),
    (
        re.compile(
            r"A100|A800|A30\b|A40\b|A10\b|RTX 30\d\d|RTX A\d|L4\b|L40|RTX 40\d\d|H100|H200"
            r"|H800|H20\b|GH200|B100|B200|B300|GB\d00|RTX 50\d\d"
        ),
        "8.0",
    ),
)
"""Lower bound of the capability, for records and traces that do not contain it."""


def is_amd(device: str) -> bool:
    return _AMD.search(device) is not None


def tensor_core_dtypes(device: str, capability: str) -> tuple[str, ...] | None:
    """Return the dtypes, empty for a device without tensor cores; None if unknown."""
    if is_amd(device):
        # CDNA (9.x) and RDNA from 11 on have matrix cores for both; Vega, also 9.0, does not.
        has_them = not capability.startswith("10.") and not re.search(
            r"Vega|Radeon VII|MI25|MI50|MI60", device
        )
        return ("bfloat16", "float16") if has_them else ()
    known = capability or next((c for pattern, c in _BY_NAME if pattern.search(device)), "")
    text = known.partition(".")[0]
    if not text.isdecimal():
        return None
    major = int(text)
    if major >= 8:
        return ("TF32", "bfloat16", "float16")
    if major < 7 or _WITHOUT.search(device):
        return ()
    return ("float16",)
