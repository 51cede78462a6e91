"""The verdict in words and as a bar: for the terminal, Markdown and the first screen of a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import asdict

from stepscope.analysis.parts import (
    COMMUNICATION,
    COPIES,
    IDLE,
    MATMULS,
    MEMORY,
    OUTSIDE,
    SLOW_MATMULS,
    UNATTRIBUTED,
)
from stepscope.analysis.verdict import (
    RELIABLE,
    AtMost,
    BreakdownPart,
    CostlyLine,
    Estimate,
    MemoryPart,
    OnCluster,
    RankedChange,
    Verdict,
    at_most,
    plain,
)
from stepscope.report.answer import gain_text, range_text, sentences, share_of_peak, trust_text
from stepscope.report.format import bytes_, count, duration, percent
from stepscope.report.wrapping import wrapped, wrapped_code

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
MAX_LINES = 20
_LEAST_BAR_PX, _LETTER_PX = 600.0, 7.5
"""Width of the bar on the narrowest page that shows labels in it, and of a letter of a label."""
_SHELL_WORDS = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
_BARS = {
    "ideal": "█",
    "lost": "▓▚▞╬═┼",
    "communication": "▒",
    "idle": "░┄",
    "unattributed": "·",
    "memory": "█▓▒░▚·▞",
}
"""By meaning, one for each part."""
_STYLES = {
    "ideal": ("green",),
    "lost": ("red", "dark_orange3", "orchid", "salmon1", "red3", "orange4"),
    "communication": ("magenta",),
    "idle": ("yellow", "gold3"),
    "unattributed": ("dim",),
    "memory": ("blue", "cyan", "bright_blue", "turquoise4", "sky_blue3", "dim", "steel_blue"),
}
_SHORT = {
    MATMULS: "matmuls",
    SLOW_MATMULS: "matmuls",
    MEMORY: "memory-bound",
    COPIES: "copies",
    COMMUNICATION: "communication",
    IDLE: "idle",
    OUTSIDE: "outside",
    UNATTRIBUTED: "unknown",
}
"""Shorter labels within the bar of a page."""
BarPart = BreakdownPart | MemoryPart
_LIGHT = "●"


class Segment(NamedTuple):
    """A part of the bar: its length in columns, its letter and its style."""

    columns: int
    letter: str
    style: str


def bar_parts(verdict: Verdict) -> Sequence[BarPart]:
    """The segments of the bar: of time, or of memory in a verdict on memory."""
    return verdict.memory or verdict.parts


def share_text(part: BarPart, verdict: Verdict) -> str:
    if isinstance(part, MemoryPart):
        return share_of_peak(part, verdict.memory_bytes or part.bytes)
    assert verdict.step is not None
    doubt = verdict.limit.doubt if verdict.limit is not None and part.meaning == "ideal" else ""
    share = percent(part.ms / verdict.step.value)
    return f"{duration(at_most(part.ms, doubt))}, {share}"


def segments(parts: Sequence[BarPart], columns: int = WIDTH) -> list[Segment]:
    """The columns of each part, in proportion to its time or memory."""
    total = sum(part.amount for part in parts)
    if total <= 0:
        return []
    made, at, used = [], 0.0, 0
    for part, number in zip(parts, _numbers(parts), strict=True):
        at += part.amount
        end = round(columns * at / total)
        styles = _STYLES[part.meaning]
        made.append(Segment(end - used, _letter(part, number), styles[number % len(styles)]))
        used = end
    return made


def _numbers(parts: Sequence[BarPart]) -> list[int]:
    """The number of each part among those of its meaning, from 0."""
    seen: Counter[str] = Counter()
    numbers = []
    for part in parts:
        numbers.append(seen[part.meaning])
        seen[part.meaning] += 1
    return numbers


def _letter(part: BarPart, number: int) -> str:
    letters = _BARS[part.meaning]
    return letters[number % len(letters)]


def verdict_lines(verdict: Verdict, width: int = WIDTH) -> list[str]:
    """Lines of at most `width` columns, unless a word of the next command is longer. To fit into 20
    lines of 80 columns, or more that are shorter, empty lines are left out and then the code of the
    last changes and the advice on the last lines, which the page has."""
    most = lines_at(width, MAX_LINES)
    head = [*_title_lines(verdict, width), *wrapped(" ".join(sentences(verdict)), width)]
    bar = [bar_text(verdict, width), *legend_lines(verdict, width)] if bar_parts(verdict) else []
    changes = [
        _change_lines(rank, change, width) for rank, change in enumerate(verdict.changes, start=1)
    ]
    named = [_costly_line(line, verdict, width) for line in verdict.lines]
    next_ = verdict.next_command
    command = command_lines("Next:", next_, width) if next_ else []
    rows = max(len(changes), len(named))
    lines: list[str] = []
    for gap, shown in ([""], rows), *(([], n) for n in range(rows, -1, -1)):
        listed, sources = (
            [
                line
                for number, (title, more) in enumerate(entries)
                for line in (*title, *(more if number < shown else ()))
            ]
            for entries in (changes, named)
        )
        parts = (head, *([*gap, *part] for part in (bar, listed, sources) if part), command)
        lines = [line for part in parts for line in part]
        if len(lines) <= most:
            break
    return ["".join(c if c.isprintable() else " " for c in line) for line in lines]


def lines_at(width: int, lines: int) -> int:
    """As many lines of this width as have the letters of so many lines of 80 columns."""
    return lines * WIDTH // min(width, WIDTH)


def _change_lines(rank: int, change: RankedChange, width: int) -> tuple[list[str], list[str]]:
    """What a change gains, with its warning, and its code."""
    indent = " " * len(f"{rank}. ")
    title = wrapped(f"{rank}. {change.title}: {gain_text(change)}", width, later=indent)
    if change.warning:
        title += wrapped(f"warning: {change.warning}", width, indent, indent)
    return title, [part for line in change.lines for part in wrapped_code(line, width, indent)]


def _costly_line(line: CostlyLine, verdict: Verdict, width: int) -> tuple[list[str], list[str]]:
    """A line of the user's code with what it costs, and what to write instead."""
    cost = line_cost(line, verdict)
    room = width - len(f"{line.where}    {cost}")
    source = line.source if len(line.source) <= room else f"{line.source[: max(0, room - 1)]}…"
    title = f"{line.where}  {source}  {cost}" if room > 1 else f"{line.where}  {cost}"
    text = f"{line.title}: {line.advice}"
    return wrapped(title, width, later="   "), wrapped(text, width, "   ", "   ")


def line_cost(line: CostlyLine, verdict: Verdict) -> str:
    """How often a line runs and what it costs of the step, if times are reliable."""
    times = f"×{count(line.times)} per step" if line.times else ""
    reliable = verdict.trust in RELIABLE and verdict.step is not None
    cost = f"{duration(line.ms)} ({percent(line.share)})" if reliable else ""
    return ", ".join(filter(None, (times, cost)))


def command_lines(title: str, command: str, width: int) -> list[str]:
    """A command after its title, in lines that a shell joins again, so that it can be copied."""
    lines = [title]
    for word in _SHELL_WORDS.findall(command):
        if len(lines[-1]) + len(word) + len(" \\") >= width and lines[-1].strip() != title:
            lines.append("   ")
        lines[-1] += f" {word}"
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def explanation_lines(verdict: Verdict, width: int = WIDTH) -> list[str]:
    """The definition of each part of the breakdown."""
    return [
        line
        for part in verdict.parts
        if part.definition
        for line in wrapped(f"{part.label}: {part.definition}", width, later="  ")
    ]


def print_verdict(
    verdict: Verdict, console: Console | None = None, *, explain: bool = False
) -> None:
    """The verdict in color where the terminal has some, with definitions on request."""
    from rich.console import Console as RichConsole
    from rich.text import Text

    console = console or RichConsole(highlight=False)
    width = min(console.width, WIDTH)
    titles = len(_title_lines(verdict, width))
    drawn = segments(bar_parts(verdict), width)
    bar = bar_text(verdict, width)
    for index, line in enumerate(verdict_lines(verdict, width)):
        text = Text(line, style="bold" if index < titles else "")
        if bar and line == bar:
            text = Text()
            for one in drawn:
                text.append(one.columns * one.letter, style=one.style)
        console.print(text, soft_wrap=True)
    for line in explanation_lines(verdict, width) if explain else ():
        console.print(line, soft_wrap=True, style="dim")


def verdict_facts(verdict: Verdict | None) -> dict[str, Any] | None:
    """The verdict as plain data for `--json`; None where there is none."""
    if verdict is None:
        return None
    step, limit, reachable = verdict.step, verdict.limit, verdict.reachable_ms
    facts: dict[str, Any] = {
        "subject": verdict.subject,
        "device": verdict.device,
        "timed": verdict.timed,
        "step_ms": None if step is None else step.value,
        "interval": None if step is None else [step.low, step.high],
        "parts": [asdict(part) for part in verdict.parts],
        "limit": None if limit is None else asdict(limit) | {"ms": limit.ms},
        "mfu": None if verdict.mfu is None else plain(verdict.mfu),
        "mfu_doubt": verdict.mfu.reason if isinstance(verdict.mfu, AtMost) else "",
        "unchanged_ms": verdict.unchanged_ms,
        "listed_ms": verdict.listed_ms,
        "reachable": None
        if reachable is None
        else {
            "ms": reachable,
            "verified": verdict.reachable_verified,
            "changes": list(verdict.reachable_with),
        },
        "changes": [_change_facts(change) for change in verdict.changes],
        "lines": [asdict(line) for line in verdict.lines],
        "order_only": {"by": verdict.order_by, "titles": list(verdict.order)},
        "slowest_rank": None if verdict.slowest is None else asdict(verdict.slowest),
        "trust": {"level": verdict.trust, "reason": verdict.trust_reason},
        "next": verdict.next_command,
    }
    if (cluster := verdict.cluster) is not None:
        facts["cluster"] = asdict(cluster) | {"fits": cluster.fits}
    if verdict.memory:
        facts["peak_bytes"] = verdict.memory_bytes
        facts["memory"] = [{"owner": one.label, "bytes": one.bytes} for one in verdict.memory]
    return facts


def _change_facts(change: RankedChange) -> dict[str, Any]:
    return {
        "code": change.code,
        "title": change.title,
        "gain_ms": change.gain.value,
        "interval": [change.gain.low, change.gain.high],
        "verified": change.gain.measured,
        "on_top_of": list(change.gain.on_top_of),
        "risk": change.risk,
        "lines": list(change.lines),
        "warning": change.warning,
    }


def verdict_markdown(verdict: Verdict) -> str:
    """Sentences, the bar as a code block, the changes as a list."""
    lines = ["```", *verdict_lines(verdict), "```"]
    return "\n".join(line.rstrip() for line in lines)


def _title_lines(verdict: Verdict, width: int) -> list[str]:
    """The subject and the trust, in one line if there is room for both."""
    name, trust = f"{verdict.subject} on {verdict.device}", trust_text(verdict)
    if len(name) + len(trust) + 4 > width:
        # The sentences have the reason of a measurement that is not good.
        trust = trust.partition(":")[0]
    light = f"{_LIGHT} {trust}"
    if len(name) + len(light) + 2 > width:
        return [*wrapped(name, width), light]
    return [f"{name}{light:>{width - len(name)}}"]


def bar_text(verdict: Verdict, width: int = WIDTH) -> str:
    """The bar in letters."""
    return "".join(one.columns * one.letter for one in segments(bar_parts(verdict), width))


def legend_lines(verdict: Verdict, width: int) -> list[str]:
    """The parts below the bar, as many per line as fit."""
    lines: list[str] = []
    parts = bar_parts(verdict)
    for part, number in zip(parts, _numbers(parts), strict=True):
        entry = f"{_letter(part, number)} {part.label} {share_text(part, verdict)}"
        if lines and len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1] += f"   {entry}"
        else:
            lines += wrapped(entry, width, later="  ")
    return lines


class StatView(NamedTuple):
    label: str
    value: str
    note: str = ""


class PartView(NamedTuple):
    label: str
    text: str
    look: str
    """Its meaning, and its number among the parts of that meaning."""
    x: str
    """In percent of the bar, like the width."""
    width: str
    middle: str
    inside: str
    """Its label within the bar; empty if there is no room."""
    definition: str = ""


class VerdictView(NamedTuple):
    of: Verdict
    trust_text: str
    stats: list[StatView]
    answer: str
    parts: list[PartView]
    changes: list[tuple[RankedChange, str]]
    """With their gains."""
    lines: list[tuple[CostlyLine, str]]
    """With their costs."""


def verdict_view(verdict: Verdict) -> VerdictView:
    return VerdictView(
        of=verdict,
        trust_text=trust_text(verdict),
        stats=list(_stats(verdict)),
        answer=" ".join(sentences(verdict, with_stats=True)),
        parts=_parts(verdict),
        changes=[(one, gain_text(one)) for one in verdict.changes],
        lines=[(one, line_cost(one, verdict)) for one in verdict.lines],
    )


def _stats(verdict: Verdict) -> Iterator[StatView]:
    step = verdict.step
    if verdict.memory_bytes is not None:
        yield StatView("peak memory", bytes_(verdict.memory_bytes))
    if step is None:
        return
    if verdict.cluster is not None:
        yield from _cluster_stats(verdict.cluster, step.value)
        return
    yield StatView(verdict.timed, duration(step.value), _interval_text(step))
    if verdict.limit is not None:
        share = verdict.limit_share
        note = f"{percent(share)} of the step" if share is not None else ""
        if verdict.limit_is_wrong:
            note = "above the step"
        yield StatView(f"hardware limit, {verdict.limit.dtype}", duration(verdict.limit.time), note)
    if verdict.reachable_ms is not None:
        basis = "measured" if verdict.reachable_verified else "predicted"
        before = (verdict.reachable_verified and verdict.unchanged_ms) or step.value
        note = f"{before / verdict.reachable_ms:.2f}× as fast"
        yield StatView(f"with known changes, {basis}", duration(verdict.reachable_ms), note)
    if verdict.mfu is not None:
        yield StatView(f"MFU, {verdict.dtype}", percent(verdict.mfu))


def _cluster_stats(cluster: OnCluster, step_ms: float) -> Iterator[StatView]:
    where = f"step on {count(cluster.ranks)} ranks over {cluster.link}"
    yield StatView(where, duration(step_ms), "predicted")
    alone = f"one rank: {duration(cluster.alone_ms)}"
    yield StatView("scaling efficiency", percent(cluster.efficiency), alone)
    if cluster.memory_bytes is not None:
        note = ""
        if cluster.device_bytes is not None:
            size = bytes_(cluster.device_bytes)
            note = f"fits into {size}" if cluster.fits else f"does not fit into {size}"
        yield StatView("peak memory of a rank", bytes_(cluster.memory_bytes), note)


def _interval_text(step: Estimate) -> str:
    """The interval, or how narrow it is if its ends look the same."""
    if duration(step.low, 4) == duration(step.high, 4):
        return "95 %: ± 0.1 % or less"
    return f"95 %: {range_text(step, 4)}"


def _parts(verdict: Verdict) -> list[PartView]:
    parts = bar_parts(verdict)
    total = sum(part.amount for part in parts)
    widest = max(parts, key=lambda part: part.amount, default=None)
    views, at = [], 0.0
    for part, number in zip(parts, _numbers(parts), strict=True):
        width = 100 * part.amount / total
        views.append(
            PartView(
                label=part.label,
                text=share_text(part, verdict),
                look=f"{part.meaning} n{number}",
                x=f"{at:.3f}",
                width=f"{width:.3f}",
                middle=f"{at + width / 2:.3f}",
                inside=_inside(part.label, _LEAST_BAR_PX * width / 100, cut=part is widest),
                definition=part.definition,
            )
        )
        at += width
    return views


def _inside(label: str, width_px: float, *, cut: bool) -> str:
    """The label as far as it fits: in full, in short, cut, or not at all."""
    letters = int(width_px / _LETTER_PX) - 2
    fitting = (text for text in (label, _SHORT.get(label, label)) if len(text) <= letters)
    return next(fitting, f"{label[: letters - 1]}…" if cut and letters > 1 else "")
