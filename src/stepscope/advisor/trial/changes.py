"""Changes applied to a training program at run time, without editing it.

Each setting is made as its file in `analysis/advice/rules` says, when torch is imported: objects
that do not exist yet (optimizers, data loaders) are changed when they are created. Changes that
need the models are applied after the first step, when these are known; models are compiled after
the second, which has shown the masks of their attention. Then a loop may become a `TrainStep`.

Some changes can be taken back while the program runs (`Changes.switch`): what a combination gains
from them is measured without another start of the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from stepscope.acceleration.changes import checkpoint_blocks, compile_own
from stepscope.acceleration.fused_attention import FusedAttention
from stepscope.advisor.scope.trained_calls import Trained, before_first_call
from stepscope.advisor.trial.accelerated import Acceleration
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.calls import Calls
from stepscope.advisor.trial.following import NO_BACKWARD
from stepscope.advisor.trial.loop_step import LoopStep
from stepscope.advisor.trial.optimizers import Optimizers
from stepscope.advisor.trial.siblings import Siblings
from stepscope.analysis.advice.changes import setting_of
from stepscope.analysis.advice.program import Setting
from stepscope.analysis.advice.rules.accelerate import ACCELERATE
from stepscope.analysis.advice.rules.memory import MEMORY
from stepscope.analysis.advice.rules.train_step import STEP
from stepscope.planning.application import apply_plan
from stepscope.records.decoding import from_json
from stepscope.records.plans import Application

COMPILED_AFTER = 2
"""Steps before compilation; one more if the program calls submodules instead of its model."""


class Changes:
    """The changes of one trial: a `Program` to the files that make them. `settings` are those of
    the advice."""

    def __init__(self, settings: Mapping[str, str], backwards: Backwards) -> None:
        self._settings = settings
        self._made: dict[str, Setting] = {
            name: setting_of(name, value) for name, value in settings.items()
        }
        self.applied: Counter[str] = Counter()
        self._off: set[str] = set()
        self._optimizers = Optimizers(self.applied)
        self._compiled_calls: dict[torch.nn.Module, Any] = {}
        self._dtype: torch.dtype | None = None
        self._attention: FusedAttention | None = None
        self._watching = True
        self._mode = ""
        self._checkpoints = False
        self._acceleration: Acceleration | None = None
        self._loop: LoopStep | None = None
        self._siblings: Siblings | None = None
        self._backwards = backwards
        self._known: set[torch.nn.Module] = set()
        self._model_changes: dict[str, Callable[[torch.nn.Module], int]] = {}
        self._calls: list[Calls] = []
        self._plan = Application(settings=(), blocks={})
        self._autocast = ExitStack()
        self._autocast_on = False
        self._compiled = False
        backwards.before.append(self._backward_begins)

    def on_torch_imported(self) -> None:
        for name, value in self._settings.items():
            self._made[name].make(self, value)

    # What the changes ask for: see `analysis/advice/program.py`.

    def is_on(self, setting: str) -> bool:
        return setting not in self._off

    def autocast(self, dtype: str) -> None:
        self._dtype = getattr(torch, dtype)

    def fuse_attention(self) -> None:
        self._attention = FusedAttention()

    def fuse_optimizers(self) -> None:
        self._optimizers.fuse()

    def use_foreach(self) -> None:
        self._optimizers.use_foreach()

    def compile(self, mode: str) -> None:
        self._mode = mode

    def checkpoint_blocks(self) -> None:
        self._checkpoints = True

    def follow_memory_plan(self, plan: str) -> None:
        self._plan = from_json(plan, Application)
        before_first_call(self._first_called)

    def accelerate(self, dtype: str | None = None) -> None:
        self._acceleration = Acceleration(dtype)

    def batch_siblings(self) -> None:
        self._siblings = Siblings(self.applied, self.is_on, lambda: self._attention)

    def with_models(self, setting: str, change: Callable[[torch.nn.Module], int]) -> None:
        self._model_changes[setting] = change

    def run_as_train_step(self) -> None:
        self._loop = LoopStep(self._paused)
        self._loop.attach()

    def _first_called(self, trained: Trained) -> None:
        apply_plan(trained.model, trained.optimizer, self._plan)
        self.applied[MEMORY] += len(self._plan.blocks) + self._plan.host_states

    # Switching.

    def switchable(self) -> list[str]:
        """Return the settings that can be taken back, and made again, in this process. A CUDA graph
        has all changes in it, a compiled model the attention."""
        if self._loop is not None or self._mode == "graphs":
            return []
        names = [name for name, one in self._made.items() if one.switchable]
        if self._mode:
            names = [name for name in names if name != "attention"]
        if self._optimizers.switchable:
            names.append("optimizer")
        return names

    def switch(self, settings: Mapping[str, str]) -> None:
        """Have only these of the settings."""
        self._off = self._settings.keys() - settings.keys()
        self._optimizers.switch(self.is_on("optimizer"))
        for module, call in self._compiled_calls.items():
            module._compiled_call_impl = call if self.is_on("compile") else None
        self._switch_attention()

    def _switch_attention(self) -> None:
        if self._attention is not None:
            # The graph of a compiled model has the fused attention.
            compiled = self._compiled and self.is_on("compile")
            self._attention.switch(self.is_on("attention") and not compiled)

    @property
    def paused(self) -> bool:
        """Whether a `TrainStep` is running: its backward and optimizer steps are not the
        program's."""
        return self._backwards.paused

    def on_models_known(
        self, models: Sequence[torch.nn.Module], optimizers: Iterable[Any] = ()
    ) -> None:
        """Apply the changes that need models; called again when more models are found."""
        for model in models:
            if model in self._known:
                continue
            self._known.add(model)
            for setting, change in self._model_changes.items():
                self.applied[setting] += change(model)
            if self._checkpoints:
                self.applied["checkpoint"] += checkpoint_blocks(model)
            if self._acceleration is not None:
                self._acceleration.apply(model, optimizers)
            if self._siblings is not None:
                self._siblings.find(model)
            if self._attention or self._dtype or self._mode or self._loop is not None:
                self._watching = True
                kind = next((p.device.type for p in model.parameters()), "cpu")
                self._calls.append(Calls(model, partial(self._run, kind)))

    def optimizer_stepped(self, optimizer: Any) -> None:
        if self._loop is not None:
            self._loop.optimizer_stepped(optimizer)

    def end_step(self, steps: int) -> None:
        self._leave_autocast()
        settled = []
        if self._siblings is not None and steps >= COMPILED_AFTER:
            self._siblings.settle()
        if steps >= COMPILED_AFTER:
            settled = [calls for calls in self._calls if calls.settle()]
            all_known = len(settled) == len(self._calls) or steps > COMPILED_AFTER
            if self._mode and not self._compiled and all_known:
                for calls in settled:
                    self._compile(calls)
                self._compiled = True
            if self._attention is not None:
                self._watching = not all_known
                self._switch_attention()
                self._attention.replace(self._siblings.together if self._siblings else ())
        if self._loop is not None:
            self._loop.end_step([calls.model for calls in settled], self._dtype)

    def _compile(self, calls: Calls) -> None:
        if not (self._dtype or self._loop is not None):
            calls.release()
        trainable = [part for part in calls.called if any(True for _ in part.parameters())]
        for module in [calls.model] if self._mode == "block" else trainable:
            compile_own(module, self._mode, self._attention)
            self.applied["compile"] += 1
            parts = (part for part in module.modules() if part._compiled_call_impl is not None)
            self._compiled_calls |= {part: part._compiled_call_impl for part in parts}

    def without_effect(self) -> dict[str, str]:
        """Settings that had no effect in the steps so far, with the reason."""
        counted = sorted(name for name, one in self._made.items() if one.counted)
        missing = {name: self._made[name].without for name in counted if not self.applied[name]}
        if self._attention is not None and (reason := self._attention.why_not()) is not None:
            missing["attention"] = reason
        if self._acceleration and (reason := self._acceleration.without_effect()) is not None:
            missing[ACCELERATE] = reason
        if self._loop is not None and (reason := self._loop.without_effect()) is not None:
            missing[STEP] = reason
        return missing

    def _run(self, kind: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run a call of a model with the changes that apply to it."""
        if not torch.is_grad_enabled():
            return call(*arguments, **keywords)
        recomputes = torch._C._current_graph_task_id() != NO_BACKWARD
        if self._loop is not None and self._loop.active and not recomputes:
            self.applied["dtype"] += 1
            return self._loop.run(call, *arguments, **keywords)
        with self._around(kind, recomputes):
            output = call(*arguments, **keywords)
        if self._loop is not None and not recomputes:
            self._loop.called(output)
        return output

    @contextmanager
    def _around(self, kind: str, recomputes: bool) -> Iterator[None]:
        """Context of a model call. Autocast stays enabled until the backward, so that it includes
        the loss. While a checkpointed segment is recomputed, a backward is already running."""
        dtype = self._dtype
        with ExitStack() as call:
            if recomputes:
                if dtype is not None:
                    call.enter_context(torch.autocast(kind, dtype))
            elif dtype is not None and not self._autocast_on:
                self._autocast_on = True
                self.applied["dtype"] += 1
                self._autocast.enter_context(torch.autocast(kind, dtype))
            if self._attention is not None and self._watching and not recomputes:
                call.enter_context(self._attention.watched())
            yield

    def _backward_begins(self, roots: Any) -> None:
        self._leave_autocast()
        if self._loop is not None:
            self._loop.backward_begins(roots)

    def _leave_autocast(self) -> None:
        self._autocast.close()
        self._autocast_on = False

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._backwards.paused = True
        try:
            yield
        finally:
            self._backwards.paused = False
