"""Compile the fused kernels for a GPU that is not present, and print what each uses.

    python scripts/screen_kernels.py
    python scripts/screen_kernels.py --target cuda:80 cuda:86 hip:gfx942 --one-variant

Registers, spills and shared memory come from the compiled program. Wide loads are vector loads from
global memory. A kernel whose dtypes a target lacks is left out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stepscope.kernels.norm_operator import most_readers
from stepscope.kernels.triton import activation as triton_activation
from stepscope.kernels.triton import cross_entropy as triton_cross_entropy
from stepscope.kernels.triton import embedding as triton_embedding
from stepscope.kernels.triton import fp8 as triton_fp8
from stepscope.kernels.triton import launches
from stepscope.kernels.triton import norm as triton_norm
from stepscope.kernels.triton import rope as triton_rotary
from stepscope.kernels.triton import scale as triton_scale
from stepscope.kernels.triton import transpose as triton_transpose
from stepscope.optim import stale_casts, triton_adamw

SHARED_KIB = {"cuda:80": 163, "cuda:86": 99, "cuda:89": 99, "cuda:90": 227, "cuda:100": 227,
              "hip:gfx942": 64}  # fmt: skip
"""Shared memory of a program at most, by target."""
_FP8 = (89, 90, 100)
"""Compute capabilities whose tensor cores and casts know both FP8 dtypes."""


@dataclass(frozen=True)
class Used:
    """What a compiled kernel uses; registers are counted per thread."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    wide_loads: int


@dataclass(frozen=True)
class Variant:
    name: str
    kernel: Any
    types: Sequence[str]
    options: dict[str, Any]
    """Compile-time constants, and `warps`, `registers`, `odd`: sizes that are not multiples of
    16."""

    def uses_fp8(self) -> bool:
        return any("fp8" in kind for kind in self.types)


def target_of(name: str) -> GPUTarget:
    backend, _, chip = name.partition(":")
    return GPUTarget(
        backend, chip if backend == "hip" else int(chip), 64 if backend == "hip" else 32
    )


def compiled(variant: Variant, target: str) -> Used:
    constants = dict(variant.options)
    warps, odd = constants.pop("warps", 8), constants.pop("odd", ("seed", "S"))
    registers = constants.pop("registers", None)
    kernel = variant.kernel
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, variant.types, strict=True)) | dict.fromkeys(constants, "constexpr")
    # Pointers and sizes as in a typical launch: multiples of 16, except for those in `odd`.
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" or (signature[name] == "i32" and name not in odd)
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps}
    if registers and target.startswith("cuda"):
        options["maxnreg"] = registers
    return used(triton.compile(source, target=target_of(target), options=options))


def used(program: Any) -> Used:
    """Return what a compiled program uses."""
    shared = program.metadata.shared
    if "amdgcn" in program.asm:
        text = program.asm["amdgcn"]
        counts = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text))
        wide = len(re.findall(r"global_load_dwordx|buffer_load_dwordx", text))
        spilled = int(counts["private_segment_fixed_size"])
        return Used(int(counts["vgpr_count"]), spilled, shared, wide)
    registers, spilled = resources(program.asm["cubin"])
    return Used(registers, spilled, shared, program.asm["ptx"].count("ld.global.v"))


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and spilled bytes of a thread."""
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


def variants() -> list[Variant]:
    """Return the variants of the kernels that a training step launches, most options in use."""
    found: list[Variant] = []

    def case(name: tuple[object, ...], kernel: Any, types: Sequence[str], **options: Any) -> None:
        found.append(Variant(" ".join(map(str, name)), kernel, types, options))

    x, f, i = "*bf16", "*fp32", "i32"
    for logits, run in ((x, 8), (f, 4)):
        for padded in (False, True):
            odd = ("V", "ignored") if padded else ("ignored",)
            arguments = [logits, "*i64", f, f, i, i, i]
            both = {"GRADIENT": True, "SHARED": True, "PADDED": padded, "odd": odd, "warps": 16}
            case(
                (
                    "short rows",
                    logits,
                    padded,
                ),
                triton_cross_entropy.cross_entropy_short_rows_kernel,
                arguments,
                BLOCK=16384,
                **both,
            )
            case(
                (
                    "rows",
                    logits,
                    padded,
                ),
                triton_cross_entropy.cross_entropy_rows_kernel,
                arguments,
                BLOCK_RUNS=4096,
                BLOCK_RUN=run,
                **both,
            )
    case(
        ("count of rows",),
        triton_cross_entropy.cross_entropy_count_kernel,
        ["*i64", f, f, i, i],
        BLOCK=4096,
        warps=16,
    )
    case(
        ("mean of rows",),
        triton_cross_entropy.cross_entropy_mean_kernel,
        [f, f, f, i],
        BLOCK=4096,
        warps=16,
    )
    case(("scale",), triton_scale.scale_unless_one_kernel, [x, f, f, i, i], BLOCK=4096)
    for kind, units, layer in (
        ("rms", False, False),
        ("units", True, False),
        ("layer", False, True),
    ):
        kept, how = x if units else f, {"CENTERED": layer, "BIAS": layer, "UNITS": units}
        case(
            (
                "norm forward",
                kind,
            ),
            triton_norm.norm_forward_kernel,
            [f, x, f, f, f, x, kept, f, f, f, "fp32", "fp32", i],
            ADD=True,
            AMAX=True,
            BLOCK_D=4096,
            **how,
        )
        # A LayerNorm needs the most registers; of the others, every value of every option.
        for learned, summed, d in (
            (True, True, 768),
            (True, False, 8192),
            (False, True, 2560),
            *(((True, False, 2560), (True, True, 2560), (False, False, 2560)) if layer else ()),
        ):
            readers = most_readers(d)
            rows = launches.norm_backward(d, readers)
            case(
                (
                    "norm backward",
                    kind,
                    learned,
                    summed,
                    d,
                ),
                triton_norm.norm_backward_kernel,
                [x, x, x, f, kept, f, f, f, f, x, f, f, "fp32", i, i, i],
                THROUGH=True,
                SPLIT=True,
                LEARNED=learned,
                SUMMED=summed,
                AMAX=True,
                READERS=readers,
                BLOCK_D=rows.block,
                STAGES=rows.stages,
                warps=rows.warps,
                registers=rows.registers,
                odd=("rows", "rows_per_program"),
                **how,
            )
    for parts in (100, 1000):
        tile = launches.sum_of_parts(parts)
        case(
            (
                "norm weight",
                parts,
            ),
            triton_norm.norm_weight_kernel,
            [f, f, i, i],
            BLOCK_PARTS=tile.rows,
            BLOCK_D=tile.columns,
            warps=tile.warps,
            odd=("parts",),
        )
    case(
        ("token places",),
        triton_embedding.token_places_kernel,
        ["*i64", "*i32", "*i64", i, i],
        BLOCK_I=8,
        BLOCK_J=512,
        warps=4,
    )
    case(
        ("embedding",),
        triton_embedding.embedding_backward_kernel,
        ["*i64", f, "*i32", "*i64", f, i, i],
        BLOCK_K=1,
        BLOCK_D=1024,
        FREQUENT=32,
        FREQUENT_BLOCK_K=64,
        FREQUENT_BLOCK_D=64,
        warps=4,
    )
    case(("norm again",), triton_norm.norm_scaled_kernel, [x, f, x, i], BLOCK_D=4096)
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        for gated in (False, True):
            how = {"ACTIVATION": kind, "GATED": gated, "EXACT": False, "AMAX": kind == "silu"}
            block = launches.activation(3072)
            case(
                (
                    "activation forward",
                    kind,
                    gated,
                ),
                triton_activation.activation_forward_kernel,
                [x, x, x, f, i, i],
                BLOCK=block.columns,
                warps=block.warps,
                **how,
            )
            summed = launches.activation_summed()
            case(
                (
                    "activation backward",
                    kind,
                    gated,
                ),
                triton_activation.activation_backward_kernel,
                [x] * 6 + [f, f] + [i] * 4,
                RECOMPUTE=True,
                SUMMED=not gated,
                BLOCK=block.columns if gated else summed.block,
                warps=block.warps if gated else summed.warps,
                registers=None if gated else summed.registers,
                **how,
            )
    for half in (64, 40):
        shape = {
            "HALF": half,
            "BLOCK_H": 32,
            "BLOCK_HALF": triton.next_power_of_2(half),
            "warps": 4,
        }
        case(
            ("rotary", half),
            triton_rotary.rotary_turn_kernel,
            [x, x, f, f] + [i] * 7 + ["fp32"],
            **shape,
        )
        for amax in (False, True):
            case(
                ("rotary gathered", half, amax),
                triton_rotary.rotary_gather_kernel,
                [x] * 4 + [f, f] + [i] * 9 + [f] + [i] * 3,
                AMAX=amax,
                **shape,
            )
    for by_row in (False, True):
        tile = launches.fp8_amax(by_row)
        case(
            (
                "fp8 amax",
                by_row,
            ),
            triton_fp8.fp8_amax_kernel,
            [x, f, f, i, i, i],
            BY_ROW=by_row,
            BLOCK_R=tile.rows,
            BLOCK_C=tile.columns,
            warps=tile.warps,
        )
    case(
        ("fp8 scale",),
        triton_fp8.fp8_scale_kernel,
        [f, f, f, i, "fp32"],
        BLOCK_PARTS=32768,
        warps=32,
    )
    case(
        ("fp8 row scales",),
        triton_fp8.fp8_row_scales_kernel,
        [f, f, f, i, i, "fp32"],
        BLOCK_PARTS=32,
        BLOCK_N=128,
    )
    case(
        ("fp8 delayed scale",),
        triton_fp8.fp8_delayed_kernel,
        [f, f, f, f, i, "fp32"],
        BLOCK_H=16,
        warps=1,
    )
    for source, scaling, e4m3 in (
        (x, 0, True),
        (f, 0, True),
        (x, 0, False),
        (x, 1, True),
        (x, 2, True),
    ):
        out = "*fp8e4nv" if e4m3 else "*fp8e5"
        tile = launches.fp8_cast(scaling == 2)
        case(
            (
                "fp8 cast",
                source,
                scaling,
                e4m3,
            ),
            triton_fp8.fp8_cast_kernel,
            [source, out, out, f, f, f, "*i32"] + [i] * 5 + ["fp32", "fp32"],
            SCALING=scaling,
            ROWS=True,
            COLUMNS=True,
            PENDING=scaling == 0,
            COUNT=not e4m3,
            E4M3=e4m3,
            BITS=False,
            BLOCK_R=tile.rows,
            BLOCK_C=tile.columns,
            warps=tile.warps,
        )
    case(
        ("transpose",), triton_transpose.transpose_bytes_kernel, ["*u8", "*u8", i, i, i], BLOCK=128
    )
    for kernel in (stale_casts.compare_casts_kernel, stale_casts.recast_kernel):
        for amax in (False, True):
            case(
                (kernel.fn.__name__, amax), kernel, ["*i64", "*i32", "*i32", i],
                WEIGHT=tl.float32, COPY=tl.float32 if amax else tl.bfloat16, AMAX=amax,
            )  # fmt: skip
    for name, moments, chance, copied, amax in (
        ("float32", tl.float32, False, False, False),
        ("copied", tl.float32, False, True, False),
        ("chance", tl.uint16, True, False, False),
        ("amax", tl.float32, False, False, True),
    ):
        case(
            (
                "adamw",
                name,
            ),
            triton_adamw.adamw_table_kernel,
            ["*i64", "*i32", f, i, f],
            PARAMETER=tl.float32,
            GRADIENT=tl.float32,
            MOMENTS=moments,
            COPY=tl.bfloat16,
            ALIGNED=True,
            CHANCE=chance,
            COPIED=copied,
            AMAX=amax,
        )
    for amax in (False, True):
        case(
            (
                "adamw one",
                amax,
            ),
            triton_adamw.adamw_one_kernel,
            [f, f, f, f, x, f, f, i, i],
            COPIED=True,
            AMAX=amax,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", default=["cuda:90"], choices=list(SHARED_KIB))
    parser.add_argument("--one-variant", action="store_true", help="one variant of each kernel")
    args = parser.parse_args()
    chosen = variants()
    if args.one_variant:
        chosen = list({variant.kernel: variant for variant in reversed(chosen)}.values())[::-1]
    print("target\tregisters\tspilled\tshared KiB\twide loads\tkernel\tvariant")
    for target in args.target:
        for variant in chosen:
            backend, _, chip = target.partition(":")
            if variant.uses_fp8() and not (backend == "cuda" and int(chip) in _FP8):
                continue
            use = compiled(variant, target)
            print(
                target, use.registers, use.spilled_bytes, f"{use.shared_bytes / 1024:.1f}",
                use.wide_loads, variant.kernel.__name__, variant.name, sep="\t", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
