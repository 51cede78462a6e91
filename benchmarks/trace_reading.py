"""Time and memory to read a large trace and compute its ledgers, compared with `json.loads`.

    python benchmarks/trace_reading.py [--megabytes 130]

Writes a synthetic trace of training steps in the format of torch.profiler, then reads it in
separate processes: with `json.loads` alone, and with Stepscope up to the ledger of every step.
Prints the best of three times, wall time and CPU time (which excludes other work on the machine),
and the peak resident memory of each.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

KERNELS = (
    ("aten::mm", "ampere_sgemm_128x64_tn"),
    ("aten::bmm", "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>(T1::Params)"),
    (
        "aten::mul",
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast"
        "<at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor"
        "<float> > >(at::TensorIteratorBase&, at::native::BinaryFunctor<float, float, float>"
        " const&)",
    ),
    (
        "aten::_softmax",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 9,"
        " false, false>(float*, float const*, int, int, int, bool const*, int, bool)",
    ),
)
MAIN, ENGINE = 4711, 4712


def events() -> Iterator[str]:
    """Infinite steps: a forward with a range per block, then the backward on its own thread."""
    clock, number, sequence, step = 1_000_000.0, 0, 0, 0
    while True:
        began = clock
        first = sequence
        for block in range(48):
            opened = clock
            for operator, kernel in KERNELS:
                number, sequence = number + 1, sequence + 1
                yield from launched(operator, kernel, clock, number, sequence, 0, MAIN)
                clock += 20.0
            yield span("user_annotation", f"block {block}", opened, clock - opened, MAIN)
        for back in range(sequence, first, -1):
            operator, kernel = KERNELS[back % len(KERNELS)]
            node = f"autograd::engine::evaluate_function: {operator[6:].title()}Backward0"
            number += 1
            yield span("cpu_op", node, clock, 19.0, ENGINE, back, 1)
            yield from launched(operator, kernel, clock + 1, number, back, 1, ENGINE)
            clock += 20.0
        yield span("user_annotation", f"ProfilerStep#{step}", began, clock - began, MAIN)
        clock += 5.0
        step += 1


def span(
    kind: str,
    name: str,
    start: float,
    length: float,
    thread: int,
    sequence: int = -1,
    back: int = 0,
) -> str:
    return (
        f'{{\n    "ph": "X", "cat": "{kind}", "name": "{name}", "pid": {MAIN}, "tid": {thread},\n'
        f'    "ts": {start:.3f}, "dur": {length:.3f},\n    "args": {{\n'
        f'      "External id": {int(start)},"Record function id": 0, "Sequence number": {sequence},'
        f' "Fwd thread id": {back}, "Ev Idx": {int(start)}\n    }}\n  }}'
    )


def launched(
    operator: str, kernel: str, start: float, number: int, sequence: int, back: int, thread: int
) -> Iterator[str]:
    yield span("cpu_op", operator, start, 15.0, thread, sequence, back)
    yield (
        f'{{\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": {MAIN},'
        f' "tid": {thread},\n    "ts": {start + 4:.3f}, "dur": 5.000,\n    "args": {{\n'
        f'      "External id": {number},"cbid": 211, "correlation": {number}\n    }}\n  }}'
    )
    at = f'"id": {number}, "pid": {MAIN}, "tid": {thread}, "ts": {start + 4:.3f}'
    yield f'{{\n    "ph": "s", {at},\n    "cat": "ac2g", "name": "ac2g"\n  }}'
    yield (
        f'{{\n    "ph": "X", "cat": "kernel", "name": "{kernel}", "pid": 0, "tid": 7,\n'
        f'    "ts": {start + 12:.3f}, "dur": 14.000,\n    "args": {{\n'
        f'      "External id": {number},\n      "queued": 0, "device": 0, "context": 1,\n'
        f'      "stream": 7, "correlation": {number},\n      "registers per thread": 32,\n'
        f'      "shared memory": 0,\n      "blocks per SM": 7.272727,\n'
        f'      "warps per SM": 29.090908,\n      "grid": [960, 1, 1],\n'
        f'      "block": [128, 1, 1],\n      "est. achieved occupancy %": 45\n    }}\n  }}'
    )
    at = f'"id": {number}, "pid": 0, "tid": 7, "ts": {start + 12:.3f}'
    yield f'{{\n    "ph": "f", {at},\n    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  }}'


def write_trace(path: Path, megabytes: float) -> int:
    """Write a trace of about that size; return its number of events."""
    written = count = 0
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],')
        file.write('"traceEvents": [\n')
        for event in events():
            written += file.write(event)
            count += 1
            if written > megabytes * 1e6 and '"ProfilerStep#' in event:
                break
            written += file.write(",\n")
        file.write("\n]}")
    return count


def by_json(path: Path) -> str:
    import json

    return f"{len(json.loads(path.read_bytes())['traceEvents']):,} events"


def by_stepscope(path: Path) -> str:
    from stepscope.analysis.trace.files import read_trace
    from stepscope.analysis.trace.ledger import ledgers
    from stepscope.analysis.trace.work import device_work

    trace = read_trace(path)
    work = device_work(trace)
    steps = ledgers(work)
    return f"{len(trace.kernels):,} kernels, {len(steps)} steps"


READERS = {"json.loads alone": by_json, "stepscope, to the ledger": by_stepscope}


def measured(reader: str, path: Path) -> tuple[float, float, float, str]:
    """Seconds, CPU seconds and peak MB of a separate process, and its result."""
    command = [sys.executable, __file__, "--reader", reader, "--trace", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, processor, peak, result = done.stdout.split(";")
    return float(seconds), float(processor), float(peak), result.strip()


def read_once(reader: str, path: Path) -> None:
    if reader != "json.loads alone":
        import stepscope.analysis.trace.files
        import stepscope.analysis.trace.ledger  # noqa: F401
    began, used = time.perf_counter(), time.process_time()
    result = READERS[reader](path)
    seconds, processor = time.perf_counter() - began, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{seconds};{processor};{peak};{result}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--megabytes", type=float, default=130.0)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        read_once(options.reader, options.trace)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.trace or Path(folder) / "trace.json"
        if not path.exists():
            count = write_trace(path, options.megabytes)
            print(f"{path.stat().st_size / 1e6:.0f} MB, {count:,} events")
        for reader in READERS:
            runs = [measured(reader, path) for _ in range(3)]
            seconds, processor, peak = (min(run[index] for run in runs) for index in range(3))
            print(
                f"{reader:<26} {seconds:5.2f} s ({processor:.2f} s of CPU) "
                f" {peak:6.0f} MB peak  {runs[0][3]}"
            )


if __name__ == "__main__":
    main()
