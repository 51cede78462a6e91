"""How close to the limit can one training step get, and what does each change bring?

    stepscope run step --size small --context 512       # ladder, loss curves, waterfall
    stepscope run step --part race --race 2.7b-2048     # against torch.compile, in turns

Four parts. `ladder`: from the plainest step (eager, float32, attention written out) each change
alone and on top of those before it. `loss`: the same rungs trained on a text that can be learnt,
held against the float32 curve. `waterfall`: the first and the fastest step traced, from the ideal
time of their operations up to the measured time, by cause. `race`: ours against the fastest of
torch.compile's forms, in turns on the same weights; then each on its own for its energy.

On one H200, estimated by what a case costs: the ladder of small 1.5 minutes, of 2.7b at context
2048 2 minutes; the loss curves 7 minutes; the waterfalls 2 minutes; a race 2 to 4 minutes with
`--scopes block --modes default`, a minute more for each form that is compiled whole, several for
each with `--modes max-autotune`. What torch.compile made is found again in its caches by the next
command on the same machine.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from stepscope.errors import UsageError, unknown_name
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block
from stepscope.studies.base import Bench, Measurement, PlannedCase, Study
from stepscope.studies.flag_checks import check_seconds
from stepscope.studies.step.ladder import (
    RUNGS,
    START,
    Place,
    applies,
    climbed,
    ladder,
    needs,
    start,
)
from stepscope.studies.step.races import ATTENTIONS, MODES, RACES, SCOPES, race_spec, racers
from stepscope.studies.step.text import WORDS
from stepscope.studies.workload import Workload

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
    words: int = WORDS
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
            if getattr(self, name) <= 0:
                said = f"{name.replace('_', '-')} is {getattr(self, name):g}"
                raise UsageError(said, "it must be above 0")
        for name in ("steps", "rounds", "loss_steps", "words"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be at least 1")
        if self.warmup < 0:
            raise UsageError(f"warmup is {self.warmup}", "it cannot be negative")
        check_seconds("min-seconds", self.min_seconds)


class Step(Study[StepFlags, Any]):
    name = "step"
    title = "The fast step"
    question = (
        "What does each change bring on the way from the plainest step to the fastest,"
        " does the model still learn the same, and what keeps the step from its limit?"
    )
    examples = (
        "stepscope run step",
        "stepscope run step --part ladder waterfall --size 2.7b --context 2048",
        "stepscope run step --part race --race small-512 --modes default reduce-overhead",
        "stepscope run step --part ladder waterfall --size tiny --context 64 --device cpu",
    )
    flags = StepFlags
    goes_on = True
    on_cpu = "quick"
    no_model = "its ladder swaps parts that only the model here has; use `compile` or `advise`"

    def cases(self, flags: StepFlags) -> tuple[PlannedCase, ...]:
        made: list[PlannedCase] = []
        # The host's time counts in small races: they run before a profiler ever did.
        if "race" in flags.part:
            made += self._races(flags)
        if "ladder" in flags.part:
            made += self._ladder(flags)
        if "loss" in flags.part:
            made += self._losses(flags)
        if "waterfall" in flags.part:
            made += self._waterfalls(flags)
        return tuple(made)

    def cases_here(self, flags: StepFlags, lacks: Collection[str]) -> tuple[PlannedCase, ...]:
        """What does not apply is no rung for others to stand on: it has a row of its own."""
        absent = [n for n in RUNGS if not applies(n, lacks)]

        def with_rungs(present: bool, **fields: Any) -> tuple[PlannedCase, ...]:
            chosen = {
                name: tuple(n for n in getattr(flags, name) if (n in absent) is not present)
                for name in ("rungs", "loss_rungs", "loss_only")
            }
            return self.cases(msgspec.structs.replace(flags, **chosen, **fields))

        if not set(absent) & {*flags.rungs, *flags.loss_rungs}:
            return self.cases(flags)
        # Where none of those that were to be trained alone is left, that is not all of them.
        some, others = (
            not flags.loss_only or any((n in absent) is here for n in flags.loss_only)
            for here in (False, True)
        )
        made = with_rungs(True, part=tuple(p for p in flags.part if p != "loss" or some))
        rows = [
            with_rungs(False, part=(part,), how=("alone",), seeds=flags.seeds[:1])
            for part in flags.part
            if part == "ladder" or (part == "loss" and others)
        ]
        missing = [case for each in rows for case in each if case.config["rung"] != START]
        return (*made, *missing)

    def _ladder(self, flags: StepFlags) -> Iterator[PlannedCase]:
        for first in _starts(flags):
            for place in ladder(first, flags.rungs, flags.how):
                yield self._case("ladder", place, place.key, _effort(flags))

    def _losses(self, flags: StepFlags) -> Iterator[PlannedCase]:
        first = start(flags.loss_size, flags.table, flags.loss_context, 4, _overrides(flags))
        for name in flags.loss_only:
            if name not in flags.loss_rungs:
                raise unknown_name("rung", name, flags.loss_rungs)
        places = climbed(first, flags.loss_rungs)
        trained = [p for p in places if not flags.loss_only or p.rung in flags.loss_only]
        for place, seed in itertools.product(trained, flags.seeds):
            effort = {"seed": seed, "steps": flags.loss_steps, "words": flags.words}
            yield self._case("loss", place, f"loss-{place.key}_seed{seed}", effort)

    def _waterfalls(self, flags: StepFlags) -> Iterator[PlannedCase]:
        for first in _starts(flags):
            # Updates beside the backward would hide in its kernels: they are traced after it.
            apart = [n for n in flags.rungs if n == "compile" or RUNGS[n].stays]
            first_place, *rest = climbed(first, [n for n in apart if n != "in-backward"])
            compiled = [place for place in rest[:-1] if place.rung == "compile"]
            for place in (first_place, *compiled, *rest[-1:]):
                effort = _effort(flags) | {"traced": 2}
                case = self._case("waterfall", place, f"waterfall-{place.key}", effort)
                # It is traced kernel by kernel; the replay comes on top where there is one.
                traced = tuple(need for need in case.needs if need != "graph")
                yield msgspec.structs.replace(case, needs=traced)

    def _races(self, flags: StepFlags) -> Iterator[PlannedCase]:
        for name in flags.race:
            found = racers(name, flags.scopes, flags.modes, flags.attentions, flags.forms)
            workload = found[-1].workload
            chosen = "".join("_" + re.sub(r"[^\w.+-]+", "-", form) for form in flags.forms)
            yield PlannedCase(
                study=self.name,
                key=f"race-{name}{chosen}",
                config={"kind": "race", "race": name, "dtype": race_spec(name).dtype}
                | {"racers": msgspec.to_builtins(found), "rounds": flags.rounds}
                | {"blocks": flags.blocks, "block_seconds": flags.block_seconds}
                | {"heat_steps": 3, "steady_seconds": 1.0, "heat_seconds": flags.heat_seconds}
                | {"form_seconds": flags.form_seconds, "min_seconds": flags.min_seconds},
                needs=(
                    workload.needs[:1]
                    if race_spec(name).size == "tiny"
                    else (*workload.needs[:1], "compiler", "graph")
                ),
            )

    def _case(self, kind: str, place: Place, key: str, effort: dict[str, Any]) -> PlannedCase:
        return PlannedCase(
            study=self.name,
            key=key,
            config={"kind": kind, "rung": place.rung, "how": place.how}
            | msgspec.to_builtins(place.workload)
            | effort,
            needs=needs(place.workload),
        )

    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        from stepscope.studies.step.race import measure_race
        from stepscope.studies.step.timing import measure_rung, measure_trace
        from stepscope.studies.step.training import measure_loss

        return {
            "ladder": measure_rung,
            "loss": measure_loss,
            "waterfall": measure_trace,
            "race": measure_race,
        }[config["kind"]](config, bench)

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        from stepscope.studies.step.view import step_blocks

        return step_blocks(records)

    def presets(self, environment: Environment) -> Mapping[str, Sequence[StepFlags]]:
        if environment.device_kind == "cpu":
            quick = [StepFlags(
                part=PARTS, size=("tiny",), context=(64,), batch=(2,),
                # Compiling would take longer than all others.
                rungs=tuple(name for name in RUNGS if name != "compile"), race=("tiny-64",),
                loss_size="tiny", loss_context=32, loss_steps=40, words=16,
                loss_rungs=("flash", "fused-loss"), seeds=(0,), vocab=1024,
                warmup=1, steps=5, min_seconds=0.0, rounds=5, blocks=6, block_seconds=0.1,
            )]  # fmt: skip
        else:
            quick = [StepFlags(part=("ladder", "waterfall"))]
        return {
            "quick": quick,
            "seeds": (StepFlags(part=("ladder",)),),
            "cs336-2026": (StepFlags(part=("ladder",), table="2026"),),
            "h200": published(),
            "full": (*published(), StepFlags(part=("ladder",), size=("medium", "large"))),
        }


def published() -> tuple[StepFlags, ...]:
    """What matters most first: a machine may be lent for minutes only."""
    return (
        StepFlags(part=("race",), race=("small-512", "xl-512")),
        StepFlags(part=("race",), race=("2.7b-2048", "2.7b-512", "xl-2048")),
        # Compiled whole it would run out of the time of a case.
        StepFlags(part=("race",), race=("8b-32768",), scopes=("block",), modes=("default",),
                  rounds=3),
        StepFlags(part=("ladder", "waterfall")),
        StepFlags(part=("loss",)),
        StepFlags(part=("ladder", "waterfall"), size=("2.7b",), context=(2048,), warmup=3, steps=5),
    )  # fmt: skip


def _starts(flags: StepFlags) -> Iterator[Workload]:
    for size, context, batch in itertools.product(flags.size, flags.context, flags.batch):
        yield start(size, flags.table, context, batch, _overrides(flags))


def _overrides(flags: StepFlags) -> dict[str, int]:
    fields = {"n_layers": flags.layers, "vocab": flags.vocab}
    return {name: value for name, value in fields.items() if value is not None}


def _effort(flags: StepFlags) -> dict[str, Any]:
    return {"warmup": flags.warmup, "steps": flags.steps, "min_seconds": flags.min_seconds}


STUDY = Step()
