"""Flags and case of a comparison of full training steps."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from step_race.races import ATTENTIONS, MODES, RACES, SCOPES, Racer, race_spec, racers
from stepscope.studies.base import Case
from stepscope.training.flag_checks import check_at_least, check_each, check_seconds

_STEADY_S = 1.0
"""Duration of a trial, unless the blocks of the result are shorter."""


class RaceFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The steps to compare, the variants of torch.compile and the effort."""

    race: tuple[str, ...] = tuple(
        name for name, spec in RACES.items() if name != "tiny-64" and not spec.fp8
    )
    """Steps to compare with torch.compile: 2.7b-2048, 2.7b-512, xl-512, xl-2048, small-512,
    8b-32768, tiny-64; with variants in FP8: 2.7b-2048-fp8, xl-2048-fp8, 8b-32768-fp8."""
    scopes: tuple[str, ...] = SCOPES
    """Scope of torch.compile: block, model."""
    modes: tuple[str, ...] = MODES
    """Modes of torch.compile: default, reduce-overhead, or max-autotune, which takes minutes for
    each variant."""
    attentions: tuple[str, ...] = ATTENTIONS
    """Attention implementations of the torch.compile variants."""
    forms: tuple[str, ...] = ()
    """Compare only the variants whose name contains one of these strings, such as
    'baseline: block' (torch.compile of each block) 'optimizer-in-backward'."""
    heat_seconds: float = 300.0
    """Time limit for trying the variants in seconds; those not tried by then are left out."""
    form_seconds: float = 400.0
    """Time limit for compiling and trying one variant in seconds; a slower variant is left out."""
    min_seconds: float = 0.5
    """Keep sampling until this much time has passed (at most 200 samples)."""
    blocks: int = 6
    """Blocks of consecutive steps for each side; the sides alternate."""
    block_seconds: float = 4.0
    """Minimum duration of a block of consecutive steps in seconds."""
    rounds: int = 10
    """Minimum number of rounds of interleaved samples."""

    def __post_init__(self) -> None:
        for name in ("heat_seconds", "form_seconds"):
            shown = name.replace("_", "-")
            check_each(shown, (getattr(self, name),), lambda s: s > 0, "it must be above 0")
        check_at_least(1, rounds=self.rounds)
        check_seconds("min-seconds", self.min_seconds)


class StepRaceCase(Case, frozen=True, kw_only=True):
    """Variants of one training step, timed in one process."""

    race: str
    dtype: str
    racers: tuple[Racer, ...]
    rounds: int
    min_seconds: float
    blocks: int = 0
    """Zero in old records, which have no blocks of consecutive steps."""
    block_seconds: float = 0.0
    heat_steps: int = 3
    steady_seconds: float = _STEADY_S
    heat_seconds: float = 300.0
    form_seconds: float = 400.0
    forms: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Substrings that selected the variants by name; unset for a race of all variants."""

    @property
    def key(self) -> str:
        chosen = "".join("_" + re.sub(r"[^\w.+-]+", "-", form) for form in self.forms or ())
        return f"race-{self.race}{chosen}"

    @property
    def needs(self) -> tuple[str, ...]:
        compute = self.racers[-1].workload.needs[:1]
        if race_spec(self.race).fp8:
            compute = (*compute, "fp8")
        return compute if race_spec(self.race).size == "tiny" else (*compute, "compiler", "graph")


def race_cases(flags: RaceFlags) -> Iterator[StepRaceCase]:
    for name in flags.race:
        yield StepRaceCase(
            race=name,
            dtype=race_spec(name).dtype,
            racers=racers(name, flags.scopes, flags.modes, flags.attentions, flags.forms),
            forms=flags.forms or msgspec.UNSET,
            rounds=flags.rounds,
            blocks=flags.blocks,
            block_seconds=flags.block_seconds,
            steady_seconds=min(_STEADY_S, flags.block_seconds),
            heat_seconds=flags.heat_seconds,
            form_seconds=flags.form_seconds,
            min_seconds=flags.min_seconds,
        )
