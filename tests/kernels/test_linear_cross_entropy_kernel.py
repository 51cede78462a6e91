"""Triton cross-entropy kernels: losses and gradients of rows, and fused linear cross-entropy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accuracy import hold_to_policy
from stepscope.kernels import linear_cross_entropy
from stepscope.kernels.cross_entropy import loss_operator
from stepscope.kernels.launch import kernels_take
from stepscope.kernels.triton import cross_entropy as triton_cross_entropy
from stepscope.kernels.triton.cross_entropy import count_rows, mean_of, write_losses
from stepscope.kernels.triton.scale import scale_unless_one

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter computes bfloat16 incorrectly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
both_kernels = pytest.mark.parametrize("in_registers", [True, False], ids=["one read", "two reads"])


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * scale


def losses_of(
    logits: Tensor, targets: Tensor, *, gradient: bool = True, share: Tensor | None = None
) -> Tensor:
    losses = torch.full((len(logits),), math.nan, device=DEVICE)
    write_losses(logits, targets, losses, -100, gradient=gradient, share=share)
    return losses


def row_results(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    leaf = logits.detach().requires_grad_()
    wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32))
    losses = functional.cross_entropy(wide, targets, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return {"losses": losses.detach(), "d_logits": gradient}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 53, 4096, 9000, 16_384, 16_385, 40_000])
def test_rows(vocab: int, dtype: torch.dtype) -> None:
    logits = draw(3, vocab, scale=4.0).to(dtype)
    targets = torch.tensor([0, vocab - 1, -100], device=DEVICE)
    gradients = logits.clone()
    losses = losses_of(gradients, targets)
    hold_to_policy(
        row_results(logits.double(), targets),
        row_results(logits, targets),
        {"losses": losses, "d_logits": gradients},
    )
    assert losses[2] == 0
    assert not gradients[2].any()


@both_kernels
def test_rows_with_padding(in_registers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding is ignored, and its gradient is zero. On a GPU rows with another alignment are
    read in other blocks, so their sums may differ in the last bit."""
    monkeypatch.setattr(triton_cross_entropy, "_MAX_COLUMNS_IN_REGISTERS", 64 * in_registers)
    logits = draw(4, 53, scale=4.0)
    padded = torch.full((4, 64), math.nan, device=DEVICE)
    padded[:, :53] = logits
    targets = torch.tensor([0, 52, -100, 7], device=DEVICE)
    losses = losses_of(padded[:, :53], targets)
    near = {"rtol": 1e-6, "atol": 1e-7} if DEVICE == "cuda" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(losses, losses_of(logits, targets), **near)
    torch.testing.assert_close(padded[:, :53], logits, **near)
    assert not padded[:, 53:].any()


@both_kernels
def test_gradients_are_scaled_by_the_share(
    in_registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_cross_entropy, "_MAX_COLUMNS_IN_REGISTERS", 128 * in_registers)
    logits = draw(3, 70)
    targets = torch.tensor([3, -100, 69], device=DEVICE)
    count, share = count_rows(targets, -100, torch.float32)
    assert (count.item(), share.item()) == (2.0, 0.5)
    unscaled, scaled = logits.clone(), logits.clone()
    losses_of(unscaled, targets)
    losses = losses_of(scaled, targets, share=share)
    assert torch.equal(scaled, unscaled * 0.5)
    expected = functional.cross_entropy(logits, targets)
    torch.testing.assert_close(mean_of(losses, count), expected)


@pytest.mark.parametrize("rows", [1, 4096, 9001])
def test_counting_and_averaging_many_rows(rows: int) -> None:
    targets = torch.arange(rows, device=DEVICE) % 3
    count, share = count_rows(targets, 1, torch.float32)
    assert count.item() == (targets != 1).sum().item()
    assert share.item() == pytest.approx(1 / count.item(), rel=1e-6)
    losses = draw(rows)
    torch.testing.assert_close(mean_of(losses, count), losses.sum() / count)
    zero, one = count_rows(torch.ones_like(targets), 1, torch.float32)
    assert (zero.item(), one.item()) == (0.0, 1.0)
    assert mean_of(torch.zeros_like(losses), zero).isnan()


@both_kernels
def test_without_gradient_the_logits_are_unchanged(
    in_registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_cross_entropy, "_MAX_COLUMNS_IN_REGISTERS", 128 * in_registers)
    logits = draw(2, 70)
    before = logits.clone()
    losses_of(logits, torch.tensor([3, 4], device=DEVICE), gradient=False)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("vocab", "in_registers"), [(5000, True), (5000, False), (40_000, False)])
def test_extremes(vocab: int, in_registers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_cross_entropy, "_MAX_COLUMNS_IN_REGISTERS", vocab * in_registers)
    logits = torch.zeros(6, vocab, device=DEVICE)
    logits[0] = float("-inf")
    logits[0, 7] = 3.0  # the only possible token
    logits[1, vocab - 1] = 3e38
    logits[4] = float("-inf")
    logits[5, 9] = float("inf")
    targets = torch.tensor([7, vocab - 1, vocab, -1, 3, 9], device=DEVICE)
    losses = losses_of(logits, targets)
    assert losses[:2].tolist() == [0.0, 0.0]
    assert not logits[:2].any()
    assert losses[2:4].isnan().all(), "a target outside of the vocabulary must give NaN"
    assert losses[4:].isnan().all(), "all logits -inf, or one +inf"


@pytest.mark.parametrize("upstream", [1.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_cross_entropy(dtype: torch.dtype, upstream: float) -> None:
    x, weight = draw(40, 24).to(dtype), draw(301, 24, seed=1).to(dtype)
    targets = torch.arange(40, device=DEVICE) * 7
    targets[3] = -100
    assert kernels_take(x)

    def results(compute: torch.dtype, fused: bool) -> dict[str, Tensor]:
        leaves = [tensor.detach().to(compute).requires_grad_() for tensor in (x, weight)]
        if fused:
            loss = linear_cross_entropy(*leaves, targets, chunk_rows=16)
        else:
            wide = torch.promote_types(compute, torch.float32)
            loss = functional.cross_entropy((leaves[0] @ leaves[1].T).to(wide), targets)
        grads = torch.autograd.grad(loss * upstream, leaves)
        return {"loss": loss.detach(), "dx": grads[0], "dw": grads[1]}

    hold_to_policy(results(torch.float64, False), results(dtype, False), results(dtype, True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_unless_one(dtype: torch.dtype) -> None:
    """More elements than all programs process in one iteration; the second has another dtype."""
    many, few = draw(4096 * 3 + 5).to(dtype), draw(7, seed=1)
    before = [many.clone(), few.clone()]
    for factor in (1.0, -0.5, 0.0):
        by = torch.tensor(factor, device=DEVICE)
        scale_unless_one([many, few], by)
        before = [each * by for each in before]
        assert torch.equal(many, before[0])
        assert torch.equal(few, before[1])
    alone = draw(9)
    scale_unless_one([alone], torch.tensor(3.0, device=DEVICE))
    assert torch.equal(alone, draw(9) * 3.0), "a single tensor must not be multiplied twice"
    scale_unless_one([few], torch.tensor(math.nan, device=DEVICE))
    assert few.isnan().all()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_tensor_is_scaled_once(count: int) -> None:
    tensors = [draw(5 + number, seed=number) for number in range(count)]
    expected = [tensor * 3.0 for tensor in tensors]
    scale_unless_one(tensors, torch.tensor(3.0, device=DEVICE))
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.parametrize("upstream", [1.0, 0.25])
def test_gradients_of_a_head_with_a_bias(upstream: float) -> None:
    def results(dtype: torch.dtype, fused: bool) -> dict[str, Tensor]:
        x, weight, bias = (
            draw(*shape, seed=seed).to(dtype).requires_grad_()
            for seed, shape in enumerate([(9, 16), (37, 16), (37,)])
        )
        targets = torch.arange(9, device=DEVICE) * 4
        if fused:
            loss = linear_cross_entropy(x, weight, targets, bias=bias, chunk_rows=4)
        else:
            loss = functional.cross_entropy(functional.linear(x, weight, bias), targets)
        grads = torch.autograd.grad(loss * upstream, (x, weight, bias))
        return dict(zip(("dx", "dw", "db"), grads, strict=True)) | {"loss": loss.detach()}

    exact, plain = results(torch.float64, False), results(torch.float32, False)
    hold_to_policy(exact, plain, results(torch.float32, True))


def test_scale_unless_one_advances_the_version() -> None:
    x = draw(5)
    before = x._version
    scale_unless_one([x], torch.tensor(1.0, device=DEVICE))
    assert x._version == before + 1


def test_non_contiguous_targets() -> None:
    x, weight = draw(6, 4), draw(30, 4, seed=1)
    targets = torch.arange(12, device=DEVICE).view(6, 2)[:, 1]
    expected = functional.cross_entropy(x @ weight.T, targets)
    torch.testing.assert_close(linear_cross_entropy(x, weight, targets), expected)


def test_float16_preserves_small_gradients() -> None:
    """Divided by the number of rows too early, 5e-7 would lose precision in float16."""
    rows = 256
    x = torch.ones(rows, 1, device=DEVICE, dtype=torch.float16).requires_grad_()
    weight = torch.zeros(2, 1, device=DEVICE, dtype=torch.float16).requires_grad_()
    weight.data[1] = -9.0
    targets = torch.zeros(rows, dtype=torch.long, device=DEVICE)
    loss = linear_cross_entropy(x, weight, targets, chunk_rows=64)
    (grad,) = torch.autograd.grad(loss * 256.0, weight)
    expected = 256.0 / (1 + math.exp(9.0))
    assert grad[1].item() == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_compile_gives_the_same_result(dtype: torch.dtype) -> None:
    x, weight = (draw(40, 24).to(dtype), draw(300, 24, seed=1).to(dtype))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    targets = torch.arange(40, device=DEVICE) * 7

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, chunk_rows=16)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    actual, expected = compiled(*leaves), loss(*leaves)
    assert torch.equal(actual, expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("biased", [False, True])
def test_targets_and_rows_that_are_not_dense(biased: bool) -> None:
    """Such as those of a classifier of the first position, in a graph."""
    dtype = torch.float16 if not ON_GPU else torch.bfloat16
    x, weight = draw(4, 7, 32)[:, 0].requires_grad_(), draw(50, 32, seed=1).requires_grad_()
    bias = draw(50, seed=2).requires_grad_() if biased else None
    targets = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    leaves = [one for one in (x, weight, bias) if one is not None]
    narrow = [one.to(dtype) for one in leaves]
    loss = loss_operator(
        narrow[0],
        narrow[1],
        targets[:, 0],
        ignore_index=-100,
        reduction="mean",
        bias=narrow[2] if biased else None,
    )
    expected = functional.cross_entropy(functional.linear(*leaves), targets[:, 0])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    found = torch.autograd.grad(loss, leaves)
    for one, other in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        assert (one - other).norm() < 1e-2 * other.norm()
