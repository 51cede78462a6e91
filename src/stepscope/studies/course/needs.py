"""The cases that the problems need, as flags of studies: for a CPU, a GPU, and in a hurry.

A need is measured by the same runner as `stepscope run STUDY` with its flags, and the document
prints that command.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from stepscope.studies.base import PlannedCase
from stepscope.studies.course.problem import Edition, Flags
from stepscope.studies.registry import find_study

_BOTH = ("float32", "bfloat16")
_FEW = {"warmup": 2, "steps": 5, "min_seconds": 0.1}
_SIZES: Mapping[Edition, Flags] = {
    "2025": {"size": ("small", "medium", "large", "xl", "2.7b")},
    "2026": {"size": ("small", "medium", "large", "xl", "10b"), "table": "2026"},
}
_RANKED_XL: Mapping[Edition, Flags] = {
    "2025": {"size": ("xl",)},
    "2026": {"size": ("xl",), "table": "2026"},
}
_MESSAGES = (10**6, 10**7, 10**8)
_GRID = {"head_dim": (16, 32, 64, 128), "context": (256, 1024, 4096, 8192, 16384)}
_FLASH_GRID = {"part": ("grid",), "attention": ("triton", "reference"), "shape": ()}


class Need(NamedTuple):
    """Flags of one study for each kind of machine."""

    study: str
    quick: Flags
    """On a CPU, in seconds."""
    cpu: Flags
    """On a CPU without a hurry."""
    gpu: Flags
    """On a GPU: what the handout asks for."""
    quick_gpu: Flags
    records: str = ""
    """File of committed records in `results/`."""
    by_edition: Mapping[Edition, Flags] = {}
    """Further flags on a GPU: the sizes of an edition."""

    def flags(self, edition: Edition, device_kind: str, *, quick: bool) -> dict[str, Any]:
        if device_kind == "cpu":
            return dict(self.quick if quick else self.cpu)
        if quick:
            return dict(self.quick_gpu)
        return {**self.gpu, **self.by_edition.get(edition, {})}

    def command(self, edition: Edition, device_kind: str, *, quick: bool) -> str:
        """The command that measures the same cases."""
        words = ["stepscope", "run", self.study]
        for name, value in self.flags(edition, device_kind, quick=quick).items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{name.replace('_', '-')}")
            else:
                listed = value if isinstance(value, tuple) else (value,)
                words += [flag, *map(str, listed)]
        return shlex.join(words)

    def cases(
        self, edition: Edition, device_kind: str, *, quick: bool, lacks: Collection[str] = ()
    ) -> tuple[PlannedCase, ...]:
        study = find_study(self.study)
        flags = study.flags(**self.flags(edition, device_kind, quick=quick))
        return study.planned(flags, lacks)


NEEDS: dict[str, Need] = {
    "steps": Need(
        "benchmark",
        quick={"size": ("tiny", "mini"), "context": (128,), "batch": (2,)} | _FEW,
        cpu={"size": ("tiny", "mini", "midi", "small"), "context": (128,)},
        gpu={"context": (512,)},
        quick_gpu={"size": ("small", "medium"), "context": (128,)} | _FEW,
        by_edition=_SIZES,
        records="h200",
    ),
    "first steps": Need(
        "warmup",
        quick={"size": ("tiny",), "context": (64,), "steps": 8},
        cpu={"size": ("tiny", "mini", "small"), "context": (128,)},
        gpu={"context": (256,)},
        quick_gpu={"size": ("small",), "context": (256,), "steps": 8},
        by_edition=_SIZES,
        records="h200",
    ),
    "traces": Need(
        "profile",
        quick={"size": ("tiny", "mini"), "batch": (2,), "context": (64, 128, 256), "warmup": 1}
        | {"steps": 5, "traced": 2, "mode": ("forward", "train-step")},
        cpu={"size": ("mini", "small"), "context": (128, 256, 512), "steps": 5}
        | {"mode": ("forward", "train-step")},
        gpu={"context": (256, 512, 1024), "mode": ("forward", "train-step")},
        quick_gpu={"size": ("small",), "context": (128, 256, 512), "steps": 5}
        | {"mode": ("forward", "train-step"), "experiments": False},
        by_edition={
            "2025": {**_SIZES["2025"], "context": (128, 256, 512, 1024)},
            "2026": {"size": ("small", "xl"), "table": "2026"},
        },
        records="profile_h200",
    ),
    "sums": Need(
        "accumulation",
        quick={},
        cpu={},
        gpu={"format": ("float32", "tf32", "float16", "bfloat16")},
        quick_gpu={},
        records="accumulation_h200",
    ),
    "autocast": Need(
        "autocast",
        quick={"subject": ("toy", "tiny"), "context": 8},
        cpu={"subject": ("toy", "tiny"), "context": 64},
        gpu={"subject": ("toy", "small", "large"), "context": 256},
        quick_gpu={"subject": ("toy", "small"), "context": 256},
        records="autocast_h200",
    ),
    "both dtypes": Need(
        "benchmark",
        quick={"size": ("tiny", "mini"), "context": (64,), "batch": (2,), "dtype": _BOTH}
        | {"warmup": 1, "steps": 3, "min_seconds": 0.0},
        cpu={"size": ("tiny", "mini", "midi"), "context": (128,), "dtype": _BOTH},
        gpu={"context": (512,), "dtype": _BOTH},
        quick_gpu={"size": ("small", "medium"), "context": (128,), "dtype": _BOTH} | _FEW,
        by_edition=_SIZES,
        records="h200",
    ),
    "memory": Need(
        "memory",
        quick={"size": ("tiny",), "context": (64, 256), "batch": (2,), "dtype": _BOTH},
        cpu={"size": ("mini",), "context": (128, 512), "dtype": _BOTH},
        gpu={"dtype": _BOTH},
        quick_gpu={"size": ("small",), "context": (128, 512), "dtype": _BOTH, "snapshot": "no"},
        by_edition={
            "2025": {"size": ("2.7b",), "context": (128, 256, 512)},
            "2026": {"size": ("xl",), "table": "2026", "context": (128, 2048)},
        },
        records="memory_h200",
    ),
    "checkpoints": Need(
        "checkpointing",
        # Narrow and long, so that activations outweigh the weights, as in large models.
        quick={"size": ("tiny",), "layers": 8, "d_model": 64, "d_ff": 128, "heads": 2}
        | {"vocab": 128, "context": (128,), "batch": (2,), "steps": 3},
        cpu={"size": ("mini",), "context": (256,), "steps": 4},
        gpu={"size": ("xl",), "table": "2026", "context": (2048,), "dtype": ("bfloat16",)}
        | {"attention": ("sdpa",), "optimizer": ("torch-fused",)},
        quick_gpu={"size": ("small",), "context": (512,)},
        records="checkpointing_h200",
    ),
    "attention": Need(
        "attention",
        quick={"head_dim": (16, 64), "context": (256, 1024, 2048), "warmup": 1, "steps": 5},
        cpu=_GRID | {"context": (256, 1024, 4096), "warmup": 1, "steps": 5},
        gpu=_GRID | {"steps": 100},
        quick_gpu={"head_dim": (64, 128), "context": (256, 1024, 4096)},
        records="attention_h200",
    ),
    "compiled attention": Need(
        "compile",
        quick={"part": ("attention",), "head_dim": (64,), "attention_context": (256, 1024)}
        | {"warm": False, "rounds": 5},
        cpu={"part": ("attention",), "head_dim": (16, 64), "attention_context": (256, 1024, 4096)}
        | {"warm": False},
        gpu={"part": ("attention",), "warm": False},
        quick_gpu={"part": ("attention",), "head_dim": (64,), "attention_context": (1024, 4096)}
        | {"warm": False},
        records="compile_h200",
    ),
    "compiled model": Need(
        "compile",
        quick={"part": ("model",), "size": ("tiny",), "context": (64,), "batch": (2,)}
        | {"compile": ("model",), "warm": False, "rounds": 5},
        cpu={"part": ("model",), "size": ("tiny", "mini"), "context": (128,), "warm": False}
        | {"compile": ("model",)},
        gpu={"part": ("model",), "compile": ("model",), "warm": False},
        quick_gpu={"part": ("model",), "size": ("small",), "compile": ("block",), "warm": False},
        by_edition=_SIZES,
        records="compile_h200",
    ),
    "flash": Need(
        "flash",
        quick={"part": ("grid",), "attention": ("reference", "tiled"), "dtype": ("float32",)}
        | {"context": (128, 512), "head_dim": (16, 64), "shape": ()},
        cpu={"part": ("grid",), "attention": ("reference", "tiled"), "dtype": ("float32",)}
        | {"context": (128, 512, 2048), "head_dim": (16, 64), "shape": ()},
        gpu=_FLASH_GRID | {"attention": ("triton", "reference", "tiled")},
        quick_gpu=_FLASH_GRID
        | {"attention": ("triton", "reference", "tiled"), "context": (128, 1024, 4096)}
        | {"head_dim": (64,)},
        records="flash_h200",
    ),
    "attention race": Need(
        "flash",
        quick={"part": ("race",), "race": ("1x4x256x64:float32",), "rounds": 8}
        | {"racers": ("reference", "tiled", "sdpa", "auto"), "race_seconds": 0.0},
        cpu={"part": ("race",), "race": ("1x16x512x64:float32",), "rounds": 8}
        | {"racers": ("reference", "tiled", "sdpa", "auto"), "race_seconds": 0.0},
        gpu={"part": ("race",), "race": ("1x16x16384x64",)},
        quick_gpu={"part": ("race",), "race": ("1x16x16384x64",), "rounds": 10},
        records="flash-race_h200",
    ),
    "collectives": Need(
        "allreduce",
        quick={"ranks": (2, 4), "sizes": (10**6, 10**7), "rounds": 5},
        cpu={"ranks": (2, 4, 6), "sizes": (*_MESSAGES, 10**9), "rounds": 5},
        gpu={"ranks": (2, 4, 6), "sizes": (*_MESSAGES, 10**9)},
        quick_gpu={"ranks": (2,), "sizes": _MESSAGES, "rounds": 5},
        records="parallel_h200",
    ),
    "data parallel": Need(
        "ddp",
        quick={"size": ("tiny",), "context": (32,), "ranks": (2,), "rounds": 5},
        cpu={"size": ("mini",), "context": (64,), "ranks": (2,)},
        gpu={"ranks": (2,)},
        quick_gpu={"size": ("small",), "ranks": (2,), "rounds": 5},
        by_edition=_RANKED_XL,
        records="parallel_h200",
    ),
    "sharded optimizer": Need(
        "sharding",
        quick={"size": ("tiny",), "context": 32, "ranks": (2,), "rounds": 5},
        cpu={"size": ("mini",), "context": 64, "ranks": (2,)},
        gpu={"ranks": (2,)},
        quick_gpu={"size": ("small",), "ranks": (2,), "rounds": 5},
        by_edition=_RANKED_XL,
        records="parallel_h200",
    ),
    "fully sharded": Need(
        "fsdp",
        quick={"size": ("tiny",), "context": 32, "ranks": (2,), "rounds": 5},
        cpu={"size": ("mini",), "context": 64, "ranks": (2,)},
        gpu={"ranks": (2,)},
        quick_gpu={"size": ("small",), "ranks": (2,), "rounds": 5},
        by_edition=_RANKED_XL,
        records="parallel_h200",
    ),
    "leaderboard": Need(
        "leaderboard",
        quick={"size": "tiny", "context": 64, "vocab": 512, "dtype": "float32"}
        | {"warmup_seconds": 1.0, "seconds": 3.0},
        cpu={"size": "mini", "context": 256, "dtype": "float32"}
        | {"warmup_seconds": 5.0, "seconds": 15.0},
        # On one GPU its share of the batch; the case of two is skipped there, with the reason.
        gpu={"ranks": (1, 2)},
        quick_gpu={"size": "small", "table": "2025", "context": 2048, "ranks": (1,)}
        | {"warmup_seconds": 1.0, "seconds": 3.0},
    ),
    "training race": Need(
        "step",
        quick={"part": ("race",), "race": ("tiny-64",), "rounds": 5, "blocks": 4}
        | {"block_seconds": 0.1, "steps": 5, "warmup": 1},
        cpu={"part": ("race",), "race": ("tiny-64",), "rounds": 5, "blocks": 4},
        gpu={"part": ("race",), "race": ("8b-32768",), "scopes": ("block",), "rounds": 3}
        | {"modes": ("default",)},
        quick_gpu={"part": ("race",), "race": ("small-512",), "scopes": ("block",)}
        | {"modes": ("default",), "rounds": 5},
        records="step_h200",
    ),
}
# A case of the same sweep, which the committed records of the GPU do not have.
NEEDS["half batches"] = NEEDS["sums"]._replace(records="half-batches_cpu")
