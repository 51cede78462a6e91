"""Observation of a script by its optimizer steps, within this process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stepscope.advisor.inspect.gather import gather, parts
from stepscope.advisor.inspect.progress import CHILD_STEPPED, read_progress
from stepscope.measure.modules import trained_models
from stepscope.records.schema import Record
from stepscope.views.program.findings import inspected_findings
from stepscope.views.program.rows import lateness, programs, slowest
from view_blocks import coded
from watched_models import Network, batch, network, network_flops, train
from watched_programs import only, watching


def test_gradient_accumulation_is_one_step(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    with watching(tmp_path):
        for _ in range(14):
            for _ in range(3):
                x, y = batch()
                torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    result = only(tmp_path)
    assert result.micro_batches == 3
    assert result.record.quantity("flops") == 3 * network_flops(8)
    assert result.record.config["arguments"] == ["--fast"]
    assert result.summary is not None
    assert len(result.summary.steps) == 2
    assert result.summary.doubt == ""
    assert "blocks.*/up" in {use.module for use in result.summary.uses}
    assert result.setting is not None
    assert result.setting.models == ("Network",)
    assert result.account is not None
    assert [peak.phase for peak in result.account.phases] == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize(
    "broken",
    [
        "stepscope.measure.modules.trained_models",
        "stepscope.advisor.scope.result.make_record",
        "stepscope.advisor.scope.recorder.Recorder.watch",
        "stepscope.records.jsonl.write_records",
    ],
)
def test_errors_of_the_recorder_never_reach_the_script(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no space left\non the device")

    monkeypatch.setattr(broken, fails)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    hooks = len(model._forward_hooks)
    with watching(tmp_path):
        for _ in range(16):
            train(model, optimizer)
    assert read_progress(tmp_path).failure == "OSError: no space left"
    assert not parts(tmp_path)
    assert len(model._forward_hooks) == hooks


def test_unusual_objects_of_the_program_are_skipped(tmp_path: Path) -> None:
    class Wrapping(DataLoader[int]):
        def __init__(self) -> None:
            self.inner = DataLoader([1, 2], batch_size=2)  # type: ignore[arg-type]

    class Unfinished(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:  # noqa: ARG002
            raise RuntimeError("not built yet")

    odd = Wrapping(), Unfinished()
    model, lazy = Network(), torch.nn.LazyLinear(4)
    optimizer = torch.optim.SGD([*model.parameters(), *lazy.parameters()], lr=0.1)
    with watching(tmp_path):
        for _ in range(16):
            train(model, optimizer)
    result = only(tmp_path)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert result.record.quantity("parameters") == numbers
    assert result.setting is not None
    assert "Network" in result.setting.models
    assert len(odd) == 2


def test_time_in_a_loader_is_that_of_the_timed_steps(tmp_path: Path) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            time.sleep(0.01)
            return super().__getitem__(index)

    model, optimizer = network()
    x, y = batch()
    with watching(tmp_path):
        for inputs, targets in DataLoader(Slow(x.repeat(20, *[1] * (x.dim() - 1)), y.repeat(20))):
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    series = only(tmp_path).record.find("loading")
    assert series is not None
    assert len(series.values) == 5
    assert all(10 <= ms < 1000 for ms in series.values)


def test_several_optimizers_make_one_step_per_iteration(tmp_path: Path) -> None:
    first, second = Network(), Network()
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    two = torch.optim.AdamW(second.parameters())
    with watching(tmp_path):
        for _ in range(16):
            train(first, one)
            train(second, two)
    result = only(tmp_path)
    assert result.micro_batches == 1
    assert result.record.quantity("flops") == 2 * network_flops(8)
    assert result.setting is not None
    assert sorted(o.name for o in result.setting.optimizers) == ["AdamW", "SGD"]
    assert result.summary is not None
    parts = {use.module for use in result.summary.uses}
    assert parts >= {"Network first/head", "Network second/head"}
    assert result.account is not None
    remaining = {saved.module for saved in result.account.saved}
    assert remaining >= {"Network first/head", "Network second/head"}


def test_script_that_ends_while_traced_leaves_a_partial_recording(tmp_path: Path) -> None:
    model, optimizer = network()
    with watching(tmp_path):
        # 2 warm-up, 5 timed, 1 counted, 1 lead-in, 1 traced, and the step before the first edge.
        for _ in range(11):
            train(model, optimizer)
    result = only(tmp_path)
    assert result.summary is not None
    assert len(result.summary.steps) == 1
    assert result.micro_batches == 1
    missing = result.record.notes["cut_short"]
    assert missing == "the program ended after 11 of the 12 steps of a recording"
    output = coded(inspected_findings([result]), "inspect.cut-short")
    assert output.values == {"rank": 0, "reason": missing}
    assert output.text == f"The recording is incomplete: {missing}."


def test_script_that_ends_while_timed_leaves_its_times(tmp_path: Path) -> None:
    model, optimizer = network()
    with watching(tmp_path):
        for _ in range(6):
            train(model, optimizer)
    result = only(tmp_path)
    step = result.record.find("step")
    assert step is not None
    assert len(step.values) == 3
    assert result.summary is None
    assert result.account is None


def test_too_few_steps_leave_only_their_number(tmp_path: Path) -> None:
    model, optimizer = network()
    with watching(tmp_path):
        for _ in range(2):
            train(model, optimizer)
    assert gather(tmp_path) == []
    assert read_progress(tmp_path).optimizer_steps == 2


def test_stop_ends_the_script_with_its_recording_written(tmp_path: Path) -> None:
    model, optimizer = network()
    steps = []

    def script() -> None:
        with watching(tmp_path, stop=True):
            for step in range(100):
                steps.append(step)
                train(model, optimizer)

    with pytest.raises(SystemExit) as ended:
        script()
    assert ended.value.code == 0
    assert len(steps) == 12
    assert only(tmp_path).summary is not None


def test_steps_in_a_forked_process_are_detected_and_not_recorded(tmp_path: Path) -> None:
    _, optimizer = network()
    with watching(tmp_path) as watcher:
        child = os.fork()
        if child == 0:
            optimizer.step()
            watcher.finish()
            os._exit(0)
        os.waitpid(child, 0)
    assert (tmp_path / CHILD_STEPPED).exists()
    assert read_progress(tmp_path).optimizer_steps == 0


def test_outermost_models_of_the_parameters_are_found() -> None:
    inner = Network()
    outer = torch.nn.Sequential(inner)
    other = Network()
    assert trained_models(inner.head.parameters()) == [outer]
    assert other not in trained_models(outer.parameters())


def planted(rank: int, late_ns: int, record: Record) -> Record:
    import msgspec

    starts = [[(1 + 8 * step) * 1_000_000 + late_ns] for step in range(6)]
    return msgspec.structs.replace(
        record,
        config=record.config | {"rank": rank, "ranks": 2},
        attachments=record.attachments | {"collectives": starts},
    )


def test_slowest_rank_is_named(tmp_path: Path) -> None:
    model, optimizer = network()
    with watching(tmp_path):
        for _ in range(12):
            train(model, optimizer)
    (record,) = gather(tmp_path)
    late = 10_000_000_000
    (ranks,) = programs([planted(1, late, record), planted(0, 0, record)])
    assert [one.rank for one in ranks] == [0, 1]
    assert lateness(ranks) == {0: 0.0, 1: 10_000.0}
    last = slowest(ranks)
    assert last is not None
    assert last.rank == 1
    from stepscope.advisor.inspect import STUDY
    from stepscope.views.program.view import inspected_blocks

    texts = [
        getattr(block, "text", "") for block in inspected_blocks([one.record for one in ranks])
    ]
    assert any(text.startswith("Rank 1 is the slowest") for text in texts)
    table = STUDY.headline([one.record for one in ranks])
    assert table is not None
    assert [row[1] for row in table.rows] == [0, 1]
    assert slowest([ranks[0]]) is None


def test_fake_tensors_are_not_counted_as_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from stepscope.advisor.scope.memory import _living_tensors

    with FakeTensorMode():
        stand_in = torch.empty(1 << 20)
    real = torch.empty(8)
    living = {id(x) for x in _living_tensors()}
    assert id(real) in living
    assert id(stand_in) not in living
