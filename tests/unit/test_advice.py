"""Advice from records and trials: facts, verdicts, learnt corrections, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import pytest
from test_advice_rules import facts

from command_line import CommandLine
from own_records import BASE, advice, inspected_record, measured_on_cpu, tried
from quiet_bench import QuietBench
from stepscope.advisor.advise.cases import OF_SCRIPTS, Trial
from stepscope.advisor.advise.facts import facts_of
from stepscope.advisor.advise.history import add_to_history, history_file, read_history
from stepscope.advisor.advise.outcome import Tried, first_right
from stepscope.advisor.advise.view import not_tried, trial_blocks
from stepscope.analysis.advice.calibration import Verified, factors, median_error
from stepscope.analysis.advice.changes import advise
from stepscope.errors import StepscopeError
from stepscope.records.jsonl import write_records
from stepscope.records.schema import Ceiling, Record
from stepscope.report.blocks import Finding
from stepscope.studies.own import STUDY as OWN
from stepscope.studies.own.cases import OwnFlags, OwnStep
from view_blocks import codes, findings_of, tables_of

RESULTS = Path(__file__).parents[2] / "results"


def test_the_first_tried_changes_are_counted() -> None:
    """The step takes 50 ms: a gain of 40 of 100 is predicted as 20 ms, of 10 as 5 ms."""
    own = [advice("one", 40.0), advice("two", 10.0), advice("three", 30.0), advice("four", 40.0)]
    failed = tried(30.0, own[2], status="error", reason="it broke")
    trials = [Tried(tried(30.0, own[0])), Tried(tried(30.0, own[1])), Tried(failed)]
    assert first_right(own[:1], trials) == (1, 1)
    assert first_right(own, trials) == (1, 3)
    assert first_right(own, [*trials, Tried(tried(30.0, own[3]))], most=4) == (2, 4)
    assert first_right(own, []) == (0, 0)


def test_a_change_without_effect_is_not_evidence() -> None:
    own = advice("fused-attention", 40.0)
    trial_record = tried(30.0, own, notes={"without_effect": "it had no effect on the script"})
    one = Tried(trial_record)
    assert one.verified() is None
    assert first_right([own], [one]) == (0, 0)
    assert codes(trial_blocks([trial_record])) == ["advise.no-gain"]


@pytest.mark.parametrize(
    ("changed_ms", "gain", "vague"),
    [(30.0, 40.0, False), (49.9, 0.2, True), (49.9, 40.0, False), (40.0, 0.2, False)],
)
def test_an_interval_wider_than_the_gain_is_vague(
    changed_ms: float, gain: float, vague: bool
) -> None:
    """The interval is half a millisecond to each side."""
    assert Tried(tried(changed_ms, advice(gain=gain))).is_vague is vague


def test_advice_without_a_trial_has_a_reason() -> None:
    own = (
        advice("bfloat16"),
        advice("compile", compile="model"),
        advice("tf32"),
        msgspec.structs.replace(advice("fused-loss"), setting={}, by_author="the loss is inside"),
    )
    texts = [one.text for one in not_tried(own, [Tried(tried(30.0, own[0]))], OF_SCRIPTS)]
    assert texts == [
        "Not tried: the change compile (40.0 ms predicted); excluded by --only, out of time, or"
        " predicted to add less than 3 % to the others.",
        "Not tried: the change tf32 (40.0 ms predicted); it excludes the change bfloat16, which is"
        " kept.",
        "Not tried: the change fused-loss (40.0 ms predicted); the loss is inside.",
    ]


def verified(ratio: float, code: str = "tf32", device: str = "H200") -> Verified:
    return Verified(
        device=device, code=code, predicted_ms=10.0, realized_ms=10 * ratio, step_ms=100.0
    )


def test_past_verifications_correct_predictions() -> None:
    assert factors([], "H200") == {}
    assert factors([verified(0.25)], "H200") == {"tf32": pytest.approx(0.5)}
    assert factors([verified(0.5)] * 5, "H200") == {"tf32": pytest.approx(0.5)}
    assert factors([verified(0.5)] * 5, "H100") == {}
    assert factors([verified(-3.0)] * 9, "H200") == {"tf32": pytest.approx(0.25)}
    step = facts({"matmul": 80.0}, {}, dtype="float32")
    (_, tf32) = advise(step, {"tf32": 0.5})
    assert (tf32.code, tf32.gain_ms) == ("tf32", 35.0)
    assert median_error([verified(0.5), verified(1.0), verified(3.0)]) == pytest.approx(0.05)
    assert median_error([]) is None


def test_the_history_is_stored_and_a_damaged_line_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_history() == ()
    add_to_history([verified(0.5)])
    with history_file().open("a") as file:
        file.write("not json\n")
    add_to_history([verified(2.0)])
    assert [one.realized_ms for one in read_history()] == [5.0, 20.0]


@pytest.mark.parametrize(
    ("trial_record", "verdict"),
    [
        (tried(30.0), "kept"),
        (tried(50.1), "dropped: no gain shown"),
        (tried(60.0), "dropped: slower"),
        (tried(30.0, losses=(2.0, 1.7, 1.6, 1.5)), "dropped: the loss differs"),
        (tried(90.0, advice("larger-batch", batch="16")), "kept"),
        (tried(30.0, status="oom", reason="full"), "not tried: full"),
    ],
)
def test_verdicts(trial_record: Record, verdict: str) -> None:
    assert Tried(trial_record).verdict == verdict


def test_predicted_and_realized_refer_to_the_same_interleaved_steps() -> None:
    one = Tried(tried(30.0))
    assert one.base_ms == 50.0
    assert one.realized_ms == pytest.approx(20.0)
    # 40 of 100 ms was predicted; the base takes 50 ms in the interleaved steps.
    assert one.predicted_ms == pytest.approx(20.0)
    verification = one.verified()
    assert verification is not None
    assert verification.error == pytest.approx(0.0)
    both = Tried(tried(10.0, advice(), advice("compile", 50.0, compile="model")))
    assert both.trial.predicted_ms == pytest.approx(70.0)
    assert both.trial.changed == msgspec.structs.replace(BASE, dtype="bfloat16", compile="model")
    assert both.verified() is None


def test_the_page_states_verified_gains_and_the_code_to_write() -> None:
    blocks = trial_blocks(
        [
            tried(30.0),
            tried(60.0, advice("compile", 20.0, compile="model")),
            tried(25.0, advice(), advice("fused-optimizer", 5.0, optimizer="adamw-fused")),
        ]
    )
    best, off = findings_of(blocks)
    assert (best.code, best.values) == (
        "advise.best",
        {"change": "bfloat16+fused-optimizer", "speedup": pytest.approx(2.0), "loss_off": 0.0},
    )
    assert best.text.startswith(
        "2.00× as fast with the change bfloat16, the change fused-optimizer"
    )
    assert (off.code, off.values["changes"]) == ("advise.predictions-off", 2)
    assert "The median error of the predictions for 2 changes is" in off.text
    trials, lines = tables_of(blocks).values()
    assert [row[-1] for row in trials.rows] == ["kept", "dropped: slower", "kept"]
    assert [row[0] for row in lines.rows] == ["the change bfloat16", "the change fused-optimizer"]
    # A combination that is barely faster is not proven: fewer changes do the same.
    together = tried(29.95, advice(), advice("fused-optimizer", 5.0, optimizer="adamw-fused"))
    finding, *_ = trial_blocks([tried(30.0), together])
    assert isinstance(finding, Finding)
    assert finding.values["change"] == "bfloat16"
    bare = tuple(one for one in tried(30.0).series if not one.name.startswith("loss"))
    finding, *_ = trial_blocks([tried(30.0, series=bare)])
    assert isinstance(finding, Finding)
    assert finding.text.endswith("unchanged step, the loss was not compared.")
    slower = tried(60.0)
    assert trial_blocks([slower])[0] == Finding(
        code="advise.no-gain",
        values={"tried": 1},
        records=(slower.id,),
        text="None of the tried changes is worth making: none gains 3 % or more with the same"
        " loss.",
    )


@pytest.fixture(scope="module")
def measured() -> Record:
    flags = OwnFlags(
        model="own_models:causal_lm",
        batch=(2,),
        warmup=1,
        steps=2,
        traced=1,
        optimizer=("adamw-loop",),
    )
    (case,) = OWN.cases(flags)
    return measured_on_cpu(OWN, case)


def test_facts_come_from_a_record(measured: Record) -> None:
    step = facts_of(measured)
    assert not step.on_gpu
    assert step.dtype == "float32"
    assert step.parameters == measured.quantity("parameters")
    assert step.class_ms("matmul") > 0
    assert step.phase_ms("optimizer") > 0
    assert step.launch_ms == step.host_ms == 0
    assert (step.compiled, step.fused_optimizer, step.batch) == (False, False, 2)
    assert set(step.rates) == {"bfloat16"}


def test_the_lines_name_the_optimizer_in_use() -> None:
    plain = facts(optimizer_ms=20.0, bandwidth=1e12, parameters=1_000_000, fused_optimizer=False)
    for name, line in (("", "torch.optim.AdamW("), ("Adam", "torch.optim.Adam(")):
        named = msgspec.structs.replace(plain, optimizer_name=name)
        (update,) = [one for one in advise(named) if one.code == "fused-optimizer"]
        assert line in update.lines[0]


def test_records_without_a_trace_give_no_advice(measured: Record) -> None:
    notes = {"trace_missing": "the program runs its own profiler"}
    with pytest.raises(StepscopeError, match="its own profiler"):
        facts_of(msgspec.structs.replace(measured, notes=notes, attachments={}))


def test_the_command_lists_advice_from_records(
    measured: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from stepscope.cli import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "own.jsonl"
    write_records([measured], file)
    assert main(["advise", str(file), "--out", str(tmp_path), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert all(one["lines"] for one in output["advice"])
    assert "Advice for own_models:causal_lm" in (tmp_path / "own-advice.html").read_text()


class StandIn:
    """Stands for a runner: a machine whose ceilings are measured now."""

    lacks: ClassVar[dict[str, str]] = {}

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ceilings(self, _: object) -> tuple[Ceiling, ...]:
        rates = {"matmul.float32": 50e12, "matmul.bfloat16": 700e12, "launch.rate": 1e6}
        return tuple(
            Ceiling(name=name, value=rate, unit="1/s", source="measured")
            for name, rate in rates.items()
        )


def test_a_script_is_judged_by_measured_rates_instead_of_a_data_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepscope.advisor.inspect import recording
    from stepscope.cli import main
    from stepscope.cli.commands import advise as advise_command

    sheet = Ceiling(name="matmul.bfloat16", value=989e12, unit="FLOP/s", source="a data sheet")
    watched = inspected_record(step=0.24, ceilings=(sheet,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(recording, "record_script", lambda _: [watched])
    monkeypatch.setattr(advise_command, "Runner", StandIn)
    script = tmp_path / "train.py"
    script.touch()
    assert main(["advise", "--json", "--out", str(tmp_path), str(script)]) == 0
    output = json.loads(capsys.readouterr().out)
    assert "bfloat16" in {one["code"] for one in output["advice"]}
    # Each program has its own page, whether the program or its records are named.
    page = str(tmp_path / "train-advice.html")
    assert output["report"] == page
    assert main(["advise", "--json", "--out", str(tmp_path), "latest"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no step to advise on"),
        (("a.jsonl", "--model", "a:b"), "there is no step to advise on"),
        (("a.jsonl", "--verify"), "--verify cannot run records"),
        (("--model", "a:b", "--rounds", "1"), "at least 5 rounds"),
        (("--model", "a:b", "--total-timeout", "-1"), "--total-timeout is -1 and --timeout 600"),
        (("--model", "a.py"), "not of the form"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from stepscope.cli import main

    assert main(["advise", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_a_compiler_the_rest_is_tried(tmp_path: Path) -> None:
    command = CommandLine(tmp_path)
    # No program is on the PATH, so no compiler either.
    command.environment["PATH"] = str(tmp_path)
    command.know_ceilings(
        Ceiling(name="memory.copy", value=1e15, unit="B/s", source="measured", detail="planted")
    )
    model = ("--model", "own_models:conv_net", "--optimizer", "adamw-loop", "--batch", "1")
    effort = ("--verify", "--rounds", "5", "--loss-steps", "4", "--device", "cpu", "--json")
    done = command("advise", *model, *effort, timeout=400)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert [one["code"] for one in output["advice"]] == ["fused-optimizer"]
    (tried_once,) = output["tried"]
    low, high = tried_once["interval_ms"]
    assert low <= tried_once["realized_ms"] <= high
    assert tried_once["change"] == "fused-optimizer"
    assert tried_once["predicted_ms"] > 0
    assert not tried_once["verdict"].startswith("not tried")
    assert (
        "Predicted and measured gain"
        in (command.out / "own_models-conv_net-advice.html").read_text()
    )


def test_a_trial_runs_both_steps_on_the_same_data() -> None:
    from stepscope.advisor.advise.measure import measure_trial

    base = OwnStep(
        model="own_models:conv_net", batch=2, dtype="float32", compile="no", optimizer="adamw-loop"
    )
    change = advice("fused-optimizer", 1.0, optimizer="adamw-fused")
    trial = Trial(base=base, advice=(change,), step_ms=10.0, rounds=5, loss_steps=4)
    result = measure_trial(trial, QuietBench())
    losses = {s.variant: s.values for s in result.series if s.name == "loss"}
    assert losses["base"] == pytest.approx(losses["changed"], rel=1e-4)
    assert len(losses["base"]) == 4
    steps = [len(s.values) for s in result.series if (s.name, s.variant) == ("step", "changed")]
    assert steps == [5]
