"""What one block stores: its saved tensors and the gradients that its backward pass produces."""

from __future__ import annotations

import msgspec
import pytest

from quiet_bench import QuietBench
from sample_records import planted
from stepscope.records.schema import Record
from stepscope.report.blocks import Finding, Table
from stepscope.studies.memory import STUDY
from stepscope.studies.memory.cases import MemoryFlags
from view_blocks import findings_of


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """Steps of a small model with two blocks, as measured on this machine."""
    flags = MemoryFlags(
        size=("tiny",), vocab=64, context=(8, 16), batch=(2,), mode=("forward", "train-step")
    )
    made = []
    for case in STUDY.cases(flags):
        done = STUDY.measure(case, QuietBench())
        attachments = msgspec.to_builtins(done.attachments)
        made.append(
            planted(
                "memory",
                case,
                {},
                known={"quantities": done.quantities},
                series=done.series,
                notes=done.notes,
                attachments=attachments,
            )
        )
    return made


@pytest.fixture
def found(records: list[Record]) -> dict[str, Finding]:
    return {one.code.removeprefix("memory."): one for one in findings_of(STUDY.view(records))}


def test_the_gradients_of_a_block_are_those_of_its_parameters(found: dict[str, Finding]) -> None:
    values = found["block-gradients"].values
    # Four projections, three matrices of the feed-forward layer, two norms.
    assert values["parameters"] == 4 * 128**2 + 3 * 128 * 512 + 2 * 128
    assert values["expected"] == 4 * values["parameters"]  # type: ignore[operator]
    assert values["measured"] == pytest.approx(values["expected"], rel=0.02)


def test_the_largest_saved_tensors_come_first(
    found: dict[str, Finding], records: list[Record]
) -> None:
    (table,) = (
        block
        for block in STUDY.view(records)
        if isinstance(block, Table) and block.name == "memory-block"
    )
    sizes = [row[3] for row in table.rows]
    assert sizes == sorted(sizes, reverse=True)  # type: ignore[type-var]
    values = found["block-saved"].values
    assert sum(sizes) == values["block"]  # type: ignore[arg-type]
    assert values["share_of_largest"] == pytest.approx(
        sum(sizes[:5]) / sum(sizes)  # type: ignore[arg-type]
    )


def test_peaks_are_listed_by_mode_and_context(
    found: dict[str, Finding], records: list[Record]
) -> None:
    peaks = {
        f"{record.config['mode']} {record.config['context']}": record.quantity("peak_bytes")
        for record in records
    }
    assert dict(found["peaks"].values) == peaks
    stream = found["residual-stream"].values
    assert stream["bytes"] == 2 * 16 * 128 * 4
    assert found["phases"].values["highest"] in ("backward", "optimizer")
