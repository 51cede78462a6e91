"""Named selections of studies and cases. Each study defines its own cases of a preset."""

from __future__ import annotations

from collections.abc import Collection

from stepscope.errors import unknown_name
from stepscope.records.schema import Environment
from stepscope.studies.base import PlannedCase
from stepscope.studies.registry import all_studies, find_study

PRESETS = {
    "quick": "every study with small cases, on any machine, in minutes",
    "seeds": "the tables of the five write-ups: 2025 sizes, contexts 128 to 1024",
    "cs336-2026": "the same tables for the sizes of the 2026 course",
    "h200": "the published tables of this repository",
    "full": "everything: both size tables and every dtype",
}


def require_preset(name: str) -> None:
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)


def preset_cases(
    name: str, environment: Environment, only: str | None = None, lacks: Collection[str] = ()
) -> tuple[PlannedCase, ...]:
    """The cases of a preset on a machine without the capabilities in `lacks`, of all studies or of
    `only` one."""
    require_preset(name)
    cases: dict[tuple[str, str], PlannedCase] = {}
    chosen = all_studies().values() if only is None else (find_study(only),)
    for study in chosen:
        for flags in study.presets(environment).get(name, ()):
            for case in study.planned(flags, lacks):
                cases.setdefault((case.study, case.key), case)
    return tuple(cases.values())
