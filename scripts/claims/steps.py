"""Claims on training steps: power, FP8, kernels alone, memory and the cost of recording."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from acceleration_page import GRAPHS
from energy_page import RECORDS as ENERGY
from energy_parts import FULL_STEP, GEMMS, accounts
from fp8_page import FILE as LEARNING
from fp8_page import Learned, learned
from memory_page import RECORDING
from pieces_page import over_stepscope, races_of
from step_race import STUDY as STEP
from step_race.rows import StepRace, races

from claims.records import Claim, lines_of, percents, records_of, spread
from stepscope.records.stats import Summary, summarize
from stepscope.report.blocks import Finding
from stepscope.report.format import number, percent
from stepscope.studies.memory import STUDY as MEMORY

_RACES = "step-race_h200.jsonl"
_LINEAR = "fp8-linear_h200.jsonl"
_CPU_BOUND = "large_c512_b4_bfloat16_reference_train-step"


def _raced(results: Path) -> list[StepRace]:
    return races(STEP.results(records_of(results / _RACES)))


def _of_limit(results: Path) -> Iterator[float]:
    """Mean power over the limit of both sides of every comparison but that of `small`."""
    for race in _raced(results):
        for side in ("baseline", "stepscope"):
            drawn = race.draw(side)
            if race.spec.size != "small" and drawn is not None and drawn.of_limit is not None:
                yield drawn.of_limit


def _limit(results: Path) -> str:
    limits = {race.record.environment.power_limit_w for race in _raced(results)}
    (watts,) = limits
    return f"{number(watts or 0.0, 3)} W"


def _gemms(results: Path) -> str:
    return percents(
        one.taken[GEMMS].joules / one.taken[FULL_STEP].joules
        for one in accounts(lines_of(results / ENERGY))
    )


def _piece(results: Path, piece: str, variant: str, inverse: bool = False) -> str:
    ratios = [
        ratio.value
        for race in races_of(results)
        if race[0]["piece"].startswith(piece)
        and (ratio := over_stepscope(race, variant)) is not None
    ]
    return spread(1 / ratio if inverse else ratio for ratio in ratios)


def _learned(results: Path, model: str) -> Learned:
    """Trainings with FP8 in all linear layers of the blocks."""
    every = learned(list(lines_of(results / LEARNING)))
    return next(one for one in every if (one.model, one.dtype) == (model, "fp8"))


def _fp8_seeds(results: Path, model: str) -> str:
    return str(len(_learned(results, model).changes))


def _fp8_change(results: Path, model: str) -> str:
    return percent(_learned(results, model).change or 0.0)


def _fp8_spread(results: Path, model: str) -> str:
    return percent(_learned(results, model).spread or 0.0)


def _fp8_pair(results: Path) -> str:
    both = (_learned(results, model).changes for model in ("small", "300m"))
    return percent(max(abs(change) for changes in both for change in changes))


def _fp8_layers(results: Path, recipe: str) -> str:
    """Speed of the layers of a block relative to bfloat16, with the casts."""
    times = {"bf16": 0.0, recipe: 0.0}
    for line in lines_of(results / _LINEAR):
        if line["recipe"] in times:
            times[line["recipe"]] += line.get("together_ms", line["gemms_ms"])
    return f"{times['bf16'] / times[recipe]:.2f}"


def _history(results: Path, case: str) -> Summary:
    """Ratio of steps with the allocator's history to those without."""
    (line,) = (one for one in lines_of(results / RECORDING) if one["case"] == case)
    pairs = zip(line["ms"]["history"], line["ms"]["plain"], strict=False)
    return summarize([history / plain for history, plain in pairs])


def _histories(results: Path) -> str:
    cases = [one["case"] for one in lines_of(results / RECORDING)]
    return spread(_history(results, case).median for case in cases)


def _history_interval(results: Path) -> str:
    ratio = _history(results, _CPU_BOUND)
    return spread((ratio.low, ratio.high))


def _memory(results: Path, name: str) -> float:
    blocks = MEMORY.view(records_of(results / "memory_h200.jsonl"))
    (one,) = (b for b in blocks if isinstance(b, Finding) and b.code == "memory.prediction")
    value = one.values[name]
    assert isinstance(value, int | float)
    return float(value)


def _blocks(results: Path) -> str:
    """Seconds of consecutive steps of one form."""
    timed = [line for line in lines_of(results / GRAPHS) if "median_ms" in line]
    return f"{spread((line['seconds'] for line in timed), 0)} s"


CLAIMS: dict[str, Claim] = {
    "accelerate.blocks": _blocks,
    "step.power-limit": _limit,
    "step.of-power-limit": lambda results: percents(_of_limit(results)),
    "step.energy-of-gemms": _gemms,
    "kernels.embedding-over-compiled": partial(
        _piece, piece="embedding", variant="compiled", inverse=True
    ),
    "kernels.torch-over-embedding": partial(_piece, piece="embedding", variant="eager"),
    "kernels.bf16-state": partial(_piece, piece="adamw", variant="stepscope, bf16 state"),
    **{
        f"fp8.{name}-{model}": partial(claim, model=model)
        for model in ("small", "300m")
        for name, claim in (("change", _fp8_change), ("spread", _fp8_spread), ("seeds", _fp8_seeds))
    },
    "fp8.pair": _fp8_pair,
    **{
        f"fp8.layers-{recipe}": partial(_fp8_layers, recipe=recipe)
        for recipe in ("tensorwise", "delayed", "rowwise", "blockwise")
    },
    "memory.history": _histories,
    "memory.history-interval": _history_interval,
    "memory.predictions": lambda results: f"{_memory(results, 'predictions'):.0f}",
    "memory.worst": lambda results: percent(_memory(results, "worst")),
}
