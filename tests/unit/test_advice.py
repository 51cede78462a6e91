"""Advice: predicted by rules with exact numbers, tried, judged, and corrected by what came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_own_study import QuietBench

from command_line import CommandLine
from own_records import BASE, advice, inspected_record, tried
from sample_records import environment, record
from stepscope.analysis.advice.calibration import Verified, factors, off_by
from stepscope.analysis.advice.changes import WORTH, advise, afterwards, applicable
from stepscope.analysis.advice.facts import Facts, Work
from stepscope.analysis.advice.timeline import wall_ms, with_launch_time
from stepscope.analysis.kernel_names import describe
from stepscope.analysis.trace.summary import decode, encode
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Ceiling, Record
from stepscope.report.blocks import Finding, Table
from stepscope.studies.advice import OF_MODELS, OF_SCRIPTS, Trial
from stepscope.studies.advice.facts_of import facts_of
from stepscope.studies.advice.history import add_to_history, history_file, read_history
from stepscope.studies.advice.view import Tried, first_right, not_tried, trial_blocks
from stepscope.studies.inspected.setting import Setting
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own import OwnCase, OwnFlags

GPU = {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12}


def facts(
    forward: dict[str, float] | None = None, backward: dict[str, float] | None = None,
    optimizer_ms: float = 0.0, launches: tuple[float, float, float] = (0.0, 0.0, 0.0),
    outside: Work | None = None, **changes: Any,
) -> Facts:  # fmt: skip
    """A step of 100 ms on a GPU in which nothing is worth a change."""
    device = (
        {"matmul": 35.0} if forward is None else forward,
        {"matmul": 65.0} if backward is None else backward,
        {"optimizer": optimizer_ms},
    )
    names = ("forward", "backward", "optimizer")
    phases = tuple(
        Work(name=name, classes=classes, launches=count)
        for name, classes, count in zip(names, device, launches, strict=True)
    )
    fields: dict[str, Any] = {
        "on_gpu": True, "step_ms": 100.0, "dtype": "bfloat16", "waits": "end",
        "phases": (outside, *phases) if outside else phases,
        "compiled": True, "fused_optimizer": True, "rates": GPU, "bandwidth": 4e12,
        "parameters": 100_000_000,
    }  # fmt: skip
    return Facts(**fields | changes)


def gains(given_facts: Facts) -> dict[str, float]:
    return {one.code: round(one.gain_ms, 6) for one in advise(given_facts)}


def test_a_tuned_step_gets_no_advice() -> None:
    assert gains(facts()) == {}


def test_formats_gain_by_the_rates_measured_here() -> None:
    step = facts({"matmul": 30.0, "elementwise": 10.0}, {"matmul": 50.0}, dtype="float32")
    # TF32: 80 ms at an eighth. bfloat16: 80 ms at a sixteenth, less 6 B for each of 1e8 weights at
    # 4 TB/s in the forward, and as much for the gradients.
    assert gains(step) == {"tf32": 70.0, "bfloat16": 75.0 - 0.3}
    assert [one.code for one in advise(step)] == ["bfloat16", "tf32"]


def test_a_format_whose_rate_is_lower_or_unknown_or_lacking_is_not_advised() -> None:
    step = facts(dtype="float32", on_gpu=False)
    assert gains(msgspec.structs.replace(step, rates={"float32": 2e9, "bfloat16": 1e9})) == {}
    assert gains(msgspec.structs.replace(step, rates={"float32": 2e9})) == {}
    assert "bfloat16" not in gains(facts(dtype="float32", lacks=("bfloat16",)))


def test_where_the_host_limits_less_work_gains_nothing() -> None:
    step = facts(
        {"matmul": 20.0}, {"matmul": 20.0}, dtype="float32", launches=(500.0, 500.0, 0.0),
        launch_ms=0.1,
    )  # fmt: skip
    assert wall_ms(step) == 100.0
    assert gains(step) == {"cuda-graph": 60.0}
    # Where it needs 30 ms of 40, the rest can be gained; autocast issues more than before.
    faster = gains(msgspec.structs.replace(step, launch_ms=0.03))
    assert faster["tf32"] == 10.0
    assert faster["bfloat16"] == pytest.approx(40.0 - 0.03 * 500 * (1.33 + 1.13))


def test_written_out_attention() -> None:
    written = Work(name="forward", classes={"matmul": 10.0, "softmax": 15.0, "elementwise": 5.0})
    step = facts(
        {"matmul": 30.0, "softmax": 15.0, "elementwise": 5.0}, {"matmul": 50.0},
        attention=(written,), score_bytes=1 << 30, peak_bytes=4 << 30,
    )  # fmt: skip
    (advice,) = advise(step)
    # 30 ms written out, and a kernel that takes 0.7 of its products in place of them.
    assert (advice.code, round(advice.gain_ms, 6)) == ("fused-attention", 30.0 - 7.0)
    assert advice.gain_bytes == 1 << 30
    assert advice.setting == {"attention": "fused"}
    # In float32 the one kernel is slower than the products: 29 ms.
    in_float32 = msgspec.structs.replace(step, dtype="float32", rates={})
    assert gains(in_float32) == {"fused-attention": 1.0}
    in_tf32 = msgspec.structs.replace(step, dtype="tf32", rates=GPU)
    assert "fused-attention" not in gains(in_tf32)
    after = afterwards(in_float32, ["fused-attention"])
    assert after.attention == ()
    assert after.class_ms("attention") == 29.0


def test_the_peak_falls_no_lower_than_that_of_the_update() -> None:
    step = facts(
        {"matmul": 30.0}, {"matmul": 50.0}, dtype="float32", peak_bytes=10 << 30,
        saved_bytes=4 << 30, score_bytes=1 << 30,
    )  # fmt: skip
    (first, _) = advise(step)
    assert (first.code, first.gain_bytes) == ("bfloat16", (1 << 29) - 200_000_000)
    lower = msgspec.structs.replace(step, model_peak_bytes=10 << 30, floor_bytes=(10 << 30) - 1000)
    assert advise(lower)[0].gain_bytes == 1000
    above = msgspec.structs.replace(lower, peak_bytes=11 << 30, floor_bytes=11 << 30)
    assert advise(above)[0].gain_bytes == 0
    # Copies of the weights are more than what is saved: the peak is higher, if the update lets it.
    dense = msgspec.structs.replace(lower, parameters=1 << 30)
    assert advise(dense)[0].gain_bytes == (1 << 29) - (2 << 30)
    # Where the update's peak is a GiB above, that much of it does not show.
    assert advise(msgspec.structs.replace(above, parameters=1 << 30))[0].gain_bytes == -(1 << 29)


def test_an_optimizer_is_held_against_the_bandwidth() -> None:
    step = facts(
        {"matmul": 30.0}, {"matmul": 50.0}, fused_optimizer=False, optimizer_ms=20.0,
        launches=(0.0, 0.0, 2000.0),
    )  # fmt: skip
    ideal = 1.2 * 100_000_000 * 28 / 4e12 * 1e3
    assert gains(step) == {"fused-optimizer": round(20.0 - ideal, 6)}
    # Issued for 40 ms while the device has 20 ms to do, after which a twentieth is left.
    slow_host = msgspec.structs.replace(step, launch_ms=0.02)
    assert gains(slow_host)["fused-optimizer"] == pytest.approx(20.0 - ideal)


def test_launches_and_memory_bound_kernels_call_for_a_compiler() -> None:
    step = facts(
        {"elementwise": 20.0}, {"reduction": 20.0}, compiled=False, launch_ms=0.1,
        launches=(500.0, 500.0, 0.0),
    )  # fmt: skip
    # The host needs 100 ms, of which 40 % are left; the device then has 12 ms to do.
    assert gains(step) == {"compile": 60.0, "cuda-graph": 88.0}
    assert gains(msgspec.structs.replace(step, lacks=("compiler",))) == {}
    accumulating = msgspec.structs.replace(step, micro_batches=2)
    assert gains(accumulating) == {"compile": 60.0}
    # Where the device is the limit, a graph adds nothing to what the compiler does.
    device = msgspec.structs.replace(step, launch_ms=0.001)
    assert gains(device) == {"compile": pytest.approx(28.0)}


def test_habits_of_a_loop() -> None:
    read = facts(
        {"matmul": 40.0}, {"matmul": 40.0}, optimizer_ms=20.0, launches=(40.0, 0.0, 0.0),
        launch_ms=0.5, reads_back=True, cleared_ms=4.0, compiled=False, lacks=("compiler",),
        outside=Work(name="outside", classes={}, launches=20.0),
    )  # fmt: skip
    # The device waits for the host to make the batch, 10 ms, and works for 100 ms.
    assert wall_ms(read) == 110.0
    assert gains(read) == {"no-read-back": 10.0, "set-to-none": 4.0}
    both = msgspec.structs.replace(read, pageable_ms=1.0)
    (first, _) = advise(both)
    assert first.setting == {"read_back": "late", "copies": "pinned"}
    copied = msgspec.structs.replace(both, reads_back=False, waits="copies")
    # What is made for the next batch lies beside the device's work.
    assert wall_ms(copied) == 100.0
    assert [one.code for one in applicable(advise(both), OF_SCRIPTS)] == list(gains(both))
    assert list(applicable(advise(both), OF_MODELS)) == []


def test_batches_made_ahead_help_a_device_that_waits_for_them() -> None:
    data = Work(name="outside", classes={}, host_ms=130.0)
    starved = facts(waits="copies", pageable_ms=1.0, data_ms=130.0, outside=data)
    assert wall_ms(starved) == 130.0
    assert gains(starved)["data-ahead"] == 30.0
    hidden = facts(waits="copies", pageable_ms=1.0, data_ms=60.0,
                   outside=msgspec.structs.replace(data, host_ms=60.0))  # fmt: skip
    assert gains(hidden) == {}
    # In a format in which the device is done sooner, they are what is left to wait for.
    later = afterwards(msgspec.structs.replace(hidden, dtype="float32"), ["bfloat16"])
    assert gains(later)["data-ahead"] > 50.0


def test_a_larger_batch_needs_room() -> None:
    step = facts(
        {"matmul": 40.0}, {"matmul": 40.0}, optimizer_ms=20.0, batch=8, saved_bytes=10 << 30,
        peak_bytes=20 << 30,
    )  # fmt: skip
    roomy = msgspec.structs.replace(step, memory_bytes=80 << 30)
    assert gains(roomy)["larger-batch"] == 10.0
    # Products at half of their rate: what they take beyond it is there once.
    half = msgspec.structs.replace(roomy, flops=40e-3 * GPU["bfloat16"])
    assert gains(half)["larger-batch"] == 10.0 + 20.0
    tight = msgspec.structs.replace(step, memory_bytes=30 << 30)
    assert "larger-batch" not in gains(tight)
    # 180 ms for twice the samples are 90 for as many.
    assert afterwards(roomy, ["larger-batch"]).step_ms == 90.0
    unknown = msgspec.structs.replace(roomy, batch=None)
    (found,) = advise(unknown)
    assert (found.gain_ms, found.setting) == (10.0, {})
    assert "no DataLoader" in found.by_author


def test_the_first_changes_that_were_tried_are_counted() -> None:
    """The step takes 50 ms: a gain of 40 of 100 is predicted as 20 ms, of 10 as 5 ms."""
    own = [advice("one", 40.0), advice("two", 10.0), advice("three", 30.0), advice("four", 40.0)]
    failed = tried(30.0, own[2], status="error", reason="it broke")
    found = [Tried(tried(30.0, own[0])), Tried(tried(30.0, own[1])), Tried(failed)]
    assert first_right(own[:1], found) == (1, 1)
    assert first_right(own, found) == (1, 3)
    assert first_right(own, [*found, Tried(tried(30.0, own[3]))], most=4) == (2, 4)
    assert first_right(own, []) == (0, 0)


def test_advice_without_a_trial_has_a_reason() -> None:
    own = (
        advice("bfloat16"), advice("compile", compile="model"),
        msgspec.structs.replace(advice("fused-loss"), setting={}, by_author="the loss is inside"),
    )  # fmt: skip
    texts = [one.text for one in not_tried(own, [Tried(tried(30.0, own[0]))], OF_SCRIPTS)]
    assert texts == [
        "Not tried: the change compile; no time was left for it.",
        "Not tried: the change fused-loss; the loss is inside.",
    ]


@pytest.mark.parametrize(
    ("kernel", "precision", "expected"),
    [
        ("BF16 tensor cores", "highest", "bfloat16"), ("TF32 tensor cores", "highest", "tf32"),
        ("FP32 cores", "high", "float32"), ("", "high", "tf32"), ("", "highest", "float32"),
    ],
)  # fmt: skip
def test_the_format_of_products_is_that_of_their_kernels(
    kernel: str, precision: str, expected: str
) -> None:
    """A compiled program shows no operators: its weights are in float32, its products are not."""
    setting = Setting(
        models=("Net",), optimizers=(), compiled=True, parameter_formats={"float32": 10},
        matmul_precision=precision, distributed=False,
    )  # fmt: skip
    watched = inspected_record()
    summary = decode(watched.notes["profile"])
    row = msgspec.structs.replace(summary.kernels[0], kind="matmul", unit=kernel, ms=1.0)
    summary = msgspec.structs.replace(summary, on_device=True, kernels=(row,))
    notes = {"profile": encode(summary), "setting": msgspec.json.encode(setting).decode()}
    assert facts_of(msgspec.structs.replace(watched, notes=notes)).dtype == expected


def test_blocks_are_compiled_and_tensors_taken_at_once_and_logits_left_out() -> None:
    plain = facts({"elementwise": 20.0}, {"matmul": 80.0}, compiled=False, blocks=12)
    assert gains(plain) == {"compile": 14.0, "compile-blocks": 12.6}
    looping = facts(optimizer="", loops_over_tensors=True, optimizer_ms=10.0)
    assert gains(looping) == {"foreach-optimizer": 6.0}
    logits = facts(
        {"softmax": 10.0}, {"softmax": 90.0}, loss_ms=10.0, logit_bytes=1 << 30,
        peak_bytes=4 << 30,
    )  # fmt: skip
    (found,) = advise(logits)
    assert (found.code, found.gain_ms, found.gain_bytes) == ("fused-loss", 6.0, 1 << 30)
    assert gains(msgspec.structs.replace(logits, on_gpu=False)) == {"fused-loss": 0.0}


def test_checkpointing_is_advised_where_memory_ends_and_undone_where_it_does_not() -> None:
    full = facts(memory_bytes=10 << 30, peak_bytes=9 << 30, saved_bytes=4 << 30)
    (found,) = advise(full)
    assert (found.code, found.gain_ms, found.gain_bytes) == ("checkpoint", -35.0, 3 << 30)
    assert found.setting == {"checkpoint": "blocks"}
    assert gains(msgspec.structs.replace(full, peak_bytes=7 << 30)) == {}
    again = facts(memory_bytes=10 << 30, peak_bytes=4 << 30, recomputed_bytes=3 << 30)
    (found,) = advise(again)
    assert (found.code, found.gain_ms, found.gain_bytes) == ("no-checkpoint", 35.0, -(3 << 30))
    assert gains(msgspec.structs.replace(again, recomputed_bytes=5 << 30)) == {}


def test_ranks_are_advised_on_buckets_and_state() -> None:
    job = facts(ranks=4, exposed_ms=20.0, messages=8.0, state_bytes=800_000_000,
                optimizer_ms=4.0, peak_bytes=4 << 30)  # fmt: skip
    found = {one.code: one for one in advise(job)}
    # 400 MB of gradients in 8 messages: half as large are half as late.
    assert found["bucket-size"].gain_ms == 10.0
    assert found["bucket-size"].lines == ("DistributedDataParallel(model, bucket_cap_mb=24)",)
    # Three quarters of the state are on other ranks; it costs time, so it must save memory.
    assert "sharded-optimizer" not in found
    hidden = {one.code: one for one in advise(msgspec.structs.replace(job, exposed_ms=0.0))}
    assert hidden["sharded-optimizer"].gain_bytes == 600_000_000
    assert hidden["sharded-optimizer"].gain_ms == 3.0
    many = {one.code: one for one in advise(msgspec.structs.replace(job, messages=400.0))}
    assert many["bucket-size"].title == "larger buckets of gradients"
    assert gains(msgspec.structs.replace(job, ranks=1)) == {}


numbers = st.floats(0, 200)


@given(matmul=numbers, memory=numbers, launches=numbers, optimizer=numbers, waits=st.booleans())
def test_all_advice_is_worth_it_and_ranked(
    matmul: float, memory: float, launches: float, optimizer: float, waits: bool
) -> None:
    step = facts(
        {"matmul": matmul}, {"elementwise": memory}, dtype="float32", optimizer_ms=optimizer,
        launches=(launches, launches, launches), compiled=False, fused_optimizer=False,
        waits="end" if waits else "", reads_back=waits, launch_ms=0.3,
    )  # fmt: skip
    step = msgspec.structs.replace(step, step_ms=max(1e-3, wall_ms(step)))
    found = [one.gain_ms for one in advise(step)]
    assert found == sorted(found, reverse=True)
    assert all(gain >= WORTH * step.step_ms for gain in found)
    assert all(gain <= step.step_ms * (1 + 1e-9) for gain in found)


@given(
    work=st.lists(st.tuples(st.floats(0, 50), st.floats(1, 500)), min_size=3, max_size=3),
    true_ms=st.floats(0.001, 0.2), waits=st.sampled_from(["", "end", "copies"]),
)  # fmt: skip
def test_the_time_of_a_launch_is_found_where_it_shows(
    work: list[tuple[float, float]], true_ms: float, waits: str
) -> None:
    (forward, backward, update) = ({"matmul": ms} for ms, _ in work)
    step = facts(
        forward, backward, update["matmul"], launches=(work[0][1], work[1][1], work[2][1]),
        waits=waits, launch_ms=true_ms,
    )  # fmt: skip
    step = msgspec.structs.replace(step, step_ms=wall_ms(step))
    found = with_launch_time(step, launch_rate=None)
    assert wall_ms(found) == pytest.approx(wall_ms(step), rel=1e-6)
    assert found.launch_ms >= true_ms * (1 - 1e-6)
    limited = wall_ms(step) > 1.05 * step.device_ms
    if limited and not waits:
        assert found.launch_ms == pytest.approx(true_ms, rel=1e-6)


def test_a_host_that_does_not_show_takes_what_such_hosts_take() -> None:
    step = facts(launches=(400.0, 600.0, 0.0))
    found = with_launch_time(step, launch_rate=165e3)
    assert found.launch_ms == pytest.approx(0.02)
    measured = with_launch_time(step, launch_rate=165e3, issue_ms=10.0)
    assert measured.launch_ms == pytest.approx(0.01)


def verified(ratio: float, code: str = "tf32", device: str = "H200") -> Verified:
    return Verified(
        device=device, code=code, predicted_ms=10.0, realised_ms=10 * ratio, step_ms=100.0
    )


def test_past_verifications_correct_predictions() -> None:
    assert factors([], "H200") == {}
    assert factors([verified(0.25)], "H200") == {"tf32": pytest.approx(0.5)}
    assert factors([verified(0.5)] * 5, "H200") == {"tf32": pytest.approx(0.5)}
    assert factors([verified(0.5)] * 5, "H100") == {}
    assert factors([verified(-3.0)] * 9, "H200") == {"tf32": pytest.approx(0.25)}
    step = facts({"matmul": 80.0}, {}, dtype="float32")
    (_, tf32) = advise(step, {"tf32": 0.5})
    assert (tf32.code, tf32.gain_ms) == ("tf32", 35.0)
    assert off_by([verified(0.5), verified(1.0), verified(3.0)]) == pytest.approx(0.05)
    assert off_by([]) is None


def test_the_history_is_kept_and_a_damaged_line_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_history() == ()
    add_to_history([verified(0.5)])
    with history_file().open("a") as file:
        file.write("not json\n")
    add_to_history([verified(2.0)])
    assert [one.realised_ms for one in read_history()] == [5.0, 20.0]


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (tried(30.0), "kept"),
        (tried(50.1), "dropped: no gain shown"),
        (tried(60.0), "dropped: slower"),
        (tried(30.0, losses=(2.0, 1.7, 1.6, 1.5)), "dropped: the loss differs"),
        (tried(90.0, advice("larger-batch", batch="16")), "kept"),
        (tried(30.0, status="oom", reason="full"), "not tried: full"),
    ],
)
def test_verdicts(made: Record, verdict: str) -> None:
    assert Tried(made).verdict == verdict


def test_predicted_and_realised_are_of_the_same_turns() -> None:
    one = Tried(tried(30.0))
    assert one.base_ms == 50.0
    assert one.realised_ms == pytest.approx(20.0)
    # 40 of 100 ms was predicted; the base takes 50 ms in these turns.
    assert one.predicted_ms == pytest.approx(20.0)
    found = one.verified()
    assert found is not None
    assert found.error == pytest.approx(0.0)
    both = Tried(tried(10.0, advice(), advice("compile", 50.0, compile="model")))
    assert both.trial.predicted_ms == pytest.approx(70.0)
    assert both.trial.changed == msgspec.structs.replace(BASE, dtype="bfloat16", compile="model")
    assert both.verified() is None


def test_the_page_says_what_is_proven_and_what_to_write() -> None:
    blocks = trial_blocks(
        [tried(30.0), tried(60.0, advice("compile", 20.0, compile="model")),
         tried(25.0, advice(), advice("fused-optimizer", 5.0, optimizer="adamw-fused"))]
    )  # fmt: skip
    texts = [b.text for b in blocks if isinstance(b, Finding)]
    assert texts[0].startswith("2.00× as fast with the change bfloat16, the change fused-optimizer")
    assert "in the median of 2 changes" in texts[1]
    trials, lines = (b for b in blocks if isinstance(b, Table))
    assert [row[-1] for row in trials.rows] == ["kept", "dropped: slower", "kept"]
    assert [row[0] for row in lines.rows] == ["the change bfloat16", "the change fused-optimizer"]
    assert trial_blocks([tried(60.0)])[0] == Finding(
        text="No change that was tried is worth it here."
    )


@pytest.fixture(scope="module")
def measured() -> Record:
    flags = OwnFlags(
        model="own_models:causal_lm", batch=(2,), warmup=1, steps=2, traced=1,
        optimizer=("adamw-loop",),
    )  # fmt: skip
    (case,) = OWN.cases(flags)
    found = OWN.measure(case.config, QuietBench())
    made = record(
        study="own", case=case.key, config={}, series=found.series, quantities=found.quantities,
        notes=found.notes, environment=environment(device_kind="cpu", device_name="a CPU"),
    )  # fmt: skip
    return msgspec.structs.replace(made, config=case.config)


def test_facts_come_from_a_record(measured: Record) -> None:
    found = facts_of(measured)
    assert not found.on_gpu
    assert found.dtype == "float32"
    assert found.parameters == measured.quantity("parameters")
    assert found.class_ms("matmul") > 0
    assert found.phase_ms("optimizer") > 0
    assert found.launch_ms == found.host_ms == 0
    assert (found.compiled, found.fused_optimizer, found.batch) == (False, False, 2)
    assert set(found.rates) == {"bfloat16"}


@pytest.mark.parametrize(
    ("copies", "waits", "reads_back", "pageable_ms"),
    [
        (("Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"), "end", True, 1),
        (("Memcpy HtoD (Pageable -> Device)",), "copies", False, 1),
        (("Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)"), "", False, 0),
    ],
)
def test_where_a_program_waits_shows_in_its_copies(
    copies: tuple[str, ...], waits: str, reads_back: bool, pageable_ms: float
) -> None:
    watched = inspected_record()
    summary = decode(watched.notes["profile"])
    rows = tuple(
        msgspec.structs.replace(
            summary.kernels[0], kernel=describe(name).short, kind="copy/cast", ms=1.0, count=1.0,
            phase="outside",
        )
        for name in copies
    )  # fmt: skip
    summary = msgspec.structs.replace(summary, on_device=True, kernels=rows, waited_ms=0.1)
    found = facts_of(msgspec.structs.replace(watched, notes={"profile": encode(summary)}))
    assert (found.waits, found.reads_back, found.pageable_ms) == (waits, reads_back, pageable_ms)


def test_records_without_a_trace_give_no_advice(measured: Record) -> None:
    notes = {"trace_missing": "the program runs a profiler of its own"}
    with pytest.raises(StepscopeError, match="a profiler of its own"):
        facts_of(msgspec.structs.replace(measured, notes=notes))


def test_the_command_lists_advice_from_records(
    measured: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from stepscope.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "own.jsonl"
    write_records([measured], file)
    assert main(["advise", str(file), "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert all(one["lines"] for one in told["advice"])
    assert "Advice for own_models:causal_lm" in (tmp_path / "advice.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there is no step to advise on"),
        (("a.jsonl", "--model", "a:b"), "there is no step to advise on"),
        (("a.jsonl", "--verify"), "records cannot be tried again"),
        (("--model", "a:b", "--rounds", "1"), "at least 5 rounds"),
        (("--model", "a.py"), "not of the form"),
    ],
)
def test_bad_words_are_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepscope.cli import main

    assert main(["advise", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_a_compiler_the_rest_is_tried(tmp_path: Path) -> None:
    command = CommandLine(tmp_path)
    # No program is found, and so no compiler.
    command.environment["PATH"] = str(tmp_path)
    command.know_ceilings(
        Ceiling(name="memory.copy", value=1e15, unit="B/s", source="measured", detail="planted")
    )
    model = ("--model", "own_models:conv_net", "--optimizer", "adamw-loop", "--batch", "1")
    effort = ("--verify", "--rounds", "5", "--loss-steps", "4", "--device", "cpu", "--json")
    done = command("advise", *model, *effort, timeout=160)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["code"] for one in told["advice"]] == ["fused-optimizer"]
    (tried_once,) = told["tried"]
    assert tried_once["change"] == "fused-optimizer"
    assert tried_once["predicted_ms"] > 0
    assert not tried_once["verdict"].startswith("not tried")
    assert "Predicted against realised" in (command.out / "advice.html").read_text()
    history = (tmp_path / "cache" / "stepscope" / "advice.jsonl").read_text()
    assert len(history.splitlines()) == 1


def test_a_trial_runs_both_steps_on_the_same_data() -> None:
    from stepscope.studies.advice.measuring import measure_trial

    base = OwnCase(
        model="own_models:conv_net", batch=2, dtype="float32", compile="no", optimizer="adamw-loop"
    )
    change = advice("fused-optimizer", 1.0, optimizer="adamw-fused")
    trial = Trial(base=base, advice=(change,), step_ms=10.0, rounds=5, loss_steps=4)
    found = measure_trial(trial, QuietBench())
    losses = {s.name: s.values for s in found.series if s.name.startswith("loss.")}
    assert losses["loss.base"] == pytest.approx(losses["loss.changed"], rel=1e-4)
    assert len(losses["loss.base"]) == 4
    assert [len(s.values) for s in found.series if s.name == "changed"] == [5]
