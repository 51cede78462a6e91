"""The fused kernels compile for a Hopper GPU on a machine without one, and load 16 bytes at once.

In a process of its own: under Triton's interpreter nothing compiles.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stepscope.model.kernels import triton_cross_entropy, triton_norm, triton_rotary, triton_swiglu
from stepscope.optim import triton_adamw

def wide_loads(kernel, types, **constants):
    # Pointers and sizes as a launch finds them: multiples of 16.
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True)) | {name: "constexpr" for name in constants}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" or (signature[name] == "i32" and name not in ("seed", "S"))
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return compiled.asm["ptx"].count("ld.global.v")

x, f, i = "*bf16", "*fp32", "i32"
print("cross-entropy", wide_loads(
    triton_cross_entropy._rows_kernel, [x, "*i64", f, i, i, i], GRADIENT=True, BLOCK=4096))
print("norm forward", wide_loads(
    triton_norm._forward_kernel, [f, x, f, f, x, f, "fp32", i], ADD=True, BLOCK=4096))
print("norm backward", wide_loads(
    triton_norm._backward_kernel, [x, f, f, f, f, f, x, f, i, i, i],
    THROUGH=True, SPLIT=True, BLOCK=4096))
print("swiglu forward", wide_loads(
    triton_swiglu._forward_kernel, [x, x, x, i], BLOCK=2048, EXACT=False))
print("swiglu backward", wide_loads(
    triton_swiglu._backward_kernel, [x] * 5 + [i], BLOCK=2048, EXACT=False))
print("rotary", wide_loads(
    triton_rotary._turn_kernel, [x, x, f, f] + [i] * 8 + ["fp32"], BLOCK_H=32, BLOCK_HALF=64))
for name, moments, chance in (("float32", tl.float32, False), ("chance", tl.uint16, True)):
    print("adamw", name, wide_loads(
        triton_adamw._table_kernel, ["*i64", "*i32", f, i], PARAMETER=tl.float32,
        GRADIENT=tl.float32, MOMENTS=moments, ALIGNED=True, CHANCE=chance))
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is there on Linux only")
def test_every_kernel_compiles_with_wide_loads(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(found) == 8
    assert {name for name, count in found.items() if int(count) == 0} == set(), found
