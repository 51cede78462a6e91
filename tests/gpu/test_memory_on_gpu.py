"""The memory study on a GPU: the account closes, the prediction holds, the snapshot can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepscope.analysis.snapshot import read_snapshot
from stepscope.records.memory import LIBRARIES, WITHIN_OPERATORS, decode_peaks
from stepscope.studies.base import Measurement
from stepscope.studies.profile.tracing import TRACES
from stepscope.studies.registry import find_study

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class CudaBench:
    def __init__(self) -> None:
        from stepscope.measure.device import pick_device

        self.device = pick_device("cuda")

    def progress(self, done: int, total: int, what: str) -> None:
        pass


def measured(
    mode: str, dtype: str, attention: str = "reference", context: int = 256
) -> Measurement:
    study = find_study("memory")
    flags = study.flags(
        size=("small",), context=(context,), dtype=(dtype,), attention=(attention,), mode=(mode,)
    )
    (case,) = study.cases(flags)
    bench = CudaBench()
    bench.device.release()
    return study.measure(case.config, bench)


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16-pure"])
@pytest.mark.parametrize("mode", ["forward", "train-step"])
def test_the_account_closes_and_the_prediction_holds(mode: str, dtype: str, attention: str) -> None:
    done = measured(mode, dtype, attention)
    held = {name: quantity.value for name, quantity in done.quantities.items()}
    for peak in decode_peaks(done.notes["ledger"]):
        assert abs(peak.residual) <= 0.01 * peak.allocated, (peak.phase, peak.residual)
    assert held["predicted_bytes"] == pytest.approx(held["peak_bytes"], rel=0.05)
    rest = held["driver_bytes"] - held["context_bytes"] - held["reserved_bytes"]
    assert abs(rest) <= max(0.01 * held["driver_bytes"], 64 << 20)


def test_work_space_and_inner_memory_are_lines() -> None:
    done = measured("train-step", "float32", context=1024)
    backward = next(p for p in decode_peaks(done.notes["ledger"]) if p.phase == "backward")
    assert backward.lines[LIBRARIES] > 0
    # The backward of softmax multiplies gradient and output within itself.
    assert backward.lines[WITHIN_OPERATORS] >= 0


def test_a_snapshot_is_written_and_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACES, str(tmp_path))
    done = measured("train-step", "float32")
    assert "snapshot_missing" not in done.notes
    held = read_snapshot(tmp_path / done.notes["snapshot"])
    assert held.peak == pytest.approx(done.quantities["peak_bytes"].value, rel=0.02)
    assert any("layers.py" in place.code for place in held.places)
