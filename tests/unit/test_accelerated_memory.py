"""Memory of accelerated steps, against what the graph backend saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._functorch import config as functorch_config
from torch.nn import functional

import stepscope
from stepscope.acceleration import backend
from stepscope.errors import UsageError
from stepscope.measure.ledger import line_of_code
from stepscope.planning.accelerated import AcceleratedStep
from stepscope.planning.fake_run import FakeStep, StepOptions
from stepscope.planning.fake_step import Fakes
from stepscope.planning.operators import known_rates
from stepscope.records.memory import OPTIMIZER, WEIGHT_COPIES

WIDTH, ROWS, VOCAB = 64, 128, 1024


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().logical_not()
            scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -1e9)
            y = scores.softmax(-1) @ v
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention(fused)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = functional.relu(x + self.second(functional.relu(self.norm(self.first(x)))))
        return out


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), *(Convolution() for _ in range(3)))


def square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).float().square().mean()
    return loss


TOKENS = torch.zeros(4, ROWS, dtype=torch.long)


@pytest.fixture
def compiled_as_inductor_would(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its decompositions and partitioner, without its kernels."""
    monkeypatch.setitem(
        backend._COMPILERS, "aot_eager", lambda module, given: aot_eager_decomp_partition(
            module, list(given)
        )
    )  # fmt: skip
    torch.compiler.reset()
    with functorch_config.patch(ban_recompute_materialized_backward=False):
        yield
    torch.compiler.reset()


def saved_bytes(loss: Tensor, outside: list[Tensor]) -> int:
    """Bytes that the nodes of a graph of autograd save, without these tensors."""
    known = {one.untyped_storage()._cdata for one in outside}
    found: dict[int, int] = {}
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [one for one, _ in node.next_functions]
        for saved in (*getattr(node, "saved_tensors", ()), getattr(node, "saved", None)):
            if isinstance(saved, Tensor) and saved.untyped_storage()._cdata not in known:
                storage = saved.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def outside_of(model: nn.Module, batch: Tensor) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), batch]


@pytest.mark.usefixtures("compiled_as_inductor_would")
@pytest.mark.parametrize(
    ("build", "batch", "dtype"),
    [
        (Decoder, TOKENS, None),
        (Decoder, TOKENS, torch.bfloat16),
        (lambda: Decoder(fused=False), TOKENS, None),
        (convolutions, torch.zeros(4, 3, 18, 18), None),
    ],
    ids=["decoder", "decoder, autocast", "decoder, naive attention", "convolutions"],
)
def test_regions_save_what_the_backend_saves(
    build: Callable[[], nn.Module], batch: Tensor, dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    model = build()
    loss_fn = square if batch.is_floating_point() else None

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch) if loss_fn is None else loss_fn(model, batch)
        return loss

    compiled = torch.compile(run, backend="stepscope", options={"compiler": "aot_eager"})
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        loss = compiled(model, batch)
    expected = saved_bytes(loss, outside_of(model, batch))
    fakes = Fakes(line_of_code)
    with fakes.active():
        options = StepOptions(loss_fn, dtype)
        # Without an optimizer that writes copies of the weights, as on a CPU.
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = FakeStep.of(fakes, model, optimizer, batch, options)
        made = AcceleratedStep(step, known_rates(), fp8=False)
        loss = made.loss_fn(step.model, step.batch)
        predicted = saved_bytes(loss, outside_of(step.model, step.batch))
    assert predicted == pytest.approx(expected, rel=0.02)


def predicted(**options: Any) -> stepscope.planning.fake_run.MemoryPrediction:
    with torch.device("meta"):
        model = Decoder()
    options = {"dtype": torch.bfloat16, "compile": "accelerate"} | options
    optimizer = options.pop("optimizer", torch.optim.AdamW)
    return stepscope.predict(model, optimizer(model.parameters()), TOKENS, **options)


def test_an_accelerated_step_is_an_estimate_with_the_pool_of_its_graph() -> None:
    found = predicted()
    assert found.is_estimate
    assert 0 < found.graph_pool < found.peak.allocated
    assert "in the pool of the CUDA graph" in str(found)
    # The weights of linear layers but the head, in bfloat16.
    layers = 3 * (4 * WIDTH * WIDTH + 3 * 4 * WIDTH * WIDTH)
    assert found.kinds[WEIGHT_COPIES] == pytest.approx(2 * layers, rel=0.01)
    lines = [line for line in found.peak.lines if line.startswith("saved: ")]
    assert any("blocks" in line for line in lines)


def test_no_logits_are_in_memory() -> None:
    eager, accelerated = predicted(compile=None), predicted()
    logits = TOKENS.numel() * VOCAB * 2
    assert eager.peak.allocated - accelerated.peak.allocated > 2 * logits


def test_gradients_are_freed_where_the_update_runs_in_the_backward_pass() -> None:
    weights = sum(p.nbytes for p in Decoder().parameters())
    at_once, after = predicted(), predicted(max_grad_norm=1.0)
    assert at_once.phases[-1].allocated == at_once.resident
    assert after.phases[-1].allocated - after.resident > 0.99 * weights
    # Its update is not fused.
    other = predicted(optimizer=torch.optim.Adagrad)
    assert WEIGHT_COPIES not in other.kinds
    assert other.phases[-1].allocated - other.resident > 0.99 * weights
    assert other.kinds[OPTIMIZER] < at_once.kinds[OPTIMIZER]


def test_layers_in_fp8_have_copies_of_one_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stepscope.kernels.fp8.layers.choice.not_worth_it", lambda *_: None, raising=True
    )
    narrow, quantized = predicted(), predicted(dtype="fp8")
    ratio = quantized.kinds[WEIGHT_COPIES] / narrow.kinds[WEIGHT_COPIES]
    assert 0.5 <= ratio < 0.6


@pytest.mark.parametrize(
    "options", [{"dtype": "fp8", "compile": None}, {"ranks": 2}, {"compile": "fast"}]
)
def test_other_forms_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        predicted(**options)
