"""Every Triton kernel compiles for GPUs other than Hopper on a machine without a GPU, within their
registers and shared memory.

In a separate process: under Triton's interpreter nothing compiles.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import pytest

from command_line import python

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels/triton", "optim")
SHARED_KIB = {"cuda:86": 99, "cuda:89": 99, "cuda:100": 227, "hip:gfx942": 64}
"""Shared memory of a program at most. Compute capability 8.9 has that of 8.6, and FP8 besides; 8.0
has more."""

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="Triton needs Linux")


def compile_for(script: str, cache: Path, *words: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    call = (str(ROOT / "scripts" / script), *words)
    done = python(*call, env=environment | {"TRITON_CACHE_DIR": str(cache)})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[1:]


def launched_kernels() -> set[str]:
    sources = [p for f in FOLDERS for p in (ROOT / "src/stepscope" / f).glob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    return set(re.findall(r"^def (\w+_kernel)\(", text, re.M))


@pytest.mark.parametrize(
    "target",
    # Those of compute capability 8.9 fit if they do in 9.0, where they are compiled as well.
    ["hip:gfx942", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("cuda:89", "cuda:100"))],
)
def test_fused_kernels_fit(target: str, tmp_path: Path) -> None:
    lines = compile_for("screen_kernels.py", tmp_path, "--one-variant", "--target", target)
    compiled = set()
    for line in lines:
        _, registers, spilled, shared, _, kernel, _ = line.split("\t")
        compiled.add(kernel)
        assert int(spilled) == 0, line
        assert int(registers) <= 255, line
        assert float(shared) <= SHARED_KIB[target], line
    casts = {"fp8_cast_kernel"}  # Its dtypes exist from compute capability 8.9 on.
    lacking = casts if target.startswith("hip") else set()
    assert compiled == launched_kernels() - lacking


@pytest.mark.parametrize(
    ("target", "head"),
    [("cuda:86", 128), pytest.param("hip:gfx942", 64, marks=pytest.mark.thorough)],
)
def test_first_choice_of_attention_fits(target: str, head: int, tmp_path: Path) -> None:
    words = ("--target", target, "--head", str(head), "--no-tma")
    lines = compile_for("screen_tiles.py", tmp_path, *words)
    assert len(lines) == 3
    for line in lines:
        *_, registers, spills, shared, _ = line.split()
        assert int(spills) <= 16, line
        assert int(registers) <= 512 if target.startswith("hip") else 255, line
        assert float(shared) <= SHARED_KIB[target], line
