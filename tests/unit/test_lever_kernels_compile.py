"""The kernels of the levers compile for a Hopper GPU on a machine without one, as they are meant.

In a process of its own: under Triton's interpreter nothing compiles.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from stepscope.measure.levers import triton_kernels as kernels
from stepscope.measure.levers.on_gpu import BLOCK, LANES, TILES, WARP
from stepscope.measure.levers.pair import DECAY, GAIN, LINKS

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
found = {"link": ptx(kernels.link_kernel, [x, x], BLOCK=BLOCK)}
for keep in (True, False):
    how = {"LINKS": LINKS, "KEEP": keep, "BLOCK": BLOCK}
    found[f"chain {keep}"] = ptx(kernels.chain_kernel, [x, x, x, i], **how)
    found[f"backward {keep}"] = ptx(kernels.chain_backward_kernel, [x, x, x, x, i], **how)
found["apart"] = ptx(
    kernels.field_kernel, [x, x, i, i], unaligned=("record_stride",), BLOCK=BLOCK, field_stride=1)
found["together"] = ptx(kernels.field_kernel, [x, x, i, i], BLOCK=BLOCK, record_stride=1)
found["loop"] = ptx(
    kernels.loop_kernel, [x, "*i32", x], LANES // WARP, DECAY=DECAY, GAIN=GAIN, LOCK_STEP=False,
    BLOCK=LANES)
found["rows"] = ptx(kernels.row_product_kernel, [x, x, x, i], LANES // WARP, BLOCK=LANES)
for name, width in (("*fp32", 4), ("*bf16", 2)):
    tile = TILES[width]
    found[f"tile {name}"] = ptx(
        kernels.tile_product_kernel, [name, name, x, i], tile.warps, tile.stages,
        M=tile.m, N=tile.n, K=tile.k)
print(json.dumps({name: counts(text) for name, text in found.items()}))
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton is there on Linux only")
def test_every_kernel_compiles_to_what_its_lever_is_about(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = tmp_path / "compile_kernels.py"
    script.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 11
    # Neighbouring lanes load 16 bytes each at once; lanes that are 32 bytes apart cannot.
    for name in ("link", "chain True", "chain False", "backward True", "backward False"):
        assert found[name]["wide"] > 0, name
    assert found["together"]["wide"] > 0
    assert found["apart"]["wide"] == 0
    assert found["backward True"]["wide"] > found["backward False"]["wide"]
    # A lane's own branch is there, and only the narrow format runs on tensor cores.
    assert found["loop"]["branches"] >= 2
    assert found["tile *bf16"]["wgmma"] > 0
    assert found["tile *fp32"]["wgmma"] == 0
