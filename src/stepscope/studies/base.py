"""What a study is: one question with a fixed way to measure it. Loads without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from stepscope.records.config import check_config
from stepscope.records.names import require_case
from stepscope.records.schema import Environment, Part, Quantity, Reading, Record, Series
from stepscope.report.blocks import Block, Table

if TYPE_CHECKING:
    from stepscope.measure.device import Device


class Case(Part, frozen=True):
    """One cell of a study, ready to be sent to a worker."""

    study: str
    key: str
    config: dict[str, Any]
    needs: tuple[str, ...] = ()
    """What the machine must have: a number format, `compiler`, …"""

    def __post_init__(self) -> None:
        require_case("case key", self.key)
        # Here and not when its record is stored: by then it has been measured.
        check_config(self.config)


class Measurement(Part, frozen=True):
    """What measuring a case gave. The first series is what the case is about."""

    series: tuple[Series, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    readings: tuple[Reading, ...] = ()
    notes: dict[str, str] = msgspec.field(default_factory=dict)
    attachments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Structured results: plain data or structs, as JSON can hold them."""


class CaseSkipped(Exception):  # noqa: N818
    """Raised by `measure` for a case that cannot be meant on this machine, with the reason."""


class Bench(Protocol):
    """What a study may use while it measures."""

    @property
    def device(self) -> Device: ...

    def progress(self, done: int, total: int, what: str) -> None: ...


Flags = TypeVar("Flags", bound=msgspec.Struct)


class Study(ABC, Generic[Flags]):
    """A study file holds one subclass of this and its instance, `STUDY`; that registers it."""

    name: ClassVar[str]
    title: ClassVar[str]
    question: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ()
    fresh_process: ClassVar[bool] = False
    """Every case starts in a process that has done nothing before."""
    goes_on: ClassVar[bool] = False
    """A case that cannot be meant on a machine is a row with the reason, however it was asked for,
    as long as another can."""
    on_cpu: ClassVar[str] = ""
    """A preset whose cases stand for the defaults on a CPU, where those would take hours."""
    no_model: ClassVar[str] = ""
    """Why it cannot take a model of one's own, where it has no flag for one."""
    recorded_by: ClassVar[str] = ""
    """The command that makes its records, where that is not `stepscope run`."""

    flags: type[Flags]
    """The sweep as the command line takes it; its defaults are the study's."""

    @abstractmethod
    def cases(self, flags: Flags) -> tuple[Case, ...]:
        """Every cell of the sweep, cheapest first."""

    def cases_here(
        self,
        flags: Flags,
        lacks: Collection[str],  # noqa: ARG002
    ) -> tuple[Case, ...]:
        """The same for a machine that lacks what is named there."""
        return self.cases(flags)

    @abstractmethod
    def measure(self, config: dict[str, Any], bench: Bench) -> Measurement:
        """Measure one case. Runs in a worker; imports torch inside."""

    def post_mortem(
        self,
        config: dict[str, Any],  # noqa: ARG002
        bench: Bench,  # noqa: ARG002
        said: str,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Attachments of a case that ran out of memory; `said` is the error's text."""
        return {}

    @abstractmethod
    def view(self, records: Sequence[Record]) -> tuple[Block, ...]:
        """Findings, figures and tables from records of this study. Pure."""

    def headline(self, records: Sequence[Record]) -> Table | None:  # noqa: ARG002
        """The one table that a person wants first, if this study has it."""
        return None

    def presets(self, environment: Environment) -> Mapping[str, Sequence[Flags]]:  # noqa: ARG002
        """This study's share of each preset on that machine."""
        return {}
