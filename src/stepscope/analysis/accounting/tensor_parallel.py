"""`tp_calcs`: W₁ and W₂ are sharded by columns, W₃ by rows; activations are all-reduced."""

from __future__ import annotations

from stepscope.analysis.accounting import feed_forward as ff
from stepscope.analysis.accounting.sheet import Calculation, Sheet

_PASSES = ("fwd", "bwd")
_BACKWARD = (
    ("dz⁽ⁱ⁾ = dy·W₃⁽ⁱ⁾ᵀ", "dy is the same on all devices; the shard of W₃ gives a shard of dz"),
    ("dx₂⁽ⁱ⁾ = dz⁽ⁱ⁾ ∗ f(x₁⁽ⁱ⁾)", "elementwise, so local"),
    ("dx₁⁽ⁱ⁾ = dz⁽ⁱ⁾ ∗ f′(x₁⁽ⁱ⁾) ∗ x₂⁽ⁱ⁾", "elementwise, so local"),
    ("dW₃⁽ⁱ⁾ = z⁽ⁱ⁾ᵀ·dy", "the gradient of the own shard, complete"),
    ("dW₂⁽ⁱ⁾ = xᵀ·dx₂⁽ⁱ⁾", "the same; x is the same on all devices"),
    ("dW₁⁽ⁱ⁾ = xᵀ·dx₁⁽ⁱ⁾", ""),
    ("dx⁽ⁱ⁾ = dx₁⁽ⁱ⁾·W₁⁽ⁱ⁾ᵀ + dx₂⁽ⁱ⁾·W₂⁽ⁱ⁾ᵀ", "a partial sum over the columns of the shard"),
    ("dx = all-reduce(dx⁽ⁱ⁾)", "the only communication"),
)


def _work(sheet: Sheet) -> None:
    sheet.inputs.divide("tp", "d_ff")
    sheet.given("B", "D", "D_FF", "N_TP", "C", "W")
    layers = ff.times_layers(sheet)
    sheet.part("a", "What is the backward pass of a device, given dy of B × D?")
    for equation, why in _BACKWARD:
        sheet.equation(equation, why)
    sheet.answer(
        "backward",
        "The sharded activations and weights stay local, every device gets the gradients of its own"
        " shards, and one all-reduce of the partial sums gives dx.",
    )
    sheet.part("b", "How many FLOPs does a device compute in the two passes?")
    ff.flops(sheet, layers, "N_TP", _PASSES)
    sheet.answer(
        "flops",
        "Forward {F_fwd:f} = {F_fwd}: three matmuls on all B rows with 1/N_TP of each weight."
        " Backward {F_bwd:f} = {F_bwd}: six of them.",
    )
    sheet.part("c", "How long does the communication of the two passes take?")
    sheet.let("S", f"{layers}2*B*D", "B", "y, or dx, in two bytes")
    ff.sent(sheet, "bytes", "S", "N_TP", 2, "ring all-reduce of partial sums, once in each pass")
    form = f"{layers}4*(N_TP-1)/N_TP*B*D/W"
    sheet.let("T_comm", "bytes/W", "s", closed=form)
    sheet.answer(
        "communication",
        "{T_comm:f} = {T_comm} in each pass: the forward pass all-reduces y, the backward pass dx,"
        " both of B × D; a device sends {bytes}.",
    )
    sheet.part("d", "Up to how many devices is each pass not communication-bound?")
    ff.compute_times(sheet, _PASSES)
    hidden = [
        sheet.check(f"T_comm <= T_math_{one}", f"{ff.PASSES[one][2]} pass") for one in _PASSES
    ]
    sheet.check("N_TP-1 <= 3*D_FF*W/C", "backward, multiplied by N_TP·W/(4·B·D)")
    sheet.check("N_TP-1 <= 3/2*D_FF*W/C", "forward: half the FLOPs, the same communication")
    sheet.let("N_bwd", "1+3*D_FF*W/C", "devices")
    sheet.let("N_fwd", "1+3/2*D_FF*W/C", "devices")
    sheet.answer(
        "limit",
        "Backward N_TP ≤ {N_bwd:f} = {N_bwd}; forward N_TP ≤ {N_fwd:f} = {N_fwd}. B cancels:"
        " compute and communication both grow with B.",
        compute_bound=all(hidden),
    )
    sheet.part("batch", "From which batch on does compute hide the communication?")
    sheet.let("D_FF_min", "2/3*(N_TP-1)*C/W", "", "the forward inequality, solved for D_FF")
    every = all(hidden)
    sheet.answer(
        "batch",
        f"At {'every' if every else 'no'} batch: "
        "both grow with B, so only D_FF ≥ {D_FF_min:f} = {D_FF_min} decides, and D_FF is"
        " {D_FF}.",
        every_batch=every,
    )
    ff.memory(sheet, layers, "/N_TP", "", "/N_TP")


CALCULATION = Calculation("tp_calcs", "Tensor parallelism", "2026", {**ff.LAYER, "tp": 4}, _work)
