"""`pipeline`: feed-forward layers divided into stages, microbatches passed from one to the next."""

from __future__ import annotations

from stepscope.analysis.accounting import feed_forward as ff
from stepscope.analysis.accounting.sheet import Calculation, Sheet

_DEFAULTS = {**ff.LAYER, "layers": 32, "pp": 4, "microbatches": 16}


def _work(sheet: Sheet) -> None:
    sheet.inputs.divide("pp", "layers")
    sheet.inputs.divide("microbatches", "batch")
    sheet.given("B", "D", "D_FF", "L", "N_PP", "M", "C", "W")
    sheet.part("bubble", "How long does a step take, and which share of it do stages idle?")
    sheet.let("t_fwd", "6*(B/M)*D*D_FF*L/N_PP/C", "s", "a stage's layers, one microbatch, forward")
    sheet.let("t_bwd", "2*t_fwd", "s", "backward: twice the FLOPs")
    sheet.let(
        "T_step",
        "(M+N_PP-1)*(t_fwd+t_bwd)",
        "s",
        "the last stage starts N_PP − 1 microbatches after the first; GPipe and 1F1B alike",
        closed="(M+N_PP-1)*18*(B/M)*D*D_FF*L/(N_PP*C)",
    )
    sheet.let("bubble", "(N_PP-1)/(M+N_PP-1)", "", "idle share of a stage: 1 − M·(t_fwd + t_bwd)/T")
    sheet.answer(
        "bubble", "{T_step:f} = {T_step}; a stage idles for {bubble:f} = {bubble} of the step."
    )
    sheet.part("communication", "How long does the communication take, and does compute hide it?")
    sheet.let("S", "2*(B/M)*D", "B", "activations of one microbatch between stages, two bytes")
    sheet.let("T_send", "S/W", "s", "to the next stage; gradients go back with the same size")
    sheet.let(
        "bytes", "2*M*S", "B", "sent by a device between two others in a step", closed="4*B*D"
    )
    hidden = sheet.check("T_send <= t_fwd", "one microbatch is sent while the next is computed")
    sheet.check("N_PP <= 3*D_FF*L*W/C", "multiplied by M·N_PP·W/(2·B·D)")
    sheet.let("N_max", "3*D_FF*L*W/C", "devices")
    sheet.answer(
        "communication",
        "A microbatch takes {T_send:f} = {T_send} to the next stage; a device sends {bytes} in a"
        " step. Compute hides it up to N_PP ≤ {N_max:f} = {N_max}.",
        compute_bound=hidden,
    )
    sheet.part("batch", "From which batch on does compute hide the communication?")
    sheet.let("M_min", "9*(N_PP-1)", "", "bubble ≤ 1/10, solved for M")
    sheet.answer(
        "batch",
        "Both grow with the batch, so it cancels. The batch has to provide the microbatches:"
        " M ≥ {M_min:f} = {M_min} for a bubble of at most 10 %.",
        every_batch=hidden,
    )
    sheet.part("memory", "How much memory does a device need?")
    sheet.let("M_state", "16*3*D*D_FF*L/N_PP", "B", "float32 weights, gradients, AdamW moments")
    sheet.let("A", "2*(B/M)*(D+3*D_FF)*L/N_PP", "B", "x, x₁, x₂, z of one microbatch and stage")
    sheet.let("M_GPipe", "M_state+M*A", "B", "all forward passes come first")
    sheet.let("M_1F1B", "M_state+min(M, N_PP)*A", "B", "the first stage is N_PP microbatches ahead")
    sheet.answer(
        "memory",
        "{M_state} of weights, gradients and optimizer state, and {A} of activations for each"
        " microbatch in flight: {M_GPipe} with GPipe, {M_1F1B} on the first stage with 1F1B.",
    )


CALCULATION = Calculation("pipeline", "Pipeline parallelism", "", _DEFAULTS, _work)
