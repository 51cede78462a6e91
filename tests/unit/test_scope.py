"""`stepscope.Scope`: what it records, and that it does not affect the loop."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import stepscope
from stepscope import integrations
from stepscope.advisor.scope import library
from stepscope.errors import StepscopeError, UsageError
from stepscope.records.jsonl import read_records
from stepscope.records.memory import OPTIMIZER, PARAMETERS
from stepscope.studies.page import make_page, verdict_of
from stepscope.views.program.rows import ProgramRecord
from view_blocks import findings_of, tables_of
from watched_models import Network, batch, network, network_flops, train

FEW = {"warmup": 1, "timed": 5, "traced": 2}


@pytest.fixture(scope="module")
def scoped(tmp_path_factory: pytest.TempPathFactory) -> tuple[stepscope.Scope, Path]:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    scope = stepscope.Scope(model, optimizer, **FEW, name="a test")
    for _ in range(12):
        with scope.step():
            train(model, optimizer)
    return scope, scope.report(tmp_path_factory.mktemp("scope") / "page.html")


def test_everything_is_recorded_once(scoped: tuple[stepscope.Scope, Path]) -> None:
    scope, _ = scoped
    assert scope.done
    record = scope.record()
    assert record.status == "ok"
    step = record.find("step")
    assert step is not None
    assert (len(step.values), len(step.warmup)) == (5, 1)
    assert record.quantity("flops") == network_flops(8)
    assert record.config["dtype"] == "float32"
    watched = ProgramRecord(record)
    assert watched.summary is not None
    assert len(watched.summary.steps) == 2
    assert watched.micro_batches == 1
    assert not [note for note in record.notes if note.endswith(("missing", "failed"))]


def test_trace_names_the_modules_of_the_model(scoped: tuple[stepscope.Scope, Path]) -> None:
    summary = ProgramRecord(scoped[0].record()).summary
    assert summary is not None
    assert summary.doubt == ""
    parts = {(use.module, use.phase) for use in summary.uses}
    assert {("blocks.*/up", "forward"), ("blocks.*/down", "backward"), ("head", "forward")} <= parts
    outside = {use.kernel for use in summary.uses if use.phase == "outside"}
    assert "aten::normal_" in outside


def test_memory_ledger_has_the_bytes_of_the_model(scoped: tuple[stepscope.Scope, Path]) -> None:
    account = ProgramRecord(scoped[0].record()).account
    assert account is not None
    size = sum(p.numel() for p in Network().parameters()) * 4
    assert [peak.phase for peak in account.phases] == ["forward", "backward", "optimizer"]
    assert account.line(PARAMETERS) == size
    tensors = len(list(Network().parameters()))
    assert account.line(OPTIMIZER) == 2 * size + 4 * tensors
    assert {saved.module for saved in account.saved} >= {"blocks.0.up", "blocks.1.down"}


def test_page_is_reproduced_from_its_records(scoped: tuple[stepscope.Scope, Path]) -> None:
    _, page = scoped
    records = read_records(page.with_suffix(".jsonl"))
    rebuilt = make_page(records)
    assert rebuilt.headline.rows[0][0] == "a test"
    blocks = rebuilt.sections[0].blocks
    tables = {"inspect-ledger", "inspect-modules", "memory-ledger", "memory-saved"}
    assert tables <= set(tables_of(blocks))
    assert any("A step of a test takes" in b.text for b in findings_of(blocks))
    assert "blocks.*" in page.read_text()


def test_loop_computes_the_same_numbers() -> None:
    def losses(with_scope: bool) -> list[float]:
        torch.manual_seed(1)
        model, optimizer = network()
        scope = stepscope.Scope(model, optimizer, warmup=0, timed=1, traced=1)
        result = []
        for _ in range(4):
            x, y = batch()
            if with_scope:
                with scope.step():
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            result.append(loss.item())
        return result

    assert losses(True) == losses(False)


def test_error_in_a_step_is_raised_in_the_loop() -> None:
    model, optimizer = network()
    scope = stepscope.Scope(model, optimizer, warmup=0, timed=1, traced=1, memory=False)
    for _ in range(2):
        with scope.step():
            train(model, optimizer)
    # In a traced step, while module ranges are open.
    with pytest.raises(RuntimeError, match="mat1 and mat2"), scope.step():
        model(torch.randn(2, 3))
    with pytest.raises(ValueError, match="planned"), scope.step():
        raise ValueError("planned")
    assert not model._forward_hooks
    assert not model.head._forward_hooks


def test_profiler_of_the_program_has_precedence() -> None:
    model, optimizer = network()
    scope = stepscope.Scope(model, optimizer, warmup=0, timed=1, traced=3, memory=False)
    with scope.step():
        train(model, optimizer)
    with scope.step():
        train(model, optimizer)
    with torch.profiler.profile() as own, scope.step():
        train(model, optimizer)
    assert any(event.name == "aten::addmm" for event in own.events())
    record = scope.record()
    assert "its own profiler" in record.notes["trace_missing"]
    assert "profile" not in record.attachments


def test_earlier_profiler_of_the_program_is_waited_for() -> None:
    model, optimizer = network()
    scope = stepscope.Scope(model, optimizer, warmup=0, timed=1, traced=2, memory=False)
    with torch.profiler.profile():
        for _ in range(2):
            with scope.step():
                train(model, optimizer)
    for _ in range(2):
        with scope.step():
            train(model, optimizer)
    assert ProgramRecord(scope.record()).summary is not None


def test_compiled_model_is_not_changed() -> None:
    torch._dynamo.reset()
    model = Network()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train(compiled, optimizer)
    frames = dict(torch._dynamo.utils.counters["frames"])
    scope = stepscope.Scope(compiled, optimizer, warmup=0, timed=1, traced=1)
    for _ in range(4):
        with scope.step():
            train(compiled, optimizer)
    assert dict(torch._dynamo.utils.counters["frames"]) == frames
    record = scope.record()
    assert "compiled" in record.notes["memory_missing"]
    assert "profile" in record.attachments


@pytest.mark.parametrize("wrong", [("no model", None), (None, "no optimizer")])
def test_invalid_model_or_optimizer_is_refused(wrong: tuple[object, object]) -> None:
    model, optimizer = network()
    with pytest.raises(UsageError, match="has type str"):
        stepscope.Scope(wrong[0] or model, wrong[1] or optimizer)  # type: ignore[arg-type]


def test_too_few_steps_and_nested_steps_are_reported() -> None:
    model, optimizer = network()
    scope = stepscope.Scope(model, optimizer)
    with scope.step():
        train(model, optimizer)
        with pytest.raises(UsageError, match="nested"), scope.step():
            pass
    with pytest.raises(StepscopeError, match=r"1 step ran, but .* needs 20"):
        scope.record()


class TokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * self.table(ids)


def test_steps_without_a_block_end_where_the_next_begins() -> None:
    model = TokenModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope = stepscope.Scope(model, optimizer, **FEW, memory=False)
    scope.next_step()
    for step in range(20):
        for _ in range(2):
            model(torch.randint(10, (3, 5)), scale=2.0).sum().backward()
        if step == 3:
            with torch.no_grad():
                model(torch.randint(10, (30, 50)))
        optimizer.step()
        scope.next_step()
    assert scope.done
    record = scope.record()
    assert record.quantity("tokens") == 2 * 3 * 5
    watched = ProgramRecord(record)
    assert watched.micro_batches == 2
    assert watched.summary is not None
    assert len(watched.summary.steps) == 2


def test_next_command_needs_a_script(
    scoped: tuple[stepscope.Scope, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a trace there is no advice: the next command records the program again.
    untraced = msgspec.structs.replace(scoped[0].record(), attachments={})
    for command, expected in (("train.py -v", "stepscope inspect train.py -v"), ("", "")):
        notes = untraced.notes | {"command": command}
        verdict = verdict_of([msgspec.structs.replace(untraced, notes=notes)])
        assert verdict is not None
        assert verdict.next_command == expected
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "lab/train.py", raising=False)
    monkeypatch.setattr("sys.argv", ["lab/train.py", "--name", "a b"])
    assert library._command() == "lab/train.py --name 'a b'"
    monkeypatch.delattr(main, "__file__")
    assert library._command() == ""


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("StepscopeCallback", "transformers", "hf"),
        ("StepscopeAccelerateHook", "accelerate", "hf"),
        ("StepscopeLightningCallback", "pytorch_lightning", "lightning"),
    ],
)
def test_a_missing_library_is_named(
    name: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for missing in ("lightning", module):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{name} needs {module} .*stepscope\[{extra}\]"):
        getattr(integrations, name)
