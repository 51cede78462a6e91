"""Gradients on the side stream of an optimizer-in-backward, whoever reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor

from side_stream_cases import (
    READERS,
    Net,
    Reader,
    hooked_after,
    hooked_before,
    in_backward,
    torch_adamw,
    trained,
    unread,
    used_by_a_penalty,
    used_twice,
)
from stepscope.optim import InBackwardAdamW
from stepscope.torch_tools.side_stream import SideStream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE, STEPS = (2, 5, 8), 3


class LateStream(SideStream):
    """Runs its work as late as a GPU may: when something waits for it. Until then, results are
    NaN."""

    def __init__(self) -> None:
        self.joins = 0
        self.computed = 0
        self.waits: list[int] = []
        """Number of waits per step that made work run before the end of the step."""
        self._works: list[Callable[[], None]] = []
        self._run = self._waited = 0

    def run(self, work: Callable[[], None], reads: Tensor | None) -> int:
        del reads
        self._works.append(work)
        return len(self._works)

    def compute(
        self, work: Callable[[], None], reads: Tensor, results: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        self.computed += 1
        for result in results:
            result.fill_(torch.nan)
        return super().compute(work, reads, results)

    def wait(self, done: int) -> None:
        self._waited += done > self._run
        for work in self._works[self._run : done]:
            work()
        self._run = max(self._run, done)

    def join(self) -> None:
        self.waits.append(self._waited)
        self.wait(len(self._works))
        self._waited = 0
        self.abandon()

    def abandon(self) -> None:
        self._works.clear()
        self._run = 0
        self.joins += 1


class Late(InBackwardAdamW):
    """An optimizer-in-backward with one such stream."""

    def __init__(self, net: Net, late: LateStream, **options: Any) -> None:
        self.late = late
        super().__init__(net.parameters(), attach=False, lr=1e-2, eps=1e-2, **options)

    def side_stream(self, device: torch.device) -> SideStream | None:
        self._side_streams[device] = self.late
        return self.late


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_every_reader_sees_complete_gradients(reader: Reader) -> None:
    late = LateStream()
    net, losses, seen = trained(reader, partial(Late, late=late), SHAPE, DEVICE, STEPS)
    plain, expected, known = trained(reader, torch_adamw, SHAPE, DEVICE, STEPS, fused=False)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen, known, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("reader", "computed", "waits"),
    [
        (unread, 2 * STEPS, [False, False, False]),
        # In the second step it is known that the gradients are sums of two.
        (used_twice, 2 * 2, [True, False, False]),
        (used_by_a_penalty, 2, [True, False, False]),
        (hooked_after, 0, [False, False, False]),
        (hooked_before, 0, [False, False, False]),
    ],
)
def test_the_main_stream_waits_only_for_other_readers(
    reader: Reader, computed: int, waits: list[bool]
) -> None:
    """The two are the norms."""
    late = LateStream()
    trained(reader, partial(Late, late=late), SHAPE, DEVICE, STEPS)
    assert late.computed == computed
    assert [count > 0 for count in late.waits] == waits


def test_a_gradient_that_exists_is_accumulated_into() -> None:
    results = []
    for create in (partial(Late, late=LateStream()), in_backward):
        net = Net(8, True).to(DEVICE)
        for _, one in net.summed():
            one.grad = torch.ones_like(one)
        optimizer = create(net)
        with optimizer.attached():
            net(torch.ones(SHAPE, device=DEVICE)).backward()
        optimizer.step()
        results.append(net.state_dict())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def _saved(gradient: Tensor) -> Tensor:
    file = BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


@pytest.mark.parametrize(
    "read",
    [
        torch.clone,
        copy.deepcopy,
        _saved,
        torch.from_dlpack,
        lambda gradient: torch.from_numpy(gradient.numpy(force=True)),
        lambda gradient: torch.empty_like(gradient).set_(gradient.untyped_storage()),
    ],
    ids=["clone", "deepcopy", "save", "dlpack", "numpy", "storage"],
)
def test_gradients_that_are_returned_can_be_read(read: Callable[[Tensor], Tensor]) -> None:
    """`torch.autograd.grad` returns them as they are."""
    x = torch.ones(SHAPE, device=DEVICE)
    net, plain = Net(8, True).to(DEVICE), Net(8, False).to(DEVICE)
    late = LateStream()
    with Late(net, late).attached():
        (of_scale,) = torch.autograd.grad(net(x), [net.scale])
    (expected,) = torch.autograd.grad(plain(x), [plain.scale])
    assert late.computed
    torch.testing.assert_close(read(of_scale).to(DEVICE), expected, rtol=1e-4, atol=1e-5)


def test_parameters_of_another_optimizer_are_not_overlapped() -> None:
    """Its hooks would run updates on another side stream."""
    net, late, other = Net(8, True).to(DEVICE), LateStream(), LateStream()
    summed = {one for _, one in net.summed()}
    first = Late(net, late)
    first.param_groups[0]["params"] = [one for one in net.parameters() if one in summed]
    second = Late(net, other)
    second.param_groups[0]["params"] = [one for one in net.parameters() if one not in summed]
    with first.attached(), second.attached():
        net(torch.ones(SHAPE, device=DEVICE)).backward()
    for optimizer in (first, second):
        optimizer.step()
    assert late.computed == other.computed == 0
    assert all(torch.isfinite(one).all() for one in net.parameters())
