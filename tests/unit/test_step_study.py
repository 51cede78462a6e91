"""The step study: its ladder, its text, its races, and what its page says of planted records."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from sample_records import environment, times
from step_records import (
    loss_record,
    rung_record,
    step_race_record,
    waterfall_record,
)
from stepscope.errors import UsageError
from stepscope.measure.device import CpuDevice
from stepscope.records.schema import Quantity, Record
from stepscope.report.blocks import Interval, Timeline
from stepscope.studies.registry import find_study
from stepscope.studies.step.cases import PARTS, StepFlags
from stepscope.studies.step.ladder import RUNGS, climbed, ladder, start
from stepscope.studies.step.measure import FOLLOWERS, begin_again, entropy, sequences
from stepscope.studies.step.rows import ladders, loss_curves, races
from stepscope.studies.training.transformer import TransformerStep

STUDY = find_study("step")
FIRST = start("small", "2025", 512, 4, {})


def test_training_begins_again_with_master_weights_too() -> None:
    work = msgspec.structs.replace(
        start("tiny", "tiny", 8, 1, {"vocab": 32, "n_layers": 1}),
        dtype="bfloat16-master",
        optimizer="stepscope-fused",
    )
    step = TransformerStep(work, CpuDevice())
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step.run_phases()
    begin_again(step, before)
    for parameter, held in zip(step.model.parameters(), before, strict=True):
        assert parameter.equal(held)
        state = step.optimizer.state[parameter]
        assert state["master"].equal(held.float())
        assert not any(state[name].any() for name in ("step", "exp_avg", "exp_avg_sq"))


class TestLadder:
    def test_each_change_alone_and_on_top_of_those_before_it(self) -> None:
        places = list(ladder(FIRST, ("bf16", "flash", "fused-loss")))
        assert [(p.rung, p.how) for p in places] == [
            ("start", "start"),
            ("bf16", "first"),
            ("flash", "alone"),
            ("flash", "so far"),
            ("fused-loss", "alone"),
            ("fused-loss", "so far"),
        ]
        alone, so_far = places[-2].workload, places[-1].workload
        assert (alone.dtype, alone.attention, alone.loss) == ("float32", "reference", "fused")
        assert (so_far.dtype, so_far.attention, so_far.loss) == ("bfloat16", "auto", "fused")

    def test_what_does_not_stay_is_not_below_the_rungs_after_it(self) -> None:
        places = {(p.rung, p.how): p.workload for p in ladder(FIRST, tuple(RUNGS))}
        assert places["master", "so far"].dtype == "bfloat16-master"
        on_top = places["checkpoint", "so far"]
        assert (on_top.checkpoint, on_top.dtype, on_top.graph) == ("1", "bfloat16", True)
        assert places["master", "so far"].graph
        # A compiled model fuses the pieces itself.
        assert places["compile", "so far"].fused is False
        best = places["graph", "so far"]
        assert (best.compile, best.fused, best.joined) == ("no", True, True)
        assert best.optimizer == "stepscope-in-backward"

    def test_rungs_come_in_the_ladder_s_order_and_the_climb_has_one_of_each(self) -> None:
        places = climbed(FIRST, ("flash", "tf32"))
        assert [(p.rung, p.how) for p in places] == [
            ("start", "start"),
            ("tf32", "first"),
            ("flash", "so far"),
        ]

    def test_keys_tell_all_cases_apart(self) -> None:
        cases = STUDY.cases(StepFlags(part=PARTS))
        assert len({case.key for case in cases}) == len(cases)

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ({"rungs": ("bf17",)}, "rung 'bf17' does not exist"),
            ({"part": ("race",), "race": ("huge",)}, "race 'huge' does not exist"),
            ({"size": ("smal",)}, "perhaps you meant small"),
            ({"steps": 0}, "steps is 0"),
            ({"heat_seconds": 0.0}, "heat-seconds is 0"),
            ({"form_seconds": -1.0}, "form-seconds is -1"),
            ({"warmup": -1}, "it cannot be negative"),
        ],
    )
    def test_what_cannot_be_meant_is_named(self, flags: dict[str, object], said: str) -> None:
        with pytest.raises(UsageError, match=said):
            STUDY.cases(StepFlags(**flags))  # type: ignore[arg-type]


class TestText:
    def test_it_is_a_chain_of_which_the_seed_decides_the_rows_alone(self) -> None:
        first, again = (sequences(50, 40, 1000, seed=3) for _ in "ab")
        other = sequences(50, 40, 1000, seed=4)
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)
        followers: dict[int, set[int]] = {}
        for row in (*first, *other):
            for word, after in itertools.pairwise(row):
                followers.setdefault(int(word), set()).add(int(after))
        assert max(map(len, followers.values())) <= FOLLOWERS

    def test_words_are_of_the_vocabulary_however_small(self) -> None:
        rows = sequences(10, 30, 7, seed=0)
        assert rows.min() >= 0
        assert rows.max() < 7

    def test_its_entropy_is_that_of_the_choice(self) -> None:
        shares = 1 / np.arange(1, 9) / (1 / np.arange(1, 9)).sum()
        assert entropy() == pytest.approx(-(shares * np.log(shares)).sum())


def test_steps_that_share_weights_train_the_same_ones() -> None:
    first = start("tiny", "2025", 8, 2, {"vocab": 32})
    one = TransformerStep(msgspec.structs.replace(first, optimizer="torch-fused"), CpuDevice())
    one.run_phases()
    two = TransformerStep(
        msgspec.structs.replace(first, attention="sdpa", loss="fused", optimizer="torch-fused"),
        CpuDevice(),
        shares=one,
    )
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    weight = two.model.head.weight
    assert two.optimizer.state[weight]["exp_avg"] is one.optimizer.state[weight]["exp_avg"]
    before, moment = weight.detach().clone(), two.optimizer.state[weight]["exp_avg"].clone()
    two.run_phases()
    assert not weight.detach().equal(before)
    assert not one.optimizer.state[weight]["exp_avg"].equal(moment)


class TestPage:
    def blocks(self, *records: Record) -> dict[str, Any]:
        """Tables and figures by name, findings by code."""
        return {getattr(b, "name", None) or b.code: b for b in STUDY.view(records)}

    def test_the_ladder_says_what_each_rung_brings(self) -> None:
        held = self.blocks(
            rung_record("start", "start", step=100.0, id="start"),
            rung_record("bf16", "first", step=50.0, id="bf16"),
            rung_record("flash", "alone", step=80.0, id="flash"),
            rung_record("flash", "so far", step=25.0, id="flash-all"),
            rung_record("graph", "so far", status="skipped", reason="no graphs here", id="graph"),
        )
        table = held["step-ladder"]
        by_row = {(row[0], row[1]): row for row in table.rows}
        assert by_row["bfloat16 autocast", "both"][3:5] == (2.0, 2.0)
        assert by_row["flash attention", "alone"][3:5] == (1.25, None)
        assert by_row["flash attention", "on those before"][3:5] == (4.0, 2.0)
        assert table.rows[-1][2] == "skipped"
        assert table.rows[-1][-1] == "no graphs here"
        figure = held["step-climb"]
        assert figure.curves[0].x == ("start", "+ bf16", "+ flash")
        gain = held["step.gain"]
        assert gain.sentence == (
            "small at context 512, batch 4: from 100 ms to 25.0 ms, 4.00 times as fast, with all up"
            " to flash attention. Alone, bfloat16 autocast brings most: 2.00 times."
        )
        assert gain.conclusion.startswith("Alone, ")
        assert gain.values == {
            "ladder": "small at context 512, batch 4",
            "start_ms": 100.0,
            "best_ms": 25.0,
            "times": 4.0,
            "up_to": "flash",
            "alone": "bf16",
            "alone_times": 2.0,
        }
        assert gain.records == ("start", "bf16", "flash", "flash-all")
        failed = held["step.not-measured"]
        assert (failed.records, failed.tone) == (("graph",), "info")
        assert failed.text == (
            "1 rows of small at context 512, batch 4 were not measured: the step as a CUDA graph."
            " The first said: no graphs here"
        )

    def test_a_rung_that_goes_without_the_graph_is_not_held_against_it(self) -> None:
        without = rung_record("master", "so far", step=40.0)
        held = self.blocks(
            rung_record("start", "start", step=100.0),
            rung_record("graph", "so far", step=5.0),
            msgspec.structs.replace(without, config=without.config | {"graph": False}),
            rung_record("checkpoint", "so far", step=6.0),
        )
        table = held["step-ladder"]
        assert [row[4] for row in table.rows] == [None, 20.0, None, pytest.approx(5 / 6)]

    def test_rows_that_wait_for_the_host_are_marked(self) -> None:
        issue = times("issue", 49.9, "host")
        held = self.blocks(
            rung_record("start", "start", step=100.0, series=(times("step", 100.0), issue)),
            rung_record("bf16", "first", step=50.0, series=(times("step", 50.0), issue)),
        )
        table = held["step-ladder"]
        place = [column.title for column in table.columns].index("host-bound")
        assert [row[place] for row in table.rows] == [0.0, 1.0]
        bound = held["step.host-bound"]
        assert (bound.values["rows"], bound.values["of"]) == (1, 2)
        assert bound.text.startswith(
            "In 1 of 2 rows of small at context 512, batch 4 the device waits for the host: "
        )

    def test_a_hundredth_is_no_gain(self) -> None:
        held = self.blocks(
            rung_record("start", "start", step=100.0), rung_record("bf16", "first", step=99.5)
        )
        none = held["step.no-gain"]
        assert none.text == "small at context 512, batch 4: no change makes its 100 ms shorter."
        assert none.tone == "info"

    def test_what_a_process_grew_by_is_no_peak(self) -> None:
        on_host = environment(device_kind="cpu", device_name="Xeon")
        peak = (Quantity(name="peak_bytes", value=8192, unit="B"),)
        shown = []
        for here in (on_host, environment()):
            held = self.blocks(
                rung_record("start", "start", quantities=peak, environment=here),
                step_race_record("tiny-64", {"peer: a": 3.0, "ours: b": 2.0}, environment=here),
            )
            ladder, heats = held["step-ladder"], held["step-heats"]
            (raced,) = (row for row in heats.rows if "b" in row)
            shown.append((ladder.rows[0][-2], raced[6]))
        assert shown == [(None, None), (8192, 50 * 2**30)]

    def test_curves_are_held_against_the_one_of_their_seed(self) -> None:
        falling = [9.0 - step * 0.1 for step in range(50)]
        records = [
            *(loss_record("start", seed, [value + seed for value in falling]) for seed in (0, 1)),
            loss_record("bf16", 0, [value * 1.001 for value in falling]),
            loss_record("bf16", 1, [(value + 1) * 0.998 for value in falling]),
            loss_record("flash", 0, [value * 1.02 for value in falling]),
        ]
        found = loss_curves(STUDY.results(records))
        assert found["bf16"].apart(found["start"]) == pytest.approx(-0.002)
        assert found["start"].fell_by() == pytest.approx(1 - 5.3 / 10.0)
        held = self.blocks(*records)
        table = held["step-loss"]
        assert [row[-1] for row in table.rows] == [None, "same", "apart"]
        figure = held["step-loss-apart"]
        # In percent, of each seed against the start with the same seed.
        means = {curve.label: sum(curve.y) / len(curve.y) for curve in figure.curves}
        assert means == pytest.approx({"bf16": -0.05, "flash": 2.0})
        apart = held["step.loss-apart"]
        assert (apart.values["flash"], apart.tone) == (pytest.approx(0.02), "warn")
        assert "bf16" not in apart.values
        assert apart.text.endswith(" Not within 0.5 % of it at the end: flash attention (2.0 %).")
        same = self.blocks(*records[:-1])["step.loss-same"]
        assert (same.values["farthest"], same.tone) == ("bf16", "good")
        assert same.values["apart"] == pytest.approx(0.002)
        assert same.text == (
            "In 50 steps the loss of the float32 step falls by 47.0 %. All 1 other rungs end within"
            " 0.5 % of it; farthest is bfloat16 autocast with 0.2 %."
        )

    def test_a_text_that_was_not_learnt_tells_nothing(self) -> None:
        flat = [9.0] * 20
        held = self.blocks(loss_record("start", 0, flat), loss_record("bf16", 0, flat))
        short = held["step.not-learnt"]
        assert (short.values, short.tone) == ({"steps": 20, "fell_by": 0.0}, "warn")
        assert short.conclusion == (
            "That is too little to tell right from wrong: train for longer."
        )
        table = held["step-loss"]
        assert [row[-1] for row in table.rows] == [None, "too short to tell"]

    def test_the_speed_table_has_times_and_peaks_of_both_sides(self) -> None:
        record = step_race_record(
            "2.7b-2048",
            {
                "peer: block default sdpa_flash": 364.9,
                "ours: block default auto": 320.0,
                "spare: block default auto checkpointed": 400.0,
            },
            peaks={"peer": 73.2, "ours": 60.0, "spare": 55.0},
        )
        (race,) = races(STUDY.results([record]))
        assert race.ratio().value == pytest.approx(364.9 / 320.0)  # type: ignore[union-attr]
        table = self.blocks(record)["step-speed"]
        fast, memory, spare = table.rows
        assert (fast[1], fast[3]) == ("block default sdpa_flash", "block default auto")
        assert memory[1:5] == ("73.2 GiB", None, "60.0 GiB", None)
        assert memory[5] == pytest.approx(60 / 73.2)
        assert (spare[1], spare[3]) == ("73.2 GiB", "55.0 GiB")
        assert (spare[2], spare[4]) == (pytest.approx(364.9), pytest.approx(400.0))
        assert spare[5] == pytest.approx(55 / 73.2)
        heats = self.blocks(record)["step-heats"]
        assert {row[-1] for row in heats.rows} == {"raced", "failed: OutOfMemoryError: full"}

    def test_other_formats_than_the_peers_are_a_row_of_their_own(self) -> None:
        times = {"peer: a": 140.0, "ours: b": 105.0, "narrow: c": 80.0}
        record = step_race_record("xl-512", times)
        table = self.blocks(record)["step-speed"]
        ours, narrow = table.rows
        assert (ours[0], ours[3]) == ("xl-512", "b")
        assert (narrow[0], narrow[3]) == ("xl-512, narrower formats", "c")
        assert narrow[6].value == pytest.approx(1.75)
        found = self.blocks(record)["step.race-faster"]
        assert (found.values["narrow_ms"], found.values["narrow_times"]) == (
            80.0,
            pytest.approx(1.75),
        )
        assert "With narrower dtypes it takes 80.0 ms, the peer 1.75 times as long." in found.text

    def test_a_race_that_shows_no_difference_has_no_winner(self) -> None:
        held = self.blocks(step_race_record("xl-512", {"peer: a": 100.0, "ours: b": 100.0}))
        found = held["step.race-no-difference"]
        assert found.text.endswith("takes 100 ms: no difference is shown.")
        assert found.tone == "info"

    def test_a_race_that_is_lost_says_how_much_longer_ours_takes(self) -> None:
        held = self.blocks(step_race_record("xl-512", {"peer: a": 100.0, "ours: b": 125.0}))
        found = held["step.race-slower"]
        assert found.text.endswith("takes 100 ms: ours is 1.25 times as long.")
        assert (found.values["times"], found.tone) == (pytest.approx(0.8), "warn")

    def test_a_race_that_does_not_count_is_told_with_its_outcome(self) -> None:
        held = self.blocks(
            step_race_record("xl-512", {"peer: c": 145.0, "peer: a": 140.0, "ours: b": 100.0}),
            step_race_record("xl-512", {"peer: a": 130.0, "ours: b": 100.0}, id="fewer"),
        )
        found = held["step.race-faster"]
        assert found.text.endswith("Another race, against 1 of its forms, gave 1.30 times.")
        assert (found.values["other_races"], found.records[1:]) == (1, ("fewer",))

    def test_consecutive_steps_decide_and_interleaved_samples_follow(self) -> None:
        record = step_race_record(
            "xl-512",
            {"peer: a": 140.0, "ours: b": 90.0},
            consecutive={"peer": (120.0, 122.0, 124.0), "ours": (100.0, 101.0, 102.0)},
        )
        (race,) = races(STUDY.results([record]))
        lead = race.lead()
        assert lead is not None
        assert (lead.peer_ms, lead.ms) == (122.0, 101.0)
        assert lead.value == pytest.approx(122 / 101)
        table = self.blocks(record)["step-speed"]
        row = table.rows[0]
        assert (row[2], row[4]) == (122.0, 101.0)
        assert isinstance(row[5], Interval)
        assert isinstance(row[6], Interval)
        assert row[5].value == pytest.approx(122 / 101)
        assert row[6].value == pytest.approx(140 / 90)
        found = self.blocks(record)["step.race-faster"]
        assert found.values["times"] == pytest.approx(122 / 101)
        assert found.values["interleaved"] == pytest.approx(140 / 90)
        assert found.text.endswith(
            "ours is 1.21 times as fast. Interleaved samples give 1.56 times."
        )

    def test_without_blocks_the_energy_measurement_gives_consecutive_steps(self) -> None:
        record = step_race_record(
            "xl-512",
            {"peer: a": 140.0, "ours: b": 90.0},
            drawn={"peer": (690.0, 120.0, 1700.0), "ours": (690.0, 100.0, 1600.0)},
        )
        row = self.blocks(record)["step-speed"].rows[0]
        assert row[5] == pytest.approx(1.2)
        assert (row[2], row[4]) == (120.0, 100.0)

    def test_a_traced_rung_has_a_waterfall_of_its_replay(self) -> None:
        held = self.blocks(waterfall_record("start"), waterfall_record("graph", replay=0.5))
        assert isinstance(held["step-waterfall"], Timeline)
        assert held["step-waterfall-2"].lanes[-1].stretches[0].end == 0.5
        assert "as a graph" in held["step-waterfall-2"].title
        without = self.blocks(waterfall_record("graph"))
        assert "as a graph" not in without["step-waterfall"].title


def test_the_ladder_and_the_waterfall_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.cli.commands.report import print_results

    print_results([rung_record(), rung_record("bf16", "first", step=50.0), waterfall_record()])
    told = capsys.readouterr().out
    assert "from 100 ms to 50.0 ms" in told
    assert "Each change alone and on top of those before it" in told
    assert "Where the time beyond the ideal goes" in told


def test_one_rung_can_be_trained_again_with_all_below_it() -> None:
    every = STUDY.cases(StepFlags(part=("loss",), seeds=(0,)))
    again = STUDY.cases(StepFlags(part=("loss",), seeds=(0,), loss_only=("as-made",)))
    assert [case.rung for case in again] == ["as-made"]
    assert again[0] in every
    with pytest.raises(UsageError, match="rung"):
        STUDY.cases(StepFlags(part=("loss",), loss_rungs=("flash",), loss_only=("as-made",)))


def test_ladders_of_several_sizes_stay_apart() -> None:
    records = [rung_record("start", "start", size=size) for size in ("small", "xl")]
    assert [ladder.name for ladder in ladders(STUDY.results(records))] == [
        "small at context 512, batch 4",
        "xl at context 512, batch 4",
    ]


def test_a_ladder_of_a_changed_size_says_so() -> None:
    plain = rung_record("start", "start")
    config = plain.config | {"overrides": {"vocab": 1024}}
    changed = msgspec.structs.replace(plain, config=config)
    assert {ladder.name for ladder in ladders(STUDY.results([plain, changed]))} == {
        "small at context 512, batch 4",
        "small (changed) at context 512, batch 4",
    }


def test_environment_decides_the_quick_share() -> None:
    on_cpu = environment(device_kind="cpu", device_name="Xeon")
    sizes = {flags.size for flags in STUDY.presets(on_cpu)["quick"]}
    assert sizes == {("tiny",)}


def test_a_study_that_watches_operators_refuses_a_graph() -> None:
    from stepscope.studies.base import CaseSkipped
    from stepscope.studies.memory.measure import measure_memory

    study = find_study("memory")
    flags = study.flags(size=("tiny",), context=(8,), graph=True, mode=("train-step",))
    (case,) = study.cases(flags)
    with pytest.raises(CaseSkipped, match="nothing to watch"):
        measure_memory(case, None)  # type: ignore[arg-type]
