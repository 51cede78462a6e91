"""`ring_collectives` and `alternate_ring_all_reduce`: N devices in a circle, each sending to the
next one at W bytes/s, all at the same time."""

from __future__ import annotations

from stepscope.analysis.accounting.sheet import Calculation, Sheet
from stepscope.errors import UsageError

_TENSOR = {"message_mb": 1000, "ranks": 8, "bandwidth_gbs": 450}


def _collectives(sheet: Sheet) -> None:
    sheet.given("S", "N", "W")
    for code, what in (
        ("all-gather", "every device passes on the chunk that it received last"),
        ("reduce-scatter", "every device adds its own values to the chunk before it passes it on"),
    ):
        sheet.part(code, f"How long does a ring {code} of S bytes take?")
        _steps(sheet, "N-1", "S/N", what)
        _times(sheet, "(N-1)/N*S")
        sheet.answer(code, "{T:f} = {T}: {steps} steps of {chunk}; a device sends {bytes}.")
    sheet.part("all-reduce", "How long does a ring all-reduce of S bytes take?")
    _steps(sheet, "2*(N-1)", "S/N", "a reduce-scatter, then an all-gather")
    _times(sheet, "2*(N-1)/N*S")
    sheet.answer(
        "all-reduce",
        "{T:f} = {T}: {steps} steps of {chunk}; a device sends {bytes}, at most 2·S however many"
        " devices there are.",
    )


def _alternate(sheet: Sheet) -> None:
    if sheet.inputs.ranks == 1:
        raise UsageError("--ranks is 1", "a ring has at least two devices")
    sheet.given("S", "N", "W")
    sheet.part("a", "How long does an all-reduce take that passes full tensors around the ring?")
    _steps(sheet, "N-1", "S", "every device passes on the tensor that it received last")
    _times(sheet, "(N-1)*S")
    sheet.let("T_ring", "2*(N-1)/N*S/W", "s", "reduce-scatter and all-gather of chunks")
    sheet.let("ratio", "T/T_ring", "", closed="N/2")
    sheet.answer(
        "time",
        "{T:f} = {T}: in each of the {steps} steps a device sends a full tensor of S bytes, so it"
        " takes N/2 = {ratio} times as long as the ring all-reduce of chunks ({T_ring}).",
    )


def _steps(sheet: Sheet, steps: str, chunk: str, why: str) -> None:
    sheet.let("steps", steps, "", why)
    sheet.let("chunk", chunk, "B", "sent by every device in a step")


def _times(sheet: Sheet, sent: str) -> None:
    sheet.let("bytes", "steps*chunk", "B", "sent by a device", closed=sent)
    sheet.let("T", "bytes/W", "s", closed=f"{sent}/W")


COLLECTIVES = Calculation("ring_collectives", "Ring collectives", "", _TENSOR, _collectives)
ALTERNATE = Calculation(
    "alternate_ring_all_reduce", "Alternate ring all-reduce", "2026", _TENSOR, _alternate
)
