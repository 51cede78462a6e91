"""`fsdp_calcs`: weights are all-gathered in both passes, gradients reduce-scattered."""

from __future__ import annotations

from stepscope.analysis.accounting import feed_forward as ff
from stepscope.analysis.accounting.data_parallel import smallest_batch
from stepscope.analysis.accounting.sheet import Calculation, Sheet

_PASSES = ("bwd", "fwd")


def _work(sheet: Sheet) -> None:
    sheet.inputs.divide("fsdp", "tokens")
    sheet.given("B", "D", "D_FF", "N_FSDP", "C", "W")
    layers = ff.times_layers(sheet)
    sheet.part("a", "How many FLOPs does a device compute in the backward and the forward pass?")
    ff.flops(sheet, layers, "N_FSDP", _PASSES)
    sheet.answer(
        "flops",
        "Backward {F_bwd:f} = {F_bwd}: six matmuls on B/N_FSDP rows with the gathered weights."
        " Forward {F_fwd:f} = {F_fwd}: three of them.",
    )
    sheet.part("b", "How long does the communication of the two passes take?")
    ff.weights(sheet, layers)
    ff.sent(sheet, "bytes_fwd", "S", "N_FSDP", 1, "all-gather of the weights")
    ff.sent(
        sheet, "bytes_bwd", "S", "N_FSDP", 2, "all-gather of weights, reduce-scatter of gradients"
    )
    for one, factor in (("bwd", 12), ("fwd", 6)):
        form = f"{layers}{factor}*(N_FSDP-1)/N_FSDP*D*D_FF/W"
        sheet.let(f"T_{one}", f"bytes_{one}/W", "s", closed=form)
    sheet.answer(
        "communication",
        "Backward {T_bwd:f} = {T_bwd}: weights are gathered and gradients reduce-scattered, and a"
        " device sends {bytes_bwd}. Forward {T_fwd:f} = {T_fwd}: the all-gather, {bytes_fwd}.",
    )
    sheet.part("c", "Up to how many devices is each pass not communication-bound?")
    ff.compute_times(sheet, _PASSES)
    hidden = [
        sheet.check(f"T_{one} <= T_math_{one}", f"{ff.PASSES[one][2]} pass") for one in _PASSES
    ]
    sheet.check("N_FSDP-1 <= B*W/C", "both, multiplied by N_FSDP·W/(12·D·D_FF) or /(6·D·D_FF)")
    sheet.let("N_max", "1+B*W/C", "devices")
    sheet.answer(
        "limit",
        "N_FSDP ≤ {N_max:f} = {N_max} for both passes: the forward pass has half the FLOPs and half"
        " the communication of the backward pass.",
        compute_bound=all(hidden),
    )
    smallest_batch(sheet, "N_FSDP")
    ff.memory(sheet, layers, "/N_FSDP", "/N_FSDP", "")


CALCULATION = Calculation(
    "fsdp_calcs", "Fully sharded data parallelism", "2026", {**ff.LAYER, "fsdp": 8}, _work
)
