"""Scripts are watched by their optimizers' steps: here within this process."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stepscope.measure.modules import all_named_parts, model_names, trained_models
from stepscope.records.schema import Record
from stepscope.scope.result import usual_steps
from stepscope.scope.stages import Effort
from stepscope.scope.watching import Watcher
from stepscope.studies.inspected.findings import inspected_findings
from stepscope.studies.inspected.gather import gather, parts
from stepscope.studies.inspected.progress import CHILD_STEPPED, read_progress
from stepscope.studies.inspected.rows import (
    Watched,
    lateness,
    programs,
    slowest,
    traced_longer,
)
from stepscope.studies.memory.view import saved_table
from watched_models import Network, batch, network_flops, train


@contextmanager
def watching(folder: Path, stop: bool = False) -> Iterator[Watcher]:
    watcher = Watcher(
        folder, Effort(warmup=2, timed=5, traced=2), "train.py", ["--fast"], stop=stop
    )
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.finish()


def only(folder: Path) -> Watched:
    (record,) = gather(folder)
    return Watched(record)


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
    found = only(tmp_path)
    assert found.micro_batches == 3
    assert found.record.quantity("flops") == 3 * network_flops(8)
    assert found.record.config["arguments"] == ["--fast"]
    assert found.summary is not None
    assert len(found.summary.steps) == 2
    assert found.summary.doubt == ""
    assert "blocks.*/up" in {use.module for use in found.summary.uses}
    assert found.setting is not None
    assert found.setting.models == ("Network",)
    assert found.account is not None
    assert [peak.phase for peak in found.account.phases] == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize(
    "broken",
    ["stepscope.measure.modules.trained_models", "stepscope.scope.result.make_record",
     "stepscope.scope.recorder.Recorder.watch", "stepscope.records.jsonl.write_records"],
)  # fmt: skip
def test_what_goes_wrong_here_never_reaches_the_script(
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


def test_odd_objects_of_the_program_are_passed_over(tmp_path: Path) -> None:
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
    found = only(tmp_path)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert found.record.quantity("parameters") == numbers
    assert found.setting is not None
    assert "Network" in found.setting.models
    assert len(odd) == 2


def test_a_validation_every_few_steps_is_no_part_of_a_step(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = batch()
    with watching(tmp_path):
        for step in range(16):
            train(model, optimizer)
            if step in (5, 9):
                with torch.no_grad():
                    time.sleep(0.2)
                    model(x)
    found = only(tmp_path)
    series = found.record.find("step")
    assert series is not None
    assert len(series.values) == 4
    assert max(series.values) < 200
    assert found.record.notes["left_out"] == "1"
    assert found.record.notes["traced_validations"] == "[0]"
    assert found.summary is not None
    assert len(found.summary.steps) == 1
    assert found.summary.wall_ms < 200
    said = " ".join(finding.text for finding in inspected_findings([found]))
    assert "Of the timed steps 1 also ran the model without gradients" in said
    assert "Of the traced steps 1 also ran the model without gradients: they are left out" in said


def test_where_every_traced_step_validates_the_account_says_so(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = Watcher(tmp_path, Effort(warmup=2, timed=5, traced=3), "train.py", [], stop=False)
    watcher.start()
    for step in range(16):
        train(model, optimizer)
        if step > 8:
            with torch.no_grad():
                model(batch()[0])
        if step == 10:
            time.sleep(0.5)
    watcher.finish()
    found = only(tmp_path)
    assert found.summary is not None
    assert len(found.summary.steps) == 2, "one was far longer"
    said = " ".join(finding.text for finding in inspected_findings([found]))
    assert "3 also ran the model without gradients: that work is in the account" in said


@pytest.mark.parametrize(
    "validating", [(7,), (7, 8), range(7, 30)], ids=["once", "twice", "always"]
)
def test_the_memory_is_counted_in_a_step_without_a_validation(
    tmp_path: Path, validating: Collection[int]
) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(tmp_path):
        for step in range(30):
            train(model, optimizer)
            if step in validating:
                with torch.no_grad():
                    model(batch()[0])
    found = only(tmp_path)
    flops = found.record.quantity("flops")
    assert flops is not None
    if len(validating) > 2:
        assert flops > network_flops(8)
    else:
        assert flops == network_flops(8)
    assert found.summary is not None, "it goes on after that"


def test_a_step_that_saves_a_checkpoint_is_left_out_of_the_account(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher = Watcher(tmp_path, Effort(warmup=2, timed=5, traced=3), "train.py", [], stop=False)
    watcher.start()
    for step in range(16):
        train(model, optimizer)
        if step == 10:
            time.sleep(0.5)
    watcher.finish()
    found = only(tmp_path)
    assert found.summary is not None
    assert len(found.summary.steps) == 2
    assert found.summary.wall_ms < 500
    (longer,) = traced_longer(found.record)
    assert longer > 500
    said = " ".join(finding.text for finding in inspected_findings([found]))
    assert "Of the traced steps 1 took 5" in said


def test_what_each_forward_saves_anew_is_listed_once(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(tmp_path):
        for _ in range(16):
            for _micro_batch in range(3):
                x, y = batch()
                torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    account = only(tmp_path).account
    assert account is not None
    rows = [(s.module, s.operator, s.shape, s.dtype, s.code) for s in account.saved]
    assert len(set(rows)) == len(rows)
    assert {saved.times % 3 for saved in account.saved} == {0}
    assert saved_table(account).rows[0][4] == 3


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((0, 0, 3, 0), [0, 1, 3]), ((1, 1, 1), [0, 1, 2]), ((2, 0, 2, 2), [0, 1, 2, 3]), ((), [])],
)
def test_steps_count_where_most_are_alike(counts: tuple[int, ...], expected: list[int]) -> None:
    assert usual_steps(counts) == expected


def test_the_time_in_a_loader_is_that_of_the_timed_steps(tmp_path: Path) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
            time.sleep(0.01)
            return super().__getitem__(place)

    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    with watching(tmp_path):
        for inputs, targets in DataLoader(Slow(x.repeat(20, *[1] * (x.dim() - 1)), y.repeat(20))):
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    series = only(tmp_path).record.find("loading")
    assert series is not None
    assert len(series.values) == 5
    assert all(10 <= ms < 1000 for ms in series.values)


def test_several_optimizers_make_one_step_of_a_turn(tmp_path: Path) -> None:
    first, second = Network(), Network()
    one = torch.optim.SGD(first.parameters(), lr=0.1)
    two = torch.optim.AdamW(second.parameters())
    with watching(tmp_path):
        for _ in range(16):
            train(first, one)
            train(second, two)
    found = only(tmp_path)
    assert found.micro_batches == 1
    assert found.record.quantity("flops") == 2 * network_flops(8)
    assert found.setting is not None
    assert sorted(o.name for o in found.setting.optimizers) == ["AdamW", "SGD"]
    assert found.summary is not None
    parts = {use.module for use in found.summary.uses}
    assert parts >= {"Network first/head", "Network second/head"}
    assert found.account is not None
    kept = {saved.module for saved in found.account.saved}
    assert kept >= {"Network first/head", "Network second/head"}


class TestModelNames:
    def test_one_alone_needs_none(self) -> None:
        assert model_names([Network()]) == [""]
        assert model_names([]) == []

    def test_other_classes_are_enough(self) -> None:
        assert model_names([Network(), torch.nn.Linear(2, 2)]) == ["Network", "Linear"]

    def test_what_no_function_has_gets_a_number(self) -> None:
        models = [Network(), torch.nn.Identity(), Network(), Network()]
        assert model_names(models) == ["Network", "Identity", "Network #2", "Network #3"]

    def test_layers_in_a_row_go_by_their_class(self) -> None:
        mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        alike = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        whole = torch.nn.ModuleDict({"mixed": mixed, "alike": alike})
        names = [name for name, _ in all_named_parts(whole)]
        assert names == [
            "", "mixed", "mixed.0 Linear", "mixed.1 ReLU", "alike", "alike.0", "alike.1",
        ]  # fmt: skip
        assert [module for _, module in all_named_parts(whole)] == list(whole.modules())

    def test_the_outermost_function_decides(self) -> None:
        def inner(model: Network, other: Network) -> list[str]:
            return model_names([model, other])

        policy, value = Network(), Network()
        assert inner(policy, value) == ["Network policy", "Network value"]

    def test_attributes_of_what_runs_count(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.teacher, self.student = Network(), Network()

            def fit(self) -> list[str]:
                return model_names([self.student, self.teacher])

        assert Trainer().fit() == ["Network student", "Network teacher"]


def test_a_script_that_ends_while_it_is_traced_keeps_what_there_is(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(tmp_path):
        # 2 left out, 5 timed, 1 counted, 1 lead-in, 1 traced, and the step before the first edge.
        for _ in range(11):
            train(model, optimizer)
    found = only(tmp_path)
    assert found.summary is not None
    assert len(found.summary.steps) == 1
    assert found.micro_batches == 1
    missing = found.record.notes["cut_short"]
    assert missing == "the program ended after 11 of the 12 steps that it takes"
    said = " ".join(finding.text for finding in inspected_findings([found]))
    assert f"The recording is not whole: {missing}." in said


def test_a_script_that_ends_while_it_is_timed_has_its_times(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(tmp_path):
        for _ in range(6):
            train(model, optimizer)
    found = only(tmp_path)
    step = found.record.find("step")
    assert step is not None
    assert len(step.values) == 3
    assert found.summary is None
    assert found.account is None


def test_too_few_steps_leave_no_record_but_their_number(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(tmp_path):
        for _ in range(2):
            train(model, optimizer)
    assert gather(tmp_path) == []
    assert read_progress(tmp_path).optimizer_steps == 2


def test_stop_ends_the_script_with_its_recording_written(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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


def test_steps_in_a_forked_process_are_noticed_and_not_recorded(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(tmp_path) as watcher:
        child = os.fork()
        if child == 0:
            optimizer.step()
            watcher.finish()
            os._exit(0)
        os.waitpid(child, 0)
    assert (tmp_path / CHILD_STEPPED).exists()
    assert read_progress(tmp_path).optimizer_steps == 0


def test_the_outermost_models_of_the_parameters_are_found() -> None:
    inner = Network()
    outer = torch.nn.Sequential(inner)
    other = Network()
    assert trained_models(inner.head.parameters()) == [outer]
    assert other not in trained_models(outer.parameters())


def planted(rank: int, late_ns: int, record: Record) -> Record:
    import msgspec

    starts = [[1_000_000 + late_ns], [9_000_000 + late_ns]]
    return msgspec.structs.replace(
        record,
        config=record.config | {"rank": rank, "ranks": 2},
        notes=record.notes | {"collectives": msgspec.json.encode(starts).decode()},
    )


def test_the_slowest_rank_is_named(tmp_path: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    from stepscope.studies.inspected import STUDY
    from stepscope.studies.inspected.view import inspected_blocks

    texts = [
        getattr(block, "text", "") for block in inspected_blocks([one.record for one in ranks])
    ]
    assert any(text.startswith("Rank 1 is the slowest") for text in texts)
    table = STUDY.headline([one.record for one in ranks])
    assert table is not None
    assert [row[1] for row in table.rows] == [0, 1]
    assert slowest([ranks[0]]) is None


def test_stand_ins_of_the_compiler_are_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from stepscope.scope.memory import _living_tensors

    with FakeTensorMode():
        stand_in = torch.empty(1 << 20)
    real = torch.empty(8)
    living = {id(x) for x in _living_tensors()}
    assert id(real) in living
    assert id(stand_in) not in living
