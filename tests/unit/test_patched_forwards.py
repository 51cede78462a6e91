"""Forwards that `accelerate` adds to modules, among those that a program sets itself: each is
removed by itself, copies have those of the program, and its hooks run as often as before."""

from __future__ import annotations

import copy
import functools
import io
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

import stepscope
from accelerated_models import (
    COMPILED,
    Block,
    Model,
    Norm,
    accelerated,
    batch,
    created,
    losses,
    sgd,
)
from stepscope.acceleration.report import Report

Attributes = dict[str, dict[str, Any]]


def attributes(*models: nn.Module) -> Attributes:
    """The attributes of all modules, but for the numbers that a module keeps of itself."""
    return {
        f"{number} {name}": dict(vars(one))
        for number, model in enumerate(models)
        for name, one in model.named_modules()
    }


def parent_and_child() -> tuple[list[nn.Module], list[nn.Module]]:
    model = created()
    return [model], [model, model.blocks[1]]


def shared_blocks() -> tuple[list[nn.Module], list[nn.Module]]:
    first, second = created(), created()
    second.blocks[0] = first.blocks[0]
    second.blocks[1].mlp = first.blocks[1].mlp
    return [first, second], [first, second]


@pytest.mark.parametrize("create", [parent_and_child, shared_blocks])
def test_undo_in_any_order_restores_modules_of_several_models(
    create: Callable[[], tuple[list[nn.Module], list[nn.Module]]],
) -> None:
    models, targets = create()
    before = attributes(*models)
    for order in permutations(range(len(targets))):
        for accelerate_first in permutations(targets):
            reports = {
                id(one): stepscope.accelerate(one, dtype=torch.bfloat16, compile=COMPILED)
                for one in accelerate_first
            }
            for number in order:
                reports[id(targets[number])].undo()
            assert attributes(*models) == before


def test_an_undo_leaves_the_other_model_accelerated() -> None:
    model = created()
    inner = stepscope.accelerate(model.blocks[0], compile=COMPILED)
    outer = stepscope.accelerate(model, compile=COMPILED)
    inner.undo()
    with torch.autocast("cpu", torch.bfloat16):
        model(*batch()).backward()
    assert outer.is_compiled
    assert "forward" not in vars(model.blocks[0])


@pytest.mark.parametrize("wraps", [True, False])
def test_undo_keeps_a_later_forward_of_the_program(wraps: bool) -> None:
    model = created()
    report = accelerated(model)
    calls = []

    def patched(module: Any) -> Callable[..., Any]:
        before = module.forward

        def forward(*args: Any) -> Any:
            calls.append(module)
            return before(*args) if wraps else type(module).forward(module, *args)

        return forward

    parts = [model, model.head, model.blocks[0], model.blocks[0].norm]
    later = [patched(one) for one in parts]
    for one, forward in zip(parts, later, strict=True):
        one.forward = forward
    second = stepscope.accelerate(model.blocks, compile=COMPILED)
    report.undo()
    second.undo()
    assert [vars(one)["forward"] for one in parts] == later
    assert not any("forward" in vars(one) for one in model.modules() if one not in parts)
    plain = created()
    assert losses(model, sgd(model), 2) == losses(plain, sgd(plain), 2)
    assert [calls.count(one) for one in parts] == [2] * 4
    replica = model.blocks[1]._replicate_for_data_parallel()
    assert "forward" not in vars(replica)


def doubled(module: nn.Module, *x: Tensor) -> Tensor:
    out: Tensor = 2 * type(module).forward(module, *x)
    return out


@pytest.mark.parametrize("form", ["function", "method", "partial"])
@pytest.mark.parametrize("name", ["", "head"])
def test_copies_have_the_forward_of_the_program(name: str, form: str) -> None:
    model = created()
    part = model.get_submodule(name)
    own: dict[str, Any] = {
        "function": lambda *x: doubled(part, *x),
        "method": MethodType(doubled, part),
        "partial": functools.partial(doubled, part),
    }
    part.forward = own[form]
    with torch.no_grad():
        expected = model(*batch())
    assert not torch.equal(expected, created()(*batch()).detach())
    report = stepscope.accelerate(model, dtype=torch.bfloat16)
    assert (vars(part)["forward"] is own[form]) == bool(name), "the model has a layer"
    copies = [copy.deepcopy(model)]
    if form == "partial":
        # The others cannot be pickled, by torch itself either.
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        copies.append(torch.load(stream, weights_only=False))
    with torch.no_grad():
        for one in copies:
            assert torch.equal(one(*batch()), expected)
            assert type(vars(one.get_submodule(name))["forward"]) is type(own[form])
        if form == "method":
            model.head.weight.mul_(3)
            assert torch.equal(copies[0](*batch()), expected), "it has the weights of the original"
    report.undo()
    assert vars(part)["forward"] is own[form]


def test_a_copy_is_accelerated_as_the_model_was() -> None:
    model = created()
    report = accelerated(model)
    for one in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        again = accelerated(one)
        assert again.applied == report.applied
        again.undo()


def test_a_forward_that_the_program_sets_on_a_part_runs() -> None:
    plain, changed = created(), created()
    accelerated(changed)
    for model in (plain, changed):
        for layer in (model.blocks[0].mlp.down_proj, model.blocks[1].norm):
            layer.forward = MethodType(doubled, layer)  # type: ignore[method-assign]
    assert losses(changed, sgd(changed)) == pytest.approx(losses(plain, sgd(plain)), rel=5e-3)


GLOBAL_HOOKS = {
    "forward": torch_modules.register_module_forward_hook,
    "forward_pre": torch_modules.register_module_forward_pre_hook,
    "backward": torch_modules.register_module_full_backward_hook,
    "backward_pre": torch_modules.register_module_full_backward_pre_hook,
}


def counted(model: Model, kind: str, report: Callable[[], Report] | None, late: bool) -> Any:
    """Train with a global hook; return the losses, and the calls of the hook by the module."""
    names = {id(one): name for name, one in model.named_modules()}
    calls: Counter[str] = Counter()

    def hook(module: nn.Module, *_: Any) -> None:
        calls[names[id(module)]] += 1

    if report is not None and late:
        report()
        losses(model, sgd(model), 1)
    handle = GLOBAL_HOOKS[kind](hook)
    try:
        if report is not None and not late:
            report()
        return losses(model, sgd(model), 2), calls
    finally:
        handle.remove()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after accelerate"])
@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_global_module_hooks_see_every_module(kind: str, late: bool) -> None:
    plain, fused = created(), created()
    if late:
        losses(plain, sgd(plain), 1)
    expected, calls = counted(plain, kind, None, late)
    reports: list[Report] = []
    actual, seen = counted(
        fused,
        kind,
        lambda: reports.append(stepscope.accelerate(fused, compile=COMPILED)) or reports[0],
        late,
    )
    assert seen == calls
    assert actual == pytest.approx(expected, rel=5e-3)
    (report,) = reports
    losses(fused, sgd(fused), 1)
    assert report.is_compiled


def test_gradient_hooks_do_not_run_in_comparisons() -> None:
    counts, results = [], []
    for accelerate in (False, True):
        model, calls = created(), Counter[str]()
        for name, parameter in model.named_parameters():
            count = functools.partial(calls.update, [name])
            parameter.register_hook(lambda grad, count=count: count() or 2 * grad)
        if accelerate:
            report = stepscope.accelerate(model, compile=COMPILED)
        results.append(losses(model, sgd(model), 4))
        counts.append(calls)
    assert counts[1] == counts[0]
    assert set(counts[0].values()) == {4}
    assert results[1] == pytest.approx(results[0], rel=5e-3)
    assert report.is_compiled


class ReadsLogits(Model):
    """Returns logits from which it has computed a loss."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        logits = self.head(self.embed(tokens))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss, logits


def test_logits_can_be_read_after_the_update() -> None:
    results = []
    for compile in (COMPILED, False):
        torch.manual_seed(0)
        model = ReadsLogits()
        stepscope.accelerate(model, compile=compile)
        optimizer = sgd(model)
        loss, logits = model(*batch())
        assert torch.is_tensor(logits)
        loss.backward()
        optimizer.step()
        results.append(logits + 0)
    torch.testing.assert_close(*results)


def test_blocks_of_several_models_train_alike() -> None:
    """A block that two models share, both of which are accelerated."""
    plain, fused = ([created(), created()] for _ in range(2))
    for first, second in (plain, fused):
        second.blocks[0] = first.blocks[0]
    for model in fused:
        stepscope.accelerate(model, compile=COMPILED)
    results = [
        losses(first, sgd(first), 2) + losses(second, sgd(second), 2)
        for first, second in (plain, fused)
    ]
    assert results[1] == pytest.approx(results[0], rel=5e-3)
    assert isinstance(fused[0].blocks[0], Block)
    assert isinstance(fused[0].blocks[0].norm, Norm)
