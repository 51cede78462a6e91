"""Run a training program and time its steps without Stepscope.

python benchmarks/independent_hook.py TIMES.json PROGRAM [ARGUMENTS …]

A step lasts from one step of the program's first optimizer to the next. Times are those of the host
and, on a GPU, of CUDA events as well. With `COUNT_FLOPS=20` the twenty-first step runs under
torch.utils.flop_counter, which supports neither causal attention nor recurrent layers: this file
has the formulas of both.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import runpy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
RECURRENT = ("_cudnn_rnn", "mkldnn_rnn_layer")


def formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs by operator. A backward counts twice its forward, without any recomputation."""
    by_operator: dict[Any, Callable[..., int]] = {}
    for passes, suffix in ((1, ""), (2, "_backward")):
        for name in ATTENTION:
            if (operator := getattr(torch.ops.aten, name + suffix, None)) is not None:
                by_operator[operator] = _attention(operator, passes)
        for name in RECURRENT:
            by_operator[getattr(torch.ops.aten, name + suffix)] = partial(_recurrent, passes)
    return by_operator


def _attention(operator: Any, passes: int) -> Callable[..., int]:
    """Two matmuls, halved by a causal mask. Arguments are shapes, by position."""
    names = [argument.name for argument in operator.default._schema.arguments]

    def count(*arguments: Any, out_shape: Any = None, **named: Any) -> int:  # noqa: ARG001
        values = dict(zip(names, arguments, strict=False)) | named
        batch, heads, rows, width = values["query"]
        full = 2 * batch * heads * rows * values["key"][-2] * (width + values["value"][-1])
        return passes * (full // 2 if values.get("is_causal") else full)

    return count


def _recurrent(passes: int, inputs: Any, weights: Any, *rest: Any, **_: Any) -> int:
    """Every weight matrix is multiplied once per time step and sample. cuDNN's operator takes a
    list of weights, oneDNN's takes the four of one layer."""
    shapes = weights if isinstance(weights, list) else (weights, *rest[:3])
    rows = math.prod(inputs[:-1])
    return passes * sum(2 * rows * math.prod(shape) for shape in shapes if len(shape) == 2)


class Hook:
    def __init__(self, path: Path, counted: int | None) -> None:
        self.path, self.counted = path, counted
        self.first: int | None = None
        self.host: list[float] = []
        self.events: list[torch.cuda.Event] = []
        self.counter: FlopCounterMode | None = None
        self.flops: int | None = None
        self.pending: list[Callable[[], None]] = []
        self.pid = os.getpid()
        if counted is not None:
            self.watch_backwards()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if os.getpid() != self.pid:
            return
        if self.first is None:
            self.first = id(optimizer)
        if id(optimizer) != self.first:
            return
        if self.counter is not None:
            self.outside_of_backward(self.stop_counting)
        self.host.append(time.perf_counter())
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        if len(self.host) == self.counted:
            self.outside_of_backward(self.count)

    def outside_of_backward(self, act: Callable[[], None]) -> None:
        """Call now, or after the running backward: a mode must be left where it was entered, and an
        optimizer may step in a hook of the backward."""
        if torch._C._current_graph_task_id() == -1:
            act()
        else:
            self.pending.append(act)

    def watch_backwards(self) -> None:
        plain = torch.autograd.backward

        def backward(*arguments: Any, **named: Any) -> None:
            plain(*arguments, **named)
            while self.pending:
                self.pending.pop()()

        torch.autograd.backward = backward

    def count(self) -> None:
        self.counter = FlopCounterMode(display=False, custom_mapping=formulas())
        self.counter.__enter__()

    def stop_counting(self) -> None:
        assert self.counter is not None
        self.counter.__exit__(None, None, None)
        self.flops, self.counter = self.counter.get_total_flops(), None

    def write(self) -> None:
        if os.getpid() != self.pid or int(os.environ.get("RANK", "0")):
            return
        device = None
        if len(self.events) > 1:
            torch.cuda.synchronize()
            pairs = zip(self.events[:-1], self.events[1:], strict=True)
            device = [start.elapsed_time(end) for start, end in pairs]
        pairs_host = zip(self.host[:-1], self.host[1:], strict=True)
        times = {
            "host_ms": [1e3 * (end - start) for start, end in pairs_host],
            "device_ms": device,
            "flops": self.flops,
        }
        self.path.write_text(json.dumps(times))


def main() -> None:
    times, program, *arguments = sys.argv[1:]
    counted = os.environ.get("COUNT_FLOPS")
    hook = Hook(Path(times), int(counted) if counted else None)
    register_optimizer_step_post_hook(hook)
    atexit.register(hook.write)
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
