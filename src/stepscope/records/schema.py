"""The record: the immutable result of one case, and the parts it is made of.

Format history
  1  first published form
  2  notes: what is neither a number nor a sample
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from stepscope.errors import StepscopeError, in_one_line
from stepscope.records.config import Named, check_config
from stepscope.records.decoding import from_json
from stepscope.records.names import require_case, require_name

SCHEMA_VERSION = 2

Status = Literal["ok", "oom", "error", "timeout", "skipped"]
Clock = Literal["device", "host"]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""What SQLite and a float can hold; JSON has integers of any length."""
Attempt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything inside a record: immutable, named fields, no unknown ones."""


class Quantity(Part, frozen=True):
    """One number that is not sampled, with its unit."""

    value: float
    unit: str


class Series(Part, frozen=True):
    """Raw samples of one quantity in the order they were taken; nothing is ever dropped."""

    name: str
    unit: str
    values: tuple[float, ...]
    warmup: tuple[float, ...] = ()
    """Samples taken before steady state was assumed; kept, never mixed in."""
    clock: Clock = "host"
    """`device`: between events on the device's queue. `host`: by the host's clock."""
    rank: Count = 0


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
    quantities: dict[str, Quantity] = {}
    notes: dict[str, str] = {}
    """What was seen and is no number: names of the kernels that ran, why a part was left out."""
    ceilings: tuple[Ceiling, ...] = ()
    readings: tuple[Reading, ...] = ()
    lints: tuple[Lint, ...] = ()
    version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        require_name("id", self.id)
        require_name("run", self.run)
        require_name("study", self.study)
        require_case("case", self.case)
        for part in ("config", "notes"):
            held = getattr(self, part)
            if not isinstance(held, Named):
                where = f"the {part} of record {self.id} ({self.study} {self.case})"
                msgspec.structs.force_setattr(self, part, Named(held, where))

    def find(self, name: str, clock: Clock | None = None) -> Series | None:
        """The series of that name: of that clock, or the device's where there is one."""
        found = [s for s in self.series if s.name == name and clock in (None, s.clock)]
        return min(found, key=lambda s: s.clock, default=None)

    def quantity(self, name: str) -> float | None:
        held = self.quantities.get(name)
        return None if held is None else held.value

    def ceiling(self, name: str, *, measured: bool = True) -> Ceiling | None:
        """The measured ceiling of that name, or the data sheet's."""
        for held in self.ceilings:
            if held.name == name and (held.source == "measured") == measured:
                return held
        return None


UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: lambda raw: raw}
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
    check_config(record.config)
    return record
