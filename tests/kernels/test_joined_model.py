"""Joined products from kept copies of the weights, and what the backward keeps, against float64."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn

from accuracy import hold_to_policy
from stepscope.attention import reference_attention
from stepscope.kernels.activation_policy import INPUTS, KEEPS, policy_per_layer
from stepscope.kernels.feed_forward import feed_forward
from stepscope.kernels.matmul import fused_linear, matmul_to_dtype
from stepscope.kernels.norm import normed_sum, plain_rms_norm
from stepscope.kernels.rope import plain_rotate, rotated_parts_
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.model import ModelConfig, TransformerLM, cross_entropy
from stepscope.model.layers import RotaryEmbedding
from stepscope.optim import FusedAdamW, InBackwardAdamW

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter computes bfloat16 wrongly.
HALF = torch.bfloat16 if ON_GPU else torch.float16
CONFIG = ModelConfig(d_model=32, d_ff=48, n_layers=2, n_heads=2, vocab=70, context=12)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return drawn.to(DEVICE, dtype)


def model(dtype: torch.dtype = torch.float32, **how: object) -> TransformerLM:
    torch.manual_seed(0)
    made = TransformerLM(CONFIG, reference_attention, dtype=torch.float32, **how)  # type: ignore[arg-type]
    return made.to(DEVICE, dtype)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(CONFIG.vocab, (2, 2, 9), generator=generator).to(DEVICE)
    return drawn[0], drawn[1]


def results(subject: TransformerLM) -> dict[str, Tensor]:
    tokens, targets = batch()
    loss = subject(tokens, targets) if subject.joined else cross_entropy(subject(tokens), targets)
    loss.backward()
    gradients = {f"d {name}": p.grad for name, p in subject.named_parameters()}
    return {"loss": loss.detach(), **gradients}  # type: ignore[dict-item]


@pytest.mark.parametrize("checkpoint", [(), (1,)], ids=["", "checkpointed"])
@pytest.mark.parametrize("keep", KEEPS)
def test_a_joined_model_has_the_plain_one_s_loss_and_gradients(
    keep: str, checkpoint: tuple[int, ...]
) -> None:
    how = {
        "fused": True,
        "joined": True,
        "keep": policy_per_layer(keep, 2),
        "checkpoint": checkpoint,
    }
    hold_to_policy(results(model(torch.float64)), results(model()), results(model(**how)))


def test_in_a_low_format_every_weight_is_multiplied_where_it_lies() -> None:
    """No copy of a weight that has the products' format: several products, one after the other."""
    joined = model(torch.float16, fused=True, joined=True, keep=policy_per_layer(INPUTS, 2))
    hold_to_policy(results(model(torch.float64)), results(model(torch.float16)), results(joined))
    assert all(joined.copies.find(p) is None for p in joined.parameters())


@pytest.mark.parametrize("narrow", [False, True], ids=["", "narrow stream"])
@pytest.mark.parametrize("keep", KEEPS)
def test_autocast_leaves_gradients_in_the_weights_own_format(keep: str, narrow: bool) -> None:
    def made(subject: TransformerLM) -> dict[str, Tensor]:
        with torch.autocast(DEVICE, HALF):
            return results(subject)

    joined = model(fused=True, joined=True, keep=policy_per_layer(keep, 2), narrow_stream=narrow)
    found = made(joined)
    assert {p.grad.dtype for p in joined.parameters() if p.grad is not None} == {torch.float32}
    exact, plain = results(model(torch.float64)), made(model(narrow_stream=narrow))

    # What is rounded once more (unit rows) or once less (gradients) may go either way: by luck a
    # short vector is several times as far off, all of them together are not.
    def off(got: dict[str, Tensor]) -> Tensor:
        apart = [(got[name].double() - true).norm() / true.norm() for name, true in exact.items()]
        return torch.stack(apart)

    errors, yardsticks = off(found), off(plain)
    assert (errors <= 4 * yardsticks + 1e-3).all()
    assert errors.norm() <= 1.25 * yardsticks.norm()


def test_parameters_are_the_same() -> None:
    plain, joined = model(), model(fused=True, joined=True)
    joined.load_state_dict(plain.state_dict())
    assert list(plain.state_dict()) == list(joined.state_dict())


def test_less_is_kept() -> None:
    def saved(keep: str) -> int:
        held: dict[int, int] = {}

        def note(x: Tensor) -> Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        subject = model(fused=True, joined=True, keep=policy_per_layer(keep, 2))
        weights = {p.untyped_storage().data_ptr() for p in subject.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            subject(*batch())
        return sum(size for place, size in held.items() if place not in weights)

    rows, width, hidden = 18, 4 * CONFIG.d_model, 4 * CONFIG.d_ff
    everything, norms, gates, inputs = (saved(keep) for keep in KEEPS)
    assert everything - norms == 2 * rows * hidden
    # Of two norms and their outputs two unit rows are left, and what is gated goes.
    assert everything - gates == 2 * rows * (2 * width + hidden)
    assert gates - inputs == 2 * rows * 2 * hidden


class TestUnits:
    def test_the_norm_is_made_of_its_unit_rows_again_with_the_same_bits(self) -> None:
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


class TestProducts:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_one_product_for_several_weights(self, dtype: torch.dtype) -> None:
        x, above = draw(2, 9, 24, dtype=dtype), draw(2, 9, 3 * 16, seed=5)
        weights = [draw(16, 24, dtype=dtype, seed=n) * 0.2 for n in range(3)]

        def of(joined: bool, wide: torch.dtype) -> dict[str, Tensor]:
            leaves = [each.detach().to(wide).requires_grad_() for each in (x, *weights)]
            if joined:
                out = fused_linear(leaves[0], tuple(leaves[1:]), WeightCopies())
            else:
                out = torch.cat([leaves[0] @ w.T for w in leaves[1:]], dim=-1)
            made = torch.autograd.grad(out, leaves, above.to(wide))
            return {"out": out.detach(), **{f"d {n}": grad for n, grad in enumerate(made)}}

        hold_to_policy(of(False, torch.float64), of(False, dtype), of(True, dtype))

    def test_a_wide_product_is_rounded_once(self) -> None:
        a, b = draw(5, 200, dtype=HALF), draw(200, 6, dtype=HALF, seed=1)
        made = matmul_to_dtype(a, b, torch.float32)
        exact = a.double() @ b.double()
        assert made.dtype == torch.float32
        torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("keep", KEEPS)
    def test_feed_forward(self, keep: str) -> None:
        sizes = [(2, 7, 24), (40, 24), (40, 24), (24, 40)]
        inputs = [draw(*size, seed=n) * 0.3 for n, size in enumerate(sizes)]
        above = draw(2, 7, 24, seed=9)

        def of(joined: bool, wide: torch.dtype) -> dict[str, Tensor]:
            leaves = [each.detach().to(wide).requires_grad_() for each in inputs]
            x, w1, w3, w2 = leaves
            if joined:
                out = feed_forward(x, w1, w3, w2, WeightCopies(), keep)
            else:
                out = (nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
            made = torch.autograd.grad(out, leaves, above.to(wide))
            return {"out": out.detach(), **{f"d {n}": grad for n, grad in enumerate(made)}}

        hold_to_policy(of(False, torch.float64), of(False, torch.float32), of(True, torch.float32))

    @pytest.mark.parametrize("keep", KEEPS)
    def test_feed_forward_where_no_kernel_runs(
        self, keep: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = [draw(*size) * 0.3 for size in ((6, 8), (12, 8), (12, 8), (8, 12))]
        with_kernels, without = [], []
        for found, runs in ((with_kernels, True), (without, False)):
            if not runs:
                monkeypatch.setattr("stepscope.kernels.feed_forward.kernels_take", lambda *_: False)
            leaves = [each.detach().requires_grad_() for each in inputs]
            out = feed_forward(*leaves, WeightCopies(), keep)  # type: ignore[misc]
            found += [out, *torch.autograd.grad(out.square().sum(), leaves)]
        torch.testing.assert_close(with_kernels, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "d"), [(2, 16), (3, 10), (5, 64)])
@pytest.mark.parametrize("order", ["heads first", "positions first"])
def test_rotated_parts(heads: int, d: int, order: str) -> None:
    """Gradients come in whatever layout attention makes them."""
    x = draw(2, 7, 3 * heads * d)
    table = RotaryEmbedding(d, 9, device=DEVICE)
    shape = (2, heads, 7, d) if order == "heads first" else (2, 7, heads, d)
    above = [draw(*shape, seed=n) for n in range(3)]
    if order != "heads first":
        above = [grad.transpose(1, 2) for grad in above]

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (p.view(2, 7, heads, d).transpose(1, 2) for p in x.chunk(3, dim=-1))
        return plain_rotate(q, table.cos, table.sin), plain_rotate(k, table.cos, table.sin), v

    def of(fused: bool, dtype: torch.dtype) -> dict[str, Tensor]:
        leaf = x.to(dtype).requires_grad_()
        made = rotated_parts_(leaf.clone(), table.cos, table.sin, heads) if fused else plain(leaf)
        (grad,) = torch.autograd.grad(made, leaf, [g.to(dtype) for g in above])
        named = {f"part {n}": part.detach() for n, part in enumerate(made)}
        return {**named, "dx": grad}

    hold_to_policy(of(False, torch.float64), of(False, torch.float32), of(True, torch.float32))


class TestCopies:
    def weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        return nn.Parameter(draw(4, 8)), nn.Parameter(draw(6, 8, seed=1))

    def test_rows_lie_under_each_other_and_are_made_once(self) -> None:
        copies, weights = WeightCopies(), self.weights()
        (first,) = copies.narrow(weights, HALF)
        assert torch.equal(first, torch.cat([w.detach() for w in weights]).to(HALF))
        first.zero_()
        assert copies.narrow(weights, HALF)[0] is first
        assert not first.any(), "nothing changed, so nothing was cast"

    def test_a_weight_that_others_change_is_seen(self) -> None:
        copies, weights = WeightCopies(), self.weights()
        (held,) = copies.narrow(weights, HALF)
        with torch.no_grad():
            weights[1].add_(1)
        copies.refresh()
        assert torch.equal(held[4:], weights[1].detach().to(HALF))

    def test_what_moves_no_version_is_followed_when_asked(self) -> None:
        copies, weights = WeightCopies(), self.weights()
        (held,) = copies.narrow(weights, HALF)
        weights[0].data.add_(1)
        copies.refresh()
        assert not torch.equal(held[:4], weights[0].detach().to(HALF)), "torch does not tell"
        copies.refresh(all_of_them=True)
        assert torch.equal(held[:4], weights[0].detach().to(HALF))

    def test_an_evaluation_may_come_first(self) -> None:
        subject = model(fused=True, joined=True)
        with torch.autocast(DEVICE, HALF):
            with torch.inference_mode():
                expected = subject(*batch())
            loss = subject(*batch())
        loss.backward()
        assert torch.equal(loss.detach(), expected)

    def test_a_model_is_saved_and_copied_without_them(self) -> None:
        subject = model(fused=True, joined=True)
        with torch.autocast(DEVICE, HALF):
            expected = subject(*batch()).detach()
            file = io.BytesIO()
            torch.save(subject, file)
            file.seek(0)
            for other in (copy.deepcopy(subject), torch.load(file, weights_only=False)):
                assert not other.copies._groups
                assert torch.equal(other(*batch()).detach(), expected)

    def test_a_weight_that_is_gone_takes_its_copy_along(self) -> None:
        copies = WeightCopies()
        copies.narrow(self.weights(), HALF)
        kept_ones = self.weights()
        copies.narrow(kept_ones, HALF)
        assert len(copies._groups) == 1

    @pytest.mark.parametrize("optimizer", [FusedAdamW, InBackwardAdamW])
    def test_the_optimizer_writes_weight_and_copy_together(
        self, optimizer: type[FusedAdamW], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copies, weights = WeightCopies(), self.weights()
        (held,) = copies.narrow(weights, torch.float16)
        made = optimizer(weights, lr=0.1, copies=copies)
        casts: list[int] = []
        monkeypatch.setattr(torch, "_foreach_copy_", lambda *_: casts.append(1))
        for step in range(3):
            sum(w.square().sum() for w in weights).backward()  # type: ignore[union-attr]
            made.step()
            made.zero_grad()
            assert copies.narrow(weights, torch.float16)[0] is held
            for row, weight in zip(held.split([4, 6]), weights, strict=True):
                assert torch.equal(row, weight.detach().half()), step
        assert casts == []

    def test_an_optimizer_that_knows_no_copies_leaves_them_to_be_cast(self) -> None:
        copies, weights = WeightCopies(), self.weights()
        copies.narrow(weights, torch.float16)
        made = FusedAdamW(weights, lr=0.1)
        sum(w.square().sum() for w in weights).backward()  # type: ignore[union-attr]
        made.step()
        expected = torch.cat([w.detach() for w in weights]).half()
        assert torch.equal(copies.narrow(weights, torch.float16)[0], expected)


def test_what_blocks_keep() -> None:
    from stepscope.errors import UsageError

    assert policy_per_layer("gates", 3) == ("gates",) * 3
    assert policy_per_layer("inputs-1", 3) == ("inputs", "gates", "gates")
    for wrong, layers in itertools.product(("gates-2", "inputs-x", "some", "inputs-"), (3,)):
        with pytest.raises(UsageError, match="does not exist"):
            policy_per_layer(wrong, layers)
    with pytest.raises(UsageError, match="3 blocks"):
        policy_per_layer("inputs-4", 3)
