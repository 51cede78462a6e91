"""Every command that reads records, with randomly changed records: it prints, or it fails with a
one-line error. STEPSCOPE_HOSTILE_EXAMPLES=5000 tries more examples, other ones every time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostile_records import Json, hostile, real_records
from stepscope.analysis.checks import check_record
from stepscope.analysis.plausibility import plausible
from stepscope.cli import main
from stepscope.records.schema import decode, encode
from stepscope.studies import page
from study_records import benchmark_record

EXAMPLES = os.environ.get("STEPSCOPE_HOSTILE_EXAMPLES")
COMMANDS = (
    ("report", "NEW"),
    ("show", "NEW"),
    ("show", "NEW", "--json"),
    ("export", "NEW"),
    ("export", "NEW", "--digits", "6"),
    ("export", "NEW", "--format", "markdown"),
    ("export", "NEW", "--format", "latex"),
    ("export", "NEW", "--format", "csv", "--to", "CSV"),
    ("compare", "NEW", "BASE"),
    ("compare", "BASE", "NEW", "--across", "--fail-above", "3%"),
    ("import", "NEW"),
    ("list", "runs"),
    ("report", "latest"),
    ("rehearse", "NEW"),
    ("advise", "NEW"),
)


@pytest.fixture(autouse=True)
def no_last_resort(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let exceptions of the views reach the test."""
    monkeypatch.setattr(page, "_UNEXPECTED", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def call(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as left:
            code = int(left.code or 0)
    return code, out.getvalue(), err.getvalue()


def write(path: Path, records: list[Json]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def check_commands(folder: Path, base: list[Json], new: list[Json]) -> None:
    write(folder / "base.jsonl", base)
    write(folder / "new.jsonl", new)
    out = folder / "inside" / "out"
    out.mkdir(parents=True)
    paths = {"BASE": folder / "base.jsonl", "NEW": folder / "new.jsonl", "CSV": out / "csv"}
    for command in COMMANDS:
        words = [str(paths.get(word, word)) for word in command]
        code, stdout, stderr = call([*words, "--out", str(out)])
        assert code in (0, 1, 2, 3, 4), command
        assert "\x1b" not in stdout + stderr, command
        if code in (1, 2):
            assert stderr.startswith("stepscope: "), (command, stderr)
            assert stderr.count("\n") == 1, (command, stderr)
    outside = {path.name for path in (*folder.iterdir(), *(folder / "inside").iterdir())}
    assert outside == {"base.jsonl", "new.jsonl", "inside", "out"}


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """A folder for each example: the fixture's folder is shared by all of them."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@settings(
    max_examples=int(EXAMPLES or 12),
    deadline=None,
    database=None,
    derandomize=not EXAMPLES,
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(0, 2**32 - 1))
@pytest.mark.timeout(0)
def test_every_command_prints_or_fails_with_one_line(seed: int) -> None:
    with new_folder() as folder:
        check_commands(folder, *hostile(Random(seed)))


@pytest.mark.parametrize(
    "value", [1e308, 5e-324, 0.0, -1.0], ids=["large", "smallest", "zero", "negative"]
)
def test_extreme_samples_are_stored_and_reported_as_an_error(value: float, tmp_path: Path) -> None:
    template = benchmark_record(run="r", step=100.0)
    series = [json.loads(encode(template))["series"][0] | {"values": [value] * 5}]
    raw = json.loads(encode(template)) | {"series": series}
    record = decode(json.dumps(raw))
    assert decode(encode(record)) == record
    # Neither may raise: a run would lose the record.
    check_record(record)
    judged = plausible(record)
    assert judged.status == "error"
    assert judged.reason.startswith("not plausible: series ")
    check_commands(tmp_path, [raw], [raw])


@pytest.mark.parametrize("study", sorted(real_records()))
def test_committed_records_are_plausible(study: str) -> None:
    for raw in real_records()[study]:
        record = decode(json.dumps(raw))
        assert plausible(record) is record


CHANGES = {
    "run outside": {"run": "../../x"},
    "absolute run": {"run": "/tmp/x"},
    "hidden run": {"run": ".x"},
    "escape in id": {"id": "\x1b[2J"},
    "line break in study": {"study": "step\nx"},
    "empty case": {"case": ""},
    "long run": {"run": "x" * 300},
    "attempt": {"attempt": 10**400},
    "attempt 0": {"attempt": 0},
    "no ranks": {"config": {"ranks": 0}},
    "deep config": {"config": {"a": json.loads("[" * 500 + "]" * 500)}},
    "long number": {"config": {"a": 2**70}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_invalid_record_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    write(path, [json.loads(encode(benchmark_record())) | CHANGES[name]])
    for command in ("report", "show", "export", "import", "advise"):
        code, stdout, stderr = call([command, str(path), "--out", str(tmp_path / "a" / "out")])
        assert (code, stdout) == (1, "")
        assert stderr.startswith(f"stepscope: {path}, line 1: not a record: ")
        assert stderr.count("\n") == 1
        assert "\x1b" not in stderr
    assert sorted(path.name for path in tmp_path.rglob("*.jsonl")) == ["new.jsonl"]


def test_tables_named_by_a_record_stay_in_the_folder(tmp_path: Path) -> None:
    raw = [dict(one) for one in real_records()["autocast"]]
    for one in raw:
        one["config"] = one["config"] | {"subject": "../../../x"}
    write(tmp_path / "new.jsonl", raw)
    words = ["export", str(tmp_path / "new.jsonl"), "--format", "csv", "--to"]
    code, _, stderr = call([*words, str(tmp_path / "a" / "b" / "c")])
    assert code == 0, stderr
    written = list(tmp_path.rglob("*.csv"))
    assert written
    assert {path.parent for path in written} == {tmp_path / "a" / "b" / "c"}


def test_a_link_in_the_output_folder_is_neither_replaced_nor_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("keep me")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("report.html", "report.md", "copy.jsonl"):
        (out / name).symlink_to(mine)
    write(tmp_path / "new.jsonl", [json.loads(encode(benchmark_record()))])
    source = str(tmp_path / "new.jsonl")
    for words in (["report", "--out", str(out)], ["export", "--to", str(out / "copy.jsonl")]):
        code, _, stderr = call([words[0], source, *words[1:]])
        assert code == 1
        assert "is a link, not a regular file" in stderr
    assert mine.read_text() == "keep me"
    assert all(path.is_symlink() for path in out.iterdir())


@pytest.mark.parametrize("command", ["show", "report", "export"])
def test_the_blocks_of_a_model_are_limited(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An activation policy lists every block: 10^12 blocks take 8 TB."""
    raw = json.loads(encode(benchmark_record()))
    raw["config"]["overrides"] = {"n_layers": 10**12}
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(raw))
    more = ["--out", str(tmp_path / "out")] if command == "report" else []
    more += ["--format", "markdown"] if command == "export" else []
    assert main([command, str(path), *more]) != 0
    assert "it must be at most 10,000" in capsys.readouterr().err
