"""A training step of any model: forward, backward, clipping, update and schedule in one call.

    step = stepscope.TrainStep(model, optimizer, max_grad_norm=1.0, scheduler=scheduler)
    for batch in loader:
        loss = step(batch)

On a GPU the step is replayed as a CUDA graph where that is possible (see
`stepscope.acceleration.capture`); `print(step)` says whether it is, and why not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from stepscope.acceleration.capture import Captured
from stepscope.acceleration.compiled import Compilation, CompiledFunction, compilation_of
from stepscope.acceleration.graphs.arguments import with_tensors
from stepscope.acceleration.graphs.cuda import Backend
from stepscope.acceleration.graphs.groups import in_group
from stepscope.acceleration.graphs.optimizers import control_of
from stepscope.acceleration.losses import called, loss_in, loss_of, scalar, without_cache
from stepscope.acceleration.micro_batches import micro_batches
from stepscope.acceleration.train_step_arguments import Fitted, Lever, Plan, plan_of, require_valid
from stepscope.acceleration.update_in_backward import UpdateInBackward, update_in_backward
from stepscope.errors import UsageError
from stepscope.optim.in_backward import InBackwardAdamW

GRAPH = ("auto", "on", "off")
_SMALL = 4_000_000
"""Elements of a parameter whose update takes a GPU less time than its launch takes Python."""


class TrainStep:
    """A callable training step: `loss = step(batch)`.

    `loss_fn(model, batch)` returns the loss. Without it the model is called with the batch: a
    mapping becomes keyword arguments, a tuple or list positional arguments, a tensor the only
    argument. The loss is then the attribute or key `loss` of its output, the first entry of a
    tuple, or a scalar tensor. Tensors of the batch are moved to the device of the model.

    `accumulate` consecutive calls make one update with their averaged gradients; each returns the
    loss of its own batch. `max_grad_norm` clips the norm of the gradients. `dtype` runs forward and
    loss under autocast; None keeps the caller's autocast. `scheduler.step()` is called after each
    update, without arguments. Parameter groups may be added at any time.

    `graph="auto"` captures what can be captured, "on" raises if something cannot, "off" runs
    eagerly.

    An optimizer that `accelerate` fused updates each parameter during the backward pass, unless
    something needs all gradients at once (clipping, accumulation, a scaler) or
    `update_in_backward=False`. By default it does not in steps without a CUDA graph whose
    parameters are small: one launch for all is faster then. An `InBackwardAdamW` always does, and
    cannot be combined with clipping, accumulation or a scaler.

    `memory="60GiB"` applies the plan of `stepscope.fit` for that budget before the first step, with
    micro-batches and optimizer states in host memory if `allow` has them; `step.fitted` is the
    plan. All batches must have the size of the first one.

    The loss is a new tensor on the device without autograd history. Gradients are None after an
    update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: Any = None,
        dtype: torch.dtype | None = None,
        update_in_backward: bool | Literal["auto"] = "auto",
        graph: Literal["auto", "on", "off"] = "auto",
        warmup: int = 3,
        max_graphs: int = 8,
        pool_bytes: int | None = None,
        backend: Backend | None = None,
        memory: str | int | None = None,
        allow: Collection[Lever] = (),
    ) -> None:
        counts = {"accumulate": accumulate, "warmup": warmup, "max_graphs": max_graphs}
        require_valid(counts, loss_fn, optimizer, max_grad_norm, dtype, scheduler)
        if graph not in GRAPH:
            raise UsageError(f"graph={graph!r} is invalid", f"one of: {', '.join(GRAPH)}")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        needed = _needs_all_gradients(max_grad_norm, accumulate, self._scaler)
        if isinstance(optimizer, InBackwardAdamW) and needed:
            raise UsageError(
                f"{needed[0]} needs all gradients, and InBackwardAdamW frees each in the backward",
                "use FusedAdamW(capturable=True)",
            )
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self._loss_fn, self._max_grad_norm, self._dtype = loss_fn, max_grad_norm, dtype
        self._accumulate, self._graph = int(accumulate), graph
        self._pending = 0
        self._memory, self._allow = memory, allow
        self.fitted: Fitted | None = None
        """The plan for `memory`, from the first step on."""
        self._wants_in_backward = update_in_backward
        self._create_captured = partial(
            Captured,
            self._run,
            warmup=warmup,
            max_graphs=max_graphs,
            pool_bytes=pool_bytes,
            modules=[model],
            parameters=lambda: self._parameters,
            required=graph == "on",
            in_groups=graph == "on",
            on_failure=self._forget_scaling,
            backend=backend,
        )
        self._has_backend = backend is not None
        self._plan: Plan | None = None
        self._in_backward: InBackwardAdamW | None = None
        self._eager_update: str | None = None
        self._captured: Captured | None = None
        self._compilation: Compilation | None = None
        self._compiled: CompiledFunction | None = None
        self._form: tuple[str, bool] = ("", graph != "off")
        self._plan_update()

    @property
    def _parameters(self) -> list[Tensor]:
        """Parameters of the optimizer, which may have been added after the first step."""
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def _plan_update(self) -> None:
        """Decide where parameters are updated: again if the optimizer has other groups or hooks, or
        if its update was fused or restored."""
        previous, self._plan = self._plan, plan_of(self.optimizer)
        if previous == self._plan:
            return
        found = self._optimizer_in_backward(self._wants_in_backward is not False)
        in_backward = None if isinstance(found, str) else found
        self._after_backward = found if isinstance(found, str) else ""
        eager_update = self._why_eager_update()
        same_optimizer = previous is not None and previous.init_group == self._plan.init_group
        same_update = in_backward is self._in_backward and eager_update == self._eager_update
        if same_optimizer and same_update:
            # The graphs notice changes of the groups.
            return
        self._in_backward, self._eager_update = in_backward, eager_update
        self._begin_capture()

    def _begin_capture(self) -> None:
        """Drop all graphs; the next steps are warm-up again."""
        update, eager = self._in_backward or self.optimizer, self._eager_update is not None
        # An update outside of the graph may change its constants.
        captured = self._create_captured(optimizer=[] if eager else update, written_between=eager)
        if self._captured is not None:
            captured.statistics = self._captured.statistics
            self._captured.leave_stream()
        self._captured = captured

    def __call__(self, batch: Any) -> Tensor:
        """Run one batch; every `accumulate` batches, update the parameters."""
        batch = self._on_device(batch)
        if self._memory is not None and self.fitted is None:
            self._fit(batch, self._memory)
        parts = 1 if self.fitted is None else self.fitted.plan.micro_batches
        if parts == 1:
            return self._run_batch(batch)
        return torch.stack([self._run_batch(one) for one in micro_batches(batch, parts)]).mean()

    def _fit(self, batch: Any, budget: str | int) -> None:
        """Make the step fit into its budget."""
        # Planning is built on this package.
        fit = importlib.import_module("stepscope.planning.fit").fit
        self.fitted = fit(
            self.model, self.optimizer, batch, budget=budget, loss_fn=self._loss_fn,
            dtype=self._dtype, max_grad_norm=self._max_grad_norm, allow=self._allow,
        )  # fmt: skip
        plan = self.fitted.plan
        if plan.uses_host_memory:
            if self._graph == "on":
                self.fitted.undo()
                raise UsageError(
                    "the plan has copies in host memory, which no CUDA graph can have",
                    'use graph="auto" or a larger budget',
                )
            self._graph = "off"
            self._form = "", False
        self._accumulate *= plan.micro_batches
        # The update may follow the backward pass now.
        self._plan = None

    def _run_batch(self, batch: Any) -> Tensor:
        self._plan_update()
        self._choose_form(batch)
        if isinstance(self._in_backward, UpdateInBackward):
            self._in_backward.link()
        self._pending += 1
        last = self._pending == self._accumulate
        try:
            kind, graph = self._form
            run = self.captured if graph else self._run
            loss: Tensor = run(batch, last and self._eager_update is None, kind)
            if last and self._eager_update is not None:
                self._update(self._in_backward)
        except BaseException:
            self._abandon()
            raise
        if last:
            self._pending = 0
            # Schedulers look for this mark of `optimizer.step()`.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            if self.scheduler is not None:
                self.scheduler.step()
        return loss.detach()

    def _choose_form(self, batch: Any) -> None:
        """Choose how the step runs, if the model was accelerated with `compile`."""
        compilation = compilation_of(self.model)
        if compilation is not self._compilation:
            self._compilation, self._compiled = compilation, None
            if compilation is not None:
                capturable = self._has_backend or compilation.device.type == "cuda"
                both = self._graph == "auto" and capturable and not in_group()
                graphs = (True, False) if both else (self._graph == "on",)
                self._compiled = compilation.function(self._loss_of, graphs)
        kind, graph = "", self._graph != "off"
        if self._compiled is not None and self._pending:
            kind, graph = self._form
        elif self._compiled is not None:
            with self._autocast():
                graph &= self._compiled.begin(batch)
            kind = self._compiled.kind
        if (kind, graph) != self._form:
            # The graph of another form would keep its memory.
            self._form = kind, graph
            self._begin_capture()

    @property
    def pending(self) -> int:
        """Batches whose gradients wait for the next update."""
        return self._pending

    def explain(self) -> str:
        """Say whether the step is captured and where parameters are updated, and why not in the
        graph or in the backward pass."""
        eager = 'eager: graph="off"' if self._graph == "off" else "eager: it was as fast"
        parts = [self.captured.explain() if self._form[1] else eager]
        if self._compiled is not None:
            parts.append(f"the model and its loss: {self._compiled}")
        why = self._after_backward
        if not why and self._present_in_backward() is None:
            why = "without a CUDA graph one launch for all is faster"
        if why:
            parts.append(f"the update follows the backward pass: {why}")
        else:
            parts.append("parameters are updated in the backward pass")
        if self._eager_update is not None and self._graph != "off":
            parts.append(f"the update runs eagerly: {self._eager_update}")
        if self.fitted is not None:
            parts.append(str(self.fitted))
        return "; ".join(parts)

    __str__ = explain

    @property
    def captured(self) -> Captured:
        """The captured function, with its statistics and reasons."""
        assert self._captured is not None
        return self._captured

    def _why_eager_update(self) -> str | None:
        """Return why the update cannot be part of a graph; None if it can."""
        supports_scaling = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        name = type(self.optimizer).__name__
        if self._scaler is not None and not supports_scaling:
            return f"{name} takes no grad_scale and found_inf, so the scaler reads back overflows"
        if not control_of(self.optimizer).changeable:
            return f"the learning rate of {name} would be constant in a graph"
        return None

    def _run(self, batch: Any, update: bool, kind: str) -> Tensor:
        """Run forward and backward, and the update if this is the last batch of one. `kind` is the
        form of the step: each has its own graph."""
        del kind
        with self._autocast():
            loss = self._loss(batch)
        scaled = loss if self._accumulate == 1 else loss / self._accumulate
        if self._scaler is not None:
            scaled = self._scaler.scale(scaled)
        # The caller's autocast is for the forward: a backward has the dtypes of its forward.
        in_backward = self._present_in_backward()
        attached = in_backward is not None and not in_backward.attaches
        updates = in_backward.attached() if in_backward is not None and attached else nullcontext()
        with updates, torch.autocast(self._device().type, enabled=False):
            scaled.backward()  # type: ignore[no-untyped-call]
            if update:
                self._update(in_backward)
        return loss.detach()

    def _present_in_backward(self) -> InBackwardAdamW | None:
        """Return what updates during the backward pass of this step. If no graph replays the
        launches, one launch for all small parameters is faster than one for each."""
        found = self._in_backward
        if self._wants_in_backward is True or not isinstance(found, UpdateInBackward):
            return found
        return None if self._is_eager() and self._has_small_parameters() else found

    def _is_eager(self) -> bool:
        """Return whether steps run without a CUDA graph, and not only until it is captured."""
        return not self._form[1] or (not self.captured.graphs and bool(self.captured.reasons))

    def _has_small_parameters(self) -> bool:
        parameters = self._parameters
        return sum(one.numel() for one in parameters) < _SMALL * len(parameters)

    def _update(self, in_backward: InBackwardAdamW | None = None) -> None:
        if self._max_grad_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        if self._scaler is None:
            (in_backward or self.optimizer).step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        # An autocast of the caller that lasts over several steps would keep the old weights.
        torch.clear_autocast_cache()

    def _loss(self, batch: Any) -> Tensor:
        if self._compilation is not None and self._compiled is not None:
            with self._compilation.autocast(), without_cache(self.model):
                return scalar(self._compiled(batch), "the loss function")
        if self._loss_fn is not None:
            return scalar(self._loss_fn(self.model, batch), "loss_fn")
        return loss_of(self.model, batch)

    def _loss_of(self, batch: Any) -> Any:
        """Compute the loss: what is compiled together with the model."""
        if self._loss_fn is not None:
            return self._loss_fn(self.model, batch)
        return loss_in(called(self.model, batch))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device().type, self._dtype)

    def _optimizer_in_backward(self, wanted: bool) -> InBackwardAdamW | str:
        """Return what updates during the backward pass, or why the update follows it."""
        if isinstance(self.optimizer, InBackwardAdamW):
            return self.optimizer
        if not wanted:
            return "update_in_backward=False"
        needed = _needs_all_gradients(self._max_grad_norm, self._accumulate, self._scaler)
        if needed:
            return f"{' and '.join(needed)} need{'s' * (len(needed) == 1)} all gradients"
        return update_in_backward(self.optimizer)

    def _device(self) -> torch.device:
        return next((one.device for one in self._parameters), torch.device("cpu"))

    def _on_device(self, batch: Any) -> Any:
        device = self._device()
        return with_tensors(
            batch, lambda one: one if one.device == device else one.to(device, non_blocking=True)
        )

    def _abandon(self) -> None:
        """Drop the gradients of an update that raised: the next call begins a new one."""
        self._pending = 0
        self.optimizer.zero_grad(set_to_none=True)
        self._forget_scaling()

    def _forget_scaling(self) -> None:
        """Let the scaler begin a new step: the last one did not reach its `update()`."""
        states = getattr(self._scaler, "_per_optimizer_states", None)
        if states is not None:
            states.clear()


def _needs_all_gradients(max_grad_norm: float | None, accumulate: int, scaler: Any) -> list[str]:
    """Return the options that are set and need all gradients of an update at once."""
    options = {
        "max_grad_norm": max_grad_norm is not None,
        "accumulate": accumulate > 1,
        "scaler": scaler is not None,
    }
    return [name for name, given in options.items() if given]
