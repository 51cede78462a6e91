"""`communication_accounting`: the 2025 XXL model, feed-forward layers of two matmuls.

Notation and simplifications of the TPU Scaling Book (https://jax-ml.github.io/scaling-book): a
collective of S bytes takes S/W, without the factor (N − 1)/N, and an axis of the mesh that spans M
dimensions of the torus has M times the bandwidth.
"""

from __future__ import annotations

from stepscope.analysis.accounting.sheet import Calculation, Sheet

_DEFAULTS = {
    "batch": 1,
    "context": 2048,
    "d_model": 16384,
    "d_ff": 53248,
    "layers": 126,
    "gpu_gb": 80,
    "device_gb": 95,
    "fsdp": 16,
    "tp": 4,
    "fsdp_axes": 2,
    "tp_axes": 1,
    "bandwidth_gbs": 180,
    "tflops": 460,
}
"""The model, the H100 and the TPU v5p of the problem; the tokens of (a) and (b) are our choice."""


def _work(sheet: Sheet) -> None:
    sheet.inputs.divide("tp", "d_ff")
    sheet.given("D", "D_FF", "L", "B", "G", "H", "X=N_FSDP", "Y=N_TP", "M_X", "M_Y", "W", "C")
    _memory(sheet)
    _sharded(sheet)
    _compute_bound(sheet)
    _smaller_batches(sheet)


def _memory(sheet: Sheet) -> None:
    sheet.part("a", "How much memory do weights, gradients, optimizer state and activations take?")
    sheet.let("P", "2*D*D_FF*L", "", "parameters: two weights per block")
    sheet.let("M_state", "(4+4+8)*P", "B", "float32 weights, gradients, moments", closed="16*P")
    sheet.let("A_token", "2*(D+D_FF)*L", "B", "saved per token in BF16: the inputs of the matmuls")
    sheet.let("A", "B*A_token", "B", "of the batch", closed="2*B*(D+D_FF)*L")
    sheet.let("GPUs", "(M_state+A)/G", "")
    sheet.let("GPUs_state", "M_state/G", "", "the state alone")
    sheet.answer(
        "memory",
        "The state takes {M_state:f} = {M_state}, as much as {GPUs_state} GPUs of {G} have, and the"
        " activations {A_token} per token, {A} for {B}; together {GPUs} GPUs.",
    )


def _sharded(sheet: Sheet) -> None:
    sheet.part("b", "How many FSDP devices does it take for the memory to fit?")
    sheet.let("half", "A/2", "B", "every second layer's activations are sharded")
    fits = sheet.check("half < H", "what is not sharded has to fit")
    if fits:
        sheet.let("N_limit", "(M_state+half)/(H-half)", "", "(M_state + A/2)/N + A/2 < H, for N")
        sheet.let("N_state", "floor(M_state/H)+1", "devices", "without activations")
        sheet.let("N_FSDP", "floor(N_limit)+1", "devices", "the smallest integer above it")
        sheet.let("M_device", "(M_state+half)/N_FSDP+half", "B", "memory of a device")
        sheet.answer(
            "sharded",
            "(16·P + A/2)/N_FSDP + A/2 per device; it is below {H} from N_FSDP = {N_FSDP} on, with"
            " {M_device}; without activations, from {N_state} on.",
            fits=True,
        )
    else:
        sheet.answer(
            "sharded",
            "(16·P + A/2)/N_FSDP + A/2 per device; with {B} no N_FSDP suffices, because the half of"
            " the activations that is not sharded takes {half}.",
            fits=False,
        )


def _compute_bound(sheet: Sheet) -> None:
    sheet.part("c", "From which batch on is the forward pass compute-bound on X × Y devices?")
    sheet.let("T_math", "4*B*D*D_FF*L/(X*Y*C)", "s", "two matmuls per block")
    sheet.let("T_FSDP", "4*D*D_FF*L/(Y*W*M_X)", "s", "all-gather of two weights over X, BF16")
    sheet.let("T_TP", "4*B*D*L/(X*W*M_Y)", "s", "all-gather and reduce-scatter over Y, BF16")
    tensor = sheet.check("Y*C/(W*M_Y) <= D_FF", "T_TP ≤ T_math; B cancels")
    sheet.check("C/(W*M_X) <= B/X", "T_FSDP ≤ T_math, for the tokens B of above")
    if not tensor:
        sheet.answer(
            "batch",
            "At no batch: tensor parallelism over Y = {Y} takes longer than compute for any B.",
            compute_bound=False,
        )
        return
    sheet.let("B_shard", "C/(W*M_X)", "tokens", "per FSDP shard, which Y devices share: B/X")
    sheet.let("B_device", "B_shard/Y", "tokens", "per device: B/(X·Y)", closed="C/(W*M_X*Y)")
    sheet.let("B_total", "X*B_shard", "tokens", "overall", closed="X*C/(W*M_X)")
    text = (
        "Axes overlap (`max`): B/X ≥ {B_shard:f} = {B_shard} per FSDP shard, {B_device} per device,"
        " {B_total} overall."
    )
    if sheet.check("Y*C/(W*M_Y) < D_FF", "TP leaves time for FSDP"):
        sum_form = "X*C/(W*M_X)/(1-Y*C/(D_FF*W*M_Y))"
        sheet.let("B_sum", sum_form, "tokens", "T_FSDP + T_TP ≤ T_math, solved for B")
        text += " If they do not (sum), {B_sum} overall."
    sheet.answer("batch", text, compute_bound=True)


def _smaller_batches(sheet: Sheet) -> None:
    sheet.part("d", "What else lowers the batch while compute stays the bound?")
    sheet.let("now", "C/(W*M_X*Y)", "tokens", "per device, as in (c)")
    sheet.let("Y_max", "D_FF*W*M_Y/C", "", "more tensor parallelism, up to T_TP = T_math")
    sheet.let(
        "B_Y", "now*Y/Y_max", "tokens", "per device at Y_max", closed="C**2/(W**2*M_X*M_Y*D_FF)"
    )
    sheet.let("B_fp8", "now/2", "tokens", "weights gathered in 8 bits instead of 16")
    sheet.let("B_axes", "now*M_X/(M_X+1)", "tokens", "one more torus dimension for FSDP")
    sheet.let("B_PP", "now/4", "tokens", "4 pipeline stages: as many tokens, 4 times the devices")
    sheet.let("bubble", "(4-1)/(16+4-1)", "", "their idle share with 16 microbatches")
    sheet.answer(
        "smaller-batch",
        "The bound per device is {now:f} = {now}. (1) More TP: it falls with 1/Y down to"
        " {B_Y:f} = {B_Y} at Y = {Y_max}, where TP becomes the bound. (2) Fewer bytes: weights"
        " gathered in FP8 or INT8, as in ZeRO++ (arXiv:2306.10209), halve it to {B_fp8}. (3) More"
        " links for FSDP, M_X + 1, give {B_axes}. (4) Pipeline stages divide the layers, not the"
        " batch: each of 4 stages processes all tokens, {B_PP} per device, for a bubble of {bubble}"
        " with 16 microbatches (GPipe, arXiv:1811.06965). (5) Gathering the weights of a step once"
        " for several microbatches (ZeRO stage 2) or within a node only (ZeRO++) trades memory for"
        " communication. (6) All of it needs overlap: prefetching the next all-gather, and TP"
        " matmuls in chunks that overlap with their collectives.",
    )


CALCULATION = Calculation(
    "communication_accounting", "XXL: memory and FSDP × TP", "2025", _DEFAULTS, _work
)
