"""`advise` uses a recording of the same program that was made a moment ago."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from own_records import inspected_record
from stepscope.advisor.advise.recent import recent_recording
from stepscope.advisor.inspect.order import Order
from stepscope.records.schema import Run
from stepscope.records.store import Store


@dataclass
class Recorded:
    store: Store
    order: Order
    folder: Path


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """A store with a recording that began ten seconds ago, of files that are older."""
    folder = tmp_path / "program"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text("")
    before = time.time() - 60
    os.utime(script, (before, before))
    order = Order(target=str(script), warmup=3, timed=5, traced=2, memory=True)
    store = Store(tmp_path / "store.db")
    now = datetime.now(UTC)
    store.add_run(Run(id="run-1", created=now.isoformat(), command="", plan="", cases=1))
    notes = {"command": order.command}
    store.add(inspected_record(notes=notes, started=now.isoformat(), elapsed_s=10.0))
    return Recorded(store, order, folder)


def test_it_is_used_again_under_an_id_of_its_own(recorded: Recorded) -> None:
    (original,) = recorded.store.records("run-1")
    found = recent_recording(recorded.store, recorded.order)
    assert found is not None
    assert found.id != original.id
    assert found.series == original.series


def test_not_after_a_change_of_a_file(recorded: Recorded) -> None:
    (recorded.folder / "config.yaml").write_text("layers: 2")
    assert recent_recording(recorded.store, recorded.order) is None


@pytest.mark.parametrize("changes", [{"words": ("--layers", "2")}, {"warmup": 9}])
def test_not_for_another_command_or_warm_up(recorded: Recorded, changes: dict[str, object]) -> None:
    order = msgspec.structs.replace(recorded.order, **changes)
    assert recent_recording(recorded.store, order) is None
