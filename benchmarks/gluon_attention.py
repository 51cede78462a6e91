"""Check and time variants of the warp-specialized attention forward for Hopper.

    python benchmarks/gluon_attention.py --out gluon.jsonl      check every variant, then time (GPU)
    python benchmarks/gluon_attention.py --compile              compile for Hopper on any machine
    python benchmarks/gluon_attention.py --launch 128x3 --shape 4,16,4096,128    for a profiler

Every variant is checked in a process of its own that ends itself after `SECONDS` on the GPU: a
wrong barrier hangs. Variants that agree with float64 are timed, interleaved with cuDNN and the
library's kernels on the same tensors; one that hangs there is left out and the others are
timed again. One JSON line per measurement as soon as it is known, and a table at the end. After
`--seconds` nothing further is started.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import triton
from gluon_cases import CASES, Case, end_after, inputs, milliseconds, outputs, reference, say
from torch import Tensor

from stepscope.attention import attention
from stepscope.attention.specialized import Variant
from stepscope.attention.tiles import tiles
from stepscope.attention.triton.launch import forced_tiles
from stepscope.attention.triton.specialized import first_launch
from stepscope.attention.triton.specialized_forward import compile_for_hopper

SECONDS = 20
"""Time limit of a process from its first launch on."""
COMPILE_SECONDS = 60
WORKERS = 16
GATE = 600
"""TFLOP/s at head dimension 128 without a mask."""
CLOSE = 8e-3
CLOSE_LSE = 2e-3

VARIANTS: dict[int, dict[str, Variant]] = {
    128: {
        "128x3": Variant(128, 3),
        "128x3 by 4 heads": Variant(128, 3, heads=4),
        "128x3 by 4 heads, no turns": Variant(128, 3, heads=4, take_turns=False),
        "128x2 early queries by 4 heads": Variant(128, 2, queries=2, heads=4),
    },
    64: {
        "128x3 by 4 heads": Variant(128, 3, heads=4),
        "128x3 three groups by 4 heads": Variant(128, 3, groups=3, registers=160, heads=4),
        "128x3 three groups by 16 heads": Variant(128, 3, groups=3, registers=160, heads=16),
        "128x3 three groups by 4 heads, no turns": Variant(
            128, 3, groups=3, registers=160, heads=4, take_turns=False
        ),
        "128x3 three groups, early queries by 4 heads": Variant(
            128, 3, groups=3, registers=160, queries=2, heads=4
        ),
    },
}
TIMED = (
    (1, 16, 16384, 64),
    (4, 16, 4096, 64),
    (8, 16, 1024, 64),
    (4, 16, 4096, 128),
    (2, 16, 16384, 128),
)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    variant: Variant,
    shift: int = 0,
    launch: bool = True,
) -> Any:
    """Write output and log-sum-exp. Return the compiled kernel; without `launch` only compile."""
    prepared = first_launch(
        (q, k, v),
        out,
        lse,
        scale=q.shape[-1] ** -0.5,
        causal=causal,
        shift=shift,
        variant=variant,
        launch=launch,
    )
    if prepared is None:
        raise RuntimeError(f"{variant} cannot be launched")
    return prepared.launch.kernel


def check(name: str, head: int) -> None:
    """Print a JSON line: the largest errors of one variant, or what went wrong."""
    variant = VARIANTS[head][name]
    end_after(COMPILE_SECONDS + SECONDS)
    for case in CASES:
        q, k, v = inputs(case, head, 0)
        for causal in (False, True):
            settings: dict[str, Any] = {"causal": causal, "variant": variant, "shift": case.shift}
            forward(q, k, v, *outputs(q), **settings, launch=False)
    end_after(SECONDS)
    worst, worst_lse = 0.0, 0.0
    for case in CASES:
        for causal in (False, True):
            settings = {"causal": causal, "variant": variant, "shift": case.shift}
            for seed in (1, 2):  # the second call of a shape has other inputs
                q, k, v = inputs(case, head, seed)
                expected, expected_lse = reference(q, k, v, causal, case.shift)
                out, lse = outputs(q)
                forward(q, k, v, out, lse, **settings)
                error = float((out.double() - expected).norm() / expected.norm())
                # Equal infinities have no difference.
                difference = (lse.double() - expected_lse).abs()
                error_lse = float(difference.masked_fill(lse == expected_lse, 0.0).max())
                if not (error < CLOSE and error_lse < CLOSE_LSE):
                    say(check=name, d=head, failed=[*case, causal], error=error, lse=error_lse)
                    return
                worst, worst_lse = max(worst, error), max(worst_lse, error_lse)
            again, again_lse = outputs(q)
            forward(q, k, v, again, again_lse, **settings)
            if not (torch.equal(out, again) and torch.equal(lse, again_lse)):
                say(check=name, d=head, failed=[*case, causal], error="bits do not repeat")
                return
    say(check=name, d=head, error=worst, lse=worst_lse)


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Compute attention by the kernels that are not warp-specialized."""
    tile = tiles("forward", q.shape[-1], 2, (9, 0), causal=causal)[0]
    with forced_tiles({"forward": tile}):
        return attention(q, k, v, is_causal=causal, impl="triton")


def measure(shape: tuple[int, int, int, int], causal: bool, names: list[str]) -> None:
    """Print a JSON line per variant and rival, and one before the first launch of a variant."""
    batch, heads, rows, head = shape
    end_after(COMPILE_SECONDS + 2 * SECONDS)
    q, k, v = inputs(Case(batch, heads, heads, rows, rows), head, 3)
    out, lse = outputs(q)
    kernels = {
        name: forward(q, k, v, out, lse, causal=causal, variant=VARIANTS[head][name], launch=False)
        for name in names
    }
    calls: dict[str, Callable[[], object]] = {}
    for impl in ("sdpa_cudnn", "triton"):
        calls[impl] = lambda impl=impl: attention(q, k, v, is_causal=causal, impl=impl)  # type: ignore[misc]
    calls["plain"] = lambda: plain(q, k, v, causal)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    end_after(2 * SECONDS)
    for name in names:
        calls[name] = lambda name=name: forward(  # type: ignore[misc]
            q, k, v, out, lse, causal=causal, variant=VARIANTS[head][name]
        )
        say(launched=name)
        calls[name]()
        torch.cuda.synchronize()
    flops = 4.0 * batch * heads * rows * rows * head * (0.5 if causal else 1.0)
    with torch.no_grad():
        times = milliseconds(calls)
    for name, ms in times.items():
        line: dict[str, Any] = {"shape": list(shape), "causal": causal, "name": name, "ms": ms}
        line |= {"tflops": flops / ms * 1e-9}
        if name in kernels:
            kernel = kernels[name]
            line |= {
                "registers": kernel.n_regs,
                "spilled": kernel.n_spills,
                "shared": kernel.metadata.shared,
            }
            line["variant"] = VARIANTS[head][name]._asdict()
        say(**line)


def worker(arguments: list[str], limit: float) -> list[dict[str, Any]]:
    """Run this file in a process of its own; return the JSON lines that it printed."""
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        text, code, errors = done.stdout, str(done.returncode), done.stderr
    except subprocess.TimeoutExpired as error:
        text, code, errors = (error.stdout or b"").decode(), "time limit", ""
    lines = [json.loads(line) for line in text.splitlines() if re.fullmatch(r"\{.*\}", line)]
    if code != "0":
        what = "hangs" if code in ("3", "time limit") else errors.strip()[-300:]
        lines.append({"failed": arguments, "code": code, "error": what})
    return lines


def timed_without_hanging(
    shape: tuple[int, ...], causal: bool, right: list[str], end: float
) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of a timing of the `right` variants; if it fails, remove the variant launched
    last from them and time the others."""
    words = ["--time", ",".join(map(str, shape)), *(["--causal"] if causal else [])]
    while time.monotonic() < end:
        lines = worker([*words, "--names", *right], COMPILE_SECONDS + 2 * SECONDS)
        launched = [line["launched"] for line in lines if "launched" in line]
        yield [line for line in lines if "launched" not in line]
        if not launched or all("failed" not in line for line in lines):
            return
        right.remove(launched[-1])


def check_and_time(out: Path | None, seconds: float) -> None:
    start = time.monotonic()
    found: list[dict[str, Any]] = []

    def add(lines: list[dict[str, Any]]) -> None:
        found.extend(lines)
        for line in lines:
            say(**line)
        if out:
            with out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    pairs = [(name, head) for head, variants in VARIANTS.items() for name in variants]
    work = [["--check", name, "--head", str(head)] for name, head in pairs]
    limit = COMPILE_SECONDS + SECONDS
    with ThreadPoolExecutor(WORKERS) as pool:
        for done in as_completed([pool.submit(worker, words, limit) for words in work]):
            add(done.result())
    passed = [x for x in found if "check" in x and "failed" not in x]
    for shape in TIMED:
        right = [x["check"] for x in passed if x["d"] == shape[-1]]
        for causal in (False, True):
            for lines in timed_without_hanging(shape, causal, right, start + seconds):
                add(lines)
    print(table(found))
    print(f"{time.monotonic() - start:.0f} s")


def table(lines: list[dict[str, Any]]) -> str:
    timed = [line for line in lines if "tflops" in line]
    out = []
    for line in sorted(timed, key=lambda x: (x["shape"], x["causal"], x["ms"])):
        shape = "x".join(map(str, line["shape"])) + (" causal" if line["causal"] else " full")
        out.append(f"{shape:<24} {line['name']:<56} {line['ms']:8.3f} ms {line['tflops']:6.0f}")
    gate = [
        x["tflops"] for x in timed if x["shape"][-1] == 128 and not x["causal"] and "variant" in x
    ]
    best = f"{max(gate):.0f}" if gate else "nothing"
    out.append(f"gate: {best} TFLOP/s of {GATE} at head dimension 128 without a mask")
    out += [f"failed: {line}" for line in lines if "failed" in line]
    return "\n".join(out)


def compiled_rows() -> Iterator[str]:
    """Compile every variant; yield what it uses. `overlap` counts the exponentials of the main loop
    that are computed while a matmul is in flight."""
    for head, variants in VARIANTS.items():
        for name, variant in variants.items():
            for causal in (False, True):
                kernel = compile_for_hopper(variant, head, causal=causal, masked=False)
                usage, sass = disassembled(kernel.asm["cubin"])
                yield (
                    f"{head:>4} {name:<56} {'causal' if causal else 'full':<7}"
                    f" {usage['REG']:>4} registers {usage['STACK']:>4} bytes of stack"
                    f" {kernel.metadata.shared:>7} shared {sass.count('HGMMA'):>4} HGMMA"
                    f" {overlapped(sass):>4} overlap"
                )


def overlapped(sass: str) -> int:
    """Count the exponentials between a wait that leaves a matmul in flight and the next one."""
    count, in_flight = 0, False
    for match in re.finditer(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)|MUFU\.EX2", sass):
        if match.group(1):
            in_flight = match.group(1) != "0x0"
        elif in_flight:
            count += 1
    return count


def disassembled(cubin: bytes) -> tuple[dict[str, str], str]:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in (
                [str(tools / "cuobjdump"), "--dump-resource-usage"],
                [str(tools / "nvdisasm"), "-c"],
            )
        ]
    return dict(re.findall(r"(\w+):(\d+)", run[0])), run[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    parser.add_argument("--seconds", type=float, default=400, help="start nothing after this time")
    parser.add_argument("--compile", action="store_true", help="compile only, on any machine")
    parser.add_argument("--launch", metavar="NAME", help="launch one variant three times")
    parser.add_argument("--shape", default="4,16,4096,128", help="B,H,S,D for --launch")
    parser.add_argument("--causal", action="store_true")
    for hidden in ("--check", "--time", "--head"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        for row in compiled_rows():
            print(row, flush=True)
    elif args.check:
        check(args.check, int(args.head))
    elif args.time:
        batch, heads, rows, head = map(int, args.time.split(","))
        measure((batch, heads, rows, head), args.causal, args.names)
    elif args.launch:
        batch, heads, rows, head = map(int, args.shape.split(","))
        q, k, v = inputs(Case(batch, heads, heads, rows, rows), head, 0)
        buffers = outputs(q)
        end_after(COMPILE_SECONDS + SECONDS)
        for _ in range(3):
            forward(q, k, v, *buffers, causal=args.causal, variant=VARIANTS[head][args.launch])
        torch.cuda.synchronize()
    else:
        check_and_time(args.out, args.seconds)


if __name__ == "__main__":
    main()
