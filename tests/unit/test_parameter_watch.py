"""Parameters of a wrapped module: which changes are detected, and their descriptions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stepscope.parallel.agreement import require_same_changes
from stepscope.parallel.errors import ParallelError
from stepscope.parallel.parameter_watch import ParameterWatch, unplanned_gradient


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2, bias=False)))


def unfreeze(module: nn.Module) -> None:
    module[0].bias.requires_grad_(False)


def add_module(module: nn.Module) -> None:
    module[1][0].inner = nn.Linear(2, 1, bias=False)


def add_parameter(module: nn.Module) -> None:
    module[1][0].register_parameter("scale", nn.Parameter(torch.ones(2)))


def replace(module: nn.Module) -> None:
    module[0].bias = nn.Parameter(torch.zeros(2))


def replace_frozen(module: nn.Module) -> None:
    module[0].bias = nn.Parameter(torch.zeros(2), requires_grad=False)


def delete(module: nn.Module) -> None:
    del module[1][1]


def convert(module: nn.Module) -> None:
    module[1].double()


def resize(module: nn.Module) -> None:
    module[0].weight.data = torch.zeros(4, 3)


CHANGES: dict[Callable[[nn.Module], None], list[str]] = {
    unfreeze: ["0.bias was frozen"],
    add_module: ["1.0.inner.weight (1×2, float32) was added"],
    add_parameter: ["1.0.scale (2, float32) was added"],
    replace: ["0.bias (2, float32) was replaced"],
    replace_frozen: ["0.bias (2, float32) was replaced", "0.bias was frozen"],
    delete: ["1.1.weight was removed"],
    convert: ["1.1.weight was converted to float64 on cpu"],
    resize: ["0.weight was resized to (4×3, float32)"],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_detected_until_a_new_snapshot(change: Callable[[nn.Module], None]) -> None:
    module = model()
    watch = ParameterWatch(module)
    assert not watch.changed()
    change(module)
    assert watch.changed()
    assert watch.changed(), "checking does not reset it"
    now = ParameterWatch(module)
    assert now.changes_since(watch) == CHANGES[change]
    assert not now.changed()
    new = {
        name for name, p in module.named_parameters() if any(p is q for q in now.new_since(watch))
    }
    verbs = ("added", "replaced", "resized")
    assert new == {line.split()[0] for line in CHANGES[change] if any(v in line for v in verbs)}


def test_training_and_moved_memory_are_not_changes() -> None:
    module = model()
    watch = ParameterWatch(module)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    module.load_state_dict(model().state_dict())
    module.eval()
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    assert not watch.changed()
    # A module without parameters replaces another one.
    module[1][0] = nn.Tanh()
    assert ParameterWatch(module).changes_since(watch) == []


def test_a_gradient_outside_the_plan_is_detected() -> None:
    module = model()
    planned = {id(p) for p in module[0].parameters()}
    assert unplanned_gradient(ParameterWatch(module), planned) is None
    module(torch.ones(1, 3)).sum().backward()
    assert unplanned_gradient(ParameterWatch(module), planned) == "1.1.weight"


def test_error_names_the_rank_that_changed_alone() -> None:
    require_same_changes([["a was frozen"], ["a was frozen"]])
    with pytest.raises(ParallelError, match="b was frozen on rank 1 but not on rank 0"):
        require_same_changes([["a was frozen"], ["a was frozen", "b was frozen"]])
    with pytest.raises(ParallelError, match="a was frozen on rank 0 but not on rank 2"):
        require_same_changes([["a was frozen"], ["a was frozen"], []])
