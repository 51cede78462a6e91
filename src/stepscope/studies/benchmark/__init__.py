"""Time of forward pass, backward pass and full training step, and its distance from the ceiling.

    stepscope run benchmark --size xl --context 512 --dtype bfloat16

Each mode is a separate case. The series `step` is the mode timed as one; if a mode has several
phases, they are timed in further steps that are interleaved with it, so that their sum can be
compared with a step that has no marks inside. The forward pass keeps its graph, as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.analysis.limits import median_ms
from stepscope.analysis.verdict import Verdict
from stepscope.records.schema import Record
from stepscope.report.blocks import Table
from stepscope.studies.base import Bench, Measurement, Result, Study
from stepscope.studies.benchmark.cases import BenchmarkCase, BenchmarkFlags
from stepscope.training.post_mortem import step_post_mortem
from stepscope.training.workload import case_of, workloads


class Benchmark(Study[BenchmarkFlags, BenchmarkCase]):
    name = "benchmark"
    title = "Benchmark"
    question = (
        "How long do the forward pass, the backward pass and the full training step take,"
        " how steady is that, and how far is it from what this machine allows?"
    )
    examples = (
        "stepscope run benchmark --size small medium --context 128 512",
        "stepscope run benchmark --size xl --context 512 --dtype float32 bfloat16",
        "stepscope run benchmark --size small --layers 4 --mode train-step --device cpu",
    )
    flags = BenchmarkFlags
    case = BenchmarkCase

    def cases(self, flags: BenchmarkFlags) -> tuple[BenchmarkCase, ...]:
        return tuple(
            case_of(workload, BenchmarkCase, flags) for workload in workloads(flags, flags.mode)
        )

    def measure(self, case: BenchmarkCase, bench: Bench) -> Measurement:
        from stepscope.training.timed import measure_step

        return measure_step(case, case, bench)

    def verdict(self, records: Sequence[Record]) -> Verdict | None:
        """The longest step of the headline table; where some of its steps were traced, `profile`
        gives the verdict on one of these."""
        from stepscope.views.verdict import step_verdict

        ok = [record for record in records if record.status == "ok"]
        own = self.results([record for record in ok if record.study == self.name])
        shown = self._headline_steps(own)
        traced = {record.case for record in ok if record.study == "profile"}
        if not own or traced & shown or (traced and not shown):
            return None
        results = [one for one in own if not shown or one.record.case in shown]
        longest = max(results, key=lambda r: median_ms(r.record, "step") or 0.0)
        return step_verdict(longest.record, longest.case, None)

    def headline_steps(self, records: Sequence[Record]) -> set[str]:
        """Keys of the steps in the headline table of these records; empty without one."""
        own = [record for record in records if record.study == self.name]
        return self._headline_steps(self.results(own))

    def _headline_steps(self, results: Sequence[Result[BenchmarkCase]]) -> set[str]:
        from stepscope.studies.benchmark.view import headline_rows

        return {one.case for row in headline_rows(results) if (one := row.step_record)}

    def post_mortem(self, case: BenchmarkCase, bench: Bench, message: str) -> dict[str, Any]:
        return step_post_mortem(case.config, bench, message)

    def headline(self, records: Sequence[Record]) -> Table | None:
        from stepscope.studies.benchmark.view import headline_table

        return headline_table(self.results(records))


STUDY = Benchmark()
