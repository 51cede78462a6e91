"""Verification of advice: order, time limit, and resumption of trials."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import CommandLine
from own_records import advice, inspected_record, tried
from quiet_bench import QuietBench
from search_facts import llama
from stepscope.advisor.advise import script_trial, verification
from stepscope.advisor.advise.cases import APART, OF_SCRIPTS, Script, Trial
from stepscope.advisor.advise.given import advice_given, with_advice
from stepscope.advisor.advise.history import read_history
from stepscope.advisor.advise.interleaved import (
    Ready,
    ScriptOutOfMemoryError,
    TrialProcess,
    TurnResult,
)
from stepscope.advisor.advise.outcome import Tried, attributed, best_of
from stepscope.advisor.advise.verification import Deadline, Verification, outcome, template
from stepscope.advisor.advise.view import trial_blocks
from stepscope.advisor.inspect.order import Order
from stepscope.advisor.verdict import program_verdict
from stepscope.analysis.advice.search import Space
from stepscope.errors import StepscopeError
from stepscope.records.schema import Ceiling, Record, Run, quantities
from stepscope.records.store import Store
from stepscope.runner.runner import new_run
from stepscope.studies.base import PlannedCase

BFLOAT16 = advice("bfloat16", 40.0, dtype="bfloat16")
UPDATE = advice("fused-optimizer", 30.0, optimizer="adamw-fused")
COMPILE = advice("compile", 20.0, compile="model")
TIMES = {
    "accelerate+bfloat16+train-step": 15.0,
    "accelerate+bfloat16": 60.0,
    "accelerate+train-step": 70.0,
    "bfloat16+train-step": 45.0,
}
"""Planted times of combinations; all others take as long as the unchanged step, 126 ms."""


class PlantedRunner:
    """Runner with planted results and durations."""

    def __init__(self, seconds: float, clock: list[float], failing: Sequence[str] = ()) -> None:
        self.asked: list[str] = []
        self.trials: list[Trial] = []
        self.limits: list[float | None] = []
        self._seconds, self._clock, self._failing = seconds, clock, failing

    def run(
        self,
        cases: Sequence[PlannedCase],
        run: Run,
        store: Store,
        observer: object,
        *,
        retry: bool,
        within_s: float | None,
        with_ceilings: bool,
    ) -> None:
        del observer
        assert not with_ceilings
        assert retry
        self.limits.append(within_s)
        for case in cases:
            trial = msgspec.convert(case.config, Trial)
            code = "+".join(sorted(one.code for one in trial.advice))
            self.asked.append(code)
            self.trials.append(trial)
            _, before = store.finished(run.id).get((case.study, case.key), ("", 0))
            self._clock[0] += min(self._seconds, within_s or self._seconds)
            how: dict[str, Any] = {"id": f"id-{code}-{before}", "run": run.id}
            if code in self._failing:
                how |= {"status": "error"}
            elif within_s is not None and self._seconds > within_s:
                how |= {"status": "timeout", "reason": "not done after 1 s (--total-timeout)"}
            # The record of `tried` has an unchanged step of 50 ms.
            result = tried(50 * TIMES.get(code, 126.0) / 126, *trial.advice, **how)
            config = msgspec.to_builtins(trial)
            store.add(
                msgspec.structs.replace(
                    result,
                    case=case.key,
                    config=config,
                    attempt=before + 1,
                    elapsed_s=self._seconds,
                )
            )


def verify(
    tmp_path: Path,
    *,
    seconds: float = 10.0,
    store: Store | None = None,
    run: Run | None = None,
    only: Sequence[str] = (),
    failing: Sequence[str] = (),
    **keywords: Any,
) -> PlantedRunner:
    clock = [0.0]
    runner = PlantedRunner(seconds, clock, failing)
    tmp_path.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patched, Store(tmp_path / "records.db") as own:
        patched.setattr(verification.time, "monotonic", lambda: clock[0])
        patched.setenv("XDG_CACHE_HOME", str(tmp_path))
        target = store or own
        if run is None:
            run = new_run((), "stepscope advise")
            target.add_run(run)
        facts = llama()
        Verification(
            runner,  # type: ignore[arg-type]
            target,
            run,
            Space(facts, OF_SCRIPTS, only=only),
            template(Script(target="llama.py"), facts.step_ms, None, 15, 20),
            **keywords,
        ).verify(None)  # type: ignore[arg-type]
    return runner


WHOLE = "accelerate+bfloat16+train-step"


def test_the_best_prediction_comes_first_then_its_parts(tmp_path: Path) -> None:
    runner = verify(tmp_path)
    assert runner.asked[0] == WHOLE
    assert set(runner.asked[1:4]) == set(TIMES) - {WHOLE}
    first, *parts = runner.trials[:4]
    assert first.best is None
    assert first.sequential
    assert all(one.best is not None and one.best.value == pytest.approx(15 / 126) for one in parts)
    assert first.together_ms == pytest.approx(126 - 13.32, abs=0.1)
    assert first.purpose == "best predicted"


def test_the_verdict_has_the_gain_of_each_change_of_the_best_combination(tmp_path: Path) -> None:
    runner = verify(tmp_path)
    with Store(tmp_path / "records.db") as store:
        records = list(store.records())
    trials = [Tried(one) for one in records]
    best = best_of(trials)
    assert best is not None
    assert {one.code for one in best.trial.advice} == set(WHOLE.split("+"))
    verdict = program_verdict([inspected_record(), *records])
    assert verdict is not None
    gains = {one.code: one.gain for one in verdict.changes}
    assert all(one.measured for one in gains.values())
    # 126 ms in the planted times are 50 ms in the records.
    scale = 50 / 126
    expected = {"bfloat16": 70 - 15, "accelerate": 45 - 15, "train-step": 60 - 15}
    for code, ms in expected.items():
        assert gains[code].value == pytest.approx(scale * ms, rel=0.05)
        assert len(gains[code].on_top_of) == 2
    assert len(runner.asked) == len(set(runner.asked))


def test_predictions_are_corrected_by_what_a_change_gains_on_top(tmp_path: Path) -> None:
    verify(tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path))
        history = {one.code: one for one in read_history()}
    assert history["train-step"].realized_ms == pytest.approx((60 - 15) * 50 / 126, rel=0.05)
    assert history["train-step"].predicted_ms > 0


def test_gains_below_the_noise_correct_no_prediction() -> None:
    for noise, corrections in ((0.1, 1), (60.0, 0)):
        both, one = tried(30.0, BFLOAT16, UPDATE, noise=noise), tried(31.0, UPDATE, noise=noise)
        assert len(attributed(Tried(one), [Tried(both)])) == corrections


def test_a_time_limit_keeps_the_best_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[str] = []
    runner = verify(tmp_path, within_s=25.0, log=logged.append)
    assert runner.asked[0] == WHOLE
    assert len(runner.asked) == 2
    assert runner.limits == [25.0, 15.0]
    assert "not tried, out of time (--total-timeout)" in logged[-1]
    assert "(10.0 s)" in logged[0], "each trial says how long it took"
    del capsys


def test_a_trial_that_was_cut_off_is_tried_again(tmp_path: Path) -> None:
    with Store(tmp_path / "kept.db") as store:
        run = new_run((), "stepscope advise")
        store.add_run(run)
        first = verify(tmp_path, store=store, run=run, within_s=5.0)
        second = verify(tmp_path, store=store, run=run, within_s=15.0)
        third = verify(tmp_path, store=store, run=run)
    assert first.asked == second.asked == [WHOLE]
    assert WHOLE not in third.asked
    assert set(third.asked[:3]) == set(TIMES) - {WHOLE}


def test_a_trial_has_a_share_of_the_time(tmp_path: Path) -> None:
    trials = verify(tmp_path, within_s=100.0).trials
    # The best combination has three changes, each of which is then left out.
    assert [(one.within_s, one.shares, one.restarts) for one in trials[:2]] == [
        (100.0, 4, 3),
        (90.0, 3, 2),
    ]
    assert {one.within_s for one in verify(tmp_path / "more").trials} == {0.0}


def test_a_compilation_that_takes_too_long_leaves_time_for_other_changes(tmp_path: Path) -> None:
    """The runner takes 70 s for each trial, of which a compilation may have 60."""
    runner = verify(tmp_path, seconds=70.0, within_s=100.0, only=("compile", "fused-optimizer"))
    assert runner.limits[0] == pytest.approx(60.0)
    assert "compile" in runner.asked[0]
    assert runner.asked[1] == "fused-optimizer"


def test_a_combination_that_breaks_the_program_does_not_stop_the_search(tmp_path: Path) -> None:
    runner = verify(tmp_path, failing=[WHOLE])
    assert runner.asked[0] == WHOLE
    assert runner.asked[1] in TIMES
    assert len(runner.asked) > 2


def test_only_named_changes_are_tried(tmp_path: Path) -> None:
    assert verify(tmp_path, only=("tf32",)).asked == ["tf32"]


def test_interrupted_run_has_an_unfinished_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PlantedRunner.run

    def run(runner: PlantedRunner, cases: Sequence[PlannedCase], *how: Any, **more: Any) -> None:
        if runner.asked:
            raise KeyboardInterrupt
        plain(runner, cases, *how, **more)

    monkeypatch.setattr(PlantedRunner, "run", run)
    with pytest.raises(KeyboardInterrupt):
        verify(tmp_path)
    with Store(tmp_path / "records.db") as store:
        (result,) = store.runs()
        assert (len(store.finished(result.id)), result.cases) == (1, 2)


def test_facts_of_a_recording_are_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepscope.advisor.advise import step
    from stepscope.cli import main

    built: list[str] = []
    plain = step.facts_of

    def counted(record: Record, lacks: Sequence[str] = ()) -> Any:
        built.append(record.case)
        return plain(record, lacks)

    monkeypatch.setattr(step, "facts_of", counted)
    records = Path(__file__).parents[2] / "results" / "advise-slow_h200.jsonl"
    assert main(["advise", str(records), "--out", str(tmp_path), "--json"]) == 0
    assert len(built) == 1
    (printed,) = capsys.readouterr().out.strip().splitlines()
    assert json.loads(printed)["tried"][0]["took_s"] > 0


def test_outcome_has_its_interval() -> None:
    vague = advice("vague", 0.2)
    output = outcome(Tried(tried(49.9, vague)))
    gain = r"vague: 100 µs \[−\d+ µs, \d+ µs\] gained, 100 µs predicted"
    assert re.fullmatch(rf"{gain}; dropped: no gain shown \(12.5 s\)", output)
    unmade = tried(49.9, vague, notes={"without_effect": "nothing was changed"})
    assert outcome(Tried(unmade)) == ("vague: not applicable: nothing was changed (12.5 s)")


def test_compiled_trials_need_more_time() -> None:
    base = msgspec.convert(tried().config, Trial).base
    one, other = (Trial(base=base, advice=(what,), step_ms=1.0) for what in (BFLOAT16, COMPILE))
    for within, plain, compiled in ((0.0, True, True), (25.0, True, False), (5.0, False, False)):
        deadline = Deadline(within, lambda: 0.0)
        deadline.took(one, 10.0)
        assert deadline.allows(one) is plain
        assert deadline.allows(other) is compiled


def test_trials_that_share_a_process_need_less_time() -> None:
    base = msgspec.convert(tried().config, Trial).base
    one = Trial(base=base, advice=(BFLOAT16,), step_ms=1.0)
    deadline = Deadline(60.0, lambda: 0.0)
    deadline.took(one, 80.0)
    assert not deadline.allows(one)
    assert deadline.allows(one, shares=True)
    deadline.took(one, 70.0, shares=True)
    assert not deadline.allows(one, shares=True)


def test_the_text_of_an_interval_is_cut_a_step_below_the_gain() -> None:
    assert re.fullmatch(r"100 µs \[−\d+ µs, \d+ µs\]", Tried(tried(49.9)).gain_text)
    assert "−70.0 ms [below −120 ms, " in Tried(tried(120.0, noise=90.0)).gain_text


def test_a_compilation_that_would_take_too_long_does_not_come_first() -> None:
    base = msgspec.convert(tried().config, Trial).base
    one, other = (Trial(base=base, advice=(what,), step_ms=1.0) for what in (BFLOAT16, COMPILE))
    for kernels, on_gpu, compiled in (
        (5_000, True, True),
        (60_000, True, False),
        (8_000, False, False),
    ):
        deadline = Deadline(120.0, lambda: 0.0, kernels, on_gpu=on_gpu)
        assert deadline.allows(one)
        assert deadline.allows(other) is compiled
    assert Deadline(0.0, lambda: 0.0, 60_000).allows(other)
    # Others come first if they would have too little time after it.
    half = Deadline(60.0, lambda: 0.0, 5_000)
    assert half.allows(other)
    assert not half.allows(other, others=True)


def test_record_stores_its_advice() -> None:
    record = with_advice(tried(), [BFLOAT16, UPDATE])
    assert advice_given(record) == (BFLOAT16, UPDATE)
    assert advice_given(tried()) is None


class Greedy:
    """A run that leaves no memory for a second one."""

    alive = 0

    def __init__(self, order: Order, settings: dict[str, str], heartbeat: object) -> None:
        del order, heartbeat
        self.losses: list[float | None] = []
        self.peak_bytes = None
        self.started = settings
        self._ms = 4.0 if settings else 5.0
        Greedy.alive += 1

    def can_switch(self, settings: dict[str, str]) -> bool:
        return settings == self.started

    def switch(self, settings: dict[str, str]) -> None: ...

    def __exit__(self, *_: object) -> None:
        Greedy.alive -= 1

    def ready(self) -> Ready:
        if Greedy.alive > 1:
            raise ScriptOutOfMemoryError("the script ran out of memory")
        return Ready(step_ms=self._ms, losses=[])

    def turn(self, steps: int, untimed: int = 1) -> TurnResult:
        del untimed
        self.losses += [1.0] * steps
        return TurnResult(step_ms=self._ms, losses=[])


def test_runs_that_do_not_fit_together_are_timed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_trial, "TrialProcess", Greedy)
    trial = Trial(
        program=Script(target="large.py"), step_ms=5.0, rounds=7, loss_steps=8, advice=(UPDATE,)
    )
    assert trial.program is not None
    result = script_trial.measure_script_trial(trial, trial.program, QuietBench())
    assert "do not fit into memory" in result.notes[APART]
    values = {one.variant: one.values for one in result.series if one.name == "step"}
    assert values["base"] == (5.0,) * 8
    assert values["changed"] == (4.0,) * 8
    shown = trial_blocks([tried(40.0, UPDATE, notes=result.notes)])
    assert "timed in blocks" in " ".join(getattr(block, "text", "") for block in shown)


def test_out_of_memory_of_a_run_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(
        "import torch\nraise torch.OutOfMemoryError('CUDA out of memory. Tried 80 GiB.\\nSee')\n"
    )
    order = Order(target=str(script), warmup=5, timed=1, traced=1, memory=False)
    with (
        TrialProcess(order, {}) as run,
        pytest.raises(ScriptOutOfMemoryError, match=r"out of memory: .*Tried 80 GiB"),
    ):
        run.ready()


def test_models_that_do_not_fit_together_are_timed_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from stepscope.advisor.advise import measure
    from stepscope.studies.own.cases import OwnStep

    plain = measure._interleaved

    def full(cases: Any, *arguments: Any) -> Any:
        if len(cases) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(cases, *arguments)

    monkeypatch.setattr(measure, "_interleaved", full)
    base = OwnStep(
        model="own_models:conv_net", batch=2, dtype="float32", compile="no", optimizer="adamw-loop"
    )
    change = advice("fused-optimizer", 1.0, optimizer="adamw-fused")
    trial = Trial(base=base, advice=(change,), step_ms=10.0, rounds=5, loss_steps=4)
    result = measure.measure_trial(trial, QuietBench())
    assert APART in result.notes
    assert {len(s.values) for s in result.series if s.name == "step"} == {6}


def test_interrupt_saves_finished_trials_and_the_run_is_resumed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        model = torch.nn.Linear(16, 1)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for step in range(100_000):
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        """)
    )
    command = CommandLine(tmp_path)
    command.environment |= {"PATH": os.fspath(tmp_path), "OMP_NUM_THREADS": "1"}
    command.know_ceilings(
        Ceiling(name="memory.copy", value=1e15, unit="B/s", source="measured", detail="planted")
    )
    words = ("--verify", "--rounds", "5", "--json", "--only", "fused-optimizer", str(script))
    started = command.start("advise", *words)
    wait_for_the_record(command.out / "records.db")
    started.send_signal(signal.SIGTERM)
    _, output = started.communicate(timeout=400)
    assert started.returncode == 130, output
    # This PATH does not have it, so the command names its path.
    assert re.search(r"resume with: \S*/stepscope advise --resume --verify", output)
    assert command.left_behind() == []
    done = command("advise", "--resume", *words)
    assert done.returncode == 0, done.stderr
    assert "recording a few steps" not in done.stderr
    (trial,) = json.loads(done.stdout)["tried"]
    assert trial["change"] == "fused-optimizer"
    assert trial["predicted_ms"] > 0
    assert not trial["verdict"].startswith("not tried")
    page = (command.out / "train-advice.html").read_text()
    assert "Advice for train.py" in page
    assert "Predicted and measured gain" in page
    assert command.left_behind() == []
    refused = command("advise", "--resume", "--verify", "--only", "no-checkpoint", str(script))
    assert refused.returncode == 2
    assert "no-checkpoint is not advised for this step" in refused.stderr


def wait_for_the_record(path: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # The file is not a store at first.
        with contextlib.suppress(StepscopeError), Store(path, create=False) as store:
            if store.records():
                return
        time.sleep(0.1)
    raise AssertionError("no step was recorded")


def test_a_trial_is_expected_to_take_its_start_and_the_fewest_rounds() -> None:
    """The first one also starts the unchanged program, and compares losses."""
    record = tried(elapsed_s=60.0)
    assert Tried(record).least_s == 60.0
    times = quantities({"start_s": (8.0, "s"), "rounds_s": (14.0, "s")})
    # It has seven rounds, of which five are the fewest.
    assert Tried(msgspec.structs.replace(record, quantities=times)).least_s == 8 + 5 * 2
