"""Tables and figures of the compile study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from stepscope.analysis.limits import HostShare, host_bound, median_ms
from stepscope.records.schema import Record
from stepscope.report.blocks import Block, Curve, Figure, Finding, Table
from stepscope.report.format import count, duration, number
from stepscope.report.tables import Declared, col, failed_table, table
from stepscope.studies.base import Result
from stepscope.studies.compile.cases import AttentionCase, CompileCase, TraceCase
from stepscope.studies.training.flags import GRAPHS_OF_TORCH

PHASES = ("forward", "backward", "step")
FORMS = ("eager", "compiled")
_SLOWER = 0.97
"""Below this a compiled form is slower, above it may be noise."""
_LEFT = "before_backward"
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Row(NamedTuple):
    record: Record
    case: CompileCase

    @property
    def kind(self) -> str:
        return {TraceCase: "trace", AttentionCase: "attention"}.get(type(self.case), "model")

    @property
    def name(self) -> str:
        if isinstance(self.case, AttentionCase):
            mask = ", causal" if self.case.causal else ""
            return f"attention, length {self.case.seq}, d {self.case.head}, {self.case.dtype}{mask}"
        return msgspec.structs.replace(self.case, compile="no", compile_mode="default").name

    @property
    def scope(self) -> str:
        return "function" if isinstance(self.case, AttentionCase) else self.case.compile

    @property
    def mode(self) -> str:
        return "default" if isinstance(self.case, AttentionCase) else self.case.compile_mode

    def ms(self, form: str, phase: str) -> float | None:
        return median_ms(self.record, phase, variant=form)

    def gain(self, phase: str) -> float | None:
        """How many times as fast compiled as eager."""
        eager, compiled = self.ms("eager", phase), self.ms("compiled", phase)
        return eager / compiled if eager is not None and compiled else None

    def host(self, form: str) -> HostShare | None:
        """How much of a form's step the device waited for the host."""
        return host_bound(self.record, form)

    def host_share(self, form: str) -> float | None:
        share = self.host(form)
        return share.fraction if share else None

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


def compile_blocks(results: Sequence[Result[CompileCase]]) -> tuple[Block, ...]:
    rows = [Row(*result) for result in results]
    timed = [row for row in rows if row.gain("step") is not None]
    return (
        *_findings(rows, timed),
        *_figures(timed),
        *([_times_table(timed)] if timed else []),
        *([_memory_table(timed)] if any(_has_memory(row) for row in timed) else []),
        *_graph_table([row for row in rows if row.record.status == "ok"]),
        *failed_table("compile", [row.record for row in rows]),
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
        yield Finding(
            code="compile.gain",
            values={
                "best": _step_gain(best),
                "best_case": best.record.case,
                "worst": _step_gain(worst),
                "worst_case": worst.record.case,
                "cases": len(timed),
                "slower": len(slower),
            },
            records=_ids(timed),
            text=f"{text}.",
            tone="warn" if slower else "good",
        )
        yield from _starved(timed)
        yield from _waiting(timed)
    late = [row for row in timed if row.record.quantity("recompiled_while_timed")]
    for row in late:
        yield Finding(
            code="compile.recompiled-while-timed",
            values={"case": row.record.case},
            records=(row.record.id,),
            timed=False,
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
            code="compile.graph-breaks",
            values={"broken": len(broken), "cases": len(ok), "reason": reason},
            records=_ids(ok),
            timed=False,
            text=f"The graph breaks in {len(broken)} of {len(ok)} cases; in {_told(first)} first"
            f" by: {reason}",
            tone="warn",
        )
    elif ok:
        yield Finding(
            code="compile.graph-breaks",
            values={"broken": 0, "cases": len(ok)},
            records=_ids(ok),
            timed=False,
            text=f"The graph breaks in none of {len(ok)} cases.",
            tone="good",
        )


def _ids(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(row.record.id for row in rows)


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
    yield Finding(
        code="compile.host-bound",
        values={"eager": len(eager), "compiled": len(still), "cases": len(timed)},
        records=_ids(timed),
        text=f"{text}.",
    )


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
    yield Finding(
        code="compile.first-step",
        values={
            "case": longest.record.case,
            "cold_s": cold,
            "warm_s": warm,
            "pays_after": after,
        },
        records=(longest.record.id,),
        text=f"{text}.",
    )


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
    case = row.case
    dtype = _SHORT.get(case.dtype, case.dtype)
    if isinstance(case, AttentionCase):
        return {
            "length": f"{case.seq}",
            "head dimension": f"d {case.head}",
            "format": dtype,
            "mask": "causal" if case.causal else "",
        }
    return {
        "size": case.size,
        "context": f"{case.context}",
        "batch": f"× {case.batch}",
        "format": dtype,
        "compiled": row.scope,
        "mode": "" if row.mode == "default" else row.mode,
        "attention": case.attention,
    }


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
    without_loading = (
        " Cold and warm are without the seconds that a process takes to load the compiler."
        if all(row.record.quantity("load_s") is not None for row in timed)
        else ""
    )
    return table(
        "compile-times",
        "Eager and compiled, in turns",
        timed,
        [
            *_IDENTITY,
            col("cold", _seconds("cold_s"), unit="s", hint="first step, empty cache"),
            col("warm", _seconds("warm_s"), unit="s", hint="first step of a new process"),
            *(column for phase in PHASES for column in _phase_columns(phase)),
            col(
                "host-bound, eager",
                lambda row: row.host_share("eager"),
                "percent",
                hint="share of the step in phases that were no faster than their launches",
            ),
            col("compiled", lambda row: row.host_share("compiled"), "percent"),
            col(
                "pays after",
                lambda row: row.pays_after(),
                unit="steps",
                hint="steps whose gain is as long as the first step took",
            ),
        ],
        caption="Medians of steps that alternate, after all compiling was done." + without_loading,
    )


_IDENTITY = (
    col("case", lambda row: row.name),
    col("compiled", lambda row: row.scope),
    col("mode", lambda row: row.mode),
)


def _seconds(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.record.quantity(name)


def _phase_columns(phase: str) -> tuple[Declared, ...]:
    return (
        col(f"{phase}, eager", lambda row: row.ms("eager", phase), unit="ms"),
        col("compiled", lambda row: row.ms("compiled", phase), unit="ms"),
        col("gain", lambda row: row.gain(phase), unit="×"),
    )


def _has_memory(row: Row) -> bool:
    return row.record.quantity("peak_bytes", variant="eager") is not None


def _memory_table(timed: Sequence[Row]) -> Table:
    replayed = any(row.replayed for row in timed)

    def column(title: str, form: str, name: str, hint: str = "") -> Declared:
        return col(title, lambda row: _bytes(row, form, name), "bytes", hint=hint)

    return table(
        "compile-memory",
        "Memory, eager and compiled",
        [row for row in timed if _has_memory(row)],
        [
            *_IDENTITY,
            column("before backward, eager", "eager", _LEFT, "what the forward leaves"),
            column("before backward, compiled", "compiled", _LEFT),
            column("peak, eager", "eager", "peak_bytes"),
            column("peak, compiled", "compiled", "peak_bytes"),
        ],
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
    def counted(title: str, hint: str = "") -> Declared:
        return col(title, lambda row: row.record.quantity(title), "count", hint=hint)

    def named(title: str, what: str) -> Declared:
        return col(title, lambda row: "; ".join(_reasons(row, what)) or None)

    case, *rest = _IDENTITY
    if ok:
        yield table(
            "compile-graphs",
            "Graphs, breaks and recompilations",
            ok,
            [
                case,
                col("part", lambda row: row.kind),
                *rest,
                counted("graphs"),
                counted("operators", "calls that the tracer captured"),
                col("tracing", _seconds("trace_s"), unit="s", hint="where nothing was compiled"),
                counted("breaks"),
                named("by", "breaks"),
                counted("recompilations"),
                named("because", "recompiled"),
            ],
        )
