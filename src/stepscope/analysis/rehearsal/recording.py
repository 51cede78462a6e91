"""What was recorded of one step on one device: when each gradient was ready, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import StatisticsError, median

from stepscope.errors import StepscopeError, in_one_line
from stepscope.parallel.buckets import Item
from stepscope.records.decoding import Int64
from stepscope.records.schema import Part, Record, Series

NOTE = "recording"
"""Under this name a record keeps the gradients."""
PHASES = ("forward", "backward", "optimizer")


class ReadyTimes(Part, frozen=True):
    """A gradient as it was recorded, in the order of the model's parameters."""

    name: str
    elements: Int64
    element_bytes: Int64
    kind: str
    """Format and device: what the gradients of a bucket must share."""
    ready_ms: tuple[float, ...]
    """From the start of the backward until it was there, in each recorded step."""


class Gradient(Part, frozen=True):
    item: Item
    ready: float
    """Median over the recorded steps, in ms from the start of the backward."""

    @property
    def bytes(self) -> int:
        return self.item.elements * self.item.element_bytes


class Recording(Part, frozen=True):
    """A step without communication: its phases in ms, its gradients in the model's order."""

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    gradients: tuple[Gradient, ...]

    def __post_init__(self) -> None:
        if not self.gradients:
            raise StepscopeError("the recording has no gradient")

    @classmethod
    def of_samples(cls, series: Sequence[Series], times: Sequence[ReadyTimes]) -> Recording:
        taken = {
            held.name: median(held.values)
            for held in series
            if held.name in PHASES and not held.variant
        }
        gradients = tuple(
            Gradient(
                item=Item(held.name, held.elements, held.element_bytes, held.kind),
                ready=median(held.ready_ms),
            )
            for held in times
        )
        # Medians of different samples may cross by a little; the backward ends last.
        last = max((gradient.ready for gradient in gradients), default=0.0)
        return cls(
            forward_ms=taken["forward"],
            backward_ms=max(taken["backward"], last),
            optimizer_ms=taken["optimizer"],
            gradients=gradients,
        )

    @property
    def compute_ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.optimizer_ms

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.bytes for gradient in self.gradients)

    @property
    def order(self) -> list[int]:
        """Places of the gradients in the order in which they were ready."""
        return sorted(range(len(self.gradients)), key=lambda place: self.gradients[place].ready)

    def half_ready(self) -> float:
        """The share of the backward after which half of the gradients' bytes were ready."""
        held = 0
        for place in self.order:
            held += self.gradients[place].bytes
            if 2 * held >= self.gradient_bytes:
                return self.gradients[place].ready / self.backward_ms
        return 1.0

    def with_batch(self, factor: float) -> Recording:
        """As if the batch were so many times as large: the optimizer's time does not change."""
        return self._scaled(factor, 1.0)

    def on_faster_device(self, factor: float) -> Recording:
        """As if everything were computed so many times as fast."""
        return self._scaled(1 / factor, 1 / factor)

    def _scaled(self, passes: float, update: float) -> Recording:
        return Recording(
            forward_ms=passes * self.forward_ms,
            backward_ms=passes * self.backward_ms,
            optimizer_ms=update * self.optimizer_ms,
            gradients=tuple(Gradient(item=g.item, ready=passes * g.ready) for g in self.gradients),
        )


def recording_of(record: Record) -> Recording | None:
    """The recording that a record holds."""
    if record.status != "ok" or NOTE not in record.attachments:
        return None
    try:
        times = record.required(NOTE, tuple[ReadyTimes, ...])
        return Recording.of_samples(record.series, times)
    except (StepscopeError, KeyError, StatisticsError) as error:
        raise StepscopeError(
            f"record {record.id} holds no whole recording: {in_one_line(error)}"
        ) from error
