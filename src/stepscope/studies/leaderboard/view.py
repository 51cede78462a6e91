"""Findings and table of the leaderboard test. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.report.blocks import Block, Finding, Table
from stepscope.report.format import bytes_, counted, duration, percent
from stepscope.report.tables import col, failed_table, table
from stepscope.studies.base import Result
from stepscope.studies.leaderboard.cases import CONTEXT, LIMIT_S, PER_RANK, RANKS, LeaderboardCase
from stepscope.training.shape import model_shape
from stepscope.views.ranks import RankedResult, step_column

_FULL = model_shape("8b", "2026", CONTEXT, {})
_SECONDS = {"build_s": "build", "first_s": "first step", "total_s": "total"}


class Entry(RankedResult[LeaderboardCase]):
    """A run of the test."""

    @property
    def title(self) -> str:
        return f"{self.case.name}, {self.label}"

    @property
    def missing(self) -> list[str]:
        """Everything in which this run is less than the handout's test."""
        case, here = self.case, self.record.environment
        gaps = []
        if here.device_kind != "cuda":
            gaps.append(f"a CPU instead of {RANKS} GPUs")
        elif case.ranks < RANKS or self.backend != "nccl":
            gaps.append(f"{counted(case.ranks, 'GPU')} instead of {RANKS}")
        for name in ("d_model", "d_ff", "n_layers", "n_heads", "vocab"):
            own, full = getattr(case.shape, name), getattr(_FULL, name)
            if own != full:
                gaps.append(f"{name} {own:,} instead of {full:,}")
        if case.context != CONTEXT:
            gaps.append(f"context {case.context:,} instead of {CONTEXT:,}")
        batch, full_batch = case.per_rank * case.ranks, PER_RANK * RANKS
        if batch != full_batch:
            gaps.append(f"batch {batch} instead of {full_batch}")
        if case.dtype == "float32":
            gaps.append("float32 instead of bfloat16")
        return gaps


def view(results: Sequence[Result[LeaderboardCase]]) -> tuple[Block, ...]:
    entries = [Entry(*result) for result in results]
    done = [one for one in entries if one.record.status == "ok" and one.summary("step")]
    return (
        *(finding for entry in done for finding in _findings(entry)),
        *_parts_table(done),
        *failed_table("leaderboard", [entry.record for entry in entries]),
    )


def _findings(entry: Entry) -> Iterator[Finding]:
    step = entry.summary("step")
    assert step is not None
    tokens = entry.case.per_rank * entry.case.ranks * entry.case.context
    peak = entry.record.quantity("peak_bytes")
    memory = f" A rank allocates {bytes_(peak)} at most." if peak else ""
    yield entry.finding(
        "step",
        f"a full step takes {duration(step.mean)} ± {duration(step.std)} over"
        f" {counted(step.count, 'sample')}, {tokens / step.mean * 1e3:,.0f} tokens/s.{memory}",
        {"step_ms": step.mean, "std_ms": step.std, "samples": step.count, "peak_bytes": peak},
    )
    total, first = (entry.record.quantity(name) for name in ("total_s", "first_s"))
    if total is not None and first is not None:
        within = total <= LIMIT_S
        yield entry.finding(
            "total",
            f"from empty caches the run takes {duration(total * 1e3)}, {percent(total / LIMIT_S)}"
            f" of the {duration(LIMIT_S * 1e3)} that it may take; the first step"
            f" {duration(first * 1e3)} of it.",
            {"total_s": total, "first_s": first, "limit_s": LIMIT_S, "within": within},
            tone="info" if within else "warn",
        )
    if missing := entry.missing:
        yield entry.finding(
            "missing",
            f"this is not the test of the handout: {', '.join(missing)}.",
            {"missing": len(missing)},
            tone="warn",
            timed=False,
        )


def _parts_table(done: Sequence[Entry]) -> Iterator[Table]:
    if not done:
        return
    rows = [_Row(entry) for entry in done]
    yield table(
        "leaderboard-parts",
        "A run from empty caches",
        rows,
        [
            col("test", lambda row: row.of.case.name),
            col("ranks", lambda row: row.of.label),
            step_column(),
            *(
                col(title, lambda row, name=name: row.record.quantity(name), unit="s")
                for name, title in _SECONDS.items()
            ),
            col("peak memory", lambda row: row.record.quantity("peak_bytes"), "bytes"),
        ],
        caption="The slowest rank. The first step compiles and tunes; total is the time from the"
        " start of the ranks to their end.",
    )


class _Row:
    """A row for the shared column of step times."""

    variant = ""

    def __init__(self, entry: Entry) -> None:
        self.of, self.record = entry, entry.record
