"""Changes applied to a training program at run time, without editing it.

Objects that do not exist yet when torch is imported (optimizers, data loaders) are changed when
they are created. Changes that need the models are applied after the first step, when these are
known; models are compiled after the second, which has shown the masks of their attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from stepscope.acceleration.changes import checkpoint_blocks, compile_own, one_kernel_attention
from stepscope.advisor.trial import loop
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.calls import Calls
from stepscope.advisor.trial.optimizers import fuse_optimizers, use_foreach

_EARLY = {
    "gradients": loop.set_gradients_to_none,
    "data": loop.use_loader_workers,
    "copies": loop.copy_from_pinned_memory,
    "read_back": loop.read_back_delayed,
}
COMPILED_AFTER = 2
"""Steps before compilation; one more if the program calls submodules instead of its model."""

_NO_BACKWARD = -1


class Changes:
    """The changes of one trial. `settings` are those of the advice; see
    `analysis/advice/changes.py`."""

    def __init__(self, settings: Mapping[str, str], backwards: Backwards) -> None:
        self._settings = settings
        self._applied: Counter[str] = Counter()
        self._attention = one_kernel_attention() if "attention" in settings else None
        self._known: set[torch.nn.Module] = set()
        self._calls: list[Calls] = []
        self._autocast = ExitStack()
        self._autocast_on = False
        self._compiled = False
        backwards.before.append(self._leave_autocast)

    def on_torch_imported(self) -> None:
        if self._settings.get("dtype") == "tf32":
            torch.set_float32_matmul_precision("high")
        elif self._settings.get("dtype") == "float32":
            loop.disable_autocast(self._applied)
        for name, change in _EARLY.items():
            if name in self._settings:
                change(self._applied)
        if "batch" in self._settings:
            loop.larger_batches(int(self._settings["batch"]), self._applied)
        if self._settings.get("optimizer") == "foreach":
            use_foreach(self._applied)
        elif "optimizer" in self._settings:
            fuse_optimizers(self._applied)
        if self._settings.get("checkpoint") == "no":
            loop.disable_checkpointing(self._applied)

    def on_models_known(self, models: Sequence[torch.nn.Module]) -> None:
        """Apply the changes that need models; called again when more models are found."""
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
        self._leave_autocast()
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
        mode = self._settings["compile"]
        if not {"attention", "dtype"} & self._settings.keys():
            calls.release()
        trainable = [part for part in calls.called if any(True for _ in part.parameters())]
        for module in [calls.model] if mode == "block" else trainable:
            compile_own(module, mode, self._attention)
            self._applied["compile"] += 1

    def without_effect(self) -> list[str]:
        """Settings that had no effect in the steps so far."""
        counted = {*_EARLY, "batch", "checkpoint", "compile", "optimizer"} & set(self._settings)
        if self._settings.get("dtype", "tf32") != "tf32":
            counted.add("dtype")
        missing = sorted(name for name in counted if not self._applied[name])
        if self._attention is not None and not self._attention.substituted:
            missing.append("attention")
        return missing

    def _autocast_dtype(self) -> torch.dtype | None:
        name = self._settings.get("dtype", "")
        return getattr(torch, name) if name in ("bfloat16", "float16") else None

    @contextmanager
    def _around(self, kind: str) -> Iterator[None]:
        """Context of a model call. Autocast stays enabled until the backward, so that it includes
        the loss. While a checkpointed segment is recomputed, a backward is already running."""
        if not torch.is_grad_enabled():
            yield
            return
        dtype = self._autocast_dtype()
        with ExitStack() as call:
            if torch._C._current_graph_task_id() != _NO_BACKWARD:
                if dtype is not None:
                    call.enter_context(torch.autocast(kind, dtype))
            elif dtype is not None and not self._autocast_on:
                self._autocast_on = True
                self._applied["dtype"] += 1
                self._autocast.enter_context(torch.autocast(kind, dtype))
            if self._attention is not None and not self._compiled:
                call.enter_context(self._attention)
            yield

    def _leave_autocast(self) -> None:
        self._autocast.close()
        self._autocast_on = False
