"""Cost of a callback in a training step that is not recorded, per library.

    python benchmarks/callback_cost.py

The trainer's calls of one more callback in a step are timed without a model, after the recording
and during its warm-up, as is the optimizer's update with the hooks of the recording. The cost is
their sum, shown as a share of a step of 100 ms.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from stepscope.integrations import StepscopeCallback, StepscopeLightningCallback

CALLS, REPEATS, FOREVER = 2_000, 9, 1_000_000
STEP_S = 0.1
EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        for name, plan in (
            ("recorded", {"warmup": 0, "steps": 1, "traced": 1, "memory": False}),
            ("warm-up", {"warmup": FOREVER}),
        ):
            _print(f"transformers, {name}", *_hugging_face(plan | {"page": page}))
            _print(f"Lightning, {name}", *_lightning(plan | {"page": page}))


def _hugging_face(options: dict[str, Any]) -> tuple[float, float]:
    model, optimizer = _program()
    callback = StepscopeCallback(**options)
    state, control = TrainerState(), TrainerControl()
    handlers = [
        CallbackHandler([DefaultFlowCallback, *more], model, None, optimizer, None)
        for more in ((), (callback,))
    ]
    arguments: Any = _Arguments()
    plain = _each(optimizer.step)
    handlers[1].on_train_begin(arguments, state, control)
    for _ in range(6):
        _step(model, optimizer)
        handlers[1].on_step_end(arguments, state, control)

    def events(handler: CallbackHandler) -> Callable[[], None]:
        def run() -> None:
            for event in EVENTS:
                getattr(handler, event)(arguments, state, control)

        return run

    without, with_callback = (_each(events(handler)) for handler in handlers)
    return with_callback - without, _each(optimizer.step) - plain


def _lightning(options: dict[str, Any]) -> tuple[float, float]:
    model, optimizer = _program()
    callback = StepscopeLightningCallback(**options)
    trainer: Any = _Trainer(optimizer)
    plain = _each(optimizer.step)
    callback.on_train_start(trainer, model)
    for _ in range(6):
        _step(model, optimizer)
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, model, None, None, 0)

    def run() -> None:
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, model, None, None, 0)

    return _each(run), _each(optimizer.step) - plain


class _Arguments:
    """What DefaultFlowCallback reads of TrainingArguments."""

    logging_first_step = False
    logging_strategy = eval_strategy = save_strategy = "no"
    eval_delay = 0


class _Trainer:
    """What the callback reads of a lightning.Trainer."""

    global_step, is_global_zero = 0, True
    loggers: tuple[Any, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers = [optimizer]


def _program() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model, optimizer)
    return model, optimizer


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()


def _each(run: Callable[[], object]) -> float:
    """Least mean seconds of a call over several repetitions, by the clock of this thread: other
    work on the machine does not count."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.thread_time()
        for _ in range(CALLS):
            run()
        best = min(best, (time.thread_time() - start) / CALLS)
    return best


def _print(name: str, calls_s: float, update_s: float) -> None:
    total = calls_s + max(0.0, update_s)
    print(
        f"{name:<24} calls {calls_s * 1e6:6.2f} µs, hooks of the update {update_s * 1e6:6.2f} µs:"
        f" {total / STEP_S:.4%} of a step of {STEP_S * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
