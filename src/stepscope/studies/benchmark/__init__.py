"""Time of forward pass, backward pass and full training step, and its distance from the ceiling.

    stepscope run benchmark --size xl --context 512 --dtype bfloat16

Each mode is a separate case. The series `step` is the mode timed as one; if a mode has several
phases, they are timed in further steps that are interleaved with it, so that their sum can be
compared with a step that has no marks inside. The forward pass keeps its graph, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stepscope.analysis.limits import median_ms
from stepscope.analysis.verdict import Verdict
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Table
from stepscope.studies.base import Bench, Measurement, Result, Study
from stepscope.studies.benchmark.cases import BenchmarkCase, BenchmarkFlags
from stepscope.studies.training.post_mortem import step_post_mortem
from stepscope.studies.training.workload import case_of, workloads


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
            case_of(
                workload,
                BenchmarkCase,
                warmup=flags.warmup,
                steps=flags.steps,
                min_seconds=flags.min_seconds,
                energy=flags.energy or msgspec.UNSET,
            )
            for workload in workloads(flags, flags.mode)
        )

    def measure(self, case: BenchmarkCase, bench: Bench) -> Measurement:
        from stepscope.studies.training.timed import measure_step

        return measure_step(case, case, bench, energy=case.energy is True)

    def verdict(self, records: Sequence[Record]) -> Verdict | None:
        """The longest step of the headline table; where some of its steps were traced, `profile`
        gives the verdict on one of these."""
        from stepscope.studies.views.verdict import step_verdict

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

    def presets(self, environment: Environment) -> Mapping[str, Sequence[BenchmarkFlags]]:
        course = ("small", "medium", "large")
        sizes_2025 = (*course, "xl", "2.7b")
        contexts = (128, 256, 512, 1024)
        both = ("float32", "bfloat16")
        if environment.device_kind == "cpu":
            tiny = BenchmarkFlags(
                size=("tiny",), context=(32, 128), batch=(2,), steps=5, min_seconds=0.2, warmup=1
            )
            quick: tuple[BenchmarkFlags, ...] = (
                tiny,
                msgspec.structs.replace(tiny, size=("mini",), context=(128,)),
            )
        else:
            quick = (BenchmarkFlags(size=course, context=(128, 512), dtype=both),)
        seeds = BenchmarkFlags(size=sizes_2025, context=contexts, dtype=both)
        course_2026 = BenchmarkFlags(
            size=(*course, "xl", "10b"), table="2026", context=contexts, dtype=both
        )
        compiled = BenchmarkFlags(
            size=("small", "xl", "2.7b"),
            dtype=("bfloat16",),
            attention=("sdpa",),
            compile=("block",),
            optimizer=("torch-fused",),
        )
        dtypes = BenchmarkFlags(
            size=course, dtype=("tf32", "float16", "bfloat16-pure"), attention=("reference", "sdpa")
        )
        # In addition to float32 and bfloat16 autocast of the published row.
        other_dtypes = BenchmarkFlags(
            size=sizes_2025,
            dtype=("tf32", "bfloat16-pure"),
            mode=("train-step",),
            warmup=3,
            steps=8,
        )
        return {
            "quick": quick,
            "seeds": (seeds,),
            "cs336-2026": (course_2026,),
            # The published row is 512; fewer samples around it show the trend.
            "h200": (
                BenchmarkFlags(size=sizes_2025, context=(512,), dtype=both),
                compiled,
                other_dtypes,
                BenchmarkFlags(
                    size=sizes_2025, context=(128, 256, 1024), dtype=both, warmup=3, steps=8
                ),
            ),
            "full": (seeds, course_2026, compiled, dtypes),
        }


STUDY = Benchmark()
