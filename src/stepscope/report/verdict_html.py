"""The first screen of a page: the verdict as the template draws it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from stepscope.analysis.verdict import Verdict
from stepscope.report.format import duration, percent
from stepscope.report.verdict import gain_text, sentences, share_text, trust_text

_WIDTH = 1000.0
"""The width of the bar in units of its own; the page scales it."""


class StatView(NamedTuple):
    label: str
    value: str
    note: str = ""


class PartView(NamedTuple):
    label: str
    text: str
    look: str
    """Its meaning; parts of one meaning alternate between two shades."""
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
    subject: str
    stats: list[StatView]
    answer: str
    parts: list[PartView]
    changes: list[ChangeView]
    next_command: str


def verdict_view(verdict: Verdict) -> VerdictView:
    return VerdictView(
        trust=verdict.trust,
        trust_text=trust_text(verdict),
        subject=verdict.subject,
        stats=list(_stats(verdict)),
        answer=" ".join(sentences(verdict)),
        parts=_parts(verdict),
        changes=[
            ChangeView(one.title, gain_text(one), "\n".join(one.lines), one.warning)
            for one in verdict.changes
        ],
        next_command=verdict.next_command,
    )


def _stats(verdict: Verdict) -> Iterator[StatView]:
    step = verdict.step
    if step is None:
        return
    yield StatView("step", duration(step.value), f"[{step.low:.4g}, {step.high:.4g}]")
    if verdict.limit is not None:
        share = verdict.limit_share
        note = percent(share) if share is not None else ""
        yield StatView(f"hardware limit, {verdict.limit.dtype}", duration(verdict.limit.ms), note)
    if verdict.reachable_ms is not None:
        basis = "measured" if verdict.reachable_verified else "predicted"
        note = f"{step.value / verdict.reachable_ms:.2f}×"
        yield StatView(f"reachable, {basis}", duration(verdict.reachable_ms), note)
    if verdict.mfu is not None:
        yield StatView(f"MFU, {verdict.dtype}", percent(verdict.mfu))


def _parts(verdict: Verdict) -> list[PartView]:
    total = sum(part.ms for part in verdict.parts)
    views, at = [], 0.0
    seen: Counter[str] = Counter()
    for part in verdict.parts:
        width = _WIDTH * part.ms / total
        text = share_text(part, verdict)
        look = f"{part.meaning} other" if seen[part.meaning] % 2 else part.meaning
        seen[part.meaning] += 1
        views.append(PartView(part.label, text, look, f"{at:.2f}", f"{width:.2f}"))
        at += width
    return views
