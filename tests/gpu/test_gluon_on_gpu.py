"""The warp-specialized forward kernel for Hopper against float64, in the launch cache and in
graphs, and the inputs that are left to the plain kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accuracy import check_against_float64
from stepscope.attention import ScoreRules, attention, explain
from stepscope.attention.tiles import tiles

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9",
)
BATCH, HEADS, D = 3, 32, 128
KERNEL = "specialized_forward_kernel"


def draw(
    rows: int, keys: int | None = None, key_heads: int = HEADS, *, dtype=torch.bfloat16, d: int = D
) -> list[Tensor]:
    """Return q, k, v and the gradient of the output."""
    generator = torch.Generator(device="cuda").manual_seed(rows)
    sizes = [(HEADS, rows), *[(key_heads, keys or rows)] * 2, (HEADS, rows)]
    return [
        torch.randn(BATCH, heads, n, d, device="cuda", dtype=dtype, generator=generator)
        for heads, n in sizes
    ]


def ours(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return attention(q, k, v, impl="triton", **how)


def kernel_of(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> str:
    """Return the name of the forward kernel that runs."""
    from stepscope.attention.triton import launch as triton_launch

    with triton_launch.recorded_launches() as launches:
        ours(q, k, v, **how)
    (launch,) = launches
    return str(launch.kernel.name)


def plain(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    from stepscope.attention.triton import launch as triton_launch

    with triton_launch.forced_tiles({"forward": tiles("forward", q.shape[-1], 2, (9, 0))[0]}):
        return ours(q, k, v, **how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("d", "rows", "keys", "key_heads", "how"),
    [
        (128, 1024, None, HEADS, {"is_causal": True}),
        (128, 1024, None, HEADS, {}),
        (128, 1000, None, 8, {"is_causal": True, "scale": 0.3}),
        (128, 999, 333, HEADS, {}),
        (128, 1000, 1512, 4, {"is_causal": True, "causal_align": "bottom-right"}),
        (128, 1500, 1052, HEADS, {"is_causal": True, "causal_align": "bottom-right"}),
        (128, 1500, 1, HEADS, {"is_causal": True, "causal_align": "top-left"}),
        (64, 1152, None, HEADS, {}),
        (64, 1024, None, 8, {"scale": 0.3}),
        (64, 999, 333, HEADS, {}),
        (64, 1000, 129, 4, {}),
        (64, 1500, 1, HEADS, {}),
        (64, 1500, 128, HEADS, {}),
        (64, 1152, None, HEADS, {"is_causal": True}),
        (64, 1000, None, 8, {"is_causal": True, "scale": 0.3}),
        (64, 1000, 1064, 4, {"is_causal": True, "causal_align": "bottom-right"}),
        (64, 1500, 1052, HEADS, {"is_causal": True, "causal_align": "bottom-right"}),
        (64, 1500, 333, HEADS, {"is_causal": True, "causal_align": "top-left"}),
        (64, 1500, 1, HEADS, {"is_causal": True, "causal_align": "top-left"}),
    ],
)
def test_output_and_gradients(dtype, d, rows, keys, key_heads, how) -> None:
    tensors = draw(rows, keys, key_heads, dtype=dtype, d=d)
    assert kernel_of(*tensors[:3], **how) == KERNEL
    check_against_float64(ours, *tensors, **how)


@pytest.mark.parametrize("d", [64, 128])
def test_log_sum_exp_is_that_of_the_plain_kernel(d: int) -> None:
    from stepscope.attention.triton import launch as triton_launch

    q, k, v, _ = draw(1100, 1000, d=d)
    how = {"scale": 0.1, "causal": True, "shift": -128}
    out, lse = triton_launch.forward(q, k, v, **how)
    with triton_launch.forced_tiles({"forward": tiles("forward", d, 2, (9, 0))[0]}):
        expected, expected_lse = triton_launch.forward(q, k, v, **how)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert torch.isinf(lse[:, :, :128]).all()
    assert not out[:, :, :128].any()


@pytest.mark.parametrize("rows", [8192, 8300])
def test_long_rows_have_taller_tiles(rows: int) -> None:
    """Also in a second call, whose inputs are others."""
    from stepscope.attention.triton import launch as triton_launch

    for _ in range(2):
        q, k, v = (
            torch.randn(1, 12, rows, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        with triton_launch.recorded_launches() as launches:
            out = ours(q, k, v, is_causal=True)
        assert [(one.kernel.name, one.tile.m) for one in launches] == [(KERNEL, 192)]
        expected = plain(q, k, v, is_causal=True)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        # The first rows see few keys: an error of a mask is largest there.
        exact = attention(*(x[:, :, :300].double() for x in (q, k, v)), is_causal=True)
        torch.testing.assert_close(out[:, :, :300].double(), exact, rtol=2e-2, atol=1e-2)


def test_log_sum_exp_at_head_dimension_64_with_a_partial_key_block() -> None:
    from stepscope.attention.triton import launch as triton_launch

    q, k, v, _ = draw(1100, 1000, d=64)
    # Scores far below zero: a key past the last one must not count as one of score zero.
    q, k = 8 * q.abs(), -8 * k.abs()
    with triton_launch.recorded_launches() as launches:
        out, lse = triton_launch.forward(q, k, v, scale=0.1, causal=False, shift=0)
    assert [launch.kernel.name for launch in launches] == [KERNEL]
    scores = q.double() @ k.double().mT * 0.1
    assert float(scores.max()) < -20
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-3)
    expected = scores.softmax(-1) @ v.double()
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("d", [64, 128])
def test_calls_that_differ_in_one_property(d: int) -> None:
    """Whatever was called before, a call gives the result of the plain kernel."""
    q, k, v, _ = draw(1024, d=d)
    masks = [{}, {"is_causal": True}]
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    projected = torch.randn(BATCH, 1024, 3, HEADS, d, device="cuda", dtype=torch.bfloat16)
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q, k, v], {}),
        *[([q, k, v], mask) for mask in masks],
        ([transposed[0], k, v], {}),
        ([q, transposed[1], v], {}),
        ([q, k, transposed[2]], masks[-1]),
        ([x.transpose(1, 2) for x in projected.unbind(2)], masks[-1]),
        ([q.half(), k.half(), v.half()], {}),
        ([q, k, v], {"scale": 0.5}),
        *[
            ([q, k[:, :, :700], v[:, :, :700]], mask and {**mask, "causal_align": "top-left"})
            for mask in masks
        ],
        ([q, k[:, :4], v[:, :4]], {}),
        ([q.clone(), k.clone(), v.clone()], {}),
    ]
    for tensors, how in [*calls, *reversed(calls)]:
        assert kernel_of(*tensors, **how) == KERNEL
        out = ours(*tensors, **how)
        torch.testing.assert_close(out, plain(*tensors, **how), rtol=2e-2, atol=2e-2)
        assert torch.equal(out, ours(*tensors, **how))
        assert out.stride() == torch.empty_like(tensors[0]).stride()


@pytest.mark.parametrize(("d", "is_causal"), [(64, False), (64, True), (128, True)])
def test_captured_graph_reads_new_inputs(d: int, is_causal: bool) -> None:
    q, k, v, grad = (x.requires_grad_() for x in draw(1024, d=d))

    def step() -> list[Tensor]:
        out = ours(q, k, v, is_causal=is_causal)
        return [out, *torch.autograd.grad(out, (q, k, v), grad)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in (q, k, v, grad):
            x.copy_(torch.randn_like(x))
    graph.replay()
    for actual, expected in zip(captured, step(), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("d", [64, 128])
def test_first_call_within_a_capture(d: int) -> None:
    q, k, v, _ = draw(1152, d=d)
    ours(q[:, :, :1024], k, v)  # Triton and the allocator are warm, this shape is not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours(q, k, v)
    graph.replay()
    torch.testing.assert_close(out, plain(q, k, v), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("d", "is_causal"), [(64, False), (64, True), (128, True)])
@pytest.mark.parametrize("compiled", [True, False])
def test_in_the_compiler_and_under_autograd(compiled: bool, d: int, is_causal: bool) -> None:
    tensors = draw(1024, d=d)
    function = torch.compile(ours) if compiled else ours
    check_against_float64(function, *tensors, is_causal=is_causal)


def left_out() -> dict[str, tuple[list[Tensor], dict[str, Any], str]]:
    q, k, v, _ = draw(1024)
    small = [x[:1, :2] for x in (q, k, v)]
    shifted = torch.randn(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape)
    return {
        "few tiles": (small, {}, "too few query tiles"),
        "diagonal within a tile": (
            [q, k[:, :, :1000], v[:, :, :1000]],
            {"is_causal": True, "causal_align": "bottom-right"},
            "multiple of 64",
        ),
        "head dimension 96": (draw(1024, d=96)[:3], {}, "head dimension 64"),
        "few rows of a tile": ([x.repeat(4, 1, 1, 1) for x in draw(256, d=64)[:3]], {}, "192 rows"),
        "float32": ([x.float() for x in (q, k, v)], {}, "16-bit"),
        "unaligned": ([shifted, k, v], {}, "16 bytes"),
        "expanded": ([q, k[:, :1].expand_as(q), v], {}, "16 bytes"),
        "rules": ([q, k, v], {"is_causal": True, "rules": ScoreRules(window=100)}, "no rules"),
    }


@pytest.mark.parametrize(
    "name",
    [
        "few tiles",
        "diagonal within a tile",
        "head dimension 96",
        "few rows of a tile",
        "float32",
        "unaligned",
        "expanded",
        "rules",
    ],
)
def test_other_inputs_are_left_to_the_plain_kernel(name: str) -> None:
    tensors, how, reason = left_out()[name]
    (details,) = (s.details for s in explain(*tensors, **how).verdicts if s.name == "triton")
    assert reason in str(details)
    assert kernel_of(*tensors, **how) == "forward_kernel"


def test_without_gluon_the_plain_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.attention.triton import launch as triton_launch
    from stepscope.attention.triton import specialized

    q, k, v, _ = draw(1024)
    monkeypatch.setattr(specialized, "_kernel_module", lambda: "no Gluon")
    triton_launch._PREPARED.clear()
    assert kernel_of(q, k, v) == "forward_kernel"
    assert "no Gluon" in str(explain(q, k, v))
    triton_launch._PREPARED.clear()
    monkeypatch.undo()
    assert kernel_of(q, k, v) == KERNEL
    assert "is the warp-specialized kernel" in str(explain(q, k, v))
