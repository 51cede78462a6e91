"""The experiments of the profile study, as far as they run without a GPU."""

from __future__ import annotations

import pytest
import torch

from stepscope.analysis.predict.plan import MODES, Mode
from stepscope.errors import first_cause
from stepscope.measure.device import CpuDevice
from stepscope.studies.profile.experiments import LARGER, experiments, larger_batch
from stepscope.training.captured import forget_steps
from stepscope.training.flags import WorkloadFlags
from stepscope.training.transformer import TransformerStep
from stepscope.training.workload import workloads


def built(mode: Mode, compiled: str = "no") -> TransformerStep:
    flags = WorkloadFlags(size=("tiny",), context=(8,), batch=(2,), vocab=16, compile=(compiled,))
    (workload,) = workloads(flags, (mode,))
    return TransformerStep(workload, CpuDevice())


def run(step: TransformerStep) -> None:
    step.run_phases()


def notes(step: TransformerStep) -> list[dict[str, object]]:
    """Metadata of the AccumulateGrad node of each parameter that the next forward uses."""
    views = [p.view_as(p) for p in step.model.parameters()]
    return [view.grad_fn.next_functions[0][0].metadata for view in views]  # type: ignore[union-attr,misc]


@pytest.mark.parametrize("mode", MODES)
def test_forgotten_steps_leave_no_autograd_nodes(mode: Mode) -> None:
    step = built(mode)
    run(step)
    for note in notes(step):
        note["of"] = "an earlier step"
    run(step)
    assert all(notes(step)), "a repeated step reuses the nodes of the previous one"
    forget_steps(step)
    assert not any(notes(step))
    assert all(p.grad is None for p in step.model.parameters())


def test_a_larger_batch_has_the_same_model_and_leaves_the_step_as_it_was() -> None:
    step = built("train-step")
    seen: list[torch.Size] = []
    step.model.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    tried = larger_batch(step, CpuDevice(), enough_seconds=60.0)
    assert set(seen) == {torch.Size((2 * LARGER[0], 8))}
    assert tried.times == LARGER[0]
    assert len(tried.timing.series[0].values) == 3
    assert step.tokens.shape == (2, 8)
    assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.parametrize("fits", [*LARGER[1:], 1])
def test_a_batch_that_does_not_fit_is_reduced(fits: int) -> None:
    step = built("train-step")

    def refuse(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs[0]) > 2 * fits:
            raise torch.OutOfMemoryError(f"no room for {len(inputs[0])} sequences")

    step.model.register_forward_pre_hook(refuse)
    if fits == 1:
        with pytest.raises(torch.OutOfMemoryError, match=f"no room for {2 * LARGER[-1]}"):
            larger_batch(step, CpuDevice(), enough_seconds=60.0)
    else:
        assert larger_batch(step, CpuDevice(), enough_seconds=60.0).times == fits
    run(step)


def test_a_compiled_step_is_not_compiled_again_for_an_experiment() -> None:
    eager, compiled = (built("forward", how).workload for how in ("no", "block"))
    assert [name for name, _ in experiments(eager)] == ["larger_batch", "graph_replay"]
    assert [name for name, _ in experiments(compiled)] == ["graph_replay"]


def test_the_first_failure_is_reported() -> None:
    error = RuntimeError("a previous error")
    error.__context__ = ValueError("a wait inside of a capture\nand more")
    assert first_cause(error) == "ValueError: a wait inside of a capture"
    assert first_cause(KeyError()) == "KeyError"
