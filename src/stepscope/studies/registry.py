"""The studies: every module of `studies` and `advisor` that defines a `STUDY`.

Studies of your own join them without a change here: name their modules, separated by commas, in
the environment variable STEPSCOPE_STUDIES. They must be importable (see PYTHONPATH) and load
without torch, as the ones in this package do.

    STEPSCOPE_STUDIES=mylab.rope,mylab.loss stepscope run rope
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from functools import cache
from typing import Any

from stepscope.errors import UsageError, unknown_name
from stepscope.studies.base import Measurable, Study, Viewable

# By name: `advisor` is built on studies, and a worker runs its trials as it runs any case.
_PACKAGES = ("stepscope.studies", "stepscope.advisor")
# The order in which a reader wants them; a study that is not named here comes after.
_ORDER = (
    "inspect",
    "own",
    "advise",
    "benchmark",
    "warmup",
    "profile",
    "memory",
    "checkpointing",
    "accumulation",
    "autocast",
    "attention",
    "flash",
    "compile",
    "step",
    "allreduce",
    "ddp",
    "sharding",
    "fsdp",
    "rehearsal",
    "levers",
)


@cache
def viewables() -> dict[str, Viewable]:
    """Everything whose records can be shown, in the order of a page."""
    found = {}
    for package in map(importlib.import_module, _PACKAGES):
        for module in pkgutil.iter_modules(package.__path__):
            imported = importlib.import_module(f"{package.__name__}.{module.name}")
            if (study := getattr(imported, "STUDY", None)) is not None:
                found[study.name] = study
    for name in os.environ.get("STEPSCOPE_STUDIES", "").replace(",", " ").split():
        study = _study_of_user(name)
        if study.name in found:
            raise UsageError(f"study {study.name!r} of {name} exists already", "rename it")
        found[study.name] = study
    rank = {name: place for place, name in enumerate(_ORDER)}
    return dict(sorted(found.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0])))


def _study_of_user(module: str) -> Study[Any, Any]:
    try:
        held = getattr(importlib.import_module(module), "STUDY", None)
    except ImportError as error:
        raise UsageError(
            f"STEPSCOPE_STUDIES names {module}, which cannot be imported: {error}",
            "check the name and PYTHONPATH",
        ) from error
    if not isinstance(held, Study):
        raise UsageError(f"STEPSCOPE_STUDIES names {module}, which holds no STUDY")
    return held


def all_studies() -> dict[str, Study[Any, Any]]:
    """Those with cases that `stepscope run` measures."""
    return {name: one for name, one in viewables().items() if isinstance(one, Study)}


def find_study(name: str) -> Study[Any, Any]:
    if name not in all_studies():
        raise unknown_name("study", name, all_studies())
    return all_studies()[name]


def find_measurable(name: str) -> Measurable[Any]:
    """Of a case that a worker is sent."""
    one = viewables().get(name)
    if not isinstance(one, Measurable):
        raise unknown_name("study", name, viewables())
    return one
