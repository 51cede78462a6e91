"""Where the joules of a step go: its parts, each measured on its own, against the whole step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stepscope.model.config import ModelConfig
from stepscope.model.cost import flops, parameters

PRODUCTS, ATTENTION, UPDATES, PASSES = "products", "attention", "AdamW", "other passes"
WHOLE, PEERS_PRODUCTS = "whole step", "products, peer's form"
PARTS = (PRODUCTS, ATTENTION, UPDATES, PASSES)
NEEDED = (PRODUCTS, ATTENTION, UPDATES)
"""What is left of a step in which all else costs nothing."""


class Taken(NamedTuple):
    """What one part takes, repeated without a pause."""

    part: str
    ms: float
    joules: float
    resolution: float | None = None
    """What one move of the device's counter comes to."""
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
    """The parts of one race's step."""

    race: str
    taken: Mapping[str, Taken]
    lost: Mapping[str, str]
    """Parts that were not measured, each with the reason."""
    limit_w: float | None

    def together(self, name: str, parts: Iterable[str]) -> Taken | None:
        """One after the other; None where one of them was not measured."""
        found = [self.taken.get(part) for part in parts]
        held = [one for one in found if one is not None]
        if not held or len(held) < len(found):
            return None
        return Taken(name, sum(one.ms for one in held), sum(one.joules for one in held))

    def of_the_step(self, joules: float) -> float | None:
        whole = self.taken.get(WHOLE)
        return None if whole is None else joules / whole.joules

    def lasts_ms(self, joules: float) -> float | None:
        """At the device's limit of power."""
        return 1e3 * joules / self.limit_w if self.limit_w else None

    @property
    def all_parts(self) -> Taken | None:
        return self.together("sum of the parts", PARTS)

    @property
    def needed(self) -> Taken | None:
        return self.together(f"only {', '.join(NEEDED[:-1])} and {NEEDED[-1]}", NEEDED)

    def rows(self) -> list[Taken]:
        """For a table: the parts, their sum, the whole step, and the peer's products."""
        parts = [self.taken.get(part) for part in PARTS]
        more = [self.all_parts, self.taken.get(WHOLE), self.taken.get(PEERS_PRODUCTS)]
        return [row for row in (*parts, *more) if row is not None]


def accounts(lines: Iterable[Mapping[str, Any]]) -> list[Account]:
    """From the lines of a file, by race."""
    races: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        races.setdefault(line["race"], []).append(line)
    return [
        Account(
            race,
            {line["part"]: _taken(line) for line in held if "lost" not in line},
            {line["part"]: line["lost"] for line in held if "lost" in line},
            next((line["power_limit_w"] for line in held if line.get("power_limit_w")), None),
        )
        for race, held in races.items()
    ]


def _taken(line: Mapping[str, Any]) -> Taken:
    return Taken(
        line["part"], line["ms"], line["joules"], line["resolution"], line["sm_clock_mhz"],
        line["flops"],
    )  # fmt: skip


def to_whole(
    part: str, whole: ModelConfig, measured: ModelConfig, batch: int, context: int
) -> float:
    """How many times the work of a model with fewer blocks the whole one has in that part."""
    if part in (ATTENTION, PASSES):
        return whole.n_layers / measured.n_layers
    if part == UPDATES:
        return parameters(whole).total / parameters(measured).total
    full, some = flops(whole, batch, context), flops(measured, batch, context)
    if part == WHOLE:
        return full.step / some.step
    return full.step_linear / some.step_linear
