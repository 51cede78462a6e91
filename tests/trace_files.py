"""Small traces in the formats of torch.profiler and Nsight Systems, event by event."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

from stepscope.analysis.trace.chrome import read_chrome
from stepscope.analysis.trace.model import Trace

MAIN, ENGINE = 100, 101
SGEMM = "ampere_sgemm_128x64_tn"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>,"
    " std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class ChromeTrace:
    """Builder of a Chrome trace; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.device: dict[str, Any] = {"id": 0, "name": "NVIDIA H200"}
        self._correlation = 0

    def span(
        self, category: str, name: str, start: float, end: float, thread: int = MAIN, **args: Any
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": MAIN,
                "tid": thread,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )

    def range(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.span("user_annotation", name, start, end, thread)

    def operator(
        self,
        name: str,
        start: float,
        end: float,
        thread: int = MAIN,
        *,
        sequence: int = -1,
        back: int = 0,
    ) -> None:
        numbers = {"Sequence number": sequence, "Fwd thread id": back}
        self.span("cpu_op", name, start, end, thread, **numbers)

    def flow(self, tail: float, tail_thread: int, head: float, head_thread: int) -> None:
        """Add a flow event from the start of a forward operator to that of its backward."""
        self._correlation += 1
        ends = (("s", tail, tail_thread, {}), ("f", head, head_thread, {"bp": "e"}))
        for phase, at, thread, more in ends:
            self.events.append(
                {
                    "ph": phase,
                    "id": self._correlation,
                    "pid": MAIN,
                    "tid": thread,
                    "ts": at,
                    "cat": "fwdbwd",
                    "name": "fwdbwd",
                }
                | more
            )

    def call(self, name: str, start: float, end: float, thread: int = MAIN) -> int:
        self._correlation += 1
        self.span("cuda_runtime", name, start, end, thread, correlation=self._correlation)
        return self._correlation

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        launch: tuple[float, float] | None = None,
        thread: int = MAIN,
        stream: int = 7,
    ) -> None:
        number = 0 if launch is None else self.call("cudaLaunchKernel", *launch, thread)
        self.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": end - start,
                "args": {"device": 0, "stream": stream, "correlation": number, "grid": [1, 1, 1]},
            }
        )

    def text(self) -> str:
        return json.dumps(
            {"schemaVersion": 1, "deviceProperties": [self.device], "traceEvents": self.events}
        )

    def read(self) -> Trace:
        return read_chrome(self.text().encode(), "trace.json")

    def write(self, path: Path) -> Path:
        text = self.text().encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


def training_step(blocks: int = 2, steps: int = 1) -> ChromeTrace:
    """Steps of 1,000 µs: forward through blocks, loss, backward on its own thread, optimizer.

    A block's forward and backward each run one matmul of 40 µs and one addition of 10 µs.
    """
    trace = ChromeTrace()
    for step in range(steps):
        at = step * 1000.0
        trace.range(f"ProfilerStep#{step}", at, at + 1000)
        trace.range("forward", at + 10, at + 10 + 100 * blocks)
        for block in range(blocks):
            begin = at + 10 + 100 * block
            number = 1000 * step + 2 * block
            trace.range(f"block {block}", begin, begin + 95)
            trace.range("attention", begin + 5, begin + 45)
            trace.operator("aten::mm", begin + 10, begin + 30, sequence=number)
            trace.kernel(SGEMM, begin + 25, begin + 65, launch=(begin + 12, begin + 18))
            trace.operator("aten::add", begin + 50, begin + 70, sequence=number + 1)
            trace.kernel(ADD, begin + 65, begin + 75, launch=(begin + 52, begin + 58))
        begin = at + 10 + 100 * blocks
        trace.range("loss", begin, begin + 20)
        trace.operator("aten::nll_loss_forward", begin + 2, begin + 15, sequence=1000 * step + 900)
        trace.kernel(ADD, begin + 10, begin + 20, launch=(begin + 4, begin + 8))
        trace.range("backward", begin + 20, begin + 30 + 100 * blocks)
        for block in reversed(range(blocks)):
            block_begin = begin + 25 + 100 * (blocks - 1 - block)
            number = 1000 * step + 2 * block
            for offset, name, kernel, length in ((1, "Add", ADD, 10), (0, "Mm", SGEMM, 40)):
                node = f"autograd::engine::evaluate_function: {name}Backward0"
                node_begin = block_begin + 50 * (1 - offset)
                numbers = {"sequence": number + offset, "back": 1}
                trace.operator(node, node_begin, node_begin + 48, ENGINE, **numbers)
                trace.operator(
                    f"{name}Backward0", node_begin + 1, node_begin + 47, ENGINE, **numbers
                )
                trace.operator("aten::mm", node_begin + 2, node_begin + 40, ENGINE)
                trace.kernel(
                    kernel,
                    node_begin + 8,
                    node_begin + 8 + length,
                    launch=(node_begin + 3, node_begin + 6),
                    thread=ENGINE,
                )
        begin += 40 + 100 * blocks
        trace.range("Optimizer.step#AdamW.step", begin, begin + 50)
        trace.operator("aten::_foreach_add_", begin + 2, begin + 20)
        trace.kernel(
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<int>(int)",
            begin + 12,
            begin + 42,
            launch=(begin + 4, begin + 8),
        )
        trace.call("cudaDeviceSynchronize", begin + 60, at + 990)
    return trace


def replayed_step() -> ChromeTrace:
    """A step of 500 µs whose three kernels run in one CUDA graph launch, then a wait."""
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 500)
    number = trace.call("cudaGraphLaunch", 10, 60)
    for start, name in ((50, SGEMM), (150, ADD), (165, SGEMM)):
        trace.kernel(name, start, start + 90 if name == SGEMM else start + 10)
        trace.events[-1]["args"]["correlation"] = number
    trace.call("cudaDeviceSynchronize", 70, 490)
    return trace


_OLD_CATEGORIES = {
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "cuda_runtime": "Runtime",
    "kernel": "Kernel",
    "fwdbwd": "async",
}


def as_old_kineto_wrote(trace: ChromeTrace) -> ChromeTrace:
    """The same events as the first versions of Kineto wrote them: ranges are operators, threads and
    streams are strings, and times are integer microseconds."""
    for event in trace.events:
        is_kernel = event["cat"] == "kernel"
        event["cat"] = _OLD_CATEGORIES[event["cat"]]
        event["tid"] = f"stream {event['tid']}" if is_kernel else str(event["tid"])
        event["ts"] = int(event["ts"])
        event["dur"] = int(event["dur"])
    return trace


def one_long_gap(call: str = "", graph: bool = False) -> ChromeTrace:
    """A step of 224 ms: for 218 ms nothing runs, then 100 kernels without a pause."""
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 224_000)
    trace.range("prepare", 100, 217_900)
    if call:
        trace.operator("aten::empty", 900, 217_000)
        trace.call(call, 1_000, 216_000)
    number = trace.call("cudaGraphLaunch", 217_950, 217_990) if graph else 0
    for index in range(100):
        at = 218_000 + 60.0 * index
        trace.kernel(
            SGEMM, at, at + 60, launch=None if graph else (217_000 + index, 217_001 + index)
        )
        if graph:
            trace.events[-1]["args"]["correlation"] = number
    return trace


def late_launches(steps: int = 1, graph: bool = False) -> ChromeTrace:
    """Steps of 10 ms whose 100 kernels of 20 µs are launched one by one, each too late."""
    trace = ChromeTrace()
    for step in range(steps):
        begin = 10_000.0 * step
        trace.range(f"ProfilerStep#{step}", begin, begin + 10_000)
        for index in range(100):
            at = begin + 100 * index
            trace.operator("aten::mm", at + 1, at + 75)
            number = trace.call(
                "cudaGraphLaunch" if graph else "cudaLaunchKernel", at + 60, at + 70
            )
            trace.kernel(SGEMM, at + 75, at + 95)
            trace.events[-1]["args"]["correlation"] = number
    return trace


def operator_step() -> ChromeTrace:
    """A step of 1,000 µs on a CPU: operators instead of kernels, no autograd engine thread."""
    trace = ChromeTrace()
    trace.range("ProfilerStep#0", 0, 1000)
    trace.range("forward", 0, 400)
    trace.range("block 0", 10, 300)
    trace.range("attention", 20, 250)
    trace.range("core", 30, 240)
    trace.operator("aten::bmm", 40, 100, sequence=1)
    trace.operator("aten::_softmax", 110, 150, sequence=2)
    trace.operator("aten::bmm", 160, 220, sequence=3)
    trace.range("head", 310, 390)
    trace.operator("aten::mm", 320, 380, sequence=4)
    trace.range("backward", 400, 900)
    for index, (name, sequence) in enumerate((("Mm", 4), ("Bmm", 3), ("Softmax", 2), ("Bmm", 1))):
        at = 410 + 100.0 * index
        node = f"autograd::engine::evaluate_function: {name}Backward0"
        trace.operator(node, at, at + 90, sequence=sequence, back=1)
        trace.operator("aten::bmm", at + 5, at + 85)
    trace.range("optimizer", 900, 1000)
    trace.operator("aten::_foreach_add_", 910, 990)
    return trace


NSIGHT_SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER NOT NULL, name TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
    textId INTEGER, domainId INTEGER);
"""
TID = 7 << 24


def nsight_file(path: Path) -> Path:
    """Write one step: forward on one thread, backward on another, a synchronised copy to the host.

    From the documented schema of `nsys export --type sqlite`; times in nanoseconds.
    """
    with sqlite3.connect(path) as database:
        database.executescript(NSIGHT_SCHEMA)
        names = {
            1: "ampere_sgemm_128x64_tn",
            2: "cudaLaunchKernel_v7000",
            3: "block 0",
            4: "cudaStreamSynchronize_v3020",
            5: "Kernel2",
            6: "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>(T1::Params)",
            7: "cudaMemcpyAsync_v3020",
        }
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", names.items())
        database.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H200')")
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, 1, ?, ?)",
            [(1_000, 5_000, 11, 1, 1), (6_000, 9_000, 12, 6, 5)],
        )
        database.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (9000, 9500, 0, 1, 7, 13, 4, 2)"
        )
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0)",
            [
                (500, 800, TID | 1, 11, 2),
                (5_200, 5_500, TID | 2, 12, 2),
                (5_600, 5_700, TID | 1, 13, 7),
                (6_500, 9_800, TID | 1, 14, 4),
            ],
        )
        database.executemany(
            "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, textId)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            [
                (0, 10_000, 60, "step 0", TID | 1, None),
                (100, 5_100, 60, "forward", TID | 1, None),
                (200, 900, 59, None, TID | 1, 3),
                (5_100, 9_900, 60, "backward", TID | 1, None),
                (300, None, 34, "a mark", TID | 1, None),
            ],
        )
    return path
