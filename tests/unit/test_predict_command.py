"""`stepscope predict`: options, output and errors."""

from __future__ import annotations

import json
import shlex

import pytest
from test_prediction import plan

from command_line import python
from stepscope.analysis.predict.fit import MARGIN, changes_that_fit
from stepscope.analysis.predict.step import predict
from stepscope.cli import main
from stepscope.views.prediction import budget_finding


def test_it_prints_phases_and_the_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--size", "2.7b", "--context", "2048", "--attention", "sdpa"]) == 0
    output = capsys.readouterr().out
    assert "Live memory at the peak of each phase" in output
    assert "optimizer state" in output
    assert "saved: attention, flash" in output


def test_several_cases_make_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--context", "64", "128", "--dtype", "float32", "bf16", "--size", "tiny"]
    assert main(["predict", *words, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["predictions"]
    assert [(p["plan"]["context"], p["plan"]["dtype"]) for p in text] == [
        (64, "float32"),
        (64, "bfloat16"),
        (128, "float32"),
        (128, "bfloat16"),
    ]
    for prediction in text:
        assert prediction["peak_bytes"] == max(p["allocated"] for p in prediction["phases"])


FAST = shlex.split(
    "--size 2.7b --context 2048 --dtype bf16 --attention auto --loss fused --fused"
    " --fused-projections --optimizer stepscope-in-backward"
)


@pytest.mark.parametrize(("keep", "gib"), [("gates", 63.1), ("inputs", 53.4)])
def test_peak_of_the_fastest_step(
    keep: str, gib: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Peaks measured on an H200."""
    assert main(["predict", *FAST, "--activation-policy", keep, "--json"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["predictions"]
    assert text["peak_bytes"] / 2**30 == pytest.approx(gib, rel=0.01)


def test_variants_of_a_step_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["predict", *FAST, "--activation-policy", "inputs-8", "--graph", "--size", "small"])
        == 0
    )
    output = " ".join(capsys.readouterr().out.split())
    assert "fused projections, saves inputs-8, optimizer-in-backward, as a graph" in output
    assert "saved: feed-forward, feed-forward" in output


def test_budget_is_checked_and_a_change_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--size", "small", "--context", "1024", "--budget", "6.5"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "does not fit into 6.50 GiB" in output
    assert "with: flash attention (" in output
    assert main(["predict", "--size", "small", "--context", "1024", "--budget", "9"]) == 0
    assert "fits into 9.00 GiB" in " ".join(capsys.readouterr().out.split())


def test_fit_uses_the_same_criterion_as_the_choice_of_changes() -> None:
    prediction = predict(plan("tiny", 512, batch=2, attention="sdpa", optimizer="torch-fused"))
    budget = int(0.3 * 2**30)
    assert prediction.peak.allocated * MARGIN <= budget
    finding = budget_finding("tiny", prediction, budget)
    assert finding.code == "prediction.does-not-fit"
    assert "fragmentation needs more" in finding.text
    changes = changes_that_fit(predict(plan("tiny", 512)).plan, budget)
    assert prediction.plan not in [change.plan for change in changes]
    for change in changes:
        fitting = budget_finding("tiny", predict(change.plan), budget)
        assert (fitting.code, fitting.tone) == ("prediction.fits", "good")


def test_budget_that_no_change_meets_is_reported() -> None:
    prediction = predict(plan("tiny", 64))
    finding = budget_finding("tiny", prediction, 1 << 20)
    assert finding.values["change"] is None
    assert finding.conclusion.startswith("No known change fits either; the model")


@pytest.mark.parametrize(
    "words",
    [
        ["--size", "huge"],
        ["--budget", "0"],
        ["--budget", "nan"],
        ["--sharding", "full"],
        ["--checkpoint", "-2"],
        ["--context", "0"],
        ["--activation-policy", "gates"],
        ["--fused"],
        ["--fused", "--attention", "sdpa", "--device", "cpu"],
        ["--graph"],
    ],
)
def test_invalid_options_give_one_line_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_it_does_not_load_torch() -> None:
    code = (
        "import sys; from stepscope.cli import main; main(['predict', '--size', 'tiny']);"
        "assert 'torch' not in sys.modules"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
