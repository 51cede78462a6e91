"""All plans of a training step, the fastest first."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torch import nn

from stepscope.acceleration.compiled import compilation_of
from stepscope.acceleration.micro_batches import batch_size
from stepscope.acceleration.train_step_arguments import LEVERS, Lever
from stepscope.errors import UsageError
from stepscope.planning.blocks import repeated_blocks
from stepscope.planning.fake_run import FakeStep
from stepscope.planning.forms import EAGER, Form, run_blocks
from stepscope.planning.frontier import MemoryPlan, best_of, frontier, kinds_of
from stepscope.planning.host_states import FakeHostStates
from stepscope.planning.operators import Rates

_MICRO_BATCHES = (2, 4, 8)


def plans_of(
    step: FakeStep,
    rates: Rates,
    form: Form = EAGER,
    *,
    allow: Collection[Lever] = (),
) -> list[MemoryPlan]:
    """Return the frontier of a step of fake tensors. With several ranks it is that of one of them,
    without the time of communication; a model that is compiled as one graph stays as it is."""
    form.require_valid()
    if form.compile == "accelerate":
        raise UsageError(
            "an accelerated step has no plans: torch's partitioner decides what it saves",
            "predict its memory, or plan eager or compiled blocks",
        )
    size = batch_size(step.batch) if "micro-batches" in allow else 1
    plans: list[MemoryPlan] = []
    for number in (1, *(n for n in _MICRO_BATCHES if size % n == 0)):
        options = step.options._replace(micro_batches=number)
        plans += _with_states(step._replace(options=options), rates, form, allow)
    return best_of(plans)


def _with_states(
    step: FakeStep, rates: Rates, form: Form, allow: Collection[Lever]
) -> list[MemoryPlan]:
    """Plans with the states of the optimizer on the device, and in host memory if it is allowed."""
    step, blocks, kinds = run_blocks(step, form, rates, partial(kinds_of, form=form))
    more = form.bucket_bytes(step.model)
    recorded = blocks.record(step)
    recorded.timeline.always += more
    parts = step.options.micro_batches
    plans = [one._replace(micro_batches=parts) for one in frontier(blocks, kinds, recorded)]
    if "host-states" not in allow:
        return plans
    states = FakeHostStates(step.optimizer)
    recorded = blocks.record(step)
    recorded.timeline.always += more
    size, copy_s = states.bytes, 2 * states.bytes / rates.host
    states.remove()
    return plans + [
        one._replace(
            micro_batches=parts,
            host_states=size,
            seconds=one.seconds + copy_s,
            exposed_s=one.exposed_s + copy_s,
        )
        for one in frontier(blocks, kinds, recorded)
        if size
    ]


def is_compiled(model: nn.Module) -> bool:
    """Return whether the blocks of a model are compiled, alone or as parts of it."""
    if compilation_of(model) is not None:
        return True
    blocks = repeated_blocks(model).values()
    return any(one._compiled_call_impl is not None for one in (model, *blocks))


def require_allowed(allow: Collection[str]) -> None:
    for one in allow:
        if one not in LEVERS:
            raise UsageError(f"allow={one!r} is unknown", f"of: {', '.join(LEVERS)}")
