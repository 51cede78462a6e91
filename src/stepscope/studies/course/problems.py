"""The problems of both editions, in the order of the handouts."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.errors import UsageError, unknown_name
from stepscope.studies.course import one_device, several_devices
from stepscope.studies.course.problem import Edition, Problem

PROBLEMS: tuple[Problem, ...] = (*one_device.PROBLEMS, *several_devices.PROBLEMS)


def find_problems(edition: Edition, names: Sequence[str] = ()) -> tuple[Problem, ...]:
    """The problems of an edition; by names, if there are any."""
    known = {one.name: one for one in PROBLEMS if edition in one.in_documents_of}
    for name in names:
        elsewhere = next((one for one in PROBLEMS if one.name == name), None)
        if name not in known and elsewhere is not None:
            (other,) = elsewhere.in_documents_of
            raise UsageError(
                f"{name} is not a problem of the {edition} edition", f"it is in --edition {other}"
            )
        if name not in known:
            raise unknown_name("problem", name, known)
    return tuple(one for name, one in known.items() if not names or name in names)
