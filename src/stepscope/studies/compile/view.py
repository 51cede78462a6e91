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
"""A speedup below this counts as slower; values closer to 1 may be noise."""
_LEFT = "before_backward"
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Row(NamedTuple):
    """A case with its record and derived values."""

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
        """Speedup of compiled over eager."""
        eager, compiled = self.ms("eager", phase), self.ms("compiled", phase)
        return eager / compiled if eager is not None and compiled else None

    def host(self, form: str) -> HostShare | None:
        """Share of the step in which the device waits for the host."""
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
        """Number of steps after which the compile time is amortized."""
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
        where = "A compiled step is"
        if len(ranked) < len(timed):
            where = "In cases that are not host-bound, a compiled step is"
        gain = number(_step_gain(best), 3)
        text = f"{where} {gain} times as fast as eager in the best case ({_described(best)})"
        if best is not worst:
            text += f" and {number(_step_gain(worst), 3)} in the worst ({_described(worst)})"
        slower = [row for row in timed if _step_gain(row) < _SLOWER]
        if slower:
            text += f"; {len(slower)} of all {len(timed)} cases are slower than eager"
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
            text=f"{_described(row)} was recompiled during timing: its times are not"
            " steady-state times.",
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
            text=f"The graph breaks in {len(broken)} of {len(ok)} cases. First reason in"
            f" {_described(first)}: {reason}",
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
        f"{len(eager)} of {len(timed)} cases are host-bound when eager: there the speedup"
        f" ({' to '.join(ends)} times) comes from fewer or cheaper launches"
    )
    if still:
        text += f", and {len(still)} of them are still host-bound when compiled"
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
    text = (
        f"The first step of {_described(longest)} takes {duration(cold * 1e3)} with an empty cache"
    )
    if warm is not None:
        text += f" and {duration(warm * 1e3)} in a new process with a filled cache"
    after = longest.pays_after()
    if after is not None:
        text += f"; the speedup amortizes this after {count(round(after))} steps"
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


def _described(row: Row) -> str:
    mode = "" if row.mode == "default" else f", {row.mode}"
    scope = "" if row.kind == "attention" else f" by {row.scope}"
    return f"{row.name}{scope}{mode}"


def _figures(timed: Sequence[Row]) -> Iterator[Figure]:
    for kind, what in (("model", "a training step"), ("attention", "attention alone")):
        shown = [row for row in timed if row.kind == kind]
        if len(shown) < 2:
            continue
        parts = {row.record.case: _parts(row) for row in shown}
        shown_parts = _distinguishing(list(parts.values()))
        yield Figure(
            name=f"compile-gain-{kind}",
            title=f"Speedup of compiled over eager: {what}",
            kind="bars",
            curves=tuple(
                Curve(
                    label=phase,
                    x=tuple(
                        " ".join(
                            text for what in shown_parts if (text := parts[row.record.case][what])
                        )
                        for row in shown
                    ),
                    y=tuple(row.gain(phase) or 0.0 for row in shown),
                )
                for phase in PHASES
            ),
            x_label=", ".join(shown_parts),
            y_label="eager time over compiled time",
        )


def _parts(row: Row) -> dict[str, str]:
    """Parts of the name of a case, by their meaning."""
    case = row.case
    dtype = _SHORT.get(case.dtype, case.dtype)
    if isinstance(case, AttentionCase):
        return {
            "length": f"{case.seq}",
            "head dimension": f"d {case.head}",
            "dtype": dtype,
            "mask": "causal" if case.causal else "",
        }
    return {
        "size": case.size,
        "context": f"{case.context}",
        "batch": f"× {case.batch}",
        "dtype": dtype,
        "compiled": row.scope,
        "mode": "" if row.mode == "default" else row.mode,
        "attention": case.attention,
    }


def _distinguishing(cases: Sequence[dict[str, str]]) -> list[str]:
    """The parts of the names that are needed to distinguish these cases."""
    needed: list[str] = []
    distinct = 0
    for part in cases[0]:
        groups = len({tuple(case[word] for word in (*needed, part)) for case in cases})
        if groups > distinct or not needed:
            needed, distinct = [*needed, part], groups
    return needed


def _times_table(timed: Sequence[Row]) -> Table:
    without_loading = (
        " Cold and warm exclude the time to load the compiler."
        if all(row.record.quantity("load_s") is not None for row in timed)
        else ""
    )
    return table(
        "compile-times",
        "Eager and compiled, interleaved",
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
                hint="share of the step in phases limited by their launches",
            ),
            col("compiled", lambda row: row.host_share("compiled"), "percent"),
            col(
                "amortized after",
                lambda row: row.pays_after(),
                unit="steps",
                hint="steps until the speedup has made up for the first step",
            ),
        ],
        caption="Medians of interleaved steps, after compiling and warm-up." + without_loading,
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
            column("before backward, eager", "eager", _LEFT, "bytes saved for backward"),
            column("before backward, compiled", "compiled", _LEFT),
            column("peak, eager", "eager", "peak_bytes"),
            column("peak, compiled", "compiled", "peak_bytes"),
        ],
        caption="The peak includes the full memory pool of torch's CUDA graphs; the bytes saved for"
        " backward in it are unknown."
        if replayed
        else "",
    )


def _bytes(row: Row, form: str, name: str) -> float | None:
    # Old records counted the allocations of a replay, which are zero: leave them out.
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
                counted("operators", "calls captured by TorchDynamo"),
                col(
                    "tracing",
                    _seconds("trace_s"),
                    unit="s",
                    hint="time of tracing without compiling",
                ),
                counted("breaks"),
                named("break reasons", "breaks"),
                counted("recompilations"),
                named("recompile reasons", "recompiled"),
            ],
        )
