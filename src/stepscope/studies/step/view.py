"""Tables and figures of the step study."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from stepscope.analysis.limits import mfu, tokens_per_second
from stepscope.analysis.power import Draw
from stepscope.analysis.trace.summary import Summary as Trace
from stepscope.records.stats import Ratio
from stepscope.report.blocks import Block, Cell, Curve, Figure, Interval, Spread, Table
from stepscope.report.format import bytes_, number, percent
from stepscope.report.tables import STATUS, col, failed_table, table
from stepscope.studies.base import Result, results_of
from stepscope.studies.step.cases import StepCase, StepRaceCase, WaterfallCase
from stepscope.studies.step.findings import step_findings
from stepscope.studies.step.ladder import START, words
from stepscope.studies.step.races import SIDES, Heat
from stepscope.studies.step.rows import (
    AGREES_WITHIN,
    FALLS_BY,
    Ladder,
    Lead,
    LossCurve,
    StepRace,
    ladders,
    loss_curves,
    races,
)
from stepscope.studies.views.waterfall import Fall, fall_of, waterfall_blocks

_POINTS, _WINDOWS = 60, 20
"""Points of a loss curve, and of its distance from another: each the mean of the steps up to the
next."""
_HOW = {"start": "", "first": "both", "alone": "alone", "so far": "on those before"}


def step_blocks(results: Sequence[Result[StepCase]]) -> tuple[Block, ...]:
    climbed, learnt, raced = ladders(results), loss_curves(results), races(results)
    lost = [r.record for r in results if isinstance(r.case, WaterfallCase | StepRaceCase)]
    return (
        *step_findings(climbed, learnt, raced),
        *speed_table(raced),
        *_power_table(raced),
        *(
            block
            for index, ladder in enumerate(climbed, start=1)
            for block in _ladder_blocks(ladder, f"-{index}" if len(climbed) > 1 else "")
        ),
        *waterfall_blocks(list(_falls(results)), "step"),
        *_loss_blocks(learnt),
        *heat_table(raced),
        *failed_table("step", lost),
    )


def _ladder_blocks(ladder: Ladder, suffix: str) -> Iterator[Block]:
    climb = ladder.climb
    if len(climb) > 1:
        names = (rung.case.rung for rung, _ in climb)
        yield Figure(
            name=f"step-climb{suffix}",
            title=f"From the plainest step to the fastest: {ladder.name}",
            kind="bars",
            curves=(
                Curve(
                    label="step",
                    x=tuple(START if name == START else f"+ {name}" for name in names),
                    y=tuple(step.median for _, step in climb),
                ),
            ),
            x_label="each with all before it that stay; see the table for those that do not",
            y_label="step, ms",
        )
    start = ladder.start
    yield table(
        f"step-ladder{suffix}",
        f"Each change alone and on top of those before it: {ladder.name}",
        ladder.rungs,
        [
            col("change", lambda r: words(r.case.rung), key=True),
            col("how", lambda r: _HOW[r.case.how], key=True),
            col(
                "step",
                lambda r: (
                    r.step and Interval(value=r.step.median, low=r.step.low, high=r.step.high)
                ),
                unit="ms",
                hint="median with its 95 % interval",
            ),
            col(
                "against the start",
                lambda r: start.median / r.step.median if start and r.step else None,
                unit="×",
            ),
            col("against the rung before", lambda r: r.gain, unit="×"),
            col("tokens/s", lambda r: _rounded(tokens_per_second(r.record)), "count"),
            col(
                "MFU, measured",
                lambda r: mfu(r.record),
                "percent",
                hint="of the matrix rate of its format",
            ),
            col("MFU, data sheet", lambda r: mfu(r.record, measured=False), "percent"),
            col(
                "host-bound",
                lambda r: r.host and r.host.fraction,
                "percent",
                hint="share of the step in phases that were no faster than their launches",
            ),
            col("peak memory", lambda r: r.peak, "bytes"),
            col("why not", lambda r: r.record.reason or None, key=True),
        ],
        caption="Alone: the start with this one change. On those before: on top of every change"
        " above it that stays; torch.compile, searched kernels, narrower formats, master weights"
        " and checkpointing do not. What is no graph where the rung before is one is not held"
        " against it. Both: the two are the same. MFU is of the rate of each step's own format,"
        " so a faster format can lower it.",
    )


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _falls(results: Sequence[Result[StepCase]]) -> Iterator[Fall]:
    for record, case in results_of(results, WaterfallCase):
        trace = record.attachment("profile", Trace)
        if trace is None:
            continue
        if record.find("replay") is None:
            # Without a replay the times are those of the step kernel by kernel.
            case = msgspec.structs.replace(case, graph=False)
        if (fall := fall_of(record, case, trace)) is not None:
            yield fall


def _loss_blocks(learnt: dict[str, LossCurve]) -> Iterator[Block]:
    shown = {rung: curve for rung, curve in learnt.items() if curve.by_seed}
    if shown:
        yield Figure(
            name="step-loss-curves",
            title="The loss while a text is learnt",
            kind="lines",
            curves=tuple(_thinned(curve) for curve in shown.values()),
            x_label="step of training",
            y_label="loss, nats",
            caption="Mean of the seeds. The text is a chain of words, each followed by one of eight"
            " others; all rungs read the same.",
        )
    if START in shown:
        yield from _apart(shown)
    if learnt:
        yield _loss_table(learnt)


def _thinned(curve: LossCurve) -> Curve:
    mean = curve.mean()
    stride = max(1, len(mean) // _POINTS)
    parts = [mean[at : at + stride] for at in range(0, len(mean), stride)]
    return Curve(
        label=curve.rung,
        x=tuple(float(1 + index * stride) for index in range(len(parts))),
        y=tuple(sum(part) / len(part) for part in parts),
    )


def _apart(shown: dict[str, LossCurve]) -> Iterator[Figure]:
    """Curves on top of each other do not show their distance."""
    steps = max(1, len(shown[START].mean()) // _WINDOWS)
    curves = tuple(
        Curve(
            label=rung,
            x=tuple(steps * (at + 0.5) for at in range(len(shares))),
            y=tuple(100 * share for share in shares),
        )
        for rung, curve in shown.items()
        if rung != START and (shares := curve.apart_in_windows(shown[START], steps))
    )
    if curves:
        yield Figure(
            name="step-loss-apart",
            title="How far the loss is from that of the start",
            kind="lines",
            curves=curves,
            x_label="step of training",
            y_label="more than the start's loss, %",
            caption=f"Each seed against the start with the same seed, in stretches of {steps}"
            f" steps; mean of the seeds. At the end {percent(AGREES_WITHIN)} are allowed.",
        )


def _loss_table(learnt: dict[str, LossCurve]) -> Table:
    start = learnt.get(START)
    fell = start.fell_by() if start is not None else None

    def apart(curve: LossCurve) -> float | None:
        return None if start is None or curve.rung == START else curve.apart(start)

    def verdict(curve: LossCurve) -> str | None:
        if not curve.by_seed:
            failed = curve.records[0]
            return f"{STATUS.get(failed.status, failed.status)}: {failed.reason}"
        if (away := apart(curve)) is None:
            return None
        if fell is None or fell < FALLS_BY:
            return "too short to tell"
        return "same" if abs(away) <= AGREES_WITHIN else "apart"

    return table(
        "step-loss",
        "Does it still learn the same?",
        learnt.values(),
        [
            col("with all before", lambda c: words(c.rung)),
            col("seeds", lambda c: len(c.by_seed), "count"),
            col("first loss", lambda c: _mean([v[0] for v in c.by_seed.values()]), unit="nats"),
            col(
                "at the end",
                lambda c: _mean(c.ends().values()),
                unit="nats",
                hint="mean of the last tenth",
            ),
            col("fell by", lambda c: c.fell_by(), "percent", hint="the least of all seeds"),
            col("from float32", apart, "percent", hint="the farthest of all seeds"),
            col("verdict", verdict),
        ],
        caption=f"Same: at the end within {percent(AGREES_WITHIN)} of the float32 curve of its"
        f" seed. A text counts as learnt where the loss falls by at least {percent(FALLS_BY)}.",
    )


def _mean(values: Collection[float]) -> float | None:
    return sum(values) / len(values) if values else None


class SpeedRow(NamedTuple):
    """The times of one side of a race, or its peak memory."""

    case: str
    peer: str
    peer_ms: float | None
    own: str
    ms: float | None
    consecutive: Cell
    interleaved: Cell
    mfu: float | None


def speed_table(raced: Sequence[StepRace]) -> Iterator[Table]:
    rows = [row for race in raced for row in _speed_rows(race)]
    if not rows:
        return
    yield table(
        "step-speed",
        "One training step: ours against the fastest peer",
        rows,
        [
            col("case", lambda r: r.case),
            col("peer", lambda r: r.peer, hint="the fastest of its forms"),
            col("peer", lambda r: r.peer_ms, unit="ms", hint="consecutive steps"),
            col("ours", lambda r: r.own),
            col("ours", lambda r: r.ms, unit="ms", hint="consecutive steps"),
            col(
                "consecutive",
                lambda r: r.consecutive,
                unit="×",
                hint="the peer's step over ours where steps follow each other as in training,"
                " or our share of its memory",
            ),
            col(
                "interleaved",
                lambda r: r.interleaved,
                unit="×",
                hint="the same for single samples in alternation, each from an idle device,"
                " with its 95 % interval",
            ),
            col(
                "MFU",
                lambda r: r.mfu,
                "percent",
                hint="ours, of the data sheet's rate, or of the measured one where there is none",
            ),
        ],
        caption="All forms run on the same weights in one process; the peer has torch's fused"
        " AdamW. Consecutive steps follow each other without a pause, in blocks of at least 4 s"
        " that alternate between the sides, with the 95 % interval of the ratio of neighbouring"
        " blocks; a value without an interval is of one such block for each side. Interleaved"
        " samples each start on an idle device: they contain host time that consecutive steps"
        " hide, and a power-limited clock recovers between them. Dtypes are the same, except in"
        " rows with narrower formats: there the gradients of the blocks' matmuls reach the"
        " update in the dtype of the matmuls, to which the peer's were rounded before they"
        " became float32, and with a narrow stream the residual stream has that dtype too. MFU"
        " counts causal attention once and nothing twice.",
    )


def _speed_rows(race: StepRace) -> Iterator[SpeedRow]:
    if race.step_ms("peer") is None or race.step_ms() is None:
        return
    yield from _time_row(race, "ours", race.name)
    if race.spec.less_memory:
        yield from _memory_row(race, "ours", f"{race.name}, peak memory")
        yield from _memory_row(race, "spare", f"{race.name}, peak memory, {race.form('spare')}")
    yield from _time_row(race, "narrow", f"{race.name}, narrower formats")


def _time_row(race: StepRace, side: str, name: str) -> Iterator[SpeedRow]:
    ratio, ms = race.ratio(side), race.step_ms(side)
    if ms is not None and ratio is not None:
        yield SpeedRow(
            name,
            race.form("peer"),
            race.step_ms("peer"),
            race.form(side),
            ms,
            lead_cell(race.lead(side)),
            interval_cell(ratio),
            race.mfu(side),
        )


def _memory_row(race: StepRace, side: str, name: str) -> Iterator[SpeedRow]:
    """Peaks in place of the forms; times only of a form that has no row of its own."""
    peer, own, ms = race.peak("peer"), race.peak(side), race.step_ms(side)
    if peer is not None and own is not None and ms is not None:
        row = SpeedRow(name, bytes_(peer), None, bytes_(own), None, own / peer, None, None)
        if side != "ours":
            row = row._replace(peer_ms=race.step_ms("peer"), ms=ms, mfu=race.mfu(side))
        yield row


def lead_cell(lead: Lead | None) -> Cell:
    """The ratio of consecutive steps, with its interval where blocks alternated."""
    if lead is None:
        return None
    return lead.value if lead.ratio is None else interval_cell(lead.ratio)


def interval_cell(ratio: Ratio) -> Interval:
    return Interval(value=ratio.value, low=ratio.low, high=ratio.high)


class PowerRow(NamedTuple):
    race: StepRace
    side: str
    draw: Draw


def _power_table(raced: Sequence[StepRace]) -> Iterator[Table]:
    rows = [
        PowerRow(race, side, draw)
        for race in raced
        for side in SIDES
        if (draw := race.draw(side)) is not None
    ]
    if not rows:
        return
    yield table(
        "step-power",
        "What a step takes in energy",
        rows,
        [
            col("case", lambda r: r.race.name),
            col("side", lambda r: r.side),
            col("form", lambda r: r.race.form(r.side)),
            col(
                "energy",
                lambda r: Spread(value=r.draw.joules, plus_minus=r.draw.resolution),
                unit="J",
                hint="of one step",
            ),
            col("power", lambda r: r.draw.watts, unit="W", hint="mean"),
            col("limit", lambda r: r.draw.limit_w, unit="W", hint="what the device may take"),
            col("of the limit", lambda r: r.draw.of_limit, "percent"),
            col("SM clock", lambda r: r.draw.clock_mhz, unit="MHz", hint="median of readings"),
            col("step", lambda r: r.draw.step_ms, unit="ms", hint="in that stretch"),
            col(
                "energy lasts",
                lambda r: r.draw.lasts_ms,
                unit="ms",
                hint="at the power cap: how long a step's energy lasts at the limit",
            ),
        ],
        caption="One block of consecutive steps for each side, of 1.5 to 4 s or two steps after"
        " the clock has settled, by the device's own counter, ± one increment of it. At the"
        " power cap a step takes as long as its energy lasts. Reading the counter slows a host"
        " that limits the step.",
    )


class HeatRow(NamedTuple):
    """A form that was tried, in the race that counts or in another of the same step."""

    case: str
    name: str
    heat: Heat | None
    outcome: str | None


def heat_table(raced: Sequence[StepRace]) -> Iterator[Table]:
    rows = [row for race in raced for row in _heat_rows(race)]
    if not rows:
        return
    yield table(
        "step-heats",
        "Every form that was tried",
        rows,
        [
            col("case", lambda r: r.case),
            col("side", lambda r: r.name.partition(": ")[0]),
            col("form", lambda r: r.name.partition(": ")[2]),
            col(
                "step", lambda r: r.heat and r.heat.ms, unit="ms", hint="alone, by the host's clock"
            ),
            col(
                "in turns",
                lambda r: r.heat and r.heat.turns_ms,
                unit="ms",
                hint="forms of one side whose steps were close took turns",
            ),
            col(
                "first step",
                lambda r: r.heat and r.heat.first_s,
                unit="s",
                hint="building and compiling too",
            ),
            col("peak memory", lambda r: r.heat and r.heat.peak_bytes, "bytes"),
            col("outcome", lambda r: r.outcome),
        ],
        caption="The fastest of each side raced: by its turns, where forms that were close took"
        " turns. A peak counts what a form shares with the others (weights, moments) as its"
        " own.",
    )


def _heat_rows(race: StepRace) -> Iterator[HeatRow]:
    """The forms of the race that counts, then those that only others had."""
    shown: set[str] = set()
    for run in (race, *race.others):
        for name, heat in run.heats.items():
            if name in shown:
                continue
            side = name.partition(": ")[0]
            if isinstance(heat, str):
                yield HeatRow(race.name, name, None, heat)
            elif run is not race:
                yield HeatRow(race.name, name, heat, _elsewhere(run, side))
            else:
                raced = name in race.best.values()
                yield HeatRow(race.name, name, heat, _raced(run, side) if raced else None)
        shown |= set(run.heats)


def _raced(run: StepRace, side: str) -> str:
    failed = (run.record.attachment("no_run_off", dict[str, str]) or {}).get(side)
    return "raced" if failed is None else f"raced for its step alone, turns failed: {failed}"


def _elsewhere(run: StepRace, side: str) -> str:
    best = run.heats.get(run.best.get(side, ""))
    if not isinstance(best, Heat):
        return "another run"
    return f"another run, where the fastest was {run.form(side)} with {number(best.ms, 4)} ms"
