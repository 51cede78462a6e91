"""The cases that the problems need, as flags of studies: for a CPU, a GPU, and in a hurry.

A need is measured by the same runner as `stepscope run STUDY` with its flags, and the document
prints that command. `needs.toml` has the flags.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from importlib import resources
from typing import Any

import msgspec

from stepscope.studies.base import PlannedCase
from stepscope.studies.course.problem import Edition, Flags
from stepscope.studies.registry import find_study


class Need(msgspec.Struct, frozen=True):
    """Flags of one study for each kind of machine."""

    study: str
    quick: Flags = {}
    """On a CPU, in seconds."""
    cpu: Flags = {}
    """On a CPU without a hurry."""
    gpu: Flags = {}
    """On a GPU: what the handout asks for."""
    quick_gpu: Flags = {}
    records: str = ""
    """File of committed records in `results/`."""
    committed_only: bool = False
    """True for a study of `benchmarks/`, whose committed records answer on every machine."""
    by_edition: dict[Edition, Flags] = {}
    """Further flags on a GPU: the sizes of an edition."""

    def flags(self, edition: Edition, device_kind: str, *, quick: bool) -> dict[str, Any]:
        if device_kind == "cpu":
            flags = self.quick if quick else self.cpu
        else:
            flags = self.quick_gpu if quick else {**self.gpu, **self.by_edition.get(edition, {})}
        return {name: tuple(v) if isinstance(v, list) else v for name, v in flags.items()}

    def command(self, edition: Edition, device_kind: str, *, quick: bool) -> str:
        """The command that measures the same cases."""
        words = ["stepscope", "run", self.study]
        for name, value in self.flags(edition, device_kind, quick=quick).items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{name.replace('_', '-')}")
            else:
                listed = value if isinstance(value, tuple) else (value,)
                words += [flag, *map(str, listed)]
        return shlex.join(words)

    def cases(
        self, edition: Edition, device_kind: str, *, quick: bool, lacks: Collection[str] = ()
    ) -> tuple[PlannedCase, ...]:
        study = find_study(self.study)
        flags = study.flags(**self.flags(edition, device_kind, quick=quick))
        return study.planned(flags, lacks)


NEEDS = msgspec.toml.decode(
    resources.files("stepscope.studies.course").joinpath("needs.toml").read_bytes(),
    type=dict[str, Need],
)
