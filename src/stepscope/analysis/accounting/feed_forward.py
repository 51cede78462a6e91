"""A gated feed-forward layer, the subject of the 2026 calculations.

x₁ = x·W₁, x₂ = x·W₂, z = f(x₁)∗x₂, y = z·W₃, with x of B rows (tokens) and weights, gradients and
activations of two bytes. A pass communicates while it computes, so it is bound by the longer.
"""

from __future__ import annotations

from stepscope.analysis.accounting.sheet import Sheet

LAYER = {
    "batch": 256,
    "context": 2048,
    "d_model": 2560,
    "d_ff": 10240,
    "layers": 1,
    "bandwidth_gbs": 450,
    "tflops": 989,
}
"""The xl layer of 2026; H100 by its data sheet: dense bfloat16, NVLink in one direction."""

PASSES = {"fwd": (3, 6, "forward"), "bwd": (6, 12, "backward")}
"""Matmuls of a pass, its FLOPs over B·D·D_FF, and its name."""

_WHY = {
    "fwd": "the matmuls with W₁, W₂ and W₃",
    "bwd": "two matmuls per weight: gradients of its input and of itself",
}


def times_layers(sheet: Sheet) -> str:
    """The factor of the layers in a formula, left out for the one layer of the course."""
    if sheet.inputs.layers == 1:
        return ""
    sheet.given("L")
    return "L*"


def flops(sheet: Sheet, layers: str, shards: str, passes: tuple[str, ...]) -> None:
    """FLOPs of a device; `shards` divides every matmul."""
    sheet.let("F_matmul", f"2*B*D*D_FF/{shards}", "FLOP", "one matmul: its share of 2·B·D·D_FF")
    for one in passes:
        matmuls, factor, _ = PASSES[one]
        sheet.let(
            f"F_{one}",
            f"{layers}{matmuls}*F_matmul",
            "FLOP",
            _WHY[one],
            closed=f"{layers}{factor}*B*D*D_FF/{shards}",
        )


def weights(sheet: Sheet, layers: str, divided: str = "") -> None:
    sheet.let("S", f"{layers}3*2*D*D_FF{divided}", "B", "three weights of D·D_FF, two bytes each")


def sent(sheet: Sheet, name: str, size: str, group: str, times: int, why: str) -> None:
    """Bytes that a device sends in ring collectives: a factor `times`, 1 for an all-gather or a
    reduce-scatter of `size` bytes, 2 for an all-reduce."""
    factor = "" if times == 1 else f"{times}*"
    sheet.let(name, f"{factor}({group}-1)/{group}*{size}", "B", why)


def compute_times(sheet: Sheet, passes: tuple[str, ...]) -> None:
    for one in passes:
        sheet.let(f"T_math_{one}", f"F_{one}/C", "s", f"compute of the {PASSES[one][2]} pass")


def memory(sheet: Sheet, layers: str, state: str, rows: str, inner: str) -> None:
    """Memory of a device. `state` divides the parameters, `rows` the tokens, `inner` the columns
    of the hidden activations."""
    sheet.part("memory", "How much memory does a device need?")
    sheet.let("P", f"{layers}3*D*D_FF", "", "parameters")
    sheet.let(
        "M_state",
        f"16*P{state}",
        "B",
        "float32 weights, gradients, two AdamW moments",
    )
    sheet.let(
        "M_act",
        f"{layers}2*B{rows}*(D+3*D_FF{inner})",
        "B",
        "saved for backward: x, x₁, x₂ and z, two bytes each",
    )
    sheet.let("M_total", "M_state+M_act", "B")
    sheet.answer(
        "memory",
        "A device stores {M_state} of weights, gradients and optimizer state ({M_state:f}) and"
        " {M_act} of activations ({M_act:f}): {M_total}.",
    )
