"""Record evidence of what a script trains, in its process.

The script runs as usual but for three things: two steps run eagerly while their operators are
counted, the weights are set to given ones before each probe, and the random numbers are seeded.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from stepscope.advisor.judge.evidence import (
    COUNTED_AFTER,
    EVIDENCE,
    GIVEN,
    GRADIENTS,
    PROBED_AFTER,
    PROBES,
    SAMPLED_UP_TO,
    WEIGHTS,
    Evidence,
    Parameter,
    Samples,
)
from stepscope.advisor.scope.loading import batches_taken
from stepscope.advisor.trial.backwards import Backwards
from stepscope.advisor.trial.following import NO_BACKWARD, ModelFollower
from stepscope.measure.dispatch import Observer
from stepscope.measure.flops import FlopCount

_SEED = 1000
_MOST = 1 << 20
"""Entries of a gradient that are compared, evenly spaced over it."""
_PROJECTIONS = 3
_SCHEDULE = Path("/proc/thread-self/schedstat")


class CountingAll(Observer):  # type: ignore[no-untyped-call]
    """Counts FLOPs; attention with a causal mask counts in full, as its naive form does."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = FlopCount(full=True)

    def after(
        self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        self.counted.add(function, arguments, keywords, result)


class EvidenceObserver(ModelFollower):
    """Observes the steps of a script until there are enough of them."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__()
        self._folder, self._most = folder, steps
        self._backwards = Backwards()
        self._inputs: list[list[torch.Tensor]] = []
        self._samples: dict[int, Samples] = {}
        self._counting: CountingAll | None = None
        self._flops: float | None = None
        self._dtype = ""
        self._replays = 0
        self._weights: dict[str, torch.Tensor] = {}
        self._unlike = ""
        self._gradients: dict[str, np.ndarray[Any, Any]] = {}
        self._caught: dict[int, torch.Tensor] = {}
        self._noise: list[float] = []
        self._losses: list[float | None] = []
        self._blocked: list[float] = []
        self._since: tuple[float, float] | None = None
        self._loading = 0.0
        self._inside = False

    def attach(self) -> None:
        self._backwards.attach()
        self.follow()
        self._watched = batches_taken(self._while_loading)
        self._watched.__enter__()
        self._run_steps_eagerly()
        replay = torch.cuda.CUDAGraph.replay

        def replayed(graph: Any) -> None:
            self._replays += self._counting is not None
            replay(graph)

        torch.cuda.CUDAGraph.replay = replayed  # type: ignore[method-assign, assignment]

    def _run_steps_eagerly(self) -> None:
        """Let a `TrainStep` of the program run eagerly: operators of a graph cannot be seen."""
        from stepscope.acceleration.train_step import TrainStep

        plain = TrainStep.__init__

        def init(step: Any, *arguments: Any, **keywords: Any) -> None:
            plain(step, *arguments, **keywords | {"graph": "off", "update_in_backward": False})

        TrainStep.__init__ = init  # type: ignore[method-assign, assignment]

    # Events.

    @property
    def _is_own(self) -> bool:
        """Whether an event is one of the program: not of a child, nor of a probe."""
        return super()._is_own and not self._inside

    def on_optimizer(self, optimizer: Any) -> None:
        self._catch(optimizer)

    def on_optimizer_stepped(self, optimizer: Any) -> None:
        self._catch(optimizer)

    def _catch(self, optimizer: Any) -> None:
        """Keep the gradients that an optimizer updates with, in a probe. Those of a closure are
        there after its step."""
        if self._is_probe:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and id(parameter) not in self._caught:
                        self._caught[id(parameter)] = parameter.grad.detach().clone()

    @property
    def _is_probe(self) -> bool:
        return PROBED_AFTER <= self._steps < PROBED_AFTER + PROBES

    def on_call(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() != NO_BACKWARD
        if not torch.is_grad_enabled() or in_backward or self._inside:
            return call(*arguments, **keywords)
        if self._steps < SAMPLED_UP_TO:
            leaves = tree_leaves((arguments, keywords))
            tensors = [one.detach() for one in leaves if isinstance(one, torch.Tensor)]
            # Cloned: a program may fill the same buffer again.
            self._inputs.append([one.clone() for one in tensors if one.dim()])
        if self._is_probe and not self._caught:
            self._measure_noise(call, arguments, keywords)
        return call(*arguments, **keywords)

    # The end of a step.

    def on_step(self) -> None:
        self._backwards.end_step()
        self._inside = True
        try:
            self._handle_step()
        finally:
            self._inside = False
        self._begin_clock()
        if self._steps >= self._most:
            self._exit()

    def _handle_step(self) -> None:
        self._end_clock()
        losses = self._backwards.take()
        is_new = self._steps <= COUNTED_AFTER and self._find_models()
        if not is_new and self._steps <= PROBED_AFTER:
            for calls in self._calls:
                calls.settle()
        if self._steps > 1 and self._inputs:
            self._samples[self._steps] = samples_of(self._inputs)
        self._inputs.clear()
        if PROBED_AFTER < self._steps <= PROBED_AFTER + PROBES:
            self._losses += losses[-1:]
            self._end_probe()
        if self._steps == COUNTED_AFTER:
            self._begin_counting()
        elif self._steps == PROBED_AFTER:
            self._end_counting()
            self._take_weights()
        if self._is_probe:
            self._set_weights()
            torch.manual_seed(_SEED + self._steps)

    def _begin_counting(self) -> None:
        torch.compiler.set_stance("force_eager")
        # Fused kernels would hide their matmuls: their naive forms run.
        launch = vars(sys.modules["stepscope.kernels.launch"])
        self._has_triton, launch["HAS_TRITON"] = launch["HAS_TRITON"], False
        self._counting = CountingAll()
        self._counting.__enter__()  # type: ignore[no-untyped-call]

    def _end_counting(self) -> None:
        assert self._counting is not None
        self._counting.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        vars(sys.modules["stepscope.kernels.launch"])["HAS_TRITON"] = self._has_triton
        torch.compiler.set_stance("default")
        counted = self._counting.counted
        self._flops = counted.total / (PROBED_AFTER - COUNTED_AFTER)
        self._dtype = counted.main_format()
        self._counting = None

    # Probes: gradients and updates with given weights.

    def _named(self) -> dict[str, torch.Tensor]:
        """Parameters of the models, by names that wrappers do not change."""
        named: dict[str, torch.Tensor] = {}
        for number, model in enumerate(self._models):
            for name, parameter in model.named_parameters():
                parts = [part for part in name.split(".") if part not in ("_orig_mod", "module")]
                named[".".join([str(number), *parts])] = parameter
        return named or {f"{i}": p for i, p in enumerate(self._finder.parameters)}

    def _take_weights(self) -> None:
        given, own = self._folder / GIVEN, self._named()
        if not given.exists():
            self._weights = {name: p.detach().clone().cpu() for name, p in own.items()}
            torch.save(self._weights, self._folder / WEIGHTS)
            return
        weights = torch.load(given, weights_only=True)
        shapes = [[tuple(one.shape) for one in each.values()] for each in (weights, own)]
        if weights.keys() == own.keys() and all(weights[n].shape == own[n].shape for n in own):
            self._weights = weights
        elif shapes[0] == shapes[1]:
            # Other names in the same order.
            self._weights = dict(zip(own, weights.values(), strict=True))
        else:
            self._unlike = "parameters"

    def _set_weights(self) -> None:
        with torch.no_grad():
            for name, parameter in self._named().items():
                if name in self._weights:
                    parameter.copy_(self._weights[name])

    def _end_probe(self) -> None:
        probe = self._steps - PROBED_AFTER
        for index, (name, parameter) in enumerate(self._named().items()):
            gradient = self._caught.get(id(parameter), parameter.grad)
            if gradient is not None:
                self._gradients[f"gradient.{probe}.{index}"] = _sampled(gradient)
            if name in self._weights:
                moved = parameter.detach().float().cpu() - self._weights[name].float()
                self._gradients[f"update.{probe}.{index}"] = moved.norm().numpy()
        self._caught.clear()

    def _measure_noise(
        self, call: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Differentiate the model's outputs under two seeds, and without dropout."""
        module: Any = getattr(call, "args", (None,))[0]
        training = [part for part in module.modules() if part.training]
        devices = list({p.device.index or 0 for p in self._finder.parameters if p.is_cuda})

        def gradients(seed: int) -> list[torch.Tensor]:
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed)
                output = call(*arguments, **keywords)
            return _gradients_of(output, list(self._named().values()))

        self._inside = True
        try:
            one, other = gradients(1), gradients(2)
            apart, size = (
                math.sqrt(sum(float(g.square().sum()) for g in each))
                for each in ([a - b for a, b in zip(one, other, strict=True)], one)
            )
            self._noise.append(apart / size if size else 0.0)
            for part in training:
                part.training = False
            probe = self._steps - PROBED_AFTER + 1
            for index, gradient in enumerate(gradients(1)):
                self._gradients[f"quiet.{probe}.{index}"] = _sampled(gradient)
        except (RuntimeError, TypeError, ValueError):
            # An output that cannot be differentiated twice; the gradients are compared anyway.
            return
        finally:
            for part in training:
                part.training = True
            self._inside = False

    # Waits.

    def _while_loading(self, _loader: Any) -> Any:
        return _Loading(self)

    def add_loading(self, blocked_s: float) -> None:
        self._loading += blocked_s

    def _begin_clock(self) -> None:
        self._loading = 0.0
        if self._steps > PROBED_AFTER + PROBES:
            self._since = clock()

    def _end_clock(self) -> None:
        now = clock()
        if self._since is not None and now is not None:
            blocked = blocked_s(self._since, now) - self._loading
            self._blocked.append(1e3 * max(0.0, blocked))
        self._since = None

    def write(self) -> None:
        """Write the evidence; called at the end of the script at the latest."""
        if os.getpid() != self._pid:
            return
        ended = self._steps < self._most
        np.savez(self._folder / GRADIENTS, **self._gradients)  # type: ignore[arg-type]
        evidence = Evidence(
            steps=self._steps,
            ended=ended,
            samples=self._samples,
            flops=self._flops,
            dtype=self._dtype,
            replays=self._replays > 0,
            parameters=[
                Parameter(name, list(p.shape), str(p.dtype).removeprefix("torch."))
                for name, p in self._named().items()
            ],
            unlike=self._unlike,
            noise=float(np.median(self._noise)) if self._noise else None,
            blocked_ms=float(np.median(self._blocked)) if self._blocked else None,
            losses=self._losses,
        )
        (self._folder / EVIDENCE).write_bytes(msgspec.json.encode(evidence))


class _Loading:
    """The time in which the loop is blocked by its loader."""

    def __init__(self, observer: EvidenceObserver) -> None:
        self._observer = observer

    def __enter__(self) -> None:
        self._since = clock()

    def __exit__(self, *_: object) -> None:
        now = clock()
        if self._since is not None and now is not None:
            self._observer.add_loading(blocked_s(self._since, now))


def clock() -> tuple[float, float] | None:
    """Seconds, and those of them in which this thread ran or waited for a processor."""
    try:
        running, waiting, _ = _SCHEDULE.read_text().split()
    except (OSError, ValueError):
        return None
    return time.monotonic(), 1e-9 * (int(running) + int(waiting))


def blocked_s(since: tuple[float, float], now: tuple[float, float]) -> float:
    return (now[0] - since[0]) - (now[1] - since[1])


def _gradients_of(output: Any, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    total: Any = 0.0
    for leaf in tree_leaves(dict(output) if hasattr(output, "items") else output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weights = torch.randn(leaf.shape, generator=source).to(leaf)
            total = total + (leaf * weights).sum()
    wanted = [one for one in parameters if one.requires_grad]
    found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
    each = ((one, next(found) if one.requires_grad else None) for one in parameters)
    return [torch.zeros_like(p).float() if g is None else g.float() for p, g in each]


def _sampled(gradient: torch.Tensor) -> np.ndarray[Any, Any]:
    entries = gradient.detach().float().flatten()
    sampled: np.ndarray[Any, Any] = entries[:: max(1, -(-entries.numel() // _MOST))].cpu().numpy()
    return sampled


def samples_of(calls: Sequence[Sequence[torch.Tensor]]) -> Samples:
    """Fingerprints of the samples of some calls: rows of all tensors along the first dimension."""
    exact: list[int] = []
    floats: list[torch.Tensor] = []
    elements = 0
    for tensors in calls:
        count = max((len(one) for one in tensors[:1]), default=0)
        hashes = torch.zeros(count, dtype=torch.int64)
        projected = torch.zeros(count, _PROJECTIONS, dtype=torch.float64)
        for tensor in (one for one in tensors if len(one) == count):
            rows = tensor.reshape(count, -1).cpu()
            elements += rows.numel()
            source = torch.Generator().manual_seed(rows.shape[1])
            if rows.is_floating_point():
                signs = torch.randn(rows.shape[1], _PROJECTIONS, generator=source).double()
                projected += rows.double() @ signs / math.sqrt(max(1, rows.shape[1]))
            elif not rows.is_complex():
                keys = torch.randint(1 << 62, (rows.shape[1],), generator=source)
                mixed = ((rows.long() + 1) * keys).sum(1)
                hashes += (mixed ^ (mixed >> 31)) * 0x5851F42D4C957F2D
        exact += hashes.tolist()
        floats.append(projected)
    columns = torch.cat(floats).T.sort(dim=1).values.tolist() if floats else []
    return Samples(len(exact), elements, sorted(exact), columns)
