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
from typing import Any, Self

import msgspec
import pytest

from command_line import CommandLine
from own_records import advice, tried
from quiet_bench import QuietBench
from stepscope.advisor.advise import script_trial
from stepscope.advisor.advise.cases import APART, OF_MODELS, Script, Trial
from stepscope.advisor.advise.given import advice_given, with_advice
from stepscope.advisor.advise.history import read_history
from stepscope.advisor.advise.interleaved import Ready, ScriptOutOfMemoryError, TrialProcess
from stepscope.advisor.advise.outcome import Tried
from stepscope.advisor.advise.view import trial_blocks
from stepscope.advisor.inspect.order import Order
from stepscope.analysis.advice.changes import Advice
from stepscope.cli import verification
from stepscope.cli.verification import Deadline, Later, Verification
from stepscope.errors import StepscopeError
from stepscope.records.schema import Ceiling, Run
from stepscope.records.store import Store
from stepscope.studies.base import PlannedCase
from stepscope.studies.runner.runner import new_run

BFLOAT16 = advice("bfloat16", 40.0, dtype="bfloat16")
UPDATE = advice("fused-optimizer", 30.0, optimizer="adamw-fused")
COMPILE = advice("compile", 20.0, compile="model")
CHANGED_MS = {
    "bfloat16": 30.0,
    "fused-optimizer": 40.0,
    "compile": 60.0,
    "cuda-graph": 35.0,
    "slows": 55.0,
    "too": 51.0,
    "tf32": 35.0,
    "accelerate-step": 40.0,
}
"""Time of the changed step by code; the unchanged one takes 50."""
TOGETHER_MS: dict[str, float] = {}
"""Time of a combination, if it is not the product of its changes."""


class PlantedRunner:
    """Runner with planted results and durations. A trial named `breaks` fails, and `unmade` has no
    effect."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        self.asked: list[str] = []
        self.limits: list[float | None] = []
        self._seconds, self._clock = seconds, clock

    def run(
        self,
        cases: Sequence[PlannedCase],
        run: Run,
        store: Store,
        observer: object,
        *,
        retry: bool,
        within_s: float | None,
    ) -> None:
        del observer
        assert retry
        self.limits.append(within_s)
        for case in cases:
            trial = msgspec.convert(case.config, Trial)
            ms = 50.0
            for one in trial.advice:
                ms *= CHANGED_MS.get(one.code, 50.0) / 50.0
            ms = TOGETHER_MS.get(trial.code, ms)
            self.asked.append(trial.code)
            _, before = store.finished(run.id).get((case.study, case.key), ("", 0))
            self._clock[0] += self._seconds
            if "breaks" in trial.code:
                store.add(tried(0, *trial.advice, id="broken", run=run.id, status="error"))
                continue
            notes = {"without_effect": "nothing was changed"} if "unmade" in trial.code else {}
            store.add(
                tried(
                    ms,
                    *trial.advice,
                    id=f"id-{trial.code}",
                    run=run.id,
                    notes=notes,
                    attempt=before + 1,
                )
            )


def verify(
    tmp_path: Path,
    *advised: Advice,
    seconds: float = 10.0,
    store: Store | None = None,
    run: Run | None = None,
    later: Later | None = None,
    limits: list[float | None] | None = None,
    **keywords: Any,
) -> list[str]:
    clock = [0.0]
    runner = PlantedRunner(seconds, clock)
    if limits is not None:
        runner.limits = limits
    with pytest.MonkeyPatch.context() as patched, Store(tmp_path / "records.db") as own:
        patched.setattr(verification.time, "monotonic", lambda: clock[0])
        patched.setenv("XDG_CACHE_HOME", str(tmp_path))
        target = store or own
        if run is None:
            run = new_run((), "stepscope advise")
            target.add_run(run)
        base = msgspec.convert(tried().config, Trial).base
        Verification(
            runner,
            target,
            run,  # type: ignore[arg-type]
            lambda some: Trial(base=base, advice=some, step_ms=100.0),
            later or (lambda _: ()),
            **keywords,
        ).verify(advised, OF_MODELS)
    return runner.asked


def test_a_change_is_combined_as_advised_for_the_changed_step(tmp_path: Path) -> None:
    """`accelerate` replaces attention in bfloat16, where its kernel is faster, but not alone."""
    alone = advice("accelerate-step", 20.0, optimizer="adamw-fused")
    after = advice("accelerate-step", 15.0, optimizer="adamw-fused", attention="fused")
    store = Store(tmp_path / "kept.db")
    with store:
        run = new_run((), "stepscope advise")
        store.add_run(run)
        codes = verify(
            tmp_path, BFLOAT16, alone, store=store, run=run,
            later=lambda codes: (after,) if codes == ["bfloat16"] else (),
        )  # fmt: skip
        assert codes == ["bfloat16", "accelerate-step", "bfloat16+accelerate-step"]
        trials = [Tried(one).trial for one in store.records(run.id)]
    assert [trial.settings.get("attention") for trial in trials] == [None, None, "fused"]


def test_each_change_alone_then_kept_changes_together(tmp_path: Path) -> None:
    tried_codes = verify(tmp_path, BFLOAT16, UPDATE, COMPILE)
    assert tried_codes == ["bfloat16", "fused-optimizer", "compile", "bfloat16+fused-optimizer"]


def test_combination_keeps_only_changes_that_gain_on_top(tmp_path: Path) -> None:
    """A change that gains alone is left out if the others have removed what it gains."""
    slower_together = {"bfloat16+data-ahead": 31.0, "bfloat16+fused-optimizer": 24.0}
    ahead = advice("data-ahead", 25.0, checkpoint="blocks")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(CHANGED_MS, "data-ahead", 38.0)
        patched.setattr("test_verification.TOGETHER_MS", slower_together)
        tried_codes = verify(tmp_path, BFLOAT16, UPDATE, ahead)
    assert tried_codes[3:] == ["bfloat16+data-ahead", "bfloat16+fused-optimizer"]


def test_without_time_for_single_steps_all_are_combined_at_once(tmp_path: Path) -> None:
    ahead = advice("data-ahead", 25.0, checkpoint="blocks")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(CHANGED_MS, "data-ahead", 45.0)
        tried_codes = verify(tmp_path, BFLOAT16, UPDATE, ahead, within_s=45.0)
    assert tried_codes[3:] == ["bfloat16+fused-optimizer+data-ahead"]


def test_change_predicted_to_cost_time_is_tried_on_top_only(tmp_path: Path) -> None:
    slow = advice("fused-attention", -10.0, attention="fused")
    gains = advice("fused-attention", 10.0, attention="fused")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(CHANGED_MS, "fused-attention", 40.0)
        result = verify(tmp_path, BFLOAT16, slow, later=lambda _: (gains,))
    assert result == ["bfloat16", "bfloat16+fused-attention"]


def test_batch_size_change_is_never_combined(tmp_path: Path) -> None:
    batch = advice("larger-batch", 35.0, batch="16")
    tried_codes = verify(tmp_path, BFLOAT16, batch, UPDATE, later=lambda _: (batch,))
    assert tried_codes == [
        "bfloat16",
        "larger-batch",
        "fused-optimizer",
        "bfloat16+fused-optimizer",
    ]


def test_change_that_breaks_the_program_does_not_stop_the_others(tmp_path: Path) -> None:
    tried_codes = verify(tmp_path, BFLOAT16, advice("breaks", 35.0, attention="fused"), UPDATE)
    assert tried_codes == ["bfloat16", "breaks", "fused-optimizer", "bfloat16+fused-optimizer"]


def test_alternatives_for_the_same_setting_come_last(tmp_path: Path) -> None:
    other = advice("tf32", 35.0, dtype="tf32")
    tried_codes = verify(tmp_path, BFLOAT16, other, UPDATE)
    assert tried_codes == ["bfloat16", "fused-optimizer", "tf32", "bfloat16+fused-optimizer"]


def test_bottleneck_of_the_changed_step_is_advised_on_again(tmp_path: Path) -> None:
    """A CUDA graph replaces the compiler; a change that was dropped alone stays dropped."""
    graph = advice("cuda-graph", 10.0, compile="graphs")
    requests: list[Sequence[str]] = []

    def later(codes: Sequence[str]) -> tuple[Advice, ...]:
        requests.append(codes)
        return (graph, COMPILE)

    result = verify(tmp_path, BFLOAT16, UPDATE, COMPILE, later=later)
    # For the change that is added, and then for more.
    assert requests[:2] == [["bfloat16"], ["bfloat16", "fused-optimizer"]]
    # `compile` was slower alone and is not tried again.
    assert result[3:] == ["bfloat16+fused-optimizer", "bfloat16+fused-optimizer+cuda-graph"]


def test_a_change_replaces_others_that_it_conflicts_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it was slower, so it is tried where it is predicted to gain about as much as the one
    that it would replace: `compile` is faster here, and `attention` is not predicted to be."""
    monkeypatch.setitem(CHANGED_MS, "compile", 45.0)
    monkeypatch.setitem(CHANGED_MS, "accelerate", 60.0)
    faster = advice("accelerate", 19.0, checkpoint="blocks", optimizer="adamw-fused")
    faster = msgspec.structs.replace(faster, excludes=("compile",))
    slower = msgspec.structs.replace(advice("slows", 5.0, attention="fused"), excludes=("compile",))
    monkeypatch.setitem(TOGETHER_MS, "bfloat16+accelerate", 10.0)

    def later(codes: Sequence[str]) -> tuple[Advice, ...]:
        return () if "compile" in codes else (faster, COMPILE, slower)

    result = verify(tmp_path, BFLOAT16, COMPILE, faster, later=later)
    alone = ["bfloat16", "compile", "accelerate"]
    assert result == [*alone, "bfloat16+compile", "bfloat16+accelerate"]


def test_part_of_a_kept_change_is_not_tried_alone(tmp_path: Path) -> None:
    whole = advice("cuda-graph", 50.0, attention="fused", optimizer="adamw-fused")
    part = advice("too", 20.0, attention="fused")
    folders = [tmp_path / name for name in ("whole", "only", "slow")]
    for folder in folders:
        folder.mkdir()
    assert verify(folders[0], whole, part) == ["cuda-graph"]
    only = verify(folders[1], whole, part, only=("cuda-graph", "too"))
    assert only[:2] == ["cuda-graph", "too"]
    slow = msgspec.structs.replace(whole, code="slows")
    assert verify(folders[2], slow, part)[:2] == ["slows", "too"]


def test_change_without_additional_gain_is_dropped(tmp_path: Path) -> None:
    later = (advice("slows", 10.0, attention="fused"), advice("too", 5.0, checkpoint="blocks"))
    result = verify(tmp_path, BFLOAT16, later=lambda _: later)
    assert result == ["bfloat16", "bfloat16+slows", "bfloat16+too"]


def test_interrupted_run_has_an_unfinished_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PlantedRunner.run

    def run(runner: PlantedRunner, cases: Sequence[PlannedCase], *how: Any, **more: Any) -> None:
        if "fused-optimizer" in cases[0].key:
            raise KeyboardInterrupt
        plain(runner, cases, *how, **more)

    monkeypatch.setattr(PlantedRunner, "run", run)
    with pytest.raises(KeyboardInterrupt):
        verify(tmp_path, BFLOAT16, UPDATE)
    with Store(tmp_path / "records.db") as store:
        (result,) = store.runs()
        assert (len(store.finished(result.id)), result.cases) == (1, 2)


def test_only_named_changes_are_tried(tmp_path: Path) -> None:
    assert verify(tmp_path, BFLOAT16, UPDATE, COMPILE, only=("compile",)) == ["compile"]


def test_time_is_reserved_for_the_changes_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three trials fit into 35 s: the last is that of both changes, not the third alone."""
    tried_codes = verify(tmp_path, BFLOAT16, UPDATE, COMPILE, within_s=35.0)
    assert tried_codes == ["bfloat16", "fused-optimizer", "bfloat16+fused-optimizer"]
    assert "not tried, out of time (--total-timeout): compile" in capsys.readouterr().err


def test_trial_runs_no_longer_than_the_time_left(tmp_path: Path) -> None:
    """This includes the first trial, whose duration is unknown."""
    limits: list[float | None] = []
    tried_codes = verify(tmp_path, BFLOAT16, UPDATE, within_s=35.0, limits=limits)
    assert tried_codes == ["bfloat16", "fused-optimizer", "bfloat16+fused-optimizer"]
    assert limits == [35.0, 25.0, 15.0]
    (tmp_path / "long").mkdir()
    assert verify(tmp_path / "long", BFLOAT16, UPDATE, within_s=35.0, seconds=40.0) == ["bfloat16"]
    (tmp_path / "free").mkdir()
    limits.clear()
    verify(tmp_path / "free", BFLOAT16, limits=limits)
    assert limits == [None]


def test_trial_that_was_cut_off_is_tried_again(tmp_path: Path) -> None:
    with Store(tmp_path / "records.db") as store:
        run = new_run((), "stepscope advise")
        store.add_run(run)
        store.add(
            tried(
                0,
                BFLOAT16,
                run=run.id,
                id="cut",
                status="timeout",
                reason="not done after 3 s (--total-timeout)",
            )
        )
        assert verify(tmp_path, BFLOAT16, store=store, run=run) == ["bfloat16"]
        given_up = new_run((), "stepscope advise")
        store.add_run(given_up)
        store.add(
            tried(
                0,
                BFLOAT16,
                run=given_up.id,
                id="given-up",
                status="timeout",
                reason="not done after 600 s (--timeout)",
            )
        )
        assert verify(tmp_path, BFLOAT16, store=store, run=given_up) == []


def test_no_time_is_reserved_if_nothing_can_be_combined(tmp_path: Path) -> None:
    other = advice("tf32", 35.0, dtype="tf32")
    assert verify(tmp_path, BFLOAT16, other, within_s=25.0) == ["bfloat16", "tf32"]
    (tmp_path / "batch").mkdir()
    batch = advice("larger-batch", 35.0, batch="16")
    tried_codes = verify(tmp_path / "batch", BFLOAT16, batch, within_s=25.0)
    assert tried_codes == ["bfloat16", "larger-batch"]


def test_changes_without_a_compiler_are_tried_if_compilation_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried_codes = verify(tmp_path, BFLOAT16, COMPILE, UPDATE, within_s=45.0)
    assert tried_codes == ["bfloat16", "fused-optimizer", "bfloat16+fused-optimizer"]
    assert "not tried, out of time (--total-timeout): compile" in capsys.readouterr().err
    graph = advice("cuda-graph", 10.0, compile="graphs")
    ahead = advice("data-ahead", 5.0, checkpoint="blocks")
    (tmp_path / "later").mkdir()
    tried_codes = verify(
        tmp_path / "later", BFLOAT16, later=lambda _: (graph, ahead), within_s=25.0
    )
    assert tried_codes == ["bfloat16", "bfloat16+data-ahead"]
    assert "not tried on top, out of time (--total-timeout): cuda-graph" in capsys.readouterr().err


def test_run_is_resumed_where_it_ended(tmp_path: Path) -> None:
    with Store(tmp_path / "records.db") as store:
        run = new_run((), "stepscope advise")
        store.add_run(run)
        first = verify(tmp_path, BFLOAT16, UPDATE, store=store, run=run, within_s=15.0)
        second = verify(tmp_path, BFLOAT16, UPDATE, store=store, run=run)
    assert first == ["bfloat16"]
    assert second == ["fused-optimizer", "bfloat16+fused-optimizer"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert [one.code for one in read_history()] == ["bfloat16", "fused-optimizer"]


def test_only_evidence_corrects_later_predictions(tmp_path: Path) -> None:
    unmade = advice("unmade", 30.0, optimizer="adamw-fused")
    tried_codes = verify(tmp_path, BFLOAT16, unmade, advice("vague", 0.1, compile="block"))
    assert tried_codes == ["bfloat16", "unmade", "vague"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert [one.code for one in read_history()] == ["bfloat16"]


def test_outcome_has_its_interval() -> None:
    vague = advice("vague", 0.2)
    output = verification.outcome(Tried(tried(49.9, vague)))
    assert re.fullmatch(
        r"vague: 100 µs \[−\d+ µs, \d+ µs\] gained, 100 µs predicted; dropped: no gain shown",
        output,
    )
    unmade = tried(49.9, vague, notes={"without_effect": "nothing was changed"})
    assert verification.outcome(Tried(unmade)) == "vague: not applicable: nothing was changed"


@pytest.mark.parametrize(
    ("within", "plain", "compiled"), [(0.0, True, True), (25.0, True, False), (5.0, False, False)]
)
def test_compiled_trials_need_more_time(within: float, plain: bool, compiled: bool) -> None:
    base = msgspec.convert(tried().config, Trial).base
    one, other = (Trial(base=base, advice=(what,), step_ms=1.0) for what in (BFLOAT16, COMPILE))
    deadline = Deadline(within, lambda: 0.0)
    deadline.took(one, 10.0)
    assert deadline.allows(one) is plain
    assert deadline.allows(other) is compiled


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
        self._ms = 4.0 if settings else 5.0

    def __enter__(self) -> Self:
        Greedy.alive += 1
        return self

    def __exit__(self, *_: object) -> None:
        Greedy.alive -= 1

    def ready(self) -> Ready:
        if Greedy.alive > 1:
            raise ScriptOutOfMemoryError("the script ran out of memory")
        return Ready(step_ms=self._ms, losses=[])

    def turn(self, steps: int) -> float:
        self.losses += [1.0] * steps
        return self._ms


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
    assert "resume with: stepscope advise --resume --verify" in output
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
