"""Norms, and the activations of MLPs, as operators in graphs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.acceleration.backend import Graphs
from stepscope.acceleration.passes import activations, norms
from stepscope.kernels.norm_operator import norm_operator
from stepscope.kernels.weight_copies import WeightCopies

WIDTH = 32
PASSES = ("weight copies", norms.NAME, activations.NAME)


class RootMeanSquare(nn.Module):
    """An RMSNorm in one of several spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.spelling == "hugging face":
            inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * (wide * inverse).to(x.dtype)
        if self.spelling == "one plus":
            inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
            return (wide * inverse * (1.0 + self.weight.float())).type_as(x)
        if self.spelling == "root":
            mean = wide.square().mean(dim=-1, keepdim=True)
            return (wide * torch.sqrt(mean + 1e-6).reciprocal() * self.weight).to(x.dtype)
        if self.spelling == "clamped":
            inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).clamp(max=0.1) + 1e-6)
            return self.weight * (wide * inverse).to(x.dtype)
        if self.spelling == "default epsilon":
            # So small that an epsilon of bfloat16 would be all of it.
            return functional.rms_norm(0.01 * x, (WIDTH,), self.weight)
        return functional.rms_norm(x, (WIDTH,), self.weight, 1e-6)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def fast_gelu(x: Tensor) -> Tensor:
    inner = torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))
    return 0.5 * x * (1.0 + inner)


def other_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.05 * torch.pow(x, 3.0))))


class Gated(nn.Module):
    """A gated MLP, with gate and up in one layer or two."""

    def __init__(self, packed: bool, gate_first: bool = True) -> None:
        super().__init__()
        self.packed, self.gate_first = packed, gate_first
        self.first = nn.Linear(WIDTH, 2 * WIDTH if packed else WIDTH, bias=False)
        self.second = None if packed else nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.second is not None:
            return self.down(functional.silu(self.first(x)) * self.second(x))
        one, other = self.first(x).chunk(2, dim=-1)
        gate, up = (one, other) if self.gate_first else (other, one)
        return self.down(up * functional.silu(gate))


class Plain(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation, self.dropout = activation, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.activation(self.up(x))))


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = norm(), norm()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.out(torch.tanh(self.query(y)) * self.key(y))
        return x + self.mlp(self.second(x))


class Parallel(Block):
    """Both branches read the same stream."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        branch = self.out(torch.tanh(self.query(y)) * self.key(y))
        return self.mlp(self.second(x)) + branch + x


class Rows(nn.Module):
    """A layer on rows, whose weight is stored as (columns, d), as in GPT-2."""

    def __init__(self, columns: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(columns, d))
        self.bias = nn.Parameter(torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], self.weight.shape[1])


class OnRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Rows(WIDTH, 2 * WIDTH), Rows(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Stopped(Block):
    """The residual add has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        branch = self.out(torch.tanh(self.query(y)) * self.key(y))
        with torch.no_grad():
            y = x + branch
        return x + self.mlp(self.second(y))


class After(Block):
    """Norms after the residual add."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x + self.out(torch.tanh(self.query(x)) * self.key(x)))
        return self.second(y + self.mlp(y))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(
        self,
        norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(WIDTH),
        mlp: Callable[[], nn.Module] = lambda: Plain(functional.gelu),
        block: type[Block] = Block,
        blocks: int = 3,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(norm, mlp) for _ in range(blocks))
        self.norm = norm()
        self.register_buffer("target", torch.randn(2, 8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        target = self.target[:, : x.shape[1]]
        return (self.norm(x).float() * target).sum()  # type: ignore[no-any-return]


def compared(
    original: nn.Module,
    copied: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    lengths: tuple[int, ...] = (8, 8),
    **options: Any,
) -> Counter[str]:
    """Compare losses and gradients of steps with the original model; return what was replaced in
    the last graph."""
    torch._dynamo.reset()
    changed = copy.deepcopy(original)
    given = {"copies": WeightCopies(changed.parameters(), keep=False)} if copied else {}
    options = {"compiler": "aot_eager", "passes": PASSES, "kernels": True} | given | options
    graphs = Graphs(**options)
    run = torch.compile(changed, backend=graphs)
    error = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for seed, length in enumerate(lengths):
        x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))
        found: list[list[Any]] = []
        for model, call in ((original, original), (changed, run)):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = call(x)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        with (
            graphs.compared() as differences,
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
        ):
            run(x)
        assert not differences
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one - other).norm() <= error * other.norm()
    assert len(graphs.reports) == (1 if len({*lengths}) == 1 else 2)
    assert not any(report.failure for report in graphs.reports)
    applied = graphs.reports[-1].applied
    return Counter(one.what for one in applied if one.name != "weight copies")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norms_take_the_residual_adds_before_them(dtype: torch.dtype) -> None:
    found = compared(Model(mlp=lambda: Plain(torch.tanh)), dtype=dtype)
    assert found == {"LayerNorm": 1, "residual add and LayerNorm": 6}


def test_norms_return_the_dtype_in_which_views_of_them_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtypes = []

    def recorded(*arguments: Any) -> Any:
        dtypes.append(arguments[-1][3])
        return norm_operator(*arguments)

    monkeypatch.setattr(norms, "norm_operator", recorded)
    assert compared(Model(mlp=OnRows)).total() == 7 + 3
    # The last one is read in float32.
    assert Counter(dtypes)[torch.bfloat16] > 2 * Counter(dtypes)[torch.float32] > 0


@pytest.mark.parametrize("spelling", ["hugging face", "one plus", "root", "whole"])
def test_rms_norms_of_any_spelling(spelling: str) -> None:
    found = compared(Model(norm=lambda: RootMeanSquare(spelling), mlp=lambda: Plain(torch.tanh)))
    assert found == {"RMSNorm": 1, "residual add and RMSNorm": 6}


def test_the_default_epsilon_is_that_of_float32() -> None:
    norm = RootMeanSquare("default epsilon")
    assert compared(Model(norm=lambda: norm, blocks=0)) == {"RMSNorm": 1}


def test_what_is_not_quite_a_norm_stays() -> None:
    model = Model(norm=lambda: RootMeanSquare("clamped"), mlp=lambda: Plain(torch.tanh))
    assert not compared(model)


def test_a_residual_add_without_gradient_gets_none() -> None:
    found = compared(Model(mlp=lambda: Plain(torch.tanh), block=Stopped, blocks=2))
    assert found == {"LayerNorm": 3, "residual add and LayerNorm": 2}


def test_norms_of_changing_lengths_are_fused() -> None:
    found = compared(Model(mlp=lambda: Plain(torch.tanh), blocks=2), lengths=(8, 6, 5))
    assert found == {"LayerNorm": 1, "residual add and LayerNorm": 4}


@pytest.mark.parametrize("block", [Parallel, After])
def test_blocks_of_other_shapes(block: type[Block]) -> None:
    found = compared(Model(mlp=lambda: Plain(torch.tanh), block=block))
    assert found.total() == 7


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (functional.gelu, "gelu"),
        (lambda x: functional.gelu(x, approximate="tanh"), "gelu_tanh"),
        (new_gelu, "gelu_tanh"),
        (fast_gelu, "gelu_tanh"),
        (other_gelu, None),
        (functional.silu, None),
    ],
)
def test_activations_of_mlps(activation: Callable[[Tensor], Tensor], name: str | None) -> None:
    found = compared(Model(mlp=lambda: Plain(activation), blocks=2))
    assert found[str(name)] == (2 if name else 0)
    assert found.total() == (7 if name else 5)


@pytest.mark.parametrize("copied", [True, False])
def test_gate_and_up_are_one_matmul_where_weights_are_copied(copied: bool) -> None:
    found = compared(Model(mlp=lambda: Gated(packed=False), blocks=2), copied=copied)
    assert found["silu of gate and up"] == (2 if copied else 0)


@pytest.mark.parametrize("gate_first", [True, False])
def test_packed_gate_and_up(gate_first: bool) -> None:
    found = compared(Model(mlp=lambda: Gated(packed=True, gate_first=gate_first), blocks=2))
    assert found["silu of gate and up"] == 2


def test_repeated_blocks_are_compiled_once() -> None:
    torch._dynamo.reset()
    model = Model(blocks=5)
    graphs = Graphs(
        compiler="aot_eager", passes=PASSES, kernels=True, copies=WeightCopies(model.parameters())
    )
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=graphs)(torch.randn(2, 8, WIDTH))
    (report,) = graphs.reports
    # What is before the blocks, the first block, the others, and what is behind them.
    assert report.regions.count == 7
    assert report.regions.compiled == 4


def test_layers_that_are_frozen_keep_no_gradient() -> None:
    model = Model(blocks=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    torch._dynamo.reset()
    graphs = Graphs(compiler="aot_eager", passes=PASSES, kernels=True)
    expected = copy.deepcopy(model)
    x = torch.randn(2, 8, WIDTH)
    expected(x).backward()
    torch.compile(model, backend=graphs)(x).backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def test_a_norm_that_writes_in_place_later_stays() -> None:
    class Written(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.norm(x)
            y.clamp_(max=0.5)
            return y.square().mean()

    assert not compared(Written(blocks=0), dtype=torch.float32)
