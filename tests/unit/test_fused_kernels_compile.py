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

COMPILE = r"""
import pathlib
import re
import subprocess
import tempfile
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stepscope.kernels.triton import cross_entropy as triton_cross_entropy
from stepscope.kernels.triton import embedding as triton_embedding
from stepscope.kernels.triton import fp8 as triton_fp8
from stepscope.kernels.triton import launches
from stepscope.kernels.triton import norm as triton_norm
from stepscope.kernels.triton import qkv as triton_qkv
from stepscope.kernels.triton import rope as triton_rotary
from stepscope.kernels.triton import scale as triton_scale
from stepscope.kernels.triton import transpose as triton_transpose
from stepscope.kernels.triton import activation as triton_activation
from stepscope.optim import triton_adamw

def wide_loads(kernel, types, warps=8, odd=("seed", "S"), registers=None, **constants):
    # Pointers and sizes as in a typical launch: multiples of 16, except for those in `odd`.
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True)) | {name: "constexpr" for name in constants}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" or (signature[name] == "i32" and name not in odd)
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    hopper = GPUTarget("cuda", 90, 32)
    how = {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
    compiled = triton.compile(source, target=hopper, options=how)
    spilled = any(int(n) for n in re.findall(r"(?:LOCAL|STACK):(\d+)", resources(compiled)))
    return 0 if spilled else compiled.asm["ptx"].count("ld.global.v")

def resources(compiled):
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        call = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout

x, f, i = "*bf16", "*fp32", "i32"
for logits, run in ((x, 8), (f, 4)):
    for padded in (False, True):
        odd = ("V", "ignored") if padded else ("ignored",)
        arguments = [logits, "*i64", f, f, i, i, i]
        both = {"GRADIENT": True, "SHARED": True, "PADDED": padded, "odd": odd, "warps": 16}
        print("short rows", logits, padded, wide_loads(
            triton_cross_entropy.cross_entropy_short_rows_kernel, arguments, BLOCK=16384, **both))
        print("rows", logits, padded, wide_loads(
            triton_cross_entropy.cross_entropy_rows_kernel, arguments,
            BLOCK_RUNS=4096, BLOCK_RUN=run, **both))
print("count of rows", wide_loads(
    triton_cross_entropy.cross_entropy_count_kernel, ["*i64", f, f, i, i], BLOCK=4096, warps=16))
print("mean of rows", wide_loads(
    triton_cross_entropy.cross_entropy_mean_kernel, [f, f, f, i], BLOCK=4096, warps=16))
print("scale", wide_loads(triton_scale.scale_unless_one_kernel, [x, f, f, i, i], BLOCK=4096))
for kind, units, layer in (("rms", False, False), ("units", True, False), ("layer", False, True)):
    kept, how = x if units else f, {"CENTERED": layer, "BIAS": layer, "UNITS": units}
    print("norm forward", kind, wide_loads(
        triton_norm.norm_forward_kernel, [f, x, f, f, f, x, kept, f, f, f, "fp32", "fp32", i],
        ADD=True, AMAX=True, BLOCK_D=4096, **how))
    # A LayerNorm needs the most registers; of the others, every value of every option.
    for learned, summed, d in (
        (True, True, 768), (True, False, 8192), (False, True, 2560),
        *(((True, False, 2560), (True, True, 2560), (False, False, 2560)) if layer else ()),
    ):
        rows = launches.norm_backward(d)
        print("norm backward", kind, learned, summed, d, wide_loads(
            triton_norm.norm_backward_kernel, [x, f, kept, f, f, f, f, x, f, f, "fp32", i, i, i],
            THROUGH=True, SPLIT=True, LEARNED=learned, SUMMED=summed, AMAX=True,
            BLOCK_D=rows.block, STAGES=rows.stages, warps=rows.warps, registers=rows.registers,
            odd=("rows", "rows_per_program"), **how))
for parts in (100, 1000):
    tile = launches.sum_of_parts(parts)
    print("norm weight", parts, wide_loads(
        triton_norm.norm_weight_kernel, [f, f, i, i], BLOCK_PARTS=tile.rows, BLOCK_D=tile.columns,
        warps=tile.warps, odd=("parts",)))
print("token places", wide_loads(
    triton_embedding.token_places_kernel, ["*i64", "*i32", "*i64", i, i], BLOCK_I=8, BLOCK_J=512,
    warps=4))
print("embedding", wide_loads(
    triton_embedding.embedding_backward_kernel, ["*i64", f, "*i32", "*i64", f, i, i], BLOCK_K=1,
    BLOCK_D=1024, FREQUENT=32, FREQUENT_BLOCK_K=64, FREQUENT_BLOCK_D=64, warps=4))
print("norm again", wide_loads(triton_norm.norm_scaled_kernel, [x, f, x, i], BLOCK_D=4096))
for kind in ("silu", "gelu", "gelu_tanh", "relu"):
    for gated in (False, True):
        how = {"ACTIVATION": kind, "GATED": gated, "EXACT": False, "AMAX": kind == "silu"}
        block = launches.activation(3072)
        print("activation forward", kind, gated, wide_loads(
            triton_activation.activation_forward_kernel, [x, x, x, f, i, i], BLOCK=block.columns,
            warps=block.warps, **how))
        summed = launches.activation_summed()
        print("activation backward", kind, gated, wide_loads(
            triton_activation.activation_backward_kernel, [x] * 6 + [f, f] + [i] * 4,
            RECOMPUTE=True, SUMMED=not gated, BLOCK=block.columns if gated else summed.block,
            warps=block.warps if gated else summed.warps,
            registers=None if gated else summed.registers, **how))
for half, rest, group in ((64, 0, 1), (40, 0, 1), (16, 32, 1), (16, 64, 2)):
    shape = {"HALF": half, "D": 2 * half + rest, "BLOCK_H": 32,
             "BLOCK_HALF": triton.next_power_of_2(half), "warps": 4}
    print("rotary", half, group, wide_loads(
        triton_rotary.rotary_turn_kernel, [x, x, f, f] + [i] * 7 + ["fp32"], GROUP=group, **shape))
    print("rotary gathered", half, rest, wide_loads(
        triton_rotary.rotary_gather_kernel, [x] * 4 + [f, f] + [i] * 9 + [f] + [i] * 6,
        BLOCK_REST=rest, GROUP=2 * group - 1, AMAX=half != 64, **shape))
for half, rest, out, adjacent in (
    (32, 0, x, True), (64, 0, f, True), (64, 0, x, False), (40, 0, x, True), (16, 32, x, False)
):
    tile = {"BLOCK_S": 2, "BLOCK_H": 16, "BLOCK_PAIRS": triton.next_power_of_2(half)}
    print("rotary tile", half, adjacent, wide_loads(
        triton_rotary.rotary_tile_kernel, [x, out, f, f] + [i] * 11 + ["fp32"], PAIRS=half,
        D=2 * half + rest, INTERLEAVED=adjacent, BLOCK_REST=rest, warps=4,
        odd=("S", "H", "pair_stride"), **tile))
rows = launches.gather_heads(768)
for summed in (False, True):
    print("heads gathered", summed, wide_loads(
        triton_qkv.gather_heads_kernel, [x] * 4 + [f] + [i] * 15, D=64, SUMMED=summed,
        BLOCK_ROWS=rows.at_once, BLOCK=rows.block, warps=rows.warps, registers=rows.registers,
        odd=("S", "rows", "rows_per_program")))
for by_row in (False, True):
    tile = launches.fp8_amax(by_row)
    print("fp8 amax", by_row, wide_loads(
        triton_fp8.fp8_amax_kernel, [x, f, f, i, i, i], BY_ROW=by_row, BLOCK_R=tile.rows,
        BLOCK_C=tile.columns, warps=tile.warps))
print("fp8 scale", wide_loads(
    triton_fp8.fp8_scale_kernel, [f, f, f, i, "fp32"], BLOCK_PARTS=32768, warps=32))
print("fp8 row scales", wide_loads(
    triton_fp8.fp8_row_scales_kernel, [f, f, f, i, i, "fp32"], BLOCK_PARTS=32, BLOCK_N=128))
for source, scaling, e4m3 in (
    (x, 0, True), (f, 0, True), (x, 0, False), (x, 1, True), (x, 2, True)
):
    out = "*fp8e4nv" if e4m3 else "*fp8e5"
    tile = launches.fp8_cast(scaling == 2)
    print("fp8 cast", source, scaling, e4m3, wide_loads(
        triton_fp8.fp8_cast_kernel,
        [source, out, out, f, f, f, "*i32"] + [i] * 5 + ["fp32", "fp32"], SCALING=scaling,
        ROWS=True, COLUMNS=True, PENDING=scaling == 0, COUNT=not e4m3, E4M3=e4m3, BITS=False,
        BLOCK_R=tile.rows, BLOCK_C=tile.columns, warps=tile.warps))
print("transpose", wide_loads(
    triton_transpose.transpose_bytes_kernel, ["*u8", "*u8", i, i, i], BLOCK=128))
for name, moments, chance, copied, amax in (
    ("float32", tl.float32, False, False, False), ("copied", tl.float32, False, True, False),
    ("chance", tl.uint16, True, False, False), ("amax", tl.float32, False, False, True),
):
    print("adamw", name, wide_loads(
        triton_adamw.adamw_table_kernel, ["*i64", "*i32", f, i, f], PARAMETER=tl.float32,
        GRADIENT=tl.float32, MOMENTS=moments, COPY=tl.bfloat16, ALIGNED=True, CHANCE=chance,
        COPIED=copied, AMAX=amax))
for amax in (False, True):
    print("adamw one", amax, wide_loads(
        triton_adamw.adamw_one_kernel, [f, f, f, f, x, f, f, i, i], COPIED=True, AMAX=amax))
"""

SPILLS_OF_TRITON_3_6 = {
    f"norm backward {kind} True False 8192" for kind in ("rms", "units", "layer")
}
"""Its ptxas puts 8 to 64 bytes of a thread on the stack, at 128 registers; that of 3.7 none."""


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is available on Linux only")
def test_every_kernel_compiles_with_wide_loads_and_without_spills(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    done = python(str(script), env=environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    loads = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(loads) == 78
    known = SPILLS_OF_TRITON_3_6 if version("triton").startswith("3.6.") else set()
    assert {name for name, count in loads.items() if int(count) == 0} == known, loads
