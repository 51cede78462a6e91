"""No value read from the device within the step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, rule
from stepscope.analysis.advice.rules.pinned import PINNED

if TYPE_CHECKING:
    import torch


@rule("no-read-back", "no device value read within the step")
def _no_wait(facts: Facts) -> Change | Left | None:
    """No device value read within the step.

    A copy from pageable memory also synchronises: with only one of the two removed, the other
    still waits and nothing is gained.
    """
    if not facts.on_gpu:
        return Left("the step runs on a CPU")
    if not facts.waits or not facts.reads_back:
        return Left("no value is read from the device within the step")
    after = replace(facts, waits="", reads_back=False)
    setting = {"read_back": "late"}
    lines: tuple[str, ...] = (
        "total += loss.detach()          # add on the device",
        "if step % 100 == 0: print(total.item() / 100)",
    )
    also = ""
    if facts.pageable_ms:
        after = replace(after, pageable_ms=0.0)
        setting["copies"] = "pinned"
        lines += PINNED
        also = " Copies from pageable memory synchronise as well, so pin the batches too."
    return Change(
        after=after,
        why="in every step the CPU waits for the device (.item(), .cpu(), print of a tensor, a"
        f" GradScaler's check) and then has to refill an empty launch queue.{also}",
        risk="none; values are printed some steps later",
        lines=lines,
        setting=setting,
    )


class _DelayedValue:
    """Value read back by one line of the program, copied asynchronously to the host."""

    def __init__(self, value: torch.Tensor) -> None:
        import torch

        self._buffer = value.detach().cpu().pin_memory()
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last = self._buffer.tolist()

    def send(self, value: torch.Tensor) -> Any:
        """Return the last value that arrived, and start the copy of the new one."""
        if self._copied.query():  # type: ignore[no-untyped-call]
            self._last = self._buffer.tolist()
            self._buffer.copy_(value.detach(), non_blocking=True)
            self._copied.record()
        return self._last


@setting(
    "read_back",
    "late",
    switchable=True,
    without="no value is read from the device by .item() or .cpu()",
)
def _read_late(program: Program, value: str) -> None:  # noqa: ARG001
    """Make `.item()` and `float()` of a GPU scalar return the value of an earlier step without
    waiting."""
    import torch

    of_torch = str(Path(torch.__file__).parent)
    delayed: dict[tuple[str, int], _DelayedValue] = {}
    item = torch.Tensor.item

    def late(self: torch.Tensor, depth: int = 1) -> Any:
        frame = sys._getframe(depth)
        line = frame.f_code.co_filename, frame.f_lineno
        if (
            not program.is_on("read_back")
            or self.device.type != "cuda"
            or self.dim()
            or line[0].startswith(of_torch)
        ):
            return item(self)
        if line not in delayed:
            program.applied["read_back"] += 1
            delayed[line] = _DelayedValue(self)
        return delayed[line].send(self)

    torch.Tensor.item = late  # type: ignore[method-assign, assignment]

    def late_float(self: torch.Tensor) -> float:
        return float(late(self, 2))

    torch.Tensor.__float__ = late_float  # type: ignore[method-assign, assignment]
