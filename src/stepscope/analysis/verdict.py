"""Verdict of a page: a step's time, its breakdown, its hardware limit, the changes worth making."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from stepscope.analysis.parts import (
    COMMUNICATION,
    DEFINITIONS,
    IDEAL,
    IDLE,
    KINDS,
    LOADER,
    OTHER,
    UNATTRIBUTED,
)
from stepscope.display import html_of

Meaning = Literal["ideal", "lost", "communication", "idle", "unattributed", "memory"]
TrustState = Literal["good", "noisy", "invalid", "incomplete", "unchecked"]
"""Trust level of the records; or `incomplete`, if the recording ended before its last step; or
`unchecked`, if nothing shows how busy the machine was, as in a trace."""
RELIABLE: tuple[TrustState, ...] = ("good", "incomplete", "unchecked")
"""States whose times are reported and whose changes are ranked."""
_LIMIT_ERROR = 1.05
"""Ratio of the limit to the step from which the limit counts as wrong."""
MAX_PARTS = 7
MAX_CHANGES = 3
MAX_NAMED_LINES = 3

MEANINGS: dict[str, Meaning] = {
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


class AtMost(Data, tag="at-most", frozen=True):
    """An upper bound: a number that rests on a ceiling which may be too low."""

    value: float
    reason: str = ""


Share = float | AtMost
FASTER = "parts of the step are faster than the measured ceilings"
"""Doubt about a limit that a step disproves."""


def plain(share: Share) -> float:
    """Return the number, whether it is a bound or not."""
    return share.value if isinstance(share, AtMost) else share


def at_most(value: float, doubt: str) -> Share:
    """Return the number, as a bound if there is a doubt about a ceiling that it rests on."""
    return AtMost(value=value, reason=doubt) if doubt else value


class Estimate(Data, frozen=True):
    """Milliseconds with their 95 % interval, or with the range of a prediction."""

    value: float
    low: float
    high: float


class Gain(Estimate, frozen=True):
    """Time that a change gains per step, measured by trials or predicted."""

    measured: bool = False
    on_top_of: tuple[str, ...] = ()
    """Titles of the changes that the step already had; empty for the gain of the change alone."""


class BreakdownPart(Data, frozen=True):
    """One segment of the bar from the hardware limit to the measured step."""

    label: str
    ms: float
    meaning: Meaning
    code: str = ""
    """Stable name of its kind; see `analysis.parts`."""

    @property
    def definition(self) -> str:
        """What the part is; empty for one that is named where it is made."""
        return DEFINITIONS.get(self.code, "")

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

    @property
    def definition(self) -> str:
        return ""


class Limit(Data, frozen=True):
    """Hardware limit of a step: its matmuls and its update at the measured ceilings of this
    machine."""

    matmul_ms: float
    update_ms: float
    dtype: str
    """The fastest dtype that a known change could give the matmuls."""
    doubt: str = ""
    """Reason why the limit may be lower: a ceiling that was measured too low."""

    @property
    def ms(self) -> float:
        return self.matmul_ms + self.update_ms

    @property
    def time(self) -> Share:
        """The limit in milliseconds, as a bound if there is a doubt."""
        return at_most(self.ms, self.doubt)

    def share_of(self, step_ms: float) -> Share:
        """The limit as a share of a step."""
        return at_most(min(1.0, self.ms / step_ms), self.doubt)


class RankedChange(Data, frozen=True):
    """A change and what it gains per step."""

    code: str
    title: str
    gain: Gain
    risk: str
    lines: tuple[str, ...]
    """The code to write."""
    warning: str = ""
    gain_bytes: int = 0
    """Predicted reduction of the peak memory; negative if it rises."""
    setting: str = ""
    """The setting that it changes; two changes of one setting exclude each other."""


class CostlyLine(Data, frozen=True):
    """A line of the user's code that costs more than it has to; numbers are per step."""

    code: str
    """The rule that names it."""
    where: str
    """File, relative to the folder of the script, and line."""
    source: str
    """The text of the line."""
    title: str
    """What it does."""
    advice: str
    """What to write instead."""
    times: int
    """How often it runs, or its iterations; 0 if unknown."""
    ms: float
    """What it costs of the step."""
    share: float
    host_ms: float = 0.0
    device_ms: float = 0.0
    wait_ms: float = 0.0
    operators: int = 0
    copied_bytes: int = 0
    allocated_bytes: int = 0


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
    measured: Gain | None = None
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


class SlowestRank(Data, frozen=True):
    """The rank that the others wait for."""

    rank: int
    late_ms: float
    """How much later than the first rank it arrives at a collective, on average."""


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
    mfu: Share | None = None
    """Model FLOPs utilization in the dtype of the step."""
    dtype: str = ""
    changes: tuple[RankedChange, ...] = ()
    lines: tuple[CostlyLine, ...] = ()
    """The lines of the user's code to change first."""
    evaluations: Evaluations | None = None
    """Validations or rollouts that take a notable share of the training time."""
    slowest: SlowestRank | None = None
    """None with one rank, or if none delays the others."""
    uncertain: RankedChange | None = None
    """The largest predicted gain whose range includes zero, of a change that was not tried."""
    tried: int = 0
    """Changes, or combinations of them, whose gain was measured."""
    not_tried: str = ""
    """Reason why no trial could be completed; empty if one was, or none was started."""
    undecided: RankedChange | None = None
    """The largest measured gain that the trials do not distinguish from zero."""
    unchanged_ms: float | None = None
    """Time of the unchanged step in the trials; None without trials."""
    listed_ms: float | None = None
    """Time of the same step in the table of the page, from another measurement."""
    not_evaluated: tuple[str, ...] = ()
    """Titles of changes that could not be predicted, because an input is missing."""
    judged: bool = True
    """True if the advice rules were applied; they are not for the model of the studies."""
    order: tuple[str, ...] = ()
    """Titles of changes in their order where times are not reliable; no gain is known."""
    order_by: str = ""
    """What the order is by: device time, CPU time, instructions."""
    trust: TrustState = "good"
    trust_reason: str = ""
    next_command: str = ""
    next_on_recording: str = ""
    """The next command without the program, where a recording can take its place; else empty."""

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def memory_bytes(self) -> int | None:
        """The memory at the peak, for a verdict on memory."""
        return sum(part.bytes for part in self.memory) if self.memory else None

    @property
    def limit_share(self) -> Share | None:
        """The hardware limit as a share of the measured step."""
        if self.limit is None or self.step is None or self.step.value <= 0:
            return None
        return self.limit.share_of(self.step.value)

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


def parts_of(
    spent: Mapping[str, float], names: Mapping[str, str] | None = None
) -> tuple[BreakdownPart, ...]:
    """Return at most seven parts with the same total: the hardware limit first, then the largest.
    `names` are those of this step, where they differ (`parts.part_names`)."""
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
        BreakdownPart(
            label=(names or {}).get(label, label),
            ms=known[label],
            meaning=MEANINGS.get(label, "lost"),
            code=KINDS[label].code if label in KINDS else "",
        )
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
