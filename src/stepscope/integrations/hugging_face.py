"""Callback for the Trainer of Hugging Face transformers."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from stepscope.integrations.trainer_recording import Metrics, TrainerRecording


class StepscopeCallback(TrainerRecording, TrainerCallback):
    """Record a few steps of a `transformers.Trainer` after its warm-up.

        trainer = Trainer(..., callbacks=[StepscopeCallback()])

    The verdict is printed to standard error, the page is written to `page`, and step time,
    tokens/s, MFU, exposed communication and peak memory go to the integrations in `report_to`.
    Before and after the recording a step costs microseconds. `accelerate=True` applies
    `stepscope.accelerate` to the model and the optimizer until training ends.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any
    ) -> None:
        del args, control
        self._start(model, [optimizer], leads=state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._step_ended(partial(self._log, args, state, control, given))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._end(partial(self._log, args, state, control, given))

    def _log(
        self, args: Any, state: Any, control: Any, given: dict[str, Any], metrics: Metrics
    ) -> None:
        """Log to TensorBoard, W&B, MLflow and so on. Callbacks that print or stop the training
        are not called, and neither are callbacks of the program, which expect a loss."""
        reporters = tuple(INTEGRATION_TO_CALLBACK.values())
        for callback in self._siblings():
            if isinstance(callback, reporters):
                callback.on_log(args, state, control, logs=dict(metrics), **given)

    def _siblings(self) -> list[Any]:
        """All callbacks of the trainer. It passes itself to none of them, so its handler is looked
        up among the live objects; `type` avoids proxy objects that react to `isinstance`."""
        for one in gc.get_objects():
            if issubclass(type(one), CallbackHandler) and any(c is self for c in one.callbacks):
                return list(one.callbacks)
        return []
