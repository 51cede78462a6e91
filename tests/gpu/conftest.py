"""Tests of this folder are marked `gpu` and skipped without a CUDA device. They have a separate
cache: ceilings measured while other tests run, and trials of tests, must not be reused by a later
run on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stepscope.measure.device import CudaDevice, pick_device


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    folder = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(without_gpu)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield


@pytest.fixture
def device() -> CudaDevice:
    """The GPU, with an empty cache of the allocator."""
    picked = pick_device("cuda")
    assert isinstance(picked, CudaDevice)
    picked.release()
    return picked
