"""The verdict in words and as a bar: for the terminal, Markdown and the first screen of a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.analysis.verdict import (
    BreakdownPart,
    Estimate,
    MemoryChange,
    MemoryPart,
    OnCluster,
    RankedChange,
    Verdict,
)
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
    "lost": "▓▚",
    "communication": "▒",
    "idle": "░",
    "unattributed": "·",
    "memory": "█▓▒░▚·▞",
}
"""By meaning; parts of one meaning alternate."""
_STYLES = {
    "ideal": "green",
    "lost": "red",
    "communication": "magenta",
    "idle": "yellow",
    "unattributed": "dim",
    "memory": "blue",
}
BarPart = BreakdownPart | MemoryPart
_SUBJECTS = {"step": "A step", "full trace": "The full trace (no step is marked)"}
_TRUST = {"good": ("●", "green"), "noisy": ("●", "yellow"), "invalid": ("●", "red")}


class Segment(NamedTuple):
    """A part of the bar: its length in columns, its letter and its style."""

    columns: int
    letter: str
    style: str


def sentences(verdict: Verdict) -> Iterator[str]:
    """The answer: how long, how far from the limit, where the time goes, what to do."""
    if verdict.memory:
        yield from _memory_sentences(verdict)
        return
    if verdict.step is None:
        yield "No step was timed."
        return
    share = verdict.limit_share
    if verdict.cluster is not None:
        yield _cluster_sentence(verdict.cluster, verdict.step.value)
    elif verdict.limit is not None and verdict.limit_is_wrong:
        yield (
            f"A step takes {duration(verdict.step.value)}, less than the hardware limit of"
            f" {duration(verdict.limit.ms)}: the ceilings were measured on a busy machine; measure"
            " them again with `stepscope run --new-ceilings`."
        )
    elif verdict.limit is not None and share is not None:
        yield (
            f"A step takes {duration(verdict.step.value)}. The hardware limit is"
            f" {duration(verdict.limit.ms)}, with {verdict.limit.dtype} matmuls: {percent(share)}"
            " of the step."
        )
    else:
        yield f"{_SUBJECTS[verdict.timed]} takes {duration(verdict.step.value)}."
    if (longer := verdict.evaluations) is not None:
        yield (
            f"Not included: {longer.steps} of {longer.timed} timed steps also ran the model without"
            f" gradients (validation, rollout), for {duration(longer.ms)} more."
        )
    loss = verdict.largest_loss
    if loss is not None:
        named = "attributed part" if verdict.unattributed_ms > loss.ms else "part"
        beyond = "" if verdict.limit is None else " beyond it"
        rest = f"The largest {named}{' beyond compute' if verdict.cluster else beyond}"
        yield (
            f"{rest}: {loss.label}, {duration(loss.ms)} ({percent(loss.ms / verdict.step.value)})."
        )
    if verdict.cluster is not None:
        yield from _scaling_sentences(verdict.cluster)
    if verdict.trust == "good" and verdict.trust_reason:
        yield f"{verdict.trust_reason[:1].upper()}{verdict.trust_reason[1:]}."
    if verdict.mfu is not None:
        yield f"MFU in {verdict.dtype}: {percent(verdict.mfu)}."
    if verdict.trust != "good":
        ranked = ""
        if verdict.judged:
            what = "predicted changes" if verdict.changes else "changes"
            ranked = f", so {what} are not ranked"
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
        yield _no_change(verdict)
    if verdict.memory_change is not None:
        yield _memory_sentence(verdict.memory_change, verdict.peak_bytes)


def _cluster_sentence(cluster: OnCluster, step_ms: float) -> str:
    why = " (each updates only its share)" if cluster.efficiency > 1 else ""
    return (
        f"On {count(cluster.ranks)} ranks over {cluster.link}, a step is predicted to take"
        f" {duration(step_ms)} with {cluster.strategy}; one rank alone takes"
        f" {duration(cluster.alone_ms)}: {percent(cluster.efficiency)} scaling efficiency{why}."
    )


def _scaling_sentences(cluster: OnCluster) -> Iterator[str]:
    if cluster.stops_paying_at is not None:
        yield (
            f"With DDP, more than {percent(cluster.exposed_above)} of a step is not compute from"
            f" {count(cluster.stops_paying_at)} ranks on."
        )
    if cluster.memory_bytes is not None:
        fits = ""
        if cluster.device_bytes is not None:
            can = "fits" if cluster.fits else "does not fit"
            fits = f", which {can} into the {bytes_(cluster.device_bytes)} of the recorded device"
        yield f"Peak memory of a rank is {bytes_(cluster.memory_bytes)}{fits}."


def _no_change(verdict: Verdict) -> str:
    """Why no change is ranked: none is known, none is certain, or none of the tried ones gains."""
    if (most := verdict.uncertain) is not None:
        return (
            f"No known change is certain to gain time; the largest predicted gain is that of"
            f" {most.title}, {_with_range(most.gain)}."
        )
    if verdict.tried:
        return "None of the tried changes gains time."
    return "No known change is predicted to gain 3 % or more."


def _memory_sentence(change: MemoryChange, peak_bytes: int) -> str:
    """The largest reduction of the peak, with what it does to the time."""
    saved = f"{change.title} would lower it by {bytes_(change.gain_bytes)}"
    time = _measured_time(change.measured) if change.tried else _predicted_time(change)
    return f"Peak memory is {bytes_(peak_bytes)}; {saved}{time}."


def _measured_time(gain: Estimate | None) -> str:
    """The time of a change that was tried; none where no trial isolates the change."""
    if gain is None:
        return ", as predicted"
    if gain.low <= 0 <= gain.high:
        return " (predicted); no gain in time was measured"
    if gain.low > 0:
        return f" (predicted) and gain {_with_range(gain)}, measured"
    cost = Estimate(value=-gain.value, low=-gain.high, high=-gain.low)
    return f" (predicted) and cost {_with_range(cost)}, measured"


def _predicted_time(change: MemoryChange) -> str:
    if change.best_after:
        after = duration(change.gain_after_ms)
        return f" (with {change.best_after} it also gains {after}), as predicted"
    if change.gain_ms == 0:
        return " at no cost in time, as predicted"
    verb = "gain" if change.gain_ms > 0 else "cost"
    return f" and {verb} {duration(abs(change.gain_ms))}, as predicted"


def _memory_sentences(verdict: Verdict) -> Iterator[str]:
    peak = verdict.memory_bytes
    assert peak
    largest = verdict.memory[0]
    yield f"The peak is {bytes_(peak)}."
    yield f"The largest owner is {largest.label}: {_share_of_peak(largest, peak)}."
    if verdict.trust_reason:
        yield f"{verdict.trust_reason[:1].upper()}{verdict.trust_reason[1:]}."


def _listed(titles: Sequence[str]) -> str:
    if len(titles) < 2:
        return "".join(titles)
    return f"{', '.join(titles[:-1])} and {titles[-1]}"


def trust_text(verdict: Verdict) -> str:
    if verdict.cluster is not None and verdict.trust == "good":
        return "predicted, not measured"
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
    """The value with its interval in the same unit, if it has one."""
    if one.low == one.high:
        return duration(one.value)
    return f"{duration(one.value)} ({range_text(one)})"


def range_text(one: Estimate, digits: int = 3) -> str:
    low, high = (duration(end, digits) for end in (one.low, one.high))
    number, _, unit = low.rpartition(" ")
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def bar_parts(verdict: Verdict) -> Sequence[BarPart]:
    """The segments of the bar: of time, or of memory in a verdict on memory."""
    return verdict.memory or verdict.parts


def _share_of_peak(part: MemoryPart, peak: int) -> str:
    return f"{bytes_(part.bytes)}, {percent(part.bytes / peak)}"


def share_text(part: BarPart, verdict: Verdict) -> str:
    if isinstance(part, MemoryPart):
        return _share_of_peak(part, verdict.memory_bytes or part.bytes)
    assert verdict.step is not None
    return f"{duration(part.ms)}, {percent(part.ms / verdict.step.value)}"


def segments(parts: Sequence[BarPart], columns: int = WIDTH) -> list[Segment]:
    """The columns of each part, in proportion to its time or memory."""
    total = sum(part.amount for part in parts)
    if total <= 0:
        return []
    made, at, used = [], 0.0, 0
    for part, letter in zip(parts, _letters(parts), strict=True):
        at += part.amount
        end = round(columns * at / total)
        made.append(Segment(end - used, letter, _STYLES[part.meaning]))
        used = end
    return made


def _letters(parts: Sequence[BarPart]) -> list[str]:
    seen: Counter[str] = Counter()
    letters = []
    for part in parts:
        choice = _BARS[part.meaning]
        letters.append(choice[seen[part.meaning] % len(choice)])
        seen[part.meaning] += 1
    return letters


def verdict_lines(verdict: Verdict, width: int = WIDTH) -> list[str]:
    """Lines of at most `width` columns, unless a word of the next command is longer. To fit into 20
    lines of 80 columns, or more that are shorter, empty lines are left out and then the code of the
    last changes, which the page has."""
    most = lines_at(width, MAX_LINES)
    head = [*_title_lines(verdict, width), *wrapped(" ".join(sentences(verdict)), width)]
    bar = [bar_text(verdict, width), *legend_lines(verdict, width)] if bar_parts(verdict) else []
    changes = [
        _change_lines(rank, change, width) for rank, change in enumerate(verdict.changes, start=1)
    ]
    command = _command_lines(verdict.next_command, width) if verdict.next_command else []
    lines: list[str] = []
    for gap, shown in ([""], len(changes)), *(([], n) for n in range(len(changes), -1, -1)):
        listed = [
            line
            for number, (title, code) in enumerate(changes)
            for line in (*title, *(code if number < shown else ()))
        ]
        parts = (head, *([*gap, *part] for part in (bar, listed) if part), command)
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


def _command_lines(command: str, width: int) -> list[str]:
    """The next command in lines that a shell joins again, so that it can be copied."""
    lines = ["Next:"]
    for word in _SHELL_WORDS.findall(command):
        if len(lines[-1]) + len(word) + len(" \\") >= width and lines[-1].strip() != "Next:":
            lines.append("   ")
        lines[-1] += f" {word}"
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def print_verdict(verdict: Verdict, console: Console | None = None) -> None:
    """The verdict in color where the terminal has some."""
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
        "parts": [
            {"label": part.label, "ms": part.ms, "meaning": part.meaning} for part in verdict.parts
        ],
        "limit": None
        if limit is None
        else {
            "ms": limit.ms,
            "matmul_ms": limit.matmul_ms,
            "update_ms": limit.update_ms,
            "dtype": limit.dtype,
        },
        "mfu": verdict.mfu,
        "reachable": None
        if reachable is None
        else {
            "ms": reachable,
            "verified": verdict.reachable_verified,
            "changes": list(verdict.reachable_with),
        },
        "changes": [_change_facts(change) for change in verdict.changes],
        "trust": {"level": verdict.trust, "reason": verdict.trust_reason},
        "next": verdict.next_command,
    }
    if (cluster := verdict.cluster) is not None:
        facts["cluster"] = msgspec.structs.asdict(cluster) | {"fits": cluster.fits}
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
        "verified": change.verified,
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
    light = f"{_TRUST[verdict.trust][0]} {trust}"
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
    for part, letter in zip(parts, _letters(parts), strict=True):
        entry = f"{letter} {part.label} {share_text(part, verdict)}"
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
    """Its meaning; parts of one meaning alternate between two shades."""
    x: str
    """In percent of the bar, like the width."""
    width: str
    middle: str
    named: bool
    """True if its label fits into it."""


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
        yield StatView(f"hardware limit, {verdict.limit.dtype}", duration(verdict.limit.ms), note)
    if verdict.reachable_ms is not None:
        basis = "measured" if verdict.reachable_verified else "predicted"
        note = f"{step.value / verdict.reachable_ms:.2f}× as fast"
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
    views, at = [], 0.0
    seen: Counter[str] = Counter()
    for part in parts:
        width = 100 * part.amount / total
        text = share_text(part, verdict)
        look = f"{part.meaning} other" if seen[part.meaning] % 2 else part.meaning
        seen[part.meaning] += 1
        named = _LETTER_PX * (len(part.label) + 2) <= _LEAST_BAR_PX * width / 100
        views.append(
            PartView(
                part.label, text, look, f"{at:.3f}", f"{width:.3f}", f"{at + width / 2:.3f}", named
            )
        )
        at += width
    return views
