"""FP8 layers with an emulated GEMM: against the plain PyTorch reference and against float64."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_on_cpu import pretend_fp8
from stepscope.attention import FlashAttentionTorch, FlashAttentionTriton, reference_attention
from stepscope.errors import UsageError
from stepscope.kernels import fp8_linear, weight_copies
from stepscope.kernels.activation_policy import KEEPS
from stepscope.kernels.feed_forward import feed_forward
from stepscope.kernels.fp8 import feed_forward as fp8_feed_forward
from stepscope.kernels.fp8 import linear, saved
from stepscope.kernels.fp8.layers import Fp8Layers
from stepscope.kernels.fp8.recipe import (
    BF16,
    DELAYED,
    E5M2,
    FP8,
    ROWWISE,
    SCALINGS,
    TENSORWISE,
    Recipe,
)
from stepscope.kernels.fp8.reference import DelayedScales, fp8_linear_reference
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.model import ModelConfig, TransformerLM, with_overrides
from stepscope.optim import FusedAdamW, InBackwardAdamW
from stepscope.torch_tools.saved_tensors import is_saved_output

# The interpreter computes bfloat16 incorrectly.
HALF = torch.float16
FACTOR = 1.05
"""Permitted error against float64 in units of the reference's, which has the same casts: only the
rounding of results differs."""
in_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels of CPU tensors need Triton's interpreter"
)
CONFIG = ModelConfig(d_model=32, d_ff=48, n_layers=2, n_heads=2, vocab=48, context=16)


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_fp8(monkeypatch)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def error(actual: Tensor, exact: Tensor) -> float:
    return float(((actual.double() - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("weight_gradient", [FP8, BF16])
def test_error_is_that_of_the_reference_with_the_same_casts(
    scaling: str, weight_gradient: str
) -> None:
    gradient = E5M2 if scaling == TENSORWISE else "e4m3"
    recipe = Recipe(scaling, gradient_dtype=gradient, weight_gradient=weight_gradient)
    x, grad = draw(2, 24, 144).to(HALF), draw(2, 24, 160).to(HALF)
    weight, bias = draw(160, 144) / 12, draw(160)

    def run(function: Any, dtype: torch.dtype, **how: Any) -> list[Tensor]:
        inputs = [
            x.to(dtype).requires_grad_(),
            *(
                t.to(dtype if dtype == torch.float64 else t.dtype).requires_grad_()
                for t in (weight, bias)
            ),
        ]
        out = function(*inputs, **how)
        assert out.dtype == dtype
        return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]

    truth = run(nn.functional.linear, torch.float64)
    scales = DelayedScales.of(recipe) if scaling == DELAYED else None
    reference = run(fp8_linear_reference, HALF, recipe=recipe, scales=scales)
    actual = run(fp8_linear, HALF, recipe=recipe)
    for number, (exact, expected, found) in enumerate(zip(truth, reference, actual, strict=True)):
        assert found.dtype == expected.dtype
        limit = FACTOR * error(expected, exact) + 1e-3
        assert error(found, exact) <= limit, number
        if number in (0, 1):
            # The casts are the same, so the results are far closer to each other than to float64.
            assert error(found, expected.double()) < 0.1 * error(expected, exact)
    again = run(fp8_linear, HALF, recipe=recipe)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


def saved_by(function: Callable[[], object]) -> list[Tensor]:
    """Return the tensors with more than one element that are saved, one of each storage."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() > 1:
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return [*found.values()]


def test_saved_activations_are_fp8() -> None:
    x, weight = draw(64, 32).to(HALF).requires_grad_(), draw(48, 32).requires_grad_()
    large = saved_by(lambda: fp8_linear(x, weight))
    assert {tensor.dtype for tensor in large} == {torch.float8_e4m3fn}
    assert sum(tensor.nbytes for tensor in large) == 64 * 32 + 48 * 32


@pytest.mark.parametrize("scaling", [TENSORWISE, DELAYED, ROWWISE])
@pytest.mark.parametrize("weight_gradient", [FP8, BF16])
def test_an_input_that_is_saved_anyway_has_no_second_copy(
    scaling: str, weight_gradient: str
) -> None:
    recipe = Recipe(scaling, weight_gradient=weight_gradient)
    weight, grad = draw(48, 32).requires_grad_(), draw(2, 32, 48).to(HALF)
    q, k, v = (draw(2, 4, 32, 8, seed=n).to(HALF).requires_grad_() for n in range(3))
    copied = scaling == ROWWISE and weight_gradient == FP8
    gradients = []

    def project(again: bool) -> None:
        heads = FlashAttentionTorch.apply(q, k, v, True).transpose(1, 2).contiguous()
        saver = SavesItsOutput if again else torch.mul
        out = saver.apply(heads) if again else saver(heads, 1)  # type: ignore[attr-defined]
        assert is_saved_output(out.flatten(2)) == again
        result = fp8_linear(out.flatten(2), weight, recipe=recipe)
        gradients.append(torch.autograd.grad(result, (q, k, v, weight), grad))

    large = [saved_by(lambda again=again: project(again)) for again in (False, True)]
    fp8, half = (
        [sum(t.nbytes for t in tensors if t.dtype == dtype) for tensors in large]
        for dtype in (torch.float8_e4m3fn, HALF)
    )
    input_values = 2 * 32 * 32
    if weight_gradient == FP8:
        assert fp8[0] - fp8[1] == (0 if copied else input_values)
        assert half[1] - half[0] == 2 * input_values
    else:
        assert fp8[0] == fp8[1]
        assert half[0] == half[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class SavesItsOutput(torch.autograd.Function):
    saves_output = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert ctx.saved_tensors
        return grad


@in_interpreter
def test_outputs_that_their_operations_save_are_known() -> None:
    q = draw(2, 4, 16, 8).requires_grad_()
    outputs = {
        "tiled": FlashAttentionTorch.apply(q, q, q, True),
        "triton": FlashAttentionTriton.apply(q, q, q, True),
        "sdpa": nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        "relu": q.relu(),
    }
    for name, out in outputs.items():
        assert is_saved_output(out), name
        assert is_saved_output(out.transpose(1, 2)), name
        assert not is_saved_output(out.transpose(1, 2).flatten(2).clone()), name
    assert not is_saved_output(q)
    assert not is_saved_output(q + 1)


def test_nonfinite_values_stay_in_their_rows() -> None:
    x, weight = draw(32, 32).to(HALF), draw(48, 32).to(HALF)
    x[3, 4], x[7, 0] = math.nan, math.inf
    out = fp8_linear(x, weight)
    assert (out.isfinite().all(1) == torch.tensor([i not in (3, 7) for i in range(32)])).all()
    assert fp8_linear(torch.zeros(16, 32, dtype=HALF), weight).eq(0).all()


def test_unsupported_shapes_fall_back_with_a_reason() -> None:
    x, weight = draw(17, 32).to(HALF), draw(48, 32).to(HALF)
    with pytest.warns(UserWarning, match="tokens=17"):
        out = fp8_linear(x, weight)
    assert torch.equal(out, nn.functional.linear(x, weight))
    with pytest.warns(UserWarning, match="in_features=20"):
        fp8_linear(draw(16, 20).to(HALF), draw(48, 20).to(HALF))


def test_a_device_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(UsageError, match="NVIDIA"):
        fp8_linear(draw(16, 32), draw(48, 32))
    copies = WeightCopies(fp8=Fp8Layers(always=True))
    weight = draw(48, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = fused_linear(draw(16, 32), (weight,), copies)
    assert out.dtype == torch.bfloat16
    assert copies.fp8 is not None
    assert "NVIDIA" in (copies.fp8.refused((weight,)) or "")


def test_cached_casts_follow_the_weight() -> None:
    copies = WeightCopies()
    x, weight = draw(16, 32).to(HALF), nn.Parameter(draw(48, 32))
    first = fp8_linear(x, weight, copies=copies)
    (group,) = copies._groups.values()
    with torch.no_grad():
        weight.mul_(-2)
    second = fp8_linear(x, weight, copies=copies)
    assert torch.equal(second, -2 * first)
    assert [*copies._groups.values()] == [group]
    assert copies.find(weight) is None
    weight.data.mul_(-1)
    assert torch.equal(fp8_linear(x, weight, copies=copies), second)
    copies.refresh(all_of_them=True)
    assert torch.equal(fp8_linear(x, weight, copies=copies), -second)
    # The matmul dtype has a copy of its own.
    assert copies.narrow((weight,), HALF)[0].dtype == HALF
    assert len(copies._groups) == 2


@pytest.mark.parametrize("scaling", [TENSORWISE, ROWWISE])
def test_fused_projections_are_those_of_single_ones(scaling: str) -> None:
    recipe = Recipe(scaling)
    copies = WeightCopies(fp8=Fp8Layers(recipe, always=True))
    x, weight = draw(3, 16, 144).to(HALF).requires_grad_(), draw(64, 144).requires_grad_()
    out, expected = fused_linear(x, (weight,), copies), fp8_linear(x, weight, recipe=recipe)
    assert torch.equal(out, expected)
    grad = draw(3, 16, 64).to(HALF)
    actual = torch.autograd.grad(out, (x, weight), grad)
    wanted = torch.autograd.grad(expected, (x, weight), grad)
    assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))
    parts = weight.detach()[:16].clone(), weight.detach()[16:].clone()
    together = fused_linear(x, tuple(p.requires_grad_() for p in parts), copies)
    assert error(together, expected.detach().double()) < 1e-3


@pytest.mark.parametrize(
    ("policy", "scaling"), [*itertools.product(KEEPS, [TENSORWISE]), ("gates", ROWWISE)]
)
@in_interpreter
def test_an_mlp_equals_its_layers_one_by_one(policy: str, scaling: str) -> None:
    copies = WeightCopies(fp8=Fp8Layers(scaling, always=True))
    x = draw(32, 144).to(HALF).requires_grad_()
    first = tuple(draw(160, 144, seed=n).div(12).requires_grad_() for n in range(2))
    second = draw(144, 160).div(12).requires_grad_()
    out = feed_forward(x, *first, second, copies, policy)
    gate, up = fused_linear(x, first, copies).chunk(2, -1)
    hidden = (nn.functional.silu(gate.float()) * up.float()).to(HALF)
    expected = fused_linear(hidden, (second,), copies)
    # Rounded differently before the casts, so that some values land on the other FP8 neighbor.
    assert error(out.detach(), expected.detach().double()) < 5e-3
    learned = (x, *first, second)
    grad = draw(32, 144, seed=5).to(HALF)
    actual = torch.autograd.grad(out, learned, grad)
    for a, b in zip(actual, torch.autograd.grad(expected, learned, grad), strict=True):
        assert a.dtype == b.dtype
        assert error(a, b.double()) < 0.02


@pytest.mark.parametrize("policy", KEEPS)
def test_a_frozen_mlp_casts_its_hidden_values_once(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = WeightCopies(fp8=Fp8Layers(always=True))
    x = draw(32, 32).to(HALF).requires_grad_()
    first, second = (draw(48, 32), draw(48, 32, seed=1)), draw(32, 48)
    columns = []
    original = fp8_feed_forward.quantize

    def recorded(*args: Any, **how: Any) -> Any:
        columns.append(how.get("columns", True))
        return original(*args, **how)

    monkeypatch.setattr(fp8_feed_forward, "quantize", recorded)
    feed_forward(x, *first, second, copies, policy).float().sum().backward()
    assert x.grad is not None
    assert columns == [False]


def test_torch_compile_traces_a_layer_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def query(*_: object) -> None:
        if torch.compiler.is_compiling():
            # As the queries of a CUDA device do.
            torch._dynamo.graph_break()

    monkeypatch.setattr(linear, "unavailable", query)
    x, weight, bias = draw(32, 32).to(HALF), draw(48, 32), draw(48)
    grad = draw(32, 48, seed=1).to(HALF)
    results = []
    for function in (fp8_linear, torch.compile(fp8_linear, fullgraph=True, backend="aot_eager")):
        inputs = [one.clone().requires_grad_() for one in (x, weight, bias)]
        out = function(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def model(layers: int = 2, **how: Any) -> TransformerLM:
    torch.manual_seed(0)
    config = with_overrides(CONFIG, n_layers=layers)
    return TransformerLM(config, reference_attention, fused=True, fused_projections=True, **how).to(
        HALF
    )


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(CONFIG.vocab, (2, 2, 16), generator=torch.Generator().manual_seed(1))
    return tokens[0], tokens[1]


class TestModel:
    def test_blocks_run_in_fp8_and_the_head_does_not(self) -> None:
        subject = model(fp8=Fp8Layers(always=True))
        loss = subject(*batch())
        loss.backward()
        layers = subject.copies.fp8
        assert layers is not None
        expected = {
            name for name, p in subject.named_parameters() if p.dim() == 2 and name[0] == "b"
        }
        assert {name for name, why in layers.decisions.items() if why is None} == expected
        plain = model()
        reference = plain(*batch())
        reference.backward()
        assert loss.item() == pytest.approx(reference.item(), rel=0.02)
        assert loss.item() != reference.item()
        for (name, p), q in zip(subject.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert error(p.grad, q.grad.double()) < 0.3, name

    @in_interpreter
    def test_kernels_around_the_gemms_compute_the_amax(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from stepscope.kernels.fp8 import casts
        from stepscope.kernels.triton import fp8

        passes: list[tuple[int, ...]] = []
        original, quantize = fp8.amax, casts.quantize

        def amax(x: Tensor, by_row: bool = False) -> Any:
            passes.append(tuple(x.shape))
            return original(x, by_row)

        def checked(x: Tensor, *args: Any, partial: Tensor | None = None, **how: Any) -> Any:
            if partial is not None:
                assert partial.max() == x.float().abs().max()
            return quantize(x, *args, partial=partial, **how)

        monkeypatch.setattr(fp8, "amax", amax)
        for module in (linear, saved, fp8_feed_forward):
            monkeypatch.setattr(module, "quantize", checked)
        subject = model(fp8=Fp8Layers(always=True))
        for block in subject.blocks:
            # As under autocast: the kernel reads tables of float32.
            block.attention.rotary.float()
        subject(*batch()).backward()
        d, tokens = CONFIG.d_model, 32
        # In each block: seven weights, and the output of attention.
        of_block = [(d, d)] * 4 + [(CONFIG.d_ff, d)] * 2 + [(d, CONFIG.d_ff)] + [(tokens, d)]
        assert sorted(passes) == sorted(2 * of_block)

    def test_policies_and_checkpoints_agree(self) -> None:
        gradients = []
        forms = [{"activation_policy": (policy,)} for policy in KEEPS]
        for how in (*forms, {"checkpoint": (1,)}):
            subject = model(1, fp8=Fp8Layers(always=True), **how)
            subject(*batch()).backward()
            gradients.append([p.grad for p in subject.parameters()])
        for other in gradients[1:]:
            for a, b in zip(gradients[0], other, strict=True):
                assert a is not None
                assert b is not None
                assert error(b, a.double()) < 0.05

    def test_small_layers_stay_and_say_why(self) -> None:
        subject = model(fp8="tensorwise")
        subject(*batch())
        layers = subject.copies.fp8
        assert layers is not None
        assert all("casts cost more" in (why or "") for why in layers.decisions.values())
        assert len(layers.decisions) == 14

    @in_interpreter
    def test_saturated_values_of_delayed_scales_are_counted(self) -> None:
        subject = model(fp8=Fp8Layers(DELAYED, always=True))
        layers = subject.copies.fp8
        assert layers is not None
        subject(*batch()).backward()
        names = {f"blocks.{n}.{part}" for n in range(2) for part in (
            "attention.query.weight", "attention.output.weight",
            "feed_forward.w1.weight", "feed_forward.w2.weight",
        )}  # fmt: skip
        # The first step has the scales of its own values.
        assert layers.saturated() == dict.fromkeys(names, (0, 0))
        with torch.no_grad():
            subject.blocks[1].feed_forward_norm.weight.mul_(4)
        subject(*batch())
        limited = {name: inputs for name, (inputs, _) in layers.saturated().items() if inputs}
        assert limited.keys() == {
            "blocks.1.feed_forward.w1.weight",
            "blocks.1.feed_forward.w2.weight",
        }

    def test_one_layer_of_an_mlp_in_bf16_keeps_the_other(self) -> None:
        subject = model(fp8=Fp8Layers(always=True))
        layers = subject.copies.fp8
        assert layers is not None
        layers.override("*.w2.weight", None)
        subject(*batch())
        decisions = layers.decisions
        assert decisions["blocks.0.feed_forward.w2.weight"] == "excluded"
        assert "other layer" in (decisions["blocks.0.feed_forward.w1.weight"] or "")
        assert decisions["blocks.0.attention.query.weight"] is None

    def test_layers_can_be_chosen_by_name(self) -> None:
        subject = model(fp8=Fp8Layers())
        layers = subject.copies.fp8
        assert layers is not None
        layers.override("blocks.0.attention.*", "rowwise")
        layers.override("blocks.1.*", None)
        subject(*batch())
        on = {name for name, why in layers.decisions.items() if why is None}
        assert on == {f"blocks.0.attention.{n}.weight" for n in ("query", "key", "value", "output")}
        assert layers.decisions["blocks.1.feed_forward.w1.weight"] == "excluded"
        with pytest.raises(ValueError, match="no weight"):
            layers.override("decoder.*", None)

    def test_training_follows_an_evaluation_in_inference_mode(self) -> None:
        subject = model(1, fp8=Fp8Layers(always=True))
        with torch.inference_mode():
            evaluated = subject(*batch()).item()
        loss = subject(*batch())
        loss.backward()
        assert loss.item() == evaluated

    def test_a_copy_of_the_model_keeps_the_setting(self) -> None:
        subject = model(1, fp8=Fp8Layers(ROWWISE, always=True))
        other = copy.deepcopy(subject)
        assert torch.equal(subject(*batch()), other(*batch()))
        assert other.copies.fp8 is not None
        assert other.copies.fp8.recipe == Recipe(ROWWISE)
        other.set_fp8(None)
        assert not torch.equal(subject(*batch()), other(*batch()))

    @pytest.mark.parametrize("kind", [FusedAdamW, InBackwardAdamW])
    @in_interpreter
    def test_the_fused_update_computes_the_amax_of_weights(
        self, kind: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from stepscope.kernels.triton import fp8

        passes: list[tuple[int, ...]] = []
        original = fp8.amax

        def amax(x: Tensor, by_row: bool = False) -> Any:
            passes.append(tuple(x.shape))
            return original(x, by_row)

        monkeypatch.setattr(fp8, "amax", amax)
        subject = model(1, fp8=Fp8Layers(always=True))
        optimizer = kind(subject.parameters(), lr=1e-2, copies=subject.copies)
        d, d_ff, tokens = CONFIG.d_model, CONFIG.d_ff, 32
        activations = [(tokens, d), (tokens, 3 * d)]
        weights = [(d, d)] * 4 + [(d_ff, d)] * 2 + [(d, d_ff)]
        for expected in (activations + weights, activations, activations):
            passes.clear()
            subject(*batch()).backward()
            assert sorted(passes) == sorted(expected)
            optimizer.step()
            optimizer.zero_grad()
        # The scales are those of a model that computes them, to the bit.
        loss = subject(*batch())
        fresh = copy.deepcopy(subject)
        assert torch.equal(loss, fresh(*batch()))
        # Values that another code has written are read again, also where no version shows it.
        weight = subject.blocks[0].attention.output.weight
        passes.clear()
        with torch.no_grad():
            weight.mul_(4)
            changed = subject(*batch())
            assert passes == [(d, d), (tokens, d)]
            weight.data.mul_(0.25)
            subject.copies.refresh(all_of_them=True)
            assert not torch.equal(changed, loss)
            assert torch.equal(subject(*batch()), loss)

    @in_interpreter
    def test_the_buffer_of_a_captured_cast_follows_every_captured_update(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copies = WeightCopies()
        weight = nn.Parameter(draw(48, 32))
        optimizer = FusedAdamW([weight], lr=1e-2, copies=copies, capturable=True)
        copies.quantized((weight,), Recipe(TENSORWISE))
        weight.grad = draw(48, 32, seed=1)
        optimizer.step()
        (update,) = optimizer._capturable_updates()
        assert update.amax is not None
        # A step that may be skipped, as with a GradScaler.
        for skip in (0.0, 1.0, 0.0):
            optimizer._launches.update_with_device_counts([update], torch.tensor([skip]))
            assert update.amax.max() == weight.abs().max()
        # An update that writes no largest magnitudes: its capture ends with a refresh.
        optimizer.step()
        copies.quantized((weight,), Recipe(TENSORWISE))
        monkeypatch.setattr(weight_copies, "_is_capturing", lambda _: True)
        with torch.no_grad():
            weight.mul_(4)
        copies.refresh(all_of_them=True)
        assert update.amax.max() == weight.abs().max()

    @pytest.mark.parametrize("kind", [FusedAdamW, InBackwardAdamW])
    def test_training_lowers_the_loss_and_refreshes_the_casts(self, kind: Any) -> None:
        torch.manual_seed(0)
        subject = TransformerLM(
            CONFIG, reference_attention, fused=True, fused_projections=True,
            fp8=Fp8Layers(always=True),
        )  # fmt: skip
        optimizer = kind(subject.parameters(), lr=1e-2, copies=subject.copies)
        losses = []
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(4):
                loss = subject(*batch())
                if isinstance(optimizer, InBackwardAdamW):
                    loss.backward()
                else:
                    loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.8 * losses[0]
        assert all(p.dtype == torch.float32 for p in subject.parameters())
