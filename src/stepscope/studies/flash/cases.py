"""Flags and cases of the flash study."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from stepscope.attention.registry import implementation
from stepscope.errors import UsageError
from stepscope.model.config import PRECISIONS, precision
from stepscope.studies.attention.workload import AttentionInputs, AttentionWorkload, check_rule
from stepscope.training.flag_checks import check_at_least, check_seconds

Part = Literal["grid", "race"]
PARTS: tuple[Part, ...] = ("grid", "race")

_LONGEST = {"tiled": 4096, "compiled": 16384}
"""Longest sequence by implementation: longer loops over tiles take seconds in Python, and compiled
naive attention gives no new information."""
_COMPILED_FOR_EACH_SHAPE = ("compiled", "flex")
"""Compiling takes seconds per shape: these run last, and for two head dimensions only."""
_COMPILED_HEADS = (64, 128)
_SIXTEEN_BIT_ONLY = ("sdpa_flash", "sdpa_cudnn")
_SHORT = 1024
"""Up to this length, with one head, calls are CPU-bound; consecutive calls are timed as well."""
_CALLS_IN_A_ROW = {True: 20, False: 5}
"""Consecutive calls of a sample, for short shapes and for others."""

GRID_ATTENTIONS = (
    "triton",
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "flex",
    "compiled",
    "reference",
    "tiled",
)
PUBLISHED_SHAPES = (
    "1x16x16384x64",
    "4x16x4096x64",
    "4x16x4096x128",
    "2x16x16384x128",
    "8x16x1024x64",
)
MODEL_SHAPES = ("4x32x512x80", "4x32x2048x80")
MANY_HEADS = (*PUBLISHED_SHAPES, *MODEL_SHAPES, "1x16x4096x64:float32")
WITHOUT_A_MASK = tuple(f"{shape}:full" for shape in PUBLISHED_SHAPES[1:4])
SHARED_KEYS = ("4x32x4096x128:keys=8", "4x32x4096x128:full:keys=8")
WITH_RULES = (
    "1x16x16384x64:window=1024",
    "1x16x16384x64:documents=512",
    "1x16x4096x64:prefix=1024",
    "1x16x4096x64:softcap=50",
    "1x16x4096x64:sinks",
    "1x16x4096x64:alibi",
    "1x16x4096x64:dropout=0.1",
)
SHORT = tuple(f"1x1x{seq}x{head}" for head in (64, 128) for seq in (128, 256, 512, 1024))


class FlashFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the study; in the grid every combination of the values is a case."""

    part: tuple[Part, ...] = PARTS
    """Parts to run: grid (each implementation alone), race (implementations interleaved)."""
    attention: tuple[str, ...] = GRID_ATTENTIONS
    """Implementations of the grid (`stepscope list attentions`)."""
    dtype: tuple[str, ...] = ("bfloat16", "float32")
    """Dtypes of the grid: bfloat16, float16, float32."""
    context: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    """Sequence lengths of the grid, with batch 1 and one head."""
    head_dim: tuple[int, ...] = (16, 32, 64, 128)
    """Head dimensions of the grid."""
    shape: tuple[str, ...] = MANY_HEADS
    """Further shapes of the grid: batch x heads x length x d, in bfloat16 unless followed by
    `:float32`."""
    race: tuple[str, ...] = (*MANY_HEADS, *WITHOUT_A_MASK, *SHARED_KEYS, *WITH_RULES, *SHORT)
    """Shapes at which implementations are compared, interleaved: as `shape`, followed by `:full`
    (no causal mask), `:keys=8` (heads of k and v), or a rule (`:window=1024`, `:documents=512`,
    `:prefix=1024`, `:softcap=50`, `:sinks`, `:alibi`, `:dropout=0.1`)."""
    racers: tuple[str, ...] = (
        "triton",
        "sdpa_flash",
        "sdpa_cudnn",
        "sdpa_efficient",
        "sdpa",
        "flex",
        "auto",
    )
    """Implementations to compare; those that do not support a shape are reported."""
    warmup: int = 2
    """Warm-up steps before the first sample."""
    steps: int = 5
    """Minimum number of samples of each pass in the grid."""
    min_seconds: float = 0.05
    """Keep sampling a pass until this much time has passed (at most 200 samples)."""
    rounds: int = 20
    """Minimum number of rounds of interleaved samples."""
    race_seconds: float = 0.5
    """Keep sampling rounds until this much time has passed (at most 200 rounds)."""

    def __post_init__(self) -> None:
        check_at_least(1, steps=self.steps)
        check_at_least(1, rounds=self.rounds)
        check_at_least(0, warmup=self.warmup)
        check_seconds("min-seconds", self.min_seconds)
        check_seconds("race-seconds", self.race_seconds)


class Shape(AttentionInputs, frozen=True, kw_only=True):
    """Input shape of one causal attention call."""

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse `1x16x4096x64` or `1x16x4096x64:float32`."""
        sizes, _, dtype = text.partition(":")
        parts = sizes.split("x")
        if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
            raise UsageError(
                f"shape {text!r} does not have four sizes",
                "use batch x heads x length x d: 1x16x4096x64",
            )
        batch, heads, seq, head = map(int, parts)
        dtype = precision(dtype or "bfloat16").name
        return cls(batch=batch, heads=heads, seq=seq, head=head, dtype=dtype)

    @property
    def key(self) -> str:
        return f"b{self.batch}_h{self.heads}_s{self.seq}_d{self.head}_{self.dtype}_causal"

    @property
    def is_short(self) -> bool:
        return self.is_single and self.seq <= _SHORT

    def workload(self, attention: str) -> AttentionWorkload:
        inputs = {name: getattr(self, name) for name in Shape.__struct_fields__}
        return AttentionWorkload(attention=attention, causal=True, mode="both", **inputs)


class GridCase(AttentionWorkload, frozen=True, kw_only=True, tag_field="kind", tag="grid"):
    """One implementation at one shape: forward, backward and both."""

    warmup: int
    steps: int
    min_seconds: float

    @property
    def key(self) -> str:
        return super().key.removesuffix(f"_{self.mode}")


class AttentionRaceCase(Shape, frozen=True, kw_only=True, tag_field="kind", tag="race"):
    """Several implementations interleaved on the same tensors."""

    causal: bool = True
    key_heads: int = 0
    """Heads of k and v; 0: as many as those of q."""
    rule: str = ""
    """Rule of `ScoreRules`, as `window=1024`; documents are given by their mean length."""
    racers: tuple[str, ...]
    back_to_back: int
    host_ahead: bool = False
    """True if the GPU was kept busy until the CPU had issued the call."""
    warmup: int
    rounds: int
    min_seconds: float

    @property
    def options(self) -> tuple[str, ...]:
        """What differs from a causal mask with as many key heads as query heads."""
        keys = f"keys={self.key_heads}" if self.key_heads else ""
        return tuple(filter(None, ("" if self.causal else "full", keys, self.rule)))

    @property
    def sizes(self) -> str:
        return " ".join((super().sizes, *self.options))

    @property
    def key(self) -> str:
        base = super().key if self.causal else super().key.removesuffix("_causal")
        return "_".join((f"race_{base}", *self.options))

    @property
    def config(self) -> dict[str, Any]:
        """The fields; options that are not set are left out, as in records from before them."""
        fields = super().config
        return {k: v for k, v in fields.items() if v or k not in ("key_heads", "rule")}

    def workload(self, attention: str) -> AttentionWorkload:
        return msgspec.structs.replace(super().workload(attention), causal=self.causal)


FlashCase = GridCase | AttentionRaceCase


def left_out(attention: str, shape: Shape) -> str | None:
    """Return why the grid leaves out a cell, from what is known before a tensor is allocated."""
    if shape.seq > _LONGEST.get(attention, shape.seq):
        return f"{attention} stops at length {_LONGEST[attention]}"
    if attention in _COMPILED_FOR_EACH_SHAPE and shape.head not in _COMPILED_HEADS:
        return f"{attention} is compiled for d 64 and 128 only"
    if attention in _SIXTEEN_BIT_ONLY and shape.dtype == "float32":
        return f"{attention} does not support float32"
    return None


def grid_cases(flags: FlashFlags) -> tuple[GridCase, ...]:
    """Cells ordered by shape, so that cached float64 results serve all; compiled cells last."""
    for name in flags.attention:
        implementation(name)
    shapes = [
        *(
            Shape(batch=1, heads=1, seq=seq, head=head, dtype=precision(dtype).name)
            for dtype, seq, head in itertools.product(flags.dtype, flags.context, flags.head_dim)
        ),
        *map(Shape.parse, flags.shape),
    ]
    # A stable sort: the order within compiled and other cells stays.
    cells = sorted(
        itertools.product(shapes, flags.attention),
        key=lambda cell: cell[1] in _COMPILED_FOR_EACH_SHAPE,
    )
    reasons = [left_out(attention, shape) for shape, attention in cells]
    if cells and all(reasons):
        raise UsageError(f"the grid is empty: {reasons[0]}", "choose other values")
    return tuple(
        GridCase(
            **msgspec.structs.asdict(shape.workload(attention)),
            warmup=flags.warmup,
            steps=flags.steps,
            min_seconds=flags.min_seconds,
        )
        for (shape, attention), reason in zip(cells, reasons, strict=True)
        if reason is None
    )


def parse_race(text: str) -> tuple[Shape, dict[str, Any]]:
    """Parse a shape and its options; return it with the fields of `AttentionRaceCase`."""
    sizes, *options = text.split(":")
    fields: dict[str, Any] = {}
    for option in options:
        if option in PRECISIONS:
            sizes = f"{sizes}:{option}"
        elif option == "full":
            fields["causal"] = False
        elif option.startswith("keys=") and option[5:].isdecimal() and int(option[5:]):
            fields["key_heads"] = int(option[5:])
        else:
            fields["rule"] = check_rule(option)
    shape = Shape.parse(sizes)
    if shape.heads % (fields.get("key_heads") or 1):
        raise UsageError(f"shape {text!r}: the key heads do not divide the {shape.heads} heads")
    return shape, fields


def race_cases(flags: FlashFlags) -> Iterator[AttentionRaceCase]:
    for name in flags.racers:
        implementation(name)
    for shape, fields in map(parse_race, flags.race if flags.racers else ()):
        yield AttentionRaceCase(
            **msgspec.structs.asdict(shape),
            **fields,
            racers=flags.racers,
            back_to_back=_CALLS_IN_A_ROW[shape.is_short],
            host_ahead=True,
            warmup=flags.warmup,
            rounds=flags.rounds,
            min_seconds=flags.race_seconds,
        )
