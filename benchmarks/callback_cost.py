"""Cost of a callback, per library.

    python benchmarks/callback_cost.py [--out results/callback-cost_cpu.jsonl]

The trainer's calls of one more callback in a step are timed without a model, after the recording
and during its warm-up, as is the optimizer's update with the hooks of the recording. The cost of a
step that is not recorded is their sum. The model of `examples/callbacks_hf.py` is recorded too, and
the analysis after its last recorded step is timed. All times are CPU time. With --out, the
lines are written to that file, from which `scripts/make_docs.py` makes the table in
docs/integrations.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

import stepscope
from stepscope.integrations import StepscopeCallback, StepscopeLightningCallback
from stepscope.measure.device import CpuDevice
from stepscope.measure.environment import describe
from stepscope.views.program.rows import ProgramRecord

Line = dict[str, Any]
CALLS, REPEATS, FOREVER = 2_000, 9, 1_000_000
VOCAB, LENGTH, BATCH = 1000, 64, 8
EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        # First, so that the imports of the analysis count.
        analysis = _analysis(page)
        for when, plan in (
            ("after the recording", {"warmup": 0, "steps": 1, "traced": 1, "memory": False}),
            ("during the warm-up", {"warmup": FOREVER}),
        ):
            for library, cost in (("transformers", _hugging_face), ("Lightning", _lightning)):
                calls_s, update_s = cost(plan | {"page": page})
                seconds = calls_s + max(0.0, update_s)
                lines.append({"library": library, "when": when, "microseconds": seconds * 1e6})
        lines.append(analysis)
    about = {
        "processor": describe(CpuDevice()).cpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = "\n".join(json.dumps(line | about) for line in lines)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def _analysis(page: Path) -> Line:
    """Time what a callback does after its last recorded step."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    scope = stepscope.Scope(model, optimizer)
    while not scope.done:
        with scope.step():
            ids = torch.randint(VOCAB, (BATCH, LENGTH))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    began = time.process_time()
    record = scope.record()
    scope.verdict()
    scope.report(page)
    seconds = time.process_time() - began
    summary = ProgramRecord(record).summary
    assert summary is not None
    return {"when": "analysis", "seconds": seconds, "operators": summary.launches}


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


if __name__ == "__main__":
    main()
