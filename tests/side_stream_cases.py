"""Readers of gradients that an optimizer-in-backward computes on its side stream: a block whose
parameters all have such gradients, and hooks and modes that read these during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from stepscope.acceleration.train_step import TrainStep
from stepscope.kernels.feed_forward import feed_forward
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.norm import normed_sum, plain_rms_norm
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.optim import InBackwardAdamW

EPS = 1e-5
SETTINGS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}
"""Gradients that are nearly zero change little with this eps."""
Seen = dict[str, Tensor]


class Net(nn.Module):
    """One block, applied `uses` times: norm, a projection in three parts, MLP, add and norm.
    Everything is a kernel if `fused`, else torch's own operators."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.width, self.fused = width, fused
        self.uses, self.penalty, self.checkpointed = 1, 0.0, False
        generator = torch.Generator().manual_seed(0)
        shapes = {
            **dict.fromkeys(("query", "key", "value"), (width, width)),
            **dict.fromkeys(("gate", "up"), (2 * width, width)),
            "second": (width, 2 * width),
            **dict.fromkeys(("scale", "last_scale"), (width,)),
        }
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator) / width**0.5
            self.register_parameter(name, nn.Parameter(drawn + ("scale" in name)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            if self.checkpointed:
                x = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self.block(x)
        loss = (x * torch.sin(3 * x)).sum(-1).mean()
        for _, parameter in self.summed() if self.penalty else ():
            loss = loss + self.penalty * parameter.square().sum()
        return loss

    def block(self, x: Tensor) -> Tensor:
        weights = self.query, self.key, self.value
        if not self.fused:
            normed = plain_rms_norm(x, self.scale, EPS)
            q, k, v = (functional.linear(normed, weight) for weight in weights)
            mixed = x + torch.tanh(q) * k + v
            hidden = functional.silu(functional.linear(mixed, self.gate))
            hidden = hidden * functional.linear(mixed, self.up)
            total = mixed + functional.linear(hidden, self.second)
            return plain_rms_norm(total, self.last_scale, EPS)
        copies = WeightCopies()
        _, of_x = normed_sum(x, None, self.scale, EPS)
        q, k, v = fused_linear(of_x, weights, copies).chunk(3, -1)
        mixed = x + torch.tanh(q) * k + v
        branch = feed_forward(mixed, self.gate, self.up, self.second, copies)
        _, of_sum = normed_sum(mixed, branch, self.last_scale, EPS)
        return of_sum.value

    def summed(self) -> list[tuple[str, Tensor]]:
        """Return the parameters whose gradients are sums over all tokens."""
        return [(name, one) for name, one in self.named_parameters() if one.dim() == 1]


@contextmanager
def unread(_: Net, __: Seen) -> Iterator[None]:
    yield


@contextmanager
def used_twice(net: Net, _: Seen) -> Iterator[None]:
    net.uses = 2
    yield


@contextmanager
def used_by_a_penalty(net: Net, _: Seen) -> Iterator[None]:
    net.penalty = 0.1
    yield


@contextmanager
def checkpointed(net: Net, _: Seen) -> Iterator[None]:
    net.uses, net.checkpointed = 2, True
    yield


@contextmanager
def hooked_after(net: Net, seen: Seen) -> Iterator[None]:
    def copied(out: Tensor) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            out.copy_(parameter.grad)

        return hook

    for name, one in net.summed():
        seen[name] = torch.zeros_like(one, requires_grad=False)
        one.register_post_accumulate_grad_hook(copied(seen[name]))  # type: ignore[no-untyped-call]
    yield


@contextmanager
def hooked_before(net: Net, _: Seen) -> Iterator[None]:
    for _, one in net.summed():
        one.register_hook(lambda grad: grad * 3)  # type: ignore[no-untyped-call]
    yield


@contextmanager
def hooked_node(net: Net, seen: Seen) -> Iterator[None]:
    """Hooks that a tensor does not show, such as those of data-parallel wrappers."""

    def copied(out: Tensor) -> Callable[[tuple[Tensor, ...]], None]:
        def hook(grads: tuple[Tensor, ...]) -> None:
            out.copy_(grads[0])

        return hook

    nodes = []
    for name, one in net.summed():
        seen[name] = torch.zeros_like(one, requires_grad=False)
        nodes.append(get_gradient_edge(one).node)
        nodes[-1].register_prehook(copied(seen[name]))  # type: ignore[arg-type]
    yield


@contextmanager
def checked_for_nan(_: Net, __: Seen) -> Iterator[None]:
    with torch.autograd.detect_anomaly():
        yield


READERS = (
    unread, used_twice, used_by_a_penalty, checkpointed, hooked_after, hooked_before, hooked_node,
    checked_for_nan,
)  # fmt: skip
Reader = Callable[[Net, Seen], Any]


def batch(number: int, shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(device)


def trained(
    reader: Reader,
    optimizer: Callable[[Net], torch.optim.Optimizer],
    shape: tuple[int, ...],  # (batch, tokens, width)
    device: str,
    steps: int,
    *,
    fused: bool = True,
    graph: Any = "off",
) -> tuple[Net, list[Tensor], Seen]:
    """Train; return the model, its losses and the gradients that were seen in the last step."""
    net, seen = Net(shape[-1], fused).to(device), Seen()
    with reader(net, seen):
        step = TrainStep(net, optimizer(net), graph=graph, warmup=2)
        losses = [step(batch(number, shape, device)).clone() for number in range(steps)]
    return net, losses, seen


def torch_adamw(net: Net) -> AdamW:
    return AdamW(net.parameters(), **SETTINGS)


def in_backward(net: Net, **options: Any) -> InBackwardAdamW:
    return InBackwardAdamW(net.parameters(), attach=False, **SETTINGS, **options)
