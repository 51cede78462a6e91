"""The cells of the flash study: a grid of shapes, races on the same tensors, kernel tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from stepscope.attention.registry import IMPLEMENTATION_NAMES, implementation
from stepscope.attention.tiles import Pass
from stepscope.errors import UsageError, unknown_name
from stepscope.model.config import precision
from stepscope.studies.attention_workload import AttentionWorkload
from stepscope.studies.base import PlannedCase

Part = Literal["grid", "race", "tiles"]
PARTS: tuple[Part, ...] = ("grid", "race", "tiles")
PASSES: tuple[Pass, ...] = ("forward", "key_value", "query")

_LONGEST = {"tiled": 4096, "compiled": 16384}
"""Python's loop over tiles takes seconds beyond; a compiled S × S form says nothing new."""
_COMPILED_FOR_EACH_SHAPE = ("compiled", "flex")
"""Seconds for each shape: they come last, and for two head dimensions alone."""
_COMPILED_HEADS = (64, 128)
_SIXTEEN_BIT_ONLY = ("sdpa_flash", "sdpa_cudnn")
_SHORT = 1024
"""Up to this length, with one head, the host decides: calls in a row are timed as well."""
_CALLS_IN_A_ROW = {True: 20, False: 5}
"""For a short shape and for others."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Batch, heads, length and head dimension of one causal attention, and its format."""

    batch: int
    heads: int
    seq: int
    head: int
    dtype: str = "bfloat16"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From `1x16x4096x64`, or `1x16x4096x64:float32`."""
        sizes, _, dtype = text.partition(":")
        parts = sizes.split("x")
        if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
            raise UsageError(
                f"shape {text!r} is not four sizes", "batch x heads x length x d: 1x16x4096x64"
            )
        batch, heads, seq, head = map(int, parts)
        return cls(
            batch=batch, heads=heads, seq=seq, head=head,
            dtype=precision(dtype or "bfloat16").name,
        )  # fmt: skip

    @property
    def key(self) -> str:
        return f"b{self.batch}_h{self.heads}_s{self.seq}_d{self.head}_{self.dtype}_causal"

    @property
    def sizes(self) -> str:
        return f"{self.batch},{self.heads},{self.seq},{self.head}"

    def workload(self, attention: str) -> AttentionWorkload:
        return AttentionWorkload(
            attention=attention, batch=self.batch, heads=self.heads, seq=self.seq,
            head=self.head, dtype=self.dtype, causal=True, mode="both",
        )  # fmt: skip


def left_out(attention: str, shape: Shape) -> str | None:
    """Why the grid has no such cell; what is known before a tensor exists."""
    if shape.seq > _LONGEST.get(attention, shape.seq):
        return f"{attention} stops at length {_LONGEST[attention]}"
    if attention in _COMPILED_FOR_EACH_SHAPE and shape.head not in _COMPILED_HEADS:
        return f"{attention} is compiled for d 64 and 128 alone"
    if attention in _SIXTEEN_BIT_ONLY and shape.dtype == "float32":
        return f"{attention} takes no float32"
    return None


def grid_cases(
    study: str, attentions: Sequence[str], shapes: Sequence[Shape], effort: dict[str, Any]
) -> tuple[PlannedCase, ...]:
    """By shape, so that what is kept for a shape serves all; what compiles long comes last."""
    for name in attentions:
        implementation(name)
    light = [name for name in attentions if name not in _COMPILED_FOR_EACH_SHAPE]
    heavy = [name for name in attentions if name in _COMPILED_FOR_EACH_SHAPE]
    cells = (*itertools.product(shapes, light), *itertools.product(shapes, heavy))
    return tuple(
        PlannedCase(
            study=study,
            key=f"{attention}_{shape.key}",
            config={"kind": "grid"} | msgspec.to_builtins(shape.workload(attention)) | effort,
            needs=(precision(shape.dtype).compute,),
        )
        for shape, attention in cells
        if left_out(attention, shape) is None
    )


def is_short(shape: Shape) -> bool:
    return shape.batch * shape.heads == 1 and shape.seq <= _SHORT


def race_cases(
    study: str, shapes: Sequence[Shape], racers: Sequence[str], effort: dict[str, Any]
) -> Iterator[PlannedCase]:
    for name in racers:
        if name not in IMPLEMENTATION_NAMES:
            raise unknown_name("attention", name, IMPLEMENTATION_NAMES)
    for shape in shapes if racers else ():
        in_a_row = _CALLS_IN_A_ROW[is_short(shape)]
        yield PlannedCase(
            study=study,
            key=f"race_{shape.key}",
            config={"kind": "race"}
            | msgspec.to_builtins(shape)
            | {"causal": True, "racers": list(racers)}
            | {"back_to_back": in_a_row, "host_ahead": True}
            | effort,
            needs=(precision(shape.dtype).compute,),
        )


def tile_cases(study: str, heads: Sequence[int]) -> Iterator[PlannedCase]:
    """One case measures every tile of one kernel: compiling them is most of its time."""
    for head, which in itertools.product(heads, PASSES):
        shape = Shape(batch=1, heads=16, seq=4096, head=head)
        yield PlannedCase(
            study=study,
            key=f"tiles_{which}_d{head}",
            config={"kind": "tiles", "pass": which}
            | msgspec.to_builtins(shape)
            | {"causal": True, "sizes": [16, 32, 64, 128], "warps": 4, "samples": 7},
            needs=("bfloat16",),
        )


def shape_of(config: dict[str, Any]) -> Shape:
    return msgspec.convert(config, Shape)
