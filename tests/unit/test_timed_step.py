"""Peak memory of a timed step on a device without an allocator."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from quiet_bench import QuietBench
from stepscope.analysis.predict.plan import Mode
from stepscope.training.plans import prediction_for
from stepscope.training.subject import TrainingStep
from stepscope.training.timed import measure_step
from stepscope.training.workload import Workload


class Effort(NamedTuple):
    warmup: int = 1
    steps: int = 2
    min_seconds: float = 0.0


def workload(mode: Mode, **more: str) -> Workload:
    return Workload(size="tiny", context=32, batch=2, dtype="float32", mode=mode, **more)  # type: ignore[arg-type]


def peak(mode: Mode, **more: str) -> float | None:
    quantities = measure_step(workload(mode, **more), Effort(), QuietBench()).quantities
    return next((one.value for one in quantities if one.name == "peak_bytes"), None)


def test_the_peak_on_a_cpu_is_counted_tensor_by_tensor() -> None:
    modes: tuple[Mode, ...] = ("forward", "forward-backward", "train-step")
    peaks = [peak(mode) for mode in modes]
    assert peaks == sorted(peaks, key=lambda size: size or 0)
    for mode, size in zip(modes, peaks, strict=True):
        prediction = prediction_for(workload(mode), "cpu")
        assert prediction is not None
        of_a_step = max(m.allocated for m in prediction.phases if m.phase != "model built")
        assert size == pytest.approx(of_a_step, rel=0.1)


def test_the_memory_of_compiled_code_on_a_cpu_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingStep, "compile_model", lambda *_: None)
    assert peak("forward", compile="model") is None
