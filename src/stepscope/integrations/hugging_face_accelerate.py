"""Hook for training loops with Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from stepscope.integrations.trainer_recording import Metrics, TrainerRecording, unwrapped


class StepscopeAccelerateHook(TrainerRecording):
    """Record a few steps of a loop with an `Accelerator`, which stays as it is.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        hook = StepscopeAccelerateHook(accelerator, model, optimizer)
        for batch in loader:
            with accelerator.accumulate(model):
                ...
        hook.close()

    A step ends when the optimizer (the last one of several) has updated the parameters, so that
    accumulated gradients count as one step. `options` and results are those of
    `StepscopeCallback`; metrics go to the trackers of the accelerator. `close` ends a recording
    that is not complete, and restores an accelerated model.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._accelerator = accelerator
        self._steps = 0
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._start(model, optimizers, leads=accelerator.is_main_process)
        self._handle: Any = None
        self._guarded(lambda: self._watch(optimizers[-1]))

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._end(self._log)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        # After the hooks of the recording, which must see the end of the update first.
        self._handle = unwrapped(optimizer).register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self._steps += 1
        self._step_ended(self._log)

    def _log(self, metrics: Metrics) -> None:
        self._accelerator.log(metrics, step=self._steps)
