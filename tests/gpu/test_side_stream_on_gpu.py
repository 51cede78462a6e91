"""Gradients on the side stream of an optimizer-in-backward on a GPU, whoever reads them.

The side stream is delayed before each gradient, and the memory of the gradient is NaN until then:
whoever reads it too early gets NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from side_stream_cases import (
    READERS,
    Reader,
    checked_for_nan,
    hooked_after,
    hooked_before,
    hooked_node,
    in_backward,
    torch_adamw,
    trained,
    unread,
)
from stepscope.torch_tools.side_stream import SideStream

SHAPE, STEPS = (4, 2048, 1024), 5
DELAY = 5_000_000
"""Clock cycles, some milliseconds."""


class Delayed:
    """What happened on side streams."""

    computed = waits = 0


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> Delayed:
    counts, compute, wait = Delayed(), SideStream.compute, SideStream.wait

    def late(
        stream: SideStream, work: Callable[[], None], reads: Tensor, results: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        counts.computed += 1
        for result in results:
            result.fill_(torch.nan)
        stream.run(partial(torch.cuda._sleep, DELAY), None)  # type: ignore[attr-defined]
        return compute(stream, work, reads, results)

    def counted(stream: SideStream, done: Any) -> None:
        counts.waits += 1
        wait(stream, done)

    monkeypatch.setattr(SideStream, "compute", late)
    monkeypatch.setattr(SideStream, "wait", counted)
    return counts


@pytest.fixture(scope="module")
def expected() -> dict[Reader, Any]:
    """Results of torch's own operators and AdamW."""
    return {
        reader: trained(reader, torch_adamw, SHAPE, "cuda", STEPS, fused=False)
        for reader in READERS
    }


CAPTURED = [reader for reader in READERS if reader not in (checked_for_nan, hooked_node)]
"""A check for NaN waits on the host, and hooks of nodes keep these on the stream of the first
step."""


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("reader", "graph"),
    [*((one, "off") for one in READERS), *((one, "on") for one in CAPTURED)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_reader_sees_complete_gradients(
    reader: Reader, graph: str, delayed: Delayed, expected: dict[Reader, Any]
) -> None:
    net, losses, seen = trained(reader, in_backward, SHAPE, "cuda", STEPS, graph=graph)
    plain, known_losses, known = expected[reader]
    torch.testing.assert_close(losses, known_losses, rtol=1e-4, atol=1e-4)
    # Sums over 8,192 rows in another order, of terms that nearly cancel out.
    torch.testing.assert_close(seen, known, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)
    hooked = reader in (hooked_after, hooked_before)
    assert (delayed.computed == 0) is hooked
    assert (delayed.waits == 0) is (hooked or reader is unread)
