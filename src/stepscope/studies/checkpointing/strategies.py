"""Which strategies there are for a number of blocks, and the best one under a budget."""

from __future__ import annotations

import math

import msgspec

from stepscope.analysis.predict.fit import MARGIN
from stepscope.analysis.predict.step import predict
from stepscope.errors import UsageError
from stepscope.model.checkpointing import NESTED, NONE, run_again, stretches
from stepscope.studies.plans import plan_of
from stepscope.studies.workload import Workload

_POWERS = (1, 2, 4, 8, 16, 32)
_GIB = 2**30


def worth_running(layers: int) -> tuple[str, ...]:
    """Nothing, stretches of each power of two, single blocks in stretches of √layers, halves."""
    two_levels = f"{round(math.sqrt(layers))}-1" if layers >= 4 else ""
    named = (NONE, *(str(size) for size in _POWERS if size <= layers), two_levels)
    return (*filter(None, named), *([NESTED] if layers > 2 else []))


def refuse_what_fits_nowhere(workload: Workload, budget: int) -> None:
    """Before a device is known: to the byte, as no allocator gives less than is asked for."""
    if workload.shape is None:
        raise UsageError(f"the memory of {workload.own} cannot be predicted", "omit --budget-gib")
    likely = sorted(worth_running(workload.layers), key=lambda name: name != "1")
    peaks = {}
    for strategy in likely:
        peaks[strategy] = _peak(workload, strategy, "cpu")
        if peaks[strategy] * MARGIN <= budget:
            return
    raise _too_little(workload, budget, peaks)


def chosen_for(workload: Workload, budget: int, device_kind: str) -> Workload:
    """The strategy predicted to fit that runs the least again; of equal ones the smallest."""
    layers = workload.layers
    peaks = {name: _peak(workload, name, device_kind) for name in worth_running(layers)}
    fitting = [name for name, peak in peaks.items() if peak * MARGIN <= budget]
    if not fitting:
        raise _too_little(workload, budget, peaks)
    best = min(fitting, key=lambda name: (run_again(stretches(name, layers), layers), peaks[name]))
    return msgspec.structs.replace(workload, checkpoint=best)


def _peak(workload: Workload, strategy: str, device_kind: str) -> int:
    one = msgspec.structs.replace(workload, checkpoint=strategy)
    return predict(plan_of(one, device_kind)).peak.allocated


def _too_little(workload: Workload, budget: int, peaks: dict[str, int]) -> UsageError:
    strategy, peak = min(peaks.items(), key=lambda item: item[1])
    return UsageError(
        f"no strategy fits {workload.name} into {budget / _GIB:.4g} GiB:"
        f" the least is {peak / _GIB:.4g} GiB with --checkpoint {strategy}",
        f"allow at least {peak * MARGIN / _GIB:.4g}, or see what else helps with"
        " `stepscope predict --budget`",
    )
