"""The record: the immutable result of one case, and the parts it is made of.

Format history
  1  first published form
  2  notes: what is neither a number nor a sample
  3  quantities and series carry variant, phase, rank and size as fields; what is structured is an
     attachment; the rules that upgrade older records are in `upgrades`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from stepscope.errors import StepscopeError, in_one_line
from stepscope.records.config import Named, check_config, check_depth
from stepscope.records.decoding import from_json
from stepscope.records.names import require_case, require_name
from stepscope.records.upgrades import upgrade_from_2

SCHEMA_VERSION = 3

Status = Literal["ok", "oom", "error", "timeout", "skipped"]
Clock = Literal["device", "host"]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""What SQLite and a float can hold; JSON has integers of any length."""
Attempt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
T = TypeVar("T")


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything inside a record: immutable, named fields, no unknown ones."""


class Quantity(Part, frozen=True, omit_defaults=True):
    """One number that is not sampled, with its unit and what it belongs to."""

    name: str
    value: float
    unit: str
    variant: str = ""
    """Which of several things that were measured together: a strategy, a side of a race."""
    phase: str = ""
    rank: Count = 0
    size: Count = 0
    """Bytes or elements, where the same thing is measured for several."""


def quantities(values: Mapping[str, tuple[float, str]]) -> tuple[Quantity, ...]:
    """From names to values and units."""
    return tuple(
        Quantity(name=name, value=value, unit=unit) for name, (value, unit) in values.items()
    )


class Series(Part, frozen=True, omit_defaults=True):
    """Raw samples of one quantity in the order they were taken; nothing is ever dropped."""

    name: str
    unit: str
    values: tuple[float, ...]
    warmup: tuple[float, ...] = ()
    """Samples taken before steady state was assumed; kept, never mixed in."""
    clock: Clock = "host"
    """`device`: between events on the device's queue. `host`: by the host's clock."""
    rank: Count = 0
    variant: str = ""
    phase: str = ""
    size: Count = 0

    @property
    def label(self) -> str:
        """The name with what it belongs to, in words."""
        of = " ".join(filter(None, (self.variant, self.phase, str(self.size or ""))))
        return f"{self.name} of {of}" if of else self.name


class Ceiling(Part, frozen=True):
    """A limit of the machine, measured on it or read from a data sheet."""

    name: str
    value: float
    unit: str
    source: str
    """`measured`, or the data sheet it comes from."""
    detail: str = ""


class Reading(Part, frozen=True):
    """What the device said of itself at one moment during a case."""

    at_s: float
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] = ()
    waited_s: float | None = None
    """On a CPU: for how long threads of the process were ready and had no core, since it began."""


class Lint(Part, frozen=True):
    """A check of a record against physics that did not hold."""

    code: str
    message: str


class Environment(Part, frozen=True):
    """Where a record was made."""

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
    """The records that one command made."""

    id: str
    created: str
    """UTC, ISO 8601."""
    command: str
    """What to type to go on with it."""
    plan: str
    """Digest of the planned cases: the same request on the same kind of device has the same."""
    cases: Count

    def __post_init__(self) -> None:
        require_name("run", self.id)


class Record(Part, frozen=True):
    """The result of one case. An out-of-memory is a result too."""

    id: str
    run: str
    study: str
    case: str
    """Readable identity of the case within its study; equal cases of two runs compare."""
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
    """Text: why a part was left out, names of files beside the store."""
    attachments: dict[str, Any] = {}
    """What is structured: a ledger, a profile; `attachment` decodes it."""
    ceilings: tuple[Ceiling, ...] = ()
    readings: tuple[Reading, ...] = ()
    lints: tuple[Lint, ...] = ()
    version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        require_name("id", self.id)
        require_name("run", self.run)
        require_name("study", self.study)
        require_case("case", self.case)
        for part in ("config", "notes", "attachments"):
            held = getattr(self, part)
            if not isinstance(held, Named):
                where = f"the {part} of record {self.id} ({self.study} {self.case})"
                msgspec.structs.force_setattr(self, part, Named(held, where))

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
        """The series with these dimensions: of that clock, or the device's where there is one.

        Without a rank: the first rank's that has one.
        """
        matches = [
            one
            for one in self.series
            if (one.name, one.variant, one.phase, one.size) == (name, variant, phase, size)
            and clock in (None, one.clock)
            and rank in (None, one.rank)
        ]
        return min(matches, key=lambda one: one.clock, default=None)

    def quantity(
        self, name: str, *, variant: str = "", phase: str = "", rank: int = 0, size: int = 0
    ) -> float | None:
        wanted = (name, variant, phase, rank, size)
        for one in self.quantities:
            if (one.name, one.variant, one.phase, one.rank, one.size) == wanted:
                return one.value
        return None

    def attachment(self, name: str, kind: type[T]) -> T | None:
        """The attachment of that name as `kind`; None where the record has none."""
        return self.required(name, kind) if name in self.attachments else None

    def required(self, name: str, kind: type[T]) -> T:
        """An attachment that every such record has."""
        try:
            return msgspec.convert(self.attachments[name], kind)
        except msgspec.ValidationError as error:
            raise StepscopeError(
                f"attachment {name!a} of record {self.id} ({self.study} {self.case}) is invalid:"
                f" {in_one_line(error)}",
                "record it again",
            ) from error

    def ceiling(self, name: str, *, measured: bool = True) -> Ceiling | None:
        """The measured ceiling of that name, or the data sheet's."""
        for held in self.ceilings:
            if held.name == name and (held.source == "measured") == measured:
                return held
        return None


UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: lambda raw: raw,
    2: upgrade_from_2,
}
"""From a version to the next one, on the decoded JSON."""


def encode(record: Record) -> bytes:
    return msgspec.json.encode(record)


def decode(data: bytes | str) -> Record:
    """Read a record of this version or an older one; refuse a newer one."""
    try:
        raw = from_json(data)
    # A damaged store may give a null or a number where the text was.
    except (msgspec.DecodeError, TypeError) as error:
        raise StepscopeError(f"not a record: {in_one_line(error)}") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise StepscopeError(
            "not a record: it has no version", "it was not written by `stepscope export`"
        )
    if version > SCHEMA_VERSION:
        raise StepscopeError(
            f"the record has format version {version}, this Stepscope reads up to {SCHEMA_VERSION}",
            "install a newer Stepscope",
        )
    for step in range(version, SCHEMA_VERSION):
        if step not in UPGRADES:
            raise StepscopeError(f"the record has format version {step}, which has no upgrade")
        raw = UPGRADES[step](raw) | {"version": step + 1}
    try:
        record = msgspec.convert(raw, Record)
    except msgspec.ValidationError as error:
        raise StepscopeError(f"not a record: {in_one_line(error)}") from error
    for part in ("config", "attachments"):
        check_depth(getattr(record, part), part)
    check_config(record.config)
    return record
