"""Time of attention with `ScoreRules`, the Triton kernels against FlexAttention.

    python benchmarks/attention_masks.py --out masks.jsonl
    python benchmarks/attention_masks.py --rows documents window
    python benchmarks/attention_masks.py --read masks.jsonl        print the table of a record

A row is a forward and a backward pass in bfloat16 through the public call. Implementations take
turns on the same tensors; the median turn counts. The block mask of FlexAttention and the intervals
of the kernels are created before. FLOPs count visible pairs, a backward pass 2.5 forward passes.
Needs a GPU; compiling FlexAttention takes most of the time. After `--seconds` no further row is
measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.attention import attention
from stepscope.attention.cost import pair_flops
from stepscope.attention.visibility import visible_pairs
from stepscope.errors import one_line
from stepscope.studies.attention.workload import score_rules

FORMS = ("triton", "flex")
TURNS = 9
TURN_SECONDS = 0.03


class Row(NamedTuple):
    heads: int
    key_heads: int
    length: int
    d_head: int
    rule: str
    """As `score_rules` reads it; documents are given by their mean length."""


ROWS: dict[str, Row] = {
    "documents": Row(16, 16, 16384, 64, "documents=512"),
    "documents, d 128": Row(16, 16, 16384, 128, "documents=512"),
    "window": Row(16, 16, 16384, 64, "window=1024"),
    "window, d 128": Row(16, 16, 16384, 128, "window=1024"),
    "window, shared key heads": Row(32, 8, 16384, 128, "window=1024"),
    "soft cap": Row(16, 16, 4096, 128, "softcap=50"),
    "sinks": Row(64, 8, 4096, 64, "sinks"),
    "ALiBi": Row(16, 16, 4096, 64, "alibi"),
    "prefix": Row(16, 16, 4096, 64, "prefix=1024"),
}
"""One sequence each, with a causal mask."""


class Case:
    """The tensors of a row, in the layout of a projection."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.rules = score_rules(row.rule, row.heads, row.length, torch.device("cuda"))
        generator = torch.Generator("cuda").manual_seed(0)

        def heads(count: int) -> Tensor:
            size = (1, row.length, count, row.d_head)
            x = torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
            return x.transpose(1, 2)

        self.inputs = [heads(n).requires_grad_() for n in (row.heads, row.key_heads, row.key_heads)]
        self._grad = heads(row.heads)

    def results(self, form: str) -> list[Tensor]:
        out = attention(*self.inputs, is_causal=True, rules=self.rules, impl=form)
        return [out, *torch.autograd.grad(out, self.inputs, self._grad)]

    def flops(self) -> float:
        row = self._row
        pairs = visible_pairs(self.rules, *self.inputs[:2], is_causal=True)
        return 3.5 * pair_flops(pairs, heads=row.heads, d_head=row.d_head)


def seconds(call: Callable[[], object], calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference of a result, relative to its largest value."""
    return max(
        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
        for a, b in zip(ours, theirs, strict=True)
    )


def measure(name: str) -> dict[str, Any]:
    case = Case(ROWS[name])
    calls: dict[str, Callable[[], list[Tensor]]] = {}
    reasons: dict[str, str] = {}
    for form in FORMS:
        call = functools.partial(case.results, form)
        try:
            seconds(call, 2)
            calls[form] = call
        except Exception as error:
            # Whatever a form raises, among others a failed compilation, the other is measured.
            reasons[form] = one_line(error)
    counts = {f: max(3, round(TURN_SECONDS / seconds(call, 3))) for f, call in calls.items()}
    turns = [{f: seconds(call, counts[f]) for f, call in calls.items()} for _ in range(TURNS)]
    times = {f: 1e6 * statistics.median(turn[f] for turn in turns) for f in calls}
    apart = difference(*(call() for call in calls.values())) if len(calls) > 1 else None
    return {"row": name, **ROWS[name]._asdict(), "us": times, "flops": case.flops(), "apart": apart,
            "not_supported": reasons}  # fmt: skip


def table(lines: Sequence[dict[str, Any]]) -> str:
    out = [f"{'row':<26}{'triton µs':>11}{'flex µs':>10}{'flex/triton':>13}{'TFLOP/s':>9}  apart"]
    for line in lines:
        ours, theirs = (line["us"].get(form) for form in FORMS)
        if ours is None or theirs is None:
            out.append(f"{line['row']:<26}{line['not_supported']}")
            continue
        rate = line["flops"] / ours / 1e6
        out.append(
            f"{line['row']:<26}{ours:>11.0f}{theirs:>10.0f}{theirs / ours:>13.2f}{rate:>9.0f}"
            f"  {line['apart']:.1e}"
        )
    return "\n".join(out)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--out", type=Path, help="file for one JSON line per row")
    parser.add_argument("--seconds", type=float, default=400, help="start no row after this time")
    parser.add_argument("--read", type=Path, help="print the table of this file")
    args = parser.parse_args(words)
    if args.read:
        print(table([json.loads(line) for line in args.read.read_text().splitlines()]))
        return
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    lines: list[dict[str, Any]] = []
    end = time.monotonic() + args.seconds
    for name in args.rows:
        if time.monotonic() > end:
            break
        lines.append(measure(name))
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(lines[-1] | machine) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
