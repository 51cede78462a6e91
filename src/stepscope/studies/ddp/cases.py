"""Flags, cases and presets of the study of data parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.errors import unknown_name
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, Study
from stepscope.studies.flag_checks import check_each
from stepscope.studies.rank_subject import RankedFlags, RankedStep

DTYPES = ("float32", "bfloat16", "bfloat16-pure")
ALONE = "no communication"
TORCH = "torch DDP"


class DDPFlags(RankedFlags, frozen=True, kw_only=True):
    """What to measure: sizes, contexts and numbers of ranks are cases."""

    context: tuple[int, ...] = (128,)
    """Sequence lengths in tokens."""
    backend: tuple[str, ...] = ("auto",)
    """nccl, gloo, or auto: nccl where every rank has a GPU of its own."""
    dtype: tuple[str, ...] = ("float32",)
    """float32, bfloat16 (autocast: gradients stay float32) or bfloat16-pure (half the bytes)."""
    bucket_mb: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0)
    """Bucket sizes to try, in MiB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.dtype:
            if name not in DTYPES:
                raise unknown_name("dtype", name, DTYPES)
        check_each("bucket-mb", self.bucket_mb, lambda size: size > 0, "give sizes above 0")


class DDPCase(RankedStep, frozen=True, kw_only=True):
    """Every strategy on one step; strategies are variants of its series."""

    bucket_mb: tuple[float, ...]
    # From a factory: a plain default would be left out of the config.
    dtype: str = msgspec.field(default_factory=lambda: "float32")

    @property
    def key(self) -> str:
        return f"{super().key}_{self.dtype}"


class DataParallel(Study[DDPFlags, DDPCase]):
    name = "ddp"
    title = "Data parallelism"
    question = "What does averaging gradients cost, and how much of it hides behind the backward?"
    examples = (
        "stepscope run ddp --size small --context 128 --ranks 2",
        "stepscope run ddp --size medium --ranks 2 4 --bucket-mb 1 10 100 1000",
        "stepscope run ddp --dtype float32 bfloat16 bfloat16-pure",
    )
    flags = DDPFlags
    case = DDPCase

    def cases(self, flags: DDPFlags) -> tuple[DDPCase, ...]:
        return tuple(
            DDPCase(**subject, ranks=ranks, backend=backend, dtype=dtype, bucket_mb=flags.bucket_mb)
            for subject, ranks, backend, dtype in itertools.product(
                flags.subjects(flags.context), flags.ranks, flags.backend, flags.dtype
            )
        )

    def measure(self, case: DDPCase, bench: Bench) -> Measurement:
        from stepscope.studies.ddp.measure import measure_case

        return measure_case(self.name, case, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.ddp.view import ddp_blocks

        return ddp_blocks(self.results(records))

    def presets(self, environment: Environment) -> Mapping[str, Sequence[DDPFlags]]:
        if environment.device_kind == "cpu":
            quick = DDPFlags(size=("tiny",), context=(32,), bucket_mb=(1.0,), rounds=5, ranks=(2,))
        else:
            quick = DDPFlags(ranks=(1,))
        # Two ranks on one GPU go over gloo: the ways compare, the times are not a cluster's.
        h200 = (
            DDPFlags(ranks=(1,), bucket_mb=(10.0,), rounds=5),
            DDPFlags(
                ranks=(2,), backend=("gloo",), dtype=("float32", "bfloat16-pure"),
                bucket_mb=(1.0, 100.0), rounds=5,
            ),
        )  # fmt: skip
        return {
            "quick": (quick,),
            "seeds": (DDPFlags(size=("medium",), ranks=(2,)),),
            "cs336-2026": (DDPFlags(size=("xl",), table="2026", ranks=(2,)),),
            "h200": h200,
            "full": (
                DDPFlags(
                    size=("small", "medium", "large"),
                    ranks=(2, 4),
                    dtype=("float32", "bfloat16", "bfloat16-pure"),
                ),
            ),
        }


STUDY = DataParallel()
