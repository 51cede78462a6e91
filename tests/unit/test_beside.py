"""Work that an optimizer-in-backward overlaps with the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.torch_tools.side_stream import (
    AsyncTensor,
    SideStream,
    compute_gradients,
    gradient_consumer,
    offered,
)


class DelayedStream(SideStream):
    """A side stream that stores its work, to be run when it is waited for."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []
        self.joins = self.begun = 0

    def run(self, work: Callable[[], None], reads: Tensor | None) -> int:
        del reads
        self.works.append(work)
        return len(self.works)

    def wait(self, done: int) -> None:
        while self.begun < done:
            self.begun += 1
            self.works[self.begun - 1]()


class FakeOptimizer:
    """A side stream for the gradients of some parameters, and weights whose gradients it
    consumes."""

    def __init__(
        self,
        stream: SideStream | None = None,
        parameters: Sequence[Tensor] = (),
        weights: Sequence[Tensor] = (),
    ) -> None:
        self._stream, self._parameters, self._weights = stream, parameters, weights

    def gradient_stream(self, parameters: Sequence[Tensor]) -> SideStream | None:
        known = all(any(one is mine for mine in self._parameters) for one in parameters)
        return self._stream if known else None

    def takes(self, weight: Tensor, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and any(weight is known for known in self._weights)

    def take(self, weight: Tensor, gradient: Tensor) -> None: ...


def test_gradients_of_its_parameters_are_computed_on_the_offered_side_stream() -> None:
    first, second, foreign = (torch.zeros(3) for _ in range(3))
    stream = DelayedStream()

    def computed(*parameters: Tensor | None) -> bool:
        """Return whether the side stream computes the gradient."""
        result = torch.full((3,), torch.nan)
        work = partial(result.fill_, 7.0)
        (made,) = compute_gradients(parameters, work, torch.zeros(3), (result,))  # type: ignore[arg-type]
        late = isinstance(made, AsyncTensor)
        assert late is bool(torch.isnan(result).any())
        assert torch.equal(made * 2, torch.full((3,), 14.0))
        return late

    assert not computed(first)
    with offered(FakeOptimizer(stream, (first, second))):
        assert computed(first)
        assert computed(first, second)
        assert not computed(first, foreign)
        assert not computed(first, None)
        assert not computed()
        with offered(FakeOptimizer()):
            assert not computed(first)
        assert computed(second)
    assert not computed(first)


READS: dict[str, Callable[[Tensor], object]] = {
    "an operator": lambda x: x + 1,
    "as the second argument": lambda x: torch.zeros(4) + x,
    "in a list": lambda x: torch._foreach_norm([x]),
    "in place": lambda x: x.mul_(2),
    "out": lambda x: torch.add(torch.zeros(4), 1, out=x),
    "of a view": lambda x: x.detach()[1:].sum(),
    "of a part": lambda x: torch.split(x, [1, 3])[1].sum(),
    "clone": lambda x: x.clone(),
    "cast": lambda x: x.double(),
    "data": lambda x: x.data.sum(),
    "item": lambda x: x[0].item(),
    "list": lambda x: x.tolist(),
    "address": lambda x: x.data_ptr(),
    "text": repr,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_reads_a_late_tensor_waits(read: Callable[[Tensor], object]) -> None:
    stream, result = DelayedStream(), torch.full((4,), torch.nan)
    (late,) = stream.compute(partial(result.fill_, 7.0), torch.zeros(1), (result,))  # type: ignore[arg-type]
    assert late.shape == result.shape
    assert late.to(torch.float32) is late
    assert bool(torch.isnan(result).all())
    expected = read(torch.full((4,), 7.0))
    found = read(late)
    assert not bool(torch.isnan(result).any())
    if isinstance(expected, Tensor | tuple):
        torch.testing.assert_close(found, expected)


def test_detached_tensors_and_the_stream_that_writes_do_not_wait() -> None:
    stream, result = DelayedStream(), torch.full((4,), torch.nan)
    (late,) = stream.compute(partial(result.fill_, 7.0), torch.zeros(1), (result,))  # type: ignore[arg-type]
    part = late.detach()
    assert isinstance(late, AsyncTensor)
    assert isinstance(part, AsyncTensor)
    assert late.read_on(stream) is result
    assert bool(torch.isnan(result).all())
    assert late.read_on(DelayedStream()) is result
    assert not bool(torch.isnan(result).any())


def test_after_a_join_nothing_waits() -> None:
    """An event of a capture cannot be waited for after it."""
    stream, result = DelayedStream(), torch.zeros(4)
    (late,) = stream.compute(partial(result.fill_, 7.0), torch.zeros(1), (result,))  # type: ignore[arg-type]
    part = late.detach()
    stream.joins += 1
    assert torch.equal(part + 1, torch.ones(4))
    assert torch.equal(late + 1, torch.ones(4))


class FakeCuda:
    """Streams of a device that record what each of them does, in program order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, ...]] = []
        self.current = self.Stream(self, "main")
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: self.Stream(self, "side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.switch)

    @contextmanager
    def switch(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    class Stream:
        device = torch.device("cuda")

        def __init__(self, cuda: FakeCuda, name: str) -> None:
            self._cuda, self.name = cuda, name

        def wait_stream(self, other: Any) -> None:
            self._cuda.log.append((self.name, "waits for", other.name))

        def record_event(self) -> str:
            number = sum(what == "records" for _, what, *_ in self._cuda.log)
            self._cuda.log.append((self.name, "records", f"event {number}"))
            return f"event {number}"

        def wait_event(self, event: str) -> None:
            self._cuda.log.append((self.name, "waits for", event))

        def work(self, name: str) -> None:
            self._cuda.log.append((self.name, "runs", name))


def test_the_order_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    stream = SideStream(torch.device("cuda"))

    def computed(name: str) -> Tensor:
        return stream.compute(lambda: cuda.current.work(name), torch.zeros(1), (torch.ones(2),))[0]

    gradients = [computed("first"), computed("second")]
    assert isinstance(gradients[1], AsyncTensor)
    value = gradients[1].read_on(stream)
    stream.run(lambda: cuda.current.work(f"update by {value.tolist()}"), value)
    assert cuda.log == [
        ("side", "waits for", "main"),
        ("side", "runs", "first"),
        ("side", "records", "event 0"),
        ("side", "waits for", "main"),
        ("side", "runs", "second"),
        ("side", "records", "event 1"),
        ("side", "waits for", "main"),
        ("side", "runs", "update by [1.0, 1.0]"),
        ("side", "records", "event 2"),
    ]
    cuda.log.clear()
    with cuda.switch(FakeCuda.Stream(cuda, "third")):
        _ = gradients[0] + gradients[1]
    _ = gradients[0] * 2
    stream.join()
    _ = gradients[0] * 2
    assert cuda.log == [
        ("third", "waits for", "event 0"),
        ("third", "waits for", "event 1"),
        ("main", "waits for", "event 0"),
        ("main", "waits for", "side"),
    ]


def test_gradients_go_to_the_optimizer_that_consumes_all_of_them() -> None:
    first, second, other = (torch.zeros(2) for _ in range(3))
    optimizer = FakeOptimizer(weights=(first, second))
    assert gradient_consumer([first], torch.bfloat16) is None
    with offered(optimizer):
        assert gradient_consumer([first, second], torch.bfloat16) is optimizer
        assert gradient_consumer([first, second], torch.float32) is None
        assert gradient_consumer([first, other], torch.bfloat16) is None
        assert gradient_consumer([first, None], torch.bfloat16) is None
    assert gradient_consumer([first], torch.bfloat16) is None
