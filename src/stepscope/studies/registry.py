"""The studies: every module of `studies` and `advisor` that defines a `STUDY`.

Your own studies are added without a change here: list their modules, separated by commas, in the
environment variable STEPSCOPE_STUDIES. The modules must be importable (see PYTHONPATH) and load
without torch, as the studies of this package do.

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

# By name: `advisor` builds on studies, and a worker runs its trials as it runs any case.
_PACKAGES = ("stepscope.studies", "stepscope.advisor", "stepscope.grading")
# The order of sections on a page; a study that is not listed comes last.
_ORDER = (
    "inspect",
    "own",
    "advise",
    "check",
    "benchmark",
    "warmup",
    "profile",
    "memory",
    "checkpointing",
    "accumulation",
    "autocast",
    "fp8",
    "attention",
    "flash",
    "compile",
    "step",
    "allreduce",
    "ddp",
    "sharding",
    "fsdp",
    "leaderboard",
    "rehearsal",
    "techniques",
)


@cache
def viewables() -> dict[str, Viewable]:
    """Everything with a view of its records, in page order."""
    studies = {}
    for package in map(importlib.import_module, _PACKAGES):
        for module in pkgutil.iter_modules(package.__path__):
            imported = importlib.import_module(f"{package.__name__}.{module.name}")
            if (study := getattr(imported, "STUDY", None)) is not None:
                studies[study.name] = study
    for name in os.environ.get("STEPSCOPE_STUDIES", "").replace(",", " ").split():
        study = _study_of_user(name)
        if study.name in studies:
            raise UsageError(f"study {study.name!r} of {name} already exists", "rename it")
        studies[study.name] = study
    rank = {name: index for index, name in enumerate(_ORDER)}
    return dict(sorted(studies.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0])))


def _study_of_user(module: str) -> Study[Any, Any]:
    try:
        study = getattr(importlib.import_module(module), "STUDY", None)
    except ImportError as error:
        raise UsageError(
            f"STEPSCOPE_STUDIES names {module}, which cannot be imported: {error}",
            "check the name and PYTHONPATH",
        ) from error
    if not isinstance(study, Study):
        raise UsageError(f"STEPSCOPE_STUDIES names {module}, which does not define a STUDY")
    return study


def all_studies() -> dict[str, Study[Any, Any]]:
    """The studies with cases that `stepscope run` measures."""
    return {name: study for name, study in viewables().items() if isinstance(study, Study)}


def find_study(name: str) -> Study[Any, Any]:
    if name not in all_studies():
        raise unknown_name("study", name, all_studies())
    return all_studies()[name]


def find_measurable(name: str) -> Measurable[Any]:
    """The study or trial that measures a case sent to a worker."""
    study = viewables().get(name)
    if not isinstance(study, Measurable):
        raise unknown_name("study", name, viewables())
    return study
