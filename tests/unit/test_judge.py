"""The referee: edits that only look faster are refused by the criterion that they violate, and
edits that train the same are accepted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from judged_script import FALSE, SCRIPT, TRUE, changed
from stepscope.advisor.advise.cases import BASE, CHANGED, Script
from stepscope.advisor.advise.script_trial import Times, order_of
from stepscope.advisor.judge import referee
from stepscope.advisor.judge.criteria import (
    Criterion,
    Verdict,
    conclude,
    same_training,
    with_times,
)
from stepscope.advisor.judge.evidence import Evidence
from stepscope.advisor.judge.observer import samples_of
from stepscope.advisor.judge.referee import observe
from stepscope.advisor.patch.apply import Gain, compare_orders
from stepscope.advisor.patch.losses import Losses
from stepscope.cli import main
from stepscope.cli.commands import judge as command
from stepscope.records.stats import judge

STEPS = 14
ALIKE = {
    "shorter sequences", "smaller batch", "frozen layers", "labels of half the tokens",
    "skipped layer", "eval mode", "accumulation dropped", "truncated vocabulary",
    "gradients set to None", "batched heads",
}  # fmt: skip
"""Decided by the same criterion as another edit, and on the same evidence."""


def case(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.thorough if name in ALIKE else (), id=name)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def evidence_of(folder: Path, text: str, base: Evidence | None = None) -> Evidence:
    path = folder / "train.py"
    path.write_text(text)
    return observe(order_of(Script(target=str(path))), folder / "evidence", STEPS, base)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return evidence_of(tmp_path_factory.mktemp("original"), SCRIPT)


@pytest.mark.parametrize("name", [case(name) for name in FALSE])
def test_false_win_is_refused(original: Evidence, tmp_path: Path, name: str) -> None:
    criterion, edits = FALSE[name]
    other = evidence_of(tmp_path, changed(edits), original)
    verdict = conclude(same_training(original, other, "bfloat16"))
    assert verdict.outcome == "refused"
    assert criterion in verdict.failed
    assert verdict.sentence.startswith("The changed script does not count as faster: ")


@pytest.mark.parametrize("name", [case(name) for name in TRUE])
def test_same_training_is_accepted(original: Evidence, tmp_path: Path, name: str) -> None:
    other = evidence_of(tmp_path, changed(TRUE[name]), original)
    criteria = same_training(original, other, "bfloat16")
    assert [one for one in criteria if one.result != "pass"] == []


def test_stated_dtype_bounds_the_error(original: Evidence, tmp_path: Path) -> None:
    other = evidence_of(tmp_path, changed(TRUE["bfloat16 autocast"]), original)
    # Dropout makes the gradients random; without that the policy alone decides.
    exact = [msgspec.structs.replace(one, noise=0.0) for one in (original, other)]
    assert conclude(same_training(*exact, "bfloat16")).outcome == "faster"
    assert conclude(same_training(*exact, "float32")).failed == ["gradients"]


SLEEPS = (("        optimizer.step()\n", "        optimizer.step()\n        time.sleep(0.05)\n"),)
SLOW_DATA = (("        source = torch.G", "        time.sleep(0.01)\n        source = torch.G"),)


def test_sleep_is_a_wait_and_a_slow_loader_is_not(original: Evidence, tmp_path: Path) -> None:
    for name, edits in (("sleeps", SLEEPS), ("data", SLOW_DATA)):
        (tmp_path / name).mkdir()
        found = evidence_of(tmp_path / name, changed(edits), original)
        assert found.blocked_ms is not None
        # A step loads eight samples of 10 ms.
        assert (found.blocked_ms > 45) == (name == "sleeps")


def gain_of(
    base: float, new: float, losses: str = "alike", spread: float = 0.0
) -> tuple[Gain, list[float], list[float]]:
    before, after = (
        [t + 0.001 * ((i * step) % 3) + spread * ((i * step) % 7) for i in range(15)]
        for t, step in ((base, 1), (new, 2))
    )
    compared = Losses(losses, 50, 0.0, 0.0, 0.0)  # type: ignore[arg-type]
    times = judge(before, after, "paired")
    gain = Gain(base_ms=base, changed_ms=new, times=times, losses=compared, rounds=15)
    return gain, before, after


@pytest.mark.parametrize(
    ("base", "new", "blocked", "losses", "outcome", "failed"),
    [
        (10.0, 5.0, 0.0, "alike", "faster", []),
        (10.0, 10.0, 0.0, "alike", "not faster", ["time"]),
        (10.0, 5.0, 6.0, "alike", "refused", ["waits"]),
        # The rest of the gain is one of the training.
        (10.0, 2.0, 4.0, "alike", "faster", []),
        (10.0, 5.0, 0.0, "differ", "refused", ["losses"]),
        (10.0, 5.0, 0.0, "cannot tell", "cannot tell", []),
        (10.0, 12.0, 0.0, "alike", "not faster", ["time"]),
    ],
)
def test_times_losses_and_waits(
    base: float, new: float, blocked: float, losses: str, outcome: str, failed: list[str]
) -> None:
    gain, before, after = gain_of(base, new, losses)
    one, other = Evidence(blocked_ms=blocked), Evidence(blocked_ms=0.0)
    verdict = with_times([], gain, before, after, one, other)
    assert (verdict.outcome, verdict.failed) == (outcome, failed)


def test_times_that_leave_a_gain_open_are_not_a_verdict() -> None:
    gain, before, after = gain_of(10.0, 10.0, spread=2.0)
    assert gain.times.outcome != "faster"
    verdict = with_times([], gain, before, after, Evidence(), Evidence())
    assert verdict.outcome == "cannot tell"


def test_samples_do_not_depend_on_order_micro_batches_or_rounding() -> None:
    torch.manual_seed(0)
    tokens, images = torch.randint(100, (8, 5)), torch.randn(8, 12)
    whole = samples_of([[tokens, images]])
    order = torch.randperm(8)
    halves = [
        [t[order][s] for t in (tokens.int(), images.bfloat16())] for s in (slice(4), slice(4, 8))
    ]
    parts = samples_of(halves)
    assert (parts.count, parts.elements, parts.exact) == (whole.count, whole.elements, whole.exact)
    assert parts.projections[0] == pytest.approx(whole.projections[0], abs=0.01)
    other = tokens.clone()
    other[3, 2] += 1
    assert samples_of([[other, images]]).exact != whole.exact
    swapped = tokens[:, [1, 0, 2, 3, 4]]
    assert samples_of([[swapped, images]]).exact != whole.exact


# The command line.


def test_commits_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    for text in (SCRIPT, changed(FALSE["skipped micro-batches"][1])):
        Path("train.py").write_text(text)
        subprocess.run([*git, "add", "train.py"], check=True)
        subprocess.run([*git, "commit", "-qm", "a"], check=True)
    words = ["judge", "train.py", "--commits", "HEAD~1", "HEAD", "--steps", "10", "--json"]
    assert main(words) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["outcome"] == "refused"
    assert facts["failed"][0] == "samples"
    assert "4 samples" in facts["sentence"]
    assert subprocess.run([*git, "status", "--porcelain"], capture_output=True).stdout == b""


def test_same_script_meets_every_criterion_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planted(*arguments: Any) -> Times:
        """Run both scripts; their times are not those of a busy machine."""
        times = compare_orders(*arguments)
        assert min(map(len, times.ms.values())) >= 10
        _, times.ms[BASE], times.ms[CHANGED] = gain_of(10.0, 10.0)
        return times

    monkeypatch.setattr(referee, "compare_orders", planted)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("steps = 60", "steps = 1000"))
    code = main(["judge", str(path), str(path), "--steps", "10", "--rounds", "10"])
    said = capsys.readouterr()
    results = dict(line.split()[:2] for line in said.out.splitlines()[:-1])
    assert code == 3, said
    assert results.pop("time") == "FAILS:"
    assert results.keys() >= {"samples", "flops", "gradients", "losses", "waits"}
    assert {*results.values()} == {"ok:"}, said


@pytest.mark.parametrize(
    ("outcome", "code"), [("faster", 0), ("refused", 3), ("not faster", 3), ("cannot tell", 4)]
)
def test_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, code: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text("")
    verdict = Verdict(outcome=outcome, criteria=(Criterion("time", "pass", "2x"),))  # type: ignore[arg-type]
    monkeypatch.setattr(command, "referee", lambda *_, **__: verdict)
    assert main(["judge", str(path), str(path)]) == code


def test_original_that_is_too_short_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("steps = 60", "steps = 3"))
    assert main(["judge", str(path), str(path)]) == 1
    assert "3 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["a.py", "b.py"], ["a.py"], ["--steps", "3", "a.py", "b.py"],
              ["--dtype", "int3", "a.py", "b.py"]]
)  # fmt: skip
def test_bad_command_lines(words: list[str]) -> None:
    assert main(["judge", *words]) == 2
