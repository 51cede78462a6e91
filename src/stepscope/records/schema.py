"""The record: the immutable result of one case, and its parts.

Schema history
  1  first version
  2  notes: values that are neither numbers nor samples
  3  quantities and series have variant, phase, rank and size as fields; structured values are
     attachments
  4  new names, such as `failed_checks`; the first version in a release
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from stepscope.display import html_of
from stepscope.errors import StepscopeError, in_one_line
from stepscope.records.config import Named, check_config, check_depth
from stepscope.records.decoding import from_json
from stepscope.records.names import require_case, require_name
from stepscope.records.usual_ceilings import below_usual

SCHEMA_VERSION = 4

Status = Literal["ok", "oom", "error", "timeout", "skipped"]
Clock = Literal["device", "host"]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A 64-bit count, as in SQLite; integers in JSON have no limit."""
Attempt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
T = TypeVar("T")


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a record: immutable, keyword-only, without unknown fields."""


class Quantity(Part, frozen=True, omit_defaults=True):
    """A single number that is not sampled, with its unit and dimensions."""

    name: str
    value: float
    unit: str
    variant: str = ""
    """Name of one of several alternatives measured together, such as a strategy."""
    phase: str = ""
    rank: Count = 0
    size: Count = 0
    """Bytes or elements, if the quantity is measured for several sizes."""


def quantities(values: Mapping[str, tuple[float, str]]) -> tuple[Quantity, ...]:
    """Create quantities from a mapping of names to values and units."""
    return tuple(
        Quantity(name=name, value=value, unit=unit) for name, (value, unit) in values.items()
    )


class Series(Part, frozen=True, omit_defaults=True):
    """Raw samples of one quantity in the order they were taken; no sample is dropped."""

    name: str
    unit: str
    values: tuple[float, ...]
    warmup: tuple[float, ...] = ()
    """Samples taken before steady state was assumed; stored separately."""
    clock: Clock = "host"
    """`device`: between CUDA events on the device's queue. `host`: by the CPU clock."""
    rank: Count = 0
    variant: str = ""
    phase: str = ""
    size: Count = 0

    @property
    def label(self) -> str:
        """The name with its dimensions, in words."""
        of = " ".join(filter(None, (self.variant, self.phase, str(self.size or ""))))
        return f"{self.name} of {of}" if of else self.name


class Ceiling(Part, frozen=True, omit_defaults=True):
    """A limit of the machine, measured on it or taken from a datasheet."""

    name: str
    value: float
    unit: str
    source: str
    """`measured`, or the name of the datasheet."""
    detail: str = ""
    doubt: str = ""
    """Reason why the machine may be faster than this; empty if the measurement is reliable."""

    def checked(self, environment: Environment) -> Ceiling:
        """Return this ceiling, with a doubt if it was measured far below the usual value."""
        if self.doubt or self.source != "measured":
            return self
        power = environment.power_limit_w
        low = below_usual(environment.device_name, power, self.name, self.value)
        return msgspec.structs.replace(self, doubt=low) if low else self


class Reading(Part, frozen=True):
    """Clocks, power and throttling of the device at one moment during a case."""

    at_s: float
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] = ()
    waited_s: float | None = None
    """On a CPU: seconds that threads of the process were runnable without a core, since it began.
    """


class FailedCheck(Part, frozen=True):
    """A failed check of a record against physics."""

    code: str
    message: str


class Environment(Part, frozen=True):
    """The machine and software of a measurement."""

    device_kind: str
    device_name: str
    device_count: Count
    device_memory_bytes: Count
    cpu: str
    cpu_cores: Count
    host_memory_bytes: Count
    threads: Count
    platform: str
    python: str
    torch: str
    stepscope: str
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    triton: str | None = None
    power_limit_w: float | None = None
    max_sm_clock_mhz: float | None = None
    load_average: float | None = None
    commit: str | None = None
    dirty: bool | None = None


class Run(Part, frozen=True):
    """The records of one command."""

    id: str
    created: str
    """UTC, ISO 8601."""
    command: str
    """Command line that resumes the run."""
    plan: str
    """Digest of the planned cases; equal for the same request on the same kind of device."""
    cases: Count

    def __post_init__(self) -> None:
        require_name("run", self.id)


class Record(Part, frozen=True):
    """The result of one case. An out-of-memory is a result too."""

    id: str
    run: str
    study: str
    case: str
    """Readable identity of the case within its study; equal cases of two runs can be compared."""
    config: dict[str, Any]
    status: Status
    environment: Environment
    started: str
    """UTC, ISO 8601."""
    elapsed_s: float
    reason: str = ""
    attempt: Attempt = 1
    series: tuple[Series, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    notes: dict[str, str] = {}
    """Texts: why a part is missing, names of files next to the store."""
    attachments: dict[str, Any] = {}
    """Structured values, such as a ledger or a profile; `attachment` decodes them."""
    ceilings: tuple[Ceiling, ...] = ()
    readings: tuple[Reading, ...] = ()
    failed_checks: tuple[FailedCheck, ...] = ()
    version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        require_name("id", self.id)
        require_name("run", self.run)
        require_name("study", self.study)
        require_case("case", self.case)
        name = f"{self.id} ({self.study} {self.case})"
        for part in ("config", "notes", "attachments"):
            entries = getattr(self, part)
            if not isinstance(entries, Named):
                msgspec.structs.force_setattr(self, part, Named(entries, part, name))

    def _repr_html_(self) -> str:
        return html_of(self)

    def find(
        self,
        name: str,
        clock: Clock | None = None,
        *,
        variant: str = "",
        phase: str = "",
        rank: int | None = None,
        size: int = 0,
    ) -> Series | None:
        """Return the series with these dimensions, or None. Without `clock`, the device's clock is
        preferred; without `rank`, the first rank that has the series.
        """
        matches = [
            series
            for series in self.series
            if (series.name, series.variant, series.phase, series.size)
            == (name, variant, phase, size)
            and clock in (None, series.clock)
            and rank in (None, series.rank)
        ]
        return min(matches, key=lambda series: series.clock, default=None)

    def quantity(
        self, name: str, *, variant: str = "", phase: str = "", rank: int = 0, size: int = 0
    ) -> float | None:
        wanted = (name, variant, phase, rank, size)
        for quantity in self.quantities:
            if (
                quantity.name,
                quantity.variant,
                quantity.phase,
                quantity.rank,
                quantity.size,
            ) == wanted:
                return quantity.value
        return None

    def attachment(self, name: str, kind: type[T]) -> T | None:
        """Return the attachment of that name as `kind`; None if the record does not have it."""
        return self.required(name, kind) if name in self.attachments else None

    def required(self, name: str, kind: type[T]) -> T:
        """Return an attachment that the record must have."""
        try:
            return msgspec.convert(self.attachments[name], kind)
        except msgspec.ValidationError as error:
            raise StepscopeError(
                f"attachment {name!a} of record {self.id} ({self.study} {self.case}) is invalid:"
                f" {in_one_line(error)}",
                "record it again",
            ) from error

    def ceiling(self, name: str, *, measured: bool = True) -> Ceiling | None:
        """Return the ceiling of that name: the measured one, or the one of the datasheet. One that
        is far below the usual value of the device has a doubt."""
        for ceiling in self.ceilings:
            if ceiling.name == name and (ceiling.source == "measured") == measured:
                return ceiling.checked(self.environment)
        return None


UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""Upgrades from each released version to the next, on the decoded JSON."""


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes | str) -> Record:
    """Decode a record of this or an older schema version; raise an error for a newer one."""
    try:
        raw = from_json(data)
    # A damaged store may contain a null or a number instead of the text.
    except (msgspec.DecodeError, TypeError) as error:
        raise StepscopeError(f"not a record: {in_one_line(error)}") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise StepscopeError(
            "not a record: it has no version", "it was not written by `stepscope export`"
        )
    if version > SCHEMA_VERSION:
        raise StepscopeError(
            f"the record has schema version {version}, this Stepscope reads up to {SCHEMA_VERSION}",
            "install a newer Stepscope",
        )
    for step in range(version, SCHEMA_VERSION):
        if step not in UPGRADES:
            raise StepscopeError(
                f"the record has schema version {step}, which precedes the first release",
                "record it again",
            )
        raw = UPGRADES[step](raw) | {"version": step + 1}
    try:
        record = msgspec.convert(raw, Record)
    except msgspec.ValidationError as error:
        raise StepscopeError(f"not a record: {in_one_line(error)}") from error
    for part in ("config", "attachments"):
        check_depth(getattr(record, part), part)
    check_config(record.config)
    # Most records of a file share these, which have half of the objects of a record.
    for part in ("environment", "ceilings"):
        msgspec.structs.force_setattr(record, part, _shared(getattr(record, part)))
    return record


@lru_cache(maxsize=64)
def _shared(part: Any) -> Any:
    """Return the first one that is equal."""
    return part
