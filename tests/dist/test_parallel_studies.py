"""The studies on several ranks, for real on two."""

from __future__ import annotations

import pytest

from stepscope.analysis.links import COLLECTIVES
from stepscope.measure.device import CpuDevice
from stepscope.studies.registry import find_study


class CpuBench:
    device = CpuDevice()

    def progress(self, done: int, total: int, what: str) -> None: ...


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_are_timed_without_the_start_of_processes(collective: str) -> None:
    study = find_study("allreduce")
    flags = study.flags(collective=(collective,), sizes=(1024, 2**22), rounds=4)
    (case,) = study.cases(flags)
    measured = study.measure(case.config, CpuBench())
    assert {(s.name, s.rank) for s in measured.series} == {
        (size, rank) for size in ("1024", str(2**22)) for rank in (0, 1)
    }
    assert all(len(series.values) == 4 for series in measured.series)
    # A process takes seconds to start; the smallest message does not.
    assert min(min(s.values) for s in measured.series if s.name == "1024") < 100.0
    assert all(quantity.value == 0 for quantity in measured.quantities.values())
    assert measured.notes == {"backend": "gloo"}
