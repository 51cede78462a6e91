"""Ceilings: the measurement, and the cache when it is valid, damaged or absent."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch

from sample_records import environment
from stepscope.measure import ceilings as module
from stepscope.measure.ceilings import ceilings, measure_ceilings
from stepscope.measure.datasheet import datasheet_ceilings
from stepscope.measure.device import CpuDevice, Device
from stepscope.records.schema import Ceiling, Reading
from stepscope.torch_tools.triton_available import tf32_is_enabled

HERE = environment(device_kind="cpu", device_name="a processor that no data sheet lists")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stepscope"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Ceiling]:
    """Replaces the measurement: every call returns a new value, which is recorded here."""
    recorded: list[Ceiling] = []

    def measure(*_: object) -> tuple[Ceiling, ...]:
        value = 1e18 * (1 + len(recorded))
        recorded.append(
            Ceiling(name="matmul.float32", value=value, unit="FLOP/s", source="measured")
        )
        return (recorded[-1],)

    monkeypatch.setattr(module, "measure_ceilings", measure)
    return recorded


def test_ceilings_are_measured_once_and_then_cached(cache: Path, measured: list[Ceiling]) -> None:
    first = ceilings(CpuDevice(), HERE)
    assert first == ceilings(CpuDevice(), HERE) == tuple(measured)
    assert len(measured) == 1
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_again_measures_and_replaces_the_cache(cache: Path, measured: list[Ceiling]) -> None:
    ceilings(CpuDevice(), HERE)
    assert ceilings(CpuDevice(), HERE, again=True) == (measured[1],)
    assert ceilings(CpuDevice(), HERE) == (measured[1],)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(("flops", "times"), [(1e3, 2), (1e18, 1)])
def test_cached_ceilings_of_a_busy_machine_are_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, flops: float, times: int
) -> None:
    calls: list[float] = []

    def measured(*_: object) -> tuple[Ceiling, ...]:
        calls.append(flops)
        return (
            Ceiling(
                name="matmul.float32", value=flops, unit="FLOP/s", source="measured", detail=""
            ),
        )

    monkeypatch.setattr(module, "measure_ceilings", measured)
    for _ in range(2):
        ceilings(CpuDevice(), HERE)
    assert len(calls) == times
    assert len(list(cache.iterdir())) == 1


def test_a_doubtful_ceiling_is_measured_again_before_its_next_use(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cached with its doubt, and only it is measured again."""
    asked: list[object] = []
    doubts = ["the machine was busy", "the machine was busy", ""]

    def measure(_: object, __: object, names: object = None) -> tuple[Ceiling, ...]:
        asked.append(names)
        doubt = doubts[len(asked) - 1]
        copy = Ceiling(name="memory.copy", value=1e9, unit="B/s", source="measured")
        matmul = Ceiling(
            name="matmul.float32",
            value=1e18 * len(asked),
            unit="FLOP/s",
            source="measured",
            doubt=doubt,
        )
        return (matmul, copy) if names is None else (matmul,)

    monkeypatch.setattr(module, "measure_ceilings", measure)
    assert ceilings(CpuDevice(), HERE)[0].doubt == doubts[0]
    # Without a measurement, the doubt is known as well.
    assert [bool(one.doubt) for one in module.known_ceilings(HERE)] == [True, False]
    assert ceilings(CpuDevice(), HERE)[0].doubt == doubts[1]
    settled = ceilings(CpuDevice(), HERE)
    assert [(one.name, one.value, one.doubt) for one in settled] == [
        ("matmul.float32", 3e18, ""),
        ("memory.copy", 1e9, ""),
    ]
    assert ceilings(CpuDevice(), HERE) == settled
    assert asked == [None, ["matmul.float32"], ["matmul.float32"]]
    assert len(list(cache.iterdir())) == 1


def test_a_cached_ceiling_below_the_usual_one_is_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([4.5e13, 5.3e13])
    here = environment(device_name="NVIDIA H200", power_limit_w=700.0)

    def measure(*_: object) -> tuple[Ceiling, ...]:
        rate = next(rates)
        return (Ceiling(name="matmul.float32", value=rate, unit="FLOP/s", source="measured"),)

    monkeypatch.setattr(module, "measure_ceilings", measure)
    monkeypatch.setattr(module, "_exceeded", lambda *_: False)
    low, usual, cached = (ceilings(CpuDevice(), here)[0] for _ in range(3))
    assert "below usual" in low.doubt
    assert (usual.value, usual.doubt) == (5.3e13, "")
    assert cached == usual
    assert len(list(cache.iterdir())) == 1


class Readings(CpuDevice):
    """A device that reads what is planted: pairs of before and after a measurement."""

    def __init__(self, *shares: float, throttle: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._readings = [
            Reading(at_s=10.0 * n + end, waited_s=share * end, throttle=throttle)
            for n, share in enumerate(shares)
            for end in (0.0, 1.0)
        ]

    def read(self) -> Reading:
        return self._readings.pop(0)


def repeated(device: Device, *rates: float, in_use: str = "", name: str = "memory.copy") -> Ceiling:
    left = list(rates)

    def measure(_: Ceiling | None) -> Ceiling:
        return Ceiling(name=name, value=left.pop(0), unit="B/s", source="measured")

    made = module._repeated(device, measure, in_use)
    assert not left
    return made


def test_two_undisturbed_measurements_that_agree_are_reliable() -> None:
    made = repeated(Readings(0.0, 0.0), 100.0, 99.0)
    assert (made.value, made.doubt) == (100.0, "")


def test_a_measurement_that_disagrees_is_repeated() -> None:
    made = repeated(Readings(*[0.0] * 3), 60.0, 100.0, 98.0)
    assert (made.value, made.doubt) == (100.0, "")
    made = repeated(Readings(*[0.0] * 4), 40.0, 60.0, 80.0, 100.0)
    assert (made.value, made.doubt) == (
        100.0,
        "measurements of memory.copy differ by more than 5 %",
    )
    made = repeated(Readings(0.0, 0.0), 100.0, 90.0, name="launch.rate")
    assert (made.value, made.doubt) == (100.0, "")


def test_disturbed_measurements_make_a_ceiling_doubtful() -> None:
    """They may agree with each other: all are too low."""
    made = repeated(Readings(*[0.5] * 4), 100.0, 100.0, 100.0, 100.0)
    assert (made.value, made.doubt) == (100.0, "the machine was busy")
    made = repeated(Readings(0.5, 0.5, 0.0, 0.0), 60.0, 60.0, 100.0, 100.0)
    assert (made.value, made.doubt) == (100.0, "")
    slowed = Readings(*[0.0] * 4, throttle=("power-cap", "thermal-software"))
    assert "thermal-software" in repeated(slowed, *[100.0] * 4).doubt
    capped = Readings(0.0, 0.0, throttle=("power-cap",))
    assert repeated(capped, 100.0, 100.0).doubt == ""
    shared = repeated(Readings(*[0.0] * 4), *[100.0] * 4, in_use="other work used 40 % of the GPU")
    assert shared.doubt == "other work used 40 % of the GPU"


@pytest.mark.parametrize(("share", "busy"), [(None, False), (0.02, False), (0.4, True)])
def test_other_work_on_a_gpu_is_noticed(
    monkeypatch: pytest.MonkeyPatch, share: float | None, busy: bool
) -> None:
    monkeypatch.setattr(module, "_REST_S", 0.0)
    device = CpuDevice()
    monkeypatch.setattr(device, "kind", "cuda")
    monkeypatch.setattr(device, "utilization", lambda: share)
    assert bool(module._in_use(device)) == busy


@pytest.mark.parametrize(
    "change",
    [
        {"device_name": "another"},
        {"torch": "2.12.0"},
        {"threads": 3},
        {"driver": "571.0"},
        {"power_limit_w": 350.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_machine_has_a_separate_cache(
    cache: Path, measured: list[Ceiling], change: dict[str, object]
) -> None:
    ceilings(CpuDevice(), HERE)
    ceilings(CpuDevice(), msgspec.structs.replace(HERE, **change))
    assert len(measured) == len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[{}]", b'[{"name": "matmul.float32", "value": null}]']
)
def test_a_damaged_cache_is_measured_again_and_replaced(
    cache: Path, measured: list[Ceiling], content: bytes
) -> None:
    ceilings(CpuDevice(), HERE)
    (file,) = cache.iterdir()
    file.write_bytes(content)
    assert ceilings(CpuDevice(), HERE) == (measured[1],)
    assert ceilings(CpuDevice(), HERE) == (measured[1],)


def test_without_a_writable_cache_every_call_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Ceiling]
) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    ceilings(CpuDevice(), HERE)
    assert ceilings(CpuDevice(), HERE) == (measured[1],)
    assert file.read_text() == "not a folder"


def test_a_cache_that_cannot_be_replaced_leaves_no_files(
    cache: Path, measured: list[Ceiling], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "replace", refuse)
    assert ceilings(CpuDevice(), HERE) == tuple(measured)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_a_known_device_also_has_datasheet_ceilings(measured: list[Ceiling]) -> None:
    results = ceilings(CpuDevice(), environment(device_name="NVIDIA H200"))
    assert results == (*measured, *datasheet_ceilings("NVIDIA H200"))
    assert {c.source for c in results} == {"measured", "NVIDIA H200 Tensor Core GPU datasheet"}
    assert datasheet_ceilings("NVIDIA H2000") == ()


def test_fp8_is_in_the_datasheet_of_devices_that_have_it() -> None:
    rates = {c.name: c.value for c in datasheet_ceilings("NVIDIA H200")}
    assert rates["matmul.fp8"] == pytest.approx(2 * rates["matmul.bfloat16"], rel=1e-3)
    assert "matmul.fp8" not in {c.name for c in datasheet_ceilings("NVIDIA A100-SXM4-80GB")}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8"])
def test_matmuls_of_a_ceiling_multiply(name: str) -> None:
    """torch multiplies FP8 matrices on a CPU too, slowly: not a rate, but the same call."""
    calls = module._matmuls(name, 32, torch.device("cpu"))
    assert set(calls) == ({"nt"} if name == "fp8" else {"nn", "nt"})
    for multiply in calls.values():
        result = multiply()
        assert isinstance(result, torch.Tensor)
        assert result.shape == (32, 32)
        assert result.abs().sum() > 0


def test_all_ceilings_of_the_device_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MATRIX_SIZES", {"cpu": (16,)})
    monkeypatch.setattr(module, "_COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(module, "_SECONDS_PER_SHAPE", {"cpu": 0.01})
    monkeypatch.setattr(module, "_LAUNCHES", 5)
    reported: list[tuple[int, int, str]] = []
    precision = torch.get_float32_matmul_precision()
    results = measure_ceilings(CpuDevice(), lambda *progress: reported.append(progress))
    assert [(c.name, c.unit) for c in results] == [
        ("matmul.float32", "FLOP/s"),
        ("matmul.float16", "FLOP/s"),
        ("matmul.bfloat16", "FLOP/s"),
        ("memory.copy", "B/s"),
        ("launch.rate", "launches/s"),
    ]
    assert all(c.value > 0 and c.source == "measured" for c in results)
    assert results[0].detail.startswith("16×16×16 ")
    assert [done for done, _, _ in reported] == [0, 1, 2, 3, 4]
    assert {total for _, total, _ in reported} == {5}
    assert torch.get_float32_matmul_precision() == precision


def test_tf32_is_set_and_restored_in_a_program_that_uses_fp32_precision() -> None:
    """`torch.get_float32_matmul_precision` raises in such a program."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for own in ("tf32", "ieee"):
            matmul.fp32_precision = own
            for on in (True, False):
                with module._tf32(on):
                    assert tf32_is_enabled() == on
            assert matmul.fp32_precision == own
    finally:
        matmul.fp32_precision = before


class Call:
    """A call that takes the given times in turn, the last one for ever, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self.clock = 0.0
        self.made = 0
        self._seconds = seconds
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.clock)

    def __call__(self) -> None:
        self.clock += self._seconds[min(self.made, len(self._seconds) - 1)]
        self.made += 1


def test_sampling_ends_when_the_two_best_batches_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch, 0.1)
    assert module._seconds_per_call(CpuDevice(), call, 1.0) == pytest.approx(0.1)
    assert call.made == 2 + 3


def test_sampling_goes_on_while_batches_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch, 0.1, 0.1, 0.2, 0.17, 0.15, 0.1, 0.13, 0.1005)
    assert module._seconds_per_call(CpuDevice(), call, 1.0) == pytest.approx(0.1)
    assert call.made == 8


def test_a_call_longer_than_the_budget_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch, 1.2)
    assert module._seconds_per_call(CpuDevice(), call, 1.0) == pytest.approx(1.2)
    assert call.made == 1


def test_a_shape_far_below_the_best_rate_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch, 0.3, 0.2, 0.001)
    assert module._seconds_per_call(CpuDevice(), call, 1.0, 0.1) == pytest.approx(0.2)
    assert call.made == 2
