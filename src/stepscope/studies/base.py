"""Base classes of studies: one question with a fixed procedure each. Loads without torch."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec

from stepscope.analysis.verdict import Verdict
from stepscope.errors import StepscopeError, in_one_line
from stepscope.records.schema import Environment, Record
from stepscope.report.blocks import Block, Table
from stepscope.studies.preset_flags import preset_flags
from stepscope.training.case import (
    Bench,
    Case,
    CaseSkipped,
    Measurement,
    PlannedCase,
    Result,
    results_of,
)

__all__ = [
    "Bench",
    "Case",
    "CaseSkipped",
    "Measurable",
    "Measurement",
    "PlannedCase",
    "Result",
    "Study",
    "Viewable",
    "results_of",
]

if TYPE_CHECKING:
    pass


class Viewable(ABC):
    """A named kind of record with a view. Its module defines the instance `STUDY`."""

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    recorded_by: ClassVar[str] = ""
    """The command that creates its records, where that is not `stepscope run`."""

    @abstractmethod
    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        """Findings, figures and tables from records of this name. Pure."""

    def headline(self, records: Sequence[Record]) -> Table | None:  # noqa: ARG002
        """The table that a reader wants first, if there is one."""
        return None

    def outcome(self, record: Record) -> str:  # noqa: ARG002
        """The result of one record in a few words, where that is not its time."""
        return ""

    def verdict(self, records: Sequence[Record]) -> Verdict | None:  # noqa: ARG002
        """The answer that a page with these records opens with. `records` are all of the page."""
        return None


C = TypeVar("C", bound=Case)
Flags = TypeVar("Flags", bound=msgspec.Struct)


class Measurable(Viewable, Generic[C]):
    """Cases that a worker can measure, and a view of their records."""

    fresh_process: ClassVar[bool] = False
    """Run every case in a fresh process."""
    goes_on: ClassVar[bool] = False
    """Report a case that the machine cannot run as a row with the reason, even if it was requested
    explicitly, as long as another case can run."""

    case: Any
    """The struct of its cases, or a union of tagged structs."""

    def needs_fresh(self, config: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether a case runs in a fresh process."""
        return self.fresh_process

    def plan(self, case: C) -> PlannedCase:
        return PlannedCase(study=self.name, key=case.key, config=case.config, needs=case.needs)

    def decode(self, config: Mapping[str, Any]) -> C:
        """Decode a case from the `config` of a record or of a message."""
        try:
            case: C = msgspec.convert(config, self.case)
        except msgspec.ValidationError as error:
            raise StepscopeError(
                f"not a case of {self.name}: {in_one_line(error)}",
                "was it created by another version of Stepscope?",
            ) from error
        return case

    def results(self, records: Sequence[Record]) -> list[Result[C]]:
        return [Result(record, self.decode(record.config)) for record in records]

    @abstractmethod
    def measure(self, case: C, bench: Bench) -> Measurement:
        """Measure one case. Runs in a worker; imports torch inside."""

    def post_mortem(
        self,
        case: C,  # noqa: ARG002
        bench: Bench,  # noqa: ARG002
        message: str,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Attachments of a case that ran out of memory; `message` is the error's text."""
        return {}


class Study(Measurable[C], Generic[Flags, C]):
    """A sweep of cases that `stepscope run` measures.

    Its folder has a module `measure` with the function `measure(case, bench)`, which imports torch,
    and a module `view` with the function `view(results)`; a study may override the two methods.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    on_cpu: ClassVar[str] = ""
    """A preset whose cases replace the defaults on a CPU, where the defaults would take hours."""
    no_model: ClassVar[str] = ""
    """The reason why it cannot measure a user's model, where it has no flag for one."""

    flags: type[Flags]
    """Struct of the command-line flags; its defaults are the study's default sweep."""

    @abstractmethod
    def cases(self, flags: Flags) -> tuple[C, ...]:
        """Every cell of the sweep, cheapest first."""

    def cases_here(
        self,
        flags: Flags,
        lacks: Collection[str],  # noqa: ARG002
    ) -> tuple[C, ...]:
        """Every cell of the sweep on a machine without the capabilities in `lacks`."""
        return self.cases(flags)

    def planned(self, flags: Flags, lacks: Collection[str] = ()) -> tuple[PlannedCase, ...]:
        """The cases for a machine without the capabilities in `lacks`, without duplicates."""
        planned = (self.plan(case) for case in self.cases_here(flags, lacks))
        return tuple({case.key: case for case in planned}.values())

    def presets(self, environment: Environment) -> Mapping[str, Sequence[Flags]]:
        """This study's flags for each preset on the given machine."""
        return preset_flags(self.name, self.flags, environment.device_kind)

    def measure(self, case: C, bench: Bench) -> Measurement:
        measurement: Measurement = self._module("measure").measure(case, bench)
        return measurement

    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        return tuple(self._module("view").view(self.results(records)))

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{type(self).__module__}.{name}")
