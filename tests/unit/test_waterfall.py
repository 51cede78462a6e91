"""Ideal time of a step, and the waterfall from there to the measured time."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from sample_records import environment
from step_records import CEILINGS
from stepscope.analysis.ideal import Rates, ideal_ms, operations
from stepscope.analysis.trace.summarize import summarize
from stepscope.analysis.trace.summary import LedgerLine, Summary, Use
from stepscope.analysis.waterfall import CAUSES, Step, model_waterfall
from stepscope.model.config import ModelConfig, precision
from stepscope.model.cost import flops, parameters
from stepscope.model.sizes import find_size
from stepscope.report.blocks import Finding, Table, Timeline
from stepscope.studies.profile.rows import groups
from stepscope.studies.registry import find_study
from stepscope.views.waterfall import (
    StepWaterfall,
    remedy,
    step_waterfall,
    waterfall_blocks,
)
from study_records import profile_record
from trace_files import training_step
from view_blocks import findings_of

MODEL = ModelConfig(d_model=8, d_ff=16, n_layers=2, n_heads=2, vocab=32, context=4)
FLOAT32, AUTOCAST = precision("float32"), precision("bfloat16")


class TestIdeal:
    def test_matmuls_have_the_flops_that_mfu_counts(self) -> None:
        listed = operations(find_size("xl"), 4, 512, AUTOCAST)
        matmuls = sum(o.instances * o.flops for o in listed if o.kind == "matmul")
        assert matmuls == flops(find_size("xl"), 4, 512).step_linear

    def test_attention_counts_the_recomputed_scores_of_the_backward(self) -> None:
        listed = operations(find_size("xl"), 4, 512, AUTOCAST)
        counted = sum(o.instances * o.flops for o in listed if o.kind == "attention")
        assert counted == 3.5 * flops(find_size("xl"), 4, 512).forward_attention

    def test_fp8_applies_to_the_linear_layers_of_the_blocks(self) -> None:
        listed = operations(find_size("xl"), 4, 512, AUTOCAST)
        usual, fp8 = Rates(1e12, 1e15), Rates(1e12, 1e15, fp8=2e12)
        for operation in listed:
            in_fp8 = operation.name in ("attention projections", "feed-forward")
            assert fp8.ms(operation) == usual.ms(operation) / (2 if in_fp8 else 1)
        assert ideal_ms(listed, fp8)["attention"] == ideal_ms(listed, usual)["attention"]

    def test_each_operation_takes_the_longer_of_compute_and_traffic(self) -> None:
        listed = operations(MODEL, 1, 4, FLOAT32)
        head = next(o for o in listed if (o.name, o.phase) == ("head", "forward"))
        assert (head.flops, head.bytes) == (2 * 4 * 8 * 32, 4 * (4 * 8 + 8 * 32 + 4 * 32))
        assert head.ms(rate=1e3, bandwidth=1e9) == 2048.0
        assert head.ms(rate=1e9, bandwidth=1e3) == 1664.0

    @pytest.mark.parametrize(
        ("name", "each"), [("float32", 28), ("bfloat16", 28), ("bfloat16-pure", 14)]
    )
    def test_bytes_that_the_optimizer_moves_per_parameter(self, name: str, each: int) -> None:
        (update,) = (o for o in operations(MODEL, 1, 4, precision(name)) if o.name == "AdamW")
        assert update.bytes == each * parameters(MODEL).total

    def test_a_pass_reads_and_writes_each_tensor_once(self) -> None:
        listed = {
            (o.name, o.phase): o for o in operations(MODEL, 1, 4, AUTOCAST) if o.kind == "memory"
        }
        row, hidden, logits = 4 * 8, 4 * 16, 4 * 32
        assert listed["SwiGLU", "forward"].bytes == 3 * hidden * 2
        assert listed["SwiGLU", "backward"].bytes == 5 * hidden * 2
        # Stream in and out in float32, branch and normed in bfloat16.
        assert listed["norm and sum", "forward"].bytes == row * (2 * 4 + 2 * 2)
        assert listed["norm and sum", "forward"].instances == 4
        assert listed["loss", "forward"].bytes == logits * 2

    def test_a_mode_has_only_its_phases(self) -> None:
        def phases(mode: str) -> set[str]:
            return {o.phase for o in operations(MODEL, 1, 4, FLOAT32, mode)}

        assert phases("forward") == {"forward"}
        assert phases("forward-backward") == {"forward", "backward"}
        assert phases("train-step") == {"forward", "backward", "optimizer"}


def planted(**lines: float) -> Summary:
    """Return a step whose ledger has these lines: `phase__class=ms`."""
    summary = summarize(training_step().read())
    planted_lines = tuple(
        LedgerLine(phase=phase, kind=kind.replace("_", "/"), ms=ms)
        for name, ms in lines.items()
        for phase, _, kind in [name.partition("__")]
    )
    return replace(summary, lines=planted_lines, steps=(sum(lines.values()),))


class TestWaterfall:
    def test_every_cause_from_known_lines(self) -> None:
        summary = planted(
            forward__matmul=10.0,
            backward__attention=5.0,
            backward__elementwise=4.0,
            loss__reduction=1.0,
            forward__copy_cast=2.0,
            optimizer__optimizer=3.0,
            optimizer__copy_cast=1.0,
            backward__communication=0.5,
            idle__host=6.0,
            __unattributed=0.25,
        )
        step = Step(MODEL, 1, 4, FLOAT32)
        water = model_waterfall(summary, step, Rates(1e9, 1e9))
        ideal = ideal_ms(operations(MODEL, 1, 4, FLOAT32), Rates(1e9, 1e9))
        assert water.ideal == {
            "matmuls": ideal["matmul"],
            "attention": ideal["attention"],
            "other operations": ideal["memory"],
            "AdamW": ideal["optimizer"],
        }
        assert water.parts == pytest.approx(
            {
                "matmuls beyond the limit": 15.0 - ideal["matmul"] - ideal["attention"],
                "memory-bound operations": 5.0 - ideal["memory"],
                "casts and copies": 2.0,
                "device idle": 6.0,
                "optimizer": 4.0 - ideal["optimizer"],
                "recomputation": 0.0,
                "exposed communication": 0.5,
                "not attributed": 0.25,
            }
        )
        slow_matmuls = water.parts["matmuls beyond the limit"]
        assert water.largest() == ("matmuls beyond the limit", slow_matmuls)

    def test_gaps_are_the_unprofiled_time_beyond_the_kernels(self) -> None:
        summary = planted(forward__matmul=10.0, idle__host=6.0)
        step = Step(MODEL, 1, 4, FLOAT32)

        def gaps(measured: float) -> tuple[float, float]:
            parts = model_waterfall(summary, step, Rates(1e12, 1e12), measured).parts
            return parts["device idle"], parts["not attributed"]

        assert gaps(13.0) == pytest.approx((3.0, 0.0))
        assert gaps(9.0) == pytest.approx((0.0, 0.0)), "kernels were slower under the profiler"
        assert gaps(18.0) == pytest.approx((6.0, 2.0), rel=1e-4), "more than the trace shows"

    def test_recomputed_blocks_cost_their_forward(self) -> None:
        summary = summarize(training_step(blocks=2).read())
        once, none = (
            model_waterfall(summary, Step(MODEL, 1, 4, FLOAT32, again=again), Rates(1e15, 1e15))
            for again in (1.0, 0.0)
        )
        # Each of the two blocks: a matmul of 40 µs and an addition of 10 µs.
        assert once.parts["recomputation"] == pytest.approx(0.1)
        for cause, ms in (("matmuls beyond the limit", 0.08), ("memory-bound operations", 0.02)):
            assert none.parts[cause] - once.parts[cause] == pytest.approx(ms)  # type: ignore[index]

    @given(
        times=st.lists(st.floats(0, 1e3), min_size=6, max_size=6),
        measured=st.none() | st.floats(1e-3, 1e4),
        again=st.floats(0, 2),
        rate=st.floats(1e6, 1e15),
    )
    def test_the_parts_add_up(
        self, times: list[float], measured: float | None, again: float, rate: float
    ) -> None:
        names = (
            "forward__matmul",
            "forward__elementwise",
            "backward__copy_cast",
            "optimizer__optimizer",
            "idle__host",
            "__unattributed",
        )
        summary = planted(**dict(zip(names, times, strict=True)))
        water = model_waterfall(
            summary, Step(MODEL, 2, 4, AUTOCAST, again=again), Rates(rate, 1e12), measured
        )
        assert set(water.parts) <= set(CAUSES)
        assert min(water.parts.values()) >= 0
        total = water.ideal_ms + sum(water.parts.values())
        size = max(1.0, water.ideal_ms, *map(abs, water.parts.values()))
        assert total == pytest.approx(water.measured_ms, abs=1e-9 * size)
        assert water.measured_ms == (summary.wall_ms if measured is None else measured)
        assert max(water.parts.values()) <= water.measured_ms * (1 + 1e-9)

    def test_recomputation_does_not_exceed_the_measured_time(self) -> None:
        summary = planted(forward__matmul=0.0, idle__host=1.0)
        water = model_waterfall(summary, Step(MODEL, 2, 4, AUTOCAST, again=2.0), Rates(1e15, 1e12))
        assert water.parts["recomputation"] == 0.0

    def test_no_part_is_longer_than_the_step(self) -> None:
        """Traced while the machine was busy: one part alone took 142 % of the timed step."""
        summary = planted(forward__matmul=3.0, backward__elementwise=14.2, idle__host=6.0)
        water = model_waterfall(summary, Step(MODEL, 1, 4, FLOAT32), Rates(1e12, 1e12), 10.0)
        assert water.parts["memory-bound operations"] == pytest.approx(10 * 14.2 / 17.2, rel=0.01)
        assert water.ideal_ms + sum(water.parts.values()) == pytest.approx(10.0)
        assert water.traced_over_timed == pytest.approx(1.72)
        (traced,) = TestView().waterfalls(step=20.0)
        assert "took 1.72 times as long" in finding_text(traced._replace(water=water))


class TestAttentionsPart:
    STEP = Step(find_size("tiny"), 4, 64, FLOAT32)

    def lost_share(self, *uses: Use, context: int = 64) -> float:
        """Attention's lost share of a matmul time with a negligible ideal."""
        traced = replace(planted(forward__matmul=100.0), uses=uses)
        step = self.STEP._replace(context=context)
        return model_waterfall(traced, step, Rates(1e30, 1e30)).attention_lost_ms / 100.0

    def test_it_is_the_time_of_its_ranges(self) -> None:
        core, linear = (
            Use(
                kernel="k",
                kind="matmul",
                phase="forward",
                module=module,
                role="",
                ms=ms,
                count=1,
                places=1,
            )
            for module, ms in (("block */attention/core/scores", 1.0), ("head", 3.0))
        )
        assert self.lost_share(core, linear) == pytest.approx(0.25)

    def test_without_ranges_it_is_its_share_of_the_flops(self) -> None:
        assert self.lost_share() < 0.1
        assert self.lost_share(context=8192) > 0.5


def replaced(traced: Any, **changes: Any) -> Any:
    return traced._replace(workload=msgspec.structs.replace(traced.workload, **changes))


def _with_attention(traced: Any, share: float) -> Any:
    """Return a waterfall in which attention loses that share of what all matmuls lose."""
    beyond = traced.water.beyond | {"matmuls beyond the limit": 10.0}
    return traced._replace(
        water=traced.water._replace(beyond=beyond, attention_lost_ms=share * 10.0)
    )


class TestView:
    def waterfalls(self, **options: object) -> list:
        row_groups = groups(find_study("profile").results([profile_record(**options)]))
        traced = row_groups[0].fullest()
        return [step_waterfall(traced.record, traced.workload, traced.summary)]

    def test_the_figure_ends_at_the_measured_time(self) -> None:
        (traced,) = self.waterfalls(step=20.0)
        finding, picture, table = waterfall_blocks([traced], "profile")
        assert isinstance(picture, Timeline)
        assert isinstance(table, Table)
        *parts, measured = picture.lanes
        assert measured.label == "measured"
        assert measured.spans[0].end == 20.0
        assert parts[0].label == "ideal: matmuls"
        ends = [lane.spans[0].end for lane in parts]
        assert ends[-1] == pytest.approx(20.0, rel=0.01)
        assert isinstance(finding, Finding)
        assert finding.code == "waterfall.ideal"
        assert finding.values["measured_ms"] == 20.0
        assert finding.records == (traced.record,)
        assert re.fullmatch(
            r"small at context 512 in float32: the ideal time of its operations is [\d.]+ ms,"
            r" [\d.]+ % of the 20\.0 ms that it takes\..*",
            finding.text,
        )
        assert finding.conclusion.startswith(
            f"The largest recoverable part is {finding.values['largest']}: "
        )
        assert " What recovers it: " in finding.conclusion

    def test_the_slowest_is_drawn_next_to_the_fastest_of_the_same_case(self) -> None:
        (slow,), (fast,) = self.waterfalls(step=40.0), self.waterfalls(step=20.0)
        (other,) = self.waterfalls(step=10.0, context=64)

        def drawn(*waterfalls: object) -> list[str]:
            blocks = waterfall_blocks(waterfalls, "profile")  # type: ignore[arg-type]
            ends = [block.lanes[-1] for block in blocks if isinstance(block, Timeline)]
            return [lane.spans[0].label.partition(",")[0] for lane in ends]

        assert drawn(fast, other, slow) == ["40.0 ms", "20.0 ms"]
        assert drawn(other, slow) == ["40.0 ms", "10.0 ms"]

    def test_without_ceilings_there_is_no_waterfall(self) -> None:
        assert self.waterfalls(ceilings=()) == [None]
        assert waterfall_blocks([], "profile") == ()

    def test_a_remedy_is_something_that_the_step_does_not_do_yet(self) -> None:
        (slow,) = self.waterfalls()
        (half,) = self.waterfalls(dtype="bfloat16", ceilings=CEILINGS)
        assert "lower-precision dtype" in remedy("matmuls beyond the limit", slow)
        assert "flash attention" in remedy("matmuls beyond the limit", _with_attention(half, 0.5))
        assert "larger GEMMs" in remedy("matmuls beyond the limit", _with_attention(half, 0.4))
        assert "master weights" in remedy("casts and copies", half)
        assert "CUDA graph" in remedy("device idle", slow)
        short = replaced(slow, context=8)
        assert "stores no logits" in remedy("memory-bound operations", short)
        assert "stores no scores" in remedy("memory-bound operations", replaced(slow, context=4096))
        best = replaced(
            half,
            attention="auto",
            loss="fused",
            fused=True,
            fused_projections=True,
            autotune_gemms=True,
        )
        assert remedy("matmuls beyond the limit", best) == "larger GEMMs: more tokens in a step"
        assert "residual stream" in remedy("memory-bound operations", best)
        assert remedy("device idle", replaced(best, graph=True)) == "a larger batch"
        by_optimizer = {
            name: remedy("optimizer", replaced(half, optimizer=name))
            for name in ("torch", "torch-fused", "stepscope-fused", "stepscope-in-backward")
        }
        assert "in one pass" in by_optimizer["torch"]
        assert by_optimizer["torch-fused"] == by_optimizer["stepscope-fused"]
        assert "optimizer-in-backward" in by_optimizer["torch-fused"]
        assert "larger batch" in by_optimizer["stepscope-in-backward"]
        on_cpu = environment(device_kind="cpu", device_name="Xeon")
        (host,) = self.waterfalls(environment=on_cpu)
        assert remedy("device idle", host) == "a larger batch"
        # Stepscope's kernels run on a GPU.
        for cause in ("memory-bound operations", "optimizer"):
            for optimizer in ("torch", "torch-fused"):
                text = remedy(cause, replaced(host, optimizer=optimizer))  # type: ignore[arg-type]
                assert "stepscope" not in text
                assert "fused kernels" not in text


@given(scale=st.floats(1e-3, 1e3), rate=st.floats(1e6, 1e12), bandwidth=st.floats(1e6, 1e12))
# The difference is small compared with the noise of the step.
@example(scale=2**-8, rate=429845305.0, bandwidth=1021464708.0)
def test_an_ideal_above_the_measured_time_is_explained(
    scale: float, rate: float, bandwidth: float
) -> None:
    summary = planted(
        forward__matmul=10.0 * scale,
        backward__elementwise=4.0 * scale,
        optimizer__optimizer=3.0 * scale,
        idle__host=6.0 * scale,
    )
    water = model_waterfall(summary, Step(MODEL, 1, 4, FLOAT32), Rates(rate, bandwidth))
    assert water.ideal_ms + sum(water.parts.values()) == pytest.approx(water.measured_ms)
    (traced,) = TestView().waterfalls(step=20.0)
    text = finding_text(traced._replace(water=water))
    shares = [float(one) for one in re.findall(r"([\d.e+-]+) %", text)]
    assert sum(shares) <= 101
    ideal = ideal_ms(operations(MODEL, 1, 4, FLOAT32), Rates(rate, bandwidth))
    if sum(ideal.values()) > 1.05 * water.measured_ms:
        assert water.faster


def finding_text(traced: StepWaterfall) -> str:
    (finding,) = findings_of(waterfall_blocks([traced], "x"))
    return finding.sentence
