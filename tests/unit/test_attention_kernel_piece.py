"""`accelerate` on attention of a user's own class: the kernel alone is replaced."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stepscope
from stepscope.acceleration.attention import constants
from stepscope.acceleration.attention.masks import CausalMasks
from stepscope.acceleration.pieces.attention_kernel import PIECE

WIDTH, HEADS, LENGTH = 32, 2, 12
Mask = Callable[["Attention", int], Tensor]


def tril(_: Attention, n: int) -> Tensor:
    return torch.tril(torch.ones(n, n, dtype=torch.bool))


def triu_of_floats(_: Attention, n: int) -> Tensor:
    return ~torch.triu(torch.full((n, n), 1.0), diagonal=1).bool()


def by_positions(_: Attention, n: int) -> Tensor:
    positions = torch.arange(n)
    return positions[:, None] >= positions[None, :]


def of_a_buffer(module: Attention, n: int) -> Tensor:
    return module.visible[:, :, :n, :n] != 0


class Attention(nn.Module):
    """Rotary positions and naive attention, with a softmax of elementary operations."""

    visible: Tensor

    def __init__(self, mask: Mask = tril, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mask, self.dropout = mask, dropout
        visible = torch.ones(1, 1, 2 * LENGTH, 2 * LENGTH).tril()
        self.register_buffer("visible", visible, persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        n, d = x.shape[-2:]
        angles = torch.outer(torch.arange(n), 100.0 ** (-torch.arange(0, d, 2) / d))
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = angles.cos(), angles.sin()
        return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~visible, -math.inf)
        e = torch.exp(scores - scores.max(-1, keepdim=True).values)
        weights = functional.dropout(e / e.sum(-1, keepdim=True), self.dropout, self.training)
        return torch.einsum("...qk,...kd->...qd", weights, v)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        heads = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k, v = heads
        visible = self.mask(self, x.shape[1]) if visible is None else visible
        mixed = self.attend(self.rotated(q), self.rotated(k), v, visible)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SdpaAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, dropout_p=self.dropout if self.training else 0.0
        )


class CausalSdpaAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        del visible
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class GroupedSdpaAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        del visible
        k, v = k[:, :1], v[:, :1]
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.3, enable_gqa=True
        )


class LinearAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        del visible
        return functional.elu(q) @ (functional.elu(k).transpose(-2, -1) @ v)


class Layer(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attn = attention

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        return x + self.attn(x, **more)


def model_of(attention: Callable[[], Attention] = Attention) -> nn.Module:
    torch.manual_seed(0)
    return Layer(attention())


def results(model: nn.Module, length: int = LENGTH, **more: Any) -> list[Tensor]:
    """Return the output and the gradients of one batch."""
    x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1))
    out = model(x.requires_grad_(), **more)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


def assert_same(model: nn.Module, plain: nn.Module, **more: Any) -> None:
    for actual, expected in zip(results(model, **more), results(plain, **more), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def replaced(report: Any) -> bool:
    return "attn" in report.replaced.get(PIECE, ())


@pytest.fixture
def inspections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the masks whose values were read."""
    shapes: list[tuple[int, ...]] = []
    inspect = CausalMasks.causal

    def recorded(self: CausalMasks, allowed: Tensor) -> bool:
        shapes.append(tuple(allowed.shape))
        return inspect(self, allowed)

    monkeypatch.setattr(CausalMasks, "causal", recorded)
    return shapes


@pytest.mark.parametrize("mask", [tril, triu_of_floats, by_positions, of_a_buffer])
@pytest.mark.parametrize("kind", [Attention, SdpaAttention])
def test_attention_with_a_mask_of_sizes_or_buffers(
    kind: type[Attention], mask: Mask, inspections: list[tuple[int, ...]]
) -> None:
    model, plain = model_of(lambda: kind(mask)), model_of(lambda: kind(mask))
    report = stepscope.accelerate(model)
    for _ in range(3):
        assert_same(model, plain)
    assert replaced(report)
    # Of equal masks the values are read once.
    assert len(inspections) == 1
    assert_same(model, plain, length=LENGTH + 3)
    assert len(inspections) == 2


@pytest.mark.parametrize("kind", [CausalSdpaAttention, GroupedSdpaAttention])
def test_calls_of_sdpa_use_the_fastest_kernel(
    kind: type[Attention], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.acceleration.pieces import attention_kernel

    calls: list[dict[str, Any]] = []
    attend = attention_kernel.attention

    def recorded(*heads: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return attend(*heads, **options)

    monkeypatch.setattr(attention_kernel, "attention", recorded)
    model, plain = model_of(kind), model_of(kind)
    report = stepscope.accelerate(model)
    assert_same(model, plain)
    assert replaced(report)
    expected = 0.3 if kind is GroupedSdpaAttention else None
    assert calls[-1] == {"is_causal": True, "scale": expected}


@pytest.mark.parametrize("kind", [Attention, SdpaAttention])
def test_masks_of_a_batch_are_masks(
    kind: type[Attention], inspections: list[tuple[int, ...]]
) -> None:
    model, plain = model_of(kind), model_of(kind)
    report = stepscope.accelerate(model)
    assert_same(model, plain)
    assert replaced(report)
    before = len(inspections)
    for seed in range(3):
        rows = torch.randint(1, LENGTH, (2, 1, 1, 1), generator=torch.Generator().manual_seed(seed))
        assert_same(model, plain, visible=torch.arange(LENGTH) < rows)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for _ in range(2):
        # The same memory has the same values, until it is written.
        assert_same(model, plain, visible=causal)
    known = len(inspections)
    assert known > before
    causal[0, -1] = True
    assert_same(model, plain, visible=causal)
    assert len(inspections) == known + 1


def test_a_buffer_that_is_changed_in_place() -> None:
    model, plain = (model_of(lambda: Attention(of_a_buffer)) for _ in range(2))
    report = stepscope.accelerate(model)
    assert_same(model, plain)
    assert replaced(report)
    for one in (model, plain):
        one.get_submodule("attn").visible[..., 0, 1] = 1.0  # type: ignore[operator]
    assert_same(model, plain)


def test_a_mask_is_a_constant_until_it_is_written() -> None:
    call = constants.MasksOfCall(constants.KnownMasks(), [])

    def noted(function: Any, *args: Any) -> Tensor:
        out: Tensor = function(*args)
        call.note(function, args, {}, out)
        return out

    mask = noted(torch.tril, noted(torch.ones, 4, 4))
    again = noted(torch.tril, noted(torch.ones, 4, 4))
    assert call.computed_as(mask) == call.computed_as(again) is not None
    assert call.computed_as(mask) != call.computed_as(noted(torch.tril, mask, -1))
    mask[0, 1] = 1
    assert call.computed_as(mask) is None
    assert call.computed_as(noted(torch.triu, mask)) is None
    assert call.computed_as(noted(torch.rand, 4, 4)) is None
    random = torch.rand(4, 4) > 0.5
    assert call.computed_as(noted(torch.masked_fill, again, random, 0.0)) is None


class CachedMaskAttention(Attention):
    """Keeps the mask of the last length."""

    kept: Tensor | None = None

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        if self.kept is None or self.kept.shape[-1] != x.shape[1]:
            self.kept = of_a_buffer(self, x.shape[1])
        return super().forward(x, self.kept if visible is None else visible)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1) / 3.0).masked_fill(~visible, torch.finfo(q.dtype).min)
        return scores.softmax(-1) @ v


def test_a_mask_that_is_kept_and_copies_of_its_model(tmp_path: Path) -> None:
    model, plain = model_of(CachedMaskAttention), model_of(CachedMaskAttention)
    report = stepscope.accelerate(model)
    for length in (LENGTH, 7, LENGTH, 9):
        assert_same(model, plain, length=length)
    assert replaced(report)
    for _ in range(8):
        assert_same(copy.deepcopy(model), plain, length=9)
    torch.save(model, tmp_path / "model.pt")
    assert_same(torch.load(tmp_path / "model.pt", weights_only=False), plain, length=9)


@dataclass
class Attended:
    out: Tensor
    weights: Tensor


class KeptWeightsAttention(Attention):
    """Keeps its weights, in the first call or in all later ones."""

    kept: Any = None
    calls_before = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        weights = (q @ k.transpose(-2, -1) / 3.0).masked_fill(~visible, -math.inf).softmax(-1)
        if self.calls_before <= 0:
            self.kept = Attended(q, weights)
        self.calls_before -= 1
        return weights @ v


@pytest.mark.parametrize("calls_before", [0, 2])
def test_weights_that_are_kept_are_tensors(calls_before: int) -> None:
    model, plain = model_of(KeptWeightsAttention), model_of(KeptWeightsAttention)
    for one in (model, plain):
        one.get_submodule("attn").calls_before = calls_before
    report = stepscope.accelerate(model)
    for _ in range(4):
        assert_same(model, plain)
    kept = [one.get_submodule("attn").kept.weights for one in (model, plain)]
    assert isinstance(kept[0], Tensor)
    torch.testing.assert_close(*kept)
    if not calls_before:
        reasons = [left.reason for left in report.left if left.piece == PIECE]
        assert reasons == ["it keeps attention weights"]


class CachedKeysAttention(Attention):
    """Appends to the keys and values of the calls before, counts them, and logs."""

    keys: Tensor | None = None
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        # Also in what recognizes a module by its results.
        self.log.append(0)
        return super().forward(x, visible)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        del visible
        keys = k.detach() if self.keys is None else torch.cat((self.keys, k.detach()), 2)
        self.keys = keys
        self.calls += 1
        self.log.append(keys.shape[2])
        self.visible = self.visible * 0.5
        return (q @ (k + keys.mean(2, keepdim=True)).transpose(-2, -1)).softmax(-1) @ v


def test_the_comparison_leaves_attributes_as_they_are() -> None:
    model, plain = model_of(CachedKeysAttention), model_of(CachedKeysAttention)
    report = stepscope.accelerate(model)
    for number in range(3):
        assert_same(model, plain)
        ours, theirs = (one.get_submodule("attn") for one in (model, plain))
        assert ours.calls == theirs.calls == number + 1
        assert ours.log == theirs.log
        torch.testing.assert_close(ours.keys, theirs.keys)
        assert torch.equal(ours.visible, theirs.visible)
    assert replaced(report)


class WithDropoutAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1) / 3.0).masked_fill(~visible, -math.inf)
        return self.drop(scores.softmax(-1)) @ v  # type: ignore[no-any-return]


def test_hooks_that_are_added_later_run() -> None:
    model, plain = model_of(WithDropoutAttention), model_of(WithDropoutAttention)
    report = stepscope.accelerate(model)
    results(model)
    assert replaced(report)
    seen: list[Any] = []
    drop = model.get_submodule("attn.drop")
    drop.register_full_backward_hook(lambda *_: seen.append(1))
    assert_same(model, plain)
    assert seen == [1]


def test_rows_without_a_visible_key() -> None:
    """Naive attention of such a row is uniform over all keys."""
    model, plain = model_of(CachedMaskAttention), model_of(CachedMaskAttention)
    report = stepscope.accelerate(model)
    assert_same(model, plain)
    padded = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    padded[0, :, :, :4] = False
    assert_same(model, plain, visible=padded)
    assert replaced(report)


def test_a_bias_that_is_learned_later() -> None:
    class BiasedAttention(CachedMaskAttention):
        def __init__(self) -> None:
            super().__init__()
            hidden = torch.ones(LENGTH, LENGTH).triu(1) * -1e9
            self.bias = nn.Parameter(hidden, requires_grad=False)

        def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
            del visible
            return (q @ k.transpose(-2, -1) + self.bias).softmax(-1) @ v

    model, plain = model_of(BiasedAttention), model_of(BiasedAttention)
    report = stepscope.accelerate(model)
    x = torch.randn(2, LENGTH, WIDTH)
    for learned in (False, True):
        gradients = []
        for one in (model, plain):
            one.zero_grad()
            one.get_submodule("attn").bias.requires_grad_(learned)
            one(x).square().sum().backward()
            gradients.append([p.grad for p in one.parameters()])
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert replaced(report)


def test_transforms_run_the_original() -> None:
    model, plain = model_of(), model_of()
    stepscope.accelerate(model)
    x = torch.randn(3, 2, LENGTH, WIDTH)
    with torch.enable_grad():
        results_ = [torch.func.vmap(one)(x) for one in (model, plain)]
    torch.testing.assert_close(*results_)


@pytest.mark.parametrize("kind", [Attention, SdpaAttention])
def test_in_a_capture_values_of_masks_are_not_read(
    kind: type[Attention], monkeypatch: pytest.MonkeyPatch, inspections: list[tuple[int, ...]]
) -> None:
    model, plain = model_of(kind), model_of(kind)
    stepscope.accelerate(model)
    results(model)
    before = len(inspections)
    monkeypatch.setattr(constants, "is_capturing", lambda: True)
    assert_same(model, plain)
    # Another length: its mask has not been seen.
    assert_same(model, plain, length=LENGTH + 1)
    assert len(inspections) == before


@pytest.mark.parametrize("kind", [Attention, SdpaAttention])
def test_dropout_of_the_weights_is_left(kind: type[Attention]) -> None:
    model = model_of(lambda: kind(dropout=0.1))
    report = stepscope.accelerate(model)
    results(model)
    reasons = [left.reason for left in report.left if left.name == "attn"]
    assert reasons == ["it drops attention weights"]


def test_attention_of_another_form_is_left() -> None:
    model, plain = model_of(LinearAttention), model_of(LinearAttention)
    report = stepscope.accelerate(model)
    assert_same(model, plain)
    reasons = [left.reason for left in report.left if left.name == "attn"]
    assert reasons == ["this form of attention is not known"]
    assert model.get_submodule("attn").forward.__func__ is Attention.forward  # type: ignore[union-attr]


@pytest.mark.parametrize("pattern", ["attention", PIECE, "attn", Attention])
def test_exclude(pattern: Any) -> None:
    model = model_of()
    report = stepscope.accelerate(model, exclude=[pattern])
    results(model)
    assert not replaced(report)
    assert [left.reason for left in report.left if left.piece == PIECE] == ["excluded"]


class Inline(nn.Module):
    """A block that computes attention itself, and is not called so."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(x)))


def test_attention_in_a_block() -> None:
    model, plain = (nn.Sequential(Inline(), Inline()) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    report = stepscope.accelerate(model)
    for _ in range(2):
        assert_same(model, plain)
    assert report.replaced[PIECE] == ["0", "1"]


def test_undo() -> None:
    model, plain = model_of(), model_of()
    report = stepscope.accelerate(model)
    results(model)
    report.undo()
    assert "forward" not in vars(model.get_submodule("attn"))
    for actual, expected in zip(results(model), results(plain), strict=True):
        assert torch.equal(actual, expected)
