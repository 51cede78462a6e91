"""`fsdp_tp_calcs`: weights sharded by tensor parallelism and again by FSDP, forward pass."""

from __future__ import annotations

from stepscope.analysis.accounting import feed_forward as ff
from stepscope.analysis.accounting.sheet import Calculation, Sheet


def _work(sheet: Sheet) -> None:
    sheet.inputs.divide("fsdp", "tokens")
    sheet.inputs.divide("tp", "d_ff")
    sheet.given("B", "D", "D_FF", "N_FSDP", "N_TP", "C", "W")
    layers = ff.times_layers(sheet)
    sheet.part("a", "How many FLOPs does a device compute in the forward pass?")
    ff.flops(sheet, layers, "(N_FSDP*N_TP)", ("fwd",))
    sheet.answer(
        "flops",
        "{F_fwd:f} = {F_fwd}: three matmuls on B/N_FSDP rows with 1/N_TP of each weight.",
    )
    sheet.part("b", "How long does the communication take if the two axes overlap?")
    ff.weights(sheet, layers, "/N_TP")
    ff.sent(sheet, "bytes_FSDP", "S", "N_FSDP", 1, "all-gather of the tensor-parallel shards")
    form = f"{layers}6*(N_FSDP-1)/(N_FSDP*N_TP)*D*D_FF/W"
    sheet.let("T_FSDP", "bytes_FSDP/W", "s", closed=form)
    sheet.let("S_y", f"{layers}2*B/N_FSDP*D", "B", "y of the device's rows, two bytes")
    ff.sent(sheet, "bytes_TP", "S_y", "N_TP", 2, "ring all-reduce of y over the TP axis")
    form = f"{layers}4*(N_TP-1)/(N_FSDP*N_TP)*B*D/W"
    sheet.let("T_TP", "bytes_TP/W", "s", closed=form)
    both = f"max({sheet.source('T_FSDP')}, {sheet.source('T_TP')})"
    sheet.let("T_comm", "max(T_FSDP, T_TP)", "s", "the axes overlap", closed=both)
    sheet.answer(
        "communication",
        "{T_comm:f} = max({T_FSDP}, {T_TP}) = {T_comm}: FSDP gathers the shard of a TP rank, and TP"
        " all-reduces the activations of an FSDP rank.",
    )
    sheet.part("c", "With overlap, up to how many devices is the forward pass compute-bound?")
    ff.compute_times(sheet, ("fwd",))
    hidden = sheet.check("T_comm <= T_math_fwd")
    sheet.check("N_FSDP-1 <= B*W/C", "T_FSDP ≤ T_math, multiplied by N_FSDP·N_TP·W/(6·D·D_FF)")
    sheet.check("N_TP-1 <= 3/2*D_FF*W/C", "T_TP ≤ T_math, multiplied by N_FSDP·N_TP·W/(4·B·D)")
    sheet.let("N_max", "(1+B*W/C)*(1+3/2*D_FF*W/C)", "devices", "each axis at its own limit")
    sheet.answer(
        "limit-max",
        "N ≤ {N_max:f} = {N_max}: the two conditions do not depend on each other, so both axes can"
        " be at their limits.",
        compute_bound=hidden,
    )
    _shared_network(sheet)
    _batch(sheet)
    ff.memory(sheet, layers, "/(N_FSDP*N_TP)", "/N_FSDP", "/N_TP")


def _shared_network(sheet: Sheet) -> None:
    sheet.part("d", "And if the collectives of the two axes share a network and do not overlap?")
    sheet.let("T_sum", "T_FSDP+T_TP", "s", "one after the other")
    hidden = sheet.check("T_sum <= T_math_fwd")
    sheet.let("p", "B*W/C", "", "limit of N_FSDP − 1 alone")
    sheet.let("q", "3/2*D_FF*W/C", "", "limit of N_TP − 1 alone")
    sheet.check("(N_FSDP-1)/p+(N_TP-1)/q <= 1", "T_sum ≤ T_math, divided by T_math")
    p, q = sheet.value("p"), sheet.value("q")
    # With a + b fixed, a·b is largest at a = b: N_FSDP/p = N_TP/q = (1 + 1/p + 1/q)/2.
    why = "N_FSDP/p + N_TP/q ≤ 1 + 1/p + 1/q; the product is largest where both terms are equal"
    if (1 + 1 / p + 1 / q) * min(p, q) >= 2:
        sheet.let("N_FSDP_best", "p/2*(1+1/p+1/q)", "devices", why)
        sheet.let("N_TP_best", "q/2*(1+1/p+1/q)", "devices", "the same")
        form = "3/8*B*D_FF*(W/C+1/B+2/(3*D_FF))**2"
        sheet.let("N_max_sum", "N_FSDP_best*N_TP_best", "devices", closed=form)
    else:
        why = "equal terms would give an axis of less than one device: use the other axis alone"
        sheet.let("N_max_sum", "1+max(p, q)", "devices", why, closed="1+max(B, 3/2*D_FF)*W/C")
    sheet.answer(
        "limit-sum",
        "N ≤ {N_max_sum:f} = {N_max_sum}: the best mesh gives each axis about half of the time that"
        " compute hides, and its size is about a quarter of that in (c)."
        if "N_FSDP_best" in sheet.names
        else "N ≤ {N_max_sum:f} = {N_max_sum}: one axis alone is the best.",
        compute_bound=hidden,
    )


def _batch(sheet: Sheet) -> None:
    sheet.part("batch", "From which batch on does compute hide the communication?")
    if sheet.check("N_TP-1 <= 3/2*D_FF*W/C", "TP at any batch"):
        sheet.let("B_max", "(N_FSDP-1)*C/W", "tokens", "`max` form: FSDP, solved for B")
        text = "`max` form: B ≥ {B_max:f} = {B_max}."
    else:
        text = "`max` form: at no batch, because TP alone takes longer than compute."
    if sheet.check("N_TP-1 < 3/2*D_FF*W/C", "TP leaves time for FSDP"):
        form = "(N_FSDP-1)*C/W/(1-(N_TP-1)*2*C/(3*D_FF*W))"
        sheet.let("B_sum", form, "tokens", "sum form: T_FSDP + T_TP ≤ T_math, solved for B")
        text += " Sum form: B ≥ {B_sum:f} = {B_sum}."
    else:
        text += " Sum form: at no batch."
    sheet.answer("batch", text)


CALCULATION = Calculation(
    "fsdp_tp_calcs", "FSDP × TP", "2026", {**ff.LAYER, "fsdp": 8, "tp": 4}, _work
)
