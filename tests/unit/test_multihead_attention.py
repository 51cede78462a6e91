"""`nn.MultiheadAttention` and the layers of `nn.Transformer` in an accelerated model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from stepscope.acceleration.pieces import residual_block
from stepscope.acceleration.report import Report

WIDTH, HEADS, LENGTH = 16, 4, 5
MASK = nn.Transformer.generate_square_subsequent_mask(LENGTH)
Call = Callable[[Any, Tensor], Any]


def assert_same(model: nn.Module, call: Call, calls: int = 2, **how: Any) -> Report:
    """Compare outputs and gradients of an accelerated copy in several calls, with several lengths
    of a batch, and return its report."""
    torch.manual_seed(0)
    fused = copy.deepcopy(model)
    report = stepscope.accelerate(fused, **how)
    for seed in range(calls):
        x = torch.randn(LENGTH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(90 + seed))
        x = x[: 2 + seed % 2] if getattr(model, "batch_first", True) else x[:, : 2 + seed % 2]
        results = []
        for one in (model, fused):
            one.zero_grad()
            leaf = x.clone().requires_grad_()
            out = call(one, leaf)
            out = out[0] if isinstance(out, tuple) else out
            out.pow(3).mean().backward()
            results.append([out.detach(), leaf.grad, *(p.grad for p in one.parameters())])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    return report


def itself(module: Any, x: Tensor, **how: Any) -> Any:
    return module(x, x, x, need_weights=False, **how)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", ""])
def test_self_attention(causal: bool, batch_first: bool, bias: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=batch_first)
    how = {"attn_mask": MASK, "is_causal": True} if causal else {}
    report = assert_same(module, lambda module, x: itself(module, x, **how))
    assert report.replaced == {"attention": [""]}
    assert report.left == []
    assert report.unchecked == 0


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda module, x: module(x, x, x), "it returns attention weights"),
        (lambda module, x: module(x, x.clone(), x, need_weights=False), "it is cross-attention"),
        (lambda module, x: itself(module, x, attn_mask=MASK), "a mask and without is_causal"),
        (
            lambda module, x: itself(module, x, key_padding_mask=x[..., 0].gt(9.0)),
            "it is called with a padding mask",
        ),
        (lambda module, x: itself(module, x[0]), "not a batch of sequences"),
    ],
)
def test_calls_of_the_original(call: Call, reason: str) -> None:
    report = assert_same(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), call)
    assert "attention" not in report.replaced
    assert [(left.piece, reason in left.reason) for left in report.left] == [("attention", True)]
    assert reason in str(report)


def test_a_call_of_the_original_and_then_another() -> None:
    """The replacement is compared in the first call that it takes."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    report = stepscope.accelerate(module)
    x = torch.randn(2, LENGTH, WIDTH)
    assert report.unchecked == 1
    module(x, x, x)
    assert [left.reason for left in report.left] == ["it returns attention weights"]
    itself(module, x)
    module(x, x, x)
    assert (report.replaced, report.left, report.unchecked) == ({"attention": [""]}, [], 0)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True), "it adds a key"),
        (nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True), "it adds a key"),
        (nn.MultiheadAttention(WIDTH, HEADS, kdim=WIDTH, vdim=8), "another width"),
    ],
)
def test_modules_that_are_left(module: nn.Module, reason: str) -> None:
    report = stepscope.accelerate(nn.ModuleDict({"attention": module}))
    assert "attention" not in report.replaced
    assert [reason in left.reason for left in report.left if left.piece == "attention"] == [True]


class MyAttention(nn.MultiheadAttention):
    """Its forward may be another."""


def test_a_subclass_is_left() -> None:
    module = MyAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    expected = itself(module, x)
    report = stepscope.accelerate(nn.ModuleDict({"attention": module}))
    for _ in range(2):
        torch.testing.assert_close(itself(module, x), expected)
    assert not report.replaced


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_dropout_has_the_random_numbers_of_the_module(batch_first: bool, causal: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=batch_first)
    x = torch.randn(LENGTH, LENGTH, WIDTH)
    how = {"attn_mask": MASK, "is_causal": True} if causal else {}
    results = []
    report = None
    for _ in range(3):
        for training in (True, False):
            torch.manual_seed(1)
            results.append(itself(module.train(training), x, **how)[0])
        report = report or stepscope.accelerate(module)
    assert report is not None
    assert (report.replaced, report.left, report.unchecked) == ({"attention": [""]}, [], 0)
    assert not torch.allclose(results[0], results[1])
    for index in range(2, 6):
        torch.testing.assert_close(results[index], results[index % 2], rtol=1e-4, atol=1e-6)


def test_changes_after_the_call_are_used() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    stepscope.accelerate(module)
    x = torch.randn(2, LENGTH, WIDTH)
    itself(module, x)
    with torch.no_grad():
        module.in_proj_weight.mul_(2.0)
    exact = nn.MultiheadAttention.forward(module, x, x, x, need_weights=False)[0]
    torch.testing.assert_close(itself(module, x)[0], exact, rtol=1e-4, atol=1e-6)
    module.out_proj.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    exact = nn.MultiheadAttention.forward(module, x, x, x, need_weights=False)[0]
    assert torch.equal(itself(module, x)[0], exact)


LAYER: dict[str, Any] = {
    "d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True,
}  # fmt: skip


@pytest.fixture
def mlps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Activations of the MLPs that run as one operation."""
    seen: list[str] = []
    original = residual_block.mlp

    def mlp(*args: Any, **how: Any) -> Tensor:
        seen.append(how["activation"])
        return original(*args, **how)

    monkeypatch.setattr(residual_block, "mlp", mlp)
    return seen


def encoder(layer: nn.Module) -> nn.Module:
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("activation", "norm_first", "causal"),
    # Every pair of two options.
    [("gelu", True, True), ("gelu", False, False), ("relu", True, False), ("relu", False, True)],
)
def test_an_encoder(activation: str, norm_first: bool, causal: bool, mlps: list[str]) -> None:
    layer = nn.TransformerEncoderLayer(**LAYER, norm_first=norm_first, activation=activation)
    how = {"mask": MASK, "is_causal": True} if causal else {}
    report = assert_same(encoder(layer), lambda encoder, x: encoder(x, **how))
    counts = {piece: len(names) for piece, names in report.replaced.items()}
    assert counts["attention"] == counts["residual block"] == 2
    assert report.unchecked == 0
    assert {*mlps} == {activation}


class OtherMlp(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return 2 * super()._ff_block(x)


def test_an_mlp_that_is_left(mlps: list[str]) -> None:
    """An unknown activation, a method of a subclass, or dropout: the block is fused as before."""
    layers = [
        nn.TransformerEncoderLayer(**LAYER, activation=torch.tanh),
        OtherMlp(**LAYER),
        nn.TransformerEncoderLayer(**LAYER | {"dropout": 1.0}),
    ]
    for layer in layers:
        report = assert_same(encoder(layer), lambda encoder, x: encoder(x))
        assert report.replaced["residual block"] == ["layers.0", "layers.1"]
    assert mlps == []


def test_a_dropout_with_another_mode_than_its_layer(mlps: list[str]) -> None:
    model = encoder(nn.TransformerEncoderLayer(**LAYER | {"dropout": 1.0})).eval()

    def call(model: Any, x: Tensor) -> Any:
        for layer in model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                layer.dropout.train(x.shape[0] == 3)
        return model(x)

    assert_same(model, call)
    assert mlps


def test_the_activation_by_tanh_is_not_the_exact_one(mlps: list[str]) -> None:
    layer = nn.TransformerEncoderLayer(**LAYER, activation=nn.GELU("tanh"))
    assert_same(encoder(layer), lambda encoder, x: encoder(x))
    assert {*mlps} == {"gelu_tanh"}


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_decoder(norm_first: bool) -> None:
    """Its cross-attention runs the original."""
    layer = nn.TransformerDecoderLayer(**LAYER, norm_first=norm_first)
    decoder = nn.TransformerDecoder(layer, 2)
    report = assert_same(decoder, lambda decoder, x: decoder(x, x.flip(0), tgt_mask=MASK))
    assert report.replaced["attention"] == ["layers.0.self_attn", "layers.1.self_attn"]
    crossed = [left.name for left in report.left if left.reason == "it is cross-attention"]
    assert crossed == ["layers.0.multihead_attn", "layers.1.multihead_attn"]
