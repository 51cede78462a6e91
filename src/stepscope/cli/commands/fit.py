"""`stepscope fit`: plan the memory of a script's training step within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from stepscope.advisor.advise.cases import Script
from stepscope.advisor.advise.fitting import plan_script
from stepscope.analysis.predict.sizes import bytes_of
from stepscope.cli.common import parse, require_writable
from stepscope.cli.memory_plan import show_plan
from stepscope.cli.scripts import misplaced_options, split_words
from stepscope.errors import StepscopeError, UsageError, no_such_file
from stepscope.records.plans import FittedStep


class FitOptions(msgspec.Struct, frozen=True, kw_only=True):
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENTS …]")] = ""
    """The training script and its arguments."""
    budget: str = ""
    """Memory that the step may need, such as 60GiB or 60 (GiB). Without it: the memory of the
    script's GPU."""
    verify: bool = False
    """Run steps with the plan, and without it where it fits, and measure their time and peak."""
    host_states: bool = False
    """Permit to keep the optimizer's states in pinned host memory between its steps."""
    frontier: Path | None = None
    """Write a figure of time against memory of all plans to this SVG file."""
    steps: int = 10
    """With --verify: steps of a timed turn, of which there are three."""
    module: bool = False
    """Run SCRIPT as a module, like `python -m` (short: -m)."""
    json: bool = False
    """Print one line of JSON instead."""


def main(words: list[str]) -> int:
    own, target, rest = split_words(words, FitOptions)
    options = parse(
        FitOptions,
        own,
        "fit",
        "Plan the memory of a script's training step within a budget: which blocks of its model\n"
        "save their activations, recompute them, or copy them to host memory, at the least\n"
        "predicted time. The first step runs on fake tensors, so that a step that runs out of\n"
        "memory is planned too; then the script is ended. --verify runs it with the plan. Options\n"
        "of fit go before the script, the script's options after it.",
        (
            "stepscope fit --budget 60GiB train.py --batch-size 8",
            "stepscope fit --verify train.py",
            "stepscope fit --budget 24GiB --host-states --frontier plans.svg -m mylab.train",
        ),
    )
    if target is None:
        raise UsageError("no script is given", "use: stepscope fit [options] script.py")
    if not options.module and not Path(target).is_file():
        raise no_such_file(target, "script", "give a module after -m")
    if options.steps < 1:
        raise UsageError(f"--steps is {options.steps}", "use 1 or more")
    budget = bytes_of(options.budget, "GiB") if options.budget else 0
    if options.frontier is not None:
        require_writable(options.frontier, "give another path with --frontier")
    script = Script(target=target, module=options.module, words=tuple(rest))
    try:
        planned = plan_script(script, budget, host_states=options.host_states)
    except StepscopeError as error:
        if fix := misplaced_options(rest, FitOptions):
            raise StepscopeError(str(error), fix) from error
        raise
    if options.frontier is not None:
        _draw(planned, options.frontier)
    show_plan(script, planned, verify=options.verify, as_json=options.json, steps=options.steps)
    return 0


def _draw(planned: FittedStep, path: Path) -> None:
    from stepscope.files import replace_file
    from stepscope.report.plots import svg
    from stepscope.report.svg import standalone_svg
    from stepscope.views.prediction import frontier_figure

    figure = frontier_figure(planned.frontier.plans, planned.plan)
    replace_file(path, [standalone_svg(svg(figure)).encode()])
