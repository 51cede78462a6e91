"""Recording of one step on one device: when each gradient was ready, and the phase times."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import StatisticsError, median

from stepscope.errors import StepscopeError, in_one_line
from stepscope.parallel.buckets import Item
from stepscope.records.decoding import Int64
from stepscope.records.schema import Part, Record, Series

NOTE = "recording"
"""Name of the record attachment with the gradients."""
PHASES = ("forward", "backward", "optimizer")
EVEN_GRADIENTS = 64
"""Gradients of a step of which only the number of parameters is known."""
ELEMENT_BYTES = 4
"""Of a gradient in float32."""


class ReadyTimes(Part, frozen=True):
    """Recorded ready times of a gradient, in the order of the model's parameters."""

    name: str
    elements: Int64
    element_bytes: Int64
    kind: str
    """Dtype and device, which all gradients of a bucket must share."""
    ready_ms: tuple[float, ...]
    """Time from the start of the backward pass until it was ready, in each recorded step."""


class Gradient(Part, frozen=True):
    """A gradient with its median ready time."""

    item: Item
    ready: float
    """Median over the recorded steps, in ms from the start of the backward pass."""

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
        """Build a recording from the medians of the samples."""
        taken = {
            samples.name: median(samples.values)
            for samples in series
            if samples.name in PHASES and not samples.variant
        }
        gradients = tuple(
            Gradient(
                item=Item(gradient.name, gradient.elements, gradient.element_bytes, gradient.kind),
                ready=median(gradient.ready_ms),
            )
            for gradient in times
        )
        # Medians of different samples may differ slightly; the backward pass ends last.
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
        """Indices of the gradients in the order in which they were ready."""
        return sorted(range(len(self.gradients)), key=lambda index: self.gradients[index].ready)

    def half_ready(self) -> float:
        """Share of the backward pass after which half of the gradients' bytes were ready."""
        ready_bytes = 0
        for index in self.order:
            ready_bytes += self.gradients[index].bytes
            if 2 * ready_bytes >= self.gradient_bytes:
                return self.gradients[index].ready / self.backward_ms
        return 1.0

    def with_batch(self, factor: float) -> Recording:
        """Scale to a batch `factor` times as large; the optimizer's time does not change."""
        return self._scaled(factor, 1.0)

    def on_faster_device(self, factor: float) -> Recording:
        """Scale to a device that is `factor` times as fast."""
        return self._scaled(1 / factor, 1 / factor)

    def _scaled(self, passes: float, update: float) -> Recording:
        return Recording(
            forward_ms=passes * self.forward_ms,
            backward_ms=passes * self.backward_ms,
            optimizer_ms=update * self.optimizer_ms,
            gradients=tuple(Gradient(item=g.item, ready=passes * g.ready) for g in self.gradients),
        )


def even_recording(
    forward_ms: float,
    backward_ms: float,
    optimizer_ms: float,
    parameters: int,
    gradients: int = EVEN_GRADIENTS,
) -> Recording:
    """Return a recording whose gradients have equal sizes and become ready evenly, the last
    parameters of the model first."""
    count = min(gradients, parameters)
    ends = [parameters * (index + 1) // count for index in range(count)]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return Recording(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        optimizer_ms=optimizer_ms,
        gradients=tuple(
            Gradient(
                item=Item(
                    name=f"part {index}", elements=size, element_bytes=ELEMENT_BYTES, kind="even"
                ),
                ready=backward_ms * (count - index) / count,
            )
            for index, size in enumerate(sizes)
        ),
    )


def recording_of(record: Record) -> Recording | None:
    """Return the recording in a record, if it has one."""
    if record.status != "ok" or NOTE not in record.attachments:
        return None
    try:
        times = record.required(NOTE, tuple[ReadyTimes, ...])
        return Recording.of_samples(record.series, times)
    except (StepscopeError, KeyError, StatisticsError) as error:
        raise StepscopeError(
            f"record {record.id} has no complete recording: {in_one_line(error)}"
        ) from error
