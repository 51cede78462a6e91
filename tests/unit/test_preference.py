"""The rule by which `auto` prefers our kernels: the smallest predicted time, for every input and
under the compiler too."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from stepscope.attention import hopper, ops, sdpa
from stepscope.attention.call import AttentionCall
from stepscope.attention.preference import (
    COSTS,
    HEAD_DIMS,
    LEFT_TO_TORCH,
    MIN_ROWS,
    MULTIPROCESSORS,
    Costs,
    Rate,
    description,
    entry_of,
    kind_of,
    largest_of,
    reason_against,
    squared_time,
)
from stepscope.attention.specialized import Sizes
from stepscope.attention.tiles import MAX_HEAD

SIZES = Sizes(batch=4, heads=32, key_heads=32, rows=1024, keys=1024, head_dim=128, causal=True)


def kinds() -> set[tuple[int, int, bool, bool]]:
    choices = itertools.product((2, 4), range(1, MAX_HEAD + 1), (True, False), (1, 2))
    return {
        kind_of(Sizes(1, 2, key_heads, 64, 64, head_dim, causal), element_bytes)
        for element_bytes, head_dim, causal, key_heads in choices
    }


def test_every_supported_head_dimension_has_a_kind() -> None:
    for head_dim in range(1, MAX_HEAD + 1):
        _, largest, *_ = kind_of(SIZES._replace(head_dim=head_dim), 2)
        smaller = [size for size in HEAD_DIMS if size < largest]
        assert max(smaller, default=0) < head_dim <= largest


def test_kinds_have_descriptions_of_their_own() -> None:
    assert set(LEFT_TO_TORCH) <= kinds()
    assert len({description(kind) for kind in kinds()}) == len(kinds())


def test_what_is_predicted_has_a_rival_of_torch() -> None:
    """An entry of ours without one of torch would win every input."""
    for (name, element_bytes), costs in COSTS.items():
        for head_dim, key_heads in itertools.product(costs.by_head_dim, (1, 2)):
            sizes = Sizes(1, 2, key_heads, 64, 64, head_dim, causal=True)
            rival = COSTS[entry_of("sdpa", sizes, element_bytes)]
            assert largest_of(rival, head_dim) is not None, (name, head_dim)


def time(sizes: Sizes, **changes: object) -> float:
    rate = Rate(matmul=2.0, rows=30.0)
    costs = Costs({128: rate}, host=0.0, tile=64)._replace(**changes)
    return squared_time(costs, rate, sizes) ** 0.5


def test_times_are_those_of_matmuls_rows_and_the_longest_program() -> None:
    full = SIZES._replace(causal=False)
    multiply_adds = 4 * 32 * 1024 * 1024 * 128 / 1e6 / MULTIPROCESSORS
    rows = 4 * 32 * 1024 / 1e3 / MULTIPROCESSORS
    assert time(full) == pytest.approx(2 * multiply_adds + 30 * rows)
    assert time(SIZES) == pytest.approx(multiply_adds * (1 + 64 / 1024) + 30 * rows)
    assert time(SIZES, skips=False) == time(full)
    longest = 64 * 1024 * 128 / 1e6
    assert time(full, tail=0.5) - time(full) == pytest.approx(2 * 0.5 * longest)
    grouped = full._replace(key_heads=8)
    assert time(grouped, tail=0.5) == time(full, tail=0.5)
    by_key_head = time(grouped, tail=0.5, by_key_head=True) - time(grouped)
    assert by_key_head == pytest.approx(4 * 2 * 0.5 * longest)
    assert time(grouped, grouped_rows=10.0) - time(full) == pytest.approx(10 * rows)
    assert time(full, grouped_rows=10.0) == time(full)


def test_the_longer_one_of_gpu_and_host_decides() -> None:
    tiny = SIZES._replace(batch=1, heads=1, key_heads=1)
    assert time(tiny, host=300.0) == pytest.approx(300.0, rel=0.01)
    assert time(SIZES, host=20.0) == pytest.approx(time(SIZES), rel=0.01)


def test_few_programs_are_left_to_torch() -> None:
    """4×24/3×1216: 228 programs of 8 heads each for the gradients of k and v, on 132
    multiprocessors. Measured: 496 µs, and 419 by cuDNN."""
    few = SIZES._replace(batch=4, heads=24, key_heads=3, rows=1216, keys=1216)
    many = few._replace(batch=8, heads=32, key_heads=4, rows=1152, keys=1152)
    assert "sdpa is predicted to be faster" in str(reason_against("triton", few, 2))
    assert reason_against("triton", many, 2) is None


@pytest.mark.parametrize(
    ("shape", "element_bytes", "causal"),
    [
        ((16, 40, 10, 192, 128), 2, False),
        ((8, 64, 64, 1472, 80), 2, False),
        ((32, 40, 5, 384, 64), 2, True),
        ((32, 32, 8, 448, 64), 2, True),
        ((4, 16, 2, 128, 96), 4, False),
    ],
)
def test_kernels_are_preferred_where_cudnn_was_slower(
    shape: tuple[int, ...], element_bytes: int, causal: bool
) -> None:
    batch, heads, key_heads, length, head_dim = shape
    sizes = Sizes(batch, heads, key_heads, length, length, head_dim, causal)
    assert reason_against("triton", sizes, element_bytes) is None


class OnHopper(Tensor):
    """A meta tensor that reports a GPU of compute capability 9."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def tensors(heads: int, key_heads: int, length: int, head_dim: int, dtype: torch.dtype):
    return [
        torch.empty((4, n, length, head_dim), device="meta", dtype=dtype).as_subclass(OnHopper)
        for n in (heads, key_heads, key_heads)
    ]


def test_cudnn_is_preferred_where_it_was_faster(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    def reason(heads, key_heads, length, head_dim, causal, dtype=torch.bfloat16) -> str | None:
        inputs = tensors(heads, key_heads, length, head_dim, dtype)
        return ops.TRITON.leaves(AttentionCall(*inputs, causal))

    assert reason(64, 32, 1024, 64, True) is None
    assert reason(32, 32, 2048, 80, True) is None
    assert reason(64, 64, 1024, 128, True) is None
    assert reason(2, 2, 8192, 64, True) is None
    assert reason(16, 16, 4096, 64, False, torch.float32) is None
    assert reason(8, 1, 128, 64, False, torch.float32) is None
    assert reason(8, 1, 128, 128, True, torch.float32) is None
    faster = "sdpa is predicted to be faster"
    assert "others were faster" in str(reason(32, 32, 2048, 96, True))
    assert faster in str(reason(16, 8, 512, 64, True))
    assert faster in str(reason(16, 16, 4096, 128, True))
    assert faster in str(reason(16, 16, 4096, 64, False))
    assert faster in str(reason(16, 16, 4096, 128, False, torch.float32))
    assert "grouped" in str(reason(32, 8, 2048, 80, True))
    assert "not measured" in str(reason(32, 32, 2048, 256, True))


def test_dimensions_before_the_heads_are_batches(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    def reason(*leading: int) -> str | None:
        inputs = [
            torch.empty((*leading, 1024, 128), device="meta", dtype=torch.bfloat16)
            for _ in range(3)
        ]
        return ops.TRITON.leaves(AttentionCall(*(x.as_subclass(OnHopper) for x in inputs), True))

    assert reason(4, 64) is reason(256) is reason(2, 2, 64) is None
    assert reason() is not None


def test_kernels_are_preferred_where_gradients_must_repeat(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for head_dim, causal in itertools.product((64, 80, 128), (True, False)):
        inputs = tensors(16, 16, 4096, head_dim, torch.bfloat16)
        assert ops.TRITON.leaves(AttentionCall(*inputs, causal)) is None
    short = tensors(16, 16, 256, 64, torch.bfloat16)
    assert "multiply-adds" in str(ops.TRITON.leaves(AttentionCall(*short, True)))
    wide = AttentionCall(*tensors(16, 16, 4096, 96, torch.bfloat16), True)
    assert ops.TRITON.leaves(wide) is not None


def test_a_token_at_a_time_is_left_to_torch() -> None:
    """Decoding: a launch takes longer than the kernel, and new lengths would compile."""
    for (name, element_bytes), costs in COSTS.items():
        for head_dim, key_heads in itertools.product(costs.by_head_dim, (16, 4)):
            sizes = Sizes(64, 16, key_heads, 1, 1 << 16, head_dim, causal=False)
            assert reason_against(name, sizes, element_bytes), (name, head_dim)
            assert "queries" in str(
                reason_against("triton", sizes._replace(rows=MIN_ROWS - 1), element_bytes)
            )


def test_cudnn_backward_is_refused_while_algorithms_must_be_deterministic(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(ops.TRITON, "refuses", lambda _: None)
    monkeypatch.setattr(sdpa, "refusal", lambda *_: None)
    inputs = tensors(16, 16, 4096, 128, torch.bfloat16)
    assert hopper.HOPPER.refuses(AttentionCall(*inputs, True)) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "not deterministic" in str(hopper.HOPPER.refuses(AttentionCall(*inputs, True)))


def test_on_hopper_its_forward_is_preferred_where_it_was_faster_than_cudnns(monkeypatch) -> None:
    from stepscope.attention.triton import specialized

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(specialized, "_device", lambda _: (9, 132))
    monkeypatch.setattr(ops.TRITON, "refuses", lambda _: None)
    monkeypatch.setattr(sdpa, "refusal", lambda *_: None)

    def reasons(heads: int, length: int, head_dim: int, causal: bool) -> list[str | None]:
        inputs = tensors(heads, heads, length, head_dim, torch.bfloat16)
        call = AttentionCall(*inputs, causal)
        return [hopper.HOPPER.refuses(call), hopper.HOPPER.leaves(call)]

    assert reasons(16, 4096, 64, False) == reasons(16, 4096, 128, True) == [None, None]
    assert reasons(16, 16384, 64, True) == [None, None]
    assert "sdpa is predicted to be faster" in str(reasons(16, 2048, 64, True)[1])
    refused, left = reasons(256, 1024, 64, False)
    assert refused is None
    assert "cuDNN's forward is faster" in str(left)
    assert "too few query tiles" in str(reasons(1, 12288, 128, False)[1])
    assert "sdpa is predicted to be faster" in str(reasons(16, 768, 64, False)[1])
    assert "triton is predicted to be faster" in str(reasons(128, 768, 128, True)[1])


def test_compiler_traces_the_rule_with_symbolic_sizes() -> None:
    """Without a graph break, and with one graph per choice for all lengths and batch sizes."""
    graphs = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        graphs.append(module)
        return module.forward

    def left(x: Tensor, k: Tensor, causal: bool) -> Tensor:
        sizes = ops.sizes_of(x, k, causal)._replace(head_dim=64)
        reason = reason_against("triton", sizes, 2)
        return x.sum() + (1 if reason is None else 2)

    compiled = torch.compile(left, fullgraph=True, backend=backend, dynamic=True)

    def chosen(batch: int, heads: int, key_heads: int, length: int) -> int:
        x, k = (torch.zeros(batch, n, length, 1) for n in (heads, key_heads))
        return int(compiled(x, k, True))

    assert [chosen(batch, 40, 5, 384) for batch in (32, 48, 31)] == [1, 1, 1]
    assert [chosen(32, 64, 16, length) for length in (448, 512, 640)] == [1, 1, 1]
    assert [chosen(batch, 8, 4, 130) for batch in (2, 3, 5)] == [2, 2, 2]
    assert len(graphs) == 2
