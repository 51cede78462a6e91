"""A script against itself with changes from outside: turns, losses, ends, and each change alone."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

from command_line import CommandLine
from own_records import advice, tried
from quiet_bench import QuietBench
from stepscope.analysis.advice.changes import compatible
from stepscope.records.schema import Quantity
from stepscope.scope.trial import habits
from stepscope.scope.trial.backwards import Backwards
from stepscope.scope.trial.changes import COMPILED_AFTER, Changes
from stepscope.scope.trial.optimizers import fuse_optimizers
from stepscope.studies.advice import Script, Trial
from stepscope.studies.advice.script_trial import measure_script_trial
from stepscope.studies.advice.turns import Contestant, ScriptEndedError
from stepscope.studies.advice.view import Tried
from stepscope.studies.inspected.order import Order
from watched_models import Network, batch

SCRIPT = """
import random, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
for step in range(int(sys.argv[1])):
    x = torch.randn(64, 16) + random.random()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
print("wrote a checkpoint")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """Changes last for a process: here they end with the test."""
    held = [
        (torch.autograd, "backward"), (torch.amp.GradScaler, "scale"), (torch.autocast, "__init__"),
        (torch.optim.Optimizer, "__init__"), (torch.optim.Optimizer, "zero_grad"),
        (torch.nn.Module, "zero_grad"), (DataLoader, "__init__"),
        (torch.utils.checkpoint, "checkpoint"), (torch.Tensor, "item"),
        (torch.Tensor, "__float__"),
    ]  # fmt: skip
    before = [(place, name, getattr(place, name)) for place, name in held]
    yield
    for place, name, value in before:
        setattr(place, name, value)


def trial(script: Path, steps: int, **setting: str) -> Trial:
    return Trial(
        program=Script(target=str(script), words=(str(steps),)),
        step_ms=1.0, rounds=5, loss_steps=8, advice=(advice("a-change", 0.5, **setting),),
    )  # fmt: skip


def test_a_script_takes_turns_with_itself(script: Path) -> None:
    made = trial(script, 100_000, optimizer="adamw-fused", gradients="none")
    assert made.program is not None
    before = script.read_bytes()
    found = measure_script_trial(made, made.program, QuietBench())
    series = {one.name: one.values for one in found.series}
    assert len(series["base"]) == len(series["changed"]) == 5
    # Neither the script nor its data is seeded: both runs see the same all the same.
    assert series["loss.base"] == pytest.approx(series["loss.changed"], rel=1e-4)
    assert len(series["loss.base"]) >= 8
    assert series["loss.base"][-1] < series["loss.base"][0]
    assert found.notes == {}
    assert script.read_bytes() == before
    assert made.case().key == "train.py_a-change"


NOT_ADAM = """
import torch
class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.9), "eps": 1e-8})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 0.05 * parameter.grad
model = torch.nn.Linear(8, 1)
one, other = Momentum([model.weight]), Momentum([model.bias])
while True:
    for half in range(2):
        x = torch.randn(32, 8)
        ((model(x) - x.sum(1, keepdim=True)).square().mean() / 2).backward()
    one.step()
    other.step()
    model.zero_grad()
"""


def test_a_change_that_changes_the_outcome_is_dropped(tmp_path: Path) -> None:
    """A script with several optimizers, micro-batches, and an update that only looks like Adam."""
    path = tmp_path / "odd.py"
    path.write_text(NOT_ADAM)
    made = trial(path, 0, optimizer="adamw-fused")
    assert made.program is not None
    found = measure_script_trial(made, made.program, QuietBench())
    series = {one.name: one.values for one in found.series}
    assert len(series["loss.base"]) == len(series["loss.changed"]) > 10
    # Both see the same data up to their first update.
    assert series["loss.base"][0] == series["loss.changed"][0]
    record = tried(30.0)
    losses = tuple(one for one in found.series if one.name.startswith("loss."))
    times = tuple(one for one in record.series if not one.name.startswith("loss."))
    judged = Tried(msgspec.structs.replace(record, series=(*times, *losses)))
    assert judged.verdict == "dropped: the loss differs"


def test_a_script_that_ends_early_says_so(script: Path) -> None:
    made = trial(script, 7, data="workers")
    assert made.program is not None
    with pytest.raises(ScriptEndedError, match="the script ended after 0 of 5 rounds"):
        measure_script_trial(made, made.program, QuietBench())
    order = Order(target=str(script), words=("x",), warmup=5, timed=1, traced=1, memory=False)
    with Contestant(order, {}) as run, pytest.raises(ScriptEndedError, match="code 1: ValueError"):
        run.ready()


def test_an_error_of_many_lines_is_told_by_its_first(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import torch\nraise RuntimeError('no room\\nadvice\\n  and more of it')\n")
    order = Order(target=str(script), words=(), warmup=5, timed=1, traced=1, memory=False)
    said = "code 1: RuntimeError: no room$"
    with Contestant(order, {}) as run, pytest.raises(ScriptEndedError, match=said):
        run.ready()


def test_verdicts_of_what_changed_nothing_or_broke_the_loss() -> None:
    idle = tried(30.0, notes={"without_effect": "nothing of the script was changed by it (data)"})
    assert Tried(idle).verdict == "dropped: nothing of the script was changed by it (data)"
    lost = tried(30.0, quantities={"loss_lost.changed": Quantity(value=3, unit="steps")})
    assert Tried(lost).verdict == "dropped: the loss is no number from step 3 on"
    bare = tried(30.0)
    series = tuple(one for one in bare.series if not one.name.startswith("loss."))
    unseen = Tried(msgspec.structs.replace(bare, series=series))
    assert unseen.verdict == "kept, without a loss to compare"
    assert unseen.kept


def test_of_two_changes_for_one_setting_the_first_is_made() -> None:
    several = [advice("compile", compile="model"), advice("tf32", dtype="tf32"),
               advice("cuda-graph", compile="graphs"), advice(dtype="bfloat16")]  # fmt: skip
    assert [one.code for one in compatible(several)] == ["compile", "tf32"]


@pytest.mark.usefixtures("torch_as_it_was")
def test_losses_add_up_over_micro_batches_and_without_their_scale() -> None:
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
def test_optimizers_are_fused_and_hand_written_adam_is_taken_for_adam() -> None:
    applied: Counter[str] = Counter()
    fuse_optimizers(applied)

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
    torch.testing.assert_close(weights[0], weights[1])


@pytest.mark.usefixtures("torch_as_it_was")
def test_habits_of_a_loop_are_changed() -> None:
    applied: Counter[str] = Counter()
    model = Network()
    x, y = batch()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    habits.drop_gradients(applied)
    torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
    assert next(model.parameters()).grad is None
    habits.load_ahead(applied)
    assert DataLoader([1, 2]).num_workers > 0  # type: ignore[arg-type]
    assert DataLoader([1, 2], num_workers=1).prefetch_factor == 2  # type: ignore[arg-type]
    habits.run_nothing_again(applied)
    assert torch.utils.checkpoint.checkpoint(lambda a: a + 1, 1, use_reentrant=False) == 2
    habits.larger_batches(8, applied)
    sizes = [
        DataLoader([1] * 9, 4).batch_size,  # type: ignore[arg-type]
        DataLoader([1] * 9, batch_size=4).batch_size,  # type: ignore[arg-type]
        DataLoader([1] * 9, 3).batch_size,  # type: ignore[arg-type]
    ]
    assert sizes == [8, 8, 3]
    habits.without_autocast(applied)
    with torch.autocast("cpu", torch.bfloat16), torch.amp.autocast("cpu", enabled=False):
        assert model(x).dtype == torch.float32
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True):
        assert not torch.is_autocast_enabled("cpu")
    assert applied == {"gradients": 1, "data": 4, "checkpoint": 1, "batch": 2, "dtype": 2}


@pytest.mark.usefixtures("torch_as_it_was")
def test_a_whole_number_that_is_read_back_is_a_float_where_one_is_asked_for() -> None:
    habits.read_back_later(Counter())
    right = (torch.arange(4) > 1).sum()
    assert (float(right), type(float(right)), right.item()) == (2.0, float, 2)


BRAIN, HALF, HERE = torch.bfloat16, torch.float16, torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        (("cpu",), {}),
        (("cpu", HALF), {}),
        (("cpu", HALF), {"copy": True}),
        # As nn.Module.to calls it.
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
def test_every_way_to_call_to_can_be_made_not_to_wait(
    arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    x = torch.ones(3)
    before = (arguments, dict(keywords))
    expected = x.to(*arguments, **keywords)
    given, named = habits.without_waiting(arguments, keywords)
    found = x.to(*given, **named)
    assert (found.dtype, found.device) == (expected.dtype, expected.device)
    assert named.get("non_blocking") is True or any(word is True for word in given[1:3])
    assert (arguments, keywords) == before


def test_a_copy_to_a_gpu_is_known_by_its_words() -> None:
    gpu = torch.device("cuda", 0)
    for arguments, keywords in (
        (("cuda",), {}), (("cuda:1", HALF), {}), ((gpu, None, True), {}), ((0,), {}),
        ((), {"device": gpu}), ((), {"dtype": HALF, "device": "cuda"}),
    ):  # fmt: skip
        assert habits.goes_to_gpu(arguments, keywords), (arguments, keywords)
    for arguments, keywords in (
        (("cpu", HALF, True), {}), ((HALF, True), {}), ((HERE,), {}), ((), {"tensor": HERE}),
        ((None, HALF), {}), ((), {"dtype": HALF}), ((), {}),
    ):  # fmt: skip
        assert not habits.goes_to_gpu(arguments, keywords), (arguments, keywords)


@pytest.mark.usefixtures("torch_as_it_was")
def test_losses_are_of_their_own_step_whatever_float_gives(
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


def test_a_larger_batch_of_a_script_is_compared_for_as_many_samples() -> None:
    change = advice("larger-batch", 0.5, batch="16")
    twice = Trial(program=Script(target="t.py"), advice=(change,), step_ms=1.0, batch=8)
    assert twice.more_samples == 2.0
    assert Trial(program=Script(target="t.py"), advice=(advice(),), step_ms=1.0).more_samples == 1.0


@pytest.mark.usefixtures("torch_as_it_was")
def test_a_model_is_changed_once_it_is_known() -> None:
    seen = Backwards()
    seen.attach()
    changes = Changes(
        {"dtype": "bfloat16", "attention": "fused", "checkpoint": "blocks", "optimizer": "fused"},
        seen,
    )
    model = Network()
    changes.when_models_are_known([model])
    formats = []
    model.head.register_forward_hook(lambda *given: formats.append(given[-1].dtype))
    x, y = batch()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    # The loss is within autocast, which makes it in float32; the backward is not.
    assert loss.dtype == torch.float32
    assert torch.is_autocast_enabled("cpu")
    loss.backward()
    assert not torch.is_autocast_enabled("cpu")
    assert formats == [torch.bfloat16]
    with torch.no_grad():
        model(x)
    assert formats[-1] == torch.float32
    changes.end_step(COMPILED_AFTER)
    assert changes.without_effect() == ["optimizer", "attention"]


@pytest.mark.usefixtures("torch_as_it_was")
def test_models_that_are_known_later_are_changed_too_and_the_others_not_again() -> None:
    changes = Changes({"dtype": "bfloat16", "checkpoint": "blocks"}, Backwards())
    first, second = Network(), Network()
    changes.when_models_are_known([first])
    once = changes._applied["checkpoint"]
    assert once
    changes.when_models_are_known([first, second])
    assert changes._applied["checkpoint"] == 2 * once


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--verify", "nowhere.py"), "there is no script nowhere.py"),
        (("--verify", "--model", "a:b", "{script}"), "there are a script and a model"),
        (("--warmup", "1", "{script}"), "4 steps of warm-up"),
    ],
)
def test_bad_words_are_refused(
    words: tuple[str, ...], said: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepscope.cli import main

    assert main(["advise", *(word.format(script=script) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_script_that_never_steps_gets_no_advice(tmp_path: Path) -> None:
    path = tmp_path / "quiet.py"
    path.write_text("import torch\nraise SystemExit(3)\n")
    done = CommandLine(tmp_path)("advise", "--verify", str(path))
    assert done.returncode == 1
    assert "quiet.py ended with exit code 3 without an optimizer step" in done.stderr


def test_a_script_that_fails_early_gets_its_own_error_and_leaves_no_run(tmp_path: Path) -> None:
    path = tmp_path / "crash.py"
    path.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(8):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "raise ValueError('my data is bad')\n"
    )
    command = CommandLine(tmp_path)
    done = command("advise", str(path))
    assert done.returncode == 1
    assert "the program ended after 8 of the 21 steps" in done.stderr
    assert "it ended with exit code 1" in done.stderr
    assert done.stderr.splitlines()[-1].strip() == "ValueError: my data is bad"
    listed = command("list", "runs", "--json")
    assert json.loads(listed.stdout)["runs"] == []
