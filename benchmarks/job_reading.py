"""Time and memory to read the traces of all ranks of a job.

    python benchmarks/job_reading.py TRACE.json.gz [--ranks 8] [--megabytes 130] [--gzip]

Repeats the events of a real trace of torch.profiler in time until a file has the requested size,
and writes one such file per rank with times shifted by a different clock. Then `read_ranks` and
`summarize_job` run in a process with its children, whose peak of resident memory is sampled. Prints
the seconds, the CPU seconds and the peak in total, and what 64 ranks would take at the same rate.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from stepscope.analysis.job.job import summarize_job
from stepscope.analysis.job.reading import read_ranks, trace_files

_SAMPLED_S = 0.05
_FIRST_ID = 10**9


def write_rank(source: dict[str, Any], path: Path, rank: int, megabytes: float) -> None:
    """Write the trace of one rank."""
    events = [event for event in source["traceEvents"] if event.get("ph") in ("X", "s", "f")]
    times = [event["ts"] for event in events]
    length = max(times) - min(times) + max(event.get("dur", 0.0) for event in events)
    head = {key: value for key, value in source.items() if key != "traceEvents"}
    head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 0}
    opener = gzip.open if path.suffix == ".gz" else open
    written, copy = 0, 0
    with opener(path, "wt") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        while written < megabytes * 1e6:
            for event in events:
                text = json.dumps(_shifted(event, copy, rank, length))
                written += file.write(text if not written else f",\n{text}")
            copy += 1
        file.write("\n]}")


def _shifted(event: dict[str, Any], copy: int, rank: int, length: float) -> dict[str, Any]:
    moved = event | {"ts": round(event["ts"] + copy * length + 1000.0 * rank, 3)}
    name = str(event.get("name", ""))
    if name.startswith("ProfilerStep#"):
        moved["name"] = f"ProfilerStep#{int(name.partition('#')[2]) + 1000 * copy}"
    arguments = event.get("args")
    if isinstance(arguments, dict) and "correlation" in arguments:
        moved["args"] = arguments | {"correlation": arguments["correlation"] + copy * _FIRST_ID}
    if "id" in event and isinstance(event["id"], int):
        moved["id"] = event["id"] + copy * _FIRST_ID
    return moved


class PeakMemory(threading.Thread):
    """Samples the resident memory of this process and its children."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._done = threading.Event()

    def run(self) -> None:
        own = psutil.Process()
        while not self._done.wait(_SAMPLED_S):
            total = 0
            for process in (own, *own.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, total)

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--megabytes", type=float, default=130.0)
    parser.add_argument("--gzip", action="store_true")
    options = parser.parse_args()
    raw = options.trace.read_bytes()
    source = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for rank in range(options.ranks):
            name = f"rank{rank}.json" + (".gz" if options.gzip else "")
            write_rank(source, folder / name, rank, options.megabytes)
        files = trace_files(folder)
        size = sum(path.stat().st_size for path in files) / 1e6
        peak, began, used = PeakMemory(), time.perf_counter(), os.times()
        peak.start()
        ranks, unread = read_ranks(files)
        job = summarize_job(ranks, unread)
        seconds, now = time.perf_counter() - began, os.times()
        processor = sum(now[:4]) - sum(used[:4])
        print(
            f"{len(job.ranks)} ranks, {size:.0f} MB on disk, {job.ranks[0].steps} steps,"
            f" {job.compared} collectives compared: {seconds:.1f} s, {processor:.1f} s of CPU,"
            f" {peak.stop() / 1e6:.0f} MB peak"
        )
        each = processor / len(job.ranks)
        print(f"64 ranks on two free cores: about {64 * each / 2:.0f} s ({each:.2f} s of CPU each)")


if __name__ == "__main__":
    main()
