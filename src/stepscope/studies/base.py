"""Base classes of studies: one question with a fixed procedure each. Loads without torch."""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec

from stepscope.analysis.verdict import Verdict
from stepscope.errors import StepscopeError, in_one_line
from stepscope.records.config import check_config
from stepscope.records.names import require_case
from stepscope.records.schema import Environment, Part, Quantity, Reading, Record, Series
from stepscope.report.blocks import Block, Table
from stepscope.studies.preset_flags import preset_flags

if TYPE_CHECKING:
    from stepscope.measure.device import Device


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of a study. A study with several kinds of cases has a tagged union of subclasses.

    Its fields are the `config` of its record: a field keeps its name and meaning, and a new field
    has a default, so that older records still decode.
    """

    @property
    def key(self) -> str:
        """Readable identity within the study; equal cases of two runs are compared by it."""
        raise NotImplementedError

    @property
    def needs(self) -> tuple[str, ...]:
        """Capabilities that the machine must have: a dtype, `compiler`, …"""
        return ()

    @classmethod
    def combinations(cls, flags: object, *swept: str, **fields: Any) -> Iterator[Self]:
        """The cases of every combination of these fields, the last of which changes fastest. The
        values of a field are `fields`, or else the flag of the same name."""
        named = {
            name: getattr(flags, name) for name in cls.__struct_fields__ if hasattr(flags, name)
        }
        named |= fields
        for values in itertools.product(*(named[name] for name in swept)):
            yield cls(**named | dict(zip(swept, values, strict=True)))

    @property
    def config(self) -> dict[str, Any]:
        """The fields as plain data, as the record stores them."""
        config: dict[str, Any] = msgspec.to_builtins(self)
        return config


class PlannedCase(Part, frozen=True):
    """A case of a study, ready to be sent to a worker."""

    study: str
    key: str
    config: dict[str, Any]
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_case("case key", self.key)
        # Checked here, before the case is measured, rather than when its record is stored.
        check_config(self.config)


class Measurement(Part, frozen=True):
    """The result of measuring a case. The first series is the main result of the case."""

    series: tuple[Series, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    readings: tuple[Reading, ...] = ()
    notes: dict[str, str] = msgspec.field(default_factory=dict)
    attachments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Structured results: plain data or structs that JSON can represent."""


class CaseSkipped(Exception):  # noqa: N818
    """Raised by `measure` for a case that this machine cannot run, with the reason."""


class Bench(Protocol):
    """Interface that a worker offers to a study while it measures."""

    @property
    def device(self) -> Device: ...

    def progress(self, done: int, total: int, what: str) -> None: ...


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


class Result(NamedTuple, Generic[C]):
    """A record with its decoded case; rows and findings are built from it."""

    record: Record
    case: C


K = TypeVar("K", bound=Case)


def results_of(results: Sequence[Result[Any]], kind: type[K]) -> list[Result[K]]:
    """The results whose case is of one type of a study's union."""
    return [result for result in results if isinstance(result.case, kind)]


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
