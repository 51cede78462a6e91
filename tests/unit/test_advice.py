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
from own_records import BASE, advice, tried
from sample_records import environment, record
from stepscope.analysis.advice.calibration import Verified, factors, off_by
from stepscope.analysis.advice.changes import WORTH, advise, applicable
from stepscope.analysis.advice.facts import Facts
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Ceiling, Record
from stepscope.report.blocks import Finding, Table
from stepscope.studies.advice import OF_MODELS, OF_SCRIPTS, Trial
from stepscope.studies.advice.facts_of import facts_of
from stepscope.studies.advice.history import add_to_history, history_file, read_history
from stepscope.studies.advice.view import Tried, trial_blocks
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own import OwnCase, OwnFlags

GPU = {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12}


def facts(**changes: Any) -> Facts:
    """A step of 100 ms on a GPU in which nothing is worth a change."""
    fields: dict[str, Any] = {
        "on_gpu": True, "step_ms": 100.0, "dtype": "bfloat16", "classes": {"matmul": 95.0},
        "compiled": True, "fused_optimizer": True, "rates": GPU, "bandwidth": 4e12,
        "parameters": 100_000_000,
    }  # fmt: skip
    return Facts(**fields | changes)


def gains(given_facts: Facts) -> dict[str, float]:
    return {one.code: round(one.gain_ms, 6) for one in advise(given_facts)}


def test_a_tuned_step_gets_no_advice() -> None:
    assert gains(facts()) == {}


def test_formats_gain_by_the_rates_measured_here() -> None:
    step = facts(dtype="float32", classes={"matmul": 80.0, "elementwise": 10.0})
    # TF32: 80 ms at an eighth. bfloat16: 80 ms at a sixteenth, 35 % of 10 ms, less 6 B for each
    # of 1e8 weights at 4 TB/s.
    assert gains(step) == {"tf32": 70.0, "bfloat16": 75.0 + 3.5 - 0.15}
    assert [one.code for one in advise(step)] == ["bfloat16", "tf32"]


def test_a_format_whose_rate_is_lower_or_unknown_or_lacking_is_not_advised() -> None:
    step = facts(dtype="float32", on_gpu=False, classes={"matmul": 80.0})
    assert gains(msgspec.structs.replace(step, rates={"float32": 2e9, "bfloat16": 1e9})) == {}
    assert gains(msgspec.structs.replace(step, rates={"float32": 2e9})) == {}
    assert "bfloat16" not in gains(
        facts(dtype="float32", classes={"matmul": 80.0}, lacks=("bfloat16",))
    )


def test_where_the_host_limits_less_work_gains_nothing() -> None:
    step = facts(dtype="float32", classes={"matmul": 50.0}, issue_ms=100.0)
    assert gains(step) == {}
    assert gains(msgspec.structs.replace(step, issue_ms=80.0)) == {"bfloat16": 20.0, "tf32": 20.0}


def test_written_out_attention() -> None:
    step = facts(
        attention_ms=30.0, attention_matmul_ms=10.0, score_bytes=1 << 30, peak_bytes=4 << 30
    )
    (advice,) = advise(step)
    assert (advice.code, advice.gain_ms, advice.gain_bytes) == ("fused-attention", 17.0, 1 << 30)
    assert advice.setting == {"attention": "fused"}


def test_memory_alone_is_worth_a_change() -> None:
    step = facts(
        attention_ms=13.0, attention_matmul_ms=10.0, score_bytes=1 << 30, peak_bytes=4 << 30
    )
    assert gains(step) == {"fused-attention": 0.0}


def test_an_optimizer_is_held_against_the_bandwidth() -> None:
    step = facts(fused_optimizer=False, optimizer_ms=20.0)
    ideal = 1.3 * 100_000_000 * 28 / 4e12 * 1e3
    assert gains(step) == {"fused-optimizer": round(20.0 - ideal, 6)}


def test_launches_and_memory_bound_kernels_call_for_a_compiler() -> None:
    step = facts(
        compiled=False, classes={"elementwise": 20.0, "reduction": 20.0}, host_idle_ms=30.0
    )
    assert gains(step) == {"compile": 22.0 + 18.0, "cuda-graph": 27.0}
    assert gains(msgspec.structs.replace(step, lacks=("compiler",))) == {"cuda-graph": 27.0}


def test_habits_of_a_loop() -> None:
    step = facts(wait_idle_ms=10.0, pageable_ms=5.0, cleared_ms=4.0)
    assert gains(step) == {"no-read-back": 10.0, "pinned-data": 5.0, "set-to-none": 4.0}
    assert [one.code for one in applicable(advise(step), OF_SCRIPTS)] == list(gains(step))
    assert list(applicable(advise(step), OF_MODELS)) == []
    starved = facts(data_ms=30.0, host_idle_ms=20.0)
    assert gains(starved) == {"data-ahead": 20.0, "cuda-graph": 18.0}


def test_a_larger_batch_needs_room() -> None:
    step = facts(host_idle_ms=20.0, batch=8, saved_bytes=10 << 30, peak_bytes=20 << 30)
    roomy = msgspec.structs.replace(step, memory_bytes=80 << 30)
    assert gains(roomy)["larger-batch"] == 10.0
    tight = msgspec.structs.replace(step, memory_bytes=30 << 30)
    assert "larger-batch" not in gains(tight)


def test_blocks_are_compiled_and_tensors_taken_at_once_and_logits_left_out() -> None:
    plain = facts(compiled=False, classes={"elementwise": 20.0}, blocks=12)
    assert gains(plain) == {"compile": 11.0, "compile-blocks": 9.9}
    assert gains(facts(optimizer="", loops_over_tensors=True, optimizer_ms=10.0)) == {
        "foreach-optimizer": 6.0
    }
    logits = facts(loss_ms=10.0, logit_bytes=1 << 30, peak_bytes=4 << 30)
    (found,) = advise(logits)
    assert (found.code, found.gain_ms, found.gain_bytes) == ("fused-loss", 6.0, 1 << 30)
    assert gains(msgspec.structs.replace(logits, on_gpu=False)) == {"fused-loss": 0.0}


def test_checkpointing_is_advised_where_memory_ends_and_undone_where_it_does_not() -> None:
    full = facts(memory_bytes=10 << 30, peak_bytes=9 << 30, saved_bytes=4 << 30, forward_ms=30.0)
    (found,) = advise(full)
    assert (found.code, found.gain_ms, found.gain_bytes) == ("checkpoint", -30.0, 3 << 30)
    assert found.setting == {"checkpoint": "blocks"}
    assert gains(msgspec.structs.replace(full, peak_bytes=7 << 30)) == {}
    again = facts(
        memory_bytes=10 << 30, peak_bytes=4 << 30, recomputed_bytes=3 << 30, forward_ms=30.0
    )
    (found,) = advise(again)
    assert (found.code, found.gain_ms, found.gain_bytes) == ("no-checkpoint", 30.0, -(3 << 30))
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


@given(matmul=numbers, memory=numbers, idle=numbers, waits=numbers, optimizer=numbers)
def test_all_advice_is_worth_it_and_ranked(
    matmul: float, memory: float, idle: float, waits: float, optimizer: float
) -> None:
    step = facts(
        dtype="float32", classes={"matmul": matmul, "elementwise": memory}, host_idle_ms=idle,
        wait_idle_ms=waits, optimizer_ms=optimizer, compiled=False, fused_optimizer=False,
    )  # fmt: skip
    found = [one.gain_ms for one in advise(step)]
    assert found == sorted(found, reverse=True)
    assert all(gain >= WORTH * step.step_ms for gain in found)


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
    step = facts(dtype="float32", classes={"matmul": 80.0})
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
    assert found.classes["matmul"] > 0
    assert found.optimizer_ms > 0
    assert found.attention_ms == 0
    assert (found.compiled, found.fused_optimizer, found.batch) == (False, False, 2)
    assert set(found.rates) == {"bfloat16"}


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
