"""A recording of a script is used again while nothing that it reads has changed."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec.structs import replace

from own_records import inspected_record
from sample_records import run
from stepscope.advisor.advise.recent import recent_recording
from stepscope.advisor.inspect.order import Order
from stepscope.records.schema import Record
from stepscope.records.store import Store


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text("")
    hour_ago = (datetime.now(UTC) - timedelta(hours=1)).timestamp()
    os.utime(file, (hour_ago, hour_ago))
    return file


def found(script: Path, warmup: int = 3) -> Record | None:
    order = Order(target=str(script), warmup=warmup, timed=5, traced=2, memory=True)
    now = datetime.now(UTC)
    record = inspected_record(
        started=now.isoformat(), elapsed_s=10.0, notes={"command": order.command}
    )
    with Store(script.parent / "records.db") as store:
        store.add_run(replace(run(), created=now.isoformat()))
        store.add(record)
        return recent_recording(store, order)


def test_a_recent_recording_of_the_same_command_is_used(script: Path) -> None:
    record = found(script)
    assert record is not None
    assert record.config["warmup"] == 3


def test_one_with_another_warm_up_or_of_changed_files_is_not(script: Path) -> None:
    assert found(script, warmup=7) is None
    (script.parent / "records.db").unlink()
    script.with_name("model.py").write_text("")
    assert found(script) is None
