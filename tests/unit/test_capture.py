"""`stepscope.capture`: the logic of the host, on a backend without a GPU."""

from __future__ import annotations

import functools
import random
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import stepscope
from fake_graphs import FakeGraphs
from stepscope.acceleration.capture import Captured, NotCapturedWarning
from stepscope.acceleration.graphs.arguments import describe, fresh, with_tensors
from stepscope.acceleration.graphs.discovery import find_objects
from stepscope.errors import StepscopeError

Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


class Training:
    """A small model with its step, captured by the fake backend, and the same step eagerly."""

    def __init__(self, make: Make = sgd, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = make(self.model)
        self.python_calls = 0
        self.backend = FakeGraphs(self.model, self.optimizer)
        self.captured = Captured(self.plain, backend=self.backend, **options)

    def plain(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        self.python_calls += 1
        loss = scale * (self.model(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def batch(number: int, size: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


def eager_losses(make: Make, act: Callable[[Training, int], None], steps: int = 16) -> list[Tensor]:
    training = Training(make)
    losses = []
    for number in range(steps):
        act(training, number)
        losses.append(training.plain(*batch(number)).detach())
    return losses


def run(captured: Any, calls: int, size: int = 3) -> list[Tensor]:
    return [captured(*batch(number, size)) for number in range(calls)]


def nothing(training: Training, number: int) -> None:
    del training, number


def check_against_eager(
    make: Make, act: Callable[[Training, int], None] = nothing, exact: bool = True
) -> Training:
    training = Training(make)
    expected = eager_losses(make, act)
    losses = []
    for number in range(len(expected)):
        act(training, number)
        losses.append(training.captured(*batch(number)))
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(losses, expected, **tolerance)
    return training


@pytest.mark.parametrize("make", [sgd, adamw])
def test_losses_equal_those_of_eager_steps(make: Make) -> None:
    training = check_against_eager(make)
    assert training.captured.statistics.eager == 3
    assert training.captured.statistics.replayed == 13
    assert training.captured.statistics.captured == training.captured.graphs == 1
    assert training.captured.reasons == []


def test_results_are_new_tensors_without_history() -> None:
    training = Training()
    results = [training.captured(*batch(0)) for _ in range(6)]
    assert not any(result.requires_grad for result in results)
    assert len({result.data_ptr() for result in results}) == 6
    assert len({result.item() for result in results}) == 6


def test_a_scheduler_changes_the_learning_rate_of_adamw_in_the_graph() -> None:
    def act(training: Training, number: int) -> None:
        training.optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)

    training = check_against_eager(adamw, act, exact=False)
    assert training.captured.statistics.captured == 1
    assert training.captured.statistics.replayed == 13
    assert training.optimizer.param_groups[0]["lr"] == 0.01 / 16
    assert isinstance(training.optimizer.param_groups[0]["lr"], float)


def test_a_learning_rate_that_is_a_tensor_stays_the_callers() -> None:
    rate = torch.tensor(0.5)
    training = Training(lambda model: torch.optim.AdamW(model.parameters(), lr=rate, fused=True))
    run(training.captured, 5)
    assert training.optimizer.param_groups[0]["lr"] is rate
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    training.captured(*batch(5))
    assert training.captured.graphs == 0


def test_a_changed_constant_captures_again() -> None:
    def act(training: Training, number: int) -> None:
        if number == 6:
            training.optimizer.param_groups[0]["lr"] = 0.5

    training = check_against_eager(sgd, act)
    assert training.captured.statistics.captured == 2
    assert training.captured.statistics.eager == 4


def test_a_constant_that_changes_in_every_step_stays_eager_and_says_so() -> None:
    training = Training()

    def scheduled(x: Tensor, y: Tensor) -> Tensor:
        training.optimizer.param_groups[0]["lr"] *= 0.9
        result: Tensor = training.captured(x, y)
        return result

    with pytest.warns(NotCapturedWarning, match=r"lr of the optimizer changed") as caught:
        run(scheduled, 40)
    assert len(caught) == 1
    assert training.captured.statistics.captured == 0


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_write_by_hand_is_honoured(make: Make) -> None:
    def act(training: Training, number: int) -> None:
        if number in (5, 9):
            with torch.no_grad():
                training.model[0].weight.copy_(torch.full((8, 4), number / 10))

    training = check_against_eager(make, act)
    # The second write needs no other graph: the first one made it repeat copies of weights.
    assert training.captured.statistics.captured == 2


@pytest.mark.parametrize("change", ["data", "parameter", "frozen", "optimizer state", "child"])
def test_changed_state_captures_again(change: str) -> None:
    def act(training: Training, number: int) -> None:
        model = training.model
        if number != 6:
            return
        if change == "data":
            model[0].weight.data = torch.ones(8, 4)
        elif change == "parameter":
            model[0].bias = nn.Parameter(torch.ones(8))
        elif change == "frozen":
            model[0].weight.requires_grad_(False)
        elif change == "optimizer state":
            training.optimizer.load_state_dict(training.optimizer.state_dict())
        else:
            model[1] = nn.Sigmoid()

    training = check_against_eager(adamw, act)
    assert training.captured.statistics.captured == 2
    assert training.captured.statistics.eager >= 4


def test_hooks_that_are_added_later_run() -> None:
    training = Training()
    seen: list[int] = []
    for number in range(8):
        if number == 6:
            training.model[0].register_forward_hook(lambda *_: seen.append(1))
        training.captured(*batch(number))
    assert training.captured.statistics.captured == 2
    assert seen


def test_shapes_arguments_and_modes_have_their_own_graphs() -> None:
    training, reference = Training(), Training()
    calls = [(3, 1.0, True)] * 5 + [(5, 1.0, True)] * 5 + [(3, 2.0, True)] * 5
    calls += [(3, 1.0, False)] * 5 + [(3, 1.0, True)] * 2
    for number, (size, scale, train) in enumerate(calls):
        for one in (training, reference):
            one.model.train(train)
        loss = training.captured(*batch(number, size), scale)
        torch.testing.assert_close(
            loss, reference.plain(*batch(number, size), scale).detach(), rtol=0, atol=0
        )
    assert training.captured.graphs == 4
    assert training.captured.statistics.eager == 12


def test_more_shapes_than_max_graphs_run_eagerly_until_a_graph_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(max_graphs=1)
    run(training.captured, 5)
    with pytest.warns(NotCapturedWarning, match="max_graphs") as caught:
        run(training.captured, 8, size=5)
    assert len(caught) == 1
    assert training.captured.statistics.replayed == 2
    monkeypatch.setattr("stepscope.acceleration.capture._IDLE_CALLS", 3)
    training.captured(*batch(0, 5))
    assert training.captured.graphs == 1
    assert training.captured.statistics.replayed == 3


def test_a_graph_beyond_pool_bytes_is_dropped() -> None:
    training = Training(pool_bytes=150)
    training.backend.bytes_per_graph = 100
    run(training.captured, 5)
    with pytest.warns(NotCapturedWarning, match="pool_bytes=150"):
        run(training.captured, 5, size=5)
    assert training.captured.graphs == 1


def test_a_failed_capture_restores_everything_and_runs_eagerly() -> None:
    expected = eager_losses(adamw, nothing)
    training = Training(adamw)
    # The fake backend runs what it captures, and a GPU does not.
    training.backend.capture = _failing  # type: ignore[method-assign]
    with pytest.warns(NotCapturedWarning, match="not permitted when stream is capturing") as told:
        losses = run(training.captured, len(expected))
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    assert len(told) == 1
    assert training.captured.statistics.replayed == 0
    assert training.optimizer.param_groups[0]["capturable"] is False
    assert isinstance(training.optimizer.param_groups[0]["lr"], float)
    assert "step" not in vars(training.optimizer)


def _failing(run: Callable[[Any], Any]) -> Any:
    del run
    raise RuntimeError("operation not permitted when stream is capturing")


def test_state_that_the_optimizer_creates_in_the_capture_is_refused() -> None:
    training = Training()
    extra = nn.Parameter(torch.ones(2))
    training.optimizer.add_param_group({"params": [extra]})
    run(training.captured, 3)

    def plain(x: Tensor, y: Tensor) -> Tensor:
        loss = (training.model(x) - y + extra).square().mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        return loss

    training.captured._function = plain
    with pytest.warns(NotCapturedWarning, match="created state during the capture"):
        training.captured(*batch(3))
    assert training.captured.graphs == 0


def test_an_exception_says_whether_parameters_were_updated() -> None:
    training = Training()

    def raises(x: Tensor, y: Tensor, late: bool) -> None:
        if late:
            training.plain(x, y)
        raise ValueError("a mistake")

    captured = Captured(
        raises, modules=[training.model], optimizer=training.optimizer, backend=training.backend
    )
    with pytest.raises(ValueError, match="a mistake") as early:
        captured(*batch(0), late=False)
    assert not hasattr(early.value, "__notes__")
    with pytest.raises(ValueError, match="a mistake") as late:
        captured(*batch(0), late=True)
    assert late.value.__notes__ == ["Parameters were updated before this error in a captured step."]


@pytest.mark.parametrize("generator", ["torch", "python", "dropout"])
def test_random_numbers_of_the_host_are_not_captured(generator: str) -> None:
    training = Training()

    def noisy(x: Tensor, y: Tensor) -> Tensor:
        if generator == "torch":
            x = x + torch.rand(())
        elif generator == "python":
            x = x * random.random()
        else:
            x = nn.functional.dropout(x)
        return training.plain(x, y)

    captured = Captured(noisy, backend=training.backend)
    with pytest.warns(NotCapturedWarning, match="random numbers on the host"):
        run(captured, 5)
    assert captured.statistics.captured == 0


def test_a_scheduler_inside_of_the_function_is_not_captured() -> None:
    training = Training(adamw)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)

    def scheduled(x: Tensor, y: Tensor) -> Tensor:
        loss = training.plain(x, y)
        scheduler.step()
        return loss

    captured = Captured(scheduled, backend=training.backend)
    with pytest.warns(NotCapturedWarning, match="changes the learning rate"):
        run(captured, 6)
    assert captured.statistics.captured == 0
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(2**-6 * 0.9**6)


class Batch:
    """An object that could change between calls."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Batch(), "is a Batch"),
        (torch.ones(2, requires_grad=True), "requires a gradient"),
        (nn.Parameter(torch.ones(2)), "Parameter"),
        (torch.eye(2).to_sparse(), "sparse"),
        ({1, 2}, "is a set"),
    ],
)
def test_arguments_that_are_refused(value: Any, reason: str) -> None:
    training = Training()
    captured = Captured(lambda _: None, backend=training.backend)
    with pytest.warns(NotCapturedWarning, match=reason):
        captured(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(value)
    assert captured.statistics.eager == 2


def test_a_result_that_cannot_be_copied_is_refused() -> None:
    captured = Captured(lambda x: {x}, backend=Training().backend)
    captured(1)
    with pytest.warns(NotCapturedWarning, match="returns a set"):
        captured(1)


class Pair(NamedTuple):
    x: Any
    y: Any


class Encoding(UserDict[str, Any]):
    """As a BatchEncoding: a mapping that is not a dict."""


def test_nested_arguments_keep_their_structure() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    value = {"a": [a, (b, 1)], "pair": Pair(a, None), "encoding": Encoding(ids=b)}
    copied = with_tensors(value, lambda tensor: tensor + 1)
    assert copied["a"][0].tolist() == [2, 2]
    assert copied["a"][1][1] == 1
    assert isinstance(copied["pair"], Pair)
    assert isinstance(copied["encoding"], Encoding)
    assert copied["encoding"]["ids"].tolist() == [1, 1, 1]
    assert value["encoding"]["ids"] is b
    assert len(describe((value,), {}).tensors) == 2
    assert fresh(value)["pair"].x is not a


def test_keys_differ_where_a_graph_would() -> None:
    x = torch.ones(4, 4)
    calls: list[tuple[Any, ...]] = [
        (x,), (x.t(),), (x.double(),), (x[:2],), (x, 1), (x, 1.0), (x, True), (x, None), ([x],),
        ({"x": x},), (x, x), (x, x.clone()),
    ]  # fmt: skip
    keys = [describe(call, {}).key for call in calls]
    # A transposed square matrix differs in its strides.
    assert len(set(keys)) == len(keys)
    assert describe((x + 1,), {}).key == keys[0]
    assert describe((), {"x": x}).key != keys[0]


def test_gradients_that_a_step_sets_to_none_first_are_not_read() -> None:
    training, reference = Training(), Training()

    def step(one: Training, x: Tensor, y: Tensor) -> Tensor:
        one.optimizer.zero_grad(set_to_none=True)
        loss = (one.model(x) - y).square().mean()
        loss.backward()
        one.optimizer.step()
        return loss.detach()

    captured = Captured(functools.partial(step, training), backend=training.backend)
    for number in range(10):
        loss = captured(*batch(number))
        assert torch.equal(loss, step(reference, *batch(number)))
        for ours, theirs in zip(
            training.model.parameters(), reference.model.parameters(), strict=True
        ):
            assert ours.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    assert captured.statistics.captured == 1
    assert captured.statistics.eager == 3


def test_accumulated_gradients_are_read_where_they_are() -> None:
    training, reference = Training(), Training()

    def backward(one: Training, x: Tensor, y: Tensor) -> Tensor:
        loss = (one.model(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    captured = Captured(
        functools.partial(backward, training),
        backend=training.backend,
        modules=[training.model],
        optimizer=training.optimizer,
    )
    for number in range(60):
        assert torch.equal(captured(*batch(number)), backward(reference, *batch(number)))
        if number % 3 == 2:
            for one in (training, reference):
                one.optimizer.step()
                one.optimizer.zero_grad(set_to_none=True)
    assert captured.statistics.replayed > 20


def test_gradients_that_the_step_before_left_are_read() -> None:
    """A step that first applies the gradients of the last call."""
    training, reference = Training(), Training()

    def delayed(one: Training, x: Tensor, y: Tensor) -> Tensor:
        one.optimizer.step()
        one.optimizer.zero_grad(set_to_none=True)
        loss = (one.model(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    captured = Captured(functools.partial(delayed, training), backend=training.backend)
    for number in range(20):
        assert torch.equal(captured(*batch(number)), delayed(reference, *batch(number)))


class Prepared(torch.optim.SGD):
    """An optimizer that needs `prepare()` before a captured step, and counts."""

    log: list[str]

    def prepare(self) -> None:
        self.log.append("prepare")

    def refresh(self) -> None:
        self.log.append("refresh")


@pytest.mark.parametrize("patched", [False, True])
def test_an_optimizer_is_prepared_between_two_graphs_and_refreshed_before_replays(
    patched: bool,
) -> None:
    training = Training(lambda model: Prepared(model.parameters(), lr=0.1))
    optimizer, log = training.optimizer, training.backend.log
    assert isinstance(optimizer, Prepared)
    optimizer.log = log
    if patched:
        # An instance's own step does not run torch's hooks.
        optimizer.step = functools.partial(type(optimizer).step.__wrapped__, optimizer)  # type: ignore[method-assign, attr-defined]
    run(training.captured, 5)
    assert log == ["cut", "prepare", "capture", "refresh", "replay", "refresh", "replay"]
    assert ("step" in vars(optimizer)) == patched


def test_modules_and_optimizers_are_found() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Trainer:
        def __init__(self) -> None:
            self.parts = {"model": model, "list": [optimizer]}

        def step(self, x: Tensor, extra: nn.Module = other) -> Tensor:
            return extra(self.parts["model"](x))  # type: ignore[operator]

    def closure(x: Tensor) -> Tensor:
        return model(x) if optimizer else x

    for function in (Trainer().step, functools.partial(Trainer().step, torch.ones(1))):
        modules, optimizers = find_objects(function)
        assert {id(one) for one in modules} == {id(model), id(other)}
        assert optimizers == [optimizer]
    assert find_objects(closure) == ([model], [optimizer])
    assert find_objects(globally)[0] == [GLOBAL]


GLOBAL = nn.Linear(1, 1)


def globally(x: Tensor) -> Tensor:
    return torch.stack([GLOBAL(item) for item in x])


def test_an_optimizer_that_only_a_call_reveals_is_watched() -> None:
    training = Training()
    hidden = {training.optimizer}

    def step(x: Tensor, y: Tensor) -> Tensor:
        (optimizer,) = hidden
        loss = (training.model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    captured = Captured(step, backend=training.backend, modules=[training.model], optimizer=[])
    for number in range(8):
        captured(*batch(number))
    assert captured.graphs == 1
    training.optimizer.param_groups[0]["lr"] = 1.0
    captured(*batch(8))
    assert captured.graphs == 0


def test_required_graphs_raise() -> None:
    training = Training(required=True)
    training.backend.capture = _failing  # type: ignore[method-assign]
    before = training.captured.statistics.eager
    run(training.captured, 3)
    with pytest.raises(StepscopeError, match="cannot be captured: the capture failed"):
        training.captured(*batch(3))
    assert training.captured.statistics.eager == before + 3


def test_on_a_cpu_the_function_is_called_as_it_is() -> None:
    training, reference = Training(), Training()
    captured = stepscope.capture(training.plain)
    for number in range(5):
        assert torch.equal(captured(*batch(number)), reference.plain(*batch(number)))
    assert captured.statistics.eager == training.python_calls == 5
    assert captured.graphs == captured.held_bytes() == 0
    assert "no tensor is on a CUDA device" in str(captured)
    assert captured.__name__ == "plain"


def test_keywords_alone_make_a_decorator() -> None:
    @stepscope.capture(warmup=1, max_graphs=2)
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert double(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("options", [{"warmup": 0}, {"max_graphs": 0}])
def test_invalid_bounds_raise(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        stepscope.capture(lambda: None, **options)


def test_a_replaced_generator_captures_again() -> None:
    training = Training()
    run(training.captured, 5)
    training.backend.generation += 1
    run(training.captured, 3)
    assert training.captured.statistics.captured == 2


def test_reset_drops_the_graphs() -> None:
    training = Training()
    run(training.captured, 5)
    training.captured.reset()
    assert training.captured.graphs == 0
    training.captured(*batch(5))
    assert training.captured.statistics.eager == 4
