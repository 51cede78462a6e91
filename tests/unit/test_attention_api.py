"""`attention`: dispatch, unsupported inputs, and properties that every implementation has."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from accuracy import check_against_float64
from attention_inputs import BOTTOM_RIGHT, TOP_LEFT, draw, draw_qkv
from stepscope.attention import (
    IMPLEMENTATION_NAMES,
    IMPLEMENTATIONS,
    attention,
    explain,
    reference_attention,
    registry,
)
from stepscope.attention.api import attention_with
from stepscope.attention.call import AttentionCall, Backend
from stepscope.torch_tools.derivatives import transforms_active

ON_CPU = ("reference", "tiled", "sdpa", "sdpa_flash", "sdpa_math")
ALIGNED = pytest.mark.parametrize(
    "how", [{}, TOP_LEFT, BOTTOM_RIGHT], ids=["full", "top", "bottom"]
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def gradients(impl: str, inputs: list[Tensor], grad: Tensor, **how: object) -> list[Tensor]:
    fresh = [x.detach().requires_grad_() for x in inputs]
    out = attention(*fresh, impl=impl, **how)
    return [out.detach(), *torch.autograd.grad(out, fresh, grad)]


def assert_same(impl: str, inputs: list[Tensor], grad: Tensor, **how: object) -> None:
    """Assert that output and gradients are those of the reference, in float64."""
    expected = gradients("reference", inputs, grad, **how)
    for ours, theirs in zip(gradients(impl, inputs, grad, **how), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("impl", ON_CPU[1:])
@ALIGNED
@pytest.mark.parametrize("lengths", [(1, 1), (63, 63), (1, 111), (130, 63), (63, 130)])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_masks_and_groups(
    impl: str, lengths: tuple[int, int], key_heads: int, how: dict[str, str]
) -> None:
    *inputs, grad = draw_qkv(*lengths, 16, heads=4, key_heads=key_heads)
    assert_same(impl, inputs, grad, **how)


@pytest.mark.parametrize("impl", ON_CPU[1:])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (2, 1, 2, 3)])
def test_leading_dimensions(impl: str, leading: tuple[int, ...]) -> None:
    inputs = [draw(*leading, 9, 6, seed=i) for i in range(3)]
    assert_same(impl, inputs, draw(*leading, 9, 6, seed=3), is_causal=True)


@pytest.mark.parametrize("impl", ["tiled", "sdpa", "sdpa_math"])
def test_groups_with_five_dimensions_and_wider_values(impl: str) -> None:
    q, k = draw(2, 3, 4, 7, 6), draw(2, 3, 2, 7, 6, seed=1)
    assert_same(impl, [q, k, draw(2, 3, 2, 7, 9)], draw(2, 3, 4, 7, 9, seed=3), is_causal=True)


def packed(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return list(torch.stack((q, k, v), dim=-2).unbind(-2))


def transposed(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]


def expanded(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [q, *(x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))]


@pytest.mark.parametrize("impl", ON_CPU[1:])
@pytest.mark.parametrize("layout", [packed, transposed, expanded])
def test_strided_inputs_and_gradients(impl: str, layout: object) -> None:
    q, k, v, grad = draw_qkv(37, 37, 8, heads=4, key_heads=4)
    inputs = layout(q, k, v)
    assert not all(x.is_contiguous() for x in inputs)
    strided = grad.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_same(impl, inputs, strided, is_causal=True)
    assert_same(impl, inputs, torch.ones(1, 1, 1, 1, dtype=grad.dtype).expand_as(grad))


@pytest.mark.parametrize("impl", ["auto", *ON_CPU[1:]])
@pytest.mark.parametrize("scale", [-1.0, 0.0])
@ALIGNED
def test_negative_or_zero_scale(impl: str, scale: float, how: dict[str, str]) -> None:
    *inputs, grad = draw_qkv(9, 17, 8)
    # The second call uses the dispatch cache.
    for _ in range(2):
        assert_same(impl, inputs, grad, scale=scale, **how)


@pytest.mark.parametrize("impl", ["reference", "tiled", "sdpa", "sdpa_math"])
@ALIGNED
@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 2, 5, 4), (0, 2, 5, 4)),
        ((2, 0, 5, 4), (2, 0, 5, 4)),
        ((1, 2, 0, 4), (1, 2, 0, 4)),
        ((1, 2, 0, 4), (1, 2, 5, 4)),
        ((1, 2, 5, 4), (1, 2, 0, 4)),
    ],
)
def test_empty_inputs(
    impl: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], how: dict[str, str]
) -> None:
    of_q, of_k = shapes
    inputs = [draw(*of_q), draw(*of_k), draw(*of_k)]
    for result, like in zip(
        gradients(impl, inputs, draw(*of_q), **how), [inputs[0], *inputs], strict=True
    ):
        assert result.shape == like.shape
        assert not result.any()


@pytest.mark.parametrize("impl", ON_CPU)
def test_rows_without_a_visible_key_are_zero_without_nan(impl: str) -> None:
    *inputs, grad = draw_qkv(9, 4, 6)
    with torch.autograd.detect_anomaly(check_nan=True):
        out, *grads = gradients(impl, inputs, grad, **BOTTOM_RIGHT)
    assert not out[..., :5, :].any()
    assert not grads[0][..., :5, :].any()
    assert out[..., 5:, :].all()
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    square = gradients(impl, [inputs[0][..., 5:, :], *inputs[1:]], grad[..., 5:, :], is_causal=True)
    torch.testing.assert_close(out[..., 5:, :], square[0])
    torch.testing.assert_close(grads[1], square[2])


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_propagates(impl: str, which: str, is_causal: bool) -> None:
    inputs = dict(zip("qkv", draw_qkv(140, 140, 8), strict=False))
    inputs[which][0, 1, 3, 2] = float("nan")
    out = attention(*inputs.values(), is_causal=is_causal, impl=impl)
    rows = slice(3, 4) if which == "q" else slice(3, None)
    seen = out[0, 1, rows, 2 : 3 if which == "v" else None]
    assert seen.isnan().all()
    assert not out[0, 0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@ALIGNED
def test_sdpa_in_16_bit_dtypes(dtype: torch.dtype, how: dict[str, str]) -> None:
    q, k, v, grad = draw_qkv(63, 111, 40, key_heads=1, dtype=dtype)
    check_against_float64(partial(attention, impl="sdpa_math"), q, k, v, grad, **how)
    # Its CPU kernel rounds the probabilities for the gradient of v, so only the output is checked.
    check_against_float64(partial(attention, impl="sdpa"), q, k, v, None, **how)


def test_an_incorrect_attention_fails_the_policy() -> None:
    q, k, v, grad = draw_qkv(63, 63, 16, dtype=torch.float32)

    def slightly_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_attention(q, k, v, scale=0.25 * (1 + 1e-5))

    with pytest.raises(AssertionError, match=r"output: error .* of at most 2.0×; dq: error"):
        check_against_float64(slightly_off, q, k, v, grad)
    with pytest.raises(AssertionError, match="output: error nan"):
        check_against_float64(lambda q, k, v: (q + k + v) * float("nan"), q, k, v, None)
    with pytest.raises(AssertionError, match=r"output is torch.float64"):
        check_against_float64(lambda q, k, v: (q + k + v).double(), q, k, v, None)
    accuracies = check_against_float64(reference_attention, q, k, v, grad)
    assert set(accuracies) == {"output", "dq", "dk", "dv"}
    assert all(accuracy.ratio <= 1 for accuracy in accuracies.values())


def test_every_implementation_checks_its_inputs() -> None:
    q, k, v, _ = draw_qkv(5, 5, 16, dtype=torch.float32)
    for name in IMPLEMENTATION_NAMES:
        if name in (*ON_CPU, "auto"):
            out = attention_with(name)(q, k, v, is_causal=True)
            torch.testing.assert_close(out, reference_attention(q, k, v, is_causal=True))
        with pytest.raises(ValueError, match="k is float64 and q is float32"):
            attention_with(name)(q, k.double(), v)


def test_a_named_implementation_reports_why_an_input_is_unsupported() -> None:
    q, k, v, _ = draw_qkv(5, 5, 16, dtype=torch.float32)
    for impl in ("sdpa_cudnn", "sdpa_efficient"):
        message = f"'{impl}' does not support .* for CUDA only, and q is on cpu"
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, impl=impl)
    with pytest.raises(ValueError, match=r"same last dimension. Got .* Value.size\(-1\): 8"):
        attention(q, k, v[..., :8], impl="sdpa_flash")
    with pytest.raises(ValueError, match="do not support zero seq_len"):
        attention(q, k[..., :0, :], v[..., :0, :], impl="sdpa_flash")
    with pytest.raises(ValueError, match="has a backward for CUDA only, and q is on cpu"):
        attention(q, k, v, impl="flex")
    with pytest.raises(ValueError, match=r"not support empty inputs: shapes .* \(1, 2, 0, 16\)"):
        attention(q, k[..., :0, :], v[..., :0, :], impl="flex")
    with pytest.raises(ValueError, match="needs a head dimension of at least 16, not 8"):
        attention(q[..., :8], k[..., :8], v, impl="flex")
    with pytest.raises(ValueError, match="no kernel for float64"):
        attention(q.double(), k.double(), v.double(), impl="flex")


class Sevens(Backend):
    def attend(self, call: AttentionCall) -> Tensor:
        return torch.full_like(call.q, 7.0)


class SevensIfShort(Sevens):
    def refuses(self, call: AttentionCall) -> str | None:
        return "too long" if call.q.shape[-2] > 5 else None


class SevensWithoutTransforms(Sevens):
    def refuses(self, _: AttentionCall) -> str | None:
        return "a transform" if transforms_active() else None


@pytest.fixture
def fake_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Implementation("fake", SevensIfShort, "a constant")
    monkeypatch.setitem(IMPLEMENTATIONS, "fake", entry)
    monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", {})


@pytest.mark.usefixtures("fake_implementation")
def test_auto_chooses_the_first_that_supports_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.attention.api.PREFERENCE", ("fake", "sdpa"))
    short, long = draw(5, 4), draw(6, 4)
    assert (attention(short, short, short) == 7.0).all()
    assert explain(short, short, short).chosen == "fake"
    torch.testing.assert_close(attention(long, long, long), reference_attention(long, long, long))
    assert explain(long, long, long).chosen == "sdpa"
    with pytest.raises(ValueError, match="impl='fake' does not support this input: too long"):
        attention(long, long, long, impl="fake")
    monkeypatch.setattr("stepscope.attention.api.PREFERENCE", ("fake",))
    monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", {})
    with pytest.raises(ValueError, match=r"no implementation supports .*fake: too long"):
        attention(long, long, long)
    assert explain(long, long, long).chosen is None


def test_a_choice_under_a_transform_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Implementation("fake", SevensWithoutTransforms, "a constant")
    monkeypatch.setitem(IMPLEMENTATIONS, "fake", entry)
    monkeypatch.setattr("stepscope.attention.api._DISPATCH_CACHE", {})
    monkeypatch.setattr("stepscope.attention.api.PREFERENCE", ("fake", "sdpa"))
    x = draw(3, 5, 4)
    torch.testing.assert_close(torch.vmap(attention)(x, x, x), reference_attention(x, x, x))
    assert (attention(x[0], x[0], x[0]) == 7.0).all()


def test_explain() -> None:
    q, k, v, _ = draw_qkv(5, 5, 16, dtype=torch.float32)
    explanation = explain(q, k, v, is_causal=True)
    assert explanation.chosen == "sdpa"
    assert [verdict.name for verdict in explanation.verdicts] == list(IMPLEMENTATIONS)
    assert {verdict.name for verdict in explanation.verdicts if verdict.takes} >= set(ON_CPU)
    first, *lines = str(explanation).splitlines()
    order = ", ".join(registry.PREFERENCE)
    assert first == f"auto chooses sdpa: the first suitable one of {order}"
    assert lines[list(IMPLEMENTATIONS).index("tiled")] == "  tiled           supports this input"
    assert lines[list(IMPLEMENTATIONS).index("flex")].endswith(
        "FlexAttention has a backward for CUDA only, and q is on cpu"
    )


@pytest.mark.parametrize("impl", ["auto", *ON_CPU])
@ALIGNED
def test_traces_into_one_graph(impl: str, how: dict[str, str]) -> None:
    torch.compiler.reset()
    q, k, v, _ = draw_qkv(9, 12, 16, heads=4)
    run = torch.compile(partial(attention, impl=impl, **how), fullgraph=True, backend="eager")
    torch.testing.assert_close(run(q, k, v), reference_attention(q, k, v, **how))


@pytest.mark.skipif(
    "compiled" not in {v.name for v in explain(*(draw(2, 2),) * 3).verdicts if v.takes},
    reason="needs a C++ compiler",
)
def test_compiled_supports_more_shapes_than_the_recompile_limit() -> None:
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    with torch._dynamo.config.patch(recompile_limit=1):
        q, k, v, _ = draw_qkv(3, 3, 4)
        out = attention(q, k, v, is_causal=True, impl="compiled")
        torch.testing.assert_close(out, reference_attention(q, k, v, is_causal=True))
        *inputs, grad = draw_qkv(5, 9, 4, heads=2, key_heads=1)
        assert_same("compiled", inputs, grad, **BOTTOM_RIGHT)
    assert graphs["unique_graphs"] == 2


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("impl", ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "tiled"])
@ALIGNED
@pytest.mark.parametrize("lengths", [(256, 256), (128, 384), (384, 128)])
def test_on_the_gpu(impl: str, lengths: tuple[int, int], how: dict[str, str]) -> None:
    tensors = [x.cuda() for x in draw_qkv(*lengths, 64, dtype=torch.bfloat16)]
    refusals = {v.name: v.refusal for v in explain(*tensors[:3], **how).verdicts}
    if refusals[impl] is not None:
        pytest.skip(f"{impl} refuses: {refusals[impl]}")
    out, *grads = gradients(impl, tensors[:3], tensors[3], **how)
    exact = gradients("reference", [x.double() for x in tensors[:3]], tensors[3].double(), **how)
    for ours, theirs in zip((out, *grads), exact, strict=True):
        assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()


@pytest.mark.gpu
@on_gpu
def test_reasons_on_the_gpu_are_those_of_torch() -> None:
    tensors = [x.cuda() for x in draw_qkv(64, 64, 64, dtype=torch.float32)[:3]]
    for impl in ("sdpa_flash", "sdpa_cudnn"):
        with pytest.raises(
            ValueError, match=f"'{impl}' does not support this input: .*([Dd]type|float32)"
        ):
            attention(*tensors, impl=impl)
    assert attention(*tensors, impl="sdpa_efficient").shape == tensors[0].shape
    with pytest.raises(ValueError, match=r"'flex' does not support this input: .* not 8"):
        attention(*(x[..., :8] for x in tensors), impl="flex")
