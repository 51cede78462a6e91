"""What a new user sees: answers on one screen, commands that work as typed, ASCII, plain errors."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec
import pytest

from command_line import CommandLine, python
from mixed_records import mixed_records
from rehearsal_records import recorded_record
from sample_records import run
from stepscope.advisor.scope import launch
from stepscope.analysis.verdict import BreakdownPart, Estimate, Verdict
from stepscope.cli import main, program
from stepscope.cli.answer import SCREEN, for_shell, in_directory
from stepscope.cli.common import DEFAULT_OUT, StoreOptions
from stepscope.cli.encoding import use_locale
from stepscope.cli.progress import PlainLines, slower_text
from stepscope.records.jsonl import read_records, write_records
from stepscope.records.store import Store
from stepscope.report.blocks import Table
from stepscope.report.verdict import lines_at, segments, verdict_view
from stepscope.runner.estimate import TimeLeft
from stepscope.studies.base import PlannedCase
from stepscope.studies.page import make_page, verdict_of
from study_records import benchmark_record, profile_record
from trace_files import training_step

TESTS = Path(__file__).parents[1]
RESULTS = TESTS.parent / "results"
GLOO = TESTS / "fixtures" / "gloo_ddp"
PATHS = re.compile(r"[/.]\S*/|\w+\.jsonl")


def commands(folder: Path) -> dict[str, list[str]]:
    """A command line for each kind of answer, with short paths."""
    everything = [record for of_study in mixed_records().values() for record in of_study]
    write_records(everything, folder / "all.jsonl")
    write_records([recorded_record()], folder / "step.jsonl")
    training_step(blocks=40).write(folder / "t.json")
    return {
        "show": ["show", "all.jsonl"],
        "report": ["report", "all.jsonl"],
        "memory": ["show", str(RESULTS / "memory_h200.jsonl")],
        "advise": ["advise", str(RESULTS / "advise-slow_h200.jsonl")],
        "trace": ["trace", "t.json"],
        "against": ["trace", "t.json", "--against", "t.json"],
        "job": ["trace", str(GLOO)],
        "rehearse": ["rehearse", "step.jsonl"],
    }


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_answer_is_one_screen_and_names_the_command_for_the_rest(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    for name, words in commands(tmp_path).items():
        if name in ("report", "memory") and width != 80:
            continue  # They print what `show` does; `report` writes the page.
        assert main([*words, "--out", "o"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert 3 <= len(lines) <= lines_at(width, SCREEN), name
        # A path is one word.
        long = [line for line in lines if len(line) > width and not PATHS.search(line)]
        assert long == [], name
        text = " ".join(" ".join(lines).replace("\\ ", "").split())
        assert "no batch size" not in text
        (rest,) = re.findall(r"All tables: stepscope (.*?)(?: page: |$)", text)
        assert rest.split()[0] == ("show" if name == "report" else words[0])
        assert {"--full", "--out", "o", words[1]} <= set(rest.split()), name


def test_full_prints_the_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["trace", str(GLOO)], ["rehearse", "step.jsonl"]):
        commands(tmp_path)
        assert main([*words, "--out", "o"]) == 0
        short = capsys.readouterr().out
        assert main([*words, "--full", "--out", "o"]) == 0
        full = capsys.readouterr().out
        assert "All tables" not in full
        assert full.count("\n") > 2 * short.count("\n") > 0


TRAINING = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_recording_of_inspect_is_in_the_store(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    done = cli("inspect", "--no-memory", "--json", str(script))
    facts = json.loads(done.stderr.splitlines()[-1])
    (record,) = cli.records()
    assert facts["run"] == record.run == read_records(Path(facts["records"]))[0].run
    with Store(cli.out / "records.db", create=False) as store:
        assert store.find_run("latest").command == f"stepscope inspect {script}"
    shown = cli("show")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("train.py on ")
    assert record.run in cli("list", "runs").stdout
    # The script is not run again for what needs only the recording.
    assert not verdict_of([record]) or f"inspect {script}" not in shown.stdout


@pytest.mark.parametrize(
    ("started", "path", "expected"),
    [
        ("venv/bin/stepscope", "", "venv/bin/stepscope"),
        ("venv/bin/stepscope", "venv/bin", "stepscope"),
        ("lib/stepscope/__main__.py", "venv/bin", "stepscope"),
        ("lib/stepscope/__main__.py", "", "venv/bin/stepscope"),
        ("venv/bin/pytest", "", "stepscope"),
    ],
)
def test_commands_are_named_as_they_work_in_this_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, path: str, expected: str
) -> None:
    for name in ("python", "stepscope"):
        file = tmp_path / "venv" / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [started])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
    program._program.cache_clear()
    try:
        text = "resume with: stepscope run --resume (stepscope 0.2.0, ./stepscope run)"
        assert program.as_typed(text) == text.replace("stepscope run", f"{expected} run", 1)
    finally:
        program._program.cache_clear()


def test_the_next_command_has_the_directory_and_reads_the_recording(tmp_path: Path) -> None:
    verdict = Verdict(
        subject="s", device="d", next_command="stepscope advise t.py",
        next_on_recording="stepscope advise",
    )  # fmt: skip

    def next_of(location: StoreOptions, source: str = "") -> str:
        found = for_shell(verdict, location, source)
        assert found is not None
        return found.next_command

    assert next_of(StoreOptions(out=DEFAULT_OUT)) == "stepscope advise t.py"
    assert next_of(StoreOptions(out=DEFAULT_OUT), "latest") == "stepscope advise latest"
    other = StoreOptions(out=tmp_path)
    assert next_of(other, "r1") == f"stepscope advise --out {tmp_path} r1"
    assert in_directory("stepscope run step --size s", other) == (
        f"stepscope run step --size s --out {tmp_path}"
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("run benchmark --context abc", ("--context is 'abc'", "takes [INT [INT ...]]")),
        ("run benchmark --contxt 3", ("--contxt 3", "perhaps you meant --context")),
        ("run --device gpu", ("--device is 'gpu'", "one of: auto, cpu, cuda")),
        ("run --timeout", ("--timeout has no value",)),
        ("trace", ("FILE|FOLDER is missing",)),
        ("predict --ranks x", ("--ranks is 'x'", "takes INT")),
    ],
)
@pytest.mark.parametrize("width", [40, 200])
def test_an_invalid_option_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    words: str,
    parts: tuple[str, ...],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("stepscope: ")
    assert "--help`" in said.err
    for part in parts:
        assert part in said.err


def test_a_misspelled_study_is_corrected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(tmp_path / "records.db") as store:
        store.add_run(run(id="20260101-000000-abcd", cases=0))
    assert main(["show", "benchmrk", "--out", str(tmp_path)]) == 2
    assert "perhaps you meant benchmark" in capsys.readouterr().err


def test_an_ascii_locale_gets_ascii(tmp_path: Path) -> None:
    training_step().write(tmp_path / "t.json")
    environment = os.environ | {"LC_ALL": "C", "COLUMNS": "40"}
    for name in ("PYTHONIOENCODING", "PYTHONUTF8"):
        environment.pop(name, None)
    code = "import sys; from stepscope.cli import main; sys.exit(main(sys.argv[1:]))"
    for words in (["trace", "t.json"], ["trace", "t.json", "--full"], ["show", str(GLOO / "é")]):
        done = python("-c", code, *words, cwd=tmp_path, env=environment)
        assert (done.stdout + done.stderr).isascii()
        assert done.returncode == (2 if "show" in words else 0)


def test_letters_of_our_own_have_an_ascii_form() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    use_locale(stream)
    stream.write("≤ 3 µs × 2 … −1 ± 2 █▓▚ xᵀ é\udc80")
    stream.flush()
    assert raw.getvalue().decode() == r"<=3 us x 2 ... -1 +-2 #%x xT \u00e9\udc80"


def test_json_is_ascii_in_every_locale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "é.jsonl"
    write_records([benchmark_record()], path)
    assert main(["report", str(path), "--json", "--out", str(tmp_path / "µ")]) == 0
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text)["report"] == str(tmp_path / "µ" / "report.html")


def test_a_page_opens_with_a_step_of_its_own_table() -> None:
    timed = [benchmark_record(context=128, step=10.0), benchmark_record(context=512, step=100.0)]
    traced = {context: profile_record(context=context) for context in (64, 128)}
    cases: list[tuple[list[int], str]] = [([64], "context 512"), ([64, 128], "context 128")]
    for contexts, expected in cases:
        page = make_page([*timed, *(traced[context] for context in contexts)])
        assert page.verdict is not None
        assert expected in page.verdict.subject
        assert isinstance(page.headline, Table)
        assert any(str(expected.split()[1]) in map(str, row) for row in page.headline.rows)
    alone = verdict_of([traced[64]])
    assert alone is not None
    assert "context 64" in alone.subject
    assert (
        alone.next_command == "stepscope run step --part ladder --size small --context 64 --batch 4"
    )


def test_no_device_is_idle_in_the_step_of_a_study_on_a_cpu() -> None:
    def labels(*, on_device: bool) -> set[str]:
        record = profile_record()
        summary = record.attachments["profile"] | {"on_device": on_device}
        attachments = record.attachments | {"profile": summary}
        verdict = verdict_of([msgspec.structs.replace(record, attachments=attachments)])
        assert verdict is not None
        return {part.label for part in verdict.parts}

    assert labels(on_device=True) - labels(on_device=False) == {"device idle"}
    assert labels(on_device=False) - labels(on_device=True) == {"between operators"}


def test_the_parts_of_a_bar_differ_and_the_widest_is_named() -> None:
    labels = ("slow matmuls", "memory-bound operations", "casts and copies", "optimizer")
    parts = tuple(
        BreakdownPart(label=label, ms=ms, meaning="lost")
        for label, ms in zip(labels, (28.0, 26.0, 24.0, 22.0), strict=True)
    )
    step = Estimate(value=100, low=99, high=101)
    verdict = Verdict(subject="s", device="d", step=step, parts=parts)
    view = verdict_view(verdict)
    assert (
        len({part.look for part in view.parts}) == len({one.letter for one in segments(parts)}) == 4
    )
    assert [part.inside for part in view.parts] == [
        "slow matmuls", "memory-bound", "casts and copies", "optimizer",
    ]  # fmt: skip
    one = BreakdownPart(label="a" * 200, ms=100.0, meaning="idle")
    (widest,) = verdict_view(msgspec.structs.replace(verdict, parts=(one,))).parts
    assert re.fullmatch("a{60,90}…", widest.inside)


def test_the_sentence_of_a_page_does_not_repeat_the_numbers_above_it() -> None:
    verdict = verdict_of(read_records(RESULTS / "advise-slow_h200.jsonl"))
    assert verdict is not None
    view = verdict_view(verdict)
    assert len(view.stats) == 4
    for stat in view.stats:
        assert stat.value.removeprefix("≤ ") not in view.answer
    assert "bfloat16 autocast" in view.answer
    assert verdict.largest_loss is not None
    assert verdict.largest_loss.label.removesuffix(" beyond the limit") in view.answer


def frames(trace: TracebackType | None) -> list[str]:
    found = []
    while trace is not None:
        found.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return found


def test_frames_that_observe_a_script_are_not_in_its_traceback() -> None:
    def function(file: str, body: str, **names: object) -> Callable[[], None]:
        scope: dict[str, Callable[[], None]] = dict(names)  # type: ignore[arg-type]
        exec(compile(f"def f():\n    {body}\n", file, "exec"), scope)
        return scope["f"]

    ours = str(Path(launch.__file__).with_name("watching.py"))
    interrupted = function(ours, "raise KeyboardInterrupt")
    torch = function("/site-packages/torch/optim.py", "g()", g=interrupted)
    script = function("train.py", "g()", g=function(ours, "g()", g=torch))
    with pytest.raises(KeyboardInterrupt) as raised:
        script()
    kept = frames(launch._of_user(raised.value.__traceback__))
    assert kept == [__file__, "train.py", "/site-packages/torch/optim.py"]


def test_a_growing_estimate_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [PlannedCase(study="benchmark", key=key, config={}) for key in "abcd"]
    left = TimeLeft(cases, {("benchmark", key): 1.0 for key in "abcd"}, None)
    with PlainLines(run(), 4, 0, left) as lines:
        for key, seconds in zip("abc", (1.0, 1.0, 30.0), strict=True):
            record = msgspec.structs.replace(benchmark_record(), case=key, elapsed_s=seconds)
            lines.case_finished(record)
    told = [line for line in capsys.readouterr().err.splitlines() if "as long as expected" in line]
    assert len(told) == 1
    assert "cases take 10.7 times as long as expected" in told[0]
    assert slower_text(2.0, 1.5, 2).endswith("other processes use 1.5 of 2 cores")
    assert slower_text(2.0, 0.1, 2).endswith("no other process uses much of the CPU")
