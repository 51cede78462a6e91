"""`data_parallel_calcs`: gradients of a feed-forward layer are averaged by a ring all-reduce."""

from __future__ import annotations

from stepscope.analysis.accounting import feed_forward as ff
from stepscope.analysis.accounting.sheet import Calculation, Sheet


def _work(sheet: Sheet) -> None:
    sheet.inputs.divide("dp", "tokens")
    sheet.given("B", "D", "D_FF", "N_DP", "C", "W")
    layers = ff.times_layers(sheet)
    sheet.part("a", "How many FLOPs does a device compute in the backward pass?")
    ff.flops(sheet, layers, "N_DP", ("bwd",))
    sheet.answer(
        "flops",
        "{F_bwd:f} = {F_bwd}: six matmuls on a device's B/N_DP rows, two for each of the three"
        " weights.",
    )
    sheet.part("b", "How long does the communication of the backward pass take?")
    ff.weights(sheet, layers)
    ff.sent(sheet, "bytes", "S", "N_DP", 2, "ring all-reduce: reduce-scatter, then all-gather")
    form = f"{layers}12*(N_DP-1)/N_DP*D*D_FF/W"
    sheet.let("T_comm", "bytes/W", "s", "every device sends at the same time", closed=form)
    sheet.answer(
        "communication",
        "{T_comm:f} = {T_comm}: the gradients of the three weights, {S}, are all-reduced, and each"
        " device sends {bytes}.",
    )
    sheet.part("c", "Up to how many devices is the backward pass not communication-bound?")
    ff.compute_times(sheet, ("bwd",))
    hidden = sheet.check("T_comm <= T_math_bwd", "communication overlaps with compute")
    sheet.check("12*(N_DP-1)/N_DP*D*D_FF/W <= 12*B*D*D_FF/(N_DP*C)", "in the given symbols")
    sheet.check("N_DP-1 <= B*W/C", "multiplied by N_DP·W/(12·D·D_FF)")
    sheet.let("N_max", "1+B*W/C", "devices")
    sheet.answer(
        "limit",
        "N_DP ≤ {N_max:f} = {N_max}: both times shrink with 1/N_DP, but the communication has the"
        " factor N_DP − 1, and its bytes do not depend on B.",
        compute_bound=hidden,
    )
    smallest_batch(sheet, "N_DP")
    ff.memory(sheet, layers, "", "/N_DP", "")


def smallest_batch(sheet: Sheet, group: str) -> None:
    """The batch at which weights of the full layer are communicated within the compute."""
    sheet.part("batch", "From which batch on does compute hide the communication?")
    sheet.let("B_min", f"({group}-1)*C/W", "tokens", "the inequality, solved for B")
    sheet.let("B_device", f"B_min/{group}", "tokens", "of one device")
    sheet.answer(
        "batch",
        "B ≥ {B_min:f} = {B_min} on {" + group + "}, which is {B_device} per device; with many"
        " devices it tends to C/W per device.",
    )


CALCULATION = Calculation(
    "data_parallel_calcs", "Data parallelism", "2026", {**ff.LAYER, "dp": 8}, _work
)
