"""`stepscope profile-nsys`: it prints complete commands, and runs them where it can."""

from __future__ import annotations

import dataclasses
import shlex
import stat
from pathlib import Path

import pytest

from stepscope.cli import main
from stepscope.cli.common import parse
from stepscope.errors import StepscopeError
from stepscope.studies.ddp.cases import DDPCase, DDPFlags
from stepscope.studies.profile.nsight_steps import read_config
from stepscope.studies.registry import find_study

STEP = ("--size", "small", "--context", "128", "--dtype", "bfloat16", "--mode", "forward")


def printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_it_prints_commands_that_record_export_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile-nsys", *STEP, "--no-run", "--out", str(tmp_path)]) == 0
    record, export, read = printed(capsys)
    assert record[:2] == ["nsys", "profile"]
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} <= set(record)
    assert any(word.startswith("--trace=cuda,nvtx") for word in record)
    config = read_config(record[-1:])
    assert (config.size, config.context, config.dtype) == ("small", 128, "bfloat16")
    assert (config.mode, config.warmup, config.traced) == ("forward", 5, 3)
    report = tmp_path / "traces" / config.key
    assert f"--output={report}" in record
    assert export[-1] == f"{report}.nsys-rep"
    assert read[-4:-2] == ["trace", f"{report}.sqlite"]


def test_several_ranks_are_profiled_through_their_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--size", "xl", "--table", "2026", "--ranks", "2", "--memory", "--layers", "3")
    assert main(["profile-nsys", *words, "--no-run", "--out", str(tmp_path)]) == 0
    record, stats = printed(capsys)
    assert record[:2] == ["nsys", "profile"]
    assert "--cuda-memory-usage=true" in record
    assert not any(word.startswith("--capture-range") for word in record)
    study = record[record.index("run") :]
    flags = study[2 : study.index("--no-report")]
    case = _ddp_case(flags)
    assert study[:2] == ["run", "ddp"]
    assert (case.size, case.table, case.ranks, case.rounds) == ("xl", "2026", 2, 3)
    assert case.overrides == {"n_layers": 3}
    assert stats[:2] == ["nsys", "stats"]
    (output,) = (word for word in record if word.startswith("--output="))
    assert stats[-1] == f"{output.removeprefix('--output=')}.nsys-rep"


def _ddp_case(words: list[str]) -> DDPCase:
    fields = [("cases", DDPFlags)]
    request = parse(dataclasses.make_dataclass("Run", fields), words, "run ddp", "")
    (case,) = find_study("ddp").cases(request.cases)
    assert isinstance(case, DDPCase)
    return case


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", "2", "--mode", "forward"), "--mode does not apply with --ranks"),
        (("--ranks", "2", "--attention", "sdpa"), "--attention does not apply with --ranks"),
        (("--ranks", "0"), "--ranks is 0"),
    ],
)
def test_flags_that_ranks_do_not_have_are_refused(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile-nsys", "--no-run", *words]) == 2
    assert says in capsys.readouterr().err


def test_without_nsys_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["profile-nsys", *STEP, "--out", str(tmp_path)]) == 0
    assert "nsys is not installed here" in capsys.readouterr().err


def test_a_recording_that_fails_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nsys"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert main(["profile-nsys", *STEP, "--out", str(tmp_path)]) == 1
    assert "nsys ended with exit code 3" in capsys.readouterr().err


def test_one_step_is_recorded_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile-nsys", "--size", "small", "xl", "--no-run"]) == 2
    assert "the flags name 2 steps" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["{"], ['{"size": 3}']])
def test_an_invalid_config_is_refused(words: list[str]) -> None:
    with pytest.raises(StepscopeError, match="expected one case as JSON"):
        read_config(words)
