"""The fused kernels compile for Hopper on a machine without a GPU, with wide loads and without
register spills.

In a separate process: under Triton's interpreter nothing compiles.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from command_line import python

SCRIPT = Path(__file__).parents[2] / "scripts" / "screen_kernels.py"
SCALAR = {
    "fp8 delayed scale",
    *(
        f"{kernel}_kernel {amax}"
        for kernel in ("compare_casts", "recast")
        for amax in (False, True)
    ),
}
"""These read the few values of a history, samples, or any rows, not aligned."""
SPILLS_OF_TRITON_3_6 = {
    f"norm backward {kind} True False 8192" for kind in ("rms", "units", "layer")
}
"""Its ptxas puts 8 to 64 bytes of a thread on the stack, at 128 registers; that of 3.7 none."""


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is available on Linux only")
@pytest.mark.parametrize(
    ("words", "variants"),
    [(("--one-variant",), 25), pytest.param((), 74, marks=pytest.mark.thorough)],
    ids=["one of each", "all"],
)
def test_every_kernel_compiles_with_wide_loads_and_without_spills(
    words: tuple[str, ...], variants: int, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = python(str(SCRIPT), *words, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()[1:]]
    assert len(lines) == variants
    # Within the smallest shared memory of the supported GPUs, that of compute capability 8.6.
    assert max(float(line[3]) for line in lines) <= 99
    spilling = {name for *_, name in (line for line in lines if int(line[2]))}
    known = SPILLS_OF_TRITON_3_6 if version("triton").startswith("3.6.") else set()
    assert spilling == known & {line[-1] for line in lines}
    assert {line[-1] for line in lines if not int(line[4])} <= SCALAR
