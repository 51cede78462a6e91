"""Invalid requests and unusable paths: one line of error, no traceback, no lost records."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import CommandLine
from media import MountTmpfs, make_read_only, unprivileged
from prepared_store import Desk, Said, fill, one_line, run_of
from stepscope.cli import main
from stepscope.records.jsonl import write_records
from stepscope.records.store import Store

READERS = (("show",), ("report",), ("export",), ("compare", "latest", "latest"), ("list", "runs"))


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    prepared = Desk(tmp_path / "out", capsys)
    fill(prepared.store, {"base": run_of("base")})
    return prepared


def ended(done: subprocess.CompletedProcess[str]) -> Said:
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--size", "smal"], ["size 'smal'", "small"]),
        (["--heads", "7"], ["heads 7", "d_model 768", "divides"]),
        (["--context", "0"], ["context is 0", "at least 1"]),
        (["--context", "128", "-4"], ["context is -4"]),
        (["--batch", "0"], ["batch is 0"]),
        (["--dtype", "bfloat17"], ["'bfloat17'", "bfloat16"]),
        (["--attention", "flush"], ["attention 'flush'", "reference"]),
        (["--steps", "0"], ["steps is 0"]),
        (["--warmup", "-1"], ["warmup is -1"]),
        (["--min-seconds", "-1"], ["min-seconds is -1", "negative"]),
        (["--timeout", "0"], ["timeout is 0"]),
        (["--retry"], ["--resume"]),
        (["--size"], ["no cases to measure"]),
    ],
    ids=lambda words: " ".join(words) if words and words[0].startswith("--") else "",
)
def test_invalid_cases(desk: Desk, words: list[str], parts: list[str]) -> None:
    one_line(desk("run", "benchmark", *words), 2, *parts)
    with Store(desk.store) as store:
        assert [run.id for run in store.runs()] == ["base"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["fsdp", "--ranks", "0"], ["ranks is 0", "at least 1"]),
        (["sharding", "--ranks", "0"], ["ranks is 0", "at least 1"]),
        (["ddp", "--ranks", "0"], ["ranks is 0", "at least 1"]),
        (["ddp", "--bucket-mb", "10", "0"], ["bucket-mb is 0"]),
        (["allreduce", "--ranks", "0"], ["ranks is 0", "from 1 on"]),
        (["allreduce", "--ranks"], ["ranks has no value"]),
        (["warmup", "--warmup", "2", "-1"], ["warmup is -1"]),
        (["step", "--min-seconds", "-1"], ["min-seconds is -1"]),
        (["flash", "--race-seconds", "-1"], ["race-seconds is -1"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_only_the_invalid_value_is_named(desk: Desk, words: list[str], parts: list[str]) -> None:
    one_line(desk("run", *words), 2, *parts)


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["--preset", "quick", "benchmark"], "stepscope run benchmark --preset quick"),
        (["--no-report", "warmup", "--steps", "8"], "stepscope run warmup --no-report --steps 8"),
    ],
)
def test_study_after_options_is_refused_with_the_right_order(
    desk: Desk, words: list[str], right: str
) -> None:
    one_line(desk("run", *words), 2, "put the study first", right)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["rum"], ["command 'rum'", "perhaps you meant run"]),
        (["run", "benchmrk"], ["study 'benchmrk'", "perhaps you meant benchmark"]),
        (["run", "--preset", "quik"], ["preset 'quik'", "perhaps you meant quick"]),
        (["run", "profile", "--preset", "h20"], ["preset 'h20'", "perhaps you meant h200"]),
        (["show", "nothing"], ["no run", "'nothing'", "base"]),
        (["show", "latest~5"], ["latest~5"]),
        (["show", "--study", "profil"], ["'profil'", "choose from: benchmark"]),
        (["export", "--format", "csv", "--table", "bench"], ["table 'bench'", "benchmark-times"]),
        (["compare", "base", "nothing"], ["'nothing'"]),
    ],
    ids=lambda words: " ".join(words) if len(words) > 1 and "'" not in words[0] else "",
)
def test_names_that_do_not_exist(desk: Desk, words: list[str], parts: list[str]) -> None:
    one_line(desk(*words), 2, *parts)


def test_preset_and_chosen_cases_exclude_each_other(desk: Desk) -> None:
    words = ("run", "profile", "--preset", "quick", "--size", "xl")
    one_line(desk(*words), 2, "--preset and flags that choose cases exclude each other", "omit one")


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["run", "benchmark", "--contxt", "128"], "--context"),
        (["run", "--preet", "quick"], "--preset"),
        (["show", "--stdy", "warmup"], "--study"),
        (["compare", "a", "b", "--fail-abov", "3%"], "--fail-above"),
    ],
)
def test_unknown_flag_suggests_a_similar_one(desk: Desk, words: list[str], near: str) -> None:
    output = desk(*words)
    one_line(output, 2, f"perhaps you meant {near}")


def test_value_of_the_wrong_type_names_its_field(desk: Desk) -> None:
    one_line(desk("run", "benchmark", "--context", "long"), 2, "--context", "'long'")


def test_optional_option_is_shown_with_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--budget", "abc"]) == 2
    text = capsys.readouterr().err
    assert "'abc' is not a size of memory" in text
    assert "None" not in text


def test_dtype_that_the_device_lacks(cli: CommandLine) -> None:
    output = ended(cli("run", "benchmark", "--dtype", "tf32", "--size", "tiny", "--device", "cpu"))
    one_line(output, 2, "TF32", "use float32")
    assert cli.left_behind() == []
    assert cli.records() == ()


@pytest.mark.parametrize("command", READERS, ids=lambda words: words[0])
def test_no_store_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    one_line(Desk(tmp_path / "none", capsys)(*command), 2, "no record store", "inspect SCRIPT")
    assert not (tmp_path / "none").exists()


def test_without_a_store_the_records_of_an_inspection_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of records that were moved without their store are something to show."""
    for name in ("older", "train"):
        (tmp_path / f"{name}.jsonl").touch()
    os.utime(tmp_path / "older.jsonl", (0, 0))
    file = str(tmp_path / "train.jsonl")
    one_line(Desk(tmp_path, capsys)("show"), 2, "no record store", f"such as {file}, or create")


def test_run_without_records_prints_how_to_resume(desk: Desk) -> None:
    fill(desk.store, {"empty": []})
    for command in READERS[:4]:
        one_line(desk(*command), 1, "run empty has no records yet", "stepscope run --preset empty")


def test_file_without_records_is_named(desk: Desk, tmp_path: Path) -> None:
    for name, content in (("empty.jsonl", ""), ("text.jsonl", "not a record\n")):
        (tmp_path / name).write_text(content)
        for command in ("export", "import"):
            one_line(desk(command, str(tmp_path / name)), 1, name)
    one_line(desk("import", str(tmp_path / "empty.jsonl")), 1, "contains no records")


def test_import_of_nothing_creates_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").touch()
    one_line(Desk(tmp_path / "none", capsys)("import", str(tmp_path / "empty.jsonl")), 1)
    assert not (tmp_path / "none").exists()


def test_what_a_comparison_lacks_is_named(desk: Desk) -> None:
    output = desk("compare", "latest")
    assert output.code == 2
    assert "NEW" in output.err
    assert "STR" not in output.err


@pytest.mark.parametrize(
    "command",
    [
        "show",
        "report",
        "export",
        "advise",
        "import",
        "rehearse",
        "compare",
        "trace",
        "snapshot",
        "inspect",
    ],
)
def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    ending = {"trace": ".json", "snapshot": ".pickle", "inspect": ".py"}.get(command, ".jsonl")
    there = tmp_path / f"trained{ending}"
    there.touch()
    meant = str(tmp_path / f"traned{ending}")
    words = [command, meant, *([meant] if command == "compare" else [])]
    assert main(words) == 2
    output = capsys.readouterr()
    one_line(Said(2, *output), 2, meant, "there is no", f"perhaps you meant {there}")
    assert main([command, str(tmp_path / f"x{ending}"), *words[2:]]) == 2
    assert "check its name" in capsys.readouterr().err


def test_directory_instead_of_a_file(desk: Desk, tmp_path: Path) -> None:
    one_line(desk("import", str(tmp_path / "no" / "a.jsonl")), 2, "there is no folder")
    one_line(desk("import", str(tmp_path)), 2, "is a folder", "name a file in it")


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["run", "step", "--rungs", "nope"], "compile"),
        (["run", "benchmark", "--dtype", "int3"], "tf32"),
    ],
)
def test_unknown_name_lists_the_choices(desk: Desk, words: list[str], known: str) -> None:
    output = desk(*words)
    one_line(output, 2, "one of:", known)
    assert "perhaps" not in output.err


def test_run_suggests_no_study_that_it_refuses(desk: Desk) -> None:
    offered = desk("run", "nosuch").err.partition("one of: ")[2].rstrip(")\n").split(", ")
    assert "benchmark" in offered
    assert not {"inspect", "advise"} & set(offered)
    one_line(desk("run", "inspect"), 2, "its records come from")


def not_a_database(path: Path) -> None:
    path.write_text("These are my notes, not a database.\n")


def cut_within_a_page(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def cut_after_a_page(path: Path) -> None:
    os.truncate(path, 4096)


def database_of_another_program(path: Path) -> None:
    import sqlite3

    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE notes (text)")
    other.close()


@pytest.mark.parametrize(
    "spoil", [not_a_database, cut_within_a_page, cut_after_a_page, database_of_another_program]
)
def test_invalid_store(desk: Desk, spoil: Callable[[Path], None]) -> None:
    spoil(desk.store)
    before = desk.store.read_bytes()
    file = desk.out / "more.jsonl"
    write_records(run_of("more"), file)
    for command in (*READERS, ("import", str(file)), ("run", "benchmark", "--size", "tiny")):
        one_line(desk(*command), 1, "records.db")
        assert desk.store.read_bytes() == before, command


def test_file_instead_of_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    records = tmp_path / "more.jsonl"
    write_records(run_of("more"), records)
    desk = Desk(tmp_path / "file", capsys)
    for command in (("run", "benchmark", "--size", "tiny"), ("import", str(records))):
        one_line(desk(*command), 1, str(tmp_path / "file"))
    for command in (("report", str(records)), ("export", str(records))):
        one_line(desk(*command), 1, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_read_only_directory_can_be_shown_but_not_extended(
    public: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(public, capsys)
    fill(desk.store, {"base": run_of("base")})
    records = public / "more.jsonl"
    write_records(run_of("more"), records)
    assert desk("report").code == 0
    before = contents(public)
    make_read_only(public)
    with unprivileged():
        assert desk("show").code == 0
        assert desk("compare", "base", "base").code == 0
        one_line(desk("import", str(records)), 1, str(public))
        one_line(desk("report"), 1, "cannot write", "report.html")
        one_line(desk("run", "benchmark", "--size", "tiny"), 1, "records.db")
    assert contents(public) == before


def test_directory_without_permission(public: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desk = Desk(public / "locked", capsys)
    fill(desk.store, {"base": run_of("base")})
    assert desk("show").code == 0
    desk.out.chmod(0o000)
    with unprivileged():
        for command in READERS:
            one_line(desk(*command), 1, "locked")
    desk.out.chmod(0o700)


def test_full_disk_preserves_finished_measurements(
    cli: CommandLine, mount_tmpfs: MountTmpfs
) -> None:
    cli.out = mount_tmpfs("size=512k")
    cli.environment["STEPSCOPE_OUT"] = str(cli.out)
    (cli.out / "ballast").write_bytes(bytes(340 << 10))
    words = ("run", "planted", "--times", "60", "--device", "cpu", "--no-report", "--resume")
    output = ended(cli(*words))
    assert (output.code, output.out) == (1, "")
    assert output.err.splitlines()[-1].startswith("stepscope: the disk of ")
    assert "the stored records are safe" in output.err
    assert "Traceback" not in output.err
    announced = output.err.count("] planted ok-")
    first = cli.records()
    assert len(first) == announced > 3
    assert cli.left_behind() == []

    (cli.out / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(cli.out)], check=True)
    output = ended(cli(*words))
    assert output.code == 0, output.err
    assert cli.records()[: len(first)] == first
    assert len(cli.records()) == 60


def test_full_disk_preserves_the_existing_report(
    desk: Desk, mount_tmpfs: MountTmpfs, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = mount_tmpfs("size=128k")
    records = desk.out / "base.jsonl"
    write_records(run_of("base"), records)
    (disk / "report.html").write_text("the old page")
    with pytest.raises(OSError, match="No space"):
        (disk / "ballast").write_bytes(bytes(1 << 20))
    full = Desk(disk, capsys)
    one_line(full("report", str(records)), 1, "cannot write", "No space left")
    one_line(
        full("export", str(records), "--format", "markdown", "--to", str(disk / "t.md")),
        1,
        "cannot write",
    )
    one_line(full("export", str(records)), 1, "is full")
    assert (disk / "report.html").read_text() == "the old page"
    assert sorted(os.listdir(disk)) == ["ballast", "report.html"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written(cli: CommandLine) -> None:
    for words in (("--help",), ("list", "presets")):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                cli.command(words),
                env=cli.environment,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        one_line(Said(done.returncode, "", done.stderr), 1, "No space left")


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_closed_pipe_is_not_a_failure(cli: CommandLine) -> None:
    for words in ("--help", "list sizes", "list sizes --json"):
        python = " ".join(cli.command(()))
        done = subprocess.run(
            ["sh", "-c", f"({python} {words}; echo $? >&2) | true"],
            env=cli.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        # rich exits with 1 when it notices; no error must be printed.
        assert done.stderr in ("0\n", "1\n"), words
