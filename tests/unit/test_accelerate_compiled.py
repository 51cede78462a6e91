"""`accelerate(model, compile=…)`: the compiler's graph does what the model does, also later."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

import stepscope
from stepscope.acceleration import choice
from stepscope.errors import UsageError

VOCAB, WIDTH, HEADS = 24, 16, 2
FIXED = {"compiler": "aot_eager", "form": "compiled with passes"}


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.activation: Callable[[Tensor], Tensor] = nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.clip, self.span, self.factor = 1e9, 10_000, 1.0

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            y.view(batch, length, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        q = q.clamp(-self.clip, self.clip) * self.factor
        at = torch.arange(length)
        distance = at[:, None] - at[None]
        mask = (distance >= 0) & (distance < self.span)
        y = functional.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.down(self.activation(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Any:
        return loss_of(self.head(self.hidden(ids)), ids)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def ids_of(length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def pair(model: nn.Module, **arguments: Any) -> tuple[nn.Module, nn.Module, stepscope.Report]:
    """Return the original, the accelerated copy, and the report."""
    changed = copy.deepcopy(model)
    return model, changed, stepscope.accelerate(changed, compile=FIXED, **arguments)


def same(original: nn.Module, changed: nn.Module, ids: Tensor) -> None:
    """Train a step of both from zero gradients, and compare."""
    losses = []
    for model in (original, changed):
        model.zero_grad()
        torch.manual_seed(1)
        losses.append(model(ids))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    for (name, p), expected in zip(changed.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(p.grad, expected.grad, msg=name, atol=1e-6, rtol=1e-4)


def test_it_trains_compiled_and_can_be_undone() -> None:
    original, changed, report = pair(Model())
    names = list(changed.state_dict())
    same(original, changed, ids_of())
    same(original, changed, ids_of(12, 1))
    assert "compiled with passes" in str(report)
    assert "SDPA, causal" in str(report)
    assert list(changed.state_dict()) == names == list(original.state_dict())
    report.undo()
    assert "forward" not in vars(changed)
    same(original, changed, ids_of())
