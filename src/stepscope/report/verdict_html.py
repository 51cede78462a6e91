"""The first screen of a page: the verdict as the template draws it."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.analysis.verdict import Verdict
from stepscope.report.verdict import gain_text, sentences, share_text, trust_text

_WIDTH = 1000.0
"""The width of the bar in units of its own; the page scales it."""


class PartView(NamedTuple):
    label: str
    text: str
    meaning: str
    x: str
    width: str


class ChangeView(NamedTuple):
    title: str
    gain: str
    code: str
    warning: str


class VerdictView(NamedTuple):
    trust: str
    trust_text: str
    answer: str
    parts: list[PartView]
    changes: list[ChangeView]
    next_command: str


def verdict_view(verdict: Verdict) -> VerdictView:
    return VerdictView(
        trust=verdict.trust,
        trust_text=trust_text(verdict),
        answer=" ".join(sentences(verdict)),
        parts=_parts(verdict),
        changes=[
            ChangeView(one.title, gain_text(one), "\n".join(one.lines), one.warning)
            for one in verdict.changes
        ],
        next_command=verdict.next_command,
    )


def _parts(verdict: Verdict) -> list[PartView]:
    total = sum(part.ms for part in verdict.parts)
    views, at = [], 0.0
    for part in verdict.parts:
        width = _WIDTH * part.ms / total
        text = share_text(part, verdict)
        views.append(PartView(part.label, text, part.meaning, f"{at:.2f}", f"{width:.2f}"))
        at += width
    return views
