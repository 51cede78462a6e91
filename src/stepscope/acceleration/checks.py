"""Compares what was compiled with the original: outputs, and gradients of regions (`comparison`).

The reference is the original in float32 without autocast. What replaces it passes if its error is
at most `ERROR_RATIO` times the error of the original in the dtypes of the call, which is the error
policy of the kernels. A gradient that is zero but for rounding, such as that of a key's bias, has
no relative error: its error may be that of any gradient of the original. The reference runs only
if the two differ by more than any reference accepts, or than the error of the original that it has
shown for a region of the same kind: in float32 it takes several times as long as both of them.
What the model changes is restored after each run (`preserved`), and nothing of it is seen by the
activation checkpointing, offloading or counting that the caller's forward runs under.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from stepscope.acceleration.preserved import Preserved

ERROR_RATIO = 2.0
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error that is always accepted, by the narrowest dtype of the call."""
_NUMBER = 1e-4
"""Relative error that is accepted of a single float32 number that comes from 16-bit ones, such as a
loss: there the errors of the original cancel more or less by chance."""
_ZERO = 16 * torch.finfo(torch.float32).eps
"""Norm of a tensor in float32, relative to that of the largest, which is that of rounding."""

_MAX_KNOWN_ERROR = 0.05
"""A larger relative error is not assumed for other layers: the gradient may have been zero."""

Forward = Callable[..., Any]


class Run(NamedTuple):
    """The tensors of an output, and the gradients of inputs and parameters (None: no gradient)."""

    structure: str
    outputs: list[Tensor]
    gradients: list[Tensor | None]

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*self.outputs, *self.gradients]


def difference(
    module: nn.Module,
    original: Forward,
    replaced: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tolerance: float = 0.0,
) -> str:
    """Return how the outputs of another forward differ from those of the original; empty if they
    do not. `tolerance` is a relative error that is accepted in any case."""
    preserved = Preserved(module, args, kwargs)
    takes_hooks = True
    try:
        with preserved.run(), saved_tensors_hooks(_drop, _needed):
            expected = _run(original, args, kwargs)
    except torch.OutOfMemoryError:
        raise
    except _ComputesGradientsError:
        return "its forward computes gradients, and compiled code has no second derivatives"
    except Exception:
        # Transforms of torch.func take no hooks.
        takes_hooks = False
        with preserved.run(apart=False):
            expected = _run(original, args, kwargs)
    try:
        with preserved.run(apart=takes_hooks):
            actual = _run(replaced, args, kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Dynamo has that of a backend within another one.
        cause = getattr(error, "inner_exception", error)
        return f"it raises {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    if actual.structure != expected.structure:
        return f"it returns {actual.structure} instead of {expected.structure}"

    def reference() -> Run:
        dropped = saved_tensors_hooks(_drop, _needed) if takes_hooks else nullcontext()
        with preserved.run(apart=takes_hooks), dropped:
            return _reference(module, original, args, kwargs)

    return differs(expected, actual, reference, {}, None, tolerance)


def _drop(saved: Any) -> Any:
    """Save nothing for a backward pass, which does not come. Without gradients, dropout would draw
    other numbers."""
    del saved


class _ComputesGradientsError(Exception):
    """A backward pass ran within a forward."""


def _needed(_: Any) -> Any:
    raise _ComputesGradientsError


def differs(
    expected: Run,
    actual: Run,
    in_float32: Callable[[], Run],
    errors: dict[Any, list[float]],
    kind: Any,
    tolerance: float = 0.0,
) -> str:
    """Return how two runs differ; `errors` has those of the original by kind, and is updated."""
    if _agree(actual, expected, tolerance, errors.get(kind)):
        return ""
    try:
        reference = in_float32()
    except (torch.OutOfMemoryError, RuntimeError, TypeError):
        # Not every module runs in float32; the original in its own dtype is the reference then.
        reference = expected
    why = _compare(
        "outputs", actual.outputs, expected.outputs, reference.outputs, tolerance
    ) or _compare("gradients", actual.gradients, expected.gradients, reference.gradients, tolerance)
    if not why:
        errors[kind] = _errors(expected, reference)
    return why


def _errors(run: Run, reference: Run) -> list[float]:
    """Return the relative errors of the tensors of a run; 0 where they are not to be assumed."""
    pairs = zip(run.tensors, reference.tensors, strict=True)
    errors = (
        0.0 if x is None or exact is None or not x.is_floating_point() else _relative(x, exact)
        for x, exact in pairs
    )
    return [error if error <= _MAX_KNOWN_ERROR else 0.0 for error in errors]


def _agree(actual: Run, expected: Run, tolerance: float, errors: list[float] | None) -> bool:
    """Return whether `_compare` accepts the tensors whatever the reference is: with a distance of
    at most bound · |old|, the triangle inequality gives |new - exact| <= 2 |old - exact| + bound ·
    |exact|. The same follows for a distance of at most |old - exact| more, for which `errors` has
    the relative errors of a layer of the same kind."""
    if len(actual.outputs) != len(expected.outputs):
        return False
    known = [0.0] * len(expected.tensors) if errors is None else errors
    narrowest = {
        id(x): _narrowest(tensors)
        for tensors in (expected.outputs, expected.gradients)
        for x in tensors
        if x is not None
    }
    for new, old, error in zip(actual.tensors, expected.tensors, known, strict=True):
        if new is None or old is None:
            if new is not old:
                return False
        elif new.shape != old.shape or new.is_floating_point() != old.is_floating_point():
            return False
        elif not old.is_floating_point():
            if not torch.equal(new, old):
                return False
        elif not _relative(new, old) <= error + _bound(new, old, narrowest[id(old)], tolerance):
            return False
    return True


def _bound(new: Tensor, old: Tensor, narrowest: torch.dtype, tolerance: float) -> float:
    """Return the relative error that is accepted in any case. Gradients of float32 parameters were
    computed from inputs in the dtype of the call, the `narrowest`."""
    is_number = new.numel() == 1 and torch.is_autocast_enabled(new.device.type)
    return max(
        tolerance,
        _NUMBER if is_number else 0.0,
        *(_ROUNDING.get(dtype, 1e-5) for dtype in (new.dtype, old.dtype, narrowest)),
    )


def _compare(
    kind: str,
    actual: list[Any],
    expected: list[Any],
    reference: list[Any],
    tolerance: float,
) -> str:
    pairs = [
        (old, exact)
        for old, exact in zip(expected, reference, strict=True)
        if old is not None and exact is not None and exact.is_floating_point()
    ]
    errors = (_distance(old, exact) for old, exact in pairs)
    norms = (_norm(exact) for _, exact in pairs)
    largest_error, largest = (max(filter(math.isfinite, x), default=0.0) for x in (errors, norms))
    for index, (new, old, exact) in enumerate(zip(actual, expected, reference, strict=True)):
        if (new is None) != (old is None):
            return f"the {kind} differ: {index} is None in one of them"
        if new is None:
            continue
        if new.shape != old.shape:
            return f"the {kind} differ in shape: {tuple(new.shape)}, {tuple(old.shape)}"
        if not new.is_floating_point():
            if not torch.equal(new, old):
                return f"the {kind} differ"
            continue
        error, allowed = _relative(new, exact), _relative(old, exact)
        bound = _bound(new, old, old.dtype if exact is old else _narrowest(expected), tolerance)
        is_zero = _norm(exact) <= _ZERO * largest
        if is_zero and _distance(new, exact) <= ERROR_RATIO * largest_error + bound * largest:
            continue
        if not error <= ERROR_RATIO * allowed + bound:
            return f"the {kind} differ: relative error {error:.2g}, the original has {allowed:.2g}"
    return ""


def _narrowest(tensors: list[Any]) -> torch.dtype:
    dtypes = [t.dtype for t in tensors if t is not None and t.is_floating_point()]
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _distance(value: Tensor, exact: Tensor) -> float:
    """Return the distance of two tensors: equal infinities, as in masks, are none."""
    difference = value.double() - exact.double()
    return float(difference.masked_fill(value == exact, 0.0).norm())


def _norm(exact: Tensor) -> float:
    """Return the norm of the values that are not infinite."""
    return float(exact.double().masked_fill(exact.isinf(), 0.0).norm())


def _relative(value: Tensor, exact: Tensor) -> float:
    return _distance(value, exact) / max(_norm(exact), 1e-30)


def _run(forward: Forward, args: Any, kwargs: Any) -> Run:
    """Run a forward on detached inputs."""
    leaves, tree = tree_flatten((args, kwargs))
    args, kwargs = tree_unflatten(_inputs(leaves), tree)
    return _outputs(forward(*args, **kwargs))


def _reference(module: nn.Module, original: Forward, args: Any, kwargs: Any) -> Run:
    """Run the original in float32, without autocast."""
    leaves, tree = tree_flatten((args, kwargs))
    inputs = _inputs(leaves, torch.float32)
    args, kwargs = tree_unflatten(inputs, tree)
    tensors = {
        name: _detached(tensor, torch.float32, tensor.requires_grad)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    kind = next((t.device.type for t in tree_leaves(inputs) if isinstance(t, Tensor)), "cpu")
    # The forward alone: hooks of the module would run once more.
    with _reparametrize_module(module, tensors), torch.autocast(kind, enabled=False):
        return _outputs(original(*args, **kwargs))


def _outputs(output: Any) -> Run:
    structure = str(tree_map(lambda leaf: type(leaf).__name__, output))
    return Run(structure, [x.detach() for x in _tensors(output)], [])


def fixed_gradients(outputs: Sequence[Any], wanted: Sequence[Tensor]) -> Run:
    """Return the tensors among the outputs, and their gradients for fixed random ones of theirs."""
    tensors = [x for x in outputs if isinstance(x, Tensor)]
    differentiable = [x for x in tensors if x.requires_grad]
    gradients: list[Tensor | None] = [None] * len(wanted)
    if differentiable and wanted:
        upstream = [_upstream(leaf, index) for index, leaf in enumerate(differentiable)]
        gradients = list(torch.autograd.grad(differentiable, wanted, upstream, allow_unused=True))
    return Run("", [x.detach() for x in tensors], gradients)


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, also of plain data classes."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _upstream(output: Tensor, index: int) -> Tensor:
    """Return a fixed random gradient for an output."""
    generator = torch.Generator(output.device).manual_seed(index)
    sample = torch.randn(output.shape, device=output.device, generator=generator)
    return sample.to(output.dtype)


def _inputs(leaves: list[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Detach each argument; one that is given several times stays one tensor."""
    copies = {id(leaf): _detached(leaf, dtype) for leaf in leaves}
    return [copies[id(leaf)] for leaf in leaves]


def _detached(leaf: Any, dtype: torch.dtype | None = None, grad: bool | None = None) -> Any:
    if hasattr(leaf, "get_seq_length"):
        # A cache of keys and values: a run would fill it. In training it is empty.
        return None
    if not isinstance(leaf, Tensor):
        return leaf
    copy = leaf.detach()
    if leaf.is_floating_point():
        copy = copy.to(dtype or leaf.dtype, copy=True)
        copy.requires_grad_(leaf.requires_grad if grad is None else grad)
    if not was_written(leaf):
        # A mask carries its rules as an attribute.
        vars(copy).update(vars(leaf))
    return copy


def was_written(x: Tensor) -> bool:
    """Return whether a tensor may have been modified in place since it was created."""
    return x.is_inference() or x._version > 0
