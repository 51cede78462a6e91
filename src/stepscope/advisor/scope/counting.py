"""Count of the operators and tensors of one step, unless there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from stepscope.advisor.scope.memory import WatchedLedger
from stepscope.advisor.scope.stages import MAX_OPERATORS, most_operators
from stepscope.measure.allocator import CudaAllocator, recorded_history
from stepscope.measure.device import Device
from stepscope.measure.modules import any_compiled


class StepCount:
    """Call `begin` and `end` around the step whose memory is recorded."""

    def __init__(self, snapshot: Path, notes: dict[str, str]) -> None:
        self.snapshot = snapshot
        self.ledger: WatchedLedger | None = None
        """Memory ledger; None if there is no valid one."""
        self.operators: int | None = None
        """Operators of the counted step, if one was counted."""
        self.most = MAX_OPERATORS
        """Operators of a step that may be counted."""
        self._notes = notes
        self._earlier: WatchedLedger | None = None
        """Ledger of an earlier counted step that also ran a validation."""
        self._active = False
        self._open = ExitStack()

    @property
    def too_many(self) -> bool:
        return self.operators is not None and self.operators > self.most

    def limit(self, own_s: float) -> None:
        """Allow as many operators as a program that runs for so long may have counted."""
        self.most = most_operators(own_s)

    @property
    def active(self) -> bool:
        """True while a step is counted."""
        return self._active

    @property
    def steps_that_fit(self) -> int:
        """Number of steps that may be traced."""
        return 0 if self.too_many else max(1, self.most // max(1, self.operators or 1))

    def why_not(self, purpose: str) -> str:
        return (
            f"a step runs more than {self.most:,} operators, and {purpose} would take more than a"
            " quarter of the program's own time (time more steps with --steps, or mark a shorter"
            " step with stepscope.Scope)"
        )

    def begin(
        self,
        device: Device,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Start counting."""
        if any_compiled(models):
            self._notes["memory_missing"] = (
                "the model is compiled, and tensors saved by compiled code cannot be observed"
            )
            return
        allocator = None
        if device.kind == "cuda":
            allocator = CudaAllocator(device.torch_device)
            recording = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)
            if recording():
                self._notes["snapshot_missing"] = "the program records the allocator's history"
            else:
                self._open.enter_context(recorded_history(self.snapshot))
        ledger = WatchedLedger(device.torch_device, allocator, self.most)
        self._open.enter_context(ledger.step(models, optimizers))
        self._earlier, self.ledger, self._active = self.ledger, ledger, True

    def end(self) -> None:
        """End the step; does nothing if no count is active."""
        if not self._active:
            return
        self._active = False
        counted, self.ledger = self.ledger, None
        self._open.close()
        self.ledger = counted
        if self.ledger is not None:
            self._evaluate(self.ledger)

    def drop(self) -> None:
        """End a count before its step has ended, and discard it."""
        if self._active:
            self._active = False
            self._open.close()
            self.ledger = self._earlier
            self.snapshot.unlink(missing_ok=True)

    def leave_early(self) -> None:
        """Called between two operators: end the count if there were too many. Its hooks slow down
        the rest of the step even if they record nothing."""
        if self.ledger is not None and self.ledger.too_many and self.ledger.can_leave():
            self.end()

    def _evaluate(self, ledger: WatchedLedger) -> None:
        self._notes.pop("memory_missing", None)
        if ledger.too_many or not ledger.failure:
            self.operators = ledger.operators
        if ledger.too_many:
            self._notes["memory_missing"] = self.why_not("counting its tensors")
            self.ledger = None
            self.snapshot.unlink(missing_ok=True)
        elif ledger.failure:
            self._notes["memory_missing"] = f"the count failed ({ledger.failure})"
            self.ledger = None
        elif ledger.saved_unseen:
            self._notes["memory_missing"] = (
                "the program uses torch.func.grad or a similar transform, under which tensors saved"
                " for backward cannot be observed"
            )
