"""The technique kernels compile for a Hopper GPU, on a machine without one, as intended.

Runs in a separate process, because Triton's interpreter does not compile.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from command_line import python

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stepscope.measure.techniques import triton_kernels as kernels
from stepscope.measure.techniques.on_gpu import BLOCK, LANES, TILES, WARP
from stepscope.measure.techniques.pair import DECAY, GAIN, LINKS

def ptx(kernel, types, warps=4, stages=2, unaligned=(), **constants):
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True)) | {name: "constexpr" for name in constants}
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if signature[name] != "constexpr" and name not in unaligned
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

def counts(text):
    wide, wgmma = text.count("ld.global.v4"), text.count("wgmma.mma")
    return {"wide": wide, "wgmma": wgmma, "branches": text.count("bra ")}

x, i = "*fp32", "i32"
compiled = {"link": ptx(kernels.link_kernel, [x, x], BLOCK=BLOCK)}
for keep in (True, False):
    options = {"LINKS": LINKS, "KEEP": keep, "BLOCK": BLOCK}
    compiled[f"chain {keep}"] = ptx(kernels.chain_kernel, [x, x, x, i], **options)
    compiled[f"backward {keep}"] = ptx(kernels.chain_backward_kernel, [x, x, x, x, i], **options)
compiled["apart"] = ptx(
    kernels.field_kernel, [x, x, i, i], unaligned=("record_stride",), BLOCK=BLOCK, field_stride=1)
compiled["together"] = ptx(kernels.field_kernel, [x, x, i, i], BLOCK=BLOCK, record_stride=1)
compiled["loop"] = ptx(
    kernels.loop_kernel, [x, "*i32", x], LANES // WARP, DECAY=DECAY, GAIN=GAIN, LOCK_STEP=False,
    BLOCK=LANES)
compiled["rows"] = ptx(kernels.row_product_kernel, [x, x, x, i], LANES // WARP, BLOCK=LANES)
for name, width in (("*fp32", 4), ("*bf16", 2)):
    tile = TILES[width]
    compiled[f"tile {name}"] = ptx(
        kernels.tile_product_kernel, [name, name, x, i], tile.warps, tile.stages,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k)
print(json.dumps({name: counts(text) for name, text in compiled.items()}))
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton supports only Linux")
def test_every_kernel_compiles_to_the_instructions_of_its_technique(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    done = python(str(script), env=environment | {"TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert len(counts) == 11
    # Neighboring lanes use 16-byte loads; lanes that are 32 bytes apart cannot.
    for name in ("link", "chain True", "chain False", "backward True", "backward False"):
        assert counts[name]["wide"] > 0, name
    assert counts["together"]["wide"] > 0
    assert counts["apart"]["wide"] == 0
    assert counts["backward True"]["wide"] > counts["backward False"]["wide"]
    # The loop has a branch per lane, and only the narrow dtype uses tensor cores.
    assert counts["loop"]["branches"] >= 2
    assert counts["tile *bf16"]["wgmma"] > 0
    assert counts["tile *fp32"]["wgmma"] == 0
