"""Fused projections from cached weight copies, and activation policies, against float64."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accuracy import hold_to_policy, stacked_results
from pairwise import pairwise
from stepscope.attention import reference_attention
from stepscope.kernels.activation_policy import INPUTS, KEEPS, policy_per_layer
from stepscope.kernels.feed_forward import feed_forward
from stepscope.kernels.matmul import fused_linear, matmul_to_dtype
from stepscope.kernels.norm import normed_sum, plain_rms_norm
from stepscope.kernels.rope import plain_rotate, rotated_parts_
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.model import ModelConfig, TransformerLM
from stepscope.model.layers import RotaryEmbedding
from stepscope.optim import FusedAdamW, InBackwardAdamW

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter computes bfloat16 incorrectly.
HALF = torch.bfloat16 if ON_GPU else torch.float16
SEEDS = range(1, 4)
CONFIG = ModelConfig(d_model=32, d_ff=48, n_layers=2, n_heads=2, vocab=35, context=12)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(DEVICE, dtype)


def model(dtype: torch.dtype = torch.float32, **how: object) -> TransformerLM:
    torch.manual_seed(0)
    transformer = TransformerLM(CONFIG, reference_attention, dtype=torch.float32, **how)  # type: ignore[arg-type]
    return transformer.to(DEVICE, dtype)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocab, (2, 2, 5), generator=generator).to(DEVICE)
    return tokens[0], tokens[1]


def results(subject: TransformerLM, seeds: Sequence[int] = (1,)) -> dict[str, Tensor]:
    """Return loss and gradients of one or several batches: the largest error of few values is up
    to chance."""
    batches = [batch(seed) for seed in seeds]
    return stacked_results(subject, batches, fused_loss=subject.fused_projections)


@pytest.mark.parametrize("policy", KEEPS)
def test_fused_projections_give_the_loss_and_gradients_of_the_naive_model(policy: str) -> None:
    how = {
        "fused": True,
        "fused_projections": True,
        "activation_policy": policy_per_layer(policy, 2),
    }
    models = model(torch.float64), model(), model(**how)
    exact, naive, fused = (results(subject, SEEDS) for subject in models)
    hold_to_policy(exact, naive, fused)
    # A block that is computed again computes the same.
    for name, value in results(model(**how, checkpoint=(1,)), SEEDS[:1]).items():
        torch.testing.assert_close(value, fused[name][:1], rtol=1e-6, atol=1e-7, msg=name)


def test_weights_in_the_matmul_dtype_need_no_copy() -> None:
    """Weights that have the matmul dtype are read by separate matmuls, without a copy."""
    fused = model(
        torch.float16,
        fused=True,
        fused_projections=True,
        activation_policy=policy_per_layer(INPUTS, 2),
    )
    dtypes = torch.float64, torch.float16
    hold_to_policy(*(results(model(dtype), SEEDS) for dtype in dtypes), results(fused, SEEDS))
    assert all(fused.copies.find(p) is None for p in fused.parameters())


@pytest.mark.parametrize("narrow", [False, True], ids=["", "narrow stream"])
@pytest.mark.parametrize("policy", KEEPS)
def test_gradients_have_the_dtype_of_the_weights_under_autocast(policy: str, narrow: bool) -> None:
    def under_autocast(subject: TransformerLM) -> dict[str, Tensor]:
        with torch.autocast(DEVICE, HALF):
            return results(subject)

    fused = model(
        fused=True,
        fused_projections=True,
        activation_policy=policy_per_layer(policy, 2),
        narrow_stream=narrow,
    )
    actual = under_autocast(fused)
    assert {p.grad.dtype for p in fused.parameters() if p.grad is not None} == {torch.float32}
    exact, plain = results(model(torch.float64)), under_autocast(model(narrow_stream=narrow))

    # One rounding more (unit rows) or less (gradients) can go either way: by chance the error of a
    # short vector is several times as large, but not that of all of them together.
    def relative_errors(got: dict[str, Tensor]) -> Tensor:
        errors_by_name = [
            (got[name].double() - true).norm() / true.norm() for name, true in exact.items()
        ]
        return torch.stack(errors_by_name)

    errors, baselines = relative_errors(actual), relative_errors(plain)
    assert (errors <= 4 * baselines + 1e-3).all()
    assert errors.norm() <= 1.25 * baselines.norm()


def test_parameters_are_the_same() -> None:
    plain, fused = model(), model(fused=True, fused_projections=True)
    fused.load_state_dict(plain.state_dict())
    assert list(plain.state_dict()) == list(fused.state_dict())


def test_activation_policies_save_less() -> None:
    def saved(policy: str) -> int:
        sizes: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        subject = model(
            fused=True, fused_projections=True, activation_policy=policy_per_layer(policy, 2)
        )
        weights = {p.untyped_storage().data_ptr() for p in subject.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            subject(*batch())
        return sum(size for address, size in sizes.items() if address not in weights)

    rows, width, hidden = 10, 4 * CONFIG.d_model, 4 * CONFIG.d_ff
    save_all, norms, gates, inputs = (saved(policy) for policy in KEEPS)
    assert save_all - norms == 2 * rows * hidden
    # Two unit rows replace two norm inputs and their outputs, and the SwiGLU output is not saved.
    assert save_all - gates == 2 * rows * (2 * width + hidden)
    assert gates - inputs == 2 * rows * 2 * hidden


class TestUnits:
    def test_the_norm_recomputed_from_unit_rows_is_bit_identical(self) -> None:
        from stepscope.kernels.triton.norm import scaled

        x, branch = draw(3, 5, 40), draw(3, 5, 40, dtype=HALF, seed=1)
        weight = 1 + 0.1 * draw(40, seed=2)
        _, normed = normed_sum(x, branch, weight, out_dtype=HALF, units=True)
        assert normed.unit is not None
        assert torch.equal(scaled(normed.unit, weight), normed.value)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_gradients(self, dtype: torch.dtype) -> None:
        inputs = [draw(7, 96, dtype=dtype, seed=n) for n in (0, 1)]
        inputs.append(1 + 0.1 * draw(96, dtype=dtype, seed=2))
        above = [draw(7, 96, seed=n) for n in (3, 4)]

        def of(units: bool, wide: torch.dtype) -> dict[str, Tensor]:
            leaves = [x.detach().to(wide).requires_grad_() for x in inputs]
            if units:
                stream, read = normed_sum(*leaves, units=True)
                normed = read.value
            else:
                stream = leaves[0] + leaves[1]
                normed = plain_rms_norm(stream, leaves[2], 1e-5)
            made = torch.autograd.grad((stream, normed), leaves, [g.to(wide) for g in above])
            names = ("dx", "dbranch", "dweight")
            return {"normed": normed.detach(), **dict(zip(names, made, strict=True))}

        hold_to_policy(of(False, torch.float64), of(False, dtype), of(True, dtype))


class TestFusedProjections:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_one_matmul_for_several_weights(self, dtype: torch.dtype) -> None:
        x, above = draw(2, 9, 24, dtype=dtype), draw(2, 9, 3 * 16, seed=5)
        weights = [draw(16, 24, dtype=dtype, seed=n) * 0.2 for n in range(3)]

        def of(fused: bool, wide: torch.dtype) -> dict[str, Tensor]:
            leaves = [each.detach().to(wide).requires_grad_() for each in (x, *weights)]
            if fused:
                out = fused_linear(leaves[0], tuple(leaves[1:]), WeightCopies())
            else:
                out = torch.cat([leaves[0] @ w.T for w in leaves[1:]], dim=-1)
            made = torch.autograd.grad(out, leaves, above.to(wide))
            return {"out": out.detach(), **{f"d {n}": grad for n, grad in enumerate(made)}}

        hold_to_policy(of(False, torch.float64), of(False, dtype), of(True, dtype))

    def test_a_matmul_to_a_wider_dtype_is_rounded_once(self) -> None:
        a, b = draw(5, 200, dtype=HALF), draw(200, 6, dtype=HALF, seed=1)
        out = matmul_to_dtype(a, b, torch.float32)
        exact = a.double() @ b.double()
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("policy", KEEPS)
    def test_feed_forward(self, policy: str) -> None:
        sizes = [(2, 7, 24), (40, 24), (40, 24), (24, 40)]
        inputs = [draw(*size, seed=n) * 0.3 for n, size in enumerate(sizes)]
        above = draw(2, 7, 24, seed=9)

        def of(fused: bool, wide: torch.dtype) -> dict[str, Tensor]:
            leaves = [each.detach().to(wide).requires_grad_() for each in inputs]
            x, w1, w3, w2 = leaves
            if fused:
                out = feed_forward(x, w1, w3, w2, WeightCopies(), policy)
            else:
                out = (nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
            made = torch.autograd.grad(out, leaves, above.to(wide))
            return {"out": out.detach(), **{f"d {n}": grad for n, grad in enumerate(made)}}

        hold_to_policy(of(False, torch.float64), of(False, torch.float32), of(True, torch.float32))

    @pytest.mark.parametrize("policy", KEEPS)
    def test_feed_forward_without_kernels(
        self, policy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = [draw(*size) * 0.3 for size in ((6, 8), (12, 8), (12, 8), (8, 12))]
        with_kernels, without = [], []
        for outputs, runs in ((with_kernels, True), (without, False)):
            if not runs:
                monkeypatch.setattr("stepscope.kernels.activation.kernels_take", lambda *_: False)
            leaves = [each.detach().requires_grad_() for each in inputs]
            out = feed_forward(*leaves, WeightCopies(), policy)  # type: ignore[misc]
            outputs += [out, *torch.autograd.grad(out.square().sum(), leaves)]
        torch.testing.assert_close(with_kernels, without, rtol=1e-5, atol=1e-6)


@pairwise({
    "heads, d": [(2, 16), (3, 10), (5, 64), (1, 80)],
    "order": ["heads first", "positions first"],
})  # fmt: skip
def test_rotated_parts(heads: int, d: int, order: str) -> None:
    """Gradients may have any layout that attention returns."""
    x, table = draw(2, 7, 3 * heads * d), RotaryEmbedding(d, 9, device=DEVICE)
    if order == "heads first":
        above = [draw(2, heads, 7, d, seed=n) for n in range(3)]
    else:
        above = [draw(2, 7, heads, d, seed=n).transpose(1, 2) for n in range(3)]

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (p.unflatten(-1, (-1, d)).transpose(1, 2) for p in x.chunk(3, dim=-1))
        return *(plain_rotate(p, table.cos, table.sin) for p in (q, k)), v

    def of(fused: bool, dtype: torch.dtype) -> dict[str, Tensor]:
        leaf = x.to(dtype).requires_grad_()
        made = plain(leaf)
        if fused:
            made = rotated_parts_(leaf.clone(), table.cos, table.sin, heads)
        (grad,) = torch.autograd.grad(made, leaf, [g.to(dtype) for g in above])
        named = {f"part {n}": part.detach() for n, part in enumerate(made)}
        return {**named, "dx": grad}

    hold_to_policy(of(False, torch.float64), of(False, torch.float32), of(True, torch.float32))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_fused_linear_layers(layers: int, autocast: bool) -> None:
    x, copies = draw(2, 3, 8), WeightCopies()
    weights = [draw(4 + n, 8, seed=n) for n in range(layers)]
    grad = draw(2, 3, sum(len(weight) for weight in weights), seed=5)

    def of(fused: bool, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, *weights)]
        on = autocast and dtype == torch.float32
        with torch.autocast(DEVICE, HALF, enabled=on):
            if fused:
                out = fused_linear(leaves[0], tuple(leaves[1:]), copies)
            else:
                out = functional.linear(leaves[0], torch.cat(leaves[1:]))
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
        return {"out": out.detach(), **{f"d{n}": g for n, g in enumerate(grads)}}

    for _ in range(2):
        hold_to_policy(of(False, torch.float64), of(False, torch.float32), of(True, torch.float32))


class TestWeightCopies:
    def weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        return nn.Parameter(draw(4, 8)), nn.Parameter(draw(6, 8, seed=1))

    def test_weights_are_concatenated_and_cast_once(self) -> None:
        copies, weights = WeightCopies(), self.weights()
        (first,) = copies.narrow(weights, HALF)
        assert torch.equal(first, torch.cat([w.detach() for w in weights]).to(HALF))
        first.zero_()
        assert copies.narrow(weights, HALF)[0] is first
        assert not first.any(), "nothing changed, so nothing was cast"

    def test_a_changed_weight_is_detected(self) -> None:
        copies, weights = WeightCopies(), self.weights()
        (copied,) = copies.narrow(weights, HALF)
        with torch.no_grad():
            weights[1].add_(1)
        copies.refresh()
        assert torch.equal(copied[4:], weights[1].detach().to(HALF))

    def test_an_undetected_change_is_copied_on_request(self) -> None:
        copies, weights = WeightCopies(), self.weights()
        (copied,) = copies.narrow(weights, HALF)
        weights[0].data.add_(1)
        copies.refresh()
        assert not torch.equal(copied[:4], weights[0].detach().to(HALF)), "the version is unchanged"
        copies.refresh(all_of_them=True)
        assert torch.equal(copied[:4], weights[0].detach().to(HALF))

    def test_the_first_call_may_be_in_inference_mode(self) -> None:
        subject = model(fused=True, fused_projections=True)
        with torch.autocast(DEVICE, HALF):
            with torch.inference_mode():
                expected = subject(*batch())
            loss = subject(*batch())
        loss.backward()
        assert torch.equal(loss.detach(), expected)

    def test_a_model_is_saved_and_copied_without_weight_copies(self) -> None:
        subject = model(fused=True, fused_projections=True)
        with torch.autocast(DEVICE, HALF):
            expected = subject(*batch()).detach()
            file = io.BytesIO()
            torch.save(subject, file)
            file.seek(0)
            for other in (copy.deepcopy(subject), torch.load(file, weights_only=False)):
                assert not other.copies._groups
                assert torch.equal(other(*batch()).detach(), expected)

    def test_the_copy_of_a_freed_weight_is_freed(self) -> None:
        copies = WeightCopies()
        copies.narrow(self.weights(), HALF)
        alive = self.weights()
        copies.narrow(alive, HALF)
        assert len(copies._groups) == 1

    @pytest.mark.parametrize("optimizer", [FusedAdamW, InBackwardAdamW])
    def test_the_optimizer_writes_weight_and_copy_together(
        self, optimizer: type[FusedAdamW], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copies, weights = WeightCopies(), self.weights()
        (copied,) = copies.narrow(weights, torch.float16)
        instance = optimizer(weights, lr=0.1, copies=copies)
        casts: list[int] = []
        monkeypatch.setattr(torch, "_foreach_copy_", lambda *_: casts.append(1))
        for step in range(3):
            sum(w.square().sum() for w in weights).backward()  # type: ignore[union-attr]
            instance.step()
            instance.zero_grad()
            assert copies.narrow(weights, torch.float16)[0] is copied
            for row, weight in zip(copied.split([4, 6]), weights, strict=True):
                assert torch.equal(row, weight.detach().half()), step
        assert casts == []

    def test_without_copies_in_the_optimizer_weights_are_cast_again(self) -> None:
        copies, weights = WeightCopies(), self.weights()
        copies.narrow(weights, torch.float16)
        optimizer = FusedAdamW(weights, lr=0.1)
        sum(w.square().sum() for w in weights).backward()  # type: ignore[union-attr]
        optimizer.step()
        expected = torch.cat([w.detach() for w in weights]).half()
        assert torch.equal(copies.narrow(weights, torch.float16)[0], expected)


def test_activation_policy_per_layer() -> None:
    from stepscope.errors import UsageError

    assert policy_per_layer("gates", 3) == ("gates",) * 3
    assert policy_per_layer("inputs-1", 3) == ("inputs", "gates", "gates")
    for wrong, layers in itertools.product(("gates-2", "inputs-x", "some", "inputs-"), (3,)):
        with pytest.raises(UsageError, match="does not exist"):
            policy_per_layer(wrong, layers)
    with pytest.raises(UsageError, match="3 blocks"):
        policy_per_layer("inputs-4", 3)
