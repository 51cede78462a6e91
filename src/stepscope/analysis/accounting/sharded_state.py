"""`optimizer_state_sharding_accounting` and `fsdp_accounting`: memory and communication of the
training state of a Transformer LM, in float32."""

from __future__ import annotations

from stepscope.analysis.accounting.sheet import Calculation, Sheet

_MODEL = {"d_model": 2560, "d_ff": 10240, "layers": 32, "vocab": 10_000, "fsdp": 2}
"""The xl model of 2026 on two devices."""


def _parameters(sheet: Sheet) -> None:
    sheet.let("P_block", "4*D**2+3*D*D_FF", "", "attention projections and feed-forward layer")
    sheet.let("P_norms", "(2*L+1)*D", "", "two norms per block and the last one")
    sheet.let("P", "2*V*D+L*P_block+P_norms", "", "parameters: embedding, head, blocks, norms")


def _optimizer_state(sheet: Sheet) -> None:
    sheet.given("D", "D_FF", "L", "V", "N=N_FSDP")
    sheet.part("a", "How much memory does the training state take at each moment of a step?")
    _parameters(sheet)
    sheet.let("M_init", "4*P", "B", "after initialization: float32 weights")
    sheet.let("M_plain", "4*P+4*P+8*P", "B", "before and after a step: gradients and moments, too")
    sheet.let("M_sharded", "4*P+4*P+8*P/N", "B", "each rank has the moments of its share")
    sheet.let("saved", "M_plain-M_sharded", "B", closed="8*P*(N-1)/N")
    sheet.answer(
        "memory",
        "{M_init} of weights after initialization, with and without sharding. Before the update and"
        " after it, {M_plain} without and {M_sharded} with sharding: 4·P bytes of weights, 4·P of"
        " gradients and 8·P of moments, of which a rank keeps 1/N. Activations are the same."
        " `stepscope run sharding` measures it.",
    )
    sheet.part("c", "How does it differ from ZeRO stage 1?")
    sheet.let("bytes_here", "3*(N-1)/N*4*P", "B", "all-reduce of gradients, broadcast of weights")
    sheet.let("bytes_zero", "2*(N-1)/N*4*P", "B", "reduce-scatter, all-gather")
    sheet.answer(
        "zero",
        "A rank sends {bytes_here} instead of {bytes_zero} ({bytes_here:f} against {bytes_zero:f}):"
        " ZeRO stage 1 reduces only the gradients that a rank updates. It divides the state element"
        " by element, here full tensors are assigned to ranks, so shares may be unequal.",
    )


def _fsdp(sheet: Sheet) -> None:
    sheet.inputs.divide("fsdp", "tokens")
    sheet.given("D", "D_FF", "L", "V", "N=N_FSDP", "B", "C", "W")
    sheet.part("a", "How much does FSDP lower the peak, compared with a sharded optimizer?")
    _parameters(sheet)
    sheet.let("M_plain", "16*P", "B", "weights, gradients, two moments in float32")
    sheet.let("M_optimizer", "8*P+8*P/N", "B", "moments sharded")
    sheet.let("M_FSDP", "16*(P-P_norms)/N+16*P_norms", "B", "all sharded but the norms")
    sheet.let("saved", "M_optimizer-M_FSDP", "B", "below a sharded optimizer")
    sheet.let("saved_plain", "M_plain-M_FSDP", "B", "below plain data parallelism")
    sheet.answer(
        "memory",
        "{saved}: the state takes {M_FSDP} instead of {M_optimizer}, because 8·P bytes of weights"
        " and gradients are sharded, too; {saved_plain} below plain data parallelism ({M_plain})."
        " Activations are the same, and buffers of gathered weights are left out.",
    )
    sheet.part("b", "Does the all-gather of a block finish within the forward pass of another?")
    sheet.let("S", "2*P_block", "B", "weights of a block in a 16-bit compute dtype")
    sheet.let("T_gather", "(N-1)/N*S/W", "s", "ring all-gather")
    sheet.let("T_fwd", "2*P_block*(B/N)/C", "s", "matmuls of a block with its weights")
    hidden = sheet.check("T_gather <= T_fwd")
    sheet.let("B_min", "(N-1)*C/W", "tokens", "the inequality, solved for B")
    verdict = "does" if hidden else "does not"
    sheet.answer(
        "gather",
        f"By the data sheet it {verdict}: "
        "{T_gather} against {T_fwd} of compute, hidden from B ≥ {B_min:f} = {B_min} on."
        " `stepscope run fsdp` measures it.",
        hidden=hidden,
    )


OPTIMIZER = Calculation(
    "optimizer_state_sharding_accounting",
    "Optimizer state sharding",
    "2025, 2026",
    _MODEL,
    _optimizer_state,
)
FSDP = Calculation(
    "fsdp_accounting",
    "FSDP: memory and all-gathers",
    "2026",
    {**_MODEL, "batch": 8, "context": 512, "bandwidth_gbs": 450, "tflops": 989},
    _fsdp,
)
