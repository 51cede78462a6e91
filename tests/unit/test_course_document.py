"""`stepscope cs336`: its document from planted records, and the command from start to end."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import msgspec
import pytest

from command_line import CommandLine
from parallel_records import ddp_record
from precision_records import sum_record
from sample_records import environment
from stepscope.cli import main
from stepscope.records.schema import FailedCheck, Record
from stepscope.report.blocks import Chapter, Document, Figure, Finding, Item, Table
from stepscope.report.document import (
    FIGURES,
    figure_files,
    latex_document,
    markdown_document,
)
from stepscope.report.html import html_document
from stepscope.report.plots import png
from stepscope.studies.course import EDITIONS, Edition, Show, find_problems
from stepscope.studies.course.answers import Views
from stepscope.studies.course.document import Setting, course_document
from stepscope.studies.course.strategies import strategy_findings
from study_records import benchmark_record

CPU = environment(device_kind="cpu", device_name="a CPU")
ANNOUNCED = re.compile(r"^\[\d+/\d+\] ", re.MULTILINE)
SUMS = ("mixed_precision_accumulation",)


def document_of(
    records: list[Record], *names: str, kind: str = "cpu", quick: bool = True
) -> Document:
    problems = find_problems("2026", names)
    setting = Setting("2026", kind, quick=quick)
    keys = {(record.study, record.case) for record in records}
    return course_document(problems, records, {"sums": keys, "steps": keys}, setting)


def item_of(document: Document, label: str = "") -> Item:
    (chapter,) = document.chapters
    return next(item for item in chapter.items if item.label == label)


def codes(blocks: tuple[object, ...]) -> list[str]:
    return [block.code for block in blocks if isinstance(block, Finding)]


def test_own_records_answer_and_those_of_the_gpu_stand_beside() -> None:
    records = [sum_record(environment=CPU), sum_record("float16", "float32", environment=CPU)]
    item = item_of(document_of(records, *SUMS))
    assert codes(item.blocks)[:2] == ["accumulation.sums", "accumulation.rounded-term"]
    assert any(isinstance(b, Table) and b.name == "accumulation-sums" for b in item.blocks)
    assert item.commands == ("stepscope run accumulation",)
    assert not item.lacking
    assert "accumulation.sums" in codes(item.elsewhere)
    assert item.source == "NVIDIA H200"


def test_on_a_gpu_only_its_own_records_are_shown() -> None:
    item = item_of(document_of([sum_record()], *SUMS, kind="cuda"))
    assert codes(item.blocks)
    assert item.elsewhere == ()


def test_what_is_missing_is_said_with_the_reason() -> None:
    problems = find_problems("2026", SUMS)
    setting = Setting("2026", "cpu", quick=True)
    none = course_document(problems, [], {"sums": {("accumulation", "x")}}, setting)
    assert item_of(none).lacking == "1 case not measured yet"
    assert "accumulation.sums" in codes(item_of(none).elsewhere)
    failed = msgspec.structs.replace(
        sum_record(), status="error", reason="RuntimeError: planted", series=(), quantities=()
    )
    item = item_of(document_of([failed], *SUMS))
    assert "RuntimeError: planted" in item.lacking


def test_a_sentence_on_a_record_that_is_not_trusted_is_withdrawn() -> None:
    modes = ("forward", "forward-backward", "train-step")
    phases = {"forward": 30.0, "backward": 60.0}
    good = [benchmark_record(mode, phases=phases) for mode in modes]
    busy = [_disturbed(one) for one in good]
    sentences = {}
    for name, records in (("good", good), ("busy", busy)):
        item = item_of(document_of(records, "benchmarking_script", kind="cuda"), "(b)")
        assert "benchmark.phase-times" in codes(item.blocks)
        sentences[name] = " ".join(b.sentence for b in item.blocks if isinstance(b, Finding))
    assert "inconclusive" not in sentences["good"]
    assert "inconclusive" in sentences["busy"]


def _disturbed(record: Record) -> Record:
    busy = FailedCheck(code="busy-machine", message="planted")
    return msgspec.structs.replace(record, failed_checks=(busy,))


def test_calculations_are_answered_without_records() -> None:
    document = document_of([], "fsdp_tp_calcs")
    (chapter,) = document.chapters
    assert [item.label for item in chapter.items] == ["(a)", "(b)", "(c)", "(d)"]
    for item in chapter.items:
        (finding,) = (block for block in item.blocks if isinstance(block, Finding))
        assert finding.text.startswith(item.label)
        assert item.commands == ("stepscope calc fsdp_tp_calcs",)


@pytest.mark.parametrize("edition", EDITIONS)
def test_latex_has_only_letters_that_pdflatex_knows(edition: Edition) -> None:
    """With all committed answers and derivations, and no records of this machine."""
    problems = find_problems(edition)
    document = course_document(problems, [], {}, Setting(edition, "cpu", quick=True))
    tex = latex_document(document)
    assert {letter for letter in tex if ord(letter) > 127} == set()
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") > 20
    assert "--" not in tex
    words = (word for line in tex.splitlines() if "&" not in line for word in line.split())
    assert max(len(part) for word in words for part in word.split(r"\allowbreak{}")) < 100


def test_a_filter_restricts_the_records_before_the_view() -> None:
    records = [sum_record(), sum_record("bfloat16", "bfloat16")]
    views = Views(records)
    show = Show("sums", ("accumulation.sums",), only={"terms": ("bfloat16",)})
    chosen = views.records(show)
    assert [record.config["terms"] for record in chosen] == ["bfloat16"]
    (finding,) = views.blocks(show, chosen)
    assert isinstance(finding, Finding)
    assert "float16 terms in a float16" not in finding.text.replace("bfloat16", "")


def test_strategies_are_compared_with_the_first() -> None:
    record = ddp_record()
    names = sorted({one.variant for one in record.series if one.name == "step"})
    chosen = [name for name in names if name in ("naive", "flat", "overlap")]
    (finding,) = strategy_findings([record], chosen)
    assert finding.code == "ddp.strategies"
    assert finding.records == (record.id,)
    for name in chosen:
        assert f"{name} ms" in finding.values
    assert set(chosen[1:]) == {
        name.partition(" over ")[0] for name in finding.values if " over " in name
    }
    assert list(strategy_findings([record], ["no such strategy"])) == []


def sample_document() -> Document:
    figure = Figure(
        name="a figure_1",
        title="50 % & more",
        curves=(),
        x_label="x",
        y_label="y",
        caption="See `stepscope run`.",
    )
    blocks = (
        Finding(text="It takes 5_000 µs (≤ 10 %).", tone="warn"),
        figure,
        Table(name="t", title="A # table", columns=(), rows=()),
    )
    item = Item(
        label="(a)",
        question="How long, in $?",
        code="stepscope.parallel.DDP",
        commands=("stepscope run ddp --ranks 2",),
        blocks=blocks,
        lacking="1 case not measured yet",
        elsewhere=(figure, Finding(text="Elsewhere 1 ms.")),
        source="a GPU",
    )
    chapter = Chapter(name="naive_ddp", title="Title", note="Edition 2026.", items=(item,))
    return Document(
        title="A document_1",
        subtitle="1 problem",
        introduction="Read `this`.",
        summary=None,
        chapters=(chapter,),
        banner="The machine was busy.",
    )


def test_equal_figures_share_an_image_with_a_safe_name() -> None:
    document = sample_document()
    assert list(figure_files(document)) == ["a-figure_1.png"]
    assert png(figure_files(document)["a-figure_1.png"]).startswith(b"\x89PNG")


def test_the_three_writers_show_every_part_of_an_item() -> None:
    document = sample_document()
    markdown, tex, page = (
        write(document) for write in (markdown_document, latex_document, html_document)
    )
    for text in (markdown, page):
        assert "stepscope run ddp" in re.sub("</?span>", "", text)
        assert "1 case not measured yet" in text
    assert "## naive_ddp\n" in markdown
    assert f"]({FIGURES}/a-figure_1.png)" in markdown
    assert markdown.index("It takes") < markdown.index("a GPU") < markdown.index("Elsewhere")
    assert r"\section{\texttt{naive\_ddp}}" in tex
    assert rf"{{{FIGURES}/a-figure_1.png}}" in tex
    assert r"5\_000 $\mu$s (\ensuremath{\leq} 10 \%)" in tex
    assert r"\#" in tex
    assert tex.rstrip().endswith(r"\end{document}")
    assert tex.count(r"\begin{quote}") == tex.count(r"\end{quote}") == 2
    assert 'id="naive-ddp"' in page
    assert "<aside" in page


def test_the_command_measures_once_and_writes_three_formats(cli: CommandLine) -> None:
    words = ("cs336", "--quick", "--problem", *SUMS, "data_parallel_calcs", "--wait", "0")
    first = cli(*words, "--json")
    assert first.returncode == 0, first.stderr
    facts = json.loads(first.stdout)
    assert facts["problems"] == [*SUMS, "data_parallel_calcs"]
    assert facts["answered_here"] == facts["questions"] == 4
    for kind in ("html", "markdown", "latex"):
        assert "accumulation" in Path(facts[kind]).read_text()
    folder = Path(facts["html"]).parent
    images = {path.name for path in (folder / FIGURES).iterdir()}
    assert images == set(
        re.findall(rf"{FIGURES}/([\w-]+\.png)", Path(facts["markdown"]).read_text())
    )

    measured = cli.records(all_attempts=True)
    again = cli(*words, "--json")
    assert json.loads(again.stdout)["run"] == facts["run"]
    assert ANNOUNCED.findall(again.stderr) == []
    assert cli.records(all_attempts=True) == measured

    anew = json.loads(cli(*words, "--json", "--new").stdout)
    assert anew["run"] != facts["run"]


def test_an_interrupted_run_continues(cli: CommandLine) -> None:
    words = ["cs336", "--quick", "--problem", *SUMS, "--wait", "0"]
    process = cli.start(*words)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("[3/"):
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=400) == 130
    process.communicate()
    output = "".join(lines)
    saved = cli.records(all_attempts=True)
    assert f"interrupted: {len(saved)} of" in output
    (resume,) = re.findall(r"resume with: stepscope (.*)", output)
    (written,) = re.findall(r"with: stepscope (.* --no-measure)", output)
    part = cli(*shlex.split(written))
    assert part.returncode == 0, part.stderr
    assert cli.records(all_attempts=True) == saved
    done = cli(*shlex.split(resume), "--wait", "0")
    assert done.returncode == 0, done.stderr
    after = cli.records(all_attempts=True)
    assert after[: len(saved)] == saved
    assert len({(one.study, one.case) for one in after}) == len(after) > len(saved)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--problem", "no_such"), "problem 'no_such' does not exist"),
        (("--edition", "2025", "--problem", "fsdp"), "fsdp is not a problem of the 2025 edition"),
        (("--no-measure", "--new"), "--new and --no-measure exclude each other"),
        (("--timeout", "0"), "--timeout is 0"),
        (("--wait", "-1"), "--wait is -1"),
    ],
)
def test_wrong_requests_are_refused(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cs336", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_file_in_place_of_the_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    assert main(["cs336", "--to", str(taken)]) == 2
    assert "is a file" in capsys.readouterr().err


def test_the_list_names_every_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cs336", "--list", "--json", "--edition", "2025"]) == 0
    listed = json.loads(capsys.readouterr().out)["questions"]
    assert {one["problem"] for one in listed} >= {"communication_accounting", "leaderboard"}
    assert all(one["question"] for one in listed)
