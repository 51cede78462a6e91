"""Advice about `stepscope.accelerate` and `stepscope.TrainStep`: predictions, conflicts, lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from own_records import attached, tried
from stepscope.acceleration.accelerate import _PIECES
from stepscope.advisor.advise.cases import OF_SCRIPTS, Script, Trial
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.outcome import Tried
from stepscope.advisor.advise.view import not_tried, trial_blocks
from stepscope.advisor.trial.accelerated import Acceleration
from stepscope.analysis.advice.changes import (
    Advice,
    advise,
    afterwards,
    applicable,
    compatible,
    not_applicable,
    predictions,
)
from stepscope.analysis.advice.facts import Facts, PhaseWork, PieceShare, PieceWork
from stepscope.analysis.advice.pieces import GROUPS, excluded_pieces, group_of
from stepscope.analysis.advice.rules.accelerate import _without_casts
from stepscope.analysis.advice.timeline import wall_ms
from stepscope.records.jsonl import read_records
from stepscope.views.program.setting import setting_of
from view_blocks import table_of

RESULTS = Path(__file__).parents[2] / "results"
GPU = {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12}


def piece(name: str, modules: int, **phases: tuple[float, float]) -> PieceWork:
    """A piece whose elementwise kernels take `now` ms in each phase, and `fused` ms when fused."""
    shares = tuple(
        PieceShare(
            phase=phase,
            classes={"elementwise": now},
            launches=6.0 * modules,
            fused_ms=fused,
            fused_launches=float(modules),
        )
        for phase, (now, fused) in phases.items()
    )
    return PieceWork(piece=name, modules=modules, shares=shares)


LLAMA = (
    piece("SDPA", 1),
    piece("head and loss", 2),
    piece("residual block", 10),
    piece("attention", 10, forward=(4.0, 1.0)),
    piece("gated MLP", 10, forward=(3.0, 1.0), backward=(4.0, 2.0)),
    piece("RMSNorm", 20, forward=(6.0, 1.0), backward=(8.0, 4.0)),
    piece("embedding", 1, backward=(2.0, 0.5)),
)


def facts(**changes: Any) -> Facts:
    """A step of 100 ms in bfloat16 autocast: 60 ms of matmuls, and what `accelerate` replaces."""
    phases = (
        PhaseWork(name="forward", classes={"matmul": 20.0, "elementwise": 15.0}, launches=400.0),
        PhaseWork(
            name="backward",
            classes={"matmul": 40.0, "elementwise": 15.0, "copy/cast": 3.0},
            launches=500.0,
        ),
        PhaseWork(name="optimizer", classes={"optimizer": 7.0}, launches=100.0),
    )
    fields: dict[str, Any] = {
        "on_gpu": True,
        "step_ms": 100.0,
        "dtype": "bfloat16",
        "autocast": True,
        "waits": "end",
        "phases": phases,
        "pieces": LLAMA,
        "optimizer_name": "AdamW",
        "rates": GPU,
        "bandwidth": 4e12,
        "parameters": 100_000_000,
        "loss_ms": 5.0,
        "logit_bytes": 1 << 30,
        "peak_bytes": 8 << 30,
    }
    return Facts(**fields | changes)


def predicted(step: Facts) -> dict[str, Advice]:
    return {advice.code: advice for advice, _ in predictions(step)}


def test_gain_of_each_piece() -> None:
    step = facts()
    gains = {code: round(one.gain_ms, 6) for code, one in predicted(step).items()}
    assert gains["accelerate-norms"] == 6 - 1 + 8 - 4
    # 6 B of each gradient at 4 TB/s: 3/7 of the cast layers are in the MLPs, 4/7 in the attention.
    assert gains["accelerate-mlp"] == pytest.approx(3 - 1 + 4 - 2 + 0.15 * 3 / 7)
    assert gains["accelerate-attention"] == pytest.approx(4 - 1 + 0.15 * 4 / 7)
    assert gains["accelerate-embedding"] == 1.5
    # 28 B of each parameter.
    assert gains["accelerate-optimizer"] == pytest.approx(7 - 1.1 * 0.7)
    assert gains["fused-loss"] == pytest.approx(0.6 * 5)
    loss = predicted(step)["fused-loss"]
    assert (loss.gain_bytes, loss.setting) == (1 << 30, {"loss": "accelerate"})


def test_a_model_that_accelerate_compiles() -> None:
    """Its blocks are fused as by torch.compile, and its loss and update as in every model."""
    step = facts(pieces=(piece("linear", 4),), compiled_by_accelerate=True)
    known = predicted(step)
    whole, both = known["accelerate"], known["accelerate-step"]
    update = known["accelerate-optimizer"].gain_ms
    assert whole.gain_ms == pytest.approx(known["compile"].gain_ms + 0.6 * 5 + update)
    assert set(whole.setting) == set(GROUPS)
    assert whole.lines == ("import stepscope", "stepscope.accelerate(model, optimizer)")
    assert both.why.startswith("the model is compiled, with fused kernels for attention")
    # Parts of it replace modules.
    assert known["accelerate-optimizer"].lines == (
        'stepscope.accelerate(model, optimizer, exclude=["linear"], compile=False)',
    )


def test_a_trial_applies_what_a_gpu_gets_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with blocks that are not known is compiled, in one form for all timed steps; parts
    alone replace modules."""
    monkeypatch.setattr(
        "stepscope.advisor.trial.accelerated.is_compiled_by_default", lambda _: True
    )
    forms = []
    for groups in (GROUPS, ["norm"]):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        trial = Acceleration()
        trial.add(groups)
        trial.apply(model, [torch.optim.AdamW(model.parameters())])
        (report,) = trial._reports
        forms.append(report.compilation is not None)
        if report.compilation is not None:
            assert "compiled with passes" in str(report)
        assert trial.without_effect() is None
    assert forms == [True, False]


@pytest.mark.parametrize("captured", [False, True])
def test_only_the_update_of_a_graph_saves_the_casts_of_weights(captured: bool) -> None:
    backward, optimizer = facts().phases[1:]
    forward = PhaseWork(name="forward", classes={"matmul": 35.0, "copy/cast": 3.0}, launches=400.0)
    step = facts(phases=(forward, backward, optimizer), captured=captured)
    after = _without_casts(step, LLAMA)
    saved = [
        now.device_ms - then.device_ms for now, then in zip(step.phases, after.phases, strict=True)
    ]
    assert saved == pytest.approx([0.15 * captured, 0.15, 0.0])


def test_the_whole_is_the_sum_of_its_pieces_and_one_line() -> None:
    step = facts()
    advice = predicted(step)
    parts = ("norms", "mlp", "attention", "embedding", "optimizer")
    total = sum(advice[f"accelerate-{part}"].gain_ms for part in parts)
    total += advice["fused-loss"].gain_ms
    whole = advice["accelerate"]
    assert whole.gain_ms == pytest.approx(total, rel=0.02)
    assert whole.gain_bytes == 1 << 30
    assert whole.lines == ("import stepscope", "stepscope.accelerate(model, optimizer)")
    assert set(whole.setting.values()) == {"accelerate"}
    assert list(applicable([whole], OF_SCRIPTS)) == [whole]
    after = afterwards(step, ["accelerate"])
    assert after.step_ms == pytest.approx(100 - total, rel=0.02)
    # Nothing of it is left to gain, and the compiler would trace the original layers.
    left = {one.code: one.reason for one in not_applicable(after)}
    assert "original layers" in left["compile"]
    assert not {code for code in predicted(after) if code.startswith("accelerate-")} - {
        "accelerate-step"
    }


def test_pieces_that_do_not_pay_are_excluded() -> None:
    """In float32 the fused attention kernel is slower than naive attention on this device."""
    naive = (
        PhaseWork(name="forward", classes={"matmul": 10.0, "elementwise": 5.0}),
        PhaseWork(name="backward", classes={"matmul": 20.0, "elementwise": 5.0}),
    )
    step = facts(dtype="float32", autocast=False, attention=naive, score_bytes=1 << 29)
    advice = predicted(step)
    assert advice["accelerate-attention"].gain_ms < 0
    assert advice["accelerate"].lines[-1] == (
        'stepscope.accelerate(model, optimizer, exclude=["attention"], compile=False)'
    )
    assert "attention" not in advice["accelerate"].setting
    assert advice["fused-loss"].lines == (
        "stepscope.accelerate(model,"
        ' exclude=["attention", "residual block", "gated MLP", "RMSNorm", "embedding", "linear"],'
        " compile=False)",
    )
    # With bfloat16 it gains, and the whole has it.
    later = predicted(afterwards(step, ["bfloat16"]))
    assert later["accelerate"].setting["attention"] == "accelerate"
    assert later["accelerate"].gain_bytes == (1 << 30) + (1 << 29)


def test_a_graph_gains_what_the_device_waits_for_launches() -> None:
    step = facts(launch_ms=0.12)
    assert wall_ms(step) == 120.0
    advice = predicted(step)
    assert advice["train-step"].gain_ms == pytest.approx(120 - 100)
    both = advice["accelerate-step"]
    assert both.gain_ms == pytest.approx(20 + predicted(facts())["accelerate"].gain_ms)
    assert both.lines[1:3] == (
        "stepscope.accelerate(model, optimizer)",
        "step = stepscope.TrainStep(model, optimizer)  # and max_grad_norm=, scheduler=, loss_fn="
        " as in your loop",
    )
    assert both.setting["step"] == "graph"
    after = afterwards(step, ["accelerate-step"])
    assert after.captured
    assert not {"train-step", "cuda-graph", "compile"} & predicted(after).keys()
    # Which calls make a step is not known with gradient accumulation.
    accumulating = predicted(facts(launch_ms=0.12, micro_batches=4))["train-step"]
    assert not accumulating.setting
    assert "TrainStep(model, optimizer, accumulate=4)" in accumulating.lines[1]
    # In a step that the device limits, a graph gains nothing.
    assert "train-step" not in predicted(facts())


def test_conflicts() -> None:
    step = facts(launch_ms=0.5, attention=(PhaseWork(name="forward", classes={"matmul": 1.0}),))
    by_code = predicted(step)
    whole = by_code["accelerate"]
    for code in ("fused-optimizer", "fused-attention", "compile", "accelerate-norms", "fused-loss"):
        assert whole.conflicts_with(by_code[code]), code
        assert by_code[code].conflicts_with(whole), code
    assert not whole.conflicts_with(by_code["train-step"])
    assert by_code["cuda-graph"].conflicts_with(by_code["train-step"])
    assert not by_code["compile"].conflicts_with(by_code["train-step"])
    # Both exclude the compiler, and go together.
    assert not by_code["accelerate-norms"].conflicts_with(by_code["accelerate-mlp"])
    assert not by_code["compile"].conflicts_with(by_code["accelerate-optimizer"])
    together = compatible([by_code["accelerate-optimizer"], by_code["compile"], whole])
    assert [one.code for one in together] == ["accelerate-optimizer", "compile"]


def test_on_a_cpu_only_attention_and_memory_gain() -> None:
    naive = PhaseWork(name="forward", classes={"matmul": 5.0, "elementwise": 10.0})
    pieces = tuple(msgspec.structs.replace(one, shares=()) for one in LLAMA)
    cpu: dict[str, Any] = {"on_gpu": False, "autocast": False, "dtype": "float32", "rates": {}}
    step = facts(attention=(naive,), pieces=pieces, **cpu)
    advice = predicted(step)
    assert advice["fused-loss"].gain_ms == 0
    assert advice["fused-loss"].gain_bytes == 1 << 30
    assert advice["fused-attention"].gain_ms > 0
    assert "accelerate" not in advice
    reasons = {one.code: one.reason for one in not_applicable(step)}
    for code in ("norms", "mlp", "attention", "embedding"):
        assert "on a CPU" in reasons[f"accelerate-{code}"]
    assert reasons["train-step"] == "the step runs on a CPU"
    assert "GPU kernel" in reasons["accelerate-optimizer"]
    assert "see fused attention and the fused loss" in reasons["accelerate"]


def test_models_without_pieces() -> None:
    reasons = {one.code: one.reason for one in not_applicable(facts(pieces=()))}
    assert "replaces no such part" in reasons["accelerate-norms"]
    old = facts(pieces=None)
    known = {one.code for one in not_applicable(old)} | predicted(old).keys()
    assert not {"accelerate", "accelerate-norms"} & known, "older records do not have them"
    compiled = {one.code: one.reason for one in not_applicable(facts(compiled=True))}
    assert "torch.compile traces the original layers" in compiled["accelerate"]
    assert predicted(facts(pieces=()))["fused-loss"].by_author


def test_names_of_pieces() -> None:
    names = ["RMSNorm", "residual block", "gated MLP", "attention", "SDPA", "linear", "embedding"]
    groups = ["norm", "norm", "mlp", "attention", "attention", "linear", "embedding"]
    assert [group_of(name) for name in names] == groups
    assert (group_of("head and loss"), group_of("something new")) == ("loss", "linear")
    # Every piece that `accelerate` can name has a group of its own, or is a linear layer.
    assert {one for one in _PIECES if group_of(one) == "linear"} == {"linear"}
    everything = excluded_pieces(names, set(groups))
    assert everything == []
    assert excluded_pieces(names, ["norm"]) == ["gated MLP", "attention", "embedding", "linear"]


def test_time_of_the_replaced_kernels_comes_from_the_trace() -> None:
    record = read_records(RESULTS / "advise-slow_h200.jsonl")[0]
    setting = setting_of(record)
    assert setting is not None
    pieces = {"RMSNorm": {"blocks.*.norm1": 12, "blocks.*.norm2": 12, "norm": 1}}
    step = facts_of(attached(record, setting=msgspec.structs.replace(setting, pieces=pieces)))
    assert step.pieces is not None
    (norms,) = step.pieces
    forward, backward = norms.shares
    assert (norms.modules, forward.launches, backward.launches) == (25, 25.0, 74.0)
    # One kernel in the forward already; three in the backward, of which the longest remains.
    assert forward.fused_ms == pytest.approx(1.1 * forward.ms)
    assert backward.fused_ms == pytest.approx(1.1 * (1.895889 + 0.078987), rel=1e-3)
    assert step.pieces == facts_of(attached(record, setting=msgspec.structs.replace(
        setting, pieces={"RMSNorm": {"blocks.*.norm1": 24, "norm": 1}}))).pieces  # fmt: skip


def test_page_says_what_to_write_and_what_was_not_tried() -> None:
    by_code = predicted(facts(launch_ms=0.12))
    both = by_code["accelerate-step"]
    trial = Trial(program=Script(target="train.py"), advice=(both,), step_ms=100.0)
    record = msgspec.structs.replace(tried(30.0), config=msgspec.to_builtins(trial))
    outcome = Tried(record)
    lines = table_of(trial_blocks([outcome.record]), "advise-lines")
    ((_, code, *_),) = lines.rows
    assert "stepscope.accelerate(model, optimizer)\nstep = stepscope.TrainStep(" in str(code)
    left = [both, by_code["accelerate-norms"], by_code["compile"]]
    texts = [one.text for one in not_tried(left, [outcome], OF_SCRIPTS)]
    assert "part of accelerate-step, which is kept" in texts[0]
    assert "fused norms" in texts[0]
    assert f"it excludes {both.title}, which is kept" in texts[1]


def test_accelerate_is_ranked_among_the_changes() -> None:
    codes = [one.code for one in advise(facts(launch_ms=0.12))]
    assert codes.index("accelerate-step") < codes.index("accelerate-norms")
