"""`stepscope.accelerate`: replaces parts of a model and its optimizer by fused ones, in place."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepscope.acceleration.backend import PASSES
from stepscope.acceleration.checks import Alike
from stepscope.acceleration.compiled import Compilation
from stepscope.acceleration.forward_registry import add_layer, forward_below, layer_owners
from stepscope.acceleration.own_classes import embeddings
from stepscope.acceleration.patches import Patch
from stepscope.acceleration.pieces import (
    attention,
    attention_masks,
    embedding,
    head_loss,
    linear,
    mlp,
    multihead_attention,
    norm,
    packed_attention,
    patch_embedding,
    residual_block,
)
from stepscope.acceleration.recognized import has_known_blocks
from stepscope.acceleration.replacement import (
    Found,
    Left,
    Replacement,
    is_linear,
    is_transposed,
    rows_of,
)
from stepscope.acceleration.report import FP8, Report, excluded
from stepscope.acceleration.sharded.fp8_gathers import gather_in_fp8
from stepscope.acceleration.sharded.functions import ShardedFunctions
from stepscope.acceleration.sharded.units import has_units, why_not_compiled
from stepscope.attention.compiled import missing_compiler
from stepscope.errors import UsageError
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.fp8.recipe import Recipe, unavailable
from stepscope.kernels.fp8.traced import unsupported
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.module_hooks import without_global_hooks
from stepscope.torch_tools.triton_available import is_interpreted

SDPA = "SDPA"
"""Name in `replaceable` of a model whose attention is switched to SDPA."""
_DTYPES = (torch.bfloat16, torch.float16)
_NOT_COMPARED = (head_loss.PIECE, attention_masks.PIECE)
"""Pieces that are not compared in their first call: logits are deferred in the next one only, and
masks change only in a capture."""
_PIECES = (
    norm.PIECE, norm.LAYER_NORM, residual_block.PIECE, linear.PIECE, attention.PIECE,
    head_loss.PIECE, patch_embedding.PIECE, embedding.PIECE, attention_masks.PIECE,
    mlp.GATED, mlp.PLAIN_MLP, SDPA,
)  # fmt: skip
"""Names that `exclude` may have for all modules of a piece."""
_SHARDED = (
    ("stepscope.parallel.fsdp", "FSDP"),
    ("stepscope.parallel.sharded_module", "Unit"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)
"""Classes of sharded modules, or of the owners of their hooks: their parameters are parts of the
weights outside of a forward."""
_WHEN_SHARDED = (
    "its parameters are sharded: accelerate the model before it is sharded, or with compile=True"
    " if by fully_shard"
)
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
    """Replace parts of a model by fused kernels, in place, and return a report of the changes.

        report = stepscope.accelerate(model, optimizer)
        print(report)
        ...
        report.undo()

    Parameters keep their names and `state_dict` its keys. Every replacement is compared with the
    original, outputs and gradients, in its first call with gradients, or immediately on `sample`
    (what the model is called with: a mapping of keyword arguments, a tuple, or a tensor). One that
    differs is undone and listed in `report.left`. `exclude` lists what stays as it is: names of
    modules, patterns of names (`"*.mlp"`), classes, or pieces as `report` names them (`"RMSNorm"`).

    With an `optimizer` (AdamW or Adam), its update becomes one fused kernel; the optimizer, its
    `param_groups` and its state remain the same objects. `dtype` runs the model under autocast;
    without it the caller's autocast stays.

    `dtype="fp8"`, or a `Recipe` of `stepscope.kernels.fp8`, uses bfloat16 autocast and FP8 GEMMs in
    the linear layers that gain from them; weights, gradients and the optimizer keep their dtypes.
    FSDP2 gathers the weights of these layers in FP8 (with `compile=True`, after `fully_shard`).
    `report.fp8.override(pattern, recipe)` changes the choice for layers by name.

    `compile=True` replaces no modules: training calls run through the graph backend, in the fastest
    form that the first steps show, which may be the model as it is. A mapping has options of the
    backend, and `form` ("as it is", "compiled" or "compiled with passes"), which is then not
    chosen by time. A `TrainStep` compiles the model together with the loss. Modules in `exclude`
    run uncompiled. `compile="auto"` does so on a GPU, unless the modules of every block are known
    as a whole: then replacing them is as fast, and begins sooner.
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
            "DataParallel replicates the model in every call, without its fused kernels",
            "use DistributedDataParallel",
        )
    if fp8 is not None:
        device = next((p.device for p in inner.parameters()), torch.device("cpu"))
        if reason := unavailable(device, fp8.recipe):
            raise UsageError(reason, "use dtype=torch.bfloat16")
        by_units = compile and has_units(inner) and why_not_compiled(inner) is None
        if _is_sharded(inner) and not by_units:
            raise UsageError(
                _FULL_WEIGHTS,
                "use fully_shard and compile=True, DDP, or dtype=torch.bfloat16",
            )
    if inner in _ACCELERATED:
        raise UsageError("the model is accelerated already", "call undo() of its report first")
    patterns = tuple(exclude)
    _require_known(inner, patterns)
    report = Report(type(inner).__name__)
    kinds = {parameter.device.type for parameter in inner.parameters()}
    report.on_cpu = kinds == {"cpu"} and not is_interpreted()
    why = why_not_compiled(inner)
    if compile == "auto":
        compile = is_compiled_by_default(inner, patterns)
    if compile and why is None and (has_units(inner) or not _is_sharded(inner)):
        options = dict(compile) if isinstance(compile, Mapping) else {}
        _compile(inner, optimizer, options, compute, patterns, report, fp8)
        if sample is not None:
            check_on(model, sample)
        return report
    switch = getattr(inner, "set_fused", None)
    copies = inner.copies if switch is not None else WeightCopies(inner.parameters(), keep=False)
    assert isinstance(copies, WeightCopies)
    _ACCELERATED.add(inner)
    report.on_undo(lambda: _ACCELERATED.discard(inner))
    if fp8 is not None:
        use_fp8(inner, copies, fp8, report)
    _use_sdpa(inner, report, patterns)
    if switch is not None:
        _use_own_fused_layers(inner, report)
    alike = Alike()
    with without_global_hooks():
        for replacement in _find(inner, copies, report, patterns) if switch is None else ():
            checked = replacement.piece in _NOT_COMPARED
            report.add(Patch(replacement, checked, report.reject, copies, alike, report))
    _set_dtype(inner, compute, report)
    if optimizer is not None:
        _fuse(optimizer, copies, report)
    if sample is not None:
        check_on(model, sample)
    return report


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
    _ACCELERATED.add(model)
    report.on_undo(lambda: _ACCELERATED.discard(model))
    report.on_undo(report.compilation.undo)
    if dtype is not None:
        report.notes.append(_autocast(dtype))


def _autocast(dtype: torch.dtype) -> str:
    return f"autocast           {str(dtype).removeprefix('torch.')}"


def _require_known(model: nn.Module, patterns: tuple[str | type[nn.Module], ...]) -> None:
    """Raise if a name in `exclude` is that of no piece and of no module: it would exclude
    nothing."""
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        known = isinstance(pattern, type) or pattern in (*_PIECES, *PASSES)
        if not known and not any(fnmatchcase(name, pattern) for name in names):
            parts = ", ".join(dict.fromkeys((*_PIECES, *PASSES)))
            raise UsageError(
                f"exclude has {pattern!r}, but the model has no such module",
                f"a name of named_modules(), a pattern, or one of: {parts}",
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
    tables = embeddings(model)
    tokens = {table.weight.shape[0] for table in tables}
    tied = {id(table.weight) for table in tables}
    named = []
    for name, module in model.named_modules():
        weight = _weight_of(module)
        if weight is None:
            continue
        named.append((name, weight))
        reason = fp8.refused((weight,), transposed=is_transposed(module))
        in_block = any(part.isdigit() for part in name.split("."))
        if id(weight) in tied or (rows_of(module) in tokens and not in_block):
            reason = "the head stays in the matmul dtype"
        if reason is not None:
            fp8.keep(weight, reason)
            report.leave(Left(FP8, name, reason))
    fp8.name(named)
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
    for name, module in model.named_modules():
        weight = _weight_of(module)
        if weight is None or fp8.refused((weight,)) is not None:
            continue
        reason = unsupported(fp8.recipe_of((weight,)))
        if is_transposed(module):
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


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_linear(module) or is_transposed(module)


def _weight_of(module: Any) -> Tensor | None:
    """Return the weight of a linear layer, or of the input projections of an attention."""
    name = "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else "weight"
    if not (_is_linear(module) or isinstance(module, nn.MultiheadAttention)):
        return None
    weight: Tensor | None = getattr(module, name)
    return weight


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


def replaceable(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the modules that `accelerate` would replace, by piece, without changing
    the model. `SDPA` has the model itself if its attention would become SDPA."""
    inner = _unwrapped(model)
    if inner in _ACCELERATED or hasattr(inner, "set_fused") or _is_replicated(model):
        return {}
    names: dict[str, list[str]] = {SDPA: [""]} if attention.uses_eager_attention(inner) else {}
    found, _ = _found(inner)
    for replacement in found:
        if replacement.piece == attention_masks.PIECE:
            # It does not replace work of an eager step.
            continue
        names.setdefault(replacement.piece, []).append(replacement.name)
    return names


def is_compiled_by_default(model: nn.Module, exclude: Iterable[str | type[nn.Module]] = ()) -> bool:
    """Return whether `accelerate` compiles a model: on a GPU with a compiler, if there are blocks
    whose modules it does not replace."""
    inner = _unwrapped(model)
    kinds = {parameter.device.type for parameter in inner.parameters()}
    if "meta" in kinds:
        # Modules without values cannot be compared with anything.
        return True
    if kinds <= {"cpu"} or any(map(missing_compiler, kinds)):
        return False
    return not replaces_whole_blocks(inner, exclude)


def replaces_whole_blocks(model: nn.Module, exclude: Iterable[str | type[nn.Module]] = ()) -> bool:
    """Return whether attention and MLP of every block are known, and all blocks are alike."""
    return hasattr(model, "set_fused") or has_known_blocks(*_found(model, exclude))


def _found(model: nn.Module, exclude: Iterable[str | type[nn.Module]] = ()) -> Found:
    """Return what `accelerate` would replace, and what it would leave."""
    trial = Report("")
    try:
        _use_sdpa(model, trial, exclude)
        with without_global_hooks():
            return list(_find(model, WeightCopies(), trial, exclude)), trial.left
    finally:
        trial.undo()


def _find(
    model: nn.Module,
    copies: WeightCopies,
    report: Report,
    patterns: Iterable[str | type[nn.Module]],
) -> Iterator[Replacement]:
    """Yield the replacements, larger pieces first: they use the smaller ones within them."""
    claimed: set[nn.Module] = set()
    experts = _mixtures_of_experts(model)

    if reason := why_not_compiled(model) or (_WHEN_SHARDED if _is_sharded(model) else None):
        report.leave(Left("model", "", reason))
        return

    def take(found: Found) -> Iterator[Replacement]:
        replacements, left = found
        report.leave(*left)
        for one in replacements:
            others = [owner for owner in layer_owners(one.module) if owner is not report]
            if others:
                report.leave(Left(one.piece, one.name, "it is part of another accelerated model"))
            elif excluded(one.piece, one.name, type(one.module), patterns):
                report.leave(Left(one.piece, one.name, "excluded"))
            elif one.name.startswith(experts):
                report.leave(Left(one.piece, one.name, "part of a mixture of experts"))
            else:
                yield one

    for replacement in take(head_loss.find(model, copies)):
        claimed.add(replacement.module)
        yield replacement
    yield from take(attention_masks.find(model))
    norms = norm.matched_norms(model, copies)
    # A fused block does not call its norms.
    kept = {
        module: norms[module]
        for name, module in model.named_modules()
        if module in norms and not excluded(norms[module].piece, name, type(module), patterns)
    }
    yield from take(residual_block.find(model, kept, copies))
    for piece in (attention, packed_attention, multihead_attention, mlp):
        for replacement in take(piece.find(model, copies)):
            children = replacement.module.children()
            claimed |= {child for child in children if _is_linear(child)}
            yield replacement
    yield from take(norm.find(model, norms))
    yield from take(embedding.find(model))
    yield from take(patch_embedding.find(model, copies))
    yield from take(linear.find(model, copies, claimed))


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


def _mixtures_of_experts(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the names of their parts, which get other numbers of tokens in every
    step."""
    return tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "experts"))


def _use_sdpa(model: Any, report: Report, exclude: Iterable[str | type[nn.Module]]) -> None:
    """Use SDPA in a Hugging Face model that was created with naive attention."""
    without = excluded(attention.PIECE, "", type(model), exclude)
    if without or not attention.uses_eager_attention(model):
        return
    model.set_attn_implementation("sdpa")
    report.notes.append("attention          naive → scaled_dot_product_attention")
    report.on_undo(lambda: model.set_attn_implementation("eager"))


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
    """Return the model within DistributedDataParallel, DataParallel or torch.compile."""
    while True:
        with contextlib.suppress(AttributeError):
            model = model._orig_mod
            continue
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
            continue
        return model  # type: ignore[no-any-return]
