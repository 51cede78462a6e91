"""Changes applied to a training program at run time, without editing it.

Objects that do not exist yet when torch is imported (optimizers, data loaders) are changed when
they are created. Changes that need the models are applied after the first step, when these are
known; models are compiled after the second, which has shown the masks of their attention. Then a
loop may become a `TrainStep`.

Some changes can be taken back while the program runs (`Changes.switch`): what a combination gains
from them is measured without another start of the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from stepscope.acceleration.changes import checkpoint_blocks, compile_own, one_kernel_attention
from stepscope.acceleration.report import FP8
from stepscope.advisor.trial import loop
from stepscope.advisor.trial.accelerated import Acceleration, accelerated_groups
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.calls import Calls
from stepscope.advisor.trial.loop_step import LoopStep
from stepscope.advisor.trial.optimizers import Optimizers
from stepscope.analysis.advice.pieces import ACCELERATE, STEP

_EARLY = {
    "gradients": loop.set_gradients_to_none,
    "data": loop.use_loader_workers,
    "copies": loop.copy_from_pinned_memory,
    "read_back": loop.read_back_delayed,
}
COMPILED_AFTER = 2
"""Steps before compilation; one more if the program calls submodules instead of its model."""

_NO_BACKWARD = -1
_IN_CALLS = ("attention", "gradients", "read_back")
"""Changes that are made in every call."""


class Changes:
    """The changes of one trial. `settings` are those of the advice; see
    `analysis/advice/changes.py`."""

    def __init__(self, settings: Mapping[str, str], backwards: Backwards) -> None:
        self._settings = settings
        self._applied: Counter[str] = Counter()
        self._off: set[str] = set()
        self._optimizers = Optimizers(self._applied)
        self._compiled_calls: dict[torch.nn.Module, Any] = {}
        fuses = settings.get("attention") == "fused"
        self._attention = one_kernel_attention() if fuses else None
        self._groups = accelerated_groups(settings)
        self._in_fp8 = settings.get("dtype") == FP8
        self._acceleration = Acceleration(self._groups, FP8 if self._in_fp8 else None)
        self._loop = LoopStep(self._paused) if STEP in settings else None
        self._backwards = backwards
        self._known: set[torch.nn.Module] = set()
        self._calls: list[Calls] = []
        self._autocast = ExitStack()
        self._autocast_on = False
        self._compiled = False
        backwards.before.append(self._backward_begins)

    def on_torch_imported(self) -> None:
        if self._settings.get("dtype") == "tf32":
            torch.set_float32_matmul_precision("high")
        elif self._settings.get("dtype") == "float32":
            loop.disable_autocast(self._applied)
        for name, change in _EARLY.items():
            if name in self._settings:
                change(self._applied, partial(self._is_on, name))
        if "batch" in self._settings:
            loop.larger_batches(int(self._settings["batch"]), self._applied)
        if self._settings.get("optimizer") == "foreach":
            self._optimizers.use_foreach()
        elif self._settings.get("optimizer", ACCELERATE) != ACCELERATE:
            self._optimizers.fuse()
        if self._loop is not None:
            self._loop.attach()
        if self._settings.get("checkpoint") == "no":
            loop.disable_checkpointing(self._applied)

    def _is_on(self, name: str) -> bool:
        return name not in self._off

    def switchable(self) -> list[str]:
        """Return the settings that can be taken back, and made again, in this process. A CUDA graph
        has all changes in it, a compiled model the attention."""
        if STEP in self._settings or self._settings.get("compile") == "graphs":
            return []
        names = [name for name in _IN_CALLS if name in self._settings]
        if "compile" in self._settings:
            names = [*(name for name in names if name != "attention"), "compile"]
        if self._optimizers.switchable:
            names.append("optimizer")
        return names

    def switch(self, settings: Mapping[str, str]) -> None:
        """Have only these of the settings."""
        self._off = self._settings.keys() - settings.keys()
        self._optimizers.switch(self._is_on("optimizer"))
        for module, call in self._compiled_calls.items():
            module._compiled_call_impl = call if self._is_on("compile") else None

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
            if self._settings.get("checkpoint") == "blocks":
                self._applied["checkpoint"] += checkpoint_blocks(model)
            if self._groups:
                self._acceleration.apply(model, optimizers)
            if self._attention or {"compile", "dtype", STEP} & self._settings.keys():
                kind = next((p.device.type for p in model.parameters()), "cpu")
                self._calls.append(Calls(model, partial(self._run, kind)))

    def optimizer_stepped(self, optimizer: Any) -> None:
        if self._loop is not None:
            self._loop.optimizer_stepped(optimizer)

    def end_step(self, steps: int) -> None:
        self._leave_autocast()
        settled = []
        if steps >= COMPILED_AFTER:
            settled = [calls for calls in self._calls if calls.settle()]
            all_known = len(settled) == len(self._calls) or steps > COMPILED_AFTER
            if "compile" in self._settings and not self._compiled and all_known:
                for calls in settled:
                    self._compile(calls)
                self._compiled = True
        if self._loop is not None:
            self._loop.end_step([calls.model for calls in settled], self._autocast_dtype())

    def _compile(self, calls: Calls) -> None:
        mode = self._settings["compile"]
        if not (self._attention or {"dtype", STEP} & self._settings.keys()):
            calls.release()
        trainable = [part for part in calls.called if any(True for _ in part.parameters())]
        for module in [calls.model] if mode == "block" else trainable:
            compile_own(module, mode, self._attention)
            self._applied["compile"] += 1
            parts = (part for part in module.modules() if part._compiled_call_impl is not None)
            self._compiled_calls |= {part: part._compiled_call_impl for part in parts}

    def without_effect(self) -> dict[str, str]:
        """Settings that had no effect in the steps so far, with the reason if it is known here."""
        counted = {*_EARLY, "batch", "checkpoint", "compile", "optimizer"} & set(self._settings)
        counted -= set(self._groups)
        if self._settings.get("dtype", "tf32") not in ("tf32", FP8):
            counted.add("dtype")
        missing = {name: "" for name in sorted(counted) if not self._applied[name]}
        if self._attention is not None and not self._attention.substituted:
            missing["attention"] = ""
        if self._groups and (reason := self._acceleration.without_effect()) is not None:
            missing[ACCELERATE] = reason
        if self._loop is not None and (reason := self._loop.without_effect()) is not None:
            missing[STEP] = reason
        return missing

    def _run(self, kind: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run a call of a model with the changes that apply to it."""
        if not torch.is_grad_enabled():
            return call(*arguments, **keywords)
        recomputes = torch._C._current_graph_task_id() != _NO_BACKWARD
        if self._loop is not None and self._loop.active and not recomputes:

            def attending(*arguments: Any, **keywords: Any) -> Any:
                with self._replaced_attention():
                    return call(*arguments, **keywords)

            self._applied["dtype"] += 1
            return self._loop.run(attending, *arguments, **keywords)
        with self._around(kind, recomputes):
            output = call(*arguments, **keywords)
        if self._loop is not None and not recomputes:
            self._loop.called(output)
        return output

    def _autocast_dtype(self) -> torch.dtype | None:
        name = self._settings.get("dtype", "")
        return getattr(torch, name) if name in ("bfloat16", "float16") else None

    @contextmanager
    def _around(self, kind: str, recomputes: bool) -> Iterator[None]:
        """Context of a model call. Autocast stays enabled until the backward, so that it includes
        the loss. While a checkpointed segment is recomputed, a backward is already running."""
        dtype = self._autocast_dtype()
        with ExitStack() as call:
            if recomputes:
                if dtype is not None:
                    call.enter_context(torch.autocast(kind, dtype))
            elif dtype is not None and not self._autocast_on:
                self._autocast_on = True
                self._applied["dtype"] += 1
                self._autocast.enter_context(torch.autocast(kind, dtype))
            call.enter_context(self._replaced_attention())
            yield

    def _replaced_attention(self) -> AbstractContextManager[Any]:
        # The compiled graph has the fused attention.
        compiled = self._compiled and self._is_on("compile")
        off = self._attention is None or compiled or not self._is_on("attention")
        return nullcontext() if off else self._attention  # type: ignore[return-value]

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
