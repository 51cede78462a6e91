"""Every tile of our kernels: its time, or that it does not fit; and why the chosen one wins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product

from stepscope.records.schema import Record
from stepscope.records.stats import summarize
from stepscope.report.blocks import Block, Cell, Column, Finding, Table
from stepscope.report.format import bytes_, duration, number

CHOSEN = "chosen"
_WARP = 32
_REGISTERS_AT_ONCE = 256
"""A warp's registers are given out in such pieces."""
_RESERVED_SHARED = 1024
_MOST_BLOCKS = 32


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

    def ms(self, name: str) -> float | None:
        series = self.record.find(name)
        return summarize(series.values).median if series and series.values else None

    def fact(self, name: str, what: str) -> int | None:
        value = self.record.quantity(f"{name}.{what}")
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
            return self.record.notes.get(name, "").partition(":")[0] or None
        spills = self.fact(name, "spills")
        return f"{number(ms)} (spills {spills})" if spills else ms

    def described(self, name: str) -> str:
        """A tile in words: its time and what it takes."""
        ms, spills, shared = (
            self.ms(name),
            self.fact(name, "spills"),
            self.fact(name, "shared_bytes"),
        )
        if ms is None:
            return self.record.notes.get(name, "was not measured")
        words = [duration(ms)]
        if self.fact(name, "registers") is not None:
            words.append(f"{self.fact(name, 'registers')} registers")
            words.append(f"{spills} spilled" if spills else "none spilled")
        if shared is not None:
            words.append(f"{bytes_(shared)} of shared memory")
        if self.blocks(name) is not None:
            words.append(f"{self.blocks(name)} blocks a multiprocessor")
        return ", ".join(words)


def tile_blocks(records: Sequence[Record]) -> Iterator[Block]:
    studies = [TileStudy(record) for record in records if record.status == "ok"]
    for study in studies:
        yield from _why(study)
    for study in studies:
        yield _square(study)
    if studies:
        yield _facts(studies)


def _why(study: TileStudy) -> Iterator[Finding]:
    chosen = study.ms(CHOSEN)
    timed = {name: ms for name in study.names if (ms := study.ms(name)) is not None}
    if chosen is None or not timed:
        return
    m, n, warps, stages = (
        study.fact(CHOSEN, what) for what in ("tile_m", "tile_n", "warps", "stages")
    )
    best, worst = min(timed, key=timed.__getitem__), max(timed, key=timed.__getitem__)
    too_large = sum(
        study.record.notes.get(name, "").startswith("does not fit") for name in study.names
    )
    spilling = sum(bool(study.fact(name, "spills")) for name in timed)
    text = (
        f"The {study.title}: the chosen tile of {m} × {n} with {warps} warps and {stages} stages"
        f" takes {study.described(CHOSEN)}. Of {len(study.names)} tiles with"
        f" {study.record.config['warps']} warps {too_large} do not fit and"
        f" {spilling} spill; the slowest, {_sized(worst)}, takes"
        f" {number(timed[worst] / chosen, 3)} times as long."
    )
    if best != f"{m}x{n}":
        text += f" The fastest of them, {_sized(best)}, takes {study.described(best)}."
    for label, name in (("Twice the keys", f"{m}x{2 * (n or 0)}"),
                        ("Half the keys", f"{m}x{(n or 0) // 2}")):  # fmt: skip
        if name in study.names and name != best:
            text += f" {label}: {study.described(name)}."
    lost = chosen / timed[best] - 1.0
    yield Finding(text=text, tone="warn" if lost > 0.05 else "good")


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
            study.fact(name, "shared_bytes"), study.blocks(name), study.record.notes.get(name),
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
