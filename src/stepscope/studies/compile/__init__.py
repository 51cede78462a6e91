"""The compile study: gain, compile time and graph breaks of torch.compile.

    stepscope run compile --part model --size small xl --dtype bfloat16
    stepscope run compile --part attention --head-dim 64 --attention-context 1024 4096
    stepscope run compile --part trace --device cpu      # graphs and breaks, nothing is compiled

Every case has its own process and cache folder. The first step compiles with an empty cache (cold).
After warm-up, eager and compiled steps are timed interleaved. Then another process compiles the
same case from the filled cache (warm). Graph breaks and recompilations are counted with their
reasons, and a recompilation during timing is reported.

On one H200 a case of `attention` takes 15 to 25 s and a case of `model` 40 to 120 s, depending on
size and scope; max-autotune takes several minutes.
"""

from __future__ import annotations

import itertools
from typing import Any

from stepscope.model.config import precision
from stepscope.studies.base import Study
from stepscope.studies.compile.cases import (
    AttentionCase,
    CompileCase,
    CompileFlags,
    ModelCase,
    TraceCase,
)
from stepscope.training.workload import case_of, workloads


class Compile(Study[CompileFlags, CompileCase]):
    name = "compile"
    title = "torch.compile"
    question = (
        "What does compiling gain for attention alone and for a full step, how long does it take"
        " before the first step, and where does the graph break?"
    )
    examples = (
        "stepscope run compile --part model --size small medium large --dtype float32 bfloat16",
        "stepscope run compile --part model --compile model --compile-mode reduce-overhead"
        " max-autotune",
        "stepscope run compile --part attention --head-dim 64 --attention-context 1024 4096"
        " --causal",
        "stepscope run compile --part trace --size tiny --context 64 --device cpu",
    )
    flags = CompileFlags
    case = CompileCase
    fresh_process = True

    def cases(self, flags: CompileFlags) -> tuple[CompileCase, ...]:
        effort: dict[str, Any] = {
            name: getattr(flags, name) for name in ("warmup", "rounds", "warm")
        }
        models = tuple(workloads(flags, ("train-step",)))
        cases: list[CompileCase] = []
        if "trace" in flags.part:
            cases += [case_of(model, TraceCase, **effort) for model in models]
        if "attention" in flags.part:
            cases += [
                AttentionCase(
                    attention="reference",
                    batch=flags.sequences,
                    heads=1,
                    seq=seq,
                    head=head,
                    dtype=precision(dtype).name,
                    causal=flags.causal,
                    mode="both",
                    **effort,
                )
                for dtype, seq, head in itertools.product(
                    flags.dtype, flags.attention_context, flags.head_dim
                )
            ]
        if "model" in flags.part:
            cases += [case_of(model, ModelCase, **effort) for model in models]
        return tuple(cases)


STUDY = Compile()
