"""Tables and figures of the compile study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from stepscope.analysis.conclusions import NOTHING, conclude
from stepscope.analysis.effects import Effect, quotient
from stepscope.analysis.limits import host_bound, median_ms
from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Figure, Finding, Table, Tone, Value
from stepscope.report.format import count, duration, number
from stepscope.report.tables import Declared, col, failed_table, table
from stepscope.studies.base import Result
from stepscope.studies.compile.cases import AttentionCase, CompileCase, TraceCase
from stepscope.training.flags import GRAPHS_OF_TORCH
from stepscope.views.builders import (
    HOST_BOUND,
    bracketed,
    curve,
    finding,
    grouped,
    rated,
)

PHASES = ("forward", "backward", "step")
FORMS = ("eager", "compiled")
_LEFT = "before_backward"
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class CompileRow(NamedTuple):
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

    def effect(self) -> Effect | None:
        """The speedup with its interval."""
        eager, compiled = (self.record.find("step", variant=form) for form in FORMS)
        if eager is None or compiled is None or not (eager.values and compiled.values):
            return None
        return quotient(summarize(eager.values), summarize(compiled.values))

    def cpu_share(self, form: str) -> float | None:
        """Share of the step in which the GPU waits for the CPU."""
        share = host_bound(self.record, form)
        return share.fraction if share else None

    def cpu_bound(self, form: str) -> bool:
        share = host_bound(self.record, form)
        return share is not None and share.bound

    @property
    def replayed(self) -> bool:
        return self.mode in GRAPHS_OF_TORCH and self.record.environment.device_kind == "cuda"

    def pays_after(self) -> float | None:
        """Number of steps after which the compile time is amortized."""
        cold = self.record.quantity("cold_s")
        eager, compiled = self.ms("eager", "step"), self.ms("compiled", "step")
        effect = self.effect()
        if cold is None or eager is None or compiled is None or not (effect and effect.above):
            return None
        return cold * 1e3 / (eager - compiled)


def view(results: Sequence[Result[CompileCase]]) -> tuple[Block, ...]:
    rows = [CompileRow(*result) for result in results]
    timed = [row for row in rows if row.gain("step") is not None]
    return (
        *_findings(rows, timed),
        *_figures(timed),
        *_times_table(timed),
        *_memory_table([row for row in timed if _has_memory(row)]),
        *_graph_table([row for row in rows if row.record.status == "ok"]),
        *failed_table("compile", [row.record for row in rows]),
    )


def _findings(rows: Sequence[CompileRow], timed: Sequence[CompileRow]) -> Iterator[Finding]:
    if timed:
        yield from _phases(timed)
        yield _gain(timed)
        yield from _first_step(timed)
    for row in timed:
        if row.record.quantity("recompiled_while_timed"):
            yield finding(
                "compile.recompiled-while-timed",
                f"{_described(row)} was recompiled during timing: its times are not steady-state"
                " times.",
                row,
                {"case": row.record.case},
                tone="warn",
                timed=False,
            )
    if ok := [row for row in rows if row.record.status == "ok"]:
        yield _graph_breaks(ok)


def _phases(timed: Sequence[CompileRow]) -> Iterator[Finding]:
    """The speedups of the forward pass, the backward pass and the step, for each kind of case."""
    for kind, rows in grouped(timed, lambda row: row.kind).items():
        values: dict[str, Value] = {"kind": kind, "cases": len(rows)}
        parts = []
        for phase in PHASES:
            gains = [(gain, row) for row in rows if (gain := row.gain(phase)) is not None]
            if not gains:
                continue
            (low, least), (high, most) = (
                end(gains, key=lambda pair: pair[0]) for end in (min, max)
            )
            values |= {f"{phase} least": low, f"{phase} most": high}
            text = f"{phase} {number(low, 3)}×"
            if most is not least:
                text += f" ({_described(least)}) to {number(high, 3)}× ({_described(most)})"
            parts.append(text)
        what = "attention alone" if kind == "attention" else "a training step"
        yield finding(
            "compile.phases",
            f"Time when eager over time when compiled, {what}: {'; '.join(parts)}.",
            rows,
            values,
        )


def _gain(timed: Sequence[CompileRow]) -> Finding:
    gpu_bound = [row for row in timed if not row.cpu_bound("eager")]
    ranked = sorted(gpu_bound or timed, key=_step_gain)
    worst, best = ranked[0], ranked[-1]
    where = "The time of an eager step over that of a compiled one is"
    if len(ranked) < len(timed):
        where = f"In cases that are not CPU-bound, {where[0].lower()}{where[1:]}"
    text = f"{where} {bracketed(_effect(best))} in the best case ({_described(best)})"
    if best is not worst:
        text += f" and {bracketed(_effect(worst))} in the worst ({_described(worst)})"
    slower = [row for row in timed if _effect(row).below]
    unclear = [row for row in timed if not _effect(row).shown]
    if slower:
        text += f"; {len(slower)} of all {len(timed)} cases are slower than eager"
    if unclear:
        text += f"; in {len(unclear)} of {len(timed)} no difference is shown"
    return finding(
        "compile.gain",
        f"{text}.",
        timed,
        {
            "best": _step_gain(best),
            "best_case": best.record.case,
            "worst": _step_gain(worst),
            "worst_case": worst.record.case,
            "cases": len(timed),
            "slower": len(slower),
            "no_difference": len(unclear),
        },
        tone="warn" if slower else rated(_effect(best), higher_is_better=True),
    )


def _effect(row: CompileRow) -> Effect:
    effect = row.effect()
    assert effect is not None
    return effect


def _step_gain(row: CompileRow) -> float:
    return row.gain("step") or 0.0


def _graph_breaks(ok: Sequence[CompileRow]) -> Finding:
    broken = [row for row in ok if row.record.quantity("breaks")]
    values: dict[str, Value] = {"broken": len(broken), "cases": len(ok)}
    text = f"0 of {len(ok)} cases have a graph break."
    if broken:
        reason = next(iter(_reasons(broken[0], "breaks")), "no reason given")
        values["reason"] = reason
        text = (
            f"The graph breaks in {len(broken)} of {len(ok)} cases. First reason in"
            f" {_described(broken[0])}: {reason}"
        )
    tone: Tone = "warn" if broken else "good"
    return finding("compile.graph-breaks", text, ok, values, tone=tone, timed=False)


def _first_step(timed: Sequence[CompileRow]) -> Iterator[Finding]:
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
    case = longest.record.case
    values: dict[str, Value] = {"case": case, "cold_s": cold, "warm_s": warm, "pays_after": after}
    yield finding(
        "compile.first-step",
        f"{text}.",
        longest,
        values,
        conclusion=conclude(
            f"The speedup amortizes this after {count(round(after))} steps.", _effect(longest)
        )
        if after is not None
        else NOTHING,
    )


def _described(row: CompileRow) -> str:
    mode = "" if row.mode == "default" else f", {row.mode}"
    scope = "" if row.kind == "attention" else f" by {row.scope}"
    return f"{row.name}{scope}{mode}"


def _figures(timed: Sequence[CompileRow]) -> Iterator[Figure]:
    for kind, what in (("model", "a training step"), ("attention", "attention alone")):
        shown = [row for row in timed if row.kind == kind]
        if len(shown) < 2:
            continue
        parts = [_parts(row) for row in shown]
        shown_parts = _distinguishing(parts)
        labels = [" ".join(filter(None, map(part.get, shown_parts))) for part in parts]
        yield Figure(
            name=f"compile-gain-{kind}",
            title=f"Speedup of compiled over eager: {what}",
            kind="bars",
            curves=tuple(
                curve(phase, zip(labels, (row.gain(phase) or 0.0 for row in shown), strict=True))
                for phase in PHASES
            ),
            x_label=", ".join(shown_parts),
            y_label="eager time over compiled time",
        )


def _parts(row: CompileRow) -> dict[str, str]:
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


def _times_table(timed: Sequence[CompileRow]) -> Iterator[Table]:
    if not timed:
        return
    without_loading = all(row.record.quantity("load_s") is not None for row in timed)
    yield table(
        "compile-times",
        "Eager and compiled, interleaved",
        timed,
        [
            *_IDENTITY,
            col("cold", _quantity("cold_s"), unit="s", hint="first step, empty cache"),
            col("warm", _quantity("warm_s"), unit="s", hint="first step of a new process"),
            *(column for phase in PHASES for column in _phase_columns(phase)),
            col("CPU-bound, eager", lambda row: row.cpu_share("eager"), "percent", hint=HOST_BOUND),
            col("compiled", lambda row: row.cpu_share("compiled"), "percent"),
            col(
                "amortized after",
                lambda row: row.pays_after(),
                unit="steps",
                hint="steps until the speedup has made up for the first step",
            ),
        ],
        caption="Medians of interleaved steps, after compiling and warm-up."
        + " Cold and warm exclude the time to load the compiler." * without_loading,
    )


_IDENTITY = (
    col("case", lambda row: row.name),
    col("compiled", lambda row: row.scope),
    col("mode", lambda row: row.mode),
)


def _quantity(name: str) -> Callable[[CompileRow], float | None]:
    return lambda row: row.record.quantity(name)


def _phase_columns(phase: str) -> tuple[Declared, ...]:
    return (
        col(f"{phase}, eager", lambda row: row.ms("eager", phase), unit="ms"),
        col("compiled", lambda row: row.ms("compiled", phase), unit="ms"),
        col("gain", lambda row: row.gain(phase), unit="×"),
    )


def _has_memory(row: CompileRow) -> bool:
    return row.record.quantity("peak_bytes", variant="eager") is not None


def _memory_table(rows: Sequence[CompileRow]) -> Iterator[Table]:
    if not rows:
        return

    def column(title: str, form: str, name: str, hint: str = "") -> Declared:
        return col(title, lambda row: _bytes(row, form, name), "bytes", hint=hint)

    yield table(
        "compile-memory",
        "Memory, eager and compiled",
        rows,
        [
            *_IDENTITY,
            column("before backward, eager", "eager", _LEFT, "bytes saved for backward"),
            column("before backward, compiled", "compiled", _LEFT),
            column("peak, eager", "eager", "peak_bytes"),
            column("peak, compiled", "compiled", "peak_bytes"),
        ],
        caption="The peak includes the full memory pool of torch's CUDA graphs; the bytes saved for"
        " backward in it are unknown."
        if any(row.replayed for row in rows)
        else "",
    )


def _bytes(row: CompileRow, form: str, name: str) -> float | None:
    # Old records counted the allocations of a replay, which are zero: leave them out.
    if row.replayed and form == "compiled" and row.record.quantity(_LEFT, variant=form) is not None:
        return None
    return row.record.quantity(name, variant=form)


def _reasons(row: CompileRow, what: str) -> list[str]:
    return row.record.attachment(what, list[str]) or []


def _graph_table(ok: Sequence[CompileRow]) -> Iterator[Table]:
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
                col("tracing", _quantity("trace_s"), unit="s", hint="without compiling"),
                counted("breaks"),
                named("break reasons", "breaks"),
                counted("recompilations"),
                named("recompile reasons", "recompiled"),
            ],
        )
