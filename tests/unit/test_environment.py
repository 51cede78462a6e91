"""The description of a machine, and the features it lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stepscope
from stepscope.errors import UsageError
from stepscope.measure import environment as module
from stepscope.measure import scheduling
from stepscope.measure.device import CpuDevice, CudaDevice, cpu_multiplies_bfloat16, pick_device
from stepscope.measure.environment import describe, lacks
from stepscope.measure.telemetry import Telemetry
from stepscope.records.schema import Reading
from stepscope.torch_tools.triton_available import nvidia_capability


class DriverError(Exception):
    pass


def fake_nvml(**answers: Any) -> SimpleNamespace:
    """A driver library with the given answers; every other query raises an error."""

    def refuse(*_: Any) -> None:
        raise DriverError

    questions = (
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetTemperature",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetMaxClockInfo",
    )
    known = {
        name: (lambda *_, value=answers[name]: value) if name in answers else refuse
        for name in questions
    }
    return SimpleNamespace(
        NVMLError=DriverError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        **known,
    )


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> CudaDevice:
    properties = SimpleNamespace(
        name="Tesla T4", total_memory=16 << 30, major=major, minor=minor, uuid="1234"
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return CudaDevice()


def test_time_of_threads_without_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"1": "90 2000000000 7", "2": "5 500000000 1", "3": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "ended").mkdir()
    monkeypatch.setattr(scheduling, "_THREADS", tmp_path)
    assert CpuDevice().read().waited_s == 2.5
    monkeypatch.setattr(scheduling, "_THREADS", tmp_path / "ended")
    assert CpuDevice().read().waited_s is None
    monkeypatch.setattr(scheduling, "_THREADS", tmp_path / "nowhere")
    assert CpuDevice().read().waited_s is None


@pytest.mark.usefixtures("no_driver")
def test_telemetry_without_a_driver_is_empty() -> None:
    telemetry = Telemetry("1234")
    read = telemetry.read()
    assert read == Reading(at_s=read.at_s)
    assert telemetry.driver() is None
    assert telemetry.power_limit_w() is None
    assert telemetry.max_sm_clock_mhz() is None


def test_telemetry_returns_none_for_unsupported_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml(
        nvmlDeviceGetPowerUsage=412_500,
        nvmlDeviceGetCurrentClocksEventReasons=0x4 | 0x40,
        nvmlDeviceGetClockInfo=1980,
        nvmlSystemGetDriverVersion="570.1",
        nvmlDeviceGetEnforcedPowerLimit=700_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    telemetry = Telemetry("1234")
    read = telemetry.read()
    assert (read.sm_clock_mhz, read.memory_clock_mhz) == (1980.0, 1980.0)
    assert read.power_w == 412.5
    assert read.throttle == ("power-cap", "thermal-hardware")
    assert read.temperature_c is None
    assert (telemetry.driver(), telemetry.power_limit_w()) == ("570.1", 700.0)
    assert telemetry.max_sm_clock_mhz() is None


def test_a_driver_that_does_not_know_the_gpu_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml(nvmlSystemGetDriverVersion="570.1")

    def unknown(name: str) -> None:
        raise DriverError(name)

    nvml.nvmlDeviceGetHandleByUUID = unknown
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert Telemetry("1234").driver() is None


@pytest.mark.usefixtures("no_driver")
def test_an_old_gpu_lacks_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = fake_gpu(monkeypatch, 7, 5).lacks()
    assert "impl='auto' uses torch's" in missing.pop("tuned-attention")
    assert missing == {
        "fp8": "Tesla T4 has compute capability 7.5, FP8 matmuls need 8.9; use bfloat16",
        "tf32": "Tesla T4 has compute capability 7.5, TF32 needs 8.0; use float32",
        "bfloat16": "Tesla T4 has compute capability 7.5, bfloat16 needs 8.0; use float16",
    }
    assert set(fake_gpu(monkeypatch, 8, 0).lacks()) == {"fp8", "tuned-attention"}
    assert set(fake_gpu(monkeypatch, 8, 9).lacks()) == {"tuned-attention"}
    assert fake_gpu(monkeypatch, 9, 0).lacks() == {}
    assert set(fake_gpu(monkeypatch, 10, 0).lacks()) == {"tuned-attention"}


def test_a_gpu_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = fake_nvml(nvmlSystemGetDriverVersion="570.1", nvmlDeviceGetMaxClockInfo=1980)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    environment = describe(fake_gpu(monkeypatch, 7, 5))
    assert (environment.device_kind, environment.device_name) == ("cuda", "Tesla T4")
    assert environment.device_memory_bytes == 16 << 30
    assert (environment.driver, environment.max_sm_clock_mhz) == ("570.1", 1980.0)
    assert environment.power_limit_w is None


def test_a_cpu_describes_itself() -> None:
    environment = describe(CpuDevice())
    assert environment.device_kind == "cpu"
    assert environment.device_name == environment.cpu != ""
    assert environment.device_memory_bytes == environment.host_memory_bytes > 0
    assert environment.torch == str(torch.__version__)
    assert environment.stepscope == stepscope.__version__
    assert environment.threads == torch.get_num_threads()
    assert (environment.driver, environment.cuda, environment.power_limit_w) == (None, None, None)


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\nmodel name: with bf16\n", False),
        ("processor\t: 0\n", True),
    ],
)
def test_bfloat16_support_of_a_cpu_is_read_from_cpuinfo(
    cpuinfo: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: cpuinfo)
    assert cpu_multiplies_bfloat16() is has
    assert ("bfloat16-units" in CpuDevice().lacks()) is not has


def test_a_cpu_lacks_the_features_of_a_gpu() -> None:
    assert set(CpuDevice().lacks()) >= {"tf32", "fp8", "graph", "cublas", "kernels"}
    assert "use float32" in CpuDevice().lacks()["tf32"]


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "install g++" in lacks(CpuDevice())["compiler"]
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    assert "compiler" not in lacks(CpuDevice())


@pytest.mark.usefixtures("no_driver")
def test_a_gpu_without_triton_lacks_compiler_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(module, "_triton_version", lambda: None)
    missing = lacks(fake_gpu(monkeypatch, 9, 0))
    assert set(missing) == {"compiler", "kernels"}
    assert all("pip install triton" in reason for reason in missing.values())


@pytest.mark.usefixtures("no_driver")
def test_a_gpu_that_is_too_old_for_triton_lacks_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    old, new = (lacks(fake_gpu(monkeypatch, *version)) for version in ((6, 1), (7, 0)))
    for need in ("compiler", "kernels"):
        assert "has compute capability 6.1, Triton needs at least 7.0" in old[need]
    assert not {"compiler", "kernels"} & set(new)


@pytest.mark.parametrize(
    ("variable", "commit", "dirty"), [("abc123", "abc123", False), ("abc123+dirty", "abc123", True)]
)
def test_the_commit_of_a_copy_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, commit: str, dirty: bool
) -> None:
    monkeypatch.setenv("STEPSCOPE_COMMIT", variable)
    environment = describe(CpuDevice())
    assert (environment.commit, environment.dirty) == (commit, dirty)


def test_the_commit_comes_from_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STEPSCOPE_COMMIT", raising=False)
    package = tmp_path / "stepscope"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(module, "__file__", str(package / "measure" / "environment.py"))
    environment = describe(CpuDevice())
    assert (environment.commit, environment.dirty) == (None, None)

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    git("init", "-q")
    assert describe(CpuDevice()).commit is None
    git("add", ".")
    git("commit", "-qm", "first")
    environment = describe(CpuDevice())
    assert (environment.commit, environment.dirty) == (git("rev-parse", "HEAD"), False)
    (package / "__init__.py").write_text("changed = True\n")
    assert describe(CpuDevice()).dirty is True


def test_a_device_that_is_not_available_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").kind == "cpu"
    with pytest.raises(UsageError, match=r"'cuda' is not available.*--device cpu"):
        pick_device("cuda")
    with pytest.raises(UsageError, match="'tpu' does not exist"):
        pick_device("tpu")


def test_the_cpu_measures_its_peak_from_the_reset() -> None:
    device = CpuDevice()
    assert device.peak_bytes() is None
    device.reset_peak()
    if device.peak_bytes() is None:
        pytest.skip("this system does not report the peak memory of a process")
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    assert device.peak_bytes() >= 60 << 20
    del tensor
    device.release()
    device.reset_peak()
    assert device.peak_bytes() < 30 << 20


def test_a_gpu_of_amd_is_not_taken_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    assert nvidia_capability(torch.device("cuda", 0)) == (9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert nvidia_capability(torch.device("cuda", 0)) == (0, 0)
    assert set(fake_gpu(monkeypatch, 9, 4).lacks()) == {"fp8", "tuned-attention"}
