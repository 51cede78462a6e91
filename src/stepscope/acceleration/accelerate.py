"""`stepscope.accelerate`: compiles a model with our passes, and fuses its optimizer, in place."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepscope.acceleration.backend import PASSES
from stepscope.acceleration.compiled import Compilation
from stepscope.acceleration.forward_registry import add_layer, forward_below
from stepscope.acceleration.left import Left
from stepscope.acceleration.report import FP8, Report
from stepscope.acceleration.sharded.fp8_gathers import gather_in_fp8
from stepscope.acceleration.sharded.functions import ShardedFunctions
from stepscope.acceleration.sharded.units import has_units, why_not_compiled
from stepscope.attention.compiled import missing_compiler
from stepscope.errors import UsageError
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.fp8.recipe import Recipe, unavailable
from stepscope.kernels.fp8.traced import unsupported
from stepscope.kernels.weight_copies import WeightCopies

_DTYPES = (torch.bfloat16, torch.float16)
_SHARDED = (
    ("stepscope.parallel.fsdp", "FSDP"),
    ("stepscope.parallel.sharded_module", "Unit"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)
"""Classes of sharded modules, or of the owners of their hooks: their parameters are parts of the
weights outside of a forward."""
_WHEN_SHARDED = "its parameters are sharded, and not by fully_shard"
_ON_CPU = "on a CPU it is compiled on request only (compile=True)"
_FULL_WEIGHTS = "FP8 layers cast full weights once per step"
_ACCELERATED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def accelerate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    sample: Any = None,
    dtype: torch.dtype | Recipe | str | None = None,
    exclude: Iterable[str | type[nn.Module]] = (),
    compile: bool | Mapping[str, Any] | Literal["auto"] = "auto",
) -> Report:
    """Compile a model with fused kernels of ours, in place, and return a report of the changes.

        report = stepscope.accelerate(model, optimizer)
        print(report)
        ...
        report.undo()

    Training calls run through the graph backend, in the fastest form that the first steps show,
    which may be the model as it is. Parameters keep their names and `state_dict` its keys. What is
    compiled is compared with the original, outputs and gradients, in the first training call, or
    immediately on `sample` (what the model is called with: a mapping of keyword arguments, a tuple,
    or a tensor). A pass that differs is taken out and listed in `report.left`. `exclude` lists what
    stays as it is: names of modules, patterns of names (`"*.mlp"`) and classes, which run
    uncompiled, or passes as `report` names them (`"head and loss"`).

    With an `optimizer` (AdamW or Adam), its update becomes one fused kernel; the optimizer, its
    `param_groups` and its state remain the same objects. `dtype` runs the model under autocast;
    without it the caller's autocast stays.

    `dtype="fp8"`, or a `Recipe` of `stepscope.kernels.fp8`, uses bfloat16 autocast and FP8 GEMMs in
    the linear layers that gain from them; weights, gradients and the optimizer keep their dtypes.
    FSDP2 gathers the weights of these layers in FP8 (call it after `fully_shard`).
    `report.fp8.override(pattern, recipe)` changes the choice for layers by name.

    `compile="auto"` compiles on a GPU with Triton and a C++ compiler. `compile=False` leaves the
    model as it is: the optimizer, and the CUDA graph of a `TrainStep`, remain. A mapping has
    options of the backend, and `form` ("as it is", "compiled" or "compiled with passes"), which is
    then not chosen by time. A `TrainStep` compiles the model together with the loss.
    """
    fp8 = Fp8Layers(None if dtype == FP8 else dtype) if _is_fp8(dtype) else None  # type: ignore[arg-type]
    compute = torch.bfloat16 if fp8 is not None else dtype
    if compute is not None and compute not in _DTYPES:
        raise UsageError(
            f"dtype={dtype} is not supported",
            'use torch.bfloat16, torch.float16, "fp8", a Recipe or None',
        )
    inner = _unwrapped(model)
    if _is_replicated(model):
        raise UsageError(
            "DataParallel replicates the model in every call, without what was compiled",
            "use DistributedDataParallel",
        )
    if inner in _ACCELERATED:
        raise UsageError("the model is accelerated already", "call undo() of its report first")
    patterns = tuple(exclude)
    _require_known(inner, patterns)
    why = _why_left(inner, compile)
    if fp8 is not None:
        _require_fp8(inner, fp8, why)
    report = Report(type(inner).__name__)
    if why is None:
        options = dict(compile) if isinstance(compile, Mapping) else {}
        _compile(inner, optimizer, options, compute, patterns, report, fp8)
    else:
        _leave(inner, optimizer, compute, why, report, fp8)
    if sample is not None:
        check_on(model, sample)
    return report


def _why_left(model: nn.Module, compile: bool | Mapping[str, Any] | str) -> str | None:
    """Return why a model is not compiled; None if it is."""
    if compile is False:
        return "compile=False"
    kinds = {parameter.device.type for parameter in model.parameters()}
    if compile == "auto" and kinds <= {"cpu"}:
        return _ON_CPU
    options = compile if isinstance(compile, Mapping) else {}
    if options.get("compiler", "inductor").startswith("inductor"):
        missing = next(filter(None, map(missing_compiler, kinds or {"cpu"})), None)
        if missing is not None:
            return missing
    unknown = _is_sharded(model) and not has_units(model)
    return why_not_compiled(model) or (_WHEN_SHARDED if unknown else None)


def is_compiled_by_default(model: nn.Module) -> bool:
    """Return whether `accelerate` compiles a model by default."""
    return _why_left(_unwrapped(model), "auto") is None


def _require_fp8(model: nn.Module, fp8: Fp8Layers, why_left: str | None) -> None:
    """Raise if a model cannot run in FP8."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if reason := unavailable(device, fp8.recipe):
        raise UsageError(reason, "use dtype=torch.bfloat16")
    if why_left is not None and _is_sharded(model):
        raise UsageError(_FULL_WEIGHTS, "use fully_shard, DDP, or dtype=torch.bfloat16")
    if why_left is not None and not hasattr(model, "set_fused"):
        raise UsageError(
            f"FP8 layers are part of the compiled model, which stays as it is: {why_left}",
            "use compile=True, or dtype=torch.bfloat16",
        )


def _leave(
    model: Any,
    optimizer: Any,
    dtype: torch.dtype | None,
    why: str,
    report: Report,
    fp8: Fp8Layers | None,
) -> None:
    """Fuse the optimizer alone, and the layers of a model of `stepscope.model`."""
    switch = getattr(model, "set_fused", None)
    copies = model.copies if switch is not None else WeightCopies(model.parameters(), keep=False)
    _claim(model, report)
    if fp8 is not None:
        use_fp8(model, copies, fp8, report)
    if switch is not None:
        _use_own_fused_layers(model, report)
    else:
        report.leave(Left("model", "", why))
    _set_dtype(model, dtype, report)
    if optimizer is not None:
        _fuse(optimizer, copies, report)


def _claim(model: nn.Module, report: Report) -> None:
    _ACCELERATED.add(model)
    report.on_undo(lambda: _ACCELERATED.discard(model))


def _compile(
    model: nn.Module,
    optimizer: Any,
    options: Mapping[str, Any],
    dtype: torch.dtype | None,
    patterns: tuple[str | type[nn.Module], ...],
    report: Report,
    fp8: Fp8Layers | None,
) -> None:
    """Let training calls run through the graph backend."""
    copies = WeightCopies(model.parameters(), keep=False)
    fused = optimizer is not None and _fuse(optimizer, copies, report)
    if fp8 is not None:
        use_fp8(model, copies, fp8, report)
    # Without an update that writes them, the casts stay in the graph.
    given: WeightCopies | None = copies if fused or fp8 is not None else None
    if has_units(model):
        given = None if fp8 is None else _gather_in_fp8(model, fp8, report)
    report.compilation = Compilation(
        model, report, options, dtype, patterns, given, fp8, ShardedFunctions
    )
    _claim(model, report)
    report.on_undo(report.compilation.undo)
    if dtype is not None:
        report.notes.append(_autocast(dtype))


def _autocast(dtype: torch.dtype) -> str:
    return f"autocast           {str(dtype).removeprefix('torch.')}"


def _require_known(model: nn.Module, patterns: tuple[str | type[nn.Module], ...]) -> None:
    """Raise if a name in `exclude` is that of no pass and of no module: it would exclude
    nothing."""
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        known = isinstance(pattern, type) or pattern in PASSES
        if not known and not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"exclude has {pattern!r}, but the model has no such module",
                f"a name of named_modules(), a pattern, or a pass: {', '.join(PASSES)}",
            )


def _use_own_fused_layers(model: Any, report: Report) -> None:
    """Switch on the fused layers of a model of `stepscope.model`, as far as they are off."""
    copies: WeightCopies = model.copies
    kept, projections = (copies.keeps, copies.reads), model.fused_projections
    unfused = [one for one in model.modules() if getattr(one, "fused", None) is False]

    def restore() -> None:
        model.fused_projections = projections
        for module in unfused:
            module.fused = False
        copies.keeps, copies.reads = kept

    copies.keeps = copies.reads = False
    model.set_fused(True)
    report.notes.append("fused layers       all")
    report.on_undo(restore)


def _is_fp8(dtype: Any) -> bool:
    return isinstance(dtype, Recipe) or dtype == FP8


def use_fp8(model: nn.Module, copies: WeightCopies, fp8: Fp8Layers, report: Report) -> None:
    """Let the linear layers of a model use FP8 GEMMs, except for its head."""
    matrices = list(_matrices(model))
    fp8.name((name, weight) for name, weight, _ in matrices)
    heads = _heads(model)
    for name, weight, turned in matrices:
        reason = fp8.refused((weight,), transposed=turned)
        if id(weight) in heads:
            reason = "the head stays in the matmul dtype"
        if reason is not None:
            fp8.keep(weight, reason)
            report.leave(Left(FP8, name, reason))
    if not hasattr(model, "needs_full_weights"):
        # Read by `FSDP`, which would show gathered weights in place of these.
        model.needs_full_weights = _FULL_WEIGHTS  # type: ignore[assignment]
        report.on_undo(lambda: delattr(model, "needs_full_weights"))
    previous, copies.fp8 = copies.fp8, fp8
    report.fp8 = fp8
    report.on_undo(lambda: setattr(copies, "fp8", previous))


def _gather_in_fp8(model: nn.Module, fp8: Fp8Layers, report: Report) -> WeightCopies:
    """Let the units of FSDP2 gather the weights of layers in FP8 as such."""
    wanted = {}
    for name, weight, turned in _matrices(model):
        if fp8.refused((weight,)) is not None:
            continue
        reason = unsupported(fp8.recipe_of((weight,)))
        if turned:
            reason = "its weight is stored transposed"
        if reason is None:
            wanted[id(weight)] = name
        else:
            fp8.keep(weight, reason)
            report.leave(Left(FP8, name, reason))
    gathers, left = gather_in_fp8(model, wanted)
    report.leave(*(Left(FP8, name, reason) for name, reason in left.items()))
    report.notes.append(f"fp8 all-gather     {len(gathers):>4} weights")
    report.on_undo(gathers.undo)
    return gathers


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the matrices among the parameters, except for tables of `nn.Embedding`, by the names
    that FP8 layers have, and whether they are stored as (d, rows), as far as a class says so. The
    graph decides which of them linear layers read."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for own, weight in module.named_parameters(recurse=False):
            if weight.dim() == 2:
                by_module = own in ("weight", "in_proj_weight")
                yield name if by_module else f"{name}.{own}", weight, _is_transposed(module)


def _heads(model: nn.Module) -> set[int]:
    """Return the identities of weights with a row for each token: those outside of blocks with as
    many rows as a table of tokens, and tied ones. A table may be of any class but `nn.Linear`."""
    owners: list[tuple[nn.Module, Tensor]] = [
        (module, weight)
        for name, module in model.named_modules()
        if not any(part.isdigit() for part in name.split("."))
        for weight in module.parameters(recurse=False)
        if weight.dim() == 2
    ]
    sharing = Counter(id(weight) for _, weight in owners)
    rows = {
        weight.shape[0]
        for module, weight in owners
        if not isinstance(module, nn.Linear) and not _is_transposed(module)
    }
    alike = Counter(weight.shape[0] for _, weight in owners)
    return {
        id(weight)
        for module, weight in owners
        if sharing[id(weight)] > 1 or (weight.shape[0] in rows and alike[weight.shape[0]] > 1)
    }


def _is_transposed(module: nn.Module) -> bool:
    """Return whether this is the `Conv1D` of transformers, whose weight is (d, rows)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def check_on(model: nn.Module, sample: Any) -> None:
    """Run the model once on a sample, so that every replacement is compared with its original.
    Random numbers and buffers stay as they were."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices), torch.enable_grad():
        if isinstance(sample, Mapping):
            model(**sample)
        elif isinstance(sample, Tensor):
            model(sample)
        else:
            model(*sample)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _is_sharded(model: nn.Module) -> bool:
    """Return whether the model, or a model that contains it, is sharded."""
    modules = ((sys.modules.get(module), name) for module, name in _SHARDED)
    classes = tuple(getattr(module, name) for module, name in modules if hasattr(module, name))
    owners = (
        getattr(hook, "__self__", None)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )
    return any(isinstance(one, classes) for one in (*model.modules(), *owners))


def _set_dtype(model: nn.Module, dtype: torch.dtype | None, report: Report) -> None:
    if dtype is None:
        return
    kind = next((p.device.type for p in model.parameters()), "cpu")
    original = forward_below(model)

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype):
            return original(*args, **kwargs)

    report.on_undo(add_layer(model, forward, report).remove)
    report.notes.append(_autocast(dtype))


def _fuse(optimizer: Any, copies: WeightCopies, report: Report) -> bool:
    """Fuse the update of an optimizer; return whether that is possible."""
    from stepscope.acceleration.optimizer import fuse_optimizer

    update = fuse_optimizer(optimizer, copies)
    if isinstance(update, str):
        report.leave(Left("optimizer", type(optimizer).__name__, update))
        return False
    report.notes.append(f"optimizer          {type(optimizer).__name__} in one kernel")
    report.on_undo(update.undo)
    return True


def _is_replicated(model: nn.Module) -> bool:
    """Return whether this is a model in DataParallel on several devices."""
    return isinstance(model, nn.DataParallel) and len(model.device_ids) > 1


def _unwrapped(model: Any) -> nn.Module:
    """Return the model within DistributedDataParallel, our DDP, DataParallel or torch.compile."""
    while True:
        with contextlib.suppress(AttributeError):
            model = model._orig_mod
            continue
        own = sys.modules.get("stepscope.parallel.ddp")
        wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
        if isinstance(model, wrappers if own is None else (*wrappers, own.DDP)):
            model = model.module
            continue
        return model  # type: ignore[no-any-return]
