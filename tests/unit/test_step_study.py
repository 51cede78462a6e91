"""The step study: its ladder, its text, its races, and what its page says of planted records."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from command_line import CommandLine
from sample_records import environment, times
from step_records import (
    loss_record,
    rung_record,
    step_race_record,
    tiny_race_config,
    waterfall_record,
)
from stepscope.errors import UsageError
from stepscope.measure.device import CpuDevice
from stepscope.measure.patience import TookTooLong, at_most
from stepscope.records.schema import Quantity
from stepscope.report.blocks import Figure, Finding, Table, Timeline
from stepscope.studies.registry import find_study
from stepscope.studies.step import PARTS, StepFlags
from stepscope.studies.step.goals import GOALS, Heat, Racer, racers
from stepscope.studies.step.ladder import RUNGS, climbed, ladder, start
from stepscope.studies.step.race import Field, measure_race
from stepscope.studies.step.rows import curves, ladders, races
from stepscope.studies.step.text import FOLLOWERS, entropy, sequences
from stepscope.studies.training_step import TrainingStep

STUDY = find_study("step")
FIRST = start("small", "2025", 512, 4, {})


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
        assert places["master", "so far"].graph is False
        # A compiled model fuses the pieces itself.
        assert places["compile", "so far"].fused is False
        best = places["graph", "so far"]
        assert (best.compile, best.fused, best.joined) == ("no", True, True)
        assert best.optimizer == "stepscope-in-backward"

    def test_rungs_come_in_the_ladder_s_order_and_the_climb_has_one_of_each(self) -> None:
        places = climbed(FIRST, ("flash", "tf32"))
        assert [(p.rung, p.how) for p in places] == [
            ("start", "start"), ("tf32", "first"), ("flash", "so far"),
        ]  # fmt: skip

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


class TestRacers:
    def test_the_peer_in_all_forms_and_ours_with_the_same_formats(self) -> None:
        for name, goal in GOALS.items():
            found = racers(name)
            assert len({racer.name for racer in found}) == len(found)
            assert {racer.workload.dtype for racer in found} == {goal.dtype}
            assert {r.workload.optimizer for r in found if r.side == "peer"} == {"torch-fused"}
        tuned = racers("2.7b-512", modes=("default", "reduce-overhead", "max-autotune"))
        for found, modes in ((racers("2.7b-512"), 2), (tuned, 3)):
            forms = {
                (r.workload.compile, r.workload.compile_mode, r.workload.attention)
                for r in found
                if r.side == "peer"
            }
            assert len(forms) == 2 * modes * 2

    def test_one_of_the_peer_then_ours_then_the_rest(self) -> None:
        sides = [side for side, _ in itertools.groupby(racers("2.7b-2048"), lambda r: r.side)]
        assert sides == ["peer", "ours", "spare", "peer"]

    def test_forms_are_chosen_by_a_part_of_their_name(self) -> None:
        found = racers("small-512", forms=("block default sdpa_cudnn", "updates in backward"))
        assert [racer.name for racer in found] == [
            "ours: eager auto joined updates in backward graph",
            "ours: eager triton joined updates in backward graph",
            "peer: block default sdpa_cudnn",
        ]
        chosen = StepFlags(part=("race",), race=("small-512",), forms=("peer: block", "graph"))
        assert [case.key for case in STUDY.cases(chosen)] == ["race-small-512_peer-block_graph"]
        with pytest.raises(UsageError, match="name one of each side: peer: block default"):
            racers("small-512", forms=("peer",))

    def test_less_memory_is_asked_for_where_it_is_a_goal(self) -> None:
        kept = {(r.side, r.workload.keep) for r in racers("2.7b-2048") if r.workload.joined}
        assert kept == {("ours", "gates"), ("spare", "inputs")}
        assert {r.workload.keep for r in racers("xl-2048")} == {"all"}

    def test_the_long_context_has_the_fused_loss_on_both_sides_and_never_a_graph(self) -> None:
        found = racers("8b-32768")
        assert {r.workload.loss for r in found} == {"fused"}
        assert {r.workload.checkpoint for r in found if r.side == "peer"} == {"1"}
        assert not any(r.workload.graph for r in found)
        model = found[0].workload.model()
        assert (model.d_model, model.d_ff, model.n_layers) == (4096, 11_008, 34)
        assert (model.n_heads, model.vocab, model.context) == (32, 151_936, 32_768)
        thrifty = next(r.workload for r in found if r.workload.keep == "inputs-16")
        assert thrifty.kept().count("gates") == 18

    def test_racers_travel_in_a_case(self) -> None:
        (case,) = STUDY.cases(StepFlags(part=("race",), race=("small-512",)))
        sent = json.loads(msgspec.json.encode(case.config))
        assert [racer[0] for racer in sent["racers"]].count("ours") == 4


def test_steps_that_share_weights_train_the_same_ones() -> None:
    first = start("tiny", "2025", 8, 2, {"vocab": 32})
    one = TrainingStep(msgspec.structs.replace(first, optimizer="torch-fused"), CpuDevice())
    for phase in one.phases():
        phase.run()
    two = TrainingStep(
        msgspec.structs.replace(first, attention="sdpa", loss="fused", optimizer="torch-fused"),
        CpuDevice(), shares=one,
    )  # fmt: skip
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    weight = two.model.head.weight
    assert two.optimizer.state[weight]["exp_avg"] is one.optimizer.state[weight]["exp_avg"]
    before, moment = weight.detach().clone(), two.optimizer.state[weight]["exp_avg"].clone()
    for phase in two.phases():
        phase.run()
    assert not weight.detach().equal(before)
    assert not one.optimizer.state[weight]["exp_avg"].equal(moment)


class TestPage:
    def blocks(self, *records: object) -> dict[str, object]:
        made = STUDY.view(list(records))
        return {getattr(b, "name", f"finding {n}"): b for n, b in enumerate(made)}

    def test_the_ladder_says_what_each_rung_brings(self) -> None:
        held = self.blocks(
            rung_record("start", "start", step=100.0),
            rung_record("bf16", "first", step=50.0),
            rung_record("flash", "alone", step=80.0),
            rung_record("flash", "so far", step=25.0),
            rung_record("graph", "so far", status="skipped", reason="no graphs here"),
        )
        table = held["step-ladder"]
        assert isinstance(table, Table)
        by_row = {(row[0], row[1]): row for row in table.rows}
        assert by_row["bfloat16 autocast", "both"][3:5] == (2.0, 2.0)
        assert by_row["flash attention", "alone"][3:5] == (1.25, None)
        assert by_row["flash attention", "on those before"][3:5] == (4.0, 2.0)
        assert table.rows[-1][2] == "skipped"
        assert table.rows[-1][-1] == "no graphs here"
        figure = held["step-climb"]
        assert isinstance(figure, Figure)
        assert figure.curves[0].x == ("start", "+ bf16", "+ flash")
        first = next(b for b in held.values() if isinstance(b, Finding))
        assert "from 100 ms to 25.0 ms, 4.00 times as fast" in first.text
        assert "Alone, bfloat16 autocast brings most: 2.00 times" in first.text

    def test_a_rung_that_goes_without_the_graph_is_not_held_against_it(self) -> None:
        held = self.blocks(
            rung_record("start", "start", step=100.0),
            rung_record("graph", "so far", step=5.0),
            rung_record("master", "so far", step=40.0),
            rung_record("checkpoint", "so far", step=6.0),
        )
        table = held["step-ladder"]
        assert isinstance(table, Table)
        assert [row[4] for row in table.rows] == [None, 20.0, None, pytest.approx(5 / 6)]

    def test_rows_that_wait_for_the_host_are_marked(self) -> None:
        issue = times("issue", 49.9, "host")
        held = self.blocks(
            rung_record("start", "start", step=100.0, series=(times("step", 100.0), issue)),
            rung_record("bf16", "first", step=50.0, series=(times("step", 50.0), issue)),
        )
        table = held["step-ladder"]
        assert isinstance(table, Table)
        place = [column.title for column in table.columns].index("host-bound")
        assert [row[place] for row in table.rows] == [0.0, 1.0]
        texts = [b.text for b in held.values() if isinstance(b, Finding)]
        assert any(
            "In 1 of 2 rows of small at context 512, batch 4 the device waits" in t for t in texts
        )

    def test_a_hundredth_is_no_gain(self) -> None:
        held = self.blocks(
            rung_record("start", "start", step=100.0), rung_record("bf16", "first", step=99.5)
        )
        first = next(b for b in held.values() if isinstance(b, Finding))
        assert "no change makes its 100 ms shorter" in first.text

    def test_what_a_process_grew_by_is_no_peak(self) -> None:
        on_host = environment(device_kind="cpu", device_name="Xeon")
        peak = {"peak_bytes": Quantity(value=8192, unit="B")}
        shown = []
        for here in (on_host, environment()):
            held = self.blocks(
                rung_record("start", "start", quantities=peak, environment=here),
                step_race_record("tiny-64", {"peer: a": 3.0, "ours: b": 2.0}, environment=here),
            )
            ladder, heats = held["step-ladder"], held["step-heats"]
            assert isinstance(ladder, Table)
            assert isinstance(heats, Table)
            shown.append((ladder.rows[0][-2], heats.rows[-1][5]))
        assert shown == [(None, None), (8192, 50 * 2**30)]

    def test_curves_are_held_against_the_one_of_their_seed(self) -> None:
        falling = [9.0 - step * 0.1 for step in range(50)]
        records = [
            *(loss_record("start", seed, falling) for seed in (0, 1)),
            loss_record("bf16", 0, [value * 1.001 for value in falling]),
            loss_record("bf16", 1, [value * 0.998 for value in falling]),
            loss_record("flash", 0, [value * 1.02 for value in falling]),
        ]
        found = curves(records)
        assert found["bf16"].apart(found["start"]) == pytest.approx(-0.002)
        assert found["start"].fell_by() == pytest.approx(1 - 4.3 / 9.0)
        held = self.blocks(*records)
        table = held["step-loss"]
        assert isinstance(table, Table)
        assert [row[-1] for row in table.rows] == [None, "same", "apart"]
        texts = [b.text for b in held.values() if isinstance(b, Finding)]
        said = "Not within 0.5 % of it at the end: flash attention (2.0 %)"
        assert any(said in text for text in texts)

    def test_a_text_that_was_not_learnt_tells_nothing(self) -> None:
        flat = [9.0] * 20
        held = self.blocks(loss_record("start", 0, flat), loss_record("bf16", 0, flat))
        texts = [b.text for b in held.values() if isinstance(b, Finding)]
        assert any("too little to tell right from wrong" in text for text in texts)

    def test_the_speed_table_has_what_must_be_and_what_is(self) -> None:
        record = step_race_record(
            "2.7b-2048",
            {
                "peer: block default sdpa_flash": 364.9,
                "ours: block default auto": 320.0,
                "spare: block default auto checkpointed": 400.0,
            },
            peaks={"peer": 73.2, "ours": 60.0, "spare": 55.0},
        )
        (race,) = races([record])
        assert race.ratio().value == pytest.approx(364.9 / 320.0)  # type: ignore[union-attr]
        table = self.blocks(record)["step-speed"]
        assert isinstance(table, Table)
        fast, memory, spare = table.rows
        assert (fast[1], fast[3]) == ("block default sdpa_flash", "block default auto")
        assert fast[6:8] == ("≥\N{NO-BREAK SPACE}1.1×", "reached")
        assert memory[1:5] == ("73.2 GiB", None, "60.0 GiB", None)
        assert memory[5] == pytest.approx(60 / 73.2)
        assert memory[6:8] == ("≤\N{NO-BREAK SPACE}0.9×", "reached")
        assert spare[7] == "reached (1.10× the time)"
        heats = self.blocks(record)["step-heats"]
        assert isinstance(heats, Table)
        assert {row[-1] for row in heats.rows} == {"raced", "failed: OutOfMemoryError: full"}

    def test_small_is_held_against_the_clock(self) -> None:
        record = step_race_record("small-512", {"peer: a": 30.0, "ours: b": 10.0})
        table = self.blocks(record)["step-speed"]
        assert isinstance(table, Table)
        assert table.rows[0][6:8] == ("≤\N{NO-BREAK SPACE}9\N{NO-BREAK SPACE}ms", "below")

    def test_a_traced_rung_has_a_waterfall_of_its_replay(self) -> None:
        held = self.blocks(waterfall_record("start"), waterfall_record("graph", replay=0.5))
        assert isinstance(held["step-waterfall"], Timeline)
        assert held["step-waterfall-2"].lanes[-1].stretches[0].end == 0.5  # type: ignore[attr-defined]
        assert "as a graph" in held["step-waterfall-2"].title  # type: ignore[attr-defined]
        without = self.blocks(waterfall_record("graph"))
        assert "as a graph" not in without["step-waterfall"].title  # type: ignore[attr-defined]


class Watched(CpuDevice):
    """Counts how often what a form left was given back."""

    released = 0

    def release(self) -> None:
        self.released += 1


class Silent:
    def __init__(self) -> None:
        self.device = Watched()

    def progress(self, done: int, total: int, what: str) -> None: ...


def test_a_race_tries_each_form_alone_and_lets_go_of_it() -> None:
    bench = Silent()
    made = measure_race(tiny_race_config(), bench)  # type: ignore[arg-type]
    assert bench.device.released == 3
    heats = [key for key in made.notes if key.startswith("heat.")]
    assert len(heats) == 3
    raced = {made.notes["best.peer"], made.notes["best.ours"]}
    assert {series.name for series in made.series} == raced
    assert all(len(series.values) == 2 for series in made.series)
    assert "a CPU's counter" in made.notes["no_energy"]
    assert not any(name.endswith("joules") for name in made.quantities)


def test_where_the_time_for_heats_is_over_those_that_were_tried_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0, 10)
    monkeypatch.setattr("stepscope.studies.step.race.time.monotonic", lambda: next(clock))
    # The clock is read when a race begins, before each heat, and twice within one.
    made = measure_race(tiny_race_config(heat_seconds=55.0), Silent())  # type: ignore[arg-type]
    late = [key for key, note in made.notes.items() if note.startswith("not tried")]
    assert late == ["out.peer: eager reference"]
    assert {"best.peer", "best.ours"} <= made.notes.keys()


def test_a_form_that_takes_too_long_is_out_and_the_others_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Field._try

    def slow(field: Field, racer: Racer, *how: Any) -> Heat:
        if racer.workload.attention == "reference":
            # As its alarm would, whenever that rings.
            raise TookTooLong("not done after 3 s")
        return plain(field, racer, *how)

    monkeypatch.setattr(Field, "_try", slow)
    bench = Silent()
    made = measure_race(tiny_race_config(), bench)  # type: ignore[arg-type]
    assert made.notes["out.peer: eager reference"] == "given up: not done after 3 s"
    assert "reference" not in made.notes["best.peer"]
    assert bench.device.released == 3, "what it left is given back too"


def test_only_the_main_thread_is_told_that_it_took_too_long() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TookTooLong, match=r"not done after 0\.05 s"), at_most(0.05):
        time.sleep(30)
    assert signal.getsignal(signal.SIGALRM) == before
    others, _ = signal.setitimer(signal.ITIMER_REAL, 60.0)
    with at_most(5.0):
        pass
    assert 50.0 < signal.setitimer(signal.ITIMER_REAL, others)[0] <= 60.0
    ended = []

    def patient() -> None:
        with at_most(0.01):
            time.sleep(0.1)
        ended.append(True)

    other = threading.Thread(target=patient)
    other.start()
    other.join()
    assert ended


def test_of_several_races_of_a_step_the_one_with_the_nearest_peer_counts() -> None:
    records = [
        step_race_record("tiny-64", {"peer: a": peer, "ours: b": 2.0}, id=f"race-{peer}")
        for peer in (4.0, 3.0, 5.0)
    ]
    (race,) = races(records)
    ratio = race.ratio()
    assert ratio is not None
    assert ratio.value == pytest.approx(1.5, rel=0.05)


def test_the_ladder_and_the_waterfall_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.cli.report_command import print_results

    print_results([rung_record(), rung_record("bf16", "first", step=50.0), waterfall_record()])
    told = capsys.readouterr().out
    assert "from 100 ms to 50.0 ms" in told
    assert "Each change alone and on top of those before it" in told
    assert "Where the time beyond the ideal goes" in told


def test_ladders_of_several_sizes_stay_apart() -> None:
    records = [rung_record("start", "start", size=size) for size in ("small", "xl")]
    assert [ladder.name for ladder in ladders(records)] == [
        "small at context 512, batch 4", "xl at context 512, batch 4",
    ]  # fmt: skip


def test_a_ladder_with_its_loss_and_its_race_from_the_command_line(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    cli.know_ceilings()
    done = cli(
        "run", "step", "--device", "cpu", "--part", "ladder", "loss", "race", "--size", "tiny",
        "--context", "8", "--batch", "1", "--vocab", "32", "--rungs", "flash", "fused-optimizer",
        "--race", "tiny-64", "--rounds", "1", "--warmup", "0", "--steps", "1", "--min-seconds", "0",
        "--loss-size", "tiny", "--loss-context", "8", "--loss-steps", "4", "--loss-rungs", "flash",
        "--seeds", "0", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == {"ok": 5, "skipped": 2}


def test_on_a_cpu_a_race_of_graphs_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    cli.know_ceilings()
    done = cli("run", "step", "--part", "race", "--race", "8b-32768", "--device", "cpu")
    assert done.returncode == 2
    assert "CUDA graphs exist on NVIDIA GPUs" in done.stderr


def test_environment_decides_the_quick_share() -> None:
    on_cpu = environment(device_kind="cpu", device_name="Xeon")
    sizes = {flags.size for flags in STUDY.presets(on_cpu)["quick"]}
    assert sizes == {("tiny",)}


def test_a_study_that_watches_operators_refuses_a_graph() -> None:
    from stepscope.studies.base import CaseSkipped
    from stepscope.studies.memory.recording import measure_memory

    study = find_study("memory")
    flags = study.flags(size=("tiny",), context=(8,), graph=True, mode=("train-step",))
    (case,) = study.cases(flags)
    with pytest.raises(CaseSkipped, match="nothing to watch"):
        measure_memory(case.config, None)  # type: ignore[arg-type]
