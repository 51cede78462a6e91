"""What is said of a watched program, from records made by hand."""

from __future__ import annotations

import json

import msgspec
import pytest

from own_records import inspected_record
from sample_records import environment
from stepscope.analysis.trace.summary import decode, encode
from stepscope.records.memory import PARAMETERS, SAVED
from stepscope.studies.inspected.findings import inspected_findings
from stepscope.studies.inspected.rows import programs
from stepscope.studies.inspected.view import headline_table
from study_records import memory_record


def test_ranks_that_take_turns_are_not_blamed() -> None:
    def told(*starts: list[list[int]]) -> str:
        records = [
            msgspec.structs.replace(one, notes=one.notes | {"collectives": json.dumps(times)})
            for rank, times in enumerate(starts)
            for one in [inspected_record(rank, len(starts))]
        ]
        (ranks,) = programs(records)
        texts = [one.text for one in inspected_findings(ranks)]
        (text,) = [
            text
            for text in texts
            if text.startswith(("The ranks", "Rank ", "The 2 ranks", "Several"))
        ]
        return text

    ms = 1_000_000
    assert told([[0, 8 * ms], [20 * ms]], [[5 * ms, ms], [20 * ms]]).startswith(
        "The ranks take turns in being late, and the others wait for whoever it is: last to come"
        " to 3 collectives was rank 0 for 2, rank 1 for 1."
    )
    assert told([[0, 8 * ms], [20 * ms]], [[30 * ms, ms], [40 * ms]]).startswith(
        "Rank 1 is the slowest"
    )
    assert told([[0]], [[6 * ms]], [[10 * ms]]) == (
        "Several ranks are late to the collectives, in the mean after the first one:"
        " rank 2 10.0 ms, rank 1 6.00 ms."
    )
    assert told([[0], [20 * ms]], [[10], [20 * ms]]).startswith("The 2 ranks are alike")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (0.8, ("Under the profiler it takes 25.0 % more.",
               "A traced step takes 1.00 ms (800 µs without the profiler): the device works")),
        (1.01, ("half lie between", "A step takes 1.00 ms: the device works")),
        (1.25, ("Under the profiler it takes 20.0 % less: what the script does",
                "A traced step takes 1.00 ms (1.25 ms without the profiler): the device works")),
    ],
)  # fmt: skip
def test_traced_steps_are_told_apart_from_timed_ones(step: float, said: tuple[str, ...]) -> None:
    (ranks,) = programs([inspected_record(step=step)])
    text = " ".join(one.text for one in inspected_findings(ranks))
    assert all(part in text for part in said), text
    assert ("Under the profiler" in text) is (step != 1.01)


@pytest.mark.parametrize(("device", "things"), [("cpu", "operators"), ("cuda", "kernels")])
def test_what_runs_is_called_what_it_is_and_counted_in_whole_numbers(
    device: str, things: str
) -> None:
    made = inspected_record(environment=environment(device_kind=device))
    summary = msgspec.structs.replace(decode(made.notes["profile"]), launches=367.7)
    made = msgspec.structs.replace(made, notes=made.notes | {"profile": encode(summary)})
    (ranks,) = programs([made])
    texts = [one.text for one in inspected_findings(ranks)]
    assert any(f"in 368 {things}" in text for text in texts), texts
    table = headline_table([made])
    titles = [column.title for column in table.columns]
    assert table.rows[0][titles.index(things)] == 368


def test_a_module_whose_name_is_a_number_is_not_read_as_a_count() -> None:
    lines = {PARAMETERS: 1 << 20, f"{SAVED}1 BatchNorm2d, batch_norm": 1 << 30}
    made = inspected_record()
    notes = made.notes | {"ledger": memory_record(lines=lines).notes["ledger"]}
    (ranks,) = programs([msgspec.structs.replace(made, notes=notes)])
    (text,) = [one.text for one in inspected_findings(ranks) if "kept for backward" in one.text]
    assert "the line “1 BatchNorm2d, batch_norm” has the most" in text
