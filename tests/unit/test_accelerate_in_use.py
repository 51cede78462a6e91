"""An accelerated model trains as the plain one in the ways in which models are used: schedules,
scalers, checkpoints, averages, compilation, evaluation between steps, failed steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import small_decoder
import stepscope
from accelerated_models import COMPILED
from small_decoder import VOCAB, Decoder, adamw, batch, decoder, train
from stepscope.acceleration.report import Report
from stepscope.errors import UsageError

CLOSE = {torch.bfloat16: 5e-3, torch.float16: 2e-3, None: 1e-5}
"""Relative difference of losses, by the dtype of autocast."""


@pytest.fixture(autouse=True)
def _without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what runs on a CPU: the kernels have tests of their own."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def close(actual: list[float], expected: list[float], dtype: torch.dtype | None) -> None:
    assert actual == pytest.approx(expected, rel=CLOSE[dtype])


def complete(report: Report) -> None:
    """It runs compiled, after it was compared with the original."""
    assert report.is_compiled
    assert not [left for left in report.left if "differ" in left.reason]


Both = Callable[[Decoder], Any]


def same(use: Both, **options: Any) -> tuple[Any, Any]:
    """Use a plain and an accelerated model in the same way; return both results."""
    plain, fused = decoder(**options), decoder(**options)
    report = stepscope.accelerate(fused, compile=COMPILED)
    results = use(plain), use(fused)
    complete(report)
    return results


@pytest.mark.parametrize(
    ("tied", "dtype"),
    [(True, None), (True, torch.bfloat16), (False, torch.float16)],
    ids=["tied", "tied, bfloat16", "float16"],
)
def test_losses_over_twenty_steps(tied: bool, dtype: torch.dtype | None) -> None:
    expected, actual = same(lambda model: train(model, steps=20, dtype=dtype), tied=tied)
    assert expected[-1] < 0.9 * expected[0]
    close(actual, expected, dtype)


@pytest.mark.parametrize(
    ("reentrant", "dtype"),
    [
        (False, torch.bfloat16),
        pytest.param(True, torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param(True, None, marks=pytest.mark.thorough),
        pytest.param(False, None, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_gradient_checkpointing(reentrant: bool, dtype: torch.dtype | None) -> None:
    expected, actual = same(lambda model: train(model, dtype=dtype), reentrant=reentrant)
    close(actual, expected, dtype)


def test_selective_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode that saves the results of some operators does not see the comparison."""
    saved = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default]
    context = functools.partial(create_selective_checkpoint_contexts, saved)
    selective = functools.partial(small_decoder.checkpoint, context_fn=context)
    monkeypatch.setattr(small_decoder, "checkpoint", selective)
    expected, actual = same(train, reentrant=False)
    close(actual, expected, torch.bfloat16)


def test_a_first_call_that_stays_as_it_is_casts_its_weights_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison before it, in the same autocast, leaves none that it would find."""
    saved = [torch.ops.aten.addmm.default]
    context = functools.partial(create_selective_checkpoint_contexts, saved)
    selective = functools.partial(small_decoder.checkpoint, context_fn=context)
    monkeypatch.setattr(small_decoder, "checkpoint", selective)
    model = decoder(reentrant=False)
    stepscope.accelerate(model, compile=COMPILED)
    with torch.compiler.set_stance("force_eager"):
        train(model, steps=1)


def test_a_scheduler_that_was_made_before() -> None:
    plain, fused = decoder(), decoder()
    losses = []
    for model in (plain, fused):
        optimizer = adamw(model)
        groups = optimizer.param_groups
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3)
        if model is fused:
            stepscope.accelerate(model, optimizer, compile=COMPILED)
        assert optimizer.param_groups is groups
        losses.append(train(model, optimizer, after=schedule.step))
    close(losses[1], losses[0], torch.bfloat16)


def float16_scaler() -> torch.amp.GradScaler:
    """Scale so much that the first step overflows, and then so little that none does."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30)


def test_a_scaler_in_float16() -> None:
    def use(model: Decoder) -> list[float]:
        optimizer, scaler = adamw(model), float16_scaler()
        losses = []
        for step in range(8):
            with torch.autocast("cpu", torch.float16):
                loss = model(*batch(step))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return [*losses, scaler.get_scale()]

    expected, actual = same(use)
    assert expected[-1] == 2.0**10, "the first step overflows and is skipped"
    close(actual, expected, torch.float16)


def test_evaluation_between_steps() -> None:
    def use(model: Decoder) -> list[float]:
        seen: list[float] = []

        def evaluate(_: int) -> None:
            model.eval()
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                seen.append(float(model(*batch(100))))
            with torch.autocast("cpu", torch.bfloat16):
                # With gradients, as for an adversarial example.
                seen.append(float(model(*batch(101)).detach()))
            model.train()

        return train(model, between=evaluate) + seen

    expected, actual = same(use)
    close(actual, expected, torch.bfloat16)


def test_forwards_keep_their_signatures() -> None:
    model = decoder()
    before = {name: inspect.signature(one.forward) for name, one in model.named_modules()}
    report = stepscope.accelerate(model, dtype=torch.bfloat16, compile=COMPILED)
    assert {name: inspect.signature(one.forward) for name, one in model.named_modules()} == before
    report.undo()


class PlannedError(Exception):
    pass


@pytest.mark.parametrize("failing", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_training_continues_after_a_failed_step(failing: int) -> None:
    """Also after a failure in the first step, which is compared."""

    def use(model: Decoder) -> list[float]:
        def fail(step: int) -> None:
            if step != failing:
                return
            original = model.norm.forward

            def broken(_: Tensor) -> Tensor:
                raise PlannedError

            model.norm.forward = broken  # type: ignore[method-assign]
            with contextlib.suppress(PlannedError), torch.autocast("cpu", torch.bfloat16):
                model(*batch(50))
            model.norm.forward = original  # type: ignore[method-assign]
            model.zero_grad()

        return train(model, between=fail)

    expected, actual = same(use)
    close(actual, expected, torch.bfloat16)


@pytest.mark.parametrize(
    "first", [pytest.param("plain", marks=pytest.mark.thorough), "accelerated"]
)
def test_checkpoints_load_in_both_directions(first: str) -> None:
    """Half of the steps with one model, the other half with the other from its checkpoint."""

    def made(fused: bool) -> tuple[Decoder, torch.optim.Optimizer]:
        model = decoder()
        optimizer = adamw(model)
        if fused:
            stepscope.accelerate(model, optimizer, compile=COMPILED)
        return model, optimizer

    model, optimizer = made(first == "accelerated")
    losses = train(model, optimizer, 4)
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    model, optimizer = made(first == "plain")
    # Its cached casts are those of other weights.
    train(model, optimizer, 2)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    losses += train(model, optimizer, 4)
    model, optimizer = made(False)
    close(losses, train(model, optimizer, 4) + train(model, optimizer, 4), torch.bfloat16)


def test_a_moving_average_of_the_weights() -> None:
    def use(model: Decoder) -> list[float]:
        average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        losses = train(model, between=lambda _: average.update_parameters(model))
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(float(average(*batch(0)).detach()))
        assert losses[-1] != pytest.approx(float(model(*batch(0)).detach()), rel=1e-3)
        return losses

    expected, actual = same(use)
    close(actual, expected, torch.bfloat16)


def test_an_average_made_after_training_began_is_independent() -> None:
    model = decoder()
    stepscope.accelerate(model, compile=COMPILED)
    train(model, steps=2)
    average = AveragedModel(model)
    frozen = copy.deepcopy(average.module)
    train(model, steps=2)
    with torch.no_grad():
        assert torch.equal(average(*batch(0)), frozen(*batch(0)))


def test_weights_that_are_loaded_and_swapped_between_steps() -> None:
    """As an evaluation with averaged weights does: in place, and as new tensors."""

    def use(model: Decoder) -> list[float]:
        start = {name: value.clone() for name, value in model.state_dict().items()}

        def load(step: int) -> None:
            if step == 3:
                model.load_state_dict(start)
            if step == 5:
                model.load_state_dict(
                    {name: value.clone() * 0.9 for name, value in start.items()}, assign=True
                )
                model.head.weight = model.embed.weight

        optimizer = adamw(model)
        losses = train(model, optimizer, 5, between=load)
        load(5)
        return losses + train(model, adamw(model), 3)

    plain, fused = decoder(), decoder()
    stepscope.accelerate(fused, compile=COMPILED)
    close(use(fused), use(plain), torch.bfloat16)


def test_accumulated_gradients() -> None:
    def use(model: Decoder) -> list[float]:
        optimizer, losses = adamw(model), []
        for step in range(8):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*batch(step)) / 2
            loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 4 == 1)
            losses.append(float(loss.detach()))
        return losses

    expected, actual = same(use)
    close(actual, expected, torch.bfloat16)


@pytest.mark.parametrize(
    "frozen",
    [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("layers.0", "norms")), "embed"],
)
def test_frozen_weights(frozen: str) -> None:
    def use(model: Decoder) -> list[float]:
        for name, parameter in model.named_parameters():
            if name.startswith(frozen) or (frozen == "norms" and "norm" in name):
                parameter.requires_grad_(False)
        kept = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        losses = train(model)
        for name, value in kept.items():
            assert torch.equal(model.get_parameter(name), value)
            assert model.get_parameter(name).grad is None
        return losses

    expected, actual = same(use, tied=False)
    close(actual, expected, torch.bfloat16)


class Custom(torch.autograd.Function):
    """Scales its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        del ctx
        return grad * 3


def test_a_custom_gradient_is_kept() -> None:
    """In a norm and an MLP with the usual outputs."""

    def changed(model: Decoder) -> Decoder:
        for module in (model.norm, model.layers[0].mlp):
            kind = type(module)

            def forward(self: Any, x: Tensor, base: Any = kind.forward) -> Any:
                return base(self, Custom.apply(x))

            module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
        return model

    plain, fused = changed(decoder()), changed(decoder())
    stepscope.accelerate(fused, compile=COMPILED)
    close(train(fused), train(plain), torch.bfloat16)


def test_labels_that_are_ignored_and_logits_that_are_read() -> None:
    class Reading(Decoder):
        def forward(self, tokens: Tensor, targets: Tensor) -> Any:
            x = self.norm(self.embed(tokens))
            logits = self.head(x)
            shifted = logits[:, :-1].reshape(-1, VOCAB)
            loss = nn.functional.cross_entropy(shifted, targets[:, 1:].reshape(-1))
            return loss, logits

    tokens, targets = batch(2)
    targets[0, 1:3] = -100
    results = []
    for fuse in (False, True):
        torch.manual_seed(0)
        model = Reading()
        if fuse:
            stepscope.accelerate(model, compile=COMPILED)
        loss, logits = model(tokens, targets)
        (loss + logits.float().square().mean()).backward()
        results.append((loss.detach(), model.head.weight.grad))
    torch.testing.assert_close(*results)


def test_a_model_in_data_parallel_on_one_device() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    wrapped, results = nn.DataParallel(model), []
    for accelerate in (False, True):
        if accelerate:
            report = stepscope.accelerate(wrapped, compile=COMPILED)
        model.zero_grad()
        wrapped(x).pow(3).mean().backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    assert report.is_compiled


def test_data_parallel_on_several_devices_is_refused() -> None:
    """Its replicas would run the forward that is bound to the original."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    wrapped = nn.DataParallel(model)
    wrapped.device_ids = [0, 1]
    with pytest.raises(UsageError, match="use DistributedDataParallel"):
        stepscope.accelerate(wrapped)
    report = stepscope.accelerate(model, dtype=torch.bfloat16, compile=COMPILED)
    with pytest.raises(UsageError, match="cannot replicate an accelerated"):
        model._replicate_for_data_parallel()
    copied = copy.deepcopy(model)
    with pytest.raises(UsageError, match="cannot replicate an accelerated"):
        copied._replicate_for_data_parallel()
    report.undo()
    replica = model[1]._replicate_for_data_parallel()
    assert "forward" not in vars(replica)
    replica = model._replicate_for_data_parallel()
    assert "forward" not in vars(replica)
