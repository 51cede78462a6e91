"""A case of a study, and what a worker returns for it. Loads without torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import msgspec

from stepscope.records.config import check_config
from stepscope.records.names import require_case
from stepscope.records.schema import Part, Quantity, Reading, Record, Series

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


C = TypeVar("C", bound=Case)


class Result(NamedTuple, Generic[C]):
    """A record with its decoded case; rows and findings are built from it."""

    record: Record
    case: C


K = TypeVar("K", bound=Case)


def results_of(results: Sequence[Result[Any]], kind: type[K]) -> list[Result[K]]:
    """The results whose case is of one type of a study's union."""
    return [result for result in results if isinstance(result.case, kind)]
