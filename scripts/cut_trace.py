"""Cut one step out of a trace that torch.profiler wrote, as a small file that tests can hold.

python scripts/cut_trace.py TRACE.json.gz tests/fixtures/NAME.json.gz [--step 0]

Events are left out, not changed: what stays has the times, names and numbers that were recorded,
without the arguments that nothing here reads. Beside it NAME.expected.json says what Stepscope
makes of it; `tests/unit/test_recorded_traces.py` holds both against a slow account of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from stepscope.analysis.trace.files import read_trace
from stepscope.analysis.trace.ledger import ledgers
from stepscope.analysis.trace.statistics import instances, uses
from stepscope.analysis.trace.steps import find_steps
from stepscope.analysis.trace.work import DeviceWork, device_work

HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ARROW = "fwdbwd"
ARGUMENTS = ("correlation", "device", "stream", "Sequence number", "Fwd thread id")
Event = dict[str, Any]


def cut(trace: dict[str, Any], step: int) -> dict[str, Any]:
    """The events of one marked step, and what the device did for it."""
    events: list[Event] = trace["traceEvents"]
    mark = next(e for e in events if e.get("name") == f"ProfilerStep#{step}" and e["ph"] == "X")
    first, last = mark["ts"], mark["ts"] + mark["dur"]
    host = [e for e in events if e.get("cat") in HOST and first <= e["ts"] <= last]
    launched = {e["args"]["correlation"] for e in host if "correlation" in e.get("args", {})}
    device = [
        e for e in events if e.get("cat") in DEVICE and e["args"].get("correlation") in launched
    ]
    ends = [e for e in events if e.get("cat") == ARROW and first <= e["ts"] <= last]
    whole = {e["id"] for e in ends if e["ph"] == "s"} & {e["id"] for e in ends if e["ph"] == "f"}
    arrows = [e for e in ends if e["id"] in whole]
    kept = [key for key in ("schemaVersion", "deviceProperties") if key in trace]
    return {key: trace[key] for key in kept} | {
        "traceEvents": [_slim(event) for event in (*host, *device, *arrows)]
    }


def _slim(event: Event) -> Event:
    given = {key: event["args"][key] for key in ARGUMENTS if key in event.get("args", {})}
    plain = {key: value for key, value in event.items() if key != "args"}
    return plain | ({"args": given} if given else {})


def expected(work: DeviceWork) -> dict[str, Any]:
    """What is to come out of it, in whole nanoseconds."""
    steps = find_steps(work)
    (account,) = ledgers(work, steps)
    shares = work.attribution()
    ranked = sorted(uses(instances(work, steps)), key=lambda use: -use.ms)
    return {
        "wall_ns": account.wall,
        "lines": [list(line) for line in account.lines()],
        "waited_ns": [account.waited, account.waited_busy],
        "shares": {name: round(value, 6) for name, value in vars(shares).items()},
        "most": [
            [use.kernel, use.kind, use.phase, use.module, use.count, round(use.ms * 1e6)]
            for use in ranked[:20]
        ],
    }


def write(whole: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(whole, separators=(",", ":")).replace('{"ph"', '\n{"ph"')
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    told = expected(device_work(read_trace(path)))
    answer = path.with_name(path.name.replace(".json.gz", ".expected.json"))
    answer.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, step of {told['wall_ns'] / 1e6:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--step", type=int, default=0)
    options = parser.parse_args()
    opened = gzip.open if options.trace.suffix == ".gz" else open
    with opened(options.trace) as file:
        write(cut(json.load(file), options.step), options.target)


if __name__ == "__main__":
    main()
