"""Each run-time change of a program: training loop, optimizers, losses, models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.changes import COMPILED_AFTER, Changes
from stepscope.advisor.trial.optimizers import Optimizers
from stepscope.analysis.advice.rules.pinned import goes_to_gpu, with_non_blocking
from watched_models import Network, batch


@pytest.mark.usefixtures("torch_as_it_was")
def test_losses_are_unscaled_and_summed_over_micro_batches() -> None:
    seen = Backwards()
    seen.attach()
    x = torch.ones(3, requires_grad=True)
    (2 * x).sum().backward()
    torch.autograd.backward(x.mean())
    seen.end_step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(x.sum()).backward()
    seen.end_step()
    seen.end_step()
    (x.sum() * float("nan")).backward()
    seen.end_step()
    assert seen.take() == [7.0, 3.0, None]
    assert seen.take() == []


@pytest.mark.usefixtures("torch_as_it_was")
def test_optimizers_are_fused_and_custom_adam_is_treated_as_adam() -> None:
    applied: Counter[str] = Counter()
    optimizers = Optimizers(applied)
    optimizers.fuse()

    class MyAdam(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
            raise AssertionError("replaced")

    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    plain = torch.optim.AdamW([weights[0]], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    mine = MyAdam([weights[1]])
    assert plain.param_groups[0]["fused"]
    torch.optim.lr_scheduler.ConstantLR(mine, factor=0.5, total_iters=100)
    plain.param_groups[0]["lr"] = 0.05
    for _ in range(3):
        for weight in weights:
            weight.grad = weight.detach() * 2
        plain.step()
        mine.step()
    assert applied["optimizer"] == 3
    assert not optimizers.switchable, "the state of a replaced optimizer is another one"
    torch.testing.assert_close(weights[0], weights[1])


@pytest.mark.usefixtures("torch_as_it_was")
def test_training_loop_is_changed() -> None:
    made = {"gradients": "none", "data": "workers", "checkpoint": "no", "batch": "6"}
    changes = Changes(made | {"dtype": "float32"}, Backwards())
    changes.on_torch_imported()
    model = Network()
    x, y = batch()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
    assert next(model.parameters()).grad is None
    assert DataLoader([1, 2]).num_workers > 0  # type: ignore[arg-type]
    assert DataLoader([1, 2], num_workers=1).prefetch_factor == 2  # type: ignore[arg-type]
    assert torch.utils.checkpoint.checkpoint(lambda a: a + 1, 1, use_reentrant=False) == 2
    sizes = [
        DataLoader([1] * 9, 4).batch_size,  # type: ignore[arg-type]
        DataLoader([1] * 9, batch_size=4).batch_size,  # type: ignore[arg-type]
        DataLoader([1] * 9, 2).batch_size,  # type: ignore[arg-type]
    ]
    assert sizes == [6, 6, 2]
    with torch.autocast("cpu", torch.bfloat16), torch.amp.autocast("cpu", enabled=False):
        assert model(x).dtype == torch.float32
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True):
        assert not torch.is_autocast_enabled("cpu")
    assert changes.applied == {"gradients": 1, "data": 4, "checkpoint": 1, "batch": 2, "dtype": 2}


@pytest.mark.usefixtures("torch_as_it_was")
def test_integer_read_back_with_float_is_a_float() -> None:
    Changes({"read_back": "late"}, Backwards()).on_torch_imported()
    right = (torch.arange(4) > 1).sum()
    assert (float(right), type(float(right)), right.item()) == (2.0, float, 2)


BRAIN, HALF, HERE = torch.bfloat16, torch.float16, torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        (("cpu",), {}),
        (("cpu", HALF), {}),
        (("cpu", HALF), {"copy": True}),
        # The signature used by nn.Module.to.
        (("cpu", None, False), {}),
        (("cpu", HALF, False, True), {"memory_format": torch.preserve_format}),
        ((torch.device("cpu"),), {"dtype": HALF, "non_blocking": False}),
        ((None, BRAIN, False), {}),
        ((HALF,), {}),
        ((HALF, False), {}),
        ((HALF, False, True), {}),
        ((HERE,), {}),
        ((HERE, False, True), {}),
        ((), {"tensor": HERE, "non_blocking": False}),
        ((), {"device": "cpu", "dtype": BRAIN}),
        ((), {"dtype": BRAIN}),
        ((), {}),
    ],
)
def test_every_signature_of_to_can_be_made_non_blocking(
    arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    x = torch.ones(3)
    before = (arguments, dict(keywords))
    expected = x.to(*arguments, **keywords)
    given, named = with_non_blocking(arguments, keywords)
    result = x.to(*given, **named)
    assert (result.dtype, result.device) == (expected.dtype, expected.device)
    assert named.get("non_blocking") is True or any(word is True for word in given[1:3])
    assert (arguments, keywords) == before


def test_copy_to_a_gpu_is_recognised_by_its_arguments() -> None:
    gpu = torch.device("cuda", 0)
    for arguments, keywords in (
        (("cuda",), {}),
        (("cuda:1", HALF), {}),
        ((gpu, None, True), {}),
        ((0,), {}),
        ((), {"device": gpu}),
        ((), {"dtype": HALF, "device": "cuda"}),
    ):
        assert goes_to_gpu(arguments, keywords), (arguments, keywords)
    for arguments, keywords in (
        (("cpu", HALF, True), {}),
        ((HALF, True), {}),
        ((HERE,), {}),
        ((), {"tensor": HERE}),
        ((None, HALF), {}),
        ((), {"dtype": HALF}),
        ((), {}),
    ):
        assert not goes_to_gpu(arguments, keywords), (arguments, keywords)


@pytest.mark.usefixtures("torch_as_it_was")
def test_losses_belong_to_their_step_even_if_float_is_delayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Backwards()
    seen.attach()
    for name in ("item", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, lambda _: -1.0)
    for factor in (2.0, 3.0):
        (factor * torch.ones(1, requires_grad=True)).sum().backward()
        seen.end_step()
    assert seen.take() == [2.0, 3.0]


@pytest.mark.usefixtures("torch_as_it_was")
def test_model_is_changed_once_it_is_known() -> None:
    seen = Backwards()
    seen.attach()
    changes = Changes(
        {
            "dtype": "bfloat16",
            "attention": "fused",
            "checkpoint": "blocks",
            "optimizer": "adamw-fused",
        },
        seen,
    )
    changes.on_torch_imported()
    model = Network()
    changes.on_models_known([model])
    formats = []
    model.head.register_forward_hook(lambda *given: formats.append(given[-1].dtype))
    x, y = batch()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    # The loss is inside autocast, which computes it in float32; the backward is outside.
    assert loss.dtype == torch.float32
    assert torch.is_autocast_enabled("cpu")
    loss.backward()
    assert not torch.is_autocast_enabled("cpu")
    assert formats == [torch.bfloat16]
    with torch.no_grad():
        model(x)
    assert formats[-1] == torch.float32
    changes.end_step(COMPILED_AFTER)
    assert list(changes.without_effect()) == ["optimizer", "attention"]


@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize("also", [{}, {"dtype": "bfloat16"}], ids=str)
def test_models_found_later_are_changed_and_each_model_only_once(also: dict[str, str]) -> None:
    changes = Changes({"checkpoint": "blocks"} | also, Backwards())
    changes.on_torch_imported()
    first, second = Network(), Network()
    changes.on_models_known([first])
    once = changes.applied["checkpoint"]
    assert once
    changes.on_models_known([first, second])
    assert changes.applied["checkpoint"] == 2 * once


@pytest.mark.usefixtures("torch_as_it_was")
def test_changes_are_taken_back_in_a_running_program() -> None:
    settings = {"optimizer": "adamw-fused", "gradients": "none", "dtype": "bfloat16"}
    changes = Changes(settings, Backwards())
    changes.on_torch_imported()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    group = optimizer.param_groups[0]

    def step() -> bool:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return model.weight.grad is None

    assert step()
    assert sorted(changes.switchable()) == ["gradients", "optimizer"], "not the dtype"
    changes.switch({"dtype": "bfloat16"})
    assert (group["fused"], group["foreach"]) == (None, False), "as the program created it"
    assert not step()
    assert optimizer.state[model.weight]["step"] == 2, "the state continues"
    changes.switch(settings)
    assert group["fused"]
    assert step()


@pytest.mark.usefixtures("torch_as_it_was")
def test_a_compiled_model_runs_uncompiled_while_that_is_taken_back() -> None:
    changes = Changes({"compile": "model"}, Backwards())
    changes.on_torch_imported()
    model = Network()
    changes.on_models_known([model])
    compiled = []
    model.compile = lambda **_: compiled.append(setattr(model, "_compiled_call_impl", len))  # type: ignore[method-assign,assignment]
    for number in range(1, COMPILED_AFTER + 1):
        if not compiled:
            model(batch()[0])
        changes.end_step(number)
    assert compiled
    assert changes.switchable() == ["compile"]
    changes.switch({})
    assert model._compiled_call_impl is None
    changes.switch({"compile": "model"})
    assert model._compiled_call_impl is len
    graphs = Changes({"compile": "graphs", "gradients": "none"}, Backwards())
    graphs.on_torch_imported()
    assert graphs.switchable() == [], "the graph has all changes in it"
