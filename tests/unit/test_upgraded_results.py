"""Records in results/ of any schema are read in the current schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.errors import StepscopeError
from stepscope.records.jsonl import read_records
from stepscope.records.schema import Record

RESULTS = Path(__file__).parents[2] / "results"
FILES = sorted(RESULTS.glob("*.jsonl"))


def records_in(path: Path) -> list[Record]:
    """Records of a file; empty if a benchmark wrote the file in its own format."""
    try:
        return list(read_records(path))
    except StepscopeError as error:
        if "it has no version" not in str(error):
            raise
        return []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_name_contains_a_dimension_and_no_note_is_json(path: Path) -> None:
    for record in records_in(path):
        names = {one.name for one in (*record.series, *record.quantities)}
        assert not [name for name in names if "." in name or ":" in name], record.case
        structured = [name for name, text in record.notes.items() if text[:1] in ("{", "[")]
        assert not structured, record.case
        assert not [name for name in record.notes if "." in name], record.case


def test_most_files_in_results_are_records() -> None:
    assert sum(bool(records_in(path)) for path in FILES) > len(FILES) / 2
