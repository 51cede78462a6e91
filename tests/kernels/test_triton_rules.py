"""`ScoreRules` in the Triton kernels against float64: in the interpreter on a CPU, compiled on a
GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accuracy import check_against_float64, hold_to_policy
from attention_inputs import draw
from attention_rules import BOTTOM, CAUSAL, IN_KERNELS, SCORES, SEED, SINKS, RuleCase, inputs
from stepscope.attention import ScoreRules, attention, explain
from stepscope.attention.tiles import IN_PLANES, Tile
from stepscope.attention.triton import launch as triton_launch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter computes bfloat16 incorrectly.
SIXTEEN_BIT = [torch.float16, *([torch.bfloat16] if ON_GPU else [])]

# Kernels read nothing of these rules but their intervals: one of each kind in the interpreter.
OF_INTERVALS = ("window without a causal mask", "window, fewer keys", "documents of each batch",
                "cu_seqlens of both", "prefix of each batch")  # fmt: skip
ONE_KEY = "window of one"
CHECKED = (
    tuple(name for name in IN_KERNELS if name != ONE_KEY) if ON_GPU else (*OF_INTERVALS, *SCORES)
)


def triton(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return attention(q, k, v, impl="triton", **how)


@pytest.mark.parametrize("name", CHECKED)
def test_output_and_gradients(name: str) -> None:
    case = IN_KERNELS[name]
    tensors = inputs(case, dtype=torch.float32, device=DEVICE)
    check_against_float64(triton, *tensors, rules=case.on(DEVICE), **case.how)


@pytest.mark.parametrize("name", ["window", "documents", "dropout and all"])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_output_and_gradients_in_16_bits(dtype: torch.dtype, name: str) -> None:
    case = IN_KERNELS[name]
    tensors = inputs(case, dtype=dtype, device=DEVICE)
    check_against_float64(triton, *tensors, rules=case.on(DEVICE), **case.how)


@pytest.mark.parametrize("name", ["window", "all"])
@pytest.mark.parametrize("d", [40, 80])
def test_head_dimensions_in_one_and_two_parts(d: int, name: str) -> None:
    case = IN_KERNELS[name]
    tensors = inputs(case, d, key_heads=2, dtype=torch.float32, device=DEVICE)
    check_against_float64(triton, *tensors, rules=case.on(DEVICE), **case.how)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("sinks", torch.float16),
        ("sinks without a visible key", torch.float32),
        ("all", torch.float32),
    ],
    ids=str,
)
def test_the_gradient_of_the_sinks(name: str, dtype: torch.dtype) -> None:
    case = IN_KERNELS[name]

    def results(impl: str, kind: torch.dtype) -> dict[str, Tensor]:
        *tensors, like = inputs(case, dtype=dtype, device=DEVICE)
        sinks = SINKS.to(DEVICE, dtype).to(kind, copy=True).requires_grad_()
        rules = ScoreRules(**{
            name: getattr(case.on(DEVICE), name) for name in case.rules
        } | {"sinks": sinks})  # fmt: skip
        out = attention(*(x.to(kind) for x in tensors), impl=impl, rules=rules, **case.how)
        # Few sums over all rows: several of them, since the error of one varies.
        grads = (draw(*like.shape, seed=seed).to(DEVICE, dtype).to(kind) for seed in range(5))
        each = [torch.autograd.grad(out, sinks, one, retain_graph=True)[0] for one in grads]
        return {"dsinks": torch.stack(each)}

    ours = results("triton", dtype)
    assert ours["dsinks"].dtype == dtype
    hold_to_policy(results("reference", torch.float64), results("reference", dtype), ours)


@pytest.mark.skipif(ON_GPU, reason="on a GPU the tile comes from the table")
@pytest.mark.parametrize("tile", [Tile(16, 64, 4, 1), Tile(64, 16, 4, 1)])
@pytest.mark.parametrize("name", ["documents and a window", "dropout, more keys"])
def test_any_tile_gives_the_same_result(
    name: str, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "_INTERPRETER_TILE", tile)
    case = IN_KERNELS[name]
    tensors = inputs(case, dtype=torch.float32)
    check_against_float64(triton, *tensors, rules=case.on("cpu"), **case.how)


@pytest.mark.parametrize("name", ["documents and a window", "dropout and all"])
def test_in_planes(name: str) -> None:
    """float32 split into three planes of a 16-bit dtype, as on a GPU."""
    case = IN_KERNELS[name]
    *tensors, grad = inputs(case, dtype=torch.float32, device=DEVICE)
    leaves = [x.requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    rules = case.on(DEVICE)
    tile = Tile(32, 32, 4, 1, precision=IN_PLANES)
    with triton_launch.forced_tiles(dict.fromkeys(("forward", "query", "key_value"), tile)):
        out = triton(*leaves, rules=rules, **case.how)
        ours = (out, *torch.autograd.grad(out, leaves, grad))
    expected = attention(*exact, impl="reference", rules=rules, **case.how)
    truth = (expected, *torch.autograd.grad(expected, exact, grad.double()))
    for actual, exactly in zip(ours, truth, strict=True):
        torch.testing.assert_close(actual.double(), exactly, rtol=1e-5, atol=2e-5)


def test_tiles_outside_of_the_intervals_are_skipped() -> None:
    """Keys and values that no query sees are NaN: a matmul that read them would spread it."""
    length, tile = 256, 32
    seen = slice(64, 128)
    q, k, v = (torch.randn(1, 1, length, 16, device=DEVICE) for _ in range(3))
    documents = (torch.arange(length, device=DEVICE) // 64).clamp(max=2)
    rules = ScoreRules(documents=documents)
    hidden = torch.ones(length, dtype=torch.bool, device=DEVICE)
    hidden[seen] = False
    assert int(hidden.sum()) % tile == 0
    for x in (k, v):
        x[:, :, hidden] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = triton(*leaves, rules=rules)[:, :, seen]
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert gradient[:, :, seen].isfinite().all()


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"alibi_slopes": torch.tensor([-9.0, 1.0])}, torch.float16),
        ({"sinks": torch.tensor([-float("inf"), 0.5])}, torch.float32),
    ],
    ids=["growing scores", "no sink"],
)
@pytest.mark.parametrize("how", [{}, BOTTOM], ids=["full", "bottom-right"])
def test_extreme_scores(fields: dict[str, Tensor], dtype: torch.dtype, how: dict[str, Any]) -> None:
    """In rows past the last one and in rows without a visible key."""
    case = RuleCase(fields, how, *((70, 33) if how else (33, 33)))
    tensors = inputs(case, dtype=dtype, device=DEVICE)
    check_against_float64(triton, *tensors, rules=case.on(DEVICE), **case.how)


def test_without_gradients() -> None:
    case = IN_KERNELS["all"]
    tensors = inputs(case, dtype=torch.float32, device=DEVICE)
    check_against_float64(triton, *tensors[:3], None, rules=case.on(DEVICE), **case.how)


class TestOperator:
    def test_compiles_as_one_graph(self) -> None:
        case = IN_KERNELS["dropout and all"]
        *tensors, grad = inputs(case, dtype=torch.float32, device=DEVICE)
        leaves = [x.requires_grad_() for x in tensors]
        fields = {field: getattr(case.on(DEVICE), field) for field in case.rules}
        leaves.append(fields["sinks"].requires_grad_())

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return triton(q, k, v, rules=ScoreRules(**fields), **case.how)

        backend = "inductor" if ON_GPU else "aot_eager"
        compiled = torch.compile(call, fullgraph=True, backend=backend)
        results = []
        for run in (call, compiled):
            out = run(*leaves[:3])
            results.append([out, *torch.autograd.grad(out, leaves, grad)])
        torch.testing.assert_close(results[1], results[0])

    def test_opcheck(self) -> None:
        from stepscope.attention.ops import flash_backward, flash_forward
        from stepscope.attention.visibility import Lengths, key_intervals, query_intervals

        case = RuleCase({"documents": torch.arange(40).view(2, 20) // 6}, CAUSAL, 20, 20)
        q, k, v, grad = inputs(case, dtype=torch.float32, device=DEVICE)
        lengths = Lengths.of(q, k, True, None)
        rules = case.on(DEVICE)
        sinks, slopes = SINKS.to(DEVICE, copy=True).requires_grad_(), SINKS.abs().to(DEVICE)
        intervals = (key_intervals(rules, lengths), query_intervals(rules, lengths))
        settings = (True, 0.25, 0, *intervals, slopes)
        numbers = (SEED.to(DEVICE), 3.0, 0.25)
        torch.library.opcheck(flash_forward, (q.requires_grad_(), k, v, *settings, sinks, *numbers))
        settings = (*settings, sinks.detach(), *numbers)
        out, lse = flash_forward(q.detach(), k, v, *settings)
        torch.library.opcheck(flash_backward, (grad, q.detach(), k, v, out, lse, *settings))


def test_a_bias_is_refused_with_the_reason() -> None:
    x = torch.zeros(1, 1, 16, 16, device=DEVICE)
    rules = ScoreRules(bias=torch.zeros(16, 16, device=DEVICE))
    with pytest.raises(ValueError, match="no additive bias"):
        triton(x, x, x, rules=rules)
    assert "no additive bias" in str(explain(x, x, x, rules=rules))
