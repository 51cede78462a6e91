"""Comparisons of full steps: their shapes and the variants of each side. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from stepscope.analysis.predict.plan import IN_BACKWARD, LOW_PRECISION_GRADS
from stepscope.errors import UsageError, unknown_name
from stepscope.kernels.activation_policy import ALL, GATES, INPUTS, NORMS
from stepscope.model.checkpointing import NONE
from stepscope.model.config import precision
from stepscope.studies.step.ladder import start
from stepscope.training.workload import Workload

SCOPES = ("block", "model")
MODES = ("default", "reduce-overhead")
"""Default modes; max-autotune takes minutes for each variant and must be requested by name."""
ATTENTIONS = ("sdpa_flash", "sdpa_cudnn")


class RaceSpec(NamedTuple):
    """The training step of a race, and what selects Stepscope's variants for it."""

    size: str
    context: int
    batch: int
    dtype: str = "bfloat16"
    table: str = "2025"
    checkpoint: str = NONE
    """Activation checkpointing of PyTorch, where the step does not fit in memory without it."""
    thrifty: int = 0
    """Number of Stepscope's blocks that save only their inputs, where PyTorch is checkpointed."""
    other_attention: str = "sdpa_cudnn"
    """Attention tried next to `auto`, whose choice assumes that the CPU is not ahead."""
    less_memory: bool = False
    """True if Stepscope's variants save fewer activations than they could, one of them inputs only,
    and their peak memory is compared with PyTorch's."""
    fp8: str = ""
    """Dtype of Stepscope's variants in FP8, which are compared with the others in `dtype`; empty
    for a race without them."""


RACES: dict[str, RaceSpec] = {
    "2.7b-2048": RaceSpec("2.7b", 2048, 4, less_memory=True),
    "2.7b-512": RaceSpec("2.7b", 512, 4, other_attention="triton"),
    "xl-512": RaceSpec("xl", 512, 4, other_attention="triton"),
    "xl-2048": RaceSpec("xl", 2048, 4),
    "small-512": RaceSpec("small", 512, 4, other_attention="triton"),
    "8b-32768": RaceSpec("8b", 32_768, 1, "bfloat16-pure", "2026", checkpoint="1", thrifty=16),
    "2.7b-2048-fp8": RaceSpec("2.7b", 2048, 4, less_memory=True, fp8="fp8"),
    "xl-2048-fp8": RaceSpec("xl", 2048, 4, fp8="fp8"),
    "8b-32768-fp8": RaceSpec(
        "8b", 32_768, 1, "bfloat16-pure", "2026", checkpoint="1", thrifty=16, fp8="fp8-pure"
    ),
    "tiny-64": RaceSpec("tiny", 64, 2, "float32"),
}


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """Trial of one variant alone, stored in the record's attachments."""

    ms: float
    first_s: float
    """Seconds until the end of the first step: building, compiling, tuning."""
    peak_bytes: float | None = None
    turns_ms: float | None = None
    """Median of the run-off, in alternation with the variants close to the fastest of its side."""


SIDES = {
    "baseline": "PyTorch",
    "stepscope": "Stepscope",
    "low-memory": "Stepscope with fewer saved activations",
    "low-precision": "Stepscope with narrower dtypes",
    "fp8": "Stepscope in FP8",
}
"""Sides of a race, as records name them, in words."""


class Racer(NamedTuple):
    """A variant of the training step and the side it belongs to."""

    side: str
    """One of `SIDES`."""
    workload: Workload

    @property
    def name(self) -> str:
        w = self.workload
        parts = [
            w.compile if w.compile != "no" else "eager",
            *([] if w.compile == "no" else [w.compile_mode]),
            w.attention,
            *(
                ["fused projections"]
                if w.fused_projections
                else ["fused pieces"]
                if w.fused
                else []
            ),
            *(["autotuned GEMMs"] if w.autotune_gemms else []),
            *(["low-precision stream"] if precision(w.dtype).narrow_stream else []),
            *([] if w.activation_policy == ALL else [f"saves {w.activation_policy}"]),
            *(["checkpointed"] if w.checkpoint != NONE else []),
            *([_UPDATES[w.optimizer]] if w.optimizer in _UPDATES else []),
            *(["graph"] if w.graph else []),
        ]
        return f"{self.side}: {' '.join(parts)}"


_UPDATES = {
    IN_BACKWARD: "optimizer-in-backward",
    LOW_PRECISION_GRADS: "low-precision optimizer-in-backward",
}


def race_spec(name: str) -> RaceSpec:
    if name not in RACES:
        raise unknown_name("race", name, RACES)
    return RACES[name]


def racers(
    name: str,
    scopes: tuple[str, ...] = SCOPES,
    modes: tuple[str, ...] = MODES,
    attentions: tuple[str, ...] = ATTENTIONS,
    forms: tuple[str, ...] = (),
) -> tuple[Racer, ...]:
    """Variants of PyTorch and of Stepscope, with the same dtypes of weights, gradients and state.

    One variant of PyTorch comes first, then Stepscope's, then the rest, so that there is a result
    even if the time limit is reached. With `forms`, only variants whose name contains one of these
    strings.
    """
    spec = race_spec(name)
    first = start(spec.size, spec.table, spec.context, spec.batch, {})
    common = msgspec.structs.replace(first, dtype=spec.dtype)
    # The logits of a long sequence and a large vocabulary do not fit: both get the fused loss.
    loss = "fused" if spec.checkpoint != NONE else "plain"
    baseline = msgspec.structs.replace(
        common, optimizer="torch-fused", loss=loss, checkpoint=spec.checkpoint
    )
    ours = msgspec.structs.replace(
        common, optimizer="stepscope-fused", attention="auto", loss="fused"
    )
    if spec.size == "tiny":
        # For machines without a GPU, where compiling takes too long.
        baselines = [_racer("baseline", baseline, attention=kind) for kind in ("sdpa", "reference")]
        own = [_racer("stepscope", ours, optimizer="torch-fused")]
    else:
        baselines = [
            _racer("baseline", baseline, compile=scope, compile_mode=mode, attention=attention)
            for scope, mode, attention in itertools.product(scopes, modes, attentions)
        ]
        own = list((_fp8_variants if spec.fp8 else _stepscope_variants)(spec, ours))
    variants = [*baselines[:1], *own, *baselines[1:]]
    left = [racer for racer in variants if not forms or any(form in racer.name for form in forms)]
    if {"baseline", "stepscope"} - {racer.side for racer in left}:
        raise UsageError(
            f"race {name} has no variants of both sides with {', '.join(forms)} in their name",
            f"choose at least one of each side: {'; '.join(racer.name for racer in variants)}",
        )
    return tuple(left)


def _stepscope_variants(spec: RaceSpec, ours: Workload) -> Iterator[Racer]:
    fused = msgspec.structs.replace(ours, fused=True, fused_projections=True)
    overlapped = msgspec.structs.replace(fused, optimizer=IN_BACKWARD)
    if spec.checkpoint != NONE:
        # Save as much as fits; only one matmul of some blocks is recomputed.
        for policy in (f"{INPUTS}-{spec.thrifty}", INPUTS):
            yield _racer("stepscope", overlapped, activation_policy=policy)
        yield _racer("stepscope", ours, compile="block", checkpoint=spec.checkpoint)
        return
    policy = GATES if spec.less_memory else ALL
    yield _racer("stepscope", overlapped, activation_policy=policy, graph=True)
    if spec.less_memory:
        yield _racer(
            "stepscope", overlapped, activation_policy=NORMS, graph=True, autotune_gemms=True
        )
    for attention in ("auto", spec.other_attention):
        yield _racer(
            "stepscope",
            overlapped,
            activation_policy=policy,
            graph=True,
            autotune_gemms=True,
            attention=attention,
        )
    yield _racer("stepscope", fused, activation_policy=policy, graph=True)
    if spec.less_memory:
        yield _racer("stepscope", overlapped, activation_policy=policy)
    yield _racer("stepscope", ours, compile="block", graph=True)
    # Gradients and residual stream in other dtypes than PyTorch's: compared in a separate row.
    narrow = msgspec.structs.replace(
        overlapped, activation_policy=policy, graph=True, optimizer=LOW_PRECISION_GRADS
    )
    yield _racer("low-precision", narrow)
    most = NORMS if spec.less_memory else ALL
    narrow = msgspec.structs.replace(
        narrow, dtype=f"{spec.dtype}-stream", autotune_gemms=True, activation_policy=most
    )
    for attention in ("auto", spec.other_attention):
        yield _racer("low-precision", narrow, attention=attention)
    if spec.less_memory:
        yield _racer("low-memory", overlapped, activation_policy=INPUTS)


def _fp8_variants(spec: RaceSpec, ours: Workload) -> Iterator[Racer]:
    """The first variant in the dtype of PyTorch's, then the same in FP8, then with more memory and
    narrower gradients and stream."""
    fused = msgspec.structs.replace(ours, fused=True, fused_projections=True, optimizer=IN_BACKWARD)
    if spec.checkpoint != NONE:
        first = msgspec.structs.replace(fused, activation_policy=f"{INPUTS}-{spec.thrifty}")
        policies: tuple[str, ...] = (f"{INPUTS}-{spec.thrifty}", INPUTS)
    else:
        policy = GATES if spec.less_memory else ALL
        first = msgspec.structs.replace(fused, activation_policy=policy, graph=True)
        policies = (ALL, NORMS, GATES)
    yield _racer("stepscope", first)
    in_fp8 = msgspec.structs.replace(first, dtype=spec.fp8)
    for policy in policies:
        yield _racer("fp8", in_fp8, activation_policy=policy)
    if spec.checkpoint != NONE:
        return
    narrow = msgspec.structs.replace(
        in_fp8, dtype=f"{spec.fp8}-stream", optimizer=LOW_PRECISION_GRADS
    )
    for attention in ("auto", spec.other_attention):
        for policy in (ALL, NORMS):
            yield _racer("fp8", narrow, activation_policy=policy, attention=attention)


def _racer(side: str, workload: Workload, **changes: object) -> Racer:
    return Racer(side, msgspec.structs.replace(workload, **changes))
