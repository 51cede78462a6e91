"""Flags, cases and presets of the attention study."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.errors import UsageError
from stepscope.model.config import precision
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.attention.workload import AttentionMode, AttentionWorkload
from stepscope.studies.base import Bench, Measurement, Study

_MODES: tuple[AttentionMode, ...] = ("forward", "backward")


class AttentionFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: every combination of the values is a case."""

    head: tuple[int, ...] = (16, 32, 64, 128)
    """Head dimensions."""
    seq: tuple[int, ...] = (256, 1024, 4096, 8192, 16384)
    """Sequence lengths."""
    batch: int = 8
    """Sequences."""
    heads: int = 1
    """Heads of each."""
    dtype: tuple[str, ...] = ("float32",)
    """float32, float16, bfloat16."""
    attention: tuple[str, ...] = ("reference",)
    """Implementations: reference, or any other (`stepscope list attentions`)."""
    causal: bool = False
    """With a causal mask."""
    warmup: int = 5
    """Steps before the first sample."""
    steps: int = 20
    """Samples at least."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise UsageError(
                f"steps is {self.steps} and warmup {self.warmup}", "at least 1 and at least 0"
            )


class AttentionCase(AttentionWorkload, frozen=True, kw_only=True):
    """One pass of one attention, and how often to sample it."""

    warmup: int
    steps: int


class Attention(Study[AttentionFlags, AttentionCase]):
    name = "attention"
    title = "Attention, written out"
    question = (
        "What does attention cost as the formula reads, in time and in memory,"
        " and where does it stop to fit?"
    )
    examples = (
        "stepscope run attention",
        "stepscope run attention --head 64 --seq 1024 4096 16384 --causal --dtype bfloat16",
    )
    flags = AttentionFlags
    case = AttentionCase
    no_model = "it measures attention alone"

    def cases(self, flags: AttentionFlags) -> tuple[AttentionCase, ...]:
        return tuple(
            AttentionCase(
                attention=attention,
                batch=flags.batch,
                heads=flags.heads,
                seq=seq,
                head=head,
                dtype=precision(dtype).name,
                causal=flags.causal,
                mode=mode,
                warmup=flags.warmup,
                steps=flags.steps,
            )
            for attention, dtype, seq, head, mode in itertools.product(
                flags.attention, flags.dtype, flags.seq, flags.head, _MODES
            )
        )

    def measure(self, case: AttentionCase, bench: Bench) -> Measurement:
        from stepscope.studies.attention.measure import measure_pass

        return measure_pass(case, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.attention.view import attention_blocks

        return attention_blocks(self.results(records))

    def presets(self, environment: Environment) -> Mapping[str, Sequence[AttentionFlags]]:
        if environment.device_kind == "cpu":
            quick = AttentionFlags(head=(16, 64), seq=(128, 256, 512), batch=4, steps=5, warmup=1)
        else:
            quick = AttentionFlags(head=(64, 128), seq=(256, 1024, 4096))
        whole = AttentionFlags()
        # On a GPU of 140 GiB the first length that does not fit is longer than the course's.
        longer = AttentionFlags(head=(64,), seq=(32768, 65536))
        return dict.fromkeys(("seeds", "cs336-2026", "full"), (whole,)) | {
            "h200": (whole, longer),
            "quick": (quick,),
        }


STUDY = Attention()
