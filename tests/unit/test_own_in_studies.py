"""A user's model in the studies of training steps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from command_line import CommandLine
from fp8_on_cpu import pretend_fp8
from own_models import causal_lm, causal_lm_flops
from own_records import measured_on_cpu
from quiet_bench import QuietBench
from sample_records import value_of
from stepscope.acceleration import accelerate as acceleration
from stepscope.errors import UsageError
from stepscope.kernels.fp8 import choice, recipe
from stepscope.measure.device import CpuDevice
from stepscope.measure.timer import Phase
from stepscope.records.schema import Quantity, Record
from stepscope.studies.base import CaseSkipped, PlannedCase
from stepscope.studies.memory.measure import in_small
from stepscope.studies.registry import all_studies, find_study
from stepscope.training import timed as timed_step
from stepscope.training import user_step
from stepscope.training.building import build
from stepscope.training.factory import make_step
from stepscope.training.flags import WorkloadFlags
from stepscope.training.subject import TrainingStep
from stepscope.training.user_step import UserStep
from stepscope.training.workload import Workload, workloads
from view_blocks import findings_of, tables_of

MODELS = ("causal_lm", "vision_transformer", "conv_net")
SMALL: dict[str, dict[str, Any]] = {
    "benchmark": {"warmup": 1, "steps": 2, "min_seconds": 0.0, "mode": ("train-step",)},
    "memory": {"steps": 2, "mode": ("train-step",)},
    "profile": {"warmup": 1, "steps": 1, "traced": 1, "mode": ("train-step",)},
    "checkpointing": {"steps": 2, "checkpoint": ("no",)},
    "compile": {"part": ("trace",), "compile": ("model",)},
    "warmup": {"warmup": (1,), "steps": 4},
}


def cases(study: str, model: str, **flags: Any) -> tuple[PlannedCase, ...]:
    found = find_study(study)
    options = {"model": f"own_models:{model}", "batch": (2,)} | SMALL[study] | flags
    return found.planned(found.flags(**options))


def workload_of(model: str, **changes: Any) -> Workload:
    flags = WorkloadFlags(model=f"own_models:{model}", batch=(2,))
    (workload,) = workloads(flags, ("train-step",))
    return msgspec.structs.replace(workload, **changes)


def value(quantities: tuple[Quantity, ...], name: str) -> float:
    return next(one.value for one in quantities if one.name == name)


def measured(case: PlannedCase) -> Record:
    study = find_study(case.study)
    return measured_on_cpu(study, study.decode(case.config))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("study", SMALL)
def test_every_study_of_a_step_accepts_a_user_s_model(study: str, model: str) -> None:
    torch._dynamo.reset()
    (case,) = cases(study, model)
    assert f"own_models.{model}_b2_float32" in case.key
    result = measured(case)
    blocks = find_study(study).view([result])
    assert tables_of(blocks)
    text = " ".join(finding.text for finding in findings_of(blocks))
    assert "context 0" not in text
    if study != "compile":
        assert result.quantity("parameters")
        assert result.quantity("samples") == 2
        assert result.quantity("tokens") is None
    if model == "causal_lm" and study == "benchmark":
        assert result.quantity("flops") == causal_lm_flops(2)


def test_flops_of_a_forward_and_of_checkpointed_blocks() -> None:
    def step(**changes: Any) -> TrainingStep:
        return make_step(workload_of("causal_lm", **changes), CpuDevice())

    full, forward, checkpointed = step(), step(mode="forward"), step(checkpoint="1")
    assert isinstance(full, UserStep)
    assert [phase.name for phase in forward.phases()] == ["forward"]
    steps = {"full": full, "forward": forward, "checkpointed": checkpointed}
    flops = {
        name: next(q.value for q in one.quantities() if q.name == "flops")
        for name, one in steps.items()
    }
    assert flops["checkpointed"] == flops["full"] == causal_lm_flops(2)
    assert 0 < flops["forward"] < flops["full"] / 2
    assert checkpointed.gradients_missing() == full.gradients_missing() == 0


def test_a_user_s_model_runs_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    in_fp8 = workload_of("causal_lm", dtype="fp8", batch=1)
    assert in_fp8.needs == ("bfloat16", "fp8")
    with pytest.raises(CaseSkipped, match="FP8 GEMMs need an NVIDIA GPU"):
        make_step(in_fp8, CpuDevice())
    with pytest.raises(UsageError, match="not compiled"):
        workload_of("causal_lm", dtype="fp8", compile="block")
    pretend_fp8(monkeypatch)
    for module in (recipe, acceleration):
        monkeypatch.setattr(module, "unavailable", lambda *_: None)
    with pytest.raises(CaseSkipped, match="no layer would run in FP8: the casts cost more"):
        make_step(in_fp8, CpuDevice())
    monkeypatch.setattr(choice, "not_worth_it", lambda *_: None)
    losses = []
    for dtype in ("fp8", "bfloat16"):
        step = make_step(msgspec.structs.replace(in_fp8, dtype=dtype), CpuDevice())
        values = []
        for _ in range(2):
            step.run()
            assert step.loss is not None
            values.append(step.loss.item())
        # Counted without the replacements, which are made again.
        assert value(step.quantities(), "flops") == causal_lm_flops(1)
        step.run()
        losses.append(values)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]
    assert losses[0] == sorted(losses[0], reverse=True)


@pytest.mark.parametrize("compiled", ["no", "model"])
def test_flops_are_counted_on_the_measured_model(
    compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second model would double the memory and be part of the peak."""
    torch._dynamo.reset()
    built = []
    monkeypatch.setattr(user_step, "build", lambda name: built.append(name) or build(name))
    workload = workload_of("causal_lm", compile=compiled, checkpoint="1")
    step = make_step(workload, CpuDevice())
    assert value_of(step.quantities(), "flops") == causal_lm_flops(2)
    assert built == ["own_models:causal_lm"]


def test_the_peak_is_read_before_flops_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    plain = UserStep.quantities
    monkeypatch.setattr(
        UserStep, "quantities", lambda step: order.append("quantities") or plain(step)
    )
    monkeypatch.setattr(timed_step, "_peak", lambda *_: order.append("peak"))
    (case,) = cases("benchmark", "causal_lm")
    measured(case)
    assert order == ["peak", "quantities"]


@pytest.mark.parametrize("model", [{}, {"model": "own_models:causal_lm"}])
def test_run_resets_and_runs_every_phase_in_order(
    model: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {} if model else {"size": ("tiny",), "context": (16,), "vocab": 64}
    flags = WorkloadFlags(**model, **size, batch=(2,))  # type: ignore[arg-type]
    (workload,) = workloads(flags, ("forward-backward",))
    step = make_step(workload, CpuDevice())
    seen: list[str] = []
    phases = tuple(
        Phase(phase.name, lambda phase=phase: (seen.append(phase.name), phase.run()))  # type: ignore[misc]
        for phase in step.phases()
    )
    reset = step.reset
    monkeypatch.setattr(step, "phases", lambda: phases)
    monkeypatch.setattr(step, "reset", lambda: (seen.append("reset"), reset()))
    step.run()
    first = [p.grad.clone() for p in step.model.parameters() if p.grad is not None]
    step.run()
    assert seen == ["reset", *(phase.name for phase in phases)] * 2
    # The reset dropped the gradients of the first step, so the second does not accumulate.
    second = [p.grad for p in step.model.parameters() if p.grad is not None]
    torch.testing.assert_close(second, first)


def test_checkpointed_blocks_save_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    plain, checkpointed = (
        measured(case) for case in cases("checkpointing", "causal_lm", checkpoint=())
    )
    assert (plain.config["checkpoint"], checkpointed.config["checkpoint"]) == ("no", "1")
    records = (plain, checkpointed)
    most, least = (one.quantity("peak_bytes", phase="forward") or 0 for one in records)
    assert least < most
    assert "predicted_bytes" not in {one.name for one in plain.quantities}
    assert find_study("checkpointing").view([plain, checkpointed])


def test_a_model_without_blocks_is_skipped_if_blocks_are_requested() -> None:
    (case,) = cases("checkpointing", "conv_net", checkpoint=("1",))
    with pytest.raises(CaseSkipped, match="no ModuleList of blocks"):
        measured(case)
    (case,) = cases("benchmark", "conv_net", compile=("block",))
    with pytest.raises(CaseSkipped, match="no ModuleList of blocks"):
        measured(case)
    own = find_study("own")
    (case,) = own.cases(own.flags(model="own_models:conv_net", batch=(2,), compile=("block",)))
    with pytest.raises(CaseSkipped, match="no ModuleList of blocks"):
        own.measure(case, QuietBench())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"model": "own_models:causal_lm", "context": (64,)},
            "--context applies to the built-in models",
        ),
        (
            {"model": "own_models:causal_lm", "d_model": 64},
            "--d-model applies to the built-in models",
        ),
        ({"model": "own_models:causal_lm", "checkpoint": ("2",)}, "--checkpoint no or 1"),
        ({"model": "own_models:causal_lm", "dtype": ("bfloat16-master",)}, "no master weights"),
        ({"model": "own_models:causal_lm", "dtype": ("bf16-stream",)}, "its own residual stream"),
        ({"model": "train.py"}, "not of the form"),
    ],
)
def test_invalid_flags_are_rejected(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(workloads(WorkloadFlags(**flags), ("train-step",)))


def test_the_shape_of_a_user_s_model_is_unknown() -> None:
    (workload,) = workloads(WorkloadFlags(model="own_models:conv_net"), ("train-step",))
    with pytest.raises(UsageError, match="is unknown"):
        workload.model()
    assert workload.name == "own_models.conv_net in float32"
    assert isinstance(msgspec.convert(msgspec.to_builtins(workload), Workload), Workload)


def test_a_study_without_model_support_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.cli import main

    without = [name for name, study in all_studies().items() if study.no_model]
    assert {"attention", "flash", "allreduce", "techniques", "step"} <= set(without)
    for name, study in all_studies().items():
        accepts = "model" in study.flags.__struct_fields__
        assert accepts or study.no_model or study.recorded_by, name
    assert main(["run", "techniques", "--model", "a:b"]) == 2
    printed = capsys.readouterr().err
    assert "it measures single kernels" in printed
    assert "these studies do: own, benchmark" in printed


@pytest.mark.timeout(180)
def test_ranks_train_a_user_s_model(cli: CommandLine) -> None:
    """Under `torchrun` they do so in tests/distributed, for FSDP as well."""
    done = cli.line(
        "run ddp --bucket-mb 1 --model own_models:causal_lm --ranks 2 --rounds 2 --device cpu"
    )
    assert done.returncode == 0, done.stderr
    (ddp,) = cli.records()
    assert ddp.status == "ok"
    model, _ = causal_lm()
    assert ddp.quantity("gradient_bytes") == 4 * sum(p.numel() for p in model.parameters())


def test_the_small_step_before_a_memory_measurement_uses_the_same_model() -> None:
    small = in_small(workload_of("causal_lm", checkpoint="1", mode="forward-backward"))
    assert (small.own, small.batch, small.checkpoint) == ("own_models:causal_lm", 1, "no")
    step = make_step(small, CpuDevice())
    step.run()
    assert isinstance(step, UserStep)
    assert value_of(step.quantities(), "samples") == 1
