"""Which studies there are: every module of this package that holds a `STUDY`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from stepscope import studies
from stepscope.errors import unknown_name
from stepscope.studies.base import Study

# The order in which a reader wants them; a study that is not named here comes after.
_ORDER = ("benchmark", "warmup")


@cache
def all_studies() -> dict[str, Study[Any]]:
    found = {}
    for module in pkgutil.iter_modules(studies.__path__):
        study = getattr(importlib.import_module(f"{studies.__name__}.{module.name}"), "STUDY", None)
        if study is not None:
            found[study.name] = study
    rank = {name: place for place, name in enumerate(_ORDER)}
    return dict(sorted(found.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0])))


def find_study(name: str) -> Study[Any]:
    if name not in all_studies():
        raise unknown_name("study", name, all_studies())
    return all_studies()[name]
