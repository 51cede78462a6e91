"""Numerics of FP8 training: can this model be trained with FP8 linear layers?

    stepscope run fp8 --size small
    stepscope run fp8 --model package.module:build

A bfloat16 training is observed: at some of its steps the inputs, weights and output gradients of
every eligible linear layer are cast to FP8, and its three GEMMs are compared with float64, next to
bfloat16's own error. Then the model is trained twice from the same weights on the same data, in
bfloat16 and with FP8 linear layers. Without an FP8 kernel for the device the rounding of FP8 is
emulated: that answers the question of numerics, not of speed.
"""

from __future__ import annotations

from stepscope.studies.base import Study
from stepscope.studies.fp8.cases import Fp8Case, Fp8Flags, cases_of


class Fp8(Study[Fp8Flags, Fp8Case]):
    name = "fp8"
    title = "FP8"
    question = (
        "Can this model be trained in FP8: what do the casts and the GEMMs of each layer lose, is"
        " the loss the same, and which layers should stay in bfloat16?"
    )
    examples = (
        "stepscope run fp8 --size tiny --device cpu",
        "stepscope run fp8 --size small --context 512 --steps 300 --seeds 3",
        "stepscope run fp8 --model package.module:build --scaling rowwise",
    )
    on_cpu = "quick"
    flags = Fp8Flags
    case = Fp8Case

    def cases(self, flags: Fp8Flags) -> tuple[Fp8Case, ...]:
        return tuple(cases_of(flags))


STUDY = Fp8()
