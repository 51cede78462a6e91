"""Optimizer-in-backward: the same updates as after the backward."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from test_joined_model import DEVICE, batch, draw, model
from torch import Tensor, nn

from stepscope.kernels import matmul
from stepscope.kernels.activation_policy import GATES, policy_per_layer
from stepscope.kernels.matmul import fused_linear
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.model import cross_entropy
from stepscope.optim import AdamW, FusedAdamW, InBackwardAdamW, triton_adamw


class TestInBackward:
    def trained(self, kind: type[AdamW], steps: int = 2, **how: object) -> dict[str, Tensor]:
        subject = model(fused=True, fused_projections=True, **how)
        optimizer = kind(subject.parameters(), lr=1e-2)
        for _ in range(steps):
            subject(*batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {
            f"{key} {name}": optimizer.state[p][key].detach().cpu()
            for name, p in subject.named_parameters()
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
        return state | {name: p.detach().cpu() for name, p in subject.named_parameters()}

    def test_trains_as_with_one_launch_after_the_backward(self) -> None:
        torch.testing.assert_close(
            self.trained(InBackwardAdamW), self.trained(FusedAdamW), rtol=2e-5, atol=1e-7
        )

    def test_parameters_are_freed_with_their_last_reference(self) -> None:
        layer = nn.Linear(4, 4, device=DEVICE)
        optimizer = InBackwardAdamW(layer.parameters())
        layer(torch.ones(2, 4, device=DEVICE)).sum().backward()
        optimizer.step()
        weight = weakref.ref(layer.weight)
        del layer, optimizer
        gc.collect()
        assert weight() is None

    def test_after_the_optimizer_is_freed_gradients_accumulate(self) -> None:
        layer = nn.Linear(4, 4, device=DEVICE)
        optimizer = InBackwardAdamW(layer.parameters())
        before = layer.weight.detach().clone()
        del optimizer
        gc.collect()
        layer(torch.ones(2, 4, device=DEVICE)).sum().backward()
        assert layer.weight.grad is not None
        torch.testing.assert_close(layer.weight.detach(), before, rtol=0, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_learning_rates_changed_after_load_state_dict_take_effect(
        self, dtype: torch.dtype
    ) -> None:
        """In a dtype that the kernel supports, and in one that it does not."""
        layer = nn.Linear(4, 4, device=DEVICE, dtype=dtype)
        optimizer = InBackwardAdamW(layer.parameters(), lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = 0.0
        before = layer.weight.detach().clone()
        layer(torch.ones(2, 4, device=DEVICE, dtype=dtype)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), before, rtol=0, atol=0)

    def test_weights_without_a_copy_are_updated_after_their_last_use(self) -> None:
        """torch would raise if a saved weight changed before the backward reads it."""
        how = {
            "dtype": torch.float16,
            "activation_policy": policy_per_layer(GATES, 2),
            "checkpoint": (1,),
        }
        ours, after = (self.trained(k, 2, **how) for k in (InBackwardAdamW, FusedAdamW))
        torch.testing.assert_close(ours, after, rtol=2e-3, atol=1e-4)

    def test_gradients_are_consumed_in_the_matmul_dtype(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Gradients of the blocks' matmuls in the matmul dtype, all others as autograd computes
        them; the result is that of torch's autocast, which rounds gradients and widens them."""
        dtypes: list[tuple[int, torch.dtype]] = []
        update = triton_adamw.update_one

        def recorded(parameter: Tensor, gradient: Tensor, *rest: Any) -> None:
            dtypes.append((parameter.dim(), gradient.dtype))
            update(parameter, gradient, *rest)

        monkeypatch.setattr(triton_adamw, "update_one", recorded)
        direct, rounded = (
            self.trained_in_float16(low_precision_grads=True),
            self.trained_in_float16(low_precision_grads=False),
        )
        narrow = [kind for kind in dtypes if kind[1] == torch.float16]
        assert len(narrow) == 2 * 7 * 2  # steps, matmul weights of a block, blocks
        assert {dim for dim, _ in narrow} == {2}
        assert len(dtypes) == 2 * 2 * (2 * 9 + 3)
        # On a GPU the compiler fuses different multiply-adds for another dtype.
        near = {"rtol": 1e-6, "atol": 1e-7} if DEVICE == "cuda" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(direct, rounded, **near)

    def trained_in_float16(self, *, low_precision_grads: bool) -> dict[str, Tensor]:
        """Train two steps in float16; wide gradients are rounded as autocast does."""
        subject = model(
            fused=True, fused_projections=True, activation_policy=policy_per_layer(GATES, 2)
        )
        optimizer = InBackwardAdamW(
            subject.parameters(),
            lr=1e-2,
            copies=subject.copies,
            attach=False,
            low_precision_grads=low_precision_grads,
        )
        wide = matmul.matmul_to_dtype
        with pytest.MonkeyPatch.context() as patched:
            if not low_precision_grads:
                patched.setattr(matmul, "matmul_to_dtype", lambda a, b, dtype: (a @ b).to(dtype))
            for _ in range(2):
                with torch.autocast(DEVICE, torch.float16):
                    loss = subject(*batch())
                with optimizer.attached():
                    loss.backward()
                optimizer.step()
        assert matmul.matmul_to_dtype is wide
        return {name: p.detach().cpu() for name, p in subject.named_parameters()}

    def test_low_precision_grads_needs_attached(self) -> None:
        with pytest.raises(ValueError, match="attach=False"):
            InBackwardAdamW([nn.Parameter(draw(2, 2))], low_precision_grads=True)

    def test_a_weight_used_by_two_matmuls_raises(self) -> None:
        weight, copies = nn.Parameter(draw(4, 4)), WeightCopies()
        optimizer = InBackwardAdamW([weight], copies=copies, attach=False, low_precision_grads=True)
        with torch.autocast(DEVICE, torch.float16):
            once = fused_linear(draw(3, 4), (weight,), copies)
            twice = fused_linear(once, (weight,), copies)
        with optimizer.attached(), pytest.raises(RuntimeError, match="one matmul only"):
            twice.float().sum().backward()

    def test_without_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("in_backward", "fused"):
            monkeypatch.setattr(f"stepscope.optim.{module}.kernel_takes", lambda *_: False)
        ours = self.trained(InBackwardAdamW)
        torch.testing.assert_close(ours, self.trained(AdamW), rtol=0, atol=0)

    def test_no_gradient_outlives_the_backward(self) -> None:
        subject = model()
        optimizer = InBackwardAdamW(subject.parameters())
        cross_entropy(subject(batch()[0]), batch()[1]).backward()
        assert all(p.grad is None for p in subject.parameters())
        assert optimizer.updated == len(list(subject.parameters()))

    def test_it_updates_only_while_attached(self) -> None:
        weight = nn.Parameter(draw(3, 4))
        before = weight.detach().clone()
        optimizer = InBackwardAdamW([weight], lr=0.1, attach=False)
        weight.square().sum().backward()
        assert weight.grad is not None
        assert torch.equal(weight.detach(), before)
        with pytest.raises(RuntimeError, match="gradients that InBackwardAdamW did not see"):
            optimizer.step()
        optimizer.zero_grad()
        with optimizer.attached():
            weight.square().sum().backward()
        optimizer.step()
        assert weight.grad is None
        assert not torch.equal(weight.detach(), before)

    def test_a_frozen_weight_is_unchanged(self) -> None:
        subject = model(fused=True, fused_projections=True)
        frozen = {
            name: p.detach().clone()
            for name, p in subject.named_parameters()
            if "query" in name or "w2" in name
        }
        assert frozen
        for name, parameter in subject.named_parameters():
            parameter.requires_grad_(name not in frozen)
        optimizer = InBackwardAdamW(
            subject.parameters(),
            lr=1e-2,
            copies=subject.copies,
            attach=False,
            low_precision_grads=True,
        )
        with torch.autocast(DEVICE, torch.float16), optimizer.attached():
            subject(*batch()).backward()
        optimizer.step()
        after = dict(subject.named_parameters())
        assert all(torch.equal(after[name], before) for name, before in frozen.items())
        assert optimizer.updated == len(after) - len(frozen)

    def test_parameters_that_are_added_later_are_updated(self) -> None:
        first, second = nn.Parameter(draw(3, 4)), nn.Parameter(draw(2, 4))
        optimizer = InBackwardAdamW([first], lr=0.1)
        first.square().sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": [second], "lr": 0.2})
        before = [weight.detach().clone() for weight in (first, second)]
        (first.square().sum() + second.square().sum()).backward()
        optimizer.step()
        for weight, old, steps in zip((first, second), before, (2, 1), strict=True):
            assert not torch.equal(weight.detach(), old)
            assert optimizer.state[weight]["step"].item() == steps

    def test_a_parameter_that_is_unfrozen_later_raises(self) -> None:
        first, second = nn.Parameter(draw(3, 4)), nn.Parameter(draw(2, 4), requires_grad=False)
        optimizer = InBackwardAdamW([first, second], lr=0.1)
        second.requires_grad_()
        (first.square().sum() + second.square().sum()).backward()
        with pytest.raises(RuntimeError, match="gradients that InBackwardAdamW did not see"):
            optimizer.step()

    def test_a_backward_that_raises_ends_the_step(self) -> None:
        weight, copies = nn.Parameter(draw(4, 4)), WeightCopies()
        optimizer = InBackwardAdamW([weight], copies=copies, attach=False, low_precision_grads=True)

        def fail(_: Tensor) -> None:
            raise MemoryError("planted")

        def backward(*, fails: bool) -> None:
            x = draw(3, 4).requires_grad_()
            with torch.autocast(DEVICE, torch.float16):
                out = fused_linear(x * 1, (weight,), copies)
            if fails:
                x.register_hook(fail)
            out.float().sum().backward()

        with pytest.raises(MemoryError, match="planted"), optimizer.attached():
            backward(fails=True)
        with optimizer.attached():
            backward(fails=False)
        optimizer.step()
        assert optimizer.state[weight]["step"].item() == 2

    def test_a_loaded_state_continues_from_its_step_count(self) -> None:
        weights = [nn.Parameter(draw(3, 4)) for _ in range(2)]
        first = InBackwardAdamW([weights[0]], lr=0.1)
        second = InBackwardAdamW([weights[1]], lr=0.1)
        for _ in range(3):
            weights[0].square().sum().backward()
            first.step()
        weights[1].square().sum().backward()
        second.step()
        with torch.no_grad():
            weights[1].copy_(weights[0])
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for weight, optimizer in zip(weights, (first, second), strict=True):
            weight.square().sum().backward()
            optimizer.step()
        counts = [first.state[weights[0]]["step"], second.state[weights[1]]["step"]]
        assert [count.item() for count in counts] == [4, 4]
        torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-7)
