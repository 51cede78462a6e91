"""Measure a case of the check: run one criterion, or time the implementation. Runs in a worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import UsageError
from stepscope.grading.check.cases import CriterionCase, SpeedCase
from stepscope.grading.check.kinds import KINDS
from stepscope.studies.base import Bench, CaseSkipped, Measurement

if TYPE_CHECKING:
    from stepscope.grading.criteria.attempt import Attempt
    from stepscope.grading.criteria.implementation import Implementation


def measure_criterion(case: CriterionCase, bench: Bench) -> Measurement:
    _interpret_triton(bench)
    from stepscope.grading.criteria import attention, norm
    from stepscope.grading.criteria.attempt import Attempt
    from stepscope.grading.criteria.implementation import (
        Implementation,
        as_attention,
        as_norm,
    )

    kind = KINDS[case.kind]
    beyond = next(one.beyond for one in kind.criteria if one.name == case.criterion)
    attempt = Attempt("", case.seconds, beyond)
    try:
        made = Implementation(case)
    except UsageError as error:
        attempt.fault("import", str(error))
        return _measured(attempt)
    attempt.folder = made.folder
    if kind.ranks:
        from stepscope.grading.ranks.grade import grade

        grade(case, case.criterion, attempt)
    else:
        interfaces: dict[str, tuple[Callable[[Implementation], Any], dict[str, Any]]] = {
            "FlashAttention": (as_attention, attention.CRITERIA),
            "rmsnorm": (as_norm, norm.CRITERIA),
        }
        adapt, criteria = interfaces[case.kind]
        criteria[case.criterion](attempt, adapt(made), bench.device.kind)
    return _measured(attempt)


def _measured(attempt: Attempt) -> Measurement:
    return Measurement(attachments={"outcome": msgspec.to_builtins(attempt.outcome)})


def measure_speed(case: SpeedCase, bench: Bench) -> Measurement:
    _interpret_triton(bench)
    from stepscope.grading.criteria.implementation import Implementation

    try:
        Implementation(case)
    except UsageError as error:
        raise CaseSkipped(str(error)) from error
    if KINDS[case.kind].ranks:
        from stepscope.grading.ranks.speed import time_on_ranks

        return time_on_ranks(case, bench)
    from stepscope.grading.criteria.speed import time_alone

    return time_alone(case, bench)


def _interpret_triton(bench: Bench) -> None:
    """Without a GPU, Triton kernels run in the interpreter. Triton reads the variable when it is
    imported, which the user's file does."""
    if bench.device.kind == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
