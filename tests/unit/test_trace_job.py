"""Traces of all ranks of a job: clocks, waits, stragglers, and the command for a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.analysis.job import reader
from stepscope.analysis.job.job import Job, summarize_job
from stepscope.analysis.job.reading import read_ranks, trace_files
from stepscope.analysis.trace.collectives import collective_name
from stepscope.analysis.trace.files import read_trace
from stepscope.cli import main
from stepscope.errors import StepscopeError
from stepscope.views.trace.job import compared_jobs, job_findings
from trace_files import ALL_REDUCE, SGEMM, ChromeTrace

GLOO = Path(__file__).parents[1] / "fixtures" / "gloo_ddp"
STEPS = 4


def rank_trace(
    extra_us: float = 0.0,
    clock_us: float = 0.0,
    idle_us: float = 0.0,
    overlap_us: float = 0.0,
    reductions: int = 2,
) -> ChromeTrace:
    """Steps of 1,000 µs. Each of two reductions follows 100 µs of work, of which the second one
    takes `extra_us` longer or begins `idle_us` later. Every reduction ends at the same time on all
    ranks, 400 µs after the one before, whenever the rank arrives."""
    trace = ChromeTrace()
    for step in range(STEPS):
        at = clock_us + 1000.0 * step
        trace.range(f"ProfilerStep#{step}", at, at + 1000)
        for number in range(reductions):
            begin = at + 10 + 400.0 * number
            late = number == 1
            start = begin + (idle_us if late else 0.0)
            end = start + 100 + (extra_us if late else 0.0)
            trace.operator("aten::mm", start - 5, start + 5)
            trace.kernel(SGEMM, start, end, launch=(start - 4, start - 2))
            trace.operator("record_param_comms", end - 8, end - 1)
            trace.events[-1]["args"] |= {
                "Collective name": "allreduce",
                "Process Group Name": "0",
                "Process Group Ranks": "[0, 1, 2]",
                "dtype": "BFloat16",
                "In msg nelems": 1 << 20,
                "Out msg nelems": 1 << 20,
            }
            trace.kernel(
                ALL_REDUCE,
                end - overlap_us,
                at + 400 * (number + 1),
                launch=(end - 6, end - 4),
                stream=20,
            )
    return trace


def write_job(folder: Path, **ranks: ChromeTrace) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, trace in ranks.items():
        text = json.loads(trace.text())
        text["distributedInfo"] = {"rank": int(name[4:]), "world_size": len(ranks)}
        (folder / f"{name}.json").write_text(json.dumps(text))
    return folder


def job_of(folder: Path) -> Job:
    ranks, unread = read_ranks(trace_files(folder), workers=1)
    return summarize_job(ranks, unread)


def findings(job: Job) -> dict[str, Any]:
    return {finding.code: finding for finding in job_findings(job)}


def test_a_late_rank_is_named_with_its_collective_and_cause(tmp_path: Path) -> None:
    folder = write_job(
        tmp_path, rank0=rank_trace(), rank1=rank_trace(extra_us=150), rank2=rank_trace()
    )
    job = job_of(folder)
    (straggler,) = job.stragglers
    assert straggler.rank == 1
    assert (straggler.collective.number, straggler.collective.of) == (2, 2)
    assert straggler.collective.bytes == 2 << 20
    assert straggler.late_ms == pytest.approx(0.15)
    assert straggler.work_ms == pytest.approx(0.15)
    text = findings(job)["job.straggler"]
    assert "all_reduce 2 of 2 (2.00 MiB)" in text.text
    assert "works 150 µs longer" in text.conclusion
    # The other ranks wait for it in every step.
    assert [row.waiting_ms for row in job.ranks] == pytest.approx([0.15, 0.0, 0.15])
    assert [row.last for row in job.ranks][1] >= STEPS
    assert job.imbalance == pytest.approx(350 / 250 - 1)


def test_a_rank_that_is_idle_before_a_collective_is_distinguished_from_one_that_works(
    tmp_path: Path,
) -> None:
    job = job_of(write_job(tmp_path, rank0=rank_trace(), rank1=rank_trace(idle_us=150)))
    (straggler,) = job.stragglers
    assert straggler.rank == 1
    assert straggler.work_ms == pytest.approx(0.0)
    assert "idle" in findings(job)["job.straggler"].conclusion


@pytest.mark.parametrize("clock_us", [0.0, 5e6, -37.0])
def test_clocks_are_aligned_by_the_ends_of_collectives(tmp_path: Path, clock_us: float) -> None:
    folder = write_job(
        tmp_path,
        rank0=rank_trace(),
        rank1=rank_trace(extra_us=150),
        rank2=rank_trace(clock_us=clock_us),
    )
    job = job_of(folder)
    assert [row.clock_us for row in job.ranks] == pytest.approx([0.0, 0.0, -clock_us])
    assert [one.rank for one in job.stragglers] == [1]
    assert job.aligned
    assert [row.waiting_ms for row in job.ranks] == pytest.approx([0.15, 0.0, 0.15])


def test_parts_of_a_rank_add_up_to_its_step(tmp_path: Path) -> None:
    folder = write_job(tmp_path, rank0=rank_trace(overlap_us=40), rank1=rank_trace())
    job = job_of(folder)
    for row in job.ranks:
        assert row.compute_ms + row.exposed_ms + row.idle_ms == pytest.approx(row.step_ms)
        assert row.compute_ms == pytest.approx(0.2)
    overlapped, apart = job.ranks
    assert overlapped.communication_ms - overlapped.exposed_ms == pytest.approx(0.08)
    assert apart.communication_ms == pytest.approx(apart.exposed_ms)


def test_ranks_with_other_collectives_are_not_compared(tmp_path: Path) -> None:
    job = job_of(write_job(tmp_path, rank0=rank_trace(), rank1=rank_trace(reductions=1)))
    assert job.compared == 0
    assert job.unmatched == 3 * STEPS
    assert not job.stragglers
    assert [row.waiting_ms for row in job.ranks] == [None, None]
    assert findings(job)["job.not-compared"].tone == "warn"


def test_recorded_ranks_of_gloo() -> None:
    """Two ranks of DDP on a CPU; rank 1 has more work before its backward pass."""
    job = job_of(GLOO)
    assert [row.rank for row in job.ranks] == [0, 1]
    assert job.compared == 6
    assert job.world_size == 2
    (straggler,) = job.stragglers
    assert (straggler.rank, straggler.collective.number) == (1, 1)
    assert straggler.work_ms > straggler.late_ms / 2
    first, second = job.ranks
    assert first.waiting_ms is not None
    assert first.waiting_ms > 5
    assert second.waiting_ms == 0.0


def test_a_damaged_rank_is_listed_and_the_others_are_read(tmp_path: Path) -> None:
    folder = write_job(tmp_path, rank0=rank_trace(), rank1=rank_trace())
    (folder / "rank2.json").write_text('{"traceEvents": 5}')
    job = job_of(folder)
    assert len(job.ranks) == 2
    assert "rank2.json" in job.unread
    assert "not a trace" in job.unread["rank2.json"]
    assert findings(job)["job.ranks"].tone == "warn"


def test_an_earlier_trace_of_a_rank_is_left_out(tmp_path: Path) -> None:
    folder = write_job(tmp_path, rank0=rank_trace(), rank1=rank_trace())
    text = (folder / "rank1.json").read_text()
    (folder / "rank1.second.json").write_text(text)
    job = job_of(folder)
    assert [row.file for row in job.ranks] == ["rank0.json", "rank1.second.json"]
    assert list(job.unread) == ["rank1.json"]


def test_processes_read_the_same(tmp_path: Path) -> None:
    folder = write_job(tmp_path, rank0=rank_trace(), rank1=rank_trace(extra_us=150))
    ranks, _ = read_ranks(trace_files(folder), workers=2)
    assert summarize_job(ranks) == job_of(folder)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="has no traces"):
        trace_files(tmp_path)


def test_descriptions_of_kernels_take_precedence_over_their_names(tmp_path: Path) -> None:
    folder = write_job(tmp_path, rank0=rank_trace())
    trace = read_trace(folder / "rank0.json")
    assert len(trace.messages.of_span) == 2 * STEPS
    assert trace.process.rank == 0
    (message,) = set(trace.messages.of_span.values())
    assert message == ("allreduce", "0 [0, 1, 2]", 2 << 20)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(…)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("_allgather_base", "all_gather"),
        ("all_to_allv", "all_to_all"),
        ("ncclDevKernel_SendRecv(…)", "send_recv"),
        ("ncclDevKernel_Generic(…)", "collective"),
        ("c10d::broadcast_", "broadcast"),
    ],
)
def test_collectives_have_the_names_of_torch_distributed(name: str, expected: str) -> None:
    assert collective_name(name) == expected


def test_two_jobs_are_compared(tmp_path: Path) -> None:
    slow = write_job(tmp_path / "a", rank0=rank_trace(), rank1=rank_trace(extra_us=150))
    fast = write_job(tmp_path / "b", rank0=rank_trace(), rank1=rank_trace())
    rows = {row[0]: row for row in compared_jobs(job_of(slow), job_of(fast), ("a", "b")).rows}
    assert rows["computation"][1:4] == pytest.approx((0.275, 0.2, -0.075))
    assert rows["waiting for ranks"][1:4] == pytest.approx((0.075, 0.0, -0.075))
    parts = ("computation", "exposed communication", "idle")
    for column in (1, 2):
        total = np.sum([float(str(rows[part][column])) for part in parts])
        assert total == pytest.approx(float(str(rows["step"][column])))


def test_the_command_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_job(tmp_path / "job", rank0=rank_trace(), rank1=rank_trace(extra_us=150))
    assert main(["trace", str(folder), "--out", str(tmp_path / "out")]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Rank 1 is a straggler" in output
    assert main(["trace", str(folder), "--full", "--out", str(tmp_path / "out")]) == 0
    assert "2 ranks of 2 read." in " ".join(capsys.readouterr().out.split())
    assert "job-breakdown" in (tmp_path / "out" / "trace.html").read_text()
    words = ["trace", str(folder), "--against", str(folder), "--json"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in facts["job"]["ranks"]] == [0, 1]
    assert facts["job"]["stragglers"] == facts["against"]["stragglers"]


def test_a_file_is_not_compared_with_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_job(tmp_path / "job", rank0=rank_trace())
    file = folder / "rank0.json"
    assert main(["trace", str(folder), "--against", str(file), "--out", str(tmp_path)]) == 2
    assert "two files or two folders" in capsys.readouterr().err


def test_a_device_without_launches_is_refused_in_one_line(tmp_path: Path) -> None:
    trace = rank_trace()
    for event in trace.events:
        if event["cat"] == "kernel":
            event["cat"] = "mtia_ccp_events"
    with pytest.raises(StepscopeError, match="MTIA accelerator, whose events name no launch"):
        read_trace(trace.write(tmp_path / "rank0.json"))


DYING_READER = """
import os, signal, sys
from multiprocessing.connection import Connection
from stepscope.analysis.job.rank import read_rank
from stepscope.analysis.job.reader import main

def read(path):
    if path.name == "rank1.json":
        os.kill(os.getpid(), signal.SIGKILL)
    return read_rank(path)

main(Connection(int(sys.argv[1])), read)
"""


def test_a_reader_that_dies_costs_only_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_: str, *words: str) -> list[str]:
        return [sys.executable, "-P", "-c", DYING_READER, *words]

    monkeypatch.setattr(reader, "own_command", command)
    folder = write_job(tmp_path / "job", rank0=rank_trace(), rank1=rank_trace(), rank2=rank_trace())
    ranks, unread = read_ranks(trace_files(folder), workers=2)
    assert [one.rank for one in ranks] == [0, 2]
    assert unread.keys() == {"rank1.json"}
    assert "was ended by SIGKILL" in unread["rank1.json"]
    for name in ("rank0.json", "rank2.json"):
        (folder / name).unlink()
    assert main(["trace", str(folder), "--workers", "2", "--out", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stepscope: the process that read ")
