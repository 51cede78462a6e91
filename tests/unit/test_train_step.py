"""`stepscope.TrainStep`: a training step of any model, on a CPU and on a backend without a GPU."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from fake_graphs import FakeGraphs
from stepscope.acceleration.capture import NotCapturedWarning
from stepscope.errors import StepscopeError, UsageError
from stepscope.optim import FusedAdamW, InBackwardAdamW

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Regression(nn.Module):
    """Returns its loss in one of the forms that libraries use."""

    def __init__(self, form: str = "scalar") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.form = form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.layers(x)
        loss = (out - y).square().mean()
        forms: dict[str, Any] = {
            "scalar": loss,
            "tuple": (loss, out),
            "dict": {"loss": loss, "out": out},
            "output": SimpleNamespace(loss=loss, out=out),
            "none": {"out": out},
            "vector": out,
        }
        return forms[self.form]


class HuggingFaceConfig(SimpleNamespace):
    __module__ = "transformers.configuration_utils"


@dataclass(frozen=True)
class OwnConfig:
    use_cache: bool = True


def test_a_loss_module_and_an_optimizer_with_a_closure_are_refused() -> None:
    model = Regression()
    with pytest.raises(UsageError, match=r"MSELoss\(\) takes outputs and targets"):
        stepscope.TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn=nn.MSELoss())
    with pytest.raises(UsageError, match="through a closure"):
        stepscope.TrainStep(model, torch.optim.LBFGS(model.parameters()))


class Caching(Regression):
    """As Hugging Face decoders: the configuration asks for a cache, which only the output needs."""

    def __init__(self, config: Any) -> None:
        super().__init__("tuple")
        self.config = config
        self.caches = 0

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.caches += self.config.use_cache
        return super().forward(x, y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


def batch(number: int, size: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(size, 4, generator=generator),
        "y": torch.randn(size, 2, generator=generator),
    }


def by_hand(
    make: Make,
    steps: int,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    gamma: float | None = None,
) -> tuple[list[Tensor], nn.Module]:
    """The losses of a loop as PyTorch's documentation writes it."""
    model = Regression()
    optimizer = make(model)
    scheduler = gamma and torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    losses = []
    for number in range(steps):
        loss = model(**batch(number))
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if number % accumulate < accumulate - 1:
            continue
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return losses, model


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 0.1},
    {"accumulate": 3},
    {"accumulate": 2, "max_grad_norm": 0.1, "gamma": 0.5},
    {"gamma": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_it_trains_as_a_loop_by_hand(make: Make, captured: bool, options: dict[str, Any]) -> None:
    steps = 48
    expected, reference = by_hand(make, steps, **options)
    model = Regression()
    optimizer = make(model)
    gamma = options.get("gamma")
    step = stepscope.TrainStep(
        model,
        optimizer,
        scheduler=gamma and torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma),
        backend=FakeGraphs(model, optimizer) if captured else None,
        **{name: value for name, value in options.items() if name != "gamma"},
    )
    losses = [step(batch(number)) for number in range(steps)]
    # With a schedule, AdamW's learning rate in a graph is rounded to float32.
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        list(model.parameters()), list(reference.parameters()), rtol=1e-5, atol=1e-6
    )
    assert step.captured.statistics.calls == steps
    if captured:
        assert step.captured.statistics.replayed > steps // 3
        assert step.captured.reasons == []
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("form", ["scalar", "tuple", "dict", "output"])
def test_the_loss_is_found_in_the_output(form: str) -> None:
    model = Regression(form)
    loss = stepscope.TrainStep(model, sgd(model))(batch(0))
    assert loss.shape == ()
    assert not loss.requires_grad
    assert torch.equal(loss, by_hand(sgd, 1)[0][0])


@pytest.mark.parametrize("form", ["none", "vector"])
def test_an_output_without_a_loss_is_an_error(form: str) -> None:
    model = Regression(form)
    step = stepscope.TrainStep(model, sgd(model))
    with pytest.raises(UsageError, match="loss_fn"):
        step(batch(0))
    assert step.pending == 0


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, tuple, list])
def test_batches_of_several_kinds(kind: Any) -> None:
    model = Regression()
    values = batch(0)
    given = kind(values.values()) if kind in (tuple, list) else kind(values)
    loss = stepscope.TrainStep(model, sgd(model))(given)
    assert torch.equal(loss, by_hand(sgd, 1)[0][0])


def test_a_tensor_and_a_loss_function() -> None:
    model = nn.Linear(4, 2)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum()  # type: ignore[no-any-return]

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = stepscope.TrainStep(model, optimizer, loss_fn=loss_fn)
    first = step(torch.ones(3, 4))
    assert step(torch.ones(3, 4)) < first


def test_autocast_is_for_the_forward() -> None:
    model = Regression("tuple")
    seen: list[torch.dtype] = []
    model.layers[0].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    step = stepscope.TrainStep(model, sgd(model), dtype=torch.bfloat16)
    step(batch(0))
    with torch.autocast("cpu", torch.bfloat16):
        stepscope.TrainStep(model, sgd(model))(batch(0))
    stepscope.TrainStep(model, sgd(model))(batch(0))
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_an_autocast_over_several_steps_uses_the_new_weights() -> None:
    losses = []
    model = Regression()
    step = stepscope.TrainStep(model, sgd(model))
    with torch.autocast("cpu", torch.bfloat16):
        losses = [step(batch(0)) for _ in range(4)]
    assert len({loss.item() for loss in losses}) == 4


def test_a_float16_scaler_scales_and_skips_overflows() -> None:
    model = Regression()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = stepscope.TrainStep(model, optimizer, scaler=scaler, max_grad_norm=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    bad = batch(0)
    bad["x"].fill_(float("inf"))
    step(bad)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert scaler.get_scale() == 2.0
    step(batch(1))
    assert not torch.equal(before[0], model.layers[0].weight)
    assert "SGD takes no grad_scale" in step.explain()


def test_an_exception_drops_the_gradients_of_its_update() -> None:
    model = Regression()
    step = stepscope.TrainStep(model, sgd(model), accumulate=2)
    step(batch(0))
    assert step.pending == 1
    with pytest.raises(RuntimeError, match=r"size of tensor|mat1 and mat2"):
        step({"x": torch.ones(3, 5), "y": torch.ones(3, 2)})
    assert step.pending == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    losses = [step(batch(number)) for number in range(4)]
    torch.testing.assert_close(losses, by_hand(sgd, 4, accumulate=2)[0], rtol=0, atol=0)


def test_an_update_that_cannot_be_captured_runs_after_the_graph() -> None:
    model = Regression()
    optimizer = sgd(model)
    step = stepscope.TrainStep(model, optimizer, backend=FakeGraphs(model, optimizer))
    for number in range(12):
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        step(batch(number))
    assert step.captured.statistics.replayed >= 6
    assert "the update runs eagerly: the learning rate of SGD" in str(step)


def test_graph_off_and_on() -> None:
    model = Regression()
    off = stepscope.TrainStep(model, sgd(model), graph="off")
    off(batch(0))
    assert off.explain() == (
        'eager: graph="off"; the update follows the backward pass:'
        " SGD is not torch.optim.AdamW or Adam"
    )
    on = stepscope.TrainStep(model, sgd(model), graph="on")
    with pytest.raises(StepscopeError, match="no tensor on a CUDA device"):
        on(batch(0))
    auto = stepscope.TrainStep(model, sgd(model))
    auto(batch(0))
    assert "no tensor is on a CUDA device" in auto.explain()


class EpochScheduler:
    """Takes the epoch, as those of timm do."""

    def step(self, epoch: int, metric: float | None = None) -> None:
        del epoch, metric


INVALID: list[dict[str, Any]] = [
    {"accumulate": 0},
    {"accumulate": 2.5},
    {"accumulate": True},
    {"accumulate": "2"},
    {"warmup": 0},
    {"max_graphs": 1.5},
    {"max_grad_norm": 0},
    {"max_grad_norm": -1.0},
    {"max_grad_norm": float("nan")},
    {"max_grad_norm": "1"},
    {"dtype": torch.int8},
    {"dtype": torch.float64},
    {"dtype": "bfloat16"},
    {"dtype": "fp8"},
    {"graph": "maybe"},
    {"loss_fn": "mse"},
    {"scheduler": object()},
    {"scheduler": EpochScheduler()},
]


@pytest.mark.parametrize("options", INVALID, ids=lambda options: "".join(options))
def test_invalid_options_are_errors(options: dict[str, Any]) -> None:
    model = Regression()
    ((name, value),) = options.items()
    with pytest.raises(UsageError, match=name if name != "scheduler" else type(value).__name__):
        stepscope.TrainStep(model, sgd(model), **options)


def test_a_scheduler_that_needs_a_metric_is_an_error_that_says_what_to_do() -> None:
    model = Regression()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau\.step\(\).*'metrics'") as raised:
        stepscope.TrainStep(model, optimizer, scheduler=scheduler)
    assert "call its step() yourself" in str(raised.value)
    step = stepscope.TrainStep(model, optimizer)
    for number in range(20):
        step(batch(number))
        # As after each validation.
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)


class Scaled(nn.Module):
    """A learned scale outside of the model, in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_that_are_added_later_are_clipped_and_updated(
    make: Make, captured: bool, accumulate: int
) -> None:
    """Of the model, which were frozen, and of the loss."""
    steps, added = 24 * accumulate, 12 * accumulate

    def start() -> tuple[nn.Module, Regression, Scaled, torch.optim.Optimizer]:
        model, loss = Regression(), Scaled()
        first, last = model.layers[0], model.layers[2]
        first.requires_grad_(False)
        return nn.ModuleList([model, loss]), model, loss, make(last)

    def loss_fn(model: Any, given: dict[str, Tensor], loss: Scaled) -> Tensor:
        # Large gradients, which are clipped.
        return 1e3 * (model.layers(given["x"]) * loss.scale - given["y"]).square().mean()

    def add(model: Regression, loss: Scaled, optimizer: torch.optim.Optimizer) -> None:
        model.layers[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model.layers[0].parameters())})
        optimizer.add_param_group({"params": list(loss.parameters())})

    both, model, loss, optimizer = start()
    for number in range(steps):
        if number == added:
            add(model, loss, optimizer)
        (loss_fn(model, batch(number), loss) / accumulate).backward()
        if number % accumulate == accumulate - 1:
            clipped = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(clipped, 0.1)
            optimizer.step()
            both.zero_grad()
    expected = [parameter.detach().clone() for parameter in both.parameters()]

    both, model, loss, optimizer = start()
    step = stepscope.TrainStep(
        model,
        optimizer,
        loss_fn=lambda model, given: loss_fn(model, given, loss),
        max_grad_norm=0.1,
        accumulate=accumulate,
        backend=FakeGraphs(both, optimizer) if captured else None,
    )
    for number in range(steps):
        if number == added:
            # Gradients that no optimizer had.
            both.zero_grad()
            add(model, loss, optimizer)
        step(batch(number))
    torch.testing.assert_close(list(both.parameters()), expected, rtol=1e-4, atol=1e-5)
    if captured:
        assert step.captured.statistics.captured >= 2 * accumulate
        assert step.captured.reasons == []


@pytest.mark.parametrize("attach", [True, False])
def test_an_optimizer_in_backward_trains_as_after_it(attach: bool) -> None:
    losses = {}
    for name in ("in backward", "after"):
        model = Regression()
        optimizer: torch.optim.Optimizer = (
            InBackwardAdamW(model.parameters(), attach=attach)
            if name == "in backward"
            else FusedAdamW(model.parameters())
        )
        step = stepscope.TrainStep(model, optimizer)
        losses[name] = [step(batch(number)) for number in range(5)]
    torch.testing.assert_close(losses["in backward"], losses["after"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 1.0},
        {"accumulate": 2},
        {"scaler": torch.amp.GradScaler("cpu")},
    ],
    ids=["max_grad_norm", "accumulate", "scaler"],
)
def test_an_optimizer_in_backward_refuses_what_needs_all_gradients(options: Any) -> None:
    model = Regression()
    with pytest.raises(UsageError, match=f"{next(iter(options))} needs all gradients"):
        stepscope.TrainStep(model, InBackwardAdamW(model.parameters()), **options)


def test_a_failed_capture_leaves_the_scaler_usable() -> None:
    model = Regression()
    optimizer = adamw(model)
    backend = FakeGraphs(model, optimizer)

    def fails(run: Callable[[Any], Any]) -> Any:
        del run
        # As far as a capture comes before a failure in the update.
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        scaler.unscale_(optimizer)
        raise RuntimeError("not permitted when stream is capturing")

    backend.capture = fails  # type: ignore[method-assign]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = stepscope.TrainStep(model, optimizer, scaler=scaler, max_grad_norm=1.0, backend=backend)
    for number in range(3):
        step(batch(number))
    with pytest.warns(NotCapturedWarning, match="not permitted"):
        step(batch(3))
    step(batch(4))
    assert step.captured.statistics.eager == 5


def test_the_model_creates_no_key_value_cache() -> None:
    model = Caching(HuggingFaceConfig(use_cache=True))
    step = stepscope.TrainStep(model, sgd(model))
    step(batch(0))
    assert model.caches == 0
    model(**batch(0))
    assert model.caches == 1
    # The output may be read by the function.
    stepscope.TrainStep(model, sgd(model), loss_fn=lambda one, given: one(**given)[0])(batch(0))
    assert model.caches == 2
    with pytest.raises(TypeError):
        step({"x": torch.zeros(3, 4)})
    assert model.config.use_cache


@pytest.mark.parametrize(
    "config", [OwnConfig(), HuggingFaceConfig(use_cache=True, num_kv_shared_layers=2)]
)
def test_a_cache_that_the_loss_may_depend_on_is_created(config: Any) -> None:
    model = Caching(config)
    stepscope.TrainStep(model, sgd(model))(batch(0))
    assert model.caches == 1
