"""What can be graded: the kinds of implementations, their interfaces and criteria. Data."""

from __future__ import annotations

import re
from typing import NamedTuple

from stepscope.errors import UsageError, unknown_name


class Criterion(NamedTuple):
    """One question about an implementation."""

    name: str
    title: str
    beyond: bool = False
    """Not required by the course: a failure is a warning and leaves the exit code at 0."""


class Kind(NamedTuple):
    """A kind of implementation. `pattern` matches its usual names, without underscores."""

    name: str
    pattern: str
    interface: str
    criteria: tuple[Criterion, ...]
    ranks: int = 0
    """Number of processes it runs on; 0 for an implementation of one process."""


_FLASH = (
    Criterion("full", "output and gradients without a mask"),
    Criterion("causal", "output and gradients with a causal mask"),
    Criterion("lse", "the saved log-sum-exp"),
    Criterion("second-call", "later calls with other shapes and values"),
    Criterion("strides", "inputs and gradients that are not contiguous"),
    Criterion("large", "scores too large for an unshifted exp"),
    Criterion("dtypes", "float16 and bfloat16"),
    Criterion("lengths", "fewer and more keys than queries"),
    Criterion("ragged", "lengths that are not multiples of a block"),
    Criterion("heads", "a dimension for heads", beyond=True),
)
_NORM = (
    Criterion("values", "output and gradients"),
    Criterion("small", "rows as small as eps, and zero rows"),
    Criterion("dtypes", "float16 and bfloat16"),
    Criterion("widths", "widths that are not multiples of a block"),
    Criterion("strides", "inputs and gradients that are not contiguous"),
    Criterion("second-call", "later calls with other shapes and values"),
)
_TRAINING = (
    Criterion("weights", "weights against one process over several steps"),
    Criterion("tied", "tied weights"),
    Criterion("frozen", "parameters that need no gradient"),
    Criterion("unused", "parameters without a gradient on any rank"),
)
_WRAPPER = (
    Criterion("start", "equal parameters on all ranks after wrapping"),
    *_TRAINING,
    Criterion("buffers", "buffers that the forward pass reads"),
    Criterion("uneven", "a parameter with a gradient on one rank only", beyond=True),
)
_BUCKETED = (
    *_WRAPPER,
    Criterion("small-buckets", "a bucket for each parameter"),
    Criterion("one-bucket", "one bucket for all parameters, one of them unused"),
    Criterion("dtypes", "parameters of two dtypes", beyond=True),
)
_FSDP = (
    *_TRAINING,
    Criterion("sharded", "each rank keeps its shard only"),
    Criterion("compute-dtype", "low-precision compute with float32 weights"),
)
_SHARDED = (
    *_TRAINING,
    Criterion("sharded", "each rank keeps its part of the state only"),
    Criterion("groups", "parameter groups with their own options"),
    Criterion("schedule", "a learning rate that changes between steps", beyond=True),
    Criterion("few", "fewer parameters than ranks", beyond=True),
)

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "FlashAttention",
            "flash|attention",
            "a torch.autograd.Function or a function of (q, k, v, is_causal)",
            _FLASH,
        ),
        Kind(
            "rmsnorm",
            "rmsnorm",
            "a function of (x, weight, eps), a torch.autograd.Function, or a module made by"
            " RMSNorm(width)",
            _NORM,
        ),
        Kind(
            "DDPBucketed",
            "bucket",
            "a module made by DDPBucketed(module, bucket_size_mb), with"
            " finish_gradient_synchronization()",
            _BUCKETED,
            ranks=2,
        ),
        Kind(
            "FSDP",
            "fsdp|fullysharded",
            "a module made by FSDP(module, compute_dtype=None), with"
            " finish_gradient_synchronization() and gather_full_params()",
            _FSDP,
            ranks=2,
        ),
        Kind(
            "DDP",
            "ddp|dataparallel",
            "a module made by DDP(module), with finish_gradient_synchronization()",
            _WRAPPER,
            ranks=2,
        ),
        Kind(
            "ShardedOptimizer",
            "shard.*optim|optim.*shard|zero",
            "an optimizer made by ShardedOptimizer(params, optimizer_cls, **kwargs)",
            _SHARDED,
            ranks=2,
        ),
    )
}


class Adapter(NamedTuple):
    """A function of the course's `tests/adapters.py`, and those called with its result."""

    function: str
    kind: str
    after: str = ""
    """Called after each backward pass with the wrapper and the optimizer."""
    before: str = ""
    """Called at the start of each step with the same."""
    gather: str = ""
    """Returns the full parameters of the wrapper by name."""


ADAPTERS = (
    Adapter("get_flashattention_autograd_function_pytorch", "FlashAttention"),
    Adapter("get_flashattention_autograd_function_triton", "FlashAttention"),
    Adapter("get_ddp", "DDP", after="ddp_on_after_backward"),
    Adapter(
        "get_ddp_individual_parameters",
        "DDP",
        after="ddp_individual_parameters_on_after_backward",
    ),
    Adapter(
        "get_ddp_bucketed",
        "DDPBucketed",
        after="ddp_bucketed_on_after_backward",
        before="ddp_bucketed_on_train_batch_start",
    ),
    Adapter("get_fsdp", "FSDP", after="fsdp_on_after_backward", gather="fsdp_gather_full_params"),
    Adapter("get_sharded_optimizer", "ShardedOptimizer"),
)
"""The interfaces of the 2025 and 2026 editions."""


def kind_of(name: str) -> str | None:
    """The kind that the name of a class or function means."""
    plain = name.replace("_", "").lower()
    return next((kind.name for kind in KINDS.values() if re.search(kind.pattern, plain)), None)


def find_kind(name: str) -> Kind:
    """A kind by its name, in any case."""
    for kind in KINDS.values():
        if kind.name.lower() == name.replace("_", "").lower():
            return kind
    raise unknown_name("kind", name, KINDS)


def find_criteria(kind: Kind, names: tuple[str, ...]) -> tuple[Criterion, ...]:
    """The criteria of a kind, or those of these names."""
    return tuple(one for one in kind.criteria if not names or one.name in names)


def check_criteria(kinds: list[Kind], names: tuple[str, ...]) -> None:
    known = dict.fromkeys(one.name for kind in kinds for one in kind.criteria)
    for name in names:
        if name not in known:
            raise unknown_name("criterion", name, known)
    if not kinds:
        raise UsageError("there is nothing to grade", "name a class: my_file.py:FlashAttention")
