"""Rules of advice: each change on constructed steps, with the expected numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.advisor.advise.cases import OF_MODELS, OF_SCRIPTS
from stepscope.analysis.advice.changes import WORTH, advise, afterwards, applicable
from stepscope.analysis.advice.facts import Facts, PhaseWork, Runs
from stepscope.analysis.advice.timeline import wall_ms, with_launch_time
from stepscope.records.plans import (
    AS_IT_IS,
    Application,
    BlockGroup,
    BlockSettings,
    Frontier,
    Plan,
    PlannedStep,
)

GPU = {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12}


def facts(
    forward: dict[str, float] | None = None,
    backward: dict[str, float] | None = None,
    optimizer_ms: float = 0.0,
    launches: tuple[float, float, float] = (0.0, 0.0, 0.0),
    outside: PhaseWork | None = None,
    **changes: Any,
) -> Facts:
    """Return a step of 100 ms on a GPU for which no change is worth it."""
    device = (
        {"matmul": 35.0} if forward is None else forward,
        {"matmul": 65.0} if backward is None else backward,
        {"optimizer": optimizer_ms},
    )
    names = ("forward", "backward", "optimizer")
    phases = tuple(
        PhaseWork(name=name, classes=classes, launches=count)
        for name, classes, count in zip(names, device, launches, strict=True)
    )
    fields: dict[str, Any] = {
        "on_gpu": True,
        "step_ms": 100.0,
        "dtype": "bfloat16",
        "waits": "end",
        "phases": (outside, *phases) if outside else phases,
        "compiled": True,
        "fused_optimizer": True,
        "rates": GPU,
        "bandwidth": 4e12,
        "parameters": 100_000_000,
    }
    return Facts(**fields | changes)


def gains(given_facts: Facts) -> dict[str, float]:
    return {one.code: round(one.gain_ms, 6) for one in advise(given_facts)}


def test_a_tuned_step_gets_no_advice() -> None:
    assert gains(facts()) == {}


def test_dtypes_gain_by_the_measured_rates() -> None:
    step = facts({"matmul": 30.0, "elementwise": 10.0}, {"matmul": 50.0}, dtype="float32")
    # TF32: 80 ms at an eighth. bfloat16: 80 ms at a sixteenth, less 6 B for each of 1e8 weights at
    # 4 TB/s in the forward, and as much for the gradients.
    assert gains(step) == {"tf32": 70.0, "bfloat16": 75.0 - 0.3}
    assert {one.code for one in advise(step)} == {"bfloat16", "tf32"}


def test_fused_attention_leaves_the_fp32_cores_with_bfloat16_only() -> None:
    step = facts({"matmul": 60.0, "attention": 40.0}, {}, dtype="float32", parameters=0)
    by_code = gains(step)
    assert by_code["tf32"] == 60 * (1 - 1 / 8)
    assert by_code["bfloat16"] == pytest.approx(60 * (1 - 1 / 16) + 40 * (1 - 0.7 / 2.9 / 16))


def test_a_dtype_with_a_lower_or_unknown_rate_is_not_advised() -> None:
    step = facts(dtype="float32", on_gpu=False)
    assert gains(msgspec.structs.replace(step, rates={"float32": 2e9, "bfloat16": 1e9})) == {}
    assert gains(msgspec.structs.replace(step, rates={"float32": 2e9})) == {}
    assert "bfloat16" not in gains(facts(dtype="float32", lacks=("bfloat16",)))


def test_float32_is_advised_instead_of_a_slow_autocast_dtype() -> None:
    old = {"float32": 10e12, "bfloat16": 2e12}
    assert gains(facts(autocast=True, rates=old)) == {"float32": 80.0}
    assert gains(facts(autocast=False, rates=old)) == {}, "weights are bfloat16 too"
    assert gains(facts(autocast=True)) == {}, "it is faster here"
    assert gains(facts(autocast=True, rates={"bfloat16": 2e12})) == {}
    step = afterwards(facts(autocast=True, rates=old), ["float32"])
    assert (step.dtype, step.autocast, gains(step)) == ("float32", False, {})


def test_less_device_work_gains_nothing_in_a_host_bound_step() -> None:
    step = facts(
        {"matmul": 20.0},
        {"matmul": 20.0},
        dtype="float32",
        launches=(500.0, 500.0, 0.0),
        launch_ms=0.1,
    )
    assert wall_ms(step) == 100.0
    assert gains(step) == {"cuda-graph": 60.0, "train-step": 60.0}
    # If the host needs 30 ms of 40, the rest can be gained; autocast launches more kernels.
    faster = gains(msgspec.structs.replace(step, launch_ms=0.03))
    assert faster["tf32"] == 10.0
    assert faster["bfloat16"] == pytest.approx(40.0 - 0.03 * 500 * (1.33 + 1.13))


def test_naive_attention() -> None:
    naive = PhaseWork(name="forward", classes={"matmul": 10.0, "softmax": 15.0, "elementwise": 5.0})
    step = facts(
        {"matmul": 30.0, "softmax": 15.0, "elementwise": 5.0},
        {"matmul": 50.0},
        attention=(naive,),
        score_bytes=1 << 30,
        peak_bytes=4 << 30,
    )
    (advice,) = advise(step)
    # 30 ms of naive attention, replaced by a kernel that takes 0.7 times its matmuls.
    assert (advice.code, round(advice.gain_ms, 6)) == ("fused-attention", 30.0 - 7.0)
    assert advice.gain_bytes == 1 << 30
    assert advice.setting == {"attention": "fused"}
    # In float32 the fused kernel is slower than the matmuls: 29 ms.
    in_float32 = msgspec.structs.replace(step, dtype="float32", rates={})
    assert gains(in_float32) == {"fused-attention": 1.0}
    # It is listed for its memory even where it costs time, with the dtype in which it gains.
    in_tf32 = msgspec.structs.replace(step, dtype="tf32", rates=GPU)
    listed = next(one for one in advise(in_tf32) if one.code == "fused-attention")
    assert listed.gain_ms < 0
    assert (listed.gain_bytes, listed.ranked) == (1 << 30, False)
    assert (listed.best_after, listed.gain_after_ms) == ("bfloat16 autocast", pytest.approx(21.5))
    after = afterwards(in_float32, ["fused-attention"])
    assert after.attention == ()
    assert after.class_ms("attention") == 29.0


def test_a_change_listed_only_for_memory_says_so() -> None:
    step = facts(loss_ms=1.0, logit_bytes=1 << 30, peak_bytes=4 << 30)
    (alone,) = advise(step)
    assert alone.code == "fused-loss"
    assert alone.gain_ms < WORTH * step.step_ms
    assert alone.why.endswith("Listed only for the memory it saves")
    (faster,) = advise(msgspec.structs.replace(step, loss_ms=10.0))
    assert "Listed only" not in faster.why


def test_the_update_on_a_cpu_includes_time_between_operators() -> None:
    step = facts({"matmul": 30.0}, {"matmul": 50.0}, fused_optimizer=False, optimizer_ms=20.0)
    (on_gpu,) = advise(step)
    assert "takes 20 ms on the device; moving" in on_gpu.why
    between = PhaseWork(name="optimizer", classes={"optimizer": 5.0, "between": 15.0})
    host = msgspec.structs.replace(step, on_gpu=False, phases=(*step.phases[:2], between))
    (on_cpu,) = advise(host)
    assert "takes 20 ms, 15 ms of it between operators; moving" in on_cpu.why
    by_tensor = msgspec.structs.replace(host, optimizer="", loops_over_tensors=True)
    (foreach,) = advise(by_tensor)
    assert "20 ms, 15 ms of it between operators, one tensor at a time" in foreach.why


def test_the_peak_does_not_fall_below_that_of_the_update() -> None:
    def freed(step: Facts) -> int:
        return next(one.gain_bytes for one in advise(step) if one.code == "bfloat16")

    step = facts(
        {"matmul": 30.0},
        {"matmul": 50.0},
        dtype="float32",
        peak_bytes=10 << 30,
        saved_bytes=4 << 30,
        score_bytes=1 << 30,
    )
    assert freed(step) == (1 << 29) - 200_000_000
    lower = msgspec.structs.replace(step, model_peak_bytes=10 << 30, floor_bytes=(10 << 30) - 1000)
    assert freed(lower) == 1000
    above = msgspec.structs.replace(lower, peak_bytes=11 << 30, floor_bytes=11 << 30)
    assert freed(above) == 0
    # Copies of the weights exceed what is saved: the peak rises, unless the update hides it.
    dense = msgspec.structs.replace(lower, parameters=1 << 30)
    assert freed(dense) == (1 << 29) - (2 << 30)
    # If the update's peak is a GiB higher, that much of the rise does not show.
    assert freed(msgspec.structs.replace(above, parameters=1 << 30)) == -(1 << 29)


def test_an_optimizer_is_compared_with_the_bandwidth() -> None:
    step = facts(
        {"matmul": 30.0},
        {"matmul": 50.0},
        fused_optimizer=False,
        optimizer_ms=20.0,
        launches=(0.0, 0.0, 2000.0),
    )
    ideal = 1.2 * 100_000_000 * 28 / 4e12 * 1e3
    assert gains(step) == {"fused-optimizer": round(20.0 - ideal, 6)}
    # 40 ms to launch 20 ms of device work; fused, a twentieth of the launches remain.
    slow_host = msgspec.structs.replace(step, launch_ms=0.02)
    assert gains(slow_host)["fused-optimizer"] == pytest.approx(20.0 - ideal)


def test_launches_and_memory_bound_kernels_call_for_a_compiler() -> None:
    step = facts(
        {"elementwise": 20.0},
        {"reduction": 20.0},
        compiled=False,
        launch_ms=0.1,
        launches=(500.0, 500.0, 0.0),
    )
    # The host needs 100 ms, of which 40 % remain; the device then works for 12 ms.
    assert gains(step) == {"compile": 60.0, "cuda-graph": 88.0, "train-step": 60.0}
    assert gains(msgspec.structs.replace(step, lacks=("compiler",))) == {"train-step": 60.0}
    accumulating = msgspec.structs.replace(step, micro_batches=2)
    assert gains(accumulating) == {"compile": 60.0, "train-step": 60.0}
    # In a device-bound step a graph adds nothing to the compiler's gain.
    device = msgspec.structs.replace(step, launch_ms=0.001)
    assert gains(device) == {"compile": pytest.approx(28.0)}


def test_changes_of_the_training_loop() -> None:
    read = facts(
        {"matmul": 40.0},
        {"matmul": 40.0},
        optimizer_ms=20.0,
        launches=(40.0, 0.0, 0.0),
        launch_ms=0.5,
        reads_back=True,
        cleared_ms=4.0,
        compiled=False,
        lacks=("compiler",),
        outside=PhaseWork(name="outside", classes={}, launches=20.0),
    )
    # The device waits 10 ms for the host to prepare the batch, and works for 100 ms.
    assert wall_ms(read) == 110.0
    assert gains(read) == {"no-read-back": 10.0, "set-to-none": 4.0}
    both = msgspec.structs.replace(read, pageable_ms=1.0)
    (first, _) = advise(both)
    assert first.setting == {"read_back": "late", "copies": "pinned"}
    copied = msgspec.structs.replace(both, reads_back=False, waits="copies")
    # The next batch is prepared while the device works.
    assert wall_ms(copied) == 100.0
    assert [one.code for one in applicable(advise(both), OF_SCRIPTS)] == list(gains(both))
    assert list(applicable(advise(both), OF_MODELS)) == []


def test_prefetched_batches_help_a_device_that_waits_for_them() -> None:
    data = PhaseWork(name="outside", classes={}, host_ms=130.0)
    starved = facts(waits="copies", pageable_ms=1.0, data_ms=130.0, outside=data)
    assert wall_ms(starved) == 130.0
    assert gains(starved)["data-ahead"] == 30.0
    hidden = facts(
        waits="copies",
        pageable_ms=1.0,
        data_ms=60.0,
        outside=msgspec.structs.replace(data, host_ms=60.0),
    )
    assert gains(hidden) == {}
    # With a dtype in which the device finishes sooner, it waits for the batches.
    later = afterwards(msgspec.structs.replace(hidden, dtype="float32"), ["bfloat16"])
    assert gains(later)["data-ahead"] > 50.0


def test_a_larger_batch_needs_free_memory() -> None:
    step = facts(
        {"matmul": 40.0},
        {"matmul": 40.0},
        optimizer_ms=20.0,
        batch=8,
        saved_bytes=10 << 30,
        peak_bytes=20 << 30,
    )
    with_memory = msgspec.structs.replace(step, memory_bytes=80 << 30)
    assert gains(with_memory)["larger-batch"] == 10.0
    # Matmuls at half of their rate: the time beyond it does not double.
    half = msgspec.structs.replace(with_memory, flops=40e-3 * GPU["bfloat16"])
    assert gains(half)["larger-batch"] == 10.0 + 20.0
    tight = msgspec.structs.replace(step, memory_bytes=30 << 30)
    assert "larger-batch" not in gains(tight)
    # 180 ms for twice the samples are 90 ms for the same number.
    assert afterwards(with_memory, ["larger-batch"]).step_ms == 90.0
    unknown = msgspec.structs.replace(with_memory, batch=None)
    (change,) = advise(unknown)
    assert (change.gain_ms, change.setting) == (10.0, {})
    assert "no DataLoader" in change.by_author


def test_block_compilation_foreach_optimizer_and_fused_loss() -> None:
    plain = facts({"elementwise": 20.0}, {"matmul": 80.0}, compiled=False, blocks=12)
    assert gains(plain) == {"compile": 14.0, "compile-blocks": 12.6}
    looping = facts(optimizer="", loops_over_tensors=True, optimizer_ms=10.0)
    assert gains(looping) == {"foreach-optimizer": 6.0}
    logits = facts(
        {"softmax": 10.0}, {"softmax": 90.0}, loss_ms=10.0, logit_bytes=1 << 30, peak_bytes=4 << 30
    )
    (change,) = advise(logits)
    assert (change.code, change.gain_ms, change.gain_bytes) == ("fused-loss", 6.0, 1 << 30)
    assert gains(msgspec.structs.replace(logits, on_gpu=False)) == {"fused-loss": 0.0}


def test_checkpointing_is_advised_only_when_memory_is_scarce() -> None:
    full = facts(memory_bytes=10 << 30, peak_bytes=9 << 30, saved_bytes=4 << 30)
    (change,) = advise(full)
    assert (change.code, change.gain_ms, change.gain_bytes) == ("checkpoint", -35.0, 3 << 30)
    assert change.setting == {"checkpoint": "blocks"}
    assert gains(msgspec.structs.replace(full, peak_bytes=7 << 30)) == {}
    recomputing = facts(memory_bytes=10 << 30, peak_bytes=4 << 30, recomputed_bytes=3 << 30)
    (change,) = advise(recomputing)
    assert (change.code, change.gain_ms, change.gain_bytes) == ("no-checkpoint", 35.0, -(3 << 30))
    assert gains(msgspec.structs.replace(recomputing, recomputed_bytes=5 << 30)) == {}


def test_advice_for_several_ranks() -> None:
    job = facts(
        ranks=4,
        exposed_ms=20.0,
        messages=8.0,
        state_bytes=800_000_000,
        optimizer_ms=4.0,
        peak_bytes=4 << 30,
    )
    by_code = {one.code: one for one in advise(job)}
    # 400 MB of gradients in 8 messages; of 64, the last one ends an eighth as late.
    assert by_code["bucket-size"].gain_ms > 15.0
    assert by_code["bucket-size"].lines == ("DistributedDataParallel(model, bucket_cap_mb=10)",)
    # Three quarters of the state move to other ranks; that costs time, so it must save memory.
    assert "sharded-optimizer" not in by_code
    hidden = {one.code: one for one in advise(msgspec.structs.replace(job, exposed_ms=0.0))}
    assert hidden["sharded-optimizer"].gain_bytes == 600_000_000
    assert hidden["sharded-optimizer"].gain_ms == 3.0
    assert gains(msgspec.structs.replace(job, ranks=1)) == {}


numbers = st.floats(0, 200)


@given(matmul=numbers, memory=numbers, launches=numbers, optimizer=numbers, waits=st.booleans())
def test_all_advice_is_worth_it_and_ranked(
    matmul: float, memory: float, launches: float, optimizer: float, waits: bool
) -> None:
    step = facts(
        {"matmul": matmul},
        {"elementwise": memory},
        dtype="float32",
        optimizer_ms=optimizer,
        launches=(launches, launches, launches),
        compiled=False,
        fused_optimizer=False,
        waits="end" if waits else "",
        reads_back=waits,
        launch_ms=0.3,
    )
    step = msgspec.structs.replace(step, step_ms=max(1e-3, wall_ms(step)))
    changes = advise(step)
    ranked = [one.low_ms for one in changes if one.ranked]
    assert ranked == sorted(ranked, reverse=True)  # type: ignore[type-var]
    assert [one.ranked for one in changes] == sorted((one.ranked for one in changes), reverse=True)
    gains_ms = [one.gain_ms for one in changes]
    assert all(gain >= WORTH * step.step_ms for gain in gains_ms)
    assert all(gain <= step.step_ms * (1 + 1e-9) for gain in gains_ms)


@given(
    work=st.lists(st.tuples(st.floats(0, 50), st.floats(1, 500)), min_size=3, max_size=3),
    true_ms=st.floats(0.001, 0.2),
    waits=st.sampled_from(["", "end", "copies"]),
)
@example(work=[(0.0, 122.0), (0.0, 500.0), (2.5, 403.0)], true_ms=0.001953125, waits="")
def test_the_launch_time_is_recovered_from_a_host_bound_step(
    work: list[tuple[float, float]], true_ms: float, waits: str
) -> None:
    (forward, backward, update) = ({"matmul": ms} for ms, _ in work)
    step = facts(
        forward,
        backward,
        update["matmul"],
        launches=(work[0][1], work[1][1], work[2][1]),
        waits=waits,
        launch_ms=true_ms,
    )
    step = msgspec.structs.replace(step, step_ms=wall_ms(step))
    fitted = with_launch_time(step, launch_rate=None)
    assert wall_ms(fitted) == pytest.approx(wall_ms(step), rel=1e-6)
    assert fitted.launch_ms >= true_ms * (1 - 1e-6)
    limited = wall_ms(step) > 1.05 * step.device_ms
    if limited and not waits:
        assert fitted.launch_ms == pytest.approx(true_ms, rel=1e-6)


def test_a_hidden_launch_time_is_estimated_from_the_launch_rate() -> None:
    step = facts(launches=(400.0, 600.0, 0.0))
    fitted = with_launch_time(step, launch_rate=165e3)
    assert fitted.launch_ms == pytest.approx(0.02)
    measured = with_launch_time(step, launch_rate=165e3, issue_ms=10.0)
    assert measured.launch_ms == pytest.approx(0.01)


def test_the_host_runs_ahead_no_further_than_the_launch_queue() -> None:
    """An update of many small kernels after a long backward: when the device reaches it, the host
    has launched one queue of it, and the rest is launched one by one."""
    step = facts(
        {"matmul": 40.0},
        {"matmul": 60.0},
        launches=(512.0, 512.0, 2048.0),
        launch_ms=0.01,
        dtype="float32",
    )
    assert wall_ms(step) == pytest.approx(100 + 1024 * 0.01)
    # Nothing is read back: the host is not further ahead either.
    assert wall_ms(msgspec.structs.replace(step, waits="")) == pytest.approx(110.24)
    fitted = with_launch_time(msgspec.structs.replace(step, step_ms=110.24), launch_rate=None)
    assert fitted.launch_ms == pytest.approx(0.01, rel=1e-6)
    # At an eighth the device waits for the host, which takes 30.72 ms in total.
    assert gains(fitted)["tf32"] == pytest.approx(110.24 - 30.72, rel=1e-6)


def test_a_compiler_gains_from_runs_of_kernels_but_not_from_single_ones() -> None:
    def step(runs: Runs | None) -> Facts:
        plain = facts(
            {"matmul": 20.0, "elementwise": 30.0},
            {"matmul": 50.0},
            compiled=False,
            launches=(100.0, 0.0, 0.0),
        )
        return plain.with_work(lambda work: msgspec.structs.replace(work, runs=runs), ("forward",))

    chains = Runs(kernels=0.8, runs=0.1, longest=0.25)
    assert gains(step(None))["compile"] == pytest.approx(0.7 * 30)
    assert gains(step(chains))["compile"] == pytest.approx((1 - 1.1 * 0.25) * 30)
    assert afterwards(step(chains), ["compile"]).phases[0].launches == pytest.approx(44.0)
    alone = Runs(kernels=0.5, runs=0.5, longest=1.0)
    assert "compile" not in gains(step(alone))
    assert afterwards(step(alone), ["compile"]).phases[0].launches == 100.0


def planned_step(what: str, size: int, *peaks: int) -> PlannedStep:
    """Plans with these peaks in GiB, each 2 % slower than the one before; the last one is
    chosen."""
    plans = tuple(
        Plan(
            peak=peak << 30,
            seconds=0.1 * (1 + 0.02 * index),
            again_s=0.002 * index,
            exposed_s=0.0,
            groups=(
                BlockGroup(
                    number=4,
                    words="recompute" if index else AS_IT_IS,
                    saved=1,
                    to_host=0,
                    again_s=0.0005 * index,
                ),
            ),
        )
        for index, peak in enumerate(peaks)
    )
    changed = {f"blocks.{i}": 0 for i in range(4)} if len(peaks) > 1 else {}
    return PlannedStep(
        what=what,  # type: ignore[arg-type]
        size=size,
        frontier=Frontier(plans=plans, device="GPU"),
        plan=plans[-1] if plans else None,
        apply=Application(settings=(BlockSettings(recompute=True),), blocks=changed),
    )


def test_a_plan_replaces_checkpointing_where_memory_is_scarce() -> None:
    scarce = facts(
        memory_bytes=100 << 30, peak_bytes=95 << 30, saved_bytes=60 << 30,
        plans=(planned_step("step", 8, 95, 80),),
    )  # fmt: skip
    by_code = {one.code: one for one in advise(scarce)}
    plan = by_code["memory-plan"]
    assert (plan.gain_ms, plan.gain_bytes) == (pytest.approx(-2.0), 15 << 30)
    assert "checkpoint" not in by_code
    assert "checkpoint" in plan.excludes
    assert msgspec.json.decode(plan.setting["memory"], type=Application).blocks.keys() == {
        "blocks.0", "blocks.1", "blocks.2", "blocks.3"
    }  # fmt: skip
    free = msgspec.structs.replace(scarce, memory_bytes=200 << 30)
    assert "memory-plan" not in {one.code for one in advise(free)}


def test_a_larger_batch_that_needs_a_plan_pays_for_its_recomputation() -> None:
    step = facts(
        launches=(600.0, 900.0, 900.0), launch_ms=0.05, batch=8,
        memory_bytes=100 << 30, peak_bytes=70 << 30, saved_bytes=50 << 30,
    )  # fmt: skip
    assert "larger-batch" not in gains(step)
    fits = msgspec.structs.replace(step, plans=(planned_step("batch", 16, 120, 85),))
    slower = msgspec.structs.replace(step, plans=(planned_step("batch", 16, 120, 110, 100, 85),))
    (one,) = (advice for advice in advise(fits) if advice.code == "larger-batch")
    (other,) = (advice for advice in advise(slower) if advice.code == "larger-batch")
    assert one.setting.keys() == {"batch", "memory"}
    assert (one.setting["batch"], one.gain_bytes) == ("16", -(15 << 30))
    assert "with a plan" in one.title
    # Of both samples: 4 ms more for two.
    assert one.gain_ms - other.gain_ms == pytest.approx(2.0)
    none = msgspec.structs.replace(planned_step("batch", 16, 120), plan=None, apply=None)
    assert "larger-batch" not in gains(msgspec.structs.replace(step, plans=(none,)))


def test_the_largest_batch_that_fits_is_tried_where_twice_the_batch_does_not_fit() -> None:
    step = facts(
        launches=(600.0, 900.0, 900.0), launch_ms=0.05, batch=8,
        memory_bytes=100 << 30, peak_bytes=70 << 30, saved_bytes=50 << 30,
    )  # fmt: skip
    none = msgspec.structs.replace(planned_step("batch", 16, 120), plan=None, apply=None)

    def with_largest(most: int) -> Facts:
        return msgspec.structs.replace(step, plans=(msgspec.structs.replace(none, largest=most),))

    (change,) = (one for one in advise(with_largest(12)) if one.code == "larger-batch")
    assert change.setting == {"batch": "12"}
    assert change.gain_bytes == -(25 << 30)
    assert "batch 12" in change.title
    # A launch-bound step takes as long for half as many samples again.
    assert 0 < change.gain_ms < 40.0
    assert "larger-batch" not in gains(with_largest(8))
    # Rows of the model's input are no samples of the DataLoader.
    assert "larger-batch" not in gains(msgspec.structs.replace(with_largest(12), batch=4))
