"""What does torch.compile bring, what does it cost before the first step, and where does it break?

    stepscope run compile --part model --size small xl --dtype bfloat16
    stepscope run compile --part attention --head 64 --seq 1024 4096
    stepscope run compile --part trace --device cpu      # graphs and breaks, nothing is compiled

Every case has a process and a cache folder of its own. Its first step is compiled with the folder
empty (cold). Then, once everything is compiled, steps are timed, eager and compiled in turns; last,
another process compiles the same with the folder as the first one left it (warm). Graph breaks and
recompilations are counted and named, and one that happens while steps are timed is told.

On one H200: a cell of attention takes 15 to 25 s, of `model` 40 to 120 s by size and scope, with
max-autotune several minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.attention.workload import AttentionWorkload
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.workload import WorkloadFlags, workloads

Part = Literal["trace", "attention", "model"]
PARTS: tuple[Part, ...] = ("trace", "attention", "model")


class CompileFlags(WorkloadFlags, frozen=True, kw_only=True):
    """What to compile: every combination of the values is a case."""

    part: tuple[Part, ...] = PARTS
    """trace (graphs and breaks of a model, without compiling), attention (alone), model."""
    compile: tuple[str, ...] = ("block", "model")
    """What is compiled: block (each block alone), model (whole)."""
    head: tuple[int, ...] = (16, 32, 64, 128)
    """Head dimensions of attention alone."""
    seq: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    """Its sequence lengths."""
    sequences: int = 8
    """Its batch, with one head each."""
    causal: bool = False
    """Attention alone with a causal mask."""
    warmup: int = 3
    """Steps before the first sample, after compiling."""
    rounds: int = 10
    """Samples of each, eager and compiled in turns."""
    warm: bool = True
    """Compile a second time in another process, from the cache that the first left."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.warmup < 1:
            raise UsageError(
                f"rounds is {self.rounds} and warmup {self.warmup}", "both must be at least 1"
            )
        if "no" in self.compile:
            raise UsageError("compile is 'no'", "eager is measured beside: block, model or both")


class Compile(Study[CompileFlags, Any]):
    name = "compile"
    title = "torch.compile"
    question = (
        "What does compiling bring to attention alone and to a whole step, what does it cost"
        " before the first one, and where does the graph break?"
    )
    examples = (
        "stepscope run compile --part model --size small medium large --dtype float32 bfloat16",
        "stepscope run compile --part model --compile model --compile-mode reduce-overhead"
        " max-autotune",
        "stepscope run compile --part attention --head 64 --seq 1024 4096 --causal",
        "stepscope run compile --part trace --size tiny --context 64 --device cpu",
    )
    flags = CompileFlags
    fresh_process = True

    def cases(self, flags: CompileFlags) -> tuple[PlannedCase, ...]:
        made: list[PlannedCase] = []
        if "trace" in flags.part:
            made += self._models(flags, "trace")
        if "attention" in flags.part:
            made += self._attentions(flags)
        if "model" in flags.part:
            made += self._models(flags, "model")
        return tuple(made)

    def _models(self, flags: CompileFlags, kind: str) -> Iterator[PlannedCase]:
        for workload in workloads(flags, ("train-step",)):
            formats = workload.needs[:1]
            yield PlannedCase(
                study=self.name,
                key=f"{kind}_{workload.key}",
                config={"kind": kind} | msgspec.to_builtins(workload) | _effort(flags),
                needs=formats if kind == "trace" else workload.needs,
            )

    def _attentions(self, flags: CompileFlags) -> Iterator[PlannedCase]:
        for dtype, seq, head in itertools.product(flags.dtype, flags.seq, flags.head):
            work = AttentionWorkload(
                attention="reference", batch=flags.sequences, heads=1, seq=seq, head=head,
                dtype=precision(dtype).name, causal=flags.causal, mode="both",
            )  # fmt: skip
            yield PlannedCase(
                study=self.name,
                key=f"attention_{work.key}",
                config={"kind": "attention"} | msgspec.to_builtins(work) | _effort(flags),
                needs=(precision(dtype).compute, "compiler"),
            )

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.compile.measuring import measure_compile, measure_trace

        if config["kind"] == "trace":
            return measure_trace(config, bench)
        return measure_compile(config, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.compile.view import compile_blocks

        return compile_blocks(records)

    def presets(self, environment: Environment) -> Mapping[str, Sequence[CompileFlags]]:
        if environment.device_kind == "cpu":
            # Compiling takes longer here than all other studies together.
            quick = CompileFlags(
                part=("trace",), size=("tiny",), context=(64,), batch=(2,), compile=("model",)
            )
        else:
            quick = CompileFlags(
                part=("trace", "model"),
                dtype=("bfloat16",),
                attention=("auto",),
                compile=("block",),
            )
        sizes = ("small", "medium", "large", "xl", "2.7b")
        models = CompileFlags(part=("model",), size=sizes, compile=("block",), warm=False, rounds=5)
        change = msgspec.structs.replace
        grid = CompileFlags(part=("attention",), warm=False)
        traced = CompileFlags(part=("trace",), attention=("reference", "auto"))
        published = (
            traced,
            change(models, size=("small",), compile=("block", "model"), warm=True),
            change(models, size=("small",), dtype=("bfloat16",), compile=("model",), warm=True,
                   compile_mode=("default", "reduce-overhead", "max-autotune")),
            change(models, size=("xl", "2.7b")),
            change(grid, head=(64,)),
        )  # fmt: skip
        return {
            "quick": (quick,),
            "seeds": (models, grid),
            "cs336-2026": (change(models, size=("small", "medium", "large", "xl"), table="2026"),),
            "h200": published,
            "full": (*published, models, grid),
        }


def _effort(flags: CompileFlags) -> dict[str, Any]:
    return {"warmup": flags.warmup, "rounds": flags.rounds, "warm": flags.warm}


STUDY = Compile()
