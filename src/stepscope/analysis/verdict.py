"""Verdict of a page: a step's time, its breakdown, its ideal time, and the changes worth making."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from stepscope.display import html_of

Meaning = Literal["ideal", "lost", "communication", "idle", "unattributed", "memory"]
_LIMIT_ERROR = 1.05
"""Ratio of the limit to the step from which the limit counts as wrong."""
MAX_PARTS = 7
MAX_CHANGES = 3

IDEAL = "ideal time"
MATMULS = "matmuls and attention"
SLOW_MATMULS = "slow matmuls"
MEMORY = "memory-bound operations"
COPIES = "casts and copies"
OPTIMIZER = "optimizer"
COMMUNICATION = "exposed communication"
IDLE = "device idle"
LOADER = "DataLoader"
OUTSIDE = "outside the model"
UNATTRIBUTED = "not attributed"
OTHER = "other"

_MEANINGS: dict[str, Meaning] = {
    IDEAL: "ideal",
    COMMUNICATION: "communication",
    IDLE: "idle",
    LOADER: "idle",
    UNATTRIBUTED: "unattributed",
}
_SHOWN_FROM = 1e-3
"""Parts below this share of the step are added to the largest loss."""


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all parts of a verdict."""


class Estimate(Data, frozen=True):
    """Milliseconds with their 95 % interval, or with the range of a prediction."""

    value: float
    low: float
    high: float


class BreakdownPart(Data, frozen=True):
    """One segment of the bar from the ideal to the measured step."""

    label: str
    ms: float
    meaning: Meaning

    @property
    def amount(self) -> float:
        return self.ms


class MemoryPart(Data, frozen=True):
    """One segment of the bar of memory: an owner and its bytes at the peak."""

    label: str
    bytes: int

    @property
    def amount(self) -> float:
        return float(self.bytes)

    @property
    def meaning(self) -> Meaning:
        return "memory"


class Limit(Data, frozen=True):
    """Ideal time of a step: its matmuls and its update at the measured ceilings of this machine."""

    matmul_ms: float
    update_ms: float
    dtype: str
    """The fastest dtype that a known change could give the matmuls."""

    @property
    def ms(self) -> float:
        return self.matmul_ms + self.update_ms


class RankedChange(Data, frozen=True):
    """A change and what it gains per step."""

    code: str
    title: str
    gain: Estimate
    verified: bool
    """Measured by a trial on this machine; otherwise predicted."""
    risk: str
    lines: tuple[str, ...]
    """The code to write."""
    warning: str = ""
    gain_bytes: int = 0
    """Predicted reduction of the peak memory; negative if it rises."""
    setting: str = ""
    """The setting that it changes; two changes of one setting exclude each other."""


class MemoryChange(Data, frozen=True):
    """The change that lowers the peak memory most."""

    code: str
    title: str
    gain_bytes: int
    gain_ms: float
    """Predicted gain of time; negative if it costs time."""
    best_after: str = ""
    """Title of the change with which it also gains time."""
    gain_after_ms: float = 0.0
    tried: bool = False
    """True if trials included it: then its predicted gains of time are not reported."""
    measured: Estimate | None = None
    """Measured gain of time; None if no trial isolates it."""


class OnCluster(Data, frozen=True):
    """The cluster for which a step is predicted, and how well the step scales to it."""

    ranks: int
    link: str
    strategy: str
    """How the ranks share the work, in words."""
    alone_ms: float
    """The recorded step of one rank, without communication."""
    efficiency: float
    """Throughput of the ranks over as many times that of one rank."""
    exposed_above: float
    """Share of exposed time above which scaling counts as not worthwhile."""
    stops_paying_at: int | None = None
    """Number of ranks from which on that share is exceeded, with bucketed gradients."""
    memory_bytes: float | None = None
    """Peak memory of a rank; None if it is not known."""
    device_bytes: int | None = None
    """Memory of the recorded device; None on a CPU."""

    @property
    def fits(self) -> bool | None:
        if self.memory_bytes is None or self.device_bytes is None:
            return None
        return self.memory_bytes <= self.device_bytes


class Evaluations(Data, frozen=True):
    """Timed steps that also ran the model without gradients; not part of the step time."""

    steps: int
    timed: int
    """All timed steps."""
    ms: float
    """Time by which they were longer, together."""


class Verdict(Data, frozen=True):
    """Summary of a step, with which every page, command and JSON output starts."""

    subject: str
    device: str
    step: Estimate | None = None
    timed: str = "step"
    """Unit that was timed: `step`, or `full trace` where no step is marked."""
    parts: tuple[BreakdownPart, ...] = ()
    """At most seven; they add up to the step."""
    memory: tuple[MemoryPart, ...] = ()
    """The memory at the peak by owner, for a verdict on memory: at most seven parts."""
    limit: Limit | None = None
    cluster: OnCluster | None = None
    """Set for a step that is predicted, not measured."""
    reachable_ms: float | None = None
    """The step with the best combination of known changes."""
    reachable_verified: bool = False
    reachable_with: tuple[str, ...] = ()
    """The titles of these changes."""
    reachable_warning: str = ""
    """Reason why this combination should not be adopted unseen, such as a loss that differs."""
    peak_bytes: int = 0
    """Peak memory of the step; 0 if it was not measured."""
    memory_change: MemoryChange | None = None
    mfu: float | None = None
    """Model FLOPs utilization in the dtype of the step."""
    dtype: str = ""
    changes: tuple[RankedChange, ...] = ()
    evaluations: Evaluations | None = None
    """Validations or rollouts that take a notable share of the training time."""
    uncertain: RankedChange | None = None
    """The largest predicted gain whose range includes zero, of a change that was not tried."""
    tried: int = 0
    """Changes, or combinations of them, whose gain was measured."""
    judged: bool = True
    """True if the advice rules were applied; they are not for the model of the studies."""
    trust: Literal["good", "noisy", "invalid"] = "good"
    trust_reason: str = ""
    next_command: str = ""

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def memory_bytes(self) -> int | None:
        """The memory at the peak, for a verdict on memory."""
        return sum(part.bytes for part in self.memory) if self.memory else None

    @property
    def limit_share(self) -> float | None:
        """The ideal time as a share of the measured step."""
        if self.limit is None or self.step is None or self.step.value <= 0:
            return None
        return min(1.0, self.limit.ms / self.step.value)

    @property
    def limit_is_wrong(self) -> bool:
        """True if the step is faster than its limit: the ceilings are too low."""
        if self.limit is None or self.step is None:
            return False
        return self.limit.ms > _LIMIT_ERROR * self.step.value

    @property
    def largest_loss(self) -> BreakdownPart | None:
        lost = [part for part in self.parts if part.meaning not in ("ideal", "unattributed")]
        return max(lost, key=lambda part: part.ms, default=None)

    @property
    def unattributed_ms(self) -> float:
        return sum(part.ms for part in self.parts if part.meaning == "unattributed")


def parts_of(spent: Mapping[str, float]) -> tuple[BreakdownPart, ...]:
    """Return at most seven parts with the same total: the ideal time first, then the largest."""
    least = _SHOWN_FROM * sum(spent.values())
    known = {label: ms for label, ms in spent.items() if ms > least}
    if known:
        largest = max(known, key=lambda label: (label != IDEAL, known[label]))
        known[largest] += sum(ms for ms in spent.values() if 0 < ms <= least)
    rest = sorted((label for label in known if label != IDEAL), key=lambda label: -known[label])
    room = MAX_PARTS - (IDEAL in known)
    if len(rest) > room:
        kept = [label for label in rest if label != OTHER][: room - 1]
        known[OTHER] = sum(known[label] for label in rest if label not in kept)
        rest = [*kept, OTHER]
    order = [*([IDEAL] if IDEAL in known else []), *rest]
    return tuple(
        BreakdownPart(label=label, ms=known[label], meaning=_MEANINGS.get(label, "lost"))
        for label in order
    )


def memory_parts(owners: Sequence[tuple[str, int]]) -> tuple[MemoryPart, ...]:
    """At most seven owners with the same total, the largest first."""
    largest = sorted((owner for owner in owners if owner[1] > 0), key=lambda owner: -owner[1])
    shown = largest if len(largest) <= MAX_PARTS else largest[: MAX_PARTS - 1]
    rest = largest[len(shown) :]
    if rest:
        shown = [*shown, (f"{len(rest)} more", sum(size for _, size in rest))]
    return tuple(MemoryPart(label=label, bytes=size) for label, size in shown)


def ranked(changes: Sequence[RankedChange]) -> tuple[RankedChange, ...]:
    """Sort by the lower end of the gain, largest first; keep only the best change of each
    setting."""
    order = sorted(changes, key=lambda change: -change.gain.low)
    best: dict[str, RankedChange] = {}
    for change in order:
        best.setdefault(change.setting or change.code, change)
    return tuple(best.values())[:MAX_CHANGES]
