"""Parts of models that `stepscope.accelerate` replaces, and those that only look like them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from accelerated_models import (
    HIDDEN,
    VOCAB,
    WIDTH,
    Block,
    CenteredNorm,
    Gated,
    Norm,
    OffsetNorm,
    OtherEpsilonNorm,
    PackedGated,
    Plain,
    assert_same_training,
    batch,
    created,
    losses,
    sgd,
)
from stepscope.acceleration.pieces.block_layout import NOT_A_SUM
from stepscope.kernels.activation import PLAIN


def test_a_module_that_is_not_quite_a_norm_is_left() -> None:
    report = assert_same_training(lambda: Block(OtherEpsilonNorm))
    assert "RMSNorm" not in report.replaced
    assert [(left.piece, left.reason) for left in report.left] == [
        *[("residual block", "its norms compute something else or are excluded")] * 2,
        *[("RMSNorm", "it computes something else")] * 2,
    ]


def test_a_centered_norm_without_a_bias_is_a_layer_norm() -> None:
    assert len(assert_same_training(lambda: Block(CenteredNorm)).replaced["LayerNorm"]) == 2


def test_a_norm_with_an_offset_is_replaced() -> None:
    assert len(assert_same_training(lambda: Block(OffsetNorm)).replaced["RMSNorm"]) == 2


@pytest.mark.parametrize("norm", [Norm, OffsetNorm])
def test_a_norm_keeps_the_dtype_of_its_output(norm: type[nn.Module]) -> None:
    """With a weight in float32 and an input in float16, which only one of them returns."""
    model = nn.Sequential(norm())
    x = torch.randn(3, WIDTH, dtype=torch.float16)
    expected = model(x)
    assert "RMSNorm" in stepscope.accelerate(model, sample=x).replaced
    assert model(x).dtype == expected.dtype
    torch.testing.assert_close(model(x), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "activation"),
    # The kernels of each activation are tested for both kinds.
    [*itertools.product((Gated,), PLAIN), (PackedGated, "silu"), (Plain, "gelu"), (Plain, "relu")],
)
def test_activations_of_an_mlp(activation: str, kind: Any) -> None:
    report = assert_same_training(lambda: Block(Norm, lambda: kind(PLAIN[activation])))  # type: ignore[arg-type,return-value]
    assert len(report.replaced["MLP" if kind is Plain else "gated MLP"]) == 2


def test_another_order_of_gate_and_up_is_left() -> None:
    class UpFirst(PackedGated):
        def forward(self, x: Tensor) -> Tensor:
            up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
            out: Tensor = self.down_proj(up * self.activation(gate))
            return out

    report = assert_same_training(lambda: Block(Norm, UpFirst))
    assert "gated MLP" not in report.replaced
    assert [left.reason for left in report.left] == ["it computes something else"] * 2


def test_another_activation_is_left() -> None:
    def tanh() -> nn.Module:
        return Gated(torch.tanh)

    report = assert_same_training(lambda: Block(Norm, tanh))  # type: ignore[arg-type]
    assert "gated MLP" not in report.replaced
    assert len(report.replaced["linear"]) == 6, "their linear layers are replaced one by one"


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_of_the_output_of_an_mlp_has_the_same_random_numbers(inplace: bool) -> None:
    def mlp() -> nn.Module:
        return Plain(dropout=0.1, inplace=inplace)

    report = assert_same_training(lambda: Block(Norm, mlp))  # type: ignore[arg-type]
    assert len(report.replaced["MLP"]) == 2
    assert report.left == []


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_mlp_with_dropout_between_its_layers_is_left(dropout: float) -> None:
    def mlp() -> nn.Module:
        return Plain(dropout=dropout, hidden_dropout=0.1)

    report = assert_same_training(lambda: Block(Norm, mlp))  # type: ignore[arg-type]
    assert [left.reason for left in report.left] == ["it has dropout before its last layer"] * 2
    assert len(report.replaced["linear"]) == 4


@pytest.mark.parametrize(("name", "before"), [("dropout", 0.1), ("hidden_dropout", 0.0)])
def test_dropout_that_is_turned_on_later_is_used(name: str, before: float) -> None:
    def mlp() -> nn.Module:
        return Plain(dropout=before)

    plain, fused = (created(lambda: Block(Norm, mlp)) for _ in range(2))  # type: ignore[arg-type]
    stepscope.accelerate(fused, sample=batch())
    for training in (True, False):
        results = []
        for model in (plain, fused):
            for block in model.train(training).blocks:
                getattr(block.mlp, name).p = 0.5
            torch.manual_seed(0)
            results.append(float(model(*batch()).detach()))
        assert results[1] == pytest.approx(results[0], rel=1e-5)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_layer_norm_is_replaced(bias: bool) -> None:
    def norm() -> nn.Module:
        return nn.LayerNorm(WIDTH, bias=bias)

    report = assert_same_training(lambda: Block(norm, Plain))  # type: ignore[arg-type]
    assert len(report.replaced["LayerNorm"]) == 2


class FixedEpsilonNorm(nn.Module):
    """LayerNorm as nanoGPT writes it."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self._value = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self._value)


@pytest.mark.parametrize(("eps", "replaced"), [(1e-5, 2), (1e-6, 2), (1e-3, 0)])
def test_a_layer_norm_without_a_known_epsilon(eps: float, replaced: int) -> None:
    def norm() -> nn.Module:
        return FixedEpsilonNorm(eps)

    report = assert_same_training(lambda: Block(norm))  # type: ignore[arg-type]
    assert len(report.replaced.get("LayerNorm", [])) == replaced


class PackedAttention(nn.Module):
    """Attention as nanoGPT writes it."""

    def __init__(self, returns: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.returns = returns

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
        heads = self.c_attn(x).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        out = functional.scaled_dot_product_attention(q, k, v, attention_mask, is_causal=True)
        return self.returns(self.c_proj(out.transpose(1, 2).flatten(2)))


class PreNormBlock(nn.Module):
    def __init__(
        self, scale: float = 1.0, returns: Callable[[Tensor], Any] = lambda out: out
    ) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp, self.scale = PackedAttention(returns), Plain(), scale

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        attended = self.attn(self.ln_1(hidden_states), attention_mask=attention_mask)
        attended = attended[0] if isinstance(attended, tuple) else attended
        hidden_states = hidden_states + self.scale * attended
        out: Tensor = hidden_states + self.mlp(self.ln_2(hidden_states))
        return out


@pytest.mark.parametrize("returns", [lambda out: out, lambda out: (out, None)])
def test_a_pre_norm_block_with_layer_norm(returns: Callable[[Tensor], Any]) -> None:
    report = assert_same_training(lambda: PreNormBlock(returns=returns))
    counts = {piece: len(names) for piece, names in report.replaced.items()}
    assert counts == {
        "head and loss": 2, "residual block": 2, "MLP": 2, "LayerNorm": 4, "embedding": 1,
        "attention": 2,
    }  # fmt: skip


def test_a_block_that_scales_its_branch_is_left() -> None:
    report = assert_same_training(lambda: PreNormBlock(scale=0.5))
    assert "residual block" not in report.replaced
    assert [left.reason for left in report.left] == [NOT_A_SUM] * 2


def test_experts_and_quantized_layers_are_left() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([Gated(), Gated()])

        def forward(self, x: Tensor) -> Tensor:
            shares = self.router(x).softmax(-1).unbind(-1)
            parts = zip(shares, self.experts, strict=True)
            return sum(share[..., None] * expert(x) for share, expert in parts)  # type: ignore[return-value]

    class Int8Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.weight.to(x.dtype) / 40)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixture, self.quantized = Experts(), Int8Linear()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.quantized(self.mixture(x))
            return out

    report = assert_same_training(Mixed)
    assert report.replaced.keys() == {"head and loss", "embedding"}
    reasons = {(left.piece, left.reason) for left in report.left}
    assert reasons == {
        ("gated MLP", "part of a mixture of experts"),
        ("linear", "part of a mixture of experts"),
        ("linear", "it is a Int8Linear, not an nn.Linear"),
    }


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_scaled_embedding_with_a_padding_row(scale: float) -> None:
    class Scaled(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(VOCAB, WIDTH, padding_idx=3)
            self.register_buffer("embed_scale", torch.tensor(2.0), persistent=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * self.embed_scale * scale

    plain, fused = created(), created()
    for model in (plain, fused):
        torch.manual_seed(0)
        model.embed = Scaled()
    report = stepscope.accelerate(fused)
    assert losses(fused, sgd(fused)) == pytest.approx(losses(plain, sgd(plain)), rel=5e-3)
    assert ("embedding" in report.replaced) == (scale == 1.0)


def test_a_replacement_that_raises_is_taken_back() -> None:
    class InList(PreNormBlock):
        """Its attention returns a list."""

        def __init__(self) -> None:
            super().__init__(returns=lambda out: [out, None])

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.ln_1(x))[0]
            return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]

    report = assert_same_training(InList)
    reasons = [left.reason for left in report.left if left.piece == "residual block"]
    assert [reason.partition(":")[0] for reason in reasons] == ["it raises AttributeError"] * 2


def test_a_post_norm_layer() -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
            self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            out: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual)
            return out

    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = Output()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.output(functional.gelu(x), x)
            return out

    assert len(assert_same_training(Post).replaced["residual block"]) == 2


class WithMemory(nn.Module):
    """A decoder layer that attends to its own input, with a causal mask."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(
            WIDTH, 4, HIDDEN, 0.0, "gelu", 1e-5, True, norm_first
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.layer(x, x, tgt_mask=mask, tgt_is_causal=True)
        return out


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_layer_of_torch(kind: str, norm_first: bool) -> None:
    def layer() -> nn.Module:
        if kind == "decoder":
            return WithMemory(norm_first)
        return nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, 0.0, "gelu", 1e-5, True, norm_first)

    report = assert_same_training(layer)
    assert len(report.replaced["residual block"]) == 2


def test_a_layer_of_torch_with_a_mask() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, 0.0, "gelu", batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            padding = torch.zeros(x.shape[:2], dtype=torch.bool)
            padding[0, -1] = True
            out: Tensor = self.layer(x, src_key_padding_mask=padding)
            return out

    assert len(assert_same_training(Padded).replaced["residual block"]) == 2


class PatchEmbedding(nn.Module):
    """Images to tokens, as ViTs do it."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, **({"kernel_size": (4, 2), "stride": (4, 2)} | how))

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


def _image_gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(images)
    grads = torch.autograd.grad(out.float().square().sum(), list(model.parameters()))
    return [out.detach().float(), *grads]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_patch_embedding_is_a_matmul(bias: bool) -> None:
    torch.manual_seed(0)
    model, images = PatchEmbedding(bias=bias), torch.randn(2, 3, 8, 6)
    expected = _image_gradients(model, images)
    report = stepscope.accelerate(model)
    for _ in range(2):
        for actual, exact in zip(_image_gradients(model, images), expected, strict=True):
            assert actual.dtype == exact.dtype
            torch.testing.assert_close(actual, exact, rtol=2e-2, atol=2e-2 * exact.abs().max())
    assert report.replaced == {"patch embedding": ["conv"]}
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images).is_contiguous(), "the matmul writes tokens"
    # Images that are no whole number of patches, or need a gradient, and float32.
    ragged = torch.randn(2, 3, 9, 7, requires_grad=True)
    torch.testing.assert_close(model(ragged), PatchEmbedding.forward(model, ragged))
    report.undo()
    assert torch.equal(_image_gradients(model, images)[0], expected[0])


@pytest.mark.parametrize(
    "how", [{"stride": (2, 2)}, {"padding": 1}, {"kernel_size": 1, "stride": 1}, {"groups": 1}]
)
def test_convolutions_that_overlap_or_pad_are_left(how: dict[str, Any]) -> None:
    report = stepscope.accelerate(PatchEmbedding(**how))
    assert ("patch embedding" in report.replaced) == (how == {"groups": 1})
