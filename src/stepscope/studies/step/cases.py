"""Flags and cases of the step study."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec

from stepscope.errors import unknown_name
from stepscope.studies.base import Case
from stepscope.studies.flag_checks import check_each, check_seconds
from stepscope.studies.step.ladder import (
    RUNGS,
    How,
    LadderStep,
    climbed,
    ladder,
    needs_of_kernels,
    start,
)
from stepscope.studies.step.races import ATTENTIONS, MODES, RACES, SCOPES, Racer, race_spec, racers
from stepscope.studies.training.workload import Workload, case_of

Part = Literal["ladder", "loss", "waterfall", "race"]
PARTS: tuple[Part, ...] = ("ladder", "loss", "waterfall", "race")


class StepFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: the ladder of every size, context and batch, and races by name."""

    part: tuple[Part, ...] = ("ladder", "loss", "waterfall")
    """ladder, loss, waterfall, race."""
    size: tuple[str, ...] = ("small",)
    """Sizes of the ladder and the waterfall."""
    table: Literal["2025", "2026"] = "2025"
    """Which year's size table."""
    context: tuple[int, ...] = (512,)
    """Sequence lengths in tokens."""
    batch: tuple[int, ...] = (4,)
    """Sequences per step."""
    rungs: tuple[str, ...] = tuple(RUNGS)
    """Changes, in the ladder's order: tf32, bf16, flash, fused-loss, compile, fused-pieces, joined,
    fused-optimizer, in-backward, graph, searched, as-made, narrow-stream, master, checkpoint."""
    how: tuple[Literal["alone", "so far"], ...] = ("alone", "so far")
    """Each change alone, and on top of those before it."""
    race: tuple[str, ...] = tuple(name for name in RACES if name != "tiny-64")
    """Races: 2.7b-2048, 2.7b-512, xl-512, xl-2048, small-512, 8b-32768, tiny-64."""
    scopes: tuple[str, ...] = SCOPES
    """What is compiled in a race: block, model."""
    modes: tuple[str, ...] = MODES
    """How the peer compiles: default, reduce-overhead; max-autotune takes minutes for each form."""
    attentions: tuple[str, ...] = ATTENTIONS
    """The peer's attention."""
    forms: tuple[str, ...] = ()
    """Race only forms with one of these in their name, such as 'peer: block' 'updates in
    backward'."""
    heat_seconds: float = 300.0
    """No further form of a race is tried after this time; those that were tried race."""
    form_seconds: float = 400.0
    """A form that takes longer than this to be compiled and tried is out; the others race."""
    loss_size: str = "small"
    """Size of the model that is trained."""
    loss_context: int = 512
    """Its sequence length."""
    loss_steps: int = 300
    """Steps of training."""
    loss_rungs: tuple[str, ...] = tuple(RUNGS)
    """Rungs that are trained, each with all below it."""
    loss_only: tuple[str, ...] = ()
    """Of those the ones to train now, with all below them as before: a part of the table again."""
    words: int = 256
    """Words of the text that is learnt."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each trains every rung once."""
    layers: int | None = None
    """Override this field of the sizes."""
    vocab: int | None = None
    """Override this field of the sizes."""
    warmup: int = 5
    """Steps before the first sample."""
    steps: int = 10
    """Samples at least."""
    min_seconds: float = 0.5
    """Go on sampling until this much time has passed (at most 200 samples)."""
    blocks: int = 6
    """Blocks of consecutive steps of each side of a race, alternating."""
    block_seconds: float = 4.0
    """Seconds of consecutive steps in a block at least."""
    rounds: int = 10
    """Rounds of interleaved samples of a race at least."""

    def __post_init__(self) -> None:
        for name in ("heat_seconds", "form_seconds"):
            shown = name.replace("_", "-")
            check_each(shown, (getattr(self, name),), lambda s: s > 0, "it must be above 0")
        for name in ("steps", "rounds", "loss_steps", "words"):
            check_each(name, (getattr(self, name),), lambda n: n >= 1, "it must be at least 1")
        check_seconds("warmup", self.warmup)
        check_seconds("min-seconds", self.min_seconds)


class RungCase(Workload, frozen=True, kw_only=True):
    """A step of the ladder: the start with one change, or with all changes up to it."""

    rung: str
    how: How

    @property
    def key(self) -> str:
        return f"{self.how.replace(' ', '-')}-{self.rung}_{super().key}"

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, *needs_of_kernels(self))


class LadderCase(RungCase, frozen=True, kw_only=True, tag_field="kind", tag="ladder"):
    """A rung that is timed."""

    warmup: int
    steps: int
    min_seconds: float


class LossCase(RungCase, frozen=True, kw_only=True, tag_field="kind", tag="loss"):
    """A rung that is trained."""

    seed: int
    steps: int
    words: int

    @property
    def key(self) -> str:
        return f"loss-{super().key}_seed{self.seed}"


class WaterfallCase(RungCase, frozen=True, kw_only=True, tag_field="kind", tag="waterfall"):
    """A rung that is timed and traced."""

    warmup: int
    steps: int
    min_seconds: float
    traced: int = 2

    @property
    def key(self) -> str:
        return f"waterfall-{super().key}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Without graphs: it is traced kernel by kernel, and replayed only where it can be."""
        return tuple(need for need in super().needs if need != "graph")


class StepRaceCase(Case, frozen=True, kw_only=True, tag_field="kind", tag="race"):
    """Forms of one training step that are timed in one process."""

    race: str
    dtype: str
    racers: tuple[Racer, ...]
    rounds: int
    min_seconds: float
    blocks: int = 0
    """Old races have no blocks of consecutive steps."""
    block_seconds: float = 0.0
    heat_steps: int = 3
    steady_seconds: float = 1.0
    heat_seconds: float = 300.0
    form_seconds: float = 400.0
    forms: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Parts of names that chose the racers; a race of all forms has no such field."""

    @property
    def key(self) -> str:
        chosen = "".join("_" + re.sub(r"[^\w.+-]+", "-", form) for form in self.forms or ())
        return f"race-{self.race}{chosen}"

    @property
    def needs(self) -> tuple[str, ...]:
        compute = self.racers[-1].workload.needs[:1]
        return compute if race_spec(self.race).size == "tiny" else (*compute, "compiler", "graph")


StepCase = LadderCase | LossCase | WaterfallCase | StepRaceCase


def ladder_cases(flags: StepFlags) -> Iterator[LadderCase]:
    for first in _starts(flags):
        for place in ladder(first, flags.rungs, flags.how):
            yield _case(LadderCase, place, **_effort(flags))


def loss_cases(flags: StepFlags) -> Iterator[LossCase]:
    first = start(flags.loss_size, flags.table, flags.loss_context, 4, _overrides(flags))
    for name in flags.loss_only:
        if name not in flags.loss_rungs:
            raise unknown_name("rung", name, flags.loss_rungs)
    places = climbed(first, flags.loss_rungs)
    trained = [p for p in places if not flags.loss_only or p.rung in flags.loss_only]
    for place, seed in itertools.product(trained, flags.seeds):
        yield _case(LossCase, place, seed=seed, steps=flags.loss_steps, words=flags.words)


def waterfall_cases(flags: StepFlags) -> Iterator[WaterfallCase]:
    for first in _starts(flags):
        # Optimizer-in-backward would hide in the backward's kernels: it is traced after it.
        apart = [n for n in flags.rungs if n == "compile" or RUNGS[n].stays]
        first_place, *rest = climbed(first, [n for n in apart if n != "in-backward"])
        compiled = [place for place in rest[:-1] if place.rung == "compile"]
        for place in (first_place, *compiled, *rest[-1:]):
            yield _case(WaterfallCase, place, **_effort(flags))


def race_cases(flags: StepFlags) -> Iterator[StepRaceCase]:
    for name in flags.race:
        yield StepRaceCase(
            race=name,
            dtype=race_spec(name).dtype,
            racers=racers(name, flags.scopes, flags.modes, flags.attentions, flags.forms),
            forms=flags.forms or msgspec.UNSET,
            rounds=flags.rounds,
            blocks=flags.blocks,
            block_seconds=flags.block_seconds,
            heat_seconds=flags.heat_seconds,
            form_seconds=flags.form_seconds,
            min_seconds=flags.min_seconds,
        )


R = TypeVar("R", bound=RungCase)


def _case(kind: type[R], place: LadderStep, **effort: Any) -> R:
    return case_of(place.workload, kind, rung=place.rung, how=place.how, **effort)


def _starts(flags: StepFlags) -> Iterator[Workload]:
    for size, context, batch in itertools.product(flags.size, flags.context, flags.batch):
        yield start(size, flags.table, context, batch, _overrides(flags))


def _overrides(flags: StepFlags) -> dict[str, int]:
    fields = {"n_layers": flags.layers, "vocab": flags.vocab}
    return {name: value for name, value in fields.items() if value is not None}


def _effort(flags: StepFlags) -> dict[str, Any]:
    return {"warmup": flags.warmup, "steps": flags.steps, "min_seconds": flags.min_seconds}
