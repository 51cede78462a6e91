"""Every tile of our kernels: its time, or that it does not fit; and why the chosen one wins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product

from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Cell, Column, Finding, Table
from stepscope.report.format import duration, number, percent
from stepscope.studies.flash.cases import Shape, shape_of

CHOSEN = "chosen"
_WARP = 32
_REGISTERS_AT_ONCE = 256
"""A warp's registers are given out in such pieces."""
_RESERVED_SHARED = 1024
_MOST_BLOCKS = 32
_LITTLE = 0.05
"""So much may a chosen tile lose at one shape."""


def resident_blocks(
    registers: float, shared: float, warps: float, *,
    sm_registers: float, sm_shared: float, sm_threads: float,
) -> int:  # fmt: skip
    """Blocks of a kernel that one multiprocessor holds at a time."""
    of_a_warp = -(-registers * _WARP // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    return int(
        min(
            sm_registers // of_a_warp // warps if of_a_warp else _MOST_BLOCKS,
            sm_shared // (shared + _RESERVED_SHARED),
            sm_threads // (warps * _WARP),
            _MOST_BLOCKS,
        )
    )


class TileStudy:
    """The tiles of one kernel at one head dimension."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.kernel = str(record.config["pass"]).replace("_", "-")
        self.head = int(record.config["head"])

    @property
    def title(self) -> str:
        return f"{self.kernel} kernel, d {self.head}"

    @cached_property
    def names(self) -> list[str]:
        sizes = self.record.config["sizes"]
        return [f"{m}x{n}" for m, n in product(sizes, sizes)]

    @cached_property
    def timed(self) -> dict[str, float]:
        """The sizes that ran, without the chosen tile's own entry."""
        return {name: ms for name in self.names if (ms := self.ms(name)) is not None}

    @cached_property
    def refused(self) -> dict[str, str]:
        """Why a size did not run."""
        return self.record.attachment("refused", dict[str, str]) or {}

    @property
    def shape(self) -> Shape:
        return shape_of(self.record.config)

    @property
    def fastest(self) -> str:
        return min(self.timed, key=self.timed.__getitem__)

    @property
    def lost(self) -> float:
        """By how much the chosen tile is slower than the fastest."""
        return (self.ms(CHOSEN) or 0.0) / self.timed[self.fastest] - 1.0

    def ms(self, name: str) -> float | None:
        series = self.record.find("step", variant=name)
        return summarize(series.values).median if series and series.values else None

    def fact(self, name: str, what: str) -> int | None:
        value = self.record.quantity(what, variant=name)
        return None if value is None else int(value)

    def blocks(self, name: str) -> int | None:
        held = [self.fact(name, what) for what in ("registers", "shared_bytes", "warps")]
        limits = [self.fact("sm", what) for what in ("registers", "shared_bytes", "threads")]
        if None in held or None in limits:
            return None
        registers, shared, warps = (value or 0 for value in held)
        of_registers, of_shared, of_threads = (value or 0 for value in limits)
        return resident_blocks(
            registers, shared, warps,
            sm_registers=of_registers, sm_shared=of_shared, sm_threads=of_threads,
        )  # fmt: skip

    def cell(self, name: str) -> Cell:
        ms = self.ms(name)
        if ms is None:
            return self.refused.get(name, "").partition(":")[0] or None
        spills = self.fact(name, "spills")
        return f"{number(ms)} (spills {spills})" if spills else ms


def tile_blocks(records: Sequence[Record]) -> Iterator[Block]:
    studies = [TileStudy(record) for record in records if record.status == "ok"]
    chosen = [study for study in studies if study.ms(CHOSEN) is not None and study.timed]
    if chosen:
        yield _summary(chosen)
        yield _choices(chosen)
    for study in studies:
        yield _square(study)
    if studies:
        yield _facts(studies)


def _summary(studies: Sequence[TileStudy]) -> Finding:
    """What the choice of tiles costs where another one is faster."""
    beaten = [study for study in studies if study.lost > _LITTLE]
    text = (
        f"The chosen tiles of {len(studies)} kernels against {len(studies[0].names)} sizes with"
        f" {studies[0].record.config['warps']} warps: at most {percent(_LITTLE)} slower than the"
        f" fastest in {len(studies) - len(beaten)}"
    )
    if beaten:
        lost = (
            f"at {study.shape.sizes} the {study.kernel} kernel takes"
            f" {duration(study.ms(CHOSEN) or 0.0)} with the chosen one and"
            f" {duration(study.timed[study.fastest])} with {_sized(study.fastest)}"
            for study in beaten
        )
        text += f"; {'; '.join(lost)}"
    return Finding(text=text + ".", tone="warn" if beaten else "good")


def _choices(studies: Sequence[TileStudy]) -> Table:
    def row(study: TileStudy) -> tuple[Cell, ...]:
        m, n = study.fact(CHOSEN, "tile_m"), study.fact(CHOSEN, "tile_n")
        own = (study.fact(CHOSEN, what) for what in ("warps", "stages", "registers", "spills"))
        slowest = max(study.timed, key=study.timed.__getitem__)
        return (
            study.kernel, study.head, _unbroken(f"{m} × {n}"), study.ms(CHOSEN), *own,
            study.fact(CHOSEN, "shared_bytes"), study.blocks(CHOSEN),
            study.cell(f"{m}x{2 * (n or 0)}"), study.cell(f"{m}x{(n or 0) // 2}"),
            _unbroken(f"{_sized(study.fastest)}, {number(study.timed[study.fastest], 3)}"),
            _unbroken(f"{_sized(slowest)}, {number(study.timed[slowest], 3)}"),
            sum(bool(study.fact(name, "spills")) for name in study.timed),
            len(study.names) - len(study.timed),
        )  # fmt: skip

    shapes = dict.fromkeys(study.shape.sizes for study in studies)
    return Table(
        name="flash-tile-choice",
        title="The chosen tiles, and what surrounds them",
        columns=(
            Column(title="kernel"),
            Column(title="d", kind="count"),
            Column(title="chosen", hint="query rows × key rows"),
            Column(title="time", kind="number", unit="ms"),
            Column(title="warps", kind="count"),
            Column(title="stages", kind="count"),
            Column(title="registers", kind="count"),
            Column(title="spills", kind="count"),
            Column(title="shared memory", kind="bytes"),
            Column(title="blocks", kind="count", hint="that one multiprocessor holds at a time"),
            Column(title="twice the keys", kind="number", unit="ms"),
            Column(title="half the keys", kind="number", unit="ms"),
            Column(title="fastest, ms"),
            Column(title="slowest, ms"),
            Column(title="spilling", kind="count", hint="how many of the sizes spill"),
            Column(title="did not run", kind="count", hint="do not fit or do not compile"),
        ),
        rows=tuple(map(row, studies)),
        caption=f"bfloat16, causal, at {' and '.join(shapes)}. A choice also has to hold at other"
        " lengths.",
    )


def _unbroken(text: str) -> str:
    return text.replace(" ", "\u00a0")


def _sized(name: str) -> str:
    return name.replace("x", " × ")


def _square(study: TileStudy) -> Table:
    sizes = study.record.config["sizes"]
    shape = study.record.config
    return Table(
        name=f"flash-tiles-{study.kernel}-d{study.head}",
        title=f"Tiles of the {study.title}",
        columns=(
            Column(title="query rows", kind="count"),
            *(Column(title=f"{n} keys", kind="number", unit="ms") for n in sizes),
        ),
        rows=tuple((m, *(study.cell(f"{m}x{n}") for n in sizes)) for m in sizes),
        caption=f"Median time of the kernel alone at {shape['batch']},{shape['heads']},"
        f"{shape['seq']},{shape['head']} {shape['dtype']}, causal, {shape['warps']} warps; with"
        " fewer stages where the chosen tile's do not fit.",
    )


def _facts(studies: Sequence[TileStudy]) -> Table:
    def row(study: TileStudy, name: str) -> tuple[Cell, ...]:
        return (
            study.kernel, study.head, _sized(name), study.ms(name),
            *(study.fact(name, what) for what in ("stages", "registers", "spills")),
            study.fact(name, "shared_bytes"), study.blocks(name), study.refused.get(name),
        )  # fmt: skip

    return Table(
        name="flash-tile-facts",
        title="What the compiler made of each tile",
        columns=(
            Column(title="kernel"),
            Column(title="d", kind="count"),
            Column(title="tile", hint="query rows × key rows"),
            Column(title="time", kind="number", unit="ms"),
            Column(title="stages", kind="count"),
            Column(title="registers", kind="count"),
            Column(title="spills", kind="count"),
            Column(title="shared memory", kind="bytes"),
            Column(title="blocks", kind="count", hint="that one multiprocessor holds at a time"),
            Column(title="otherwise"),
        ),
        rows=tuple(row(study, name) for study in studies for name in (CHOSEN, *study.names)),
    )
