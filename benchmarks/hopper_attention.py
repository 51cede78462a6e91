"""Time of attention by the warp-specialized forward and cuDNN's backward, against cuDNN alone.

    python benchmarks/hopper_attention.py --out hopper.jsonl
    python benchmarks/hopper_attention.py --shapes 4x16x4096x64:full 8x16x1024x64:full
    python benchmarks/hopper_attention.py --implementations hopper triton sdpa_cudnn auto

Forward and backward, and forward alone, through `attention` in bfloat16 on tensors in the layout of
a projection; medians in ms of the time on the GPU. The implementations take turns in every round.
One JSON line per shape as soon as it is known, with the refusal of an implementation that does not
support the shape, then a table. After `--seconds` no further shape is measured. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gluon_cases import Case, inputs, milliseconds
from torch import Tensor

from stepscope.attention import attention, explain
from stepscope.measure.device import pick_device
from stepscope.measure.environment import describe

IMPLEMENTATIONS = ("hopper", "sdpa_cudnn", "auto")
ROUNDS = 30


class Shape(NamedTuple):
    batch: int
    heads: int
    rows: int
    head_dim: int
    causal: bool

    @classmethod
    def of(cls, text: str) -> Shape:
        """Read BxHxSxD, a causal mask; with `:full` none."""
        sizes, _, mask = text.partition(":")
        if mask not in ("", "full", "causal"):
            raise argparse.ArgumentTypeError(f"{text}: the mask is full or causal")
        try:
            batch, heads, rows, head_dim = map(int, sizes.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be BxHxSxD") from None
        return cls(batch, heads, rows, head_dim, mask != "full")

    def __str__(self) -> str:
        return "x".join(map(str, self[:4])) + (" causal" if self.causal else " full")


SHAPES = [
    Shape.of(text)
    for text in (
        "4x16x4096x64:full", "4x16x4096x64", "8x16x1024x64:full", "8x16x1152x64:full",
        "8x16x2000x64:full", "4x16x4096x128:full", "4x16x4096x128", "4x16x4000x128:full",
        "2x16x16384x128:full", "2x16x16384x128",
    )
]  # fmt: skip


def measure(shape: Shape, names: Sequence[str]) -> dict[str, Any]:
    batch, heads, rows, head_dim, causal = shape
    case = Case(batch, heads, heads, rows, rows)
    qkv = [x.requires_grad_() for x in inputs(case, head_dim, 0)]
    grad = inputs(case, head_dim, 1)[0]
    told = explain(*qkv, is_causal=causal)
    refused = {one.name: one.refusal for one in told.verdicts if one.refusal and one.name in names}
    line: dict[str, Any] = {"shape": list(shape[:4]), "causal": causal, "auto is": told.chosen}

    def forward(name: str) -> Tensor:
        return attention(*qkv, is_causal=causal, impl=name)

    def both(name: str) -> object:
        return torch.autograd.grad(forward(name), qkv, grad)

    able = [name for name in names if name not in refused]
    times: list[dict[str, float]] = []
    for call in (both, forward):
        calls: dict[str, Callable[[], object]] = {n: functools.partial(call, n) for n in able}
        with torch.set_grad_enabled(call is both):
            for one in calls.values():
                one()
            torch.cuda.synchronize()
            times.append(milliseconds(calls, ROUNDS))
    line |= {name: [round(taken[name], 4) for taken in times] for name in able}
    return line | ({"refused": refused} if refused else {})


def table(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return forward and backward in ms, forward, and both in relation to cuDNN."""
    out = [f"{'shape':<24}" + "".join(f"{name:>32}" for name in names)]
    for line in lines:
        cells = []
        for name in names:
            both, alone = line.get(name, (None, None))
            if both is None or alone is None:
                cells.append(f"{'-':>32}")
                continue
            text = f"{both:.3f} {alone:.3f}"
            if "sdpa_cudnn" in line:
                rival = line["sdpa_cudnn"]
                text += f"  ({rival[0] / both:.3f} {rival[1] / alone:.3f})"
            cells.append(f"{text:>32}")
        shape = Shape(*line["shape"], line["causal"])
        out.append(f"{shape!s:<24}{''.join(cells)}  auto: {line['auto is']}")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", type=Shape.of, default=SHAPES, metavar="BxHxSxD")
    parser.add_argument("--implementations", nargs="+", default=IMPLEMENTATIONS)
    parser.add_argument("--seconds", type=float, default=90, help="start nothing after this time")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    commit = describe(pick_device("cuda")).commit
    lines = []
    for shape in args.shapes:
        if time.monotonic() > end:
            break
        lines.append(measure(shape, args.implementations) | {"commit": commit})
        text = json.dumps(lines[-1])
        print(text, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(text + "\n")
    print(table(lines, args.implementations))


if __name__ == "__main__":
    main()
