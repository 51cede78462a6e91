"""Fixtures shared by several unit tests."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import drawn_once
from command_line import CommandLine
from media import MountTmpfs


@pytest.fixture(scope="session", autouse=True)
def _drawn_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        drawn_once.install(patched)
        yield


@pytest.fixture
def cli(tmp_path: Path) -> CommandLine:
    """A command line in the folder of the test, with known ceilings."""
    command = CommandLine(tmp_path)
    command.know_ceilings()
    return command


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="stepscope-test-"))
    folder.chmod(0o755)
    yield folder
    subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=True)
    shutil.rmtree(folder)


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[MountTmpfs]:
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """Restore torch after the test: `apply` changes it for the entire process."""
    import torch.utils.checkpoint
    from torch.utils.data import DataLoader

    patched = [
        (torch.autograd, "backward"),
        (torch.nn.utils, "clip_grad_norm_"),
        (torch.nn.utils, "clip_grad_value_"),
        (torch.nn.utils.clip_grad, "clip_grad_norm_"),
        (torch.nn.utils.clip_grad, "clip_grad_value_"),
        (torch.amp.GradScaler, "scale"),
        (torch.autocast, "__init__"),
        (torch.optim.Optimizer, "__init__"),
        (torch.optim.Optimizer, "zero_grad"),
        (torch.nn.Module, "zero_grad"),
        (DataLoader, "__init__"),
        (torch.utils.checkpoint, "checkpoint"),
        (torch.Tensor, "item"),
        (torch.Tensor, "__float__"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name in patched]
    yield
    for owner, name, value in before:
        setattr(owner, name, value)
