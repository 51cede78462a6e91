"""FP8 layers with the GEMMs of a GPU: error, bits, updates, captured steps, memory."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from stepscope.attention.api import attention_with
from stepscope.kernels import fp8_linear
from stepscope.kernels.activation_policy import KEEPS
from stepscope.kernels.fp8.casts import quantize
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.fp8.recipe import (
    BF16,
    BLOCKWISE,
    DELAYED,
    E4M3,
    E5M2,
    FORWARD,
    NO_GEMM,
    ROWWISE,
    TENSORWISE,
    Recipe,
    unavailable,
)
from stepscope.kernels.fp8.reference import DelayedScales, cast, fp8_linear_reference
from stepscope.kernels.fp8.saved import transposed
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.model import ModelConfig, TransformerLM
from stepscope.optim import FusedAdamW, InBackwardAdamW
from stepscope.torch_tools.saved_tensors import is_saved_output

_REASON = unavailable("cuda") if torch.cuda.is_available() else "needs a CUDA GPU"
pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))

RECIPES = {
    "tensorwise": Recipe(),
    "e5m2 gradients": Recipe(gradient_dtype=E5M2),
    "fast forward": Recipe(fast_accumulation=FORWARD),
    "dW in bf16": Recipe(weight_gradient=BF16),
    "delayed": Recipe(DELAYED),
    "rowwise": Recipe(ROWWISE),
    "blockwise": Recipe(BLOCKWISE, fast_accumulation=NO_GEMM),
}
FACTOR = 1.1
"""Permitted error against float64 in units of the reference's, which has the same casts and
accumulates in float32."""
CONFIG = ModelConfig(d_model=128, d_ff=256, n_layers=2, n_heads=2, vocab=512, context=64)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to("cuda", dtype)


def error(actual: Tensor, exact: Tensor) -> float:
    return float(((actual.double() - exact).norm() / exact.norm()).detach())


def supported(recipe: Recipe) -> None:
    if reason := unavailable("cuda", recipe):
        pytest.skip(reason)


@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE, BLOCKWISE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [E4M3, E5M2])
def test_casts_have_the_bits_of_the_reference(scaling: str, dtype: torch.dtype, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 656, generator=generator)
    x = (x * torch.exp2(torch.randint(-20, 10, x.shape, generator=generator))).to("cuda", dtype)
    x[3, 5], x[300, 600] = math.nan, math.inf
    actual = quantize(x, name, Recipe(scaling))
    for rows, dim in ((True, 1), (False, 0)):
        values, inverse = actual.operand(rows=rows)
        expected = cast(x, name, scaling, dim)
        wanted, wanted_inverse = expected.values, expected.inverse_scale
        if not rows:
            wanted = wanted.T.contiguous()
            wanted_inverse = wanted_inverse.T if wanted_inverse.dim() else wanted_inverse
        torch.testing.assert_close(inverse, wanted_inverse, rtol=0, atol=0)
        torch.testing.assert_close(values.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)
        assert values.float().isnan().sum() == 2


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "shape", [(512, 1024, 768), (128, 144, 272), (32_768, 256, 128), (128, 256, 32_768)], ids=str
)
def test_error_is_that_of_the_reference_and_bits_repeat(
    name: str, shape: tuple[int, int, int]
) -> None:
    recipe = RECIPES[name]
    supported(recipe)
    tokens, d_in, d_out = shape
    x, grad = draw(2, tokens // 2, d_in), 1e-4 * draw(2, tokens // 2, d_out, seed=1)
    weight, bias = draw(d_out, d_in, dtype=torch.float32) / 32, draw(d_out, dtype=torch.float32)

    def run(function: Any, wide: bool, **how: Any) -> list[Tensor]:
        tensors = [one.double() if wide else one.clone() for one in (x, weight, bias)]
        inputs = [one.requires_grad_() for one in tensors]
        out = function(*inputs, **how)
        gradients = torch.autograd.grad(out, inputs, grad.to(out.dtype))
        return [out.detach(), *gradients]

    truth = run(nn.functional.linear, True)
    scales = DelayedScales.of(recipe) if recipe.scaling == DELAYED else None
    reference = run(fp8_linear_reference, False, recipe=recipe, scales=scales)
    actual, again = (run(fp8_linear, False, recipe=recipe) for _ in range(2))
    for number, (exact, expected, found) in enumerate(zip(truth, reference, actual, strict=True)):
        assert found.dtype == expected.dtype
        assert error(found, exact) <= FACTOR * error(expected, exact) + 4e-3, (name, number)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_nonfinite_values_and_zeros(name: str) -> None:
    recipe = RECIPES[name]
    supported(recipe)
    x, weight = draw(64, 256), draw(128, 256)
    x[3, 4], x[7, 0] = math.nan, math.inf
    out = fp8_linear(x, weight, recipe=recipe)
    assert (out.isfinite().all(1).cpu() == torch.tensor([i not in (3, 7) for i in range(64)])).all()
    assert fp8_linear(torch.zeros_like(x), weight, recipe=recipe).eq(0).all()


def test_second_calls_after_an_update_and_with_another_shape() -> None:
    copies = WeightCopies()
    weight = nn.Parameter(draw(128, 256, dtype=torch.float32))
    for tokens in (64, 128, 64):
        x = draw(tokens, 256)
        cached, fresh = fp8_linear(x, weight, copies=copies), fp8_linear(x, weight)
        assert torch.equal(cached, fresh)
        with torch.no_grad():
            weight.mul_(-1.5)
    with pytest.warns(UserWarning, match="tokens=17"):
        fp8_linear(draw(17, 256), weight, copies=copies)


def test_torch_compile_has_the_same_results() -> None:
    x, weight, bias = draw(64, 256), draw(128, 256, dtype=torch.float32), draw(128)
    grad = draw(64, 128)
    results = []
    for function in (fp8_linear, torch.compile(fp8_linear, fullgraph=True)):
        inputs = [one.detach().clone().requires_grad_() for one in (x, weight, bias)]
        out = function(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    for a, b in zip(*results, strict=True):
        assert error(a, b.double()) < 1e-2


def created(recipe: Recipe) -> TransformerLM:
    torch.manual_seed(0)
    # Its results are bitwise reproducible, so captured and eager steps can be compared.
    attention = attention_with("triton")
    fp8 = Fp8Layers(recipe, always=True)
    return TransformerLM(
        CONFIG, attention, device="cuda", fused=True, fused_projections=True, fp8=fp8
    )


def batches(count: int, length: int = 64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CONFIG.vocab, (count, 2, 4, length), generator=generator).cuda()
    return [(one[0], one[1]) for one in tokens]


@pytest.mark.parametrize("kind", [partial(FusedAdamW, capturable=True), InBackwardAdamW])
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise", "dW in bf16"])
def test_captured_steps_have_the_losses_of_eager_ones(name: str, kind: Any) -> None:
    recipe = RECIPES[name]
    supported(recipe)
    losses = []
    for graph in ("off", "on"):
        model = created(recipe)
        optimizer = kind(model.parameters(), lr=1e-3, copies=model.copies)
        step = stepscope.TrainStep(model, optimizer, dtype=torch.bfloat16, graph=graph)
        # Random tokens are learned only if they come again.
        data = [*(batches(1) * 6), *batches(6, 32), *(batches(1) * 3)]
        losses.append([step(batch).item() for batch in data])
        assert all(p.dtype == torch.float32 for p in model.parameters())
    eager, captured = losses
    # A captured step of delayed scaling starts with the histories of its warm-up.
    tolerance = 1e-2 if name == "delayed" else 1e-6
    assert captured == pytest.approx(eager, rel=tolerance)
    assert eager[5] < eager[0]


def test_fp8_weights_follow_replays_after_an_evaluation() -> None:
    """An evaluation before the capture leaves current casts, which replays must still renew."""
    losses = []
    for graph in ("off", "on"):
        model = created(Recipe())
        optimizer = FusedAdamW(model.parameters(), lr=1e-2, copies=model.copies, capturable=True)
        step = stepscope.TrainStep(model, optimizer, dtype=torch.bfloat16, graph=graph, warmup=1)
        values = []
        for batch in batches(8):
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                values.append(model(*batch).item())
            values.append(step(batch).item())
        losses.append(values)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_weights_are_transposed_to_the_bit() -> None:
    for rows, columns in ((256, 512), (48, 208), (16, 4096)):
        operand = quantize(draw(rows, columns), E4M3, Recipe(), columns=False).operand(rows=True)
        values, inverse = transposed(operand)
        assert values.is_contiguous()
        assert torch.equal(values.view(torch.uint8), operand[0].view(torch.uint8).T)
        assert inverse is operand[1]


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "triton", "auto"])
def test_attention_is_known_to_save_its_output(name: str) -> None:
    parts = draw(2, 128, 3, 4, 64).requires_grad_()
    q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
    out = attention_with(name)(q, k, v, is_causal=True)
    merged = out.transpose(1, 2).reshape(2, 128, 4 * 64)
    assert is_saved_output(out)
    assert is_saved_output(merged) == (merged.data_ptr() == out.data_ptr())


@pytest.mark.parametrize("kind", [partial(FusedAdamW, capturable=True), InBackwardAdamW])
def test_captured_updates_write_the_amax_that_captured_casts_read(kind: Any) -> None:
    """With weights that grow several times, a scale of earlier values would saturate."""
    losses, grown = [], []
    for graph in ("off", "on"):
        model = created(Recipe())
        weight = model.blocks[0].attention.output.weight
        before = weight.detach().abs().max().item()
        optimizer = kind(model.parameters(), lr=0.05, copies=model.copies)
        step = stepscope.TrainStep(model, optimizer, dtype=torch.bfloat16, graph=graph, warmup=1)
        losses.append([step(batch).item() for batch in batches(10)])
        grown.append(weight.detach().abs().max().item() / before)
    assert min(grown) > 1.5
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("policy", KEEPS)
def test_policies_agree_and_save_less_than_bf16(policy: str) -> None:
    peaks, gradients = [], []
    for recipe in (Recipe(), None):
        torch.manual_seed(0)
        fp8 = None if recipe is None else Fp8Layers(recipe, always=True)
        model = TransformerLM(
            CONFIG, device="cuda", fused=True, fused_projections=True, fp8=fp8,
            activation_policy=(policy,) * CONFIG.n_layers,
        )  # fmt: skip
        with torch.autocast("cuda", torch.bfloat16):
            model(*batches(1)[0]).backward()
            model.zero_grad()
            before = torch.cuda.memory_allocated()
            loss = model(*batches(1)[0])
            peaks.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        del model, loss
    # By the bytes of the saved tensors: residual stream, q, k, v, the output of attention and gates
    # are the same in bf16, and so is everything where norms are recomputed.
    assert peaks[0] < (0.92 if policy == "all" else 1.02) * peaks[1]
    for a, b in zip(*gradients, strict=True):
        assert a is not None
        assert b is not None
        assert error(a, b.double()) < 0.3


def test_a_hugging_face_model_trains_alike() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    losses, fixed = [], {"form": "compiled with passes"}
    for dtype in (torch.bfloat16, "fp8"):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).cuda().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        report = stepscope.accelerate(model, optimizer, dtype=dtype, compile=fixed)
        if report.fp8 is not None:
            report.fp8.always = True
        step = stepscope.TrainStep(model, optimizer, graph="on")
        tokens = batches(12)
        losses.append([step({"input_ids": one[0], "labels": one[0]}).item() for one in tokens])
        if report.fp8 is not None:
            on = [name for name, why in report.fp8.decisions.items() if why is None]
            assert len(on) == 14, str(report)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
