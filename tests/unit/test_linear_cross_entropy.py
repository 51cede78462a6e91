"""Fused linear cross-entropy: the result of the naive version without all logits in memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.kernels import linear_cross_entropy
from stepscope.kernels.loss_chunks import CHUNK_ELEMENTS, CHUNK_ROWS, matmul_columns, rows_per_chunk

ROWS, D, VOCAB = 37, 12, 53


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x = draw(ROWS, D, dtype=dtype).requires_grad_()
    weight = draw(VOCAB, D, dtype=dtype, seed=1).requires_grad_()
    targets = torch.randint(VOCAB, (ROWS,), generator=torch.Generator().manual_seed(2))
    targets[[0, 5, 36]] = -100
    return x, weight, targets


def naive(x: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(x @ weight.T, targets, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_rows", [1, 8, 37, 100, None])
@pytest.mark.parametrize("upstream", [1.0, -3.5, 0.0, 65536.0])
def test_matches_the_naive_version(reduction: str, chunk_rows: int | None, upstream: float) -> None:
    x, weight, targets = inputs()
    expected = naive(x, weight, targets, reduction)
    actual = linear_cross_entropy(x, weight, targets, reduction=reduction, chunk_rows=chunk_rows)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    above = torch.tensor(upstream, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(actual, (x, weight), above),
        torch.autograd.grad(expected, (x, weight), above),
        rtol=1e-10,
        atol=1e-12 * max(1.0, abs(upstream)),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("frozen", [False, True], ids=["learned", "frozen weight"])
def test_a_bias(reduction: str, frozen: bool) -> None:
    x, weight, targets = inputs()
    weight.requires_grad_(not frozen)
    bias = draw(VOCAB, seed=3).requires_grad_()
    leaves = (x, bias) if frozen else (x, weight, bias)
    logits = functional.linear(x, weight, bias)
    expected = functional.cross_entropy(logits, targets, reduction=reduction)
    actual = linear_cross_entropy(x, weight, targets, reduction=reduction, chunk_rows=8, bias=bias)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(actual * 3, leaves), torch.autograd.grad(expected * 3, leaves)
    )
    with pytest.raises(ValueError, match="bias"):
        linear_cross_entropy(x, weight, targets, bias=draw(VOCAB + 1))


def test_leading_dimensions_and_another_ignored_index() -> None:
    x, weight, _ = inputs()
    batched = draw(3, 5, D, seed=4)
    targets = torch.arange(15).reshape(3, 5)
    expected = functional.cross_entropy(
        (batched @ weight.T).flatten(0, 1), targets.flatten(), ignore_index=7
    )
    actual = linear_cross_entropy(batched, weight, targets, ignore_index=7, chunk_rows=4)
    torch.testing.assert_close(actual, expected)
    assert x.grad is None


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_tensors_that_require_grad_get_a_gradient(frozen: str) -> None:
    x, weight, targets = inputs()
    (x if frozen == "x" else weight).requires_grad_(False)
    trained = weight if frozen == "x" else x
    (actual,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets), trained)
    (expected,) = torch.autograd.grad(naive(x, weight, targets), trained)
    torch.testing.assert_close(actual, expected)


def test_all_rows_ignored_matches_torch() -> None:
    x, weight, targets = inputs()
    ignored = torch.full_like(targets, -100)
    loss = linear_cross_entropy(x, weight, ignored)
    assert loss.isnan()
    assert naive(x, weight, ignored).isnan()
    assert all(not grad.any() for grad in torch.autograd.grad(loss, (x, weight)))


def test_tied_weights_get_both_gradients() -> None:
    _, weight, targets = inputs()
    tokens = targets.roll(1).clamp(min=0)
    (actual,) = torch.autograd.grad(linear_cross_entropy(weight[tokens], weight, targets), weight)
    (expected,) = torch.autograd.grad(naive(weight[tokens], weight, targets), weight)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["naive", "kernels"])
def test_a_second_backward_raises(dtype: torch.dtype) -> None:
    x, weight, targets = inputs(dtype)
    loss = linear_cross_entropy(x, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the fused loss supports one backward"):
        loss.backward()


def test_autocast_computes_in_its_dtype_and_returns_float32() -> None:
    x, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, chunk_rows=8)
        expected = functional.cross_entropy((x @ weight.T).float(), targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    exact = torch.autograd.grad(naive(x, weight, targets), (x, weight))
    for actual, theirs, truth in zip(
        torch.autograd.grad(loss, (x, weight)),
        torch.autograd.grad(expected, (x, weight)),
        exact,
        strict=True,
    ):
        assert actual.dtype == torch.float32
        error, reference = (actual - truth).abs().max(), (theirs - truth).abs().max()
        assert 0 < error <= 1.5 * reference


def test_bfloat16_gradients_do_not_lose_small_chunks() -> None:
    """In a bfloat16 sum, a chunk below 1/256 of the sum so far would vanish."""
    x, weight, targets = torch.ones(2048, 1), torch.zeros(2, 1), torch.zeros(2048, dtype=torch.long)
    leaf = weight.bfloat16().requires_grad_()
    loss = linear_cross_entropy(x.bfloat16(), leaf, targets, reduction="sum", chunk_rows=1)
    (grad,) = torch.autograd.grad(loss, leaf)
    assert grad.flatten().tolist() == [-1024.0, 1024.0]


@pytest.mark.parametrize("autocast", [False, True])
def test_under_the_compiler_in_one_graph(autocast: bool) -> None:
    x, weight, targets = inputs(torch.float32)

    def scaled_loss(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return 3 * linear_cross_entropy(2 * x, weight, targets, chunk_rows=8)

    compiled = torch.compile(scaled_loss, backend="aot_eager", fullgraph=True)
    actual, expected = compiled(x, weight), scaled_loss(x, weight)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, (x, weight)), torch.autograd.grad(expected, (x, weight))
    )


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        del types
        output = function(*arguments, **(keywords or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return output


def test_no_tensor_is_larger_than_a_chunk_or_the_weight() -> None:
    rows, d, vocab, chunk = 512, 4, 304, 16
    x, weight = draw(rows, d).requires_grad_(), draw(vocab, d).requires_grad_()
    targets = torch.randint(vocab, (rows,))
    with LargestTensor() as ours:
        linear_cross_entropy(x, weight, targets, chunk_rows=chunk).backward()
    assert ours.elements == chunk * vocab
    with LargestTensor() as theirs:
        naive(x, weight, targets).backward()
    assert theirs.elements == rows * vocab


def test_no_host_synchronization() -> None:
    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            del types
            assert function is not torch.ops.aten._local_scalar_dense.default
            return function(*arguments, **(keywords or {}))

    x, weight, targets = inputs()
    with NoReading():
        linear_cross_entropy(x, weight, targets, chunk_rows=8).backward()
        with pytest.raises(AssertionError):
            x.sum().item()


@pytest.mark.parametrize(
    ("rows", "vocab", "d", "expected"),
    [
        (2048, 10_000, 768, 2048),
        (8192, 10_000, 2560, 8192),
        (32_768, 151_936, 4096, 8192),
        (32_768, 151_936, 2048, 4096),  # as many logits as the weight has bytes in float32
        (32_768, 50_257, 768, 2560),  # 2^27 logits: 2,669 rows, 2,560 in multiples of 128
        (16_400, 10_000, 2560, 8320),  # no small remainder: 13,312 would leave one
        (1_000_000, 256, 512, 500_096),
        (8, 10**9, 4, 128),
        (0, 100, 4, 128),
    ],
)
def test_rows_of_a_chunk(rows: int, vocab: int, d: int, expected: int) -> None:
    assert rows_per_chunk(rows, vocab, d) == expected


@given(rows=st.integers(1, 10**6), vocab=st.integers(1, 10**6), d=st.integers(1, 16_384))
def test_chunks_are_bounded_and_about_the_same_size(rows: int, vocab: int, d: int) -> None:
    chunk = rows_per_chunk(rows, vocab, d)
    assert chunk % 128 == 0
    assert chunk <= max(128, min(CHUNK_ROWS, 2 * d), CHUNK_ELEMENTS // vocab)
    chunks = -(-rows // chunk)
    last = rows - (chunks - 1) * chunk
    assert 0 < last <= chunk
    # Rounding up to 128 shortens the last chunk.
    assert chunk - last < 128 * chunks


def test_the_cast_of_the_weight_is_freed_before_its_gradient_is_computed() -> None:
    """With one chunk: the peak excludes the cast copy."""
    alive: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            del types
            output = function(*arguments, **(keywords or {}))
            if function is torch.ops.aten.empty.memory_format and output.shape == padded:
                casts.append(weakref.ref(output))
            if function is torch.ops.aten.mm.default and output.shape == padded:
                alive.append(sum(cast() is not None for cast in casts))
            return output

    casts: list[weakref.ref[Tensor]] = []
    padded = (matmul_columns(VOCAB), D)
    x, weight, targets = inputs(torch.float32)
    with Watch():
        linear_cross_entropy(x.double(), weight, targets)
    assert len(casts) == 1
    assert alive == [0]


def test_targets_may_be_int32() -> None:
    x, weight, targets = inputs()
    expected = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(linear_cross_entropy(x, weight, targets.int()), expected)


def test_autocast_leaves_float64_alone() -> None:
    x, weight, targets = inputs(torch.float64)
    expected = functional.cross_entropy(x @ weight.T, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected)


def test_no_rows_give_a_zero_gradient() -> None:
    _, weight, _ = inputs()
    loss = linear_cross_entropy(torch.empty(0, D), weight, torch.empty(0, dtype=torch.long))
    (grad,) = torch.autograd.grad(loss, weight)
    assert loss.isnan()
    assert grad.shape == weight.shape
    assert not grad.any()


def test_training_converges() -> None:
    torch.manual_seed(0)
    head = nn.Linear(4, 3, bias=False)
    x = torch.eye(4)[:3]
    optimizer = torch.optim.SGD(head.parameters(), lr=5.0)
    for _ in range(200):
        optimizer.zero_grad()
        loss = linear_cross_entropy(x, head.weight, torch.arange(3))
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "none"}, "reduction is 'none'"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, "the shapes must be"),
        ({"weight": torch.zeros(VOCAB, D + 1)}, "the shapes must be"),
        ({"targets": torch.zeros(ROWS, dtype=torch.uint8)}, "targets are torch.uint8"),
        ({"targets": torch.zeros(ROWS)}, "targets are torch.float32"),
    ],
)
def test_invalid_input_raises(change: dict[str, object], message: str) -> None:
    x, weight, targets = inputs()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**({"x": x, "weight": weight, "targets": targets} | change))  # type: ignore[arg-type]


def test_uninitialized_memory_is_not_read() -> None:
    """A CPU with AMX multiplied what lies between two rows of the logits by zero: NaN stays NaN."""
    inputs = [draw(rows, 64, dtype=torch.float32).requires_grad_() for rows in (34, 200)]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(*inputs, torch.randint(200, (34,)))
        gradients = torch.autograd.grad(loss, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(one).all() for one in (loss, *gradients))
