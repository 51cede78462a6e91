"""Compile the attention kernels for a GPU that is not present, and print what each tile uses.

    python scripts/screen_tiles.py --head 64 128 --dtype bf16
    python scripts/screen_tiles.py --head 128 --m 64 128 --n 64 128 --warps 4 8 --stages 2 3
    python scripts/screen_tiles.py --head 64 --rules intervals softcap
    python scripts/screen_tiles.py --target cuda:86 --no-tma --choices

Registers, spills and shared memory come from the compiled program, so tiles that spill or do not
fit are dropped before they cost GPU time. wgmma counts the matrix instructions.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import triton
from screen_kernels import SHARED_KIB, target_of, used
from triton.compiler import ASTSource

from stepscope.attention.tiles import IN_PLANES, Tile, columns, tiles
from stepscope.attention.triton.backward import key_value_kernel, query_kernel
from stepscope.attention.triton.forward import forward_kernel

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
    target: str = "cuda:90",
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
    given = {name for rule in rules for name in RULES[rule]}
    constants |= dict.fromkeys(optional.keys() - given)
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
    if tile.registers and target.startswith("cuda"):
        options["maxnreg"] = tile.registers
    compiled = triton.compile(source, target=target_of(target), options=options)
    use = used(compiled)
    wgmma = compiled.asm["ptx"].count("wgmma.mma") if "ptx" in compiled.asm else 0
    return Card(use.registers, use.spilled_bytes, use.shared_bytes, wgmma)


def choices(args: argparse.Namespace, kind: Any, head: int) -> Iterator[Tile]:
    width = 4 if args.dtype == "fp32" else 2
    _, _, chip = args.target.partition(":")
    capability = divmod(int(chip), 10) if chip.isdecimal() else (0, 0)
    best, *smaller = tiles(kind, head, width, capability)
    if args.choices:
        yield from (best, *smaller)
        return
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
    parser.add_argument("--choices", action="store_true", help="the tiles that are tried, in order")
    parser.add_argument("--target", default="cuda:90", choices=list(SHARED_KIB))
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
                        target=args.target,
                    )
                except Exception as error:
                    print(f"{label}  does not compile: {str(error).splitlines()[0][:90]}")
                    continue
                fits = "" if card.shared <= SHARED_KIB[args.target] << 10 else "  too large"
                print(
                    f"{label} {card.registers:>10} {card.spills:>6} {card.shared / 1024:>10.1f}"
                    f" {card.wgmma:>6}{fits}"
                )


if __name__ == "__main__":
    main()
