"""The attention kernels compile for Hopper with every rule, on a machine without a GPU.

In a separate process: under Triton's interpreter nothing compiles.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "screen_tiles.py"
RULES = ("intervals", "softcap", "alibi", "sinks", "dropout")


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is available on Linux only")
@pytest.mark.parametrize(
    ("rules", "tile"),
    # All rules in the tile of a causal mask spill, which takes the compiler twice as long.
    [
        pytest.param(RULES[:1], (), marks=pytest.mark.thorough, id="intervals"),
        pytest.param(RULES, ("--m", "64", "--n", "64"), id="all"),
    ],
)
def test_kernels_with_rules_compile(
    rules: tuple[str, ...], tile: tuple[str, ...], tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--head", "64", *tile, "--rules", *rules],
        capture_output=True, text=True, timeout=400,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, *lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["forward", "key_value", "query"], done.stdout
    for line in lines:
        *_, registers, spills, shared, matmuls = line.split()
        assert float(shared) <= 227, line
        # Intervals take about the registers of a causal mask: four spill with Triton 3.6.
        assert int(spills) <= 16, line
        assert int(registers) <= 255, line
        assert int(matmuls) > 0, line


SPECIALIZED = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from screen_kernels import resources
from stepscope.attention.specialized import FORWARD
from stepscope.attention.triton.specialized_forward import compile_for_hopper
head = int(sys.argv[1])
variant = FORWARD[head, True][-1].variant
kernel = compile_for_hopper(variant, head, causal=True, masked=True)
count = kernel.asm["ptx"].count
used = (*resources(kernel.asm["cubin"]), count("wgmma.mma_async"))
print(variant.groups, kernel.metadata.shared, *used)
"""
THREADS = {2: 384, 3: 512}
"""Threads of a program by its computing warpgroups: one warpgroup more for the warp that loads."""


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is available on Linux only")
@pytest.mark.parametrize("head", [64, pytest.param(128, marks=pytest.mark.thorough)])
def test_warp_specialized_forward_compiles(head: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SPECIALIZED, str(head)],
        capture_output=True, text=True, timeout=400,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    groups, shared, registers, spills, matmuls = map(int, done.stdout.split())
    assert shared <= 227 << 10
    assert registers * THREADS[groups] <= 65536  # of all warps before they redistribute them
    # The mask of three warpgroups spills once for each tile, not in the loop over key blocks.
    assert spills <= (40 if groups == 3 else 0)
    assert matmuls > 0
