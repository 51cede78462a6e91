"""Ranks on one machine: work on gradients and messages in flight need the same cores."""

from __future__ import annotations

from stepscope.analysis.rehearsal.replay import MessageQueue


class ContendedQueue(MessageQueue):
    """A queue in which work takes longer while a message is in flight, and delays messages."""

    def __init__(self, slowed: float = 1.0, drag: float = 0.0) -> None:
        """`slowed` is the slowdown of the work, `drag` the delay of messages in flight per ms of it
        (measured without messages)."""
        super().__init__()
        self.slowed, self.drag = slowed, drag

    def work(self, at: float, ms: float) -> float:
        if all(message.end <= at for message in self.sent):
            return ms
        late = self.drag * ms
        self._free += late if self._free > at else 0.0
        self.sent = [
            m._replace(start=m.start + (late if m.start > at else 0.0), end=m.end + late)
            if m.end > at
            else m
            for m in self.sent
        ]
        return self.slowed * ms
