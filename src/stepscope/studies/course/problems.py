"""The problems of both editions, in the order of the handouts, from `problems.toml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec

from stepscope.analysis.accounting import CALCULATIONS
from stepscope.errors import UsageError, unknown_name
from stepscope.studies.course.problem import Edition, Part, Problem


def _problems() -> Iterator[Problem]:
    text = resources.files("stepscope.studies.course").joinpath("problems.toml").read_bytes()
    for fields in msgspec.toml.decode(text)["problem"]:
        yield msgspec.convert(
            _calculated(fields) if fields.pop("calculated", False) else fields, Problem
        )


def _calculated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A problem of arithmetic alone: its questions and answers are those of the calculation."""
    calculation = CALCULATIONS[fields["name"]]
    lettered = [one for one in calculation.worked().answers if len(one.part) == 1]
    parts = [
        Part(one.question, label=one.part if len(lettered) > 1 else "", calculation=one.part)
        for one in lettered
    ]
    return {**fields, "title": calculation.title, "parts": parts}


PROBLEMS: tuple[Problem, ...] = tuple(_problems())


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
