"""Compile the attention kernels for a GPU that is not present, and print what each tile uses.

    python scripts/screen_tiles.py --head 64 128 --dtype bf16
    python scripts/screen_tiles.py --head 128 --m 64 128 --n 64 128 --warps 4 8 --stages 2 3
    python scripts/screen_tiles.py --head 64 --rules intervals softcap

Registers, spills and shared memory come from the compiled program, so tiles that spill or do not
fit are dropped before they cost GPU time. wgmma counts the matrix instructions.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stepscope.attention.tiles import IN_PLANES, Tile, columns, tiles
from stepscope.attention.triton.backward import key_value_kernel, query_kernel
from stepscope.attention.triton.forward import forward_kernel

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 << 10
KERNELS = {"forward": forward_kernel, "key_value": key_value_kernel, "query": query_kernel}
FIELDS = ("m", "n", "warps", "stages", "hold", "registers", "precision")
HELD = {"forward": ("q",), "key_value": ("k", "v"), "query": ("q", "grad")}
TENSORS = {"q": "m", "k": "n", "v": "n", "grad": "m"}
RULES = {
    "intervals": {"intervals": "*i32", "intervals_stride": "i32"},
    "softcap": {"softcap": "fp32"},
    "alibi": {"slopes": "*fp32"},
    "sinks": {"sinks": "*fp32"},
    "dropout": {"seeds": "*i64", "dropout": "fp32"},
}
"""Arguments of the kernels by rule; None if the rule is not in use."""


class Card(NamedTuple):
    registers: int
    spills: int
    shared: int
    wgmma: int


def compile_tile(
    kind: str,
    tile: Tile,
    head: int,
    dtype: str,
    *,
    causal: bool,
    tma: bool,
    rules: Sequence[str] = (),
) -> Card:
    kernel = KERNELS[kind]
    planes = dtype == "fp32" and tile.precision == IN_PLANES
    first, second = columns(head, in_one_part=planes)
    constants: dict[str, Any] = {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_D": first,
        "BLOCK_E": second,
        "PLANES": 3 if planes else 1,
        "CAUSAL": causal,
        "GROUP": tile.group,
        "TMA": tma,
        "PRECISION": "tf32" if planes else tile.precision,
        "EXACT": dtype == "fp32",
        "G": 1,
        "HOLD": tile.hold,
        "WHOLE": False,
    }
    optional = {name: kind for arguments in RULES.values() for name, kind in arguments.items()}
    used = {name for rule in rules for name in RULES[rule]}
    constants |= dict.fromkeys(optional.keys() - used)
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.removesuffix("_e") in TENSORS:
            base = name.removesuffix("_e")
            dtype_name = "i16" if tile.hold and base in HELD[kind] else "bf16" if planes else dtype
            width = first if name == base else second
            if not width:
                constants[name], signature[name] = None, "constexpr"
            elif tma:
                rows = getattr(tile, TENSORS[base])
                signature[name] = f"tensordesc<{dtype_name}[1, 1, {rows}, {width}]>"
            else:
                signature[name] = f"*{dtype_name}"
        elif name in optional:
            signature[name] = optional[name]
        elif name in ("o", "dq", "dk", "dv"):
            signature[name] = f"*{dtype}"
        elif name in ("lse", "delta", "factor", "ds_sum"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    # Tensors and strides of a training step are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
        or ("stride" in name and name not in constants)
        or (name == "D" and head % 16 == 0)
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers:
        options["maxnreg"] = tile.registers
    compiled = triton.compile(source, target=HOPPER, options=options)
    return Card(
        *resources(compiled.asm["cubin"]),
        compiled.metadata.shared,
        compiled.asm["ptx"].count("wgmma.mma"),
    )


def resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = dict(re.findall(r"(\w+):(\d+)", text))
    return int(usage.get("REG", 0)), int(usage.get("LOCAL", 0)) + int(usage.get("STACK", 0))


def choices(args: argparse.Namespace, kind: Any, head: int) -> Iterator[Tile]:
    width = 4 if args.dtype == "fp32" else 2
    best = tiles(kind, head, width, (9, 0))[0]
    given = [getattr(args, field) or [getattr(best, field)] for field in FIELDS]
    for values in itertools.product(*given):
        yield best._replace(**dict(zip(FIELDS, values, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--kernel", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--no-tma", action="store_true", help="plain pointers")
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--rules", nargs="+", default=[], choices=list(RULES), help="rules in use")
    for field in FIELDS:
        kind = str if field == "precision" else int
        parser.add_argument(f"--{field}", type=kind, nargs="+", default=[])
    args = parser.parse_args()
    print("kernel     head  tile      warps stages hold  registers spills shared KiB  wgmma")
    for head in args.head:
        for kind in args.kernel:
            for tile in choices(args, kind, head):
                layout = f"{tile.m:>3}×{tile.n:<5} {tile.warps:>4} {tile.stages:>6} {tile.hold:>4}"
                label = f"{kind:<10} {head:>4}  {layout}"
                try:
                    card = compile_tile(
                        kind,
                        tile,
                        head,
                        args.dtype,
                        causal=not args.full,
                        tma=not args.no_tma,
                        rules=args.rules,
                    )
                except Exception as error:
                    print(f"{label}  does not compile: {str(error).splitlines()[0][:90]}")
                    continue
                fits = "" if card.shared <= SHARED_LIMIT else "  too large"
                print(
                    f"{label} {card.registers:>10} {card.spills:>6} {card.shared / 1024:>10.1f}"
                    f" {card.wgmma:>6}{fits}"
                )


if __name__ == "__main__":
    main()
