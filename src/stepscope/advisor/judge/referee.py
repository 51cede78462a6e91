"""Run two scripts as a referee: observe each, then time them interleaved."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec

from stepscope.advisor.advise.cases import BASE, CHANGED, Script
from stepscope.advisor.advise.script_trial import Shows, order_of
from stepscope.advisor.inspect.child import describe_end
from stepscope.advisor.inspect.order import Order
from stepscope.advisor.inspect.recording import run_observer
from stepscope.advisor.judge.criteria import Verdict, conclude, same_training, with_times
from stepscope.advisor.judge.evidence import EVIDENCE, FEWEST_STEPS, GIVEN, WEIGHTS, Evidence
from stepscope.advisor.patch.apply import compare_orders, gain_of
from stepscope.advisor.scope.once_imported import FAILED
from stepscope.errors import StepscopeError


def observe(order: Order, folder: Path, steps: int, weights_of: Evidence | None) -> Evidence:
    """Run the script and return its evidence, whose files are in the folder. Probes use the weights
    of another script's evidence."""
    folder.mkdir(parents=True)
    if weights_of is not None:
        shutil.copyfile(weights_of.file(WEIGHTS), folder / GIVEN)
    observing = msgspec.structs.replace(order, observe="evidence", timed=steps)
    status, why = run_observer(observing, folder)
    if (folder / EVIDENCE).exists() and not (status and weights_of is None):
        found = msgspec.json.decode((folder / EVIDENCE).read_bytes(), type=Evidence)
        if found.steps >= FEWEST_STEPS or weights_of is not None:
            return msgspec.structs.replace(found, folder=str(folder))
        if not (folder / FAILED).exists():
            needed = f"it has {found.steps} steps, and {FEWEST_STEPS} are needed"
            why = f"{order.target} {describe_end(status)} | {needed}"
    raise StepscopeError(why)


def referee(
    original: Script, changed: Script, *, steps: int, rounds: int, lowest: str, bench: Shows
) -> Verdict:
    """Judge the changed script against the original. If it does not train the same, it is refused
    before anything is timed."""
    with tempfile.TemporaryDirectory(prefix="stepscope-judge-") as name:
        orders = {BASE: order_of(original), CHANGED: order_of(changed)}
        one = observe(orders[BASE], Path(name) / BASE, steps, None)
        other = observe(orders[CHANGED], Path(name) / CHANGED, steps, one)
        criteria = same_training(one, other, lowest)
        if any(criterion.result == "fail" for criterion in criteria):
            return conclude(criteria)
        times = compare_orders(orders, original, rounds, 20, bench)
        return with_times(criteria, gain_of(times), times.ms[BASE], times.ms[CHANGED], one, other)
