"""Callback for the Trainer of Lightning."""

from __future__ import annotations

from functools import partial
from typing import Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

from stepscope.integrations.trainer_recording import Metrics, TrainerRecording


class StepscopeLightningCallback(TrainerRecording, Callback):
    """Record a few steps of a `lightning.Trainer` after its warm-up.

        trainer = lightning.Trainer(..., callbacks=[StepscopeLightningCallback()])

    A step ends with the batch that updates the parameters. Arguments and results are those of
    `StepscopeCallback`; metrics go to the loggers of the trainer.
    """

    _global_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._global_step = trainer.global_step
        self._start(pl_module, trainer.optimizers, leads=trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        # Batches of an accumulated gradient do not change it.
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._step_ended(partial(_log, trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del pl_module
        self._end(partial(_log, trainer))

    def on_exception(self, *_: Any) -> None:
        self._abandon()
        self._restore()


def _log(trainer: Any, metrics: Metrics) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)
