"""docs/cs336.md: every problem of the CS336 systems assignment, its command and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepscope.records.jsonl import read_records
from stepscope.report.blocks import Finding, Section
from stepscope.studies.page import study_sections


class Problem(NamedTuple):
    """A problem by its name in the assignment, and where Stepscope answers it."""

    name: str
    command: str
    records: str
    """The file under results/ that the quoted answer comes from."""
    study: str
    finding: str
    """The code of the finding that answers it."""
    figure: str
    """The beginning of the name of the table or figure that shows it."""


PROBLEMS = (
    Problem("benchmarking_script", "stepscope run benchmark --size small --context 128",
            "h200", "benchmark", "benchmark.backward-over-forward", "benchmark-times"),
    Problem("nsys_profile", "stepscope run profile --size small --context 128",
            "profile_h200", "profile", "profile.top-kernel", "profile-top"),
    Problem("mixed_precision_accumulation", "stepscope run accumulation",
            "accumulation_h200", "accumulation", "accumulation.sums", "accumulation-sums"),
    Problem("benchmarking_mixed_precision",
            "stepscope run benchmark --size small --context 128 --dtype float32 bfloat16",
            "h200", "benchmark", "benchmark.dtype-gain", "benchmark-times"),
    Problem("benchmarking_mixed_precision (dtypes under autocast)", "stepscope run autocast",
            "autocast_h200", "autocast", "autocast.dtypes", "autocast-formats"),
    Problem("memory_profiling", "stepscope run memory --size small --context 128",
            "memory_h200", "memory", "memory.account", "memory-course"),
    Problem("gradient checkpointing", "stepscope run checkpointing --size small --context 128",
            "checkpointing_h200", "checkpointing", "checkpointing.saving", "checkpointing-pareto"),
    Problem("pytorch_attention", "stepscope run attention",
            "attention_h200", "attention", "attention.memory-growth", "attention-times"),
    Problem("torch_compile", "stepscope run compile",
            "compile_h200", "compile", "compile.gain", "compile-times"),
    Problem("flash_forward", "stepscope run flash --attention tiled triton --context 512",
            "flash_h200", "flash", "flash.accuracy", "flash-errors"),
    Problem("flash_backward", "stepscope run flash --attention tiled triton --context 512",
            "flash_h200", "flash", "flash.saved", "flash-errors"),
    Problem("flash_benchmarking", "stepscope run flash",
            "flash_h200", "flash", "flash.highest-rate", "flash-rate"),
    Problem("leaderboard (attention)", "stepscope run flash --part race",
            "flash-race_h200", "flash", "flash.leaderboard-shape", "flash-race"),
    Problem("leaderboard (training step)", "stepscope run step --part race",
            "step_h200", "step", "step.race-faster", "step-speed"),
    Problem("distributed_communication_single_node", "stepscope run allreduce --ranks 2",
            "parallel_cpu", "allreduce", "allreduce.compared", "allreduce-times"),
    Problem("naive_ddp", "stepscope run ddp --ranks 2",
            "parallel_cpu", "ddp", "ddp.against-torch", "ddp-steps"),
    Problem("naive_ddp_benchmarking", "stepscope run ddp --ranks 2",
            "parallel_cpu", "ddp", "ddp.hidden", "ddp-phases"),
    Problem("minimal_ddp_flat_benchmarking", "stepscope run ddp --ranks 2",
            "parallel_cpu", "ddp", "ddp.fastest", "ddp-steps"),
    Problem("ddp_overlap_individual_parameters", "stepscope run ddp --ranks 2",
            "parallel_cpu", "ddp", "ddp.hidden", "ddp-timeline"),
    Problem("ddp_overlap_individual_parameters_benchmarking",
            "stepscope run ddp --ranks 2",
            "parallel_cpu", "ddp", "ddp.hidden", "ddp-timeline"),
    Problem("ddp_overlap_bucketed", "stepscope run ddp --ranks 2",
            "parallel_cpu", "ddp", "ddp.fastest", "ddp-steps"),
    Problem("ddp_overlap_bucketed_benchmarking",
            "stepscope run ddp --bucket-mb 1 10 100 --ranks 2",
            "parallel_cpu", "ddp", "ddp.fastest", "ddp-steps"),
    Problem("communication_accounting", "stepscope run rehearsal",
            "parallel_cpu", "rehearsal", "rehearsal.communication-bound", "rehearsal-closed-forms"),
    Problem("optimizer_state_sharding", "stepscope run sharding --ranks 2",
            "parallel_cpu", "sharding", "sharding.share", "sharding-ways"),
    Problem("optimizer_state_sharding_accounting", "stepscope run sharding --ranks 2",
            "parallel_cpu", "sharding", "sharding.stage-1", "sharding-memory"),
    Problem("FSDP", "stepscope run fsdp --ranks 2",
            "parallel_cpu", "fsdp", "fsdp.share", "fsdp-memory"),
)  # fmt: skip

_INTRODUCTION = (
    "Each problem of the 2025 and 2026 systems assignments, the command that answers it on the"
    " machine in front of you, the table or figure of the page to look at, and the answer in the"
    " committed records. The commands run on a GPU and on a CPU, where a study with longer defaults"
    " takes the sizes of the quick preset. Generated from `results/` by `python"
    " scripts/make_docs.py`.\n\n"
    "A language model of classes of your own, as the first assignment asks for, becomes faster by"
    " one line: [examples/cs336_lm.py](../examples/cs336_lm.py), [accelerate](accelerate.md)."
)


def course_page(results: Path) -> str:
    loaded: dict[str, dict[str, Section]] = {}
    parts = ["# CS336: from the assignment to the answer", _INTRODUCTION]
    for problem in PROBLEMS:
        if problem.records not in loaded:
            records = read_records(results / f"{problem.records}.jsonl")
            loaded[problem.records] = {one.name: one for one in study_sections(records)}
        section = loaded[problem.records][problem.study]
        parts += [
            f"## {problem.name}",
            f"```sh\n{problem.command}\n```",
            f"On the page: `{figure_name(problem, section)}`."
            f" In `results/{problem.records}.jsonl`:",
            f"> {answer(problem, section).sentence}",
        ]
    return "\n\n".join(parts) + "\n"


def answer(problem: Problem, section: Section) -> Finding:
    return next(
        block
        for block in section.blocks
        if isinstance(block, Finding) and block.code == problem.finding
    )


def figure_name(problem: Problem, section: Section) -> str:
    names: Sequence[str] = [one.name for one in section.blocks if not isinstance(one, Finding)]
    return next(name for name in names if name.startswith(problem.figure))
