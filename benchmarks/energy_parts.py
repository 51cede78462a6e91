"""Energy of a step by part: each part measured alone, compared with the full step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stepscope.model.config import ModelConfig
from stepscope.model.cost import flops, parameters

GEMMS, ATTENTION, UPDATES, PASSES = "GEMMs", "attention", "AdamW", "other passes"
FULL_STEP, BASELINE_MATMULS = "full step", "GEMMs, baseline variant"
PARTS = (GEMMS, ATTENTION, UPDATES, PASSES)
NEEDED = (GEMMS, ATTENTION, UPDATES)
"""Parts that remain if everything else costs nothing."""


class PartEnergy(NamedTuple):
    """Time and energy of one part, repeated without a pause."""

    part: str
    ms: float
    joules: float
    resolution: float | None = None
    """Joules per increment of the device's energy counter."""
    clock_mhz: float | None = None
    flops: float | None = None

    @property
    def watts(self) -> float:
        return 1e3 * self.joules / self.ms

    @property
    def rate(self) -> float | None:
        """FLOP/s."""
        return None if self.flops is None else 1e3 * self.flops / self.ms


class Account(NamedTuple):
    """Energy ledger of one step; `race` names the comparison it belongs to."""

    race: str
    taken: Mapping[str, PartEnergy]
    lost: Mapping[str, str]
    """Parts that were not measured, with the reason."""
    limit_w: float | None

    def together(self, name: str, parts: Iterable[str]) -> PartEnergy | None:
        """Sum of these parts; None if one of them was not measured."""
        entries = [self.taken.get(part) for part in parts]
        measured = [entry for entry in entries if entry is not None]
        if not measured or len(measured) < len(entries):
            return None
        return PartEnergy(
            name, sum(entry.ms for entry in measured), sum(entry.joules for entry in measured)
        )

    def of_the_step(self, joules: float) -> float | None:
        """Return these joules as a share of the full step's."""
        step = self.taken.get(FULL_STEP)
        return None if step is None else joules / step.joules

    def lasts_ms(self, joules: float) -> float | None:
        """Time to spend these joules at the device's power limit."""
        return 1e3 * joules / self.limit_w if self.limit_w else None

    @property
    def all_parts(self) -> PartEnergy | None:
        return self.together("sum of the parts", PARTS)

    @property
    def needed(self) -> PartEnergy | None:
        return self.together(f"only {', '.join(NEEDED[:-1])} and {NEEDED[-1]}", NEEDED)

    def rows(self) -> list[PartEnergy]:
        """Rows of a table: the parts, their sum, the full step, and the baseline's matmuls."""
        parts = [self.taken.get(part) for part in PARTS]
        more = [self.all_parts, self.taken.get(FULL_STEP), self.taken.get(BASELINE_MATMULS)]
        return [row for row in (*parts, *more) if row is not None]


def accounts(lines: Iterable[Mapping[str, Any]]) -> list[Account]:
    """Parse the lines of a file into one ledger per comparison."""
    races: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        races.setdefault(line["race"], []).append(line)
    return [
        Account(
            race,
            {line["part"]: _taken(line) for line in entries if "lost" not in line},
            {line["part"]: line["lost"] for line in entries if "lost" in line},
            next((line["power_limit_w"] for line in entries if line.get("power_limit_w")), None),
        )
        for race, entries in races.items()
    ]


def _taken(line: Mapping[str, Any]) -> PartEnergy:
    return PartEnergy(
        line["part"],
        line["ms"],
        line["joules"],
        line["resolution"],
        line["sm_clock_mhz"],
        line["flops"],
    )


def to_whole(
    part: str, whole: ModelConfig, measured: ModelConfig, batch: int, context: int
) -> float:
    """Work of the full model in a part, as a multiple of that of a model with fewer blocks."""
    if part in (ATTENTION, PASSES):
        return whole.n_layers / measured.n_layers
    if part == UPDATES:
        return parameters(whole).total / parameters(measured).total
    full, some = flops(whole, batch, context), flops(measured, batch, context)
    if part == FULL_STEP:
        return full.step / some.step
    return full.step_linear / some.step_linear
