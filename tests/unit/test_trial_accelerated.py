"""Trials that apply `accelerate`, or run a program's loop as a `TrainStep`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerated_models import COMPILED
from fake_graphs import FakeGraphs
from stepscope.acceleration.train_step import TrainStep
from stepscope.advisor.trial import accelerated, loop_step
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.changes import Changes

WIDTH, VOCAB = 8, 20
WHOLE = {"accelerate": "accelerate"}

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


@pytest.fixture
def _compiled_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerated, "_OPTIONS", COMPILED)
    monkeypatch.setattr(accelerated, "is_compiled_by_default", lambda _: True)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    """Returns logits and loss, as many small training scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.mlp = Gated()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        logits = self.head(x + self.mlp(self.norm(x)))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"logits": logits, "loss": loss}


Loss = Callable[[nn.Module, Tensor], Tensor]


def of_the_model(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, targets=tokens)["loss"]
    return loss


class Program:
    """A training loop with clipping and a schedule, with the changes of a trial."""

    def __init__(
        self,
        settings: dict[str, str],
        loss: Loss = of_the_model,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.backwards = Backwards()
        self.backwards.attach()
        self.changes = Changes(settings, self.backwards)
        self.changes.on_torch_imported()
        self._loss = loss

    def run(self, steps: int = 7, micro_batches: int = 1) -> list[float | None]:
        generator = torch.Generator().manual_seed(1)
        for number in range(1, steps + 1):
            for _ in range(micro_batches):
                tokens = torch.randint(VOCAB, (2, 5), generator=generator)
                self._loss(self.model, tokens).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.changes.optimizer_stepped(self.optimizer)
            self.schedule.step()
            self.optimizer.zero_grad()
            self.backwards.end_step()
            if number == 1:
                self.changes.on_models_known([self.model], [self.optimizer])
            self.changes.end_step(number)
        return self.backwards.take()


@pytest.mark.usefixtures("_compiled_as_on_a_gpu")
def test_accelerate_is_applied_to_the_model_of_the_program() -> None:
    plain = Program({}).run()
    program = Program(WHOLE)
    assert program.run() == pytest.approx(plain, rel=1e-4)
    assert program.changes.without_effect() == {}
    (report,) = program.changes._acceleration._reports
    assert report.is_compiled
    assert "AdamW in one kernel" in str(report)


def test_a_model_that_stays_as_it_is_has_no_effect() -> None:
    program = Program(WHOLE)
    program.run(2)
    (reason,) = program.changes.without_effect().values()
    assert "on a CPU" in reason


@pytest.mark.usefixtures("_compiled_as_on_a_gpu")
def test_a_model_that_is_refused_has_no_effect() -> None:
    program = Program(WHOLE)
    program.model.norm.register_forward_hook(lambda *_: None)
    program.run(2)
    (reason,) = program.changes.without_effect().values()
    assert "hooks" in reason


@pytest.mark.parametrize(
    ("more", "optimizer"),
    [({}, torch.optim.SGD), (WHOLE, torch.optim.AdamW)],
    ids=["alone", "accelerated"],
)
@pytest.mark.usefixtures("_compiled_as_on_a_gpu")
def test_loop_is_run_as_a_captured_step(
    more: dict[str, str], optimizer: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping, the schedule and the update are part of it, and none of them happens twice."""
    plain = Program({}, optimizer=optimizer).run(9)
    program = Program({"step": "graph"} | more, optimizer=optimizer)
    graphs = FakeGraphs(program.model, program.optimizer)
    monkeypatch.setattr(loop_step, "TrainStep", partial(TrainStep, backend=graphs))
    assert program.run(9) == pytest.approx(plain, rel=1e-4)
    assert program.changes.without_effect() == {}
    # Two steps of the loop, two warm-up steps, then replays.
    assert graphs.log.count("replay") == 5
    steps = [int(state.get("step", 9)) for state in program.optimizer.state.values()]
    assert set(steps) <= {9}


def test_on_a_cpu_the_step_is_no_graph() -> None:
    plain = Program({}).run()
    program = Program({"step": "graph"})
    assert program.run() == pytest.approx(plain, rel=1e-5)
    assert "no tensor is on a CUDA device" in program.changes.without_effect()["step"]


def outside(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens, targets=tokens)["logits"]
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_a_loop_that_is_no_train_step_is_left_alone() -> None:
    computed = Program({"step": "graph"}, loss=outside)
    assert computed.run(4) == Program({}, loss=outside).run(4)
    assert "outside of the model" in computed.changes.without_effect()["step"]
    accumulating = Program({"step": "graph"})
    accumulating.run(4, micro_batches=2)
    assert (
        "2 calls of the model, 2 losses and 1 optimizer"
        in (accumulating.changes.without_effect()["step"])
    )
