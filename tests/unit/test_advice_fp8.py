"""Advice about FP8 linear layers: prediction, reasons, conflicts, and the trial that applies it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from accelerated_models import COMPILED
from fp8_on_cpu import pretend_fp8
from stepscope.acceleration import accelerate as acceleration
from stepscope.advisor.advise.cases import OF_MODELS, OF_SCRIPTS, Script, Trial
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.trial import accelerated
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.changes import Changes
from stepscope.analysis.advice.changes import (
    Advice,
    advise,
    afterwards,
    applicable,
    not_applicable,
    predictions,
)
from stepscope.analysis.advice.facts import Facts, PhaseWork
from stepscope.analysis.advice.missing_inputs import not_evaluated
from stepscope.kernels.fp8 import choice
from stepscope.kernels.fp8.recipe import DEFAULT
from stepscope.records.jsonl import read_records

RESULTS = Path(__file__).parents[2] / "results"
RATES = {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12, "fp8": 1_600e12}


def facts(**changes: Any) -> Facts:
    """A step of 300 ms in bfloat16: 200 ms of matmuls, 180 of them in linear layers of blocks."""
    phases = (
        PhaseWork(name="forward", classes={"matmul": 66.0, "elementwise": 20.0}, launches=400.0),
        PhaseWork(name="backward", classes={"matmul": 134.0, "elementwise": 40.0}, launches=800.0),
        PhaseWork(name="optimizer", classes={"optimizer": 40.0}, launches=10.0),
    )
    fields: dict[str, Any] = {
        "on_gpu": True,
        "step_ms": 300.0,
        "dtype": "bfloat16",
        "autocast": True,
        "waits": "end",
        "phases": phases,
        "rates": RATES,
        "bandwidth": 4e12,
        "parameters": 3_000_000_000,
        "flops": 6.0 * 3e9 * 8192,
        "linear_ms": 60.0,
        "linear_matmuls": 128.0,
    }
    return Facts(**fields | changes)


def fp8_advice(step: Facts) -> Advice:
    return next(one for one, _ in predictions(step) if one.code == "fp8")


def reason(**changes: Any) -> str:
    listed = not_applicable(facts(**changes))
    return next((one.reason for one in listed if one.code == "fp8"), "")


def test_the_gain_is_that_of_the_gemms_without_the_casts() -> None:
    step = facts()
    width = round((step.parameters / 128) ** 0.5)
    rates = choice.Rates(800e12, 1_600e12, 4e12, 0.0)
    times = choice.estimate(8192, width, width, DEFAULT, rates)
    advice = fp8_advice(step)
    # Three GEMMs in half the time; the casts are charged in proportion.
    left = 0.5 + times.casts_s / times.bf16_s
    assert advice.gain_ms == pytest.approx(180 * (1 - left))
    assert 40 < advice.gain_ms < 90
    assert advice.risk.startswith("numerics")
    assert "changes numerics" in advice.title
    assert advice.lines[-1] == 'stepscope.accelerate(model, optimizer, dtype="fp8")'
    assert advice.setting == {"dtype": "fp8"}
    assert "FP8 is 2× as fast here" in advice.why
    after = afterwards(step, ["fp8"])
    assert after.dtype == "fp8"
    assert not [one for one, _ in predictions(after) if one.code in ("fp8", "bfloat16", "compile")]


def test_a_float32_step_gains_from_bfloat16_and_from_fp8() -> None:
    wide = facts(dtype="tf32", autocast=False)
    gains = {one.code: one.gain_ms for one, _ in predictions(wide)}
    assert gains["fp8"] > gains["bfloat16"] + 20
    assert not [one.code for one in not_evaluated(wide) if one.code == "fp8"]
    assert [one.code for one in not_evaluated(facts(rates={})) if one.code == "fp8"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"on_gpu": False}, "not on a CPU"),
        ({"lacks": ("fp8",)}, "compute capability 8.9"),
        ({"uses_fp8": True}, "in FP8 already"),
        ({"dtype": "float16"}, "uses float16"),
        ({"compiled": True}, "compiled"),
        ({"linear_matmuls": 0.0}, "no matmuls of linear layers"),
        ({"flops": 6.0 * 3e9 * 64}, "casts of its linear layers would take longer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_steps_without_fp8_have_a_reason(changes: dict[str, Any], expected: str) -> None:
    assert expected in reason(**changes)
    assert "fp8" not in {one.code for one in advise(facts(**changes))}


def test_it_is_tried_on_models_and_scripts_but_not_twice() -> None:
    listed = advise(facts())
    for settings in (OF_MODELS, OF_SCRIPTS):
        assert "fp8" in {one.code for one in applicable(listed, settings)}
    advice = fp8_advice(facts())
    trial = Trial(program=Script(target="train.py"), advice=(advice,), step_ms=300.0)
    assert {"fp8", "bfloat16"} <= set(trial.needs)
    for setting in ({"dtype": "bfloat16"}, {"accelerate": "accelerate"}, {"compile": "block"}):
        assert advice.conflicts_with(msgspec.structs.replace(advice, setting=setting, excludes=()))
    graph = msgspec.structs.replace(advice, setting={"step": "graph"}, excludes=())
    assert not advice.conflicts_with(graph)


def test_linear_layers_of_a_recorded_step_are_those_of_its_blocks() -> None:
    record = read_records(RESULTS / "advise-nano_gpt_h200.jsonl")[0]
    found = facts_of(record)
    # Four of each of the 12 blocks in two micro-batches; the head is the rest of the matmuls.
    assert (found.linear_matmuls, found.blocks, found.micro_batches) == (96, 12, 2)
    assert 0.8 < 3 * found.linear_ms / found.class_ms("matmul") < 1


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize("always", [True, False])
def test_a_trial_accelerates_the_model_in_fp8(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_fp8(monkeypatch)
    monkeypatch.setattr(acceleration, "unavailable", lambda *_: None)
    monkeypatch.setattr(accelerated, "_OPTIONS", COMPILED)
    monkeypatch.setattr(accelerated, "is_compiled_by_default", lambda _: True)
    if always:
        monkeypatch.setattr(choice, "not_worth_it", lambda *_: None)
    torch.manual_seed(0)
    model = Blocks(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backwards = Backwards()
    backwards.attach()
    changes = Changes({"dtype": "fp8"}, backwards)
    changes.on_torch_imported()
    x = torch.randn(16, 32)
    losses = []
    for number in range(1, 5):
        loss = (model(x) - 1).float().square().mean()
        loss.backward()
        optimizer.step()
        changes.optimizer_stepped(optimizer)
        optimizer.zero_grad()
        backwards.end_step()
        if number == 1:
            changes.on_models_known([model], [optimizer])
        changes.end_step(number)
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    missing = changes.without_effect()
    if always:
        assert missing == {}
        (report,) = changes._acceleration._reports
        assert "AdamW in one kernel" in str(report)
    else:
        assert "no layer runs in FP8: the casts cost more" in missing["accelerate"]
