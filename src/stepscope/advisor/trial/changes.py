"""Changes of a training program, made from outside: no line of it is touched.

What the program does not have yet when torch arrives (optimizers, data loaders) is changed as it is
made. What needs its models is changed after its first step, when they are known, and compiled after
its second, which has shown what masks its attention has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from stepscope.acceleration.changes import checkpoint_blocks, compile_own, one_kernel_attention
from stepscope.advisor.trial import loop as habits
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.calls import Calls
from stepscope.advisor.trial.optimizers import fuse_optimizers, use_foreach

_EARLY = {
    "gradients": habits.drop_gradients,
    "data": habits.load_ahead,
    "copies": habits.copy_from_pinned_memory,
    "read_back": habits.read_back_later,
}
COMPILED_AFTER = 2
"""Steps, or one more where the program calls parts of its model."""

_NO_BACKWARD = -1


class Changes:
    """`settings` are those of the advice that is tried; see `analysis/advice/changes.py`."""

    def __init__(self, settings: Mapping[str, str], backwards: Backwards) -> None:
        self._settings = settings
        self._applied: Counter[str] = Counter()
        self._attention = one_kernel_attention() if "attention" in settings else None
        self._known: set[torch.nn.Module] = set()
        self._calls: list[Calls] = []
        self._within = ExitStack()
        self._is_within = False
        self._compiled = False
        backwards.before.append(self._leave)

    def when_torch_is_there(self) -> None:
        if self._settings.get("dtype") == "tf32":
            torch.set_float32_matmul_precision("high")
        elif self._settings.get("dtype") == "float32":
            habits.without_autocast(self._applied)
        for name, change in _EARLY.items():
            if name in self._settings:
                change(self._applied)
        if "batch" in self._settings:
            habits.larger_batches(int(self._settings["batch"]), self._applied)
        if self._settings.get("optimizer") == "foreach":
            use_foreach(self._applied)
        elif "optimizer" in self._settings:
            fuse_optimizers(self._applied)
        if self._settings.get("checkpoint") == "no":
            habits.run_nothing_again(self._applied)

    def when_models_are_known(self, models: Sequence[torch.nn.Module]) -> None:
        """Again where there are more of them."""
        for model in models:
            if model in self._known:
                continue
            self._known.add(model)
            if self._settings.get("checkpoint") == "blocks":
                self._applied["checkpoint"] += checkpoint_blocks(model)
            if {"attention", "compile", "dtype"} & self._settings.keys():
                kind = next((p.device.type for p in model.parameters()), "cpu")
                self._calls.append(Calls(model, partial(self._around, kind)))

    def end_step(self, steps: int) -> None:
        self._leave()
        if steps < COMPILED_AFTER:
            return
        settled = [calls for calls in self._calls if calls.settle()]
        if self._compiled or "compile" not in self._settings:
            return
        if len(settled) == len(self._calls) or steps > COMPILED_AFTER:
            for calls in settled:
                self._compile(calls)
            self._compiled = True

    def _compile(self, calls: Calls) -> None:
        how = self._settings["compile"]
        if not {"attention", "dtype"} & self._settings.keys():
            calls.release()
        learn = [part for part in calls.called if any(True for _ in part.parameters())]
        for module in [calls.model] if how == "block" else learn:
            compile_own(module, how, self._attention)
            self._applied["compile"] += 1

    def without_effect(self) -> list[str]:
        """Settings that found nothing to change in the steps so far."""
        counted = {*_EARLY, "batch", "checkpoint", "compile", "optimizer"} & set(self._settings)
        if self._settings.get("dtype", "tf32") != "tf32":
            counted.add("dtype")
        found = sorted(name for name in counted if not self._applied[name])
        if self._attention is not None and not self._attention.substituted:
            found.append("attention")
        return found

    def _format(self) -> torch.dtype | None:
        name = self._settings.get("dtype", "")
        return getattr(torch, name) if name in ("bfloat16", "float16") else None

    @contextmanager
    def _around(self, kind: str) -> Iterator[None]:
        """Autocast goes on until the backward, so that the loss is within, as it should be. Where a
        checkpointed stretch runs again, that backward is under way."""
        if not torch.is_grad_enabled():
            yield
            return
        form = self._format()
        with ExitStack() as call:
            if torch._C._current_graph_task_id() != _NO_BACKWARD:
                if form is not None:
                    call.enter_context(torch.autocast(kind, form))
            elif form is not None and not self._is_within:
                self._is_within = True
                self._applied["dtype"] += 1
                self._within.enter_context(torch.autocast(kind, form))
            if self._attention is not None and not self._compiled:
                call.enter_context(self._attention)
            yield

    def _leave(self) -> None:
        self._within.close()
        self._is_within = False
