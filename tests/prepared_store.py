"""A store with known runs, and the command line called within this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from sample_records import environment, run
from stepscope.cli import main
from stepscope.records.schema import Record
from stepscope.records.store import Store
from study_records import benchmark_record, warmup_record

COLD = (300.0, 150.0, *(100.0,) * 10)


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Desk:
    """A folder in which the command line is called; returns its exit code and output."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.out = folder
        self._capture = capture

    @property
    def store(self) -> Path:
        return self.out / "records.db"

    def __call__(self, *words: str) -> Said:
        try:
            code = main([words[0], *words[1:], "--out", str(self.out)])
        except SystemExit as left:
            code = int(left.code or 0)
        return Said(code, *self._capture.readouterr())


def one_line(output: Said, code: int, *parts: str) -> None:
    """Check that a failure is one line that names the cause and the fix."""
    assert output.code == code, output
    assert output.out == ""
    assert output.err.startswith("stepscope: "), output.err
    assert output.err.count("\n") == 1, output.err
    for part in parts:
        assert part in output.err


def run_of(name: str, step: float = 100.0, device: str = "NVIDIA H200") -> list[Record]:
    """A run of both studies, one case of it out of memory."""
    where = environment(device_name=device)
    return [
        benchmark_record("forward", step=step / 3, run=name, environment=where),
        benchmark_record(
            step=step,
            run=name,
            environment=where,
            phases={"forward": step / 3, "backward": step / 2},
        ),
        benchmark_record(
            size="xl", run=name, environment=where, status="oom", reason="CUDA out of memory"
        ),
        warmup_record(COLD, run=name, environment=where),
    ]


def fill(path: Path, runs: dict[str, Sequence[Record]]) -> None:
    with Store(path) as store:
        for hour, (name, records) in enumerate(runs.items()):
            created = f"2026-01-02T{hour:02}:00:00+00:00"
            command = f"stepscope run --preset {name}"
            store.add_run(run(id=name, created=created, command=command, cases=len(records)))
            for each in records:
                store.add(each)
