"""The Triton attention at sizes that need a GPU, with the tiles of the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accuracy import check_against_float64
from attention_rules import ALL, BATCH, FLEX, HEADS, IN_KERNELS, inputs
from stepscope.attention import ScoreRules, attention, explain
from stepscope.attention.tiles import Pass, tiles

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def ours(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
    return attention(q, k, v, impl="triton", **how)  # type: ignore[arg-type]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Return q, k, v and the gradient of the output."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for _ in range(4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("length", [1000, 4096])
def test_long_rows(length: int, d: int, dtype: torch.dtype) -> None:
    check_against_float64(ours, *draw(1, 2, length, d, dtype=dtype), is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [32, 64, 80, 128, 256])
def test_fallback_tiles_of_smaller_gpus(d: int, dtype: torch.dtype) -> None:
    from stepscope.attention.triton import launch as triton_launch

    passes: tuple[Pass, ...] = ("forward", "query", "key_value")
    choices = {kind: tiles(kind, d, dtype.itemsize, (9, 0))[1:] for kind in passes}
    for index in range(len(choices["forward"])):
        with triton_launch.forced_tiles({kind: choices[kind][index] for kind in passes}):
            check_against_float64(ours, *draw(1, 2, 200, d, dtype=dtype), is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_longest_rows_that_float64_can_check(d: int, dtype: torch.dtype) -> None:
    check_against_float64(ours, *draw(1, 1, 16384, d, dtype=dtype), is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_heads_at_once(dtype: torch.dtype) -> None:
    check_against_float64(ours, *draw(1, 16, 4096, 64, dtype=dtype), is_causal=True)


def test_more_heads_than_the_limit_of_a_grid_dimension() -> None:
    check_against_float64(ours, *draw(70_000, 1, 16, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 80])
def test_bit_identical_from_both_launchers(d: int, dtype: torch.dtype) -> None:
    q, k, v, grad = draw(2, 8, 2048, d, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run() -> tuple[Tensor, ...]:
        out = ours(*leaves, is_causal=True)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    # Imported here: without a GPU other tests must first import it for the interpreter.
    from stepscope.attention.triton import launch as triton_launch

    triton_launch._PREPARED.clear()
    first = run()
    for _ in range(50):
        for again, before in zip(run(), first, strict=True):
            assert torch.equal(again, before)


def test_cached_descriptors_follow_the_addresses() -> None:
    inputs = [draw(1, 2, 512, 64, dtype=torch.bfloat16, seed=seed) for seed in range(4)]
    expected = [attention(q, k, v, is_causal=True, impl="reference") for q, k, v, _ in inputs]
    for _ in range(2):
        for (q, k, v, _), out in zip(inputs, expected, strict=True):
            torch.testing.assert_close(ours(q, k, v, is_causal=True), out, atol=2e-2, rtol=2e-2)


def test_on_a_side_stream_and_in_a_cuda_graph() -> None:
    q, k, v, _ = draw(1, 4, 1024, 64, dtype=torch.bfloat16)
    expected = ours(q, k, v, is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(q, k, v, is_causal=True)
    captured.fill_(0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


def test_dynamic_lengths_under_torch_compile() -> None:
    compiled = torch.compile(attention, dynamic=True)
    for length in (32, 40, 48, 1024, 1280, 2048):
        *inputs, grad = draw(2, 4, length, 64, dtype=torch.bfloat16, seed=length)
        inputs = [x.requires_grad_() for x in inputs]
        actual, expected = compiled(*inputs, is_causal=True), attention(*inputs, is_causal=True)
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
        gradients = (torch.autograd.grad(out, inputs, grad) for out in (actual, expected))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=5e-2)


def long_rules(length: int) -> dict[str, ScoreRules]:
    documents = torch.arange(length, device="cuda") // 300
    heads = torch.linspace(-1.0, 1.0, 4, device="cuda")
    return {
        "window": ScoreRules(window=700),
        "documents": ScoreRules(documents=documents),
        "prefix": ScoreRules(prefix=500),
        "soft cap": ScoreRules(softcap=3.0),
        "ALiBi": ScoreRules(alibi_slopes=heads.abs() / 8),
        "sinks": ScoreRules(sinks=heads),
        "dropout": ScoreRules(dropout=0.1, dropout_seed=torch.tensor([5, 0], device="cuda")),
        "all": ScoreRules(
            documents=documents, window=200, softcap=3.0, alibi_slopes=heads.abs(), sinks=heads
        ),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("name", list(long_rules(1) if torch.cuda.is_available() else ()))
def test_rules_over_long_rows(name: str, d: int, dtype: torch.dtype) -> None:
    """With the tiles of the table and TMA, which the interpreter does not use."""
    length = 2000
    q, k, v, grad = draw(1, 4, length, d, dtype=dtype)
    rules = long_rules(length)[name]
    k, v = k[:, :2], v[:, :2]
    check_against_float64(ours, q, k, v, grad, is_causal=True, rules=rules)


@pytest.mark.parametrize("name", [*FLEX, "sinks without a visible key"])
def test_flex_attention_with_rules(name: str) -> None:
    case = ALL[name]
    q, k, v, grad = inputs(case, 64, dtype=torch.float32, device="cuda")
    rules = case.on("cuda", torch.float32)
    results = []
    for impl in ("flex", "reference"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, impl=impl, rules=rules, **case.how)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ALL)
def test_auto_serves_every_rule(name: str) -> None:
    case = ALL[name]
    q, k, v, grad = inputs(case, 64, dtype=torch.bfloat16, device="cuda")
    rules = case.on("cuda", torch.bfloat16)
    chosen = explain(q, k, v, rules=rules, **case.how).chosen
    assert chosen == ("triton" if name in IN_KERNELS else "sdpa")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, rules=rules, **case.how)
    expected = attention(*(x.float() for x in leaves), impl="reference", rules=rules, **case.how)
    torch.testing.assert_close(out.float(), expected, rtol=3e-2, atol=3e-2)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, leaves, grad))


def test_documents_that_change_between_replays_of_a_captured_step() -> None:
    """A captured call computes the intervals from the documents of each replay."""
    length = 512
    q, k, v = (x.requires_grad_() for x in draw(BATCH, HEADS, length, 64, dtype=torch.bfloat16)[:3])
    documents = torch.arange(length, device="cuda") // 100
    rules = ScoreRules(documents=documents)

    def step() -> list[Tensor]:
        out = ours(q, k, v, is_causal=True, rules=rules)
        return [out, *torch.autograd.grad(out.float().sum(), (q, k, v))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for size in (100, 37, 300):
        documents.copy_(torch.arange(length, device="cuda") // size)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [x.detach().clone() for x in captured]
        for ours_, theirs in zip(replayed, step(), strict=True):
            assert torch.equal(ours_, theirs)


def test_dropout_of_a_captured_step() -> None:
    """Every replay drops other weights, the same ones in both passes."""
    length = 128
    q, k, _, _ = draw(1, HEADS, length, length, dtype=torch.float32)
    v = torch.eye(length, device="cuda").expand(1, HEADS, -1, -1).contiguous().requires_grad_()
    rules = ScoreRules(window=50, dropout=0.5)

    def step() -> tuple[Tensor, Tensor]:
        # The output is the weights, and the gradient of v their sum over the queries.
        weights = ours(q, k, v, is_causal=True, rules=rules)
        (grad,) = torch.autograd.grad(weights.sum(), v)
        return weights.detach(), grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, grad = step()
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        masks.append(weights != 0)
        torch.testing.assert_close(grad[..., 0], weights.sum(-2), rtol=1e-4, atol=1e-5)
        visible = torch.ones_like(masks[-1]).tril().triu(-49)
        assert not (masks[-1] & ~visible).any()
        assert abs(float(masks[-1].sum() / visible.sum()) - 0.5) < 0.03
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_dropout_without_other_rules_is_left_to_torch() -> None:
    q, k, v, _ = draw(1, HEADS, 256, 64, dtype=torch.bfloat16)
    assert explain(q, k, v, is_causal=True, rules=ScoreRules(dropout=0.1)).chosen == "sdpa"
    rules = ScoreRules(dropout=0.1, window=100)
    assert explain(q, k, v, is_causal=True, rules=rules).chosen == "triton"
