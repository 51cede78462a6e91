"""Steps that differ from the others: validation, checkpoints, several forward passes."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from stepscope.advisor.scope.result import usual_steps
from stepscope.advisor.verdict import program_verdict
from stepscope.report.answer import sentences
from stepscope.report.format import duration
from stepscope.views.memory import saved_table
from stepscope.views.program.findings import inspected_findings
from view_blocks import coded
from watched_models import batch, network, network_flops, train
from watched_programs import only, watching


def test_periodic_validation_is_not_part_of_a_step(tmp_path: Path) -> None:
    model, optimizer = network()
    x, _ = batch()
    with watching(tmp_path):
        for step in range(16):
            train(model, optimizer)
            if step in (5, 9):
                with torch.no_grad():
                    time.sleep(0.2)
                    model(x)
    result = only(tmp_path)
    series = result.record.find("step")
    assert series is not None
    assert len(series.values) == 4
    assert max(series.values) < 200
    assert result.record.notes["left_out"] == "1"
    assert result.record.attachments["traced_validations"] == [0]
    assert result.summary is not None
    assert len(result.summary.steps) == 1
    assert result.summary.wall_ms < 200
    assert 150 <= result.evaluating_ms < 1000
    verdict = program_verdict([result.record])
    assert verdict is not None
    assert verdict.evaluations is not None
    assert (verdict.evaluations.steps, verdict.evaluations.timed) == (1, 5)
    assert (
        "Not included: 1 of 5 timed steps also ran the model without gradients (validation,"
        f" rollout), for {duration(result.evaluating_ms)} more."
    ) in " ".join(sentences(verdict))
    output = inspected_findings([result])
    for code, words in (
        (
            "inspect.timed-evaluations",
            "1 of the timed steps also ran the model without gradients, as in a validation or a"
            f" rollout, for {duration(result.evaluating_ms)} more: they are excluded",
        ),
        (
            "inspect.traced-evaluations",
            "1 of the traced steps also ran the model without gradients: they are excluded",
        ),
    ):
        assert coded(output, code).values == {"steps": 1}
        assert coded(output, code).text.startswith(words)


def test_validation_in_every_traced_step_is_reported(tmp_path: Path) -> None:
    model, optimizer = network()
    with watching(tmp_path, traced=3):
        for step in range(16):
            train(model, optimizer)
            if step > 8:
                with torch.no_grad():
                    model(batch()[0])
            if step == 10:
                time.sleep(0.5)
    result = only(tmp_path)
    assert result.summary is not None
    assert len(result.summary.steps) == 2, "one was far longer"
    output = coded(inspected_findings([result]), "inspect.evaluates-in-every-step")
    assert output.text.startswith(
        "All traced steps also ran the model without gradients: the time breakdown"
    )


@pytest.mark.parametrize(
    "validating", [(7,), (7, 8), range(7, 30)], ids=["once", "twice", "always"]
)
def test_memory_is_counted_in_a_step_without_validation(
    tmp_path: Path, validating: Collection[int]
) -> None:
    model, optimizer = network()
    with watching(tmp_path):
        for step in range(30):
            train(model, optimizer)
            if step in validating:
                with torch.no_grad():
                    model(batch()[0])
    result = only(tmp_path)
    flops = result.record.quantity("flops")
    assert flops is not None
    if len(validating) > 2:
        assert flops > network_flops(8)
    else:
        assert flops == network_flops(8)
    assert result.summary is not None, "it goes on after that"


def test_step_that_saves_a_checkpoint_is_excluded_from_the_ledger(tmp_path: Path) -> None:
    model, optimizer = network()
    with watching(tmp_path, traced=3):
        for step in range(16):
            train(model, optimizer)
            if step == 10:
                time.sleep(0.5)
    result = only(tmp_path)
    assert result.summary is not None
    assert len(result.summary.steps) == 2
    assert result.summary.wall_ms < 500
    (longer,) = result.traced_longer
    assert longer > 500
    output = coded(inspected_findings([result]), "inspect.traced-longer")
    assert (output.values["steps"], output.values["longest_ms"]) == (1, longer)
    assert output.text.startswith("1 of the traced steps took ")


def test_tensors_saved_by_each_forward_are_listed_once(tmp_path: Path) -> None:
    model, optimizer = network()
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
    listed = [int(str(row[4])) for row in saved_table(account).rows]
    assert min(listed) == 3
    assert sum(listed) == sum(saved.times for saved in account.saved)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((0, 0, 3, 0), [0, 1, 3]), ((1, 1, 1), [0, 1, 2]), ((2, 0, 2, 2), [0, 1, 2, 3]), ((), [])],
)
def test_usual_steps_are_the_majority(counts: tuple[int, ...], expected: list[int]) -> None:
    assert usual_steps(counts) == expected
