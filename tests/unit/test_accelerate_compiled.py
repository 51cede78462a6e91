"""`accelerate(model, compile=…)`: the compiler's graph does what the model does, also later."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

import stepscope
from fake_graphs import FakeGraphs
from stepscope.acceleration import choice
from stepscope.acceleration import compiled as compiled_module
from stepscope.errors import UsageError
from stepscope.optim import FusedAdamW

VOCAB, WIDTH, HEADS = 24, 16, 2
FIXED = {"compiler": "aot_eager", "form": "compiled with passes"}


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """A block that is compiled in half the time of one with a norm and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.clip, self.span, self.factor = 1e9, 10_000, 1.0

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            y.view(batch, length, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        q = q.clamp(-self.clip, self.clip) * self.factor
        at = torch.arange(length)
        distance = at[:, None] - at[None]
        mask = (distance >= 0) & (distance < self.span)
        y = functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x)


class Block(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.activation: Callable[[Tensor], Tensor] = nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.down(self.activation(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int = 1, block: type[nn.Module] = Attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Any:
        return loss_of(self.head(self.hidden(ids)), ids)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def ids_of(length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def pair(model: nn.Module, **arguments: Any) -> tuple[nn.Module, nn.Module, stepscope.Report]:
    """Return the original, the accelerated copy, and the report."""
    changed = copy.deepcopy(model)
    return model, changed, stepscope.accelerate(changed, compile=FIXED, **arguments)


def same(original: nn.Module, changed: nn.Module, ids: Tensor) -> None:
    """Train a step of both from zero gradients, and compare."""
    losses = []
    for model in (original, changed):
        model.zero_grad()
        torch.manual_seed(1)
        losses.append(model(ids))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    for (name, p), expected in zip(changed.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad, msg=name, atol=1e-6, rtol=1e-4)


def test_it_trains_compiled_and_can_be_undone() -> None:
    original, changed, report = pair(Model(2, Block))
    names = list(changed.state_dict())
    same(original, changed, ids_of())
    assert "compiled with passes" in str(report)
    assert "SDPA, causal" in str(report)
    assert list(changed.state_dict()) == names == list(original.state_dict())
    report.undo()
    assert "forward" not in vars(changed)
    same(original, changed, ids_of())


@pytest.mark.parametrize("frozen", [False, True])
def test_the_garbage_collector_is_as_before_after_a_first_call(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that the program froze stay so."""
    counts: list[int] = []
    difference = compiled_module.difference

    def counted(*args: Any) -> str:
        counts.append(gc.get_freeze_count())
        return difference(*args)

    monkeypatch.setattr(compiled_module, "difference", counted)
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        model = Model()
        stepscope.accelerate(model, compile=FIXED)
        model(ids_of())
        assert counts[0] > 0
        assert bool(gc.get_freeze_count()) == frozen
    finally:
        gc.freeze() if was_frozen else gc.unfreeze()


def test_parts_of_a_list_cross_regions() -> None:
    class Halves(Model):
        def hidden(self, ids: Tensor) -> Tensor:
            first, second = super().hidden(ids).chunk(2, 0)
            return torch.cat([self.blocks[0](first), self.blocks[1](second)])

    original, changed, report = pair(Halves(layers=2))
    same(original, changed, ids_of())
    assert not [x for x in report.left if x.piece == "compile"]


def test_lengths_within_an_expression_are_compared() -> None:
    class Shifted(Model):
        def forward(self, ids: Tensor) -> Any:
            logits = self.head(self.hidden(ids[:, :-1]))
            return functional.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))

    original, changed, report = pair(Shifted())
    for length in (9, 12, 15):
        same(original, changed, ids_of(length))
    assert not [x for x in report.left if x.piece == "compile" or "differ" in x.reason]


# What depends on length or magnitude


class Limited(Attention):
    """Clips queries (as OLMo), scales them at long positions (as Ministral 3), and attends to a
    span that no name reveals."""

    def __init__(self) -> None:
        super().__init__()
        self.clip, self.span = 0.5, 10

    def attend(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        return super().attend(x * (1 + torch.log1p(torch.floor(at / 8.0)))[:, None])


def test_what_depends_on_length_or_magnitude_is_kept() -> None:
    model = Model()
    model.blocks[0] = Limited()
    original, changed, report = pair(model)
    for length, factor in ((6, 0.1), (16, 100.0)):
        for one in (original, changed):
            with torch.no_grad():
                one.blocks[0].qkv.weight *= factor
        same(original, changed, ids_of(length, length))
    assert not [x for x in report.left if x.piece == "compile" or "differ" in x.reason]


# Side effects and state that changes later


class Recording(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, ids: Tensor) -> Any:
        x = self.hidden(ids)
        self.calls += 1
        self.count += 1
        self.aux = x.abs().mean()
        return loss_of(self.head(x), ids)


def test_side_effects_happen_once() -> None:
    original, changed, _ = pair(Recording())
    for seed in range(2):
        for model in (original, changed):
            model.zero_grad()
            (model(ids_of(9, seed)) + model.aux).backward()
    assert changed.calls == 2
    assert changed.count == 2
    torch.testing.assert_close(changed.aux, original.aux)
    torch.testing.assert_close(changed.embedding.weight.grad, original.embedding.weight.grad)


class Averaging(nn.Module):
    """An MLP that updates a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return self.down(functional.silu(x - self.mean))


def test_a_part_that_updates_a_buffer_is_compiled() -> None:
    model = Model()
    model.blocks[0] = Averaging()
    original, changed, report = pair(model)
    for seed in range(2):
        same(original, changed, ids_of(9, seed))
        torch.testing.assert_close(changed.blocks[0].mean, original.blocks[0].mean)
    assert "compiled with passes" in str(report)
    assert not [x for x in report.left if x.piece == "compile"]


def _by_autograd(x: Tensor) -> Tensor:
    if not x.requires_grad:
        return x
    (gradient,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    return x - 0.1 * gradient


def _by_transform(x: Tensor) -> Tensor:
    return x - 0.1 * torch.func.grad(lambda y: y.square().sum())(x)


@pytest.mark.parametrize(
    ("step", "compiled"), [(_by_autograd, False), (_by_transform, True)], ids=["grad", "func"]
)
def test_a_forward_that_computes_gradients_trains_as_before(step: Any, compiled: bool) -> None:
    class Inner(Model):
        def hidden(self, ids: Tensor) -> Tensor:
            return step(super().hidden(ids))  # type: ignore[no-any-return]

    original, changed, report = pair(Inner())
    for seed in range(2):
        same(original, changed, ids_of(9, seed))
    assert report.is_compiled == compiled
    assert compiled or "its forward computes gradients" in str(report)


class WithDropout(Model):
    def hidden(self, ids: Tensor) -> Tensor:
        return functional.dropout(super().hidden(ids), 0.5, self.training)


def test_the_comparison_draws_no_random_numbers_of_the_caller() -> None:
    original, changed, report = pair(WithDropout())
    same(original, changed, ids_of())
    states = []
    for model in (original, changed):
        torch.manual_seed(3)
        model(ids_of(9, 1))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert "compared" in str(report)


def change_activation(model: Any) -> None:
    model.blocks[0].activation = nn.ReLU()


def change_norm(model: Any) -> None:
    model.blocks[0].norm = nn.LayerNorm(WIDTH, eps=0.5)


def change_float(model: Any) -> None:
    model.blocks[0].factor = 2.5


def change_epsilon(model: Any) -> None:
    model.blocks[0].norm.eps = 0.3


def wrap_child(model: Any) -> None:
    """A LoRA that wraps the forward of a layer, as kohya's does."""
    torch.manual_seed(5)
    layer = model.blocks[0].up
    layer.low, layer.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2 * WIDTH, bias=False)
    own = layer.forward
    layer.forward = lambda x: own(x) + layer.high(layer.low(x))


def test_what_is_changed_later_is_used() -> None:
    original, changed, report = pair(Model(block=Block))
    same(original, changed, ids_of())
    losses = [original(ids_of()).item()]
    changes = ((change_activation, change_norm), (change_float, change_epsilon), (wrap_child,))
    for together in changes:
        for model in (original, changed):
            for change in together:
                change(model)
        same(original, changed, ids_of())
        losses.append(original(ids_of()).item())
    assert len(set(losses)) == len(losses)
    assert not any("changed after" in x.reason for x in report.left)


def test_what_guards_miss_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original, changed, report = pair(Model(block=Block))
    same(original, changed, ids_of())
    handles = [
        model.blocks[0].up.register_forward_hook(lambda *call: call[2] * 2)
        for model in (original, changed)
    ]
    same(original, changed, ids_of(9, 1))
    assert any("hooks or forwards" in x.reason for x in report.left)
    for handle in handles:
        handle.remove()
    seen: list[str] = []
    of_all = register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        changed(ids_of())
    finally:
        of_all.remove()
    assert seen.count("Block") == 1
    same(original, changed, ids_of(9, 2))
    monkeypatch.setattr(Block, "forward", lambda self, x: x + self.attend(x))
    same(original, changed, ids_of(9, 1))


def test_a_model_with_hooks_stays_as_it_is() -> None:
    original, changed, report = pair(Model())
    seen: list[int] = []
    changed.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    same(original, changed, ids_of())
    assert len(seen) == 1
    assert any("have hooks" in x.reason for x in report.left)


def test_hooks_of_the_model_itself_run_around_its_compiled_forward() -> None:
    original, changed, report = pair(Model())
    same(original, changed, ids_of())
    seen: list[float] = []
    for model in (original, changed):
        model.register_forward_hook(lambda _, __, output: seen.append(output.item()) or 2 * output)
    same(original, changed, ids_of(9, 1))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)
    assert not any("hooks" in x.reason for x in report.left)


@pytest.mark.parametrize("in_step", [False, True])
def test_an_observer_leaves_the_model_compiled(in_step: bool, tmp_path: Path) -> None:
    """It marks where each forward begins, which compiled code leaves out."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    report = stepscope.accelerate(model, optimizer, compile=FIXED)
    step = stepscope.TrainStep(model, optimizer, loss_fn=lambda model, ids: model(ids) * 1.0)
    observer = stepscope.Observer(tmp_path, trace=False)
    for _ in range(4):
        if in_step:
            step(ids_of())
        else:
            model(ids_of()).backward()
            optimizer.step()
            optimizer.zero_grad()
    observer.close()
    assert not any("hooks" in x.reason for x in report.left), report


# Outputs


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Returning(Model):
    def forward(self, ids: Tensor) -> Output:
        logits = self.head(self.hidden(ids))
        return Output(loss_of(logits, ids), logits)


def test_logits_in_a_data_class_are_tensors_with_gradients() -> None:
    original, changed, _ = pair(Returning())
    gradients, values = [], []
    for model in (original, changed):
        output = model(ids_of())
        gradients += torch.autograd.grad(output.loss, output.logits)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        output = model(ids_of())
        assert isinstance(output, Output)
        assert torch.is_tensor(output.logits)
        output.logits.retain_grad()
        output.loss.backward()
        optimizer.step()
        gradients.append(output.logits.grad)
        values.append(output.logits.detach())
        with torch.no_grad():
            values.append(model.eval()(ids_of()).logits)
    for found, expected in zip(gradients[2:], gradients[:2], strict=True):
        torch.testing.assert_close(found, expected)
    for found, expected in zip(values[2:], values[:2], strict=True):
        torch.testing.assert_close(found, expected)


# A training step


def trained(model: nn.Module, steps: int = 3, **arguments: Any) -> tuple[Tensor, Any]:
    """Return the losses of some steps, and the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = stepscope.TrainStep(model, optimizer, **arguments)
    return torch.stack([step(ids_of(9, seed)) for seed in range(steps)]), step


class Logits(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


def test_a_train_step_compiles_the_loss_with_the_model() -> None:
    original, changed, report = pair(Logits(), dtype=torch.bfloat16)
    arguments = {"loss_fn": lambda model, ids: loss_of(model(ids).float(), ids)}
    expected, _ = trained(original, dtype=torch.bfloat16, **arguments)
    losses, _ = trained(changed, **arguments)
    torch.testing.assert_close(losses, expected, atol=2e-2, rtol=1e-2)
    assert "no logits" in str(report)
    assert "SDPA, causal" in str(report)
    report.undo()
    trained(changed, 1, **arguments)


class Scripted:
    """A clock that tells each candidate's time; one step of each waits for data."""

    def __init__(self, *milliseconds: float) -> None:
        self._milliseconds = list(milliseconds)

    def mark(self) -> None:
        pass

    def milliseconds(self) -> list[float]:
        time = self._milliseconds.pop(0) if self._milliseconds else 0.0
        return [time] * (choice.SAMPLES - 1) + [time + 100 * (choice.SAMPLES > 2)]


def chosen(*milliseconds: float, graphs: tuple[bool, ...] = (False,), key: str = "") -> Any:
    made = choice.Choice(graphs, Scripted(*milliseconds), lambda: key or str(milliseconds))
    for _ in range(300):
        made.begin()
    return made


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        ((5.0, 10.0), "compiled with passes"),
        ((10.0, 10.0, 11.0), "as it is"),
        ((9.95, 10.0, 9.98), "as it is"),
        ((9.8, 10.0, 8.0), "compiled"),
        ((20.0, 10.0, 15.0), "as it is"),
    ],
)
def test_the_fastest_form_is_kept_and_the_simplest_of_equal_ones(
    milliseconds: tuple[float, ...], expected: str
) -> None:
    made = chosen(*milliseconds)
    assert str(made.chosen) == expected
    assert f"{milliseconds[0]:.4g} ms" in str(made)
    assert len(made.times) == len(milliseconds)


def test_graphs_are_candidates_too() -> None:
    made = chosen(5.0, 6.0, 10.0, 9.0, graphs=(True, False))
    assert str(made.chosen) == "compiled with passes, CUDA graph"


def test_a_later_run_starts_with_the_stored_choice() -> None:
    assert not chosen(5.0, 10.0, key="model").is_stored
    later = chosen(key="model")
    assert later.is_stored
    assert str(later.chosen) == "compiled with passes"
    assert chosen(10.0, 10.0, 10.0, key="other").chosen.kind == "as it is"


def test_times_are_compared_per_element_of_the_batch() -> None:
    made = choice.Choice((False,), Scripted(10.0, 15.0, 20.0), lambda: "lengths")
    for number in range(100):
        made.begin(10 if number < 2 + choice.SAMPLES else 20)
    assert str(made.chosen) == "as it is"


def test_ranks_follow_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(choice, "group_store", lambda: (store, 1))
    follower = chosen(5.0, 10.0)
    assert follower.chosen.kind == "compiled with passes"  # The first rank trains another model.
    monkeypatch.setattr(choice, "group_store", lambda: (store, 0))
    chosen(10.0, 5.0, 10.0, key="shared")
    monkeypatch.setattr(choice, "group_store", lambda: (store, 1))
    assert chosen(5.0, 10.0, key="shared").chosen.kind == "as it is"


def test_a_step_runs_in_the_fastest_form(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.acceleration import compiled

    monkeypatch.setattr(compiled, "clock_of", lambda _: Scripted(5.0, 10.0))
    original, changed = Model(), Model()
    report = stepscope.accelerate(changed, compile={"compiler": "aot_eager"})
    expected, _ = trained(original, 22)
    losses, _ = trained(changed, 22)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    assert "compiled with passes (as it is: 10 ms; compiled with passes: 5 ms" in str(report)


def test_a_captured_step_is_chosen_and_the_graphs_of_others_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stepscope.acceleration import compiled

    monkeypatch.setattr(choice, "SAMPLES", 2)
    monkeypatch.setattr(compiled, "clock_of", lambda _: Scripted(5.0, 6.0, 9.0, 10.0))
    losses = []
    for compile in (False, {"compiler": "aot_eager"}):
        model = Model()
        optimizer = FusedAdamW(model.parameters(), lr=1e-2, capturable=True)
        stepscope.accelerate(model, compile=compile)
        step = stepscope.TrainStep(model, optimizer, backend=FakeGraphs(model, optimizer))
        losses.append(torch.stack([step(ids_of(9, seed)) for seed in range(28)]))
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=2e-2)
    assert "compiled with passes, CUDA graph (as it is: 10 ms" in str(step)
    assert step.captured.graphs == 1


# What cannot be compiled, or differs


class Breaking(Model):
    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        torch._dynamo.graph_break()
        for block in self.blocks:
            x = block(x)
        return x


def test_what_cannot_be_traced_is_reported_with_its_line() -> None:
    original, changed, report = pair(Breaking())
    same(original, changed, ids_of())
    left = next(x for x in report.left if x.reason.startswith("Dynamo cannot trace it"))
    assert left.name.startswith(__file__)


class Dropped(Model):
    """Layers that are dropped by random numbers of the host, within a context."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        with torch.autocast("cpu", enabled=False):
            for block in self.blocks:
                if torch.rand([]) < 0.5:
                    x = block(x)
        return x


def test_random_decisions_of_the_host_stay_as_they_are() -> None:
    original, changed, report = pair(Dropped())
    for seed in range(3):
        same(original, changed, ids_of(9, seed))
    left = next(x for x in report.left if x.reason.startswith("Dynamo cannot trace it"))
    assert left.name.startswith(__file__)


def test_a_pass_that_differs_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.acceleration.passes import attention

    original, changed, report = pair(Model())
    right = attention.torch_attention
    monkeypatch.setattr(attention, "torch_attention", lambda *call: 2 * right(*call))
    same(original, changed, ids_of())
    assert [x.piece for x in report.left if "differ" in x.reason] == ["attention"]
    assert "SDPA" not in str(report)
    assert "no logits" in str(report)


def test_a_compiler_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.acceleration import backend, torch_internals

    def wrong(module: Any, inputs: Any) -> Any:
        compiled = torch_internals.compile_with_aot_eager(module, inputs)
        return lambda *given: tuple(
            1.5 * x if torch.is_floating_point(x) else x for x in compiled(*given)
        )

    monkeypatch.setitem(backend._COMPILERS, "aot_eager", wrong)
    original, changed = Model(), Model()
    report = stepscope.accelerate(changed, compile={**FIXED, "form": "compiled"})
    same(original, changed, ids_of())
    assert any("differ" in x.reason for x in report.left if x.piece == "compile")


def test_excluded_modules_run_uncompiled() -> None:
    seen: list[bool] = []

    class Noted(nn.GELU):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.compiler.is_compiling())
            return super().forward(x)

    model = Model(block=Block)
    model.blocks[0].activation = Noted()
    original, changed, report = pair(model, exclude=("blocks.0.activation", "head and loss"))
    same(original, changed, ids_of())
    assert not any(seen)
    assert "no logits" not in str(report)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "fp8", "compile": True},
        {"compile": {"form": "fast"}},
        {"compile": {"pases": True}},
        {"compile": {"passes": ["norms"]}},
    ],
)
def test_invalid_arguments_leave_the_model_as_it_is(arguments: dict[str, Any]) -> None:
    model = Model()
    with pytest.raises(UsageError):
        stepscope.accelerate(model, **arguments)
    assert "forward" not in vars(model)
    stepscope.accelerate(model, compile=True).undo()


def test_gradients_are_compared_region_by_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are right in all regions, the gradients wrong in those of the first kind."""
    from stepscope.acceleration import backend, torch_internals

    kinds: list[Any] = []

    def wrong(module: Any, inputs: Any) -> Any:
        compiled = torch_internals.compile_with_aot_eager(module, inputs)
        kinds.append(module)
        if len(kinds) != 2:
            return compiled
        return lambda *given: tuple(x + 0.5 * (x - x.detach()) for x in compiled(*given))

    monkeypatch.setitem(backend._COMPILERS, "aot_eager", wrong)
    original, changed, report = pair(Model(layers=3))
    same(original, changed, ids_of())
    assert len(kinds) > 2
    reasons = [x.reason for x in report.left if "differ" in x.reason]
    assert any(x.startswith("in region 1: the gradients differ") for x in reasons), reasons


def test_the_comparison_keeps_no_activations_of_the_original() -> None:
    kept: list[bool] = []

    class Noted(Model):
        def forward(self, ids: Tensor) -> Any:
            loss = super().forward(ids)
            if not torch.compiler.is_compiling():
                saved = self.head.weight.exp()
                alive, loss = weakref.ref(saved), loss + 0 * saved.sum()
                del saved
                kept.append(alive() is not None)
            return loss

    _, changed, report = pair(Noted(layers=2))
    changed(ids_of()).backward()
    assert kept == [False]
    assert not [x for x in report.left if "differ" in x.reason]


def test_dropout_is_compared_with_the_same_random_numbers() -> None:
    class Dropping(Model):
        def hidden(self, ids: Tensor) -> Tensor:
            return functional.dropout(super().hidden(ids), 0.3, self.training)

    original, changed, report = pair(Dropping())
    for seed in range(2):
        same(original, changed, ids_of(9, seed))
    assert "compiled with passes" in str(report), report
