"""Cut one step out of a trace written by torch.profiler, as a small file for tests.

python scripts/cut_trace.py TRACE.json.gz tests/fixtures/NAME.json.gz [--step 0]

Events are dropped but not changed: the remaining ones keep their recorded times, names and numbers,
without arguments that are not read here. NAME.expected.json next to it has the result of Stepscope;
`tests/unit/test_recorded_traces.py` compares both with an independent, slow implementation.
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
FLOW = "fwdbwd"
ARGUMENTS = ("correlation", "device", "stream", "Sequence number", "Fwd thread id")
Event = dict[str, Any]


def cut(trace: dict[str, Any], step: int) -> dict[str, Any]:
    """The events of one marked step, and the device work it launched."""
    events: list[Event] = trace["traceEvents"]
    mark = next(e for e in events if e.get("name") == f"ProfilerStep#{step}" and e["ph"] == "X")
    first, last = mark["ts"], mark["ts"] + mark["dur"]
    host = [e for e in events if e.get("cat") in HOST and first <= e["ts"] <= last]
    launched = {e["args"]["correlation"] for e in host if "correlation" in e.get("args", {})}
    device = [
        e for e in events if e.get("cat") in DEVICE and e["args"].get("correlation") in launched
    ]
    ends = [e for e in events if e.get("cat") == FLOW and first <= e["ts"] <= last]
    complete = {e["id"] for e in ends if e["ph"] == "s"} & {e["id"] for e in ends if e["ph"] == "f"}
    flows = [e for e in ends if e["id"] in complete]
    present = [key for key in ("schemaVersion", "deviceProperties") if key in trace]
    return {key: trace[key] for key in present} | {
        "traceEvents": [_slim(event) for event in (*host, *device, *flows)]
    }


def _slim(event: Event) -> Event:
    arguments = {key: event["args"][key] for key in ARGUMENTS if key in event.get("args", {})}
    plain = {key: value for key, value in event.items() if key != "args"}
    return plain | ({"args": arguments} if arguments else {})


def expected(work: DeviceWork) -> dict[str, Any]:
    """The expected result, in integer nanoseconds."""
    steps = find_steps(work)
    (ledger,) = ledgers(work, steps)
    shares = work.attribution()
    ranked = sorted(uses(instances(work, steps)), key=lambda use: -use.ms)
    return {
        "wall_ns": ledger.wall,
        "lines": [list(line) for line in ledger.lines()],
        "waited_ns": [ledger.waited, ledger.waited_busy],
        "shares": {name: round(value, 6) for name, value in vars(shares).items()},
        "most": [
            [use.kernel, use.kind, use.phase, use.module, use.count, round(use.ms * 1e6)]
            for use in ranked[:20]
        ],
    }


def write(trace: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(trace, separators=(",", ":")).replace('{"ph"', '\n{"ph"')
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    result = expected(device_work(read_trace(path)))
    target = path.with_name(path.name.replace(".json.gz", ".expected.json"))
    target.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, step of {result['wall_ns'] / 1e6:.3f} ms")


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
