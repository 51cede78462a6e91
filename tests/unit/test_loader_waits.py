"""Steps that wait for the workers of a DataLoader: their time, its parts, and the advice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.scope import watching as watching_module
from stepscope.advisor.scope.loading import with_mean_wait
from stepscope.advisor.verdict import program_verdict
from stepscope.analysis.advice.changes import advise, not_applicable
from stepscope.analysis.advice.facts import BETWEEN, Facts, PhaseWork
from stepscope.views.program.findings import inspected_findings
from view_blocks import coded
from watched_models import Network, batch
from watched_programs import only, watching

LOAD_S = 0.2
LONG_LOAD_S = 0.6
"""Six times the step of a busy machine, so that waits stand out there too."""
WORKERS = 2


class Slow(TensorDataset):
    """`load_s` has the time that a sample takes to load, by worker."""

    def __init__(self, *tensors: torch.Tensor, load_s: tuple[float, ...]) -> None:
        super().__init__(*tensors)
        self.load_s = load_s

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self.load_s[index % WORKERS])
        return super().__getitem__(index)


def loader(
    batches: int, load_s: tuple[float, ...] = (LOAD_S, LOAD_S)
) -> DataLoader[tuple[torch.Tensor, ...]]:
    x, y = batch()
    data = Slow(x[:1].repeat(batches, *[1] * (x.dim() - 1)), y[:1].repeat(batches), load_s=load_s)
    return DataLoader(data, batch_size=1, num_workers=WORKERS, prefetch_factor=1)


def train_on(batches: Iterator[tuple[torch.Tensor, ...]], folder: Path) -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(folder):
        for inputs, targets in batches:
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


def test_bursts_of_batches_make_the_step_as_long_as_on_average(tmp_path: Path) -> None:
    """One of two workers is slow, and the other has its batch ready then: every other step waits,
    however late the workers have started."""
    train_on(iter(loader(16, (0.0, LONG_LOAD_S))), tmp_path)
    lead = only(tmp_path)
    step, elapsed = lead.record.find("step"), lead.record.find("elapsed")
    assert step is not None
    assert elapsed is not None
    assert sum(step.values) == pytest.approx(sum(elapsed.values))
    assert min(elapsed.values) < 0.5 * max(elapsed.values)
    assert lead.step_ms == pytest.approx(sum(elapsed.values) / 5, rel=0.3)
    assert lead.step_ms >= 0.7 * 1e3 * LONG_LOAD_S / WORKERS
    assert lead.setting is not None
    assert lead.setting.loader_workers == WORKERS
    assert coded(inspected_findings([lead]), "inspect.loader-bursts").values == {
        "least_ms": min(waits := lead.record.find("loading").values),  # type: ignore[union-attr]
        "most_ms": max(waits),
    }
    verdict = program_verdict([lead.record])
    assert verdict is not None
    assert verdict.largest_loss is not None
    assert verdict.largest_loss.label == "DataLoader"
    assert verdict.step is not None
    assert sum(part.ms for part in verdict.parts) == pytest.approx(verdict.step.value)
    facts = facts_of(lead.record)
    assert facts.loader_bound
    # The work of the step itself is not scaled by the waits.
    operators = sum(ms for work in facts.phases for kind, ms in work.classes.items())
    between = sum(work.classes.get(BETWEEN, 0.0) for work in facts.phases)
    assert operators - between < 0.5 * facts.step_ms


def collated(samples: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """A batch that takes more operators to make than to train on."""
    x, y = (torch.stack(several) for several in zip(*samples, strict=True))
    return sum((x / 4_000 for _ in range(4_000)), torch.zeros(())), y


def test_operators_that_make_a_batch_are_no_part_of_the_recording(tmp_path: Path) -> None:
    x, y = batch()
    data = TensorDataset(x.repeat(16, *[1] * (x.dim() - 1)), y.repeat(16))
    train_on(iter(DataLoader(data, batch_size=len(x), collate_fn=collated)), tmp_path)
    lead = only(tmp_path)
    assert lead.missing == ""
    assert lead.summary is not None
    assert sum(one.count for one in lead.summary.uses) < 2_000
    facts = facts_of(lead.record)
    (outside,) = (work for work in facts.phases if work.name == "outside")
    assert facts.data_ms > 0.5 * facts.step_ms
    assert outside.classes[BETWEEN] == pytest.approx(facts.data_ms, rel=0.5)
    assert facts.device_ms == pytest.approx(facts.step_ms, rel=0.01)


def test_the_first_batch_of_an_epoch_is_not_part_of_a_step(tmp_path: Path) -> None:
    epochs = (one for _ in range(3) for one in loader(5))
    train_on(epochs, tmp_path)
    lead = only(tmp_path)
    step = lead.record.find("step")
    assert step is not None
    assert len(step.values) == 4
    finding = coded(inspected_findings([lead]), "inspect.epoch-starts")
    assert finding.values == {"steps": 1}
    assert finding.text == (
        "1 of the timed steps took the first batch of an epoch, for which the workers of the"
        " DataLoader have to start: excluded from the step time."
    )


def test_models_are_searched_once_unless_optimizers_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search would give the workers time to load ahead of the timed steps."""
    searched = []
    plain = watching_module.Watcher._find_models

    def find(self: watching_module.Watcher, recorder: object) -> None:
        searched.append(recorder.steps)  # type: ignore[attr-defined]
        plain(self, recorder)  # type: ignore[arg-type]

    monkeypatch.setattr(watching_module.Watcher, "_find_models", find)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watching(tmp_path):
        for _ in range(14):
            x, y = batch()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert searched == [0]
    assert only(tmp_path).record.attachments["setting"]["models"] == ["Network"]


@pytest.mark.parametrize(
    ("steps", "waits", "expected"),
    [
        ((10.0, 60.0, 10.0, 60.0), (0.0, 50.0, 0.0, 50.0), (35.0, 35.0, 35.0, 35.0)),
        # Steps vary for another reason.
        ((10.0, 60.0, 10.0, 60.0), (5.0, 5.0, 5.0, 5.0), None),
        # A GPU hides waits: a step is shorter than its wait.
        ((30.0, 31.0, 45.0, 30.0), (0.0, 90.0, 104.0, 0.0), None),
        ((10.0,), (1.0,), None),
    ],
)
def test_steps_have_the_mean_wait_only_where_it_explains_them(
    steps: tuple[float, ...], waits: tuple[float, ...], expected: tuple[float, ...] | None
) -> None:
    assert with_mean_wait(steps, waits) == expected


def waiting(on_gpu: bool, workers: int, cores: int) -> Facts:
    """A step of 100 ms, 60 of them in a DataLoader, with a slow update."""
    phases = (
        PhaseWork(name="outside", classes={} if on_gpu else {BETWEEN: 60.0}, host_ms=60.0),
        PhaseWork(name="forward", classes={"matmul": 10.0}, launches=10),
        PhaseWork(name="backward", classes={"matmul": 20.0}, launches=10),
        PhaseWork(name="optimizer", classes={"optimizer": 10.0}, launches=100),
    )
    return Facts(
        on_gpu=on_gpu,
        step_ms=100.0,
        dtype="float32",
        phases=phases,
        data_ms=60.0,
        loader_workers=workers,
        waits="end",
        cores=cores,
        threads=1,
        rates={"float32": 1e12, "bfloat16": 1e13},
        bandwidth=1e12,
        parameters=1000,
        peak_bytes=1,
        compiled=True,
    )


@pytest.mark.parametrize("on_gpu", [False, True])
def test_only_more_workers_help_a_loop_that_waits_for_them(on_gpu: bool) -> None:
    (change,) = advise(waiting(on_gpu, workers=2, cores=16))
    assert (change.code, change.title) == ("data-ahead", "more DataLoader workers")
    # Two workers take 100 ms for a batch, and the step itself takes 40.
    assert change.lines == ("DataLoader(…, num_workers=5, persistent_workers=True)",)
    assert change.gain_ms == pytest.approx(60.0)
    assert not change.setting
    without = msgspec.structs.replace(waiting(on_gpu, workers=0, cores=16), data_ms=0.0)
    assert "bfloat16" in {one.code for one in advise(without)} or not on_gpu


def test_workers_on_all_cores_are_the_reason_not_to_add_more() -> None:
    facts = waiting(on_gpu=False, workers=2, cores=2)
    assert advise(facts) == ()
    reasons = {one.code: one.reason for one in not_applicable(facts)}
    assert reasons["data-ahead"].startswith("the loop waits 60 ms for its 2 workers on 2 cores")
