"""The plan of a script's memory as an answer of `fit`, and of `advise` for one that ran out."""

from __future__ import annotations

from stepscope.advisor.advise.cases import Script
from stepscope.advisor.advise.fitting import (
    measure_script,
    measure_unless_too_large,
    settings_of,
)
from stepscope.cli.common import json_line
from stepscope.cli.messages import log
from stepscope.records.plans import FittedStep, MeasuredSteps


def show_plan(
    script: Script, planned: FittedStep, *, verify: bool, as_json: bool, steps: int = 10
) -> None:
    """Print the plan; measure it if it is to be verified."""
    from stepscope.report.terminal import print_findings, print_table
    from stepscope.views import prediction as view

    if not as_json:
        print_findings(view.fitted_findings(planned))
        print()
        print_table(view.fitted_table(planned))
    measured = _measured(script, planned, steps) if verify else {}
    if as_json:
        print(json_line({"fit": planned, "measured": measured}))
    elif (with_plan := measured.get("planned")) is not None:
        print()
        print_findings([view.measured_finding(planned, with_plan, measured.get("base"))])


def _measured(script: Script, planned: FittedStep, steps: int) -> dict[str, MeasuredSteps | None]:
    """Steps with the plan, and without it unless they run out of memory."""
    if planned.plan.is_plain:
        return {"planned": measure_script(script, {}, steps)}
    log("running the script as it is, then with the plan")
    base = measure_unless_too_large(script, steps)
    return {"base": base, "planned": measure_script(script, settings_of(planned), steps)}
