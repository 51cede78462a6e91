"""The operators and tensors of one step of a program, unless there are too many of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from stepscope.advisor.scope.memory import OperatorCount, WatchedLedger
from stepscope.advisor.scope.stages import MOST_OPERATORS, most_operators
from stepscope.measure.allocator import CudaAllocator, recorded_history
from stepscope.measure.device import Device
from stepscope.measure.modules import any_compiled


class StepCount:
    """`begin` and `end` around the step whose memory is accounted for. Without an account,
    `begin_bare` counts the operators alone."""

    def __init__(self, snapshot: Path, notes: dict[str, str]) -> None:
        self.snapshot = snapshot
        self.ledger: WatchedLedger | None = None
        """The account; None where there is none that holds."""
        self.operators: int | None = None
        """Of the step that was counted, where one was."""
        self._most = MOST_OPERATORS
        self._notes = notes
        self._bare: OperatorCount | None = None
        self._earlier: WatchedLedger | None = None
        """The account of a step that was counted before, and also validated."""
        self._under_way = False
        self._open = ExitStack()

    @property
    def too_many(self) -> bool:
        return self.operators is not None and self.operators > self._most

    @property
    def steps_that_fit(self) -> int:
        """How many steps may be traced."""
        return 0 if self.too_many else max(1, self._most // max(1, self.operators or 1))

    def why_not(self, purpose: str) -> str:
        return (
            f"a step runs more than {self._most:,} operators, and {purpose} would take longer than"
            " a quarter of the program's own time (time more steps with --timed, or mark a shorter"
            " step with stepscope.Scope)"
        )

    def begin(
        self,
        device: Device,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        own_s: float,
    ) -> None:
        """`own_s` is how long the program takes by itself."""
        if any_compiled(models):
            self._notes["memory_missing"] = (
                "the model is compiled: what its kernels keep is not seen from outside"
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
        self._most = most_operators(own_s)
        ledger = WatchedLedger(device.torch_device, allocator, self._most)
        self._open.enter_context(ledger.step(models, optimizers))
        self._earlier, self.ledger, self._under_way = self.ledger, ledger, True

    def begin_bare(self, models: Sequence[torch.nn.Module], own_s: float) -> None:
        """Nothing where the operators are known, or where a model is compiled: a dispatch mode
        would have it compiled again, and it runs few operators."""
        if self.operators is None and not any_compiled(models):
            self._most = most_operators(own_s)
            self._bare = self._open.enter_context(OperatorCount())
            self._earlier, self._under_way = self.ledger, True

    def end(self) -> None:
        """The step has ended; nothing where it is not counted, or not any more."""
        if not self._under_way:
            return
        self._under_way = False
        counted, self.ledger = self.ledger, None
        self._open.close()
        self.ledger = counted
        if self._bare is not None:
            self.operators, self._bare = self._bare.operators, None
        elif self.ledger is not None:
            self._judge(self.ledger)

    def drop(self) -> None:
        """Ends a count before its step has ended: what it has so far is of no use."""
        if self._under_way:
            self._under_way = False
            self._open.close()
            self._bare, self.ledger = None, self._earlier
            self.snapshot.unlink(missing_ok=True)

    def leave_early(self) -> None:
        """Called between two operators: where there were too many, the count ends here. Its
        instruments slow down all further ones of the step, even if they note nothing."""
        if self.ledger is not None and self.ledger.too_many and self.ledger.can_leave():
            self.end()

    def _judge(self, ledger: WatchedLedger) -> None:
        self._notes.pop("memory_missing", None)
        if ledger.too_many or not ledger.failure:
            self.operators = ledger.operators
        if ledger.too_many:
            self._notes["memory_missing"] = self.why_not("to count its tensors")
            self.ledger = None
            self.snapshot.unlink(missing_ok=True)
        elif ledger.failure:
            self._notes["memory_missing"] = f"the count broke off ({ledger.failure})"
            self.ledger = None
        elif ledger.saved_unseen:
            self._notes["memory_missing"] = (
                "the program uses torch.func.grad or the like, under which nobody sees what is"
                " saved for backward"
            )
