"""`stepscope calc`: communication and memory of parallel training, derived line by line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
import tyro

from stepscope.analysis.accounting import CALCULATIONS, Answer, Calculation, Inputs, Line, Worked
from stepscope.cli.common import json_line, parse
from stepscope.errors import unknown_name
from stepscope.model.sizes import find_size
from stepscope.report.tables import col, table
from stepscope.views.accounting import equation, label

_WIDTH = 100


class CalcOptions(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None
    """Calculation, by the name of its problem in the course; without a name, all are listed with
    the flags that they take."""
    size: str | None = None
    """Take --d-model, --d-ff, --layers and --vocab from a size (`stepscope list sizes`)."""
    table: Literal["2025", "2026"] = "2026"
    """Year of the CS336 assignment that defines the sizes."""
    batch: int | None = None
    """Sequences in the batch of all devices."""
    context: int | None = None
    """Tokens of a sequence. Formulas have B = batch × context."""
    d_model: int | None = None
    """Width of the model, D."""
    d_ff: int | None = None
    """Width of the feed-forward layer, D_FF."""
    layers: int | None = None
    """Number of layers, L."""
    vocab: int | None = None
    """Size of the vocabulary, V."""
    ranks: int | None = None
    """Devices of a ring, N."""
    dp: int | None = None
    """Data-parallel devices, N_DP."""
    fsdp: int | None = None
    """Devices of the FSDP axis, N_FSDP (X in the XXL problem)."""
    tp: int | None = None
    """Devices of the tensor-parallel axis, N_TP (Y in the XXL problem)."""
    pp: int | None = None
    """Pipeline stages, N_PP."""
    microbatches: int | None = None
    """Microbatches of a pipeline, M."""
    fsdp_axes: int | None = None
    """Torus dimensions of the FSDP axis, M_X: each adds a link."""
    tp_axes: int | None = None
    """Torus dimensions of the tensor-parallel axis, M_Y."""
    message_mb: float | None = None
    """Size of the tensor of a collective, S, in MB (10^6 bytes)."""
    buckets: int | None = None
    """Gradient buckets, n_b."""
    overhead_us: float | None = None
    """Overhead of a communication call, o, in µs."""
    device_gb: float | None = None
    """Memory of a device in GB (10^9 bytes)."""
    gpu_gb: float | None = None
    """Memory of a GPU in GB, for "how many GPUs is this"."""
    bandwidth_gbs: float | None = None
    """Bandwidth out of a device, W, in GB/s (10^9 bytes)."""
    tflops: float | None = None
    """Compute rate of a device, C, in TFLOP/s."""
    json: bool = False
    """Print one line of JSON: inputs, lines, values and answers."""


def main(words: list[str]) -> int:
    options = parse(
        CalcOptions,
        words,
        "calc",
        "Calculate the communication and memory of parallel training, line by line.\n"
        "Data parallelism, FSDP, tensor parallelism, FSDP × TP, pipelines, ring collectives: for\n"
        "each question the formula, the numbers and the answer in a sentence. Answers have the\n"
        "bytes per device, the time of each collective, and the batch from which compute hides\n"
        "it. Problems of the CS336 systems assignments have the names that they have there. Flags\n"
        "replace the default numbers. Nothing is measured, and no GPU is needed.",
        (
            "stepscope calc",
            "stepscope calc data_parallel_calcs",
            "stepscope calc fsdp_tp_calcs --batch 64 --context 4096 --d-model 8192 --d-ff 28672"
            " --fsdp 32 --tp 8 --bandwidth-gbs 50 --tflops 989",
            "stepscope calc communication_accounting --fsdp 32 --tp 8 --json",
            "stepscope calc fsdp_accounting --size 8b --fsdp 2",
            "stepscope calc pipeline --layers 64 --pp 8 --microbatches 32",
        ),
    )
    if options.name is None:
        _list(options)
        return 0
    if options.name not in CALCULATIONS:
        raise unknown_name("calculation", options.name, CALCULATIONS)
    calculation = CALCULATIONS[options.name]
    worked = calculation.worked(**_given(options, calculation))
    if options.json:
        print(json_line({"calculation": worked}))
    else:
        print("\n".join(_lines(worked)))
    return 0


def _given(options: CalcOptions, calculation: Calculation) -> dict[str, float]:
    """The inputs that were given; a named size gives those that the calculation takes."""
    sized: dict[str, float] = {}
    if options.size is not None:
        model = find_size(options.size, options.table)
        fields = {"d_model": model.d_model, "d_ff": model.d_ff}
        fields |= {"layers": model.n_layers, "vocab": model.vocab}
        sized = {name: value for name, value in fields.items() if name in calculation.defaults}
    named = {name: getattr(options, name) for name in Inputs.__struct_fields__}
    return sized | {name: value for name, value in named.items() if value is not None}


def _list(options: CalcOptions) -> None:
    if options.json:
        print(json_line({"calculations": [_facts(one) for one in CALCULATIONS.values()]}))
        return
    from stepscope.report.terminal import print_table

    print_table(
        table(
            "calculations",
            "Calculations: stepscope calc NAME",
            CALCULATIONS.values(),
            [
                col("name", lambda one: one.name, "code"),
                col("CS336", lambda one: one.edition or None),
                col("about", lambda one: one.title),
                col("flags", _flags),
            ],
        )
    )


def _flags(calculation: Calculation) -> str:
    return " ".join(f"--{name.replace('_', '-')}" for name in calculation.defaults)


def _facts(calculation: Calculation) -> dict[str, object]:
    return {
        "name": calculation.name,
        "title": calculation.title,
        "edition": calculation.edition,
        "defaults": calculation.defaults,
    }


def _lines(worked: Worked) -> Iterator[str]:
    edition = f" (CS336, {worked.edition})" if worked.edition else ""
    yield f"{worked.title}: {worked.name}{edition}"
    yield ""
    symbols = max(len(given.symbol) for given in worked.givens)
    values = max(len(given.shown) for given in worked.givens)
    for given in worked.givens:
        yield f"  {given.symbol:<{symbols}} = {given.shown:<{values}}  {given.meaning}"
    for answer in worked.answers:
        yield ""
        yield from _answered(answer)


def _answered(answer: Answer) -> Iterator[str]:
    yield f"{label(answer)} {answer.question}"
    for line in answer.lines:
        yield from _derived(line)
    text = textwrap.wrap(answer.text, _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    yield from (f"  {'→ ' if not at else '  '}{words}" for at, words in enumerate(text))


def _derived(line: Line) -> Iterator[str]:
    """The formula, the numbers and the value, each on a line of its own; the reason first."""
    if line.why:
        yield f"      # {line.why}"
    yield f"    {equation(line)}"
    if line.numbers:
        indent = " " * (4 + len(line.left))
        yield f"{indent} {'=' if line.left else '⇔'} {line.numbers}"
        yield f"{indent} {'=' if line.left else '⇔'} {line.shown}"
