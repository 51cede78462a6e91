"""Tables and figures of the compile study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from stepscope.analysis.limits import HostShare, host_bound, median_ms
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Cell, Column, Curve, Figure, Finding, Table
from stepscope.report.format import count, duration, number
from stepscope.studies.attention.workload import AttentionWorkload
from stepscope.studies.workload import Workload
from stepscope.studies.workload_flags import GRAPHS_OF_TORCH

PHASES = ("forward", "backward", "step")
FORMS = ("eager", "compiled")
_SLOWER = 0.97
"""Below this a compiled form is slower, above it may be noise."""
_LEFT = "before_backward"


class Row(NamedTuple):
    record: Record
    kind: str
    name: str
    scope: str
    mode: str

    def ms(self, form: str, phase: str) -> float | None:
        return median_ms(self.record, phase, variant=form)

    def gain(self, phase: str) -> float | None:
        """How many times as fast compiled as eager."""
        eager, compiled = self.ms("eager", phase), self.ms("compiled", phase)
        return eager / compiled if eager is not None and compiled else None

    def host(self, form: str) -> HostShare | None:
        """How much of a form's step the device waited for the host."""
        return host_bound(self.record, form)

    def host_bound(self, form: str) -> bool:
        share = self.host(form)
        return share is not None and share.bound

    @property
    def replayed(self) -> bool:
        return self.mode in GRAPHS_OF_TORCH and self.record.environment.device_kind == "cuda"

    def pays_after(self) -> float | None:
        """Steps after which the first one's compiling is paid back."""
        cold = self.record.quantity("cold_s")
        eager, compiled = self.ms("eager", "step"), self.ms("compiled", "step")
        if cold is None or eager is None or compiled is None or compiled >= eager:
            return None
        return cold * 1e3 / (eager - compiled)


def rows_of(records: Sequence[Record]) -> list[Row]:
    return [_row(record) for record in records]


def _row(record: Record) -> Row:
    config: dict[str, Any] = record.config
    if config["kind"] == "attention":
        w = msgspec.convert(config, AttentionWorkload)
        mask = ", causal" if w.causal else ""
        name = f"attention, length {w.seq}, d {w.head}, {w.dtype}{mask}"
        return Row(record, "attention", name, "function", "default")
    work = msgspec.convert(config, Workload)
    plain = msgspec.structs.replace(work, compile="no", compile_mode="default")
    return Row(record, config["kind"], plain.name, work.compile, work.compile_mode)


def compile_blocks(records: Sequence[Record]) -> tuple[Block, ...]:
    rows = rows_of(records)
    timed = [row for row in rows if row.gain("step") is not None]
    return (
        *_findings(rows, timed),
        *_figures(timed),
        *([_times_table(timed)] if timed else []),
        *([_memory_table(timed)] if any(_has_memory(row) for row in timed) else []),
        *_graph_table([row for row in rows if row.record.status == "ok"]),
        *_lost_table([row for row in rows if row.record.status != "ok"]),
    )


def _findings(rows: Sequence[Row], timed: Sequence[Row]) -> Iterator[Finding]:
    if timed:
        paced = [row for row in timed if not row.host_bound("eager")]
        ranked = sorted(paced or timed, key=_step_gain)
        worst, best = ranked[0], ranked[-1]
        where = "Compiled, a step is"
        if len(ranked) < len(timed):
            where = "Where the device does not wait for the host, a compiled step is"
        text = (
            f"{where} {number(_step_gain(best), 3)} times as fast in the best case ({_told(best)})"
        )
        if best is not worst:
            text += f" and {number(_step_gain(worst), 3)} in the worst ({_told(worst)})"
        slower = [row for row in timed if _step_gain(row) < _SLOWER]
        if slower:
            text += f"; of all {len(timed)} cases {len(slower)} are slower than eager"
        yield Finding(text=f"{text}.", tone="warn" if slower else "good")
        yield from _starved(timed)
        yield from _waiting(timed)
    late = [row for row in timed if row.record.quantity("recompiled_while_timed")]
    for row in late:
        yield Finding(
            text=f"{_told(row)} was compiled again while its steps were timed: its times are not"
            " those of a steady state.",
            tone="warn",
        )
    ok = [row for row in rows if row.record.status == "ok"]
    broken = [row for row in ok if row.record.quantity("breaks")]
    if broken:
        first = broken[0]
        reason = next(iter(_reasons(first, "breaks")), "no reason given")
        yield Finding(
            text=f"The graph breaks in {len(broken)} of {len(ok)} cases; in {_told(first)} first"
            f" by: {reason}",
            tone="warn",
        )
    elif ok:
        yield Finding(text=f"The graph breaks in none of {len(ok)} cases.", tone="good")


def _step_gain(row: Row) -> float:
    return row.gain("step") or 0.0


def _starved(timed: Sequence[Row]) -> Iterator[Finding]:
    eager = [row for row in timed if row.host_bound("eager")]
    if not eager:
        return
    still = [row for row in eager if row.host_bound("compiled")]
    gains = [_step_gain(row) for row in eager]
    ends = dict.fromkeys(number(end, 3) for end in (min(gains), max(gains)))
    text = (
        f"In {len(eager)} of {len(timed)} cases the device waits for the host when eager: what"
        f" compiling changes there is what the host takes to launch ({' to '.join(ends)} times)"
    )
    if still:
        text += f", and in {len(still)} of them it still waits"
    yield Finding(text=f"{text}.")


def _waiting(timed: Sequence[Row]) -> Iterator[Finding]:
    longest = max(timed, key=lambda row: row.record.quantity("cold_s") or 0.0)
    cold, warm = (longest.record.quantity(name) for name in ("cold_s", "warm_s"))
    if cold is None:
        return
    text = f"The first step of {_told(longest)} takes {duration(cold * 1e3)} with an empty cache"
    if warm is not None:
        text += f" and {duration(warm * 1e3)} in a new process with a full one"
    after = longest.pays_after()
    if after is not None:
        text += f"; {count(round(after))} steps pay that back"
    yield Finding(text=f"{text}.")


def _told(row: Row) -> str:
    mode = "" if row.mode == "default" else f", {row.mode}"
    scope = "" if row.kind == "attention" else f" by {row.scope}"
    return f"{row.name}{scope}{mode}"


def _figures(timed: Sequence[Row]) -> Iterator[Figure]:
    for kind, what in (("model", "a training step"), ("attention", "attention alone")):
        shown = [row for row in timed if row.kind == kind]
        if len(shown) < 2:
            continue
        parts = {row.record.case: _parts(row) for row in shown}
        told = _telling(list(parts.values()))
        yield Figure(
            name=f"compile-gain-{kind}",
            title=f"How many times as fast compiled as eager: {what}",
            kind="bars",
            curves=tuple(
                Curve(
                    label=phase,
                    x=tuple(
                        " ".join(text for what in told if (text := parts[row.record.case][what]))
                        for row in shown
                    ),
                    y=tuple(row.gain(phase) or 0.0 for row in shown),
                )
                for phase in PHASES
            ),
            x_label=", ".join(told),
            y_label="eager over compiled",
        )


def _parts(row: Row) -> dict[str, str]:
    """What names a case, by what each word is."""
    config = row.record.config
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    form = short.get(config["dtype"], config["dtype"])
    if row.kind == "attention":
        mask = "causal" if config["causal"] else ""
        return {"length": f"{config['seq']}", "head dimension": f"d {config['head']}",
                "format": form, "mask": mask}  # fmt: skip
    return {
        "size": config["size"], "context": f"{config['context']}", "batch": f"× {config['batch']}",
        "format": form, "compiled": row.scope, "mode": "" if row.mode == "default" else row.mode,
        "attention": config["attention"],
    }  # fmt: skip


def _telling(cases: Sequence[dict[str, str]]) -> list[str]:
    """As little as tells these cases apart."""
    told: list[str] = []
    apart = 0
    for what in cases[0]:
        found = len({tuple(case[word] for word in (*told, what)) for case in cases})
        if found > apart or not told:
            told, apart = [*told, what], found
    return told


def _times_table(timed: Sequence[Row]) -> Table:
    def row_cells(row: Row) -> tuple[Cell, ...]:
        cold, warm = (row.record.quantity(name) for name in ("cold_s", "warm_s"))
        pairs = (
            (row.ms("eager", phase), row.ms("compiled", phase), row.gain(phase)) for phase in PHASES
        )
        return (
            row.name, row.scope, row.mode, cold, warm, *(cell for pair in pairs for cell in pair),
            *(share.fraction if (share := row.host(form)) else None for form in FORMS),
            row.pays_after(),
        )  # fmt: skip

    times = [
        column
        for phase in PHASES
        for column in (
            Column(title=f"{phase}, eager", kind="number", unit="ms"),
            Column(title="compiled", kind="number", unit="ms"),
            Column(title="gain", kind="number", unit="×"),
        )
    ]
    without_loading = (
        " Cold and warm are without the seconds that a process takes to load the compiler."
        if all(row.record.quantity("load_s") is not None for row in timed)
        else ""
    )
    return Table(
        name="compile-times",
        title="Eager and compiled, in turns",
        columns=(
            Column(title="case"),
            Column(title="compiled"),
            Column(title="mode"),
            Column(title="cold", kind="number", unit="s", hint="first step, empty cache"),
            Column(title="warm", kind="number", unit="s", hint="first step of a new process"),
            *times,
            Column(
                title="host-bound, eager", kind="percent",
                hint="share of the step in phases that were no faster than their launches",
            ),
            Column(title="compiled", kind="percent"),
            Column(
                title="pays after", kind="number", unit="steps",
                hint="steps whose gain is as long as the first step took",
            ),
        ),
        rows=tuple(row_cells(row) for row in timed),
        caption="Medians of steps that alternate, after all compiling was done." + without_loading,
    )  # fmt: skip


def _has_memory(row: Row) -> bool:
    return row.record.quantity("peak_bytes", variant="eager") is not None


def _memory_table(timed: Sequence[Row]) -> Table:
    what = ("before_backward", "peak_bytes")
    names = [(form, each) for each in what for form in FORMS]
    replayed = any(row.replayed for row in timed)
    return Table(
        name="compile-memory",
        title="Memory, eager and compiled",
        columns=(
            Column(title="case"),
            Column(title="compiled"),
            Column(title="mode"),
            Column(title="before backward, eager", kind="bytes", hint="what the forward leaves"),
            Column(title="before backward, compiled", kind="bytes"),
            Column(title="peak, eager", kind="bytes"),
            Column(title="peak, compiled", kind="bytes"),
        ),
        rows=tuple(
            (row.name, row.scope, row.mode, *(_bytes(row, form, name) for form, name in names))
            for row in timed
            if _has_memory(row)
        ),
        caption="A peak counts all memory that torch set aside for replaying its CUDA graphs; what"
        " a forward leaves in it is not known."
        if replayed
        else "",
    )


def _bytes(row: Row, form: str, name: str) -> float | None:
    # A replay that was counted by what it allocates was not counted at all.
    if row.replayed and form == "compiled" and row.record.quantity(_LEFT, variant=form) is not None:
        return None
    return row.record.quantity(name, variant=form)


def _reasons(row: Row, what: str) -> list[str]:
    return row.record.attachment(what, list[str]) or []


def _graph_table(ok: Sequence[Row]) -> Iterator[Table]:
    if not ok:
        return

    def named(row: Row, what: str) -> str | None:
        return "; ".join(_reasons(row, what)) or None

    yield Table(
        name="compile-graphs",
        title="Graphs, breaks and recompilations",
        columns=(
            Column(title="case"),
            Column(title="part"),
            Column(title="compiled"),
            Column(title="mode"),
            Column(title="graphs", kind="count"),
            Column(title="operators", kind="count", hint="calls that the tracer captured"),
            Column(title="tracing", kind="number", unit="s", hint="where nothing was compiled"),
            Column(title="breaks", kind="count"),
            Column(title="by"),
            Column(title="recompilations", kind="count"),
            Column(title="because"),
        ),
        rows=tuple(
            (
                row.name, row.kind, row.scope, row.mode,
                *(row.record.quantity(name) for name in ("graphs", "operators", "trace_s",
                                                         "breaks")),
                named(row, "breaks"), row.record.quantity("recompilations"),
                named(row, "recompiled"),
            )
            for row in ok
        ),
    )  # fmt: skip


def _lost_table(lost: Sequence[Row]) -> Iterator[Table]:
    if lost:
        yield Table(
            name="compile-lost",
            title="Not compiled",
            columns=(Column(title="case"), Column(title="status"), Column(title="reason")),
            rows=tuple((row.record.case, row.record.status, row.record.reason) for row in lost),
        )
