"""Time and memory of `stepscope trace FOLDER` for a job of many ranks.

    python benchmarks/job_reading.py TRACE.json.gz [--ranks 64] [--megabytes 130] [--plain]
        [--folder FOLDER] [--out results/job-reading_cpu.jsonl]

Repeats the steps of a real trace of torch.profiler in time until a file has the requested size,
and writes one such file per rank, gzipped unless --plain, each with its own clock. Then the command
runs on the folder as a user would run it, and its time, the CPU time of its processes and their
peak of resident memory are measured. With --folder the files stay there and are used again. With
--out, the result is appended to that file, from which `scripts/make_docs.py` makes the table in
docs/traces.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

_SAMPLED_S = 0.05
_FIRST_ID = 10**9
_TIME = "@time@"
_CLOCKS_US = 1000.0
"""Difference of the clocks of two ranks."""


class Template:
    """The text of a trace, in which only the times and the rank are open."""

    def __init__(self, source: dict[str, Any], megabytes: float) -> None:
        events = [event for event in source["traceEvents"] if event.get("ph") in ("X", "s", "f")]
        ends = sorted(event["ts"] + event["dur"] for event in events if _is_step(event))
        if not ends:
            raise SystemExit("the trace marks no steps")
        size = sum(len(json.dumps(event)) + 2 for event in events)
        begin = min(event["ts"] for event in events)
        length = max(event["ts"] + event.get("dur", 0.0) for event in events) - begin
        self.steps = max(1, round(megabytes * 1e6 / (size / len(ends))))
        self.header = {key: value for key, value in source.items() if key != "traceEvents"}
        self._before: list[str] = []
        self._times: list[float] = []
        self._after: list[str] = []
        for copy in range(-(-self.steps // len(ends))):
            # The last copy ends with a step.
            left = min(self.steps - copy * len(ends), len(ends))
            until = float("inf") if left == len(ends) else ends[left - 1]
            for event in events:
                if event["ts"] < until:
                    before, _, after = json.dumps(_repeated(event, copy)).partition(f'"{_TIME}"')
                    self._before.append(before)
                    self._times.append(event["ts"] + copy * length)
                    self._after.append(after)

    def text(self, rank: int, ranks: int) -> Iterator[str]:
        header = self.header | {
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks}
        }
        yield json.dumps(header)[:-1] + ', "traceEvents": [\n'
        clock, part = _CLOCKS_US * rank, 50_000
        for at in range(0, len(self._times), part):
            parts = (column[at : at + part] for column in (self._before, self._times, self._after))
            events = (f"{a}{ts + clock:.3f}{b}" for a, ts, b in zip(*parts, strict=True))
            yield ("" if not at else ",\n") + ",\n".join(events)
        yield "\n]}"


def _is_step(event: dict[str, Any]) -> bool:
    on_cpu = event.get("cat") in ("user_annotation", "cpu_op", "Operator")
    return on_cpu and str(event.get("name")).startswith("ProfilerStep#")


def _repeated(event: dict[str, Any], copy: int) -> dict[str, Any]:
    moved = event | {"ts": _TIME}
    name = str(event.get("name", ""))
    if name.startswith("ProfilerStep#"):
        moved["name"] = f"ProfilerStep#{int(name.partition('#')[2]) + 1000 * copy}"
    arguments = event.get("args")
    if isinstance(arguments, dict) and "correlation" in arguments:
        moved["args"] = arguments | {"correlation": arguments["correlation"] + copy * _FIRST_ID}
    if "id" in event and isinstance(event["id"], int):
        moved["id"] = event["id"] + copy * _FIRST_ID
    return moved


def write_job(source: dict[str, Any], folder: Path, options: argparse.Namespace) -> None:
    """Write the traces of all ranks."""
    template = Template(source, options.megabytes)
    for rank in range(options.ranks):
        path = folder / (f"rank{rank}.json" + ("" if options.plain else ".gz"))
        with path.open("wt") if options.plain else gzip.open(path, "wt", compresslevel=6) as file:
            file.writelines(template.text(rank, options.ranks))


class PeakMemory(threading.Thread):
    """Samples the resident memory of a process and its children; shared pages count for each."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.load = 0.0
        self._process = psutil.Process(process)
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(_SAMPLED_S):
            total = 0
            try:
                for process in (self._process, *self._process.children(recursive=True)):
                    total += process.memory_info().rss
            except psutil.Error:
                continue
            self.bytes = max(self.bytes, total)
            self.load = max(self.load, os.getloadavg()[0])

    def stop(self) -> None:
        self._done.set()
        self.join()


def measured(folder: Path) -> dict[str, Any]:
    """Run `stepscope trace` on the folder."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "stepscope", "trace", str(folder), "--json", "--out", out]
        used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        peak = PeakMemory(process.pid)
        peak.start()
        output, _ = process.communicate()
        seconds = time.perf_counter() - began
        peak.stop()
    if process.returncode:
        raise SystemExit(f"stepscope trace ended with {process.returncode}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    job = json.loads(output)["job"]
    return {
        "ranks": len(job["ranks"]),
        "steps": job["ranks"][0]["steps"],
        "collectives": job["compared"],
        "seconds": seconds,
        "cpu_seconds": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
        "peak_bytes": peak.bytes,
        "load_average": peak.load,
    }


def _contents(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    contents: dict[str, Any] = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    return contents


def _unpacked_bytes(path: Path) -> int:
    if path.suffix != ".gz":
        return path.stat().st_size
    # The last four bytes of a gzip file are the size of its contents.
    return int.from_bytes(path.read_bytes()[-4:], "little")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=130.0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            write_job(_contents(options.trace), folder, options)
        files = sorted(folder.iterdir())
        line = measured(folder) | {
            "trace": options.trace.name,
            "events": sum(len(event) > 2 for event in _contents(files[0])["traceEvents"]),
            "megabytes": round(sum(map(_unpacked_bytes, files)) / 1e6 / len(files), 1),
            "megabytes_on_disk": round(sum(path.stat().st_size for path in files) / 1e6, 1),
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
    print(json.dumps(line))
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
