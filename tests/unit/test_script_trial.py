"""Trials of changes on a script: interleaving, losses, ends, and options."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from command_line import CommandLine
from own_records import advice, tried
from quiet_bench import QuietBench
from stepscope.advisor.advise import script_trial
from stepscope.advisor.advise.cases import SHARED, Script, Trial
from stepscope.advisor.advise.interleaved import (
    Ready,
    ScriptEndedError,
    TrialProcess,
    TurnResult,
)
from stepscope.advisor.advise.outcome import Tried
from stepscope.advisor.advise.script_trial import Runs, measure_script_trial
from stepscope.advisor.inspect.order import Order
from stepscope.advisor.trial import process
from stepscope.analysis.advice.changes import compatible
from stepscope.records.schema import Quantity
from stepscope.records.stats import sequential_ratio

SCRIPT = """
import random, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
for step in range(int(sys.argv[1])):
    x = torch.randn(64, 16) + random.random()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
print("wrote a checkpoint")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def trial(script: Path, steps: int, **setting: str) -> Trial:
    return Trial(
        program=Script(target=str(script), words=(str(steps),)),
        step_ms=1.0,
        rounds=5,
        loss_steps=8,
        advice=(advice("a-change", 0.5, **setting),),
    )


def test_two_runs_of_a_script_are_interleaved(script: Path) -> None:
    planned = trial(script, 100_000, optimizer="adamw-fused", gradients="none")
    assert planned.program is not None
    before = script.read_bytes()
    result = measure_script_trial(planned, planned.program, QuietBench())
    series = {(one.name, one.variant): one.values for one in result.series}
    assert len(series["step", "base"]) == len(series["step", "changed"]) == 5
    # Neither the script nor its data is seeded, but both runs see the same data.
    assert series["loss", "base"] == pytest.approx(series["loss", "changed"], rel=1e-4)
    assert len(series["loss", "base"]) >= 8
    assert series["loss", "base"][-1] < series["loss", "base"][0]
    assert result.notes == {}
    assert script.read_bytes() == before
    assert planned.key == "train.py_a-change"


NOT_ADAM = """
import torch
class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.9), "eps": 1e-8})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 0.05 * parameter.grad
model = torch.nn.Linear(8, 1)
one, other = Momentum([model.weight]), Momentum([model.bias])
while True:
    for half in range(2):
        x = torch.randn(32, 8)
        ((model(x) - x.sum(1, keepdim=True)).square().mean() / 2).backward()
    one.step()
    other.step()
    model.zero_grad()
"""


def test_change_that_affects_the_loss_is_dropped(tmp_path: Path) -> None:
    """Script with several optimizers, micro-batches, and an update that only looks like Adam."""
    path = tmp_path / "odd.py"
    path.write_text(NOT_ADAM)
    planned = trial(path, 0, optimizer="adamw-fused")
    assert planned.program is not None
    result = measure_script_trial(planned, planned.program, QuietBench())
    series = {(one.name, one.variant): one.values for one in result.series}
    assert len(series["loss", "base"]) == len(series["loss", "changed"]) > 10
    # Both see the same data up to their first update.
    assert series["loss", "base"][0] == series["loss", "changed"][0]
    record = tried(30.0)
    losses = tuple(one for one in result.series if one.name == "loss")
    times = tuple(one for one in record.series if one.name != "loss")
    judged = Tried(msgspec.structs.replace(record, series=(*times, *losses)))
    assert judged.verdict == "dropped: the loss differs"


BY_HAND = """
import torch
model = torch.nn.Linear(8, 1)
while True:
    x = torch.randn(32, 8)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad
            parameter.grad.zero_()
"""
IN_BACKWARD = """
import torch
model = torch.nn.Linear(8, 1)
optimizers = {p: torch.optim.SGD([p], lr=0.05, foreach=False) for p in model.parameters()}
def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
while True:
    x = torch.randn(32, 8)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
"""


@pytest.mark.parametrize("source", [BY_HAND, IN_BACKWARD], ids=["by hand", "in the backward"])
def test_scripts_with_manual_or_in_backward_updates_are_tried(tmp_path: Path, source: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(source)
    planned = trial(path, 0, dtype="bfloat16")
    assert planned.program is not None
    result = measure_script_trial(planned, planned.program, QuietBench())
    series = {(one.name, one.variant): one.values for one in result.series}
    assert len(series["step", "base"]) == len(series["step", "changed"]) == 5
    assert len(series["loss", "base"]) == len(series["loss", "changed"]) > 10
    assert series["loss", "base"][0] == pytest.approx(series["loss", "changed"][0], rel=0.1)
    assert result.notes == {}


def test_cpu_time_includes_that_of_workers() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as worker:
        start = process._cpu_s() - time.process_time()
        deadline = time.monotonic() + 60
        while process._cpu_s() - time.process_time() < start + 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        worker.kill()


def test_early_end_of_a_script_is_reported(script: Path) -> None:
    planned = trial(script, 7, dtype="bfloat16")
    assert planned.program is not None
    with pytest.raises(ScriptEndedError, match="the script ended after 0 rounds of 3 steps") as few:
        measure_script_trial(planned, planned.program, QuietBench())
    # The warm-up, and five rounds of three steps.
    assert "a trial needs 20 steps" in str(few.value)
    order = Order(target=str(script), words=("x",), warmup=5, timed=1, traced=1, memory=False)
    with (
        TrialProcess(order, {}) as run,
        pytest.raises(ScriptEndedError, match="code 1: ValueError"),
    ):
        run.ready()


def test_turns_are_fitted_to_a_short_script(script: Path) -> None:
    """Turns of eleven steps would leave two rounds of 21 steps after the warm-up."""
    planned = trial(script, 21, optimizer="adamw-fused")
    assert planned.program is not None
    result = measure_script_trial(planned, planned.program, QuietBench())
    times = [one.values for one in result.series if one.name == "step"]
    assert [len(values) for values in times] == [5, 5]


def test_error_with_many_lines_is_reported_by_its_first(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import torch\nraise RuntimeError('no room\\nadvice\\n  and more of it')\n")
    order = Order(target=str(script), words=(), warmup=5, timed=1, traced=1, memory=False)
    output = "code 1: RuntimeError: no room$"
    with TrialProcess(order, {}) as run, pytest.raises(ScriptEndedError, match=output):
        run.ready()


def test_verdicts_without_effect_and_with_a_broken_loss() -> None:
    idle = tried(30.0, notes={"without_effect": "it had no effect on the script (data)"})
    assert Tried(idle).verdict == "not applicable: it had no effect on the script (data)"
    step = Quantity(name="loss_lost", variant="changed", value=3, unit="steps")
    lost = tried(30.0, quantities=(step,))
    assert Tried(lost).verdict == "dropped: the loss is not finite from step 3 on"
    bare = tried(30.0)
    series = tuple(one for one in bare.series if one.name != "loss")
    unseen = Tried(msgspec.structs.replace(bare, series=series))
    assert unseen.verdict == "kept, no loss to compare"
    assert unseen.kept


def test_first_of_two_changes_for_one_setting_is_applied() -> None:
    several = [
        advice("compile", compile="model"),
        advice("tf32", dtype="tf32"),
        advice("cuda-graph", compile="graphs"),
        advice(dtype="bfloat16"),
    ]
    assert [one.code for one in compatible(several)] == ["compile", "tf32"]


def test_larger_batch_of_a_script_is_compared_per_sample() -> None:
    change = advice("larger-batch", 0.5, batch="16")
    twice = Trial(program=Script(target="t.py"), advice=(change,), step_ms=1.0, batch=8)
    assert twice.more_samples == 2.0
    assert Trial(program=Script(target="t.py"), advice=(advice(),), step_ms=1.0).more_samples == 1.0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--verify", "nowhere.py"), "there is no script nowhere.py"),
        (("--verify", "--model", "a:b", "{script}"), "both a script and --model are given"),
        (("--warmup", "1", "{script}"), "4 warm-up steps"),
        (("--only", "bfloat6,compile", "{script}"), "perhaps you meant bfloat16"),
    ],
)
def test_invalid_options_are_refused(
    words: tuple[str, ...], expected: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepscope.cli import main

    assert main(["advise", *(word.format(script=script) for word in words)]) == 2
    assert expected in capsys.readouterr().err


def test_script_that_never_steps_gets_no_advice(tmp_path: Path) -> None:
    path = tmp_path / "quiet.py"
    path.write_text("import torch\nraise SystemExit(3)\n")
    done = CommandLine(tmp_path)("advise", "--verify", str(path))
    assert done.returncode == 1
    assert "quiet.py ended with exit code 3 without an optimizer step" in done.stderr


def test_script_that_fails_early_gets_its_own_error_and_leaves_no_run(tmp_path: Path) -> None:
    path = tmp_path / "crash.py"
    path.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(8):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "raise ValueError('my data is bad')\n"
    )
    command = CommandLine(tmp_path)
    done = command("advise", str(path))
    assert done.returncode == 1
    assert "the program ended after 8 of the 21 steps" in done.stderr
    assert "it ended with exit code 1" in done.stderr
    assert done.stderr.strip().endswith("ValueError: my data is bad")
    listed = command("list", "runs", "--json")
    assert json.loads(listed.stdout)["runs"] == []


def test_a_part_of_a_combination_is_timed_in_the_same_process(script: Path) -> None:
    whole = trial(script, 100_000, optimizer="adamw-fused", gradients="none")
    part = trial(script, 100_000, optimizer="adamw-fused")
    other = trial(script, 100_000, dtype="bfloat16")
    assert whole.program is not None
    runs = Runs()
    try:
        first = measure_script_trial(whole, whole.program, QuietBench(), runs)
        assert runs.starts == 2
        second = measure_script_trial(part, whole.program, QuietBench(), runs)
        assert runs.starts == 2, "the unchanged process and the changed one go on"
        assert SHARED in second.notes
        assert {one.name for one in second.series} == {"step", "cpu"} | {
            one.name for one in second.series if one.name == "instructions"
        }
        measure_script_trial(other, whole.program, QuietBench(), runs)
        assert runs.starts == 3, "another dtype needs a process of its own"
    finally:
        runs.close()
    assert SHARED not in first.notes
    losses = {one.variant: len(one.values) for one in first.series if one.name == "loss"}
    assert losses["base"] >= 8
    assert losses["changed"] >= 8
    shared = tried(30.0, notes=second.notes)
    assert Tried(shared).kept
    assert "more changes" in Tried(shared).verdict


class SlowProgram:
    """A GPT on two CPU cores with planted times: 5 s per start, 786 ms per step."""

    elapsed_s = 0.0
    steps = 0
    start_s = 5.0
    step_ms: ClassVar[dict[str, float]] = {"optimizer": 120.0, "attention": 150.0, "data": 60.0}

    def __init__(self, order: Order, settings: dict[str, str], alive: object) -> None:
        del alive
        self.started, self.settings = settings, settings
        self.losses: list[float | None] = []
        self.peak_bytes = None
        self._turns = 0
        SlowProgram.elapsed_s += self.start_s
        self._run(order.warmup)

    @property
    def is_switched(self) -> bool:
        return self.settings != self.started

    @property
    def _ms(self) -> float:
        return 786.0 - sum(self.step_ms[name] for name in self.settings)

    def _run(self, steps: int) -> None:
        SlowProgram.steps += steps
        SlowProgram.elapsed_s += 1e-3 * steps * self._ms
        self.losses += [1.0] * steps

    def __exit__(self, *_: object) -> None: ...

    def ready(self) -> Ready:
        return Ready(step_ms=self._ms, losses=[])

    def can_switch(self, settings: dict[str, str]) -> bool:
        return settings.items() <= self.started.items() and "data" not in {
            *(self.started.keys() - settings.keys())
        }

    def switch(self, settings: dict[str, str]) -> None:
        if settings != self.settings:
            self.settings = settings
            self._run(2)

    def turn(self, steps: int, untimed: int = 1) -> TurnResult:
        self._run(steps + untimed)
        self._turns += 1
        # Noise of half a percent.
        return TurnResult(step_ms=self._ms * (1 + 0.005 * (-1) ** self._turns), losses=[])


def test_five_trials_of_a_slow_program_take_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in steps and starts: its unchanged step takes 786 ms, as on two idle cores."""
    monkeypatch.setattr(script_trial, "TrialProcess", SlowProgram)
    names = ("optimizer", "attention", "data")
    subsets = [names, names[:1] + names[2:], names[1:], names[:2], names[:1]]
    runs, best = Runs(), None
    for some in subsets:
        planned = Trial(
            program=Script(target="head_loop.py"),
            step_ms=786.0,
            advice=tuple(advice(name, 50.0, **{name: "x"}) for name in some),
            sequential=True,
            best=best,
        )
        assert planned.program is not None
        result = measure_script_trial(planned, planned.program, QuietBench(), runs)
        ratio = next(s.values for s in result.series if (s.name, s.variant) == ("step", "changed"))
        assert 3 <= len(ratio) < planned.rounds, "it ends when its gain is known"
        base = next(s.values for s in result.series if (s.name, s.variant) == ("step", "base"))
        best = best or sequential_ratio(base, ratio)
    assert runs.starts == 3, "unchanged, all changes, and without the loader's workers"
    assert SlowProgram.elapsed_s < 120
