"""The verdict in words and as a bar: for the terminal, Markdown and the first screen of a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from stepscope.analysis.verdict import BreakdownPart, Estimate, MemoryChange, RankedChange, Verdict
from stepscope.report.format import bytes_, duration, percent

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
MOST_LINES = 20
_BAR_UNITS = 1000.0
"""The width of the bar in units of its own; the page scales it."""
_MOST_CODE_LINES = 2
_BARS = {"ideal": "█", "lost": "▓▚", "communication": "▒", "idle": "░", "unattributed": "·"}
"""By meaning; parts of one meaning alternate."""
_STYLES = {
    "ideal": "green",
    "lost": "red",
    "communication": "magenta",
    "idle": "yellow",
    "unattributed": "dim",
}
_TRUST = {"good": ("●", "green"), "noisy": ("●", "yellow"), "invalid": ("●", "red")}


class Segment(NamedTuple):
    """A part of the bar: its length in columns, its letter and its style."""

    columns: int
    letter: str
    style: str


def sentences(verdict: Verdict) -> Iterator[str]:
    """The answer: how long, how far from the limit, where the time goes, what to do."""
    if verdict.step is None:
        yield "No step was timed."
        return
    share = verdict.limit_share
    if verdict.limit is not None and share is not None:
        yield (
            f"A step takes {duration(verdict.step.value)}. The hardware limit is"
            f" {duration(verdict.limit.ms)}, with {verdict.limit.dtype} matmuls: {percent(share)}"
            " of the step."
        )
    else:
        yield f"A step takes {duration(verdict.step.value)}."
    loss = verdict.largest_loss
    if loss is not None:
        rest = "The largest part" if verdict.limit is None else "The largest part beyond it"
        yield (
            f"{rest}: {loss.label}, {duration(loss.ms)} ({percent(loss.ms / verdict.step.value)})."
        )
    if verdict.mfu is not None:
        yield f"MFU in {verdict.dtype}: {percent(verdict.mfu)}."
    if verdict.trust != "good":
        ranked = ", so changes are not ranked" if verdict.judged else ""
        yield f"The times are not reliable: {verdict.trust_reason}{ranked}."
    elif verdict.reachable_ms is not None:
        basis = "measured" if verdict.reachable_verified else "predicted"
        speedup = verdict.step.value / verdict.reachable_ms
        yield (
            f"With {_listed(verdict.reachable_with)}: {duration(verdict.reachable_ms)},"
            f" {speedup:.2f}× as fast ({basis})."
        )
        if verdict.reachable_warning:
            yield f"Warning: with these changes {verdict.reachable_warning}."
    elif verdict.judged and not verdict.changes:
        yield "No known change is predicted to gain 3 % or more."
    if verdict.memory_change is not None:
        yield _memory_sentence(verdict.memory_change, verdict.peak_bytes)


def _memory_sentence(change: MemoryChange, peak_bytes: int) -> str:
    """The largest reduction of the peak, with what it does to the time."""
    saved = f"{change.title} would lower it by {bytes_(change.gain_bytes)}"
    if change.gain_ms > 0:
        time = f" and gain {duration(change.gain_ms)}"
    else:
        time = f" and cost {duration(-change.gain_ms)}"
    if change.best_after:
        time = f" (with {change.best_after} it also gains {duration(change.gain_after_ms)})"
    return f"Peak memory is {bytes_(peak_bytes)}; {saved}{time}, as predicted."


def _listed(titles: Sequence[str]) -> str:
    if len(titles) < 2:
        return "".join(titles)
    return f"{', '.join(titles[:-1])} and {titles[-1]}"


def trust_text(verdict: Verdict) -> str:
    reason = f": {verdict.trust_reason}" if verdict.trust_reason else ""
    return f"{verdict.trust} measurement{reason}" if verdict.trust == "good" else (
        f"{verdict.trust}{reason}"
    )  # fmt: skip


def gain_text(change: RankedChange) -> str:
    basis = "measured" if change.verified else "predicted"
    memory = ""
    if change.gain_bytes:
        sign = "−" if change.gain_bytes > 0 else "+"
        memory = f"; {sign}{bytes_(abs(change.gain_bytes))} predicted"
    return f"−{_with_range(change.gain)} {basis}{memory}"


def _with_range(one: Estimate) -> str:
    """The value with its interval in the same unit."""
    return f"{duration(one.value)} ({range_text(one)})"


def range_text(one: Estimate, digits: int = 3) -> str:
    low, high = (duration(end, digits) for end in (one.low, one.high))
    number, _, unit = low.rpartition(" ")
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def step_text(verdict: Verdict) -> str:
    return "" if verdict.step is None else _with_range(verdict.step)


def share_text(part: BreakdownPart, verdict: Verdict) -> str:
    assert verdict.step is not None
    return f"{duration(part.ms)}, {percent(part.ms / verdict.step.value)}"


def segments(parts: Sequence[BreakdownPart], columns: int = WIDTH) -> list[Segment]:
    """The columns of each part, in proportion to its time."""
    total = sum(part.ms for part in parts)
    if total <= 0:
        return []
    made, at, used = [], 0.0, 0
    for part, letter in zip(parts, _letters(parts), strict=True):
        at += part.ms
        end = round(columns * at / total)
        made.append(Segment(end - used, letter, _STYLES[part.meaning]))
        used = end
    return made


def _letters(parts: Sequence[BreakdownPart]) -> list[str]:
    seen: Counter[str] = Counter()
    letters = []
    for part in parts:
        choice = _BARS[part.meaning]
        letters.append(choice[seen[part.meaning] % len(choice)])
        seen[part.meaning] += 1
    return letters


def verdict_lines(verdict: Verdict, width: int = WIDTH) -> list[str]:
    """At most 20 lines of at most `width` columns."""
    import textwrap

    lines = [_title(verdict, width)]
    lines += textwrap.wrap(" ".join(sentences(verdict)), width)
    if verdict.parts:
        lines += ["", "".join(one.columns * one.letter for one in segments(verdict.parts, width))]
        lines += _legend(verdict, width)
    if verdict.changes:
        lines.append("")
        for rank, change in enumerate(verdict.changes, start=1):
            lines.append(_cut(f"{rank}. {change.title}: {gain_text(change)}", width))
            lines += [_cut(f"   {line}", width) for line in change.lines[:_MOST_CODE_LINES]]
            if change.warning:
                lines.append(_cut(f"   warning: {change.warning}", width))
    if verdict.next_command:
        lines.append(_cut(f"Next: {verdict.next_command}", width))
    if len(lines) > MOST_LINES:
        lines = [line for line in lines if line]
    if len(lines) > MOST_LINES:
        # The page has the code of every change.
        second = {f"   {line}" for change in verdict.changes for line in change.lines[1:]}
        lines = [line for line in lines if line not in second]
    return ["".join(c if c.isprintable() else " " for c in line) for line in lines[:MOST_LINES]]


def print_verdict(verdict: Verdict, console: Console | None = None) -> None:
    """The verdict in colour where the terminal has some."""
    from rich.console import Console as RichConsole
    from rich.text import Text

    console = console or RichConsole(highlight=False)
    width = min(console.width, WIDTH)
    bar = "".join(one.columns * one.letter for one in segments(verdict.parts, width))
    for index, line in enumerate(verdict_lines(verdict, width)):
        text = Text(line, style="bold" if index == 0 else "")
        if bar and line == bar:
            text = Text()
            for one in segments(verdict.parts, width):
                text.append(one.columns * one.letter, style=one.style)
        console.print(text, soft_wrap=True)


def verdict_markdown(verdict: Verdict) -> str:
    """Sentences, the bar as a code block, the changes as a list."""
    lines = ["```", *verdict_lines(verdict), "```"]
    return "\n".join(line.rstrip() for line in lines)


def _title(verdict: Verdict, width: int) -> str:
    trust = trust_text(verdict)
    room = width - len(trust) - 4
    name = _cut(f"{verdict.subject} on {verdict.device}", max(20, room))
    gap = " " * max(2, width - len(name) - len(trust) - 2)
    return f"{name}{gap}{_TRUST[verdict.trust][0]} {trust}"


def _legend(verdict: Verdict, width: int) -> list[str]:
    """The parts below the bar, as many per line as fit."""
    lines, line = [], ""
    for part, letter in zip(verdict.parts, _letters(verdict.parts), strict=True):
        entry = f"{letter} {part.label} {share_text(part, verdict)}"
        joined = f"{line}   {entry}" if line else entry
        if len(joined) > width and line:
            lines.append(line)
            line = entry
        else:
            line = joined
    return [*lines, line] if line else lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


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
    yield StatView("step", duration(step.value), f"95 %: {range_text(step, 4)}")
    if verdict.limit is not None:
        share = verdict.limit_share
        note = f"{percent(share)} of the step" if share is not None else ""
        yield StatView(f"hardware limit, {verdict.limit.dtype}", duration(verdict.limit.ms), note)
    if verdict.reachable_ms is not None:
        basis = "measured" if verdict.reachable_verified else "predicted"
        note = f"{step.value / verdict.reachable_ms:.2f}× as fast"
        yield StatView(f"with known changes, {basis}", duration(verdict.reachable_ms), note)
    if verdict.mfu is not None:
        yield StatView(f"MFU, {verdict.dtype}", percent(verdict.mfu))


def _parts(verdict: Verdict) -> list[PartView]:
    total = sum(part.ms for part in verdict.parts)
    views, at = [], 0.0
    seen: Counter[str] = Counter()
    for part in verdict.parts:
        width = _BAR_UNITS * part.ms / total
        text = share_text(part, verdict)
        look = f"{part.meaning} other" if seen[part.meaning] % 2 else part.meaning
        seen[part.meaning] += 1
        views.append(PartView(part.label, text, look, f"{at:.2f}", f"{width:.2f}"))
        at += width
    return views
