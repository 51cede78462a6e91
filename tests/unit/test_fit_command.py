"""`stepscope fit`: plans of a script's step, whose loop has its own loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import stepscope
from stepscope.cli import main
from stepscope.errors import UsageError
from stepscope.planning.fake_run import FakeStep, predict_fake
from stepscope.planning.loop import FakeLoop, RealLoop
from stepscope.planning.simulated_bytes import WORKSPACE
from stepscope.planning.variants import planned_steps
from stepscope.records.jsonl import read_records
from stepscope.views.program.rows import ProgramRecord

LOOP = """
import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, 64), nn.Linear(64, 128)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Model()
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(128, (8, 257))
for step in range({steps}):
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return "train.py"

    return write


def test_a_script_is_planned_and_measured(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    train = script(LOOP.replace("{steps}", "60"))
    assert main(["fit", "--json", "--budget", "1GiB", train]) == 0
    plain = json.loads(capfd.readouterr().out)["fit"]
    assert plain["plan"]["groups"] == plain["frontier"]["plans"][0]["groups"]
    assert (plain["model"], plain["batch"], plain["apply"]["blocks"]) == ("Model", 8, {})
    budget = round(1.05 * plain["frontier"]["plans"][-1]["peak"])
    words = [
        "--budget",
        f"{budget} B",
        "--verify",
        "--steps",
        "1",
        "--frontier",
        "plans.svg",
        "--json",
    ]
    assert main(["fit", *words, train]) == 0
    answer = json.loads(capfd.readouterr().out)
    fitted, measured = answer["fit"], answer["measured"]
    assert plain["plan"]["peak"] > budget >= fitted["plan"]["peak"]
    assert fitted["apply"]["blocks"].keys() <= {f"blocks.{index}" for index in range(2)}
    assert measured["base"]["step_ms"] > 0 < measured["planned"]["step_ms"]
    assert "<svg" in Path("plans.svg").read_text()


def test_a_budget_that_is_too_small_names_the_smallest(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    train = script(LOOP.replace("{steps}", "60"))
    assert main(["fit", "--budget", "1MiB", train]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "the smallest for this step" in line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import torch\nraise SystemExit('no data')", "no data"),
        ("import torch\nprint('done')", "no model was called"),
        (LOOP.replace("loss.backward()", "continue").replace("{steps}", "2"), "no backward pass"),
        (
            LOOP.replace("functional.cross_entropy(", "scale * functional.cross_entropy(")
            .replace("model = ", "scale = torch.ones((), requires_grad=True)\nmodel = ")
            .replace("{steps}", "2"),
            "tensors with gradients",
        ),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_planned_gives_one_line(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    assert main(["fit", "--budget", "1GiB", script(text)]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("stepscope: the step of train.py was not planned: ")
    assert reason in line


@pytest.mark.parametrize("words", [(), ("missing.py",), ("--budget", "many", "train.py")])
def test_invalid_words_are_usage_errors(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    script(LOOP)
    assert main(["fit", *words]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_script_that_runs_out_of_memory_is_planned(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    """It runs out in its model, which the plan's step on fake tensors does not."""
    out = (
        "        if type(x) is torch.Tensor: raise torch.OutOfMemoryError('CUDA out of memory.')\n"
    )
    train = script(
        LOOP.replace("{steps}", "60").replace("        for block", f"{out}        for block")
    )
    assert main(["advise", train]) == 0
    answer = capfd.readouterr()
    assert "ran out of memory after 0 optimizer steps" in answer.err
    assert "The step of Model at batch 8 fits into" in answer.out
    assert main(["inspect", train]) == 1
    assert "stepscope fit --verify train.py" in capfd.readouterr().err


def test_inspect_plans_the_step_and_larger_ones(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    train = script(LOOP.replace("{steps}", "60"))
    words = ["--plans", "yes", "--stop-early", "--warmup", "4", "--steps", "3", "--json"]
    assert main(["inspect", *words, "--profiled-steps", "1", train]) == 0
    outcome = json.loads(capfd.readouterr().err.splitlines()[-1])
    (record,) = read_records(Path(outcome["records"]))
    own, batch, context = ProgramRecord(record).plans
    assert [(one.what, one.size) for one in (own, batch, context)] == [
        ("step", 8), ("batch", 16), ("context", 512),
    ]  # fmt: skip
    workspace = own.frontier.plans[0].peak - outcome["peak_bytes"]
    assert workspace == pytest.approx(WORKSPACE, rel=0.02)
    assert batch.frontier.plans[0].peak == pytest.approx(context.frontier.plans[0].peak, rel=0.02)
    page = Path(outcome["page"]).read_text()
    assert "Time against memory" in page
    assert "Batch 16, twice the current one, is predicted to fit" in page


class Parts(nn.Module):
    """Its parts are called by the loop, and a parameter is used there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(64, 32), nn.Linear(32, 32)


def loop_loss(
    model: Parts, tokens: torch.Tensor, call: Callable[..., torch.Tensor]
) -> torch.Tensor:
    hidden = call(model.body, call(model.embedding, tokens)).tanh()
    logits = functional.linear(hidden, model.embedding.weight)
    accuracy = logits.argmax(-1).eq(tokens)
    assert accuracy.shape == tokens.shape
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_the_loss_of_a_loop_is_that_of_a_function() -> None:
    """The step of a loop has the bytes of the same step as a function, which drops its variables
    too, whether its model or its parts are called."""
    model, tokens = Parts(), torch.randint(64, (4, 100))
    optimizer = torch.optim.AdamW(model.parameters())

    def as_function(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, Parts)
        return loop_loss(model, batch, lambda part, x: part(x))

    expected = stepscope.predict(model, optimizer, tokens, loss_fn=as_function)
    loop = FakeLoop(model, optimizer)
    loss = loop_loss(model, tokens, lambda part, *args: loop.call(part, args, {}))
    loop.end(loss)
    assert [tuple(one.shape) for one in loop.batch] == [(4, 100)]
    with loop.fakes.active():
        step = FakeStep(loop.fakes, loop.model, loop.optimizer, loop.batch, loop.options)
        got = predict_fake(step)
    *phases, update = (one.allocated for one in got.phases)
    *others, other = (one.allocated for one in expected.phases)
    assert phases == others
    # The variable of the loss.
    assert update == other + 512
    assert got.kinds == expected.kinds


def test_a_program_may_read_values_of_its_batch() -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            assert mask is not None
            out = super().forward(x)
            return out if bool(mask.bool().all()) else out.masked_fill(~mask.bool(), 0.0)

    model = Masked(64, 64)
    loop = FakeLoop(model, torch.optim.SGD(model.parameters(), 0.1))
    mask = torch.ones(8, 64, dtype=torch.long)
    mask[:, 50:] = 0
    outputs = loop.call(model, (torch.randn(8, 64),), {"mask": mask})
    loop.end(outputs.square().mean())
    assert not loop.fakes.values.assumed
    assert mask.sum().item() == 8 * 50


def test_a_variable_of_the_loop_is_alive_until_it_is_assigned_again() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 512))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(1024, 64)

    def predicted(*, keeps: bool) -> int:
        loop = FakeLoop(model, optimizer)
        outputs = loop.call(model, (x,), {})
        loss = outputs.sigmoid().mean()
        if not keeps:
            del outputs
        loop.end(loss)
        with loop.fakes.active():
            step = FakeStep(loop.fakes, loop.model, loop.optimizer, loop.batch, loop.options)
            return predict_fake(step).peak.allocated

    assert predicted(keeps=True) - predicted(keeps=False) == 4 * 1024 * 512


def test_a_loss_without_the_model_is_refused() -> None:
    model = nn.Linear(2, 2)
    loop = FakeLoop(model, torch.optim.SGD(model.parameters(), 0.1))
    loop.call(model, (torch.ones(1, 2),), {})
    with pytest.raises(UsageError, match="not computed from the outputs"):
        loop.end(torch.ones(1, requires_grad=True).sum())


def test_a_size_that_the_program_cannot_run_is_left_out() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(16, 8), nn.Embedding(32, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert tokens.shape[1] <= 32
            x: torch.Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            return x

    model = Short()
    loop = RealLoop(model)
    outputs = loop.call(model, model.forward, (torch.zeros(4, 32, dtype=torch.long),), {})
    loss = outputs.square().mean()
    loop.begin_backward(loss)
    loss.backward()
    loop.end()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    planned = planned_steps(loop, model, optimizer, 1 << 30, compiled=False)
    assert [(one.what, one.size) for one in planned] == [("step", 4), ("batch", 8)]
    assert planned[1].largest > 1000
    assert all(parameter.grad is not None for parameter in model.parameters())
