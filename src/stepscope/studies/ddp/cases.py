"""Flags, cases and presets of the study of data parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.errors import UsageError, unknown_name
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, Study
from stepscope.studies.flag_checks import check_each, check_ranks
from stepscope.studies.rank_subject import RankedStep, subjects
from stepscope.studies.ranked import default_ranks

DTYPES = ("float32", "bfloat16", "bfloat16-pure")
ALONE = "no communication"
TORCH = "torch DDP"


class DDPFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: sizes, contexts and numbers of ranks are cases."""

    size: tuple[str, ...] = ("small",)
    """Sizes: small, medium, large, xl, 2.7b (2025) or 10b (2026); tiny, mini, midi for a CPU."""
    table: str = "2025"
    """Which year's size table: xl differs between them."""
    context: tuple[int, ...] = (128,)
    """Sequence lengths in tokens."""
    batch: int = 4
    """Sequences per step, shared out among the ranks."""
    ranks: tuple[int, ...] = msgspec.field(default_factory=default_ranks)
    """Numbers of ranks, each a process on this machine; under torchrun as many as it started."""
    backend: tuple[str, ...] = ("auto",)
    """nccl, gloo, or auto: nccl where every rank has a GPU of its own."""
    dtype: tuple[str, ...] = ("float32",)
    """float32, bfloat16 (autocast: gradients stay float32) or bfloat16-pure (half the bytes)."""
    bucket_mb: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0)
    """Bucket sizes to try, in MiB."""
    rounds: int = 10
    """Samples of each way."""
    model: str = ""
    """A model of your own instead of a size: package.module:function (see `run own --help`)."""

    def __post_init__(self) -> None:
        check_ranks(self.ranks, self.batch)
        for name in self.dtype:
            if name not in DTYPES:
                raise unknown_name("dtype", name, DTYPES)
        check_each("bucket-mb", self.bucket_mb, lambda size: size > 0, "give sizes above 0")
        if self.rounds < 1:
            raise UsageError(f"rounds is {self.rounds}", "it must be at least 1")


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
            DDPCase(
                **subject, batch=flags.batch, ranks=ranks, backend=backend, dtype=dtype,
                bucket_mb=flags.bucket_mb, rounds=flags.rounds,
            )
            for subject, ranks, backend, dtype in itertools.product(
                subjects(flags.model, flags.size, flags.table, flags.context),
                flags.ranks, flags.backend, flags.dtype,
            )
        )  # fmt: skip

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
