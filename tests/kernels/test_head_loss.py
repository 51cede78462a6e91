"""Head and cross-entropy without materialized logits, in small models of our own."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_joined_model import DEVICE
from torch import Tensor, nn
from torch.nn import functional

from accuracy import hold_to_policy
from stepscope.acceleration.forward_registry import add_layer
from stepscope.acceleration.pieces import deferred_logits
from stepscope.acceleration.pieces.deferred_logits import DeferredLogits
from stepscope.acceleration.pieces.head_loss import find, with_deferred_logits
from stepscope.kernels.weight_copies import WeightCopies

VOCAB, D, BATCH, TIME = 131, 24, 3, 10
Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "nanoGPT": lambda logits, y: functional.cross_entropy(
        logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1
    ),
    "shifted": lambda logits, y: functional.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, VOCAB).float(),
        y[..., 1:].reshape(-1),
        ignore_index=-1,
    ),
    "shifted rows": lambda logits, y: nn.CrossEntropyLoss(ignore_index=-1)(
        logits[:, :-1].reshape(-1, VOCAB), y[:, 1:].flatten()
    ),
    "classes second": lambda logits, y: functional.cross_entropy(
        logits.transpose(1, 2), y, ignore_index=-1, reduction="sum"
    ),
    "permuted": lambda logits, y: functional.cross_entropy(
        logits.permute(0, 2, 1), y, ignore_index=-1
    ),
    "flattened": lambda logits, y: functional.cross_entropy(
        input=logits.to(torch.float32).flatten(0, 1), target=y.flatten(), ignore_index=-1
    ),
    "view by rows": lambda logits, y: functional.cross_entropy(
        logits.view(BATCH * TIME, -1), y.flatten(), ignore_index=-1
    ),
}
MATERIALIZING: dict[str, Loss] = {
    "label smoothing": lambda logits, y: functional.cross_entropy(
        logits.flatten(0, 1), y.flatten(), ignore_index=-1, label_smoothing=0.1
    ),
    "class weights": lambda logits, y: functional.cross_entropy(
        logits.flatten(0, 1),
        y.flatten(),
        torch.linspace(0.5, 1, VOCAB, device=y.device, dtype=logits.dtype),
        ignore_index=-1,
    ),
    "no reduction": lambda logits, y: functional.cross_entropy(
        logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none"
    ).mean(),
    "soft-capping": lambda logits, y: functional.cross_entropy(
        (torch.tanh(logits / 3.0) * 3.0).flatten(0, 1), y.flatten(), ignore_index=-1
    ),
    "scaled": lambda logits, y: functional.cross_entropy(
        (0.5 * logits).flatten(0, 1), y.flatten(), ignore_index=-1
    ),
    "written in place": lambda logits, y: functional.cross_entropy(
        _masked(logits).flatten(0, 1), y.flatten(), ignore_index=-1
    ),
    "wrong view": lambda logits, y: functional.cross_entropy(
        logits.reshape(-1, VOCAB // 131 * 131)[:, :-1], y.flatten().clamp(max=VOCAB - 2),
        ignore_index=-1,
    ),
    "transposed twice": lambda logits, y: functional.cross_entropy(
        logits.mT.mT.flatten(0, 1), y.flatten(), ignore_index=-1
    ),
    "log softmax": lambda logits, y: functional.nll_loss(
        functional.log_softmax(logits, -1).flatten(0, 1), y.flatten(), ignore_index=-1
    ),
}  # fmt: skip


def _masked(logits: Tensor) -> Tensor:
    logits[..., 5:9] = -2.0
    return logits


class Decoder(nn.Module):
    """A language model that computes its loss itself."""

    def __init__(self, loss: Loss, tied: bool = True) -> None:
        super().__init__()
        self.loss = loss
        self.embedding = nn.Embedding(VOCAB, D)
        self.layer = nn.Linear(D, D)
        self.head = nn.Linear(D, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.layer(self.embedding(tokens))))
        if targets is None:
            return logits
        return logits, self.loss(logits, targets)


def decoder(loss: Loss, dtype: torch.dtype = torch.float32, **how: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(loss, **how).to(DEVICE, dtype)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (BATCH, TIME), generator=generator)
    targets = torch.randint(0, VOCAB, (BATCH, TIME), generator=generator)
    targets[0, 2:5] = -1
    return tokens.to(DEVICE), targets.to(DEVICE)


def replaced(model: nn.Module, copies: WeightCopies | None = None) -> nn.Module:
    replacements, left = find(model, copies)
    assert not left
    assert replacements
    for one in replacements:
        add_layer(one.module, one.forward, None)
    return model


def results(model: nn.Module) -> dict[str, Tensor]:
    _, loss = model(*batch())
    loss.backward()
    gradients = {f"d {name}": one.grad for name, one in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


@pytest.fixture
def fused_losses(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The fused losses that were computed."""
    losses: list[Tensor] = []
    function = deferred_logits.linear_cross_entropy

    def noted(*arguments: Any, **options: Any) -> Tensor:
        losses.append(function(*arguments, **options))
        return losses[-1]

    monkeypatch.setattr(deferred_logits, "linear_cross_entropy", noted)
    return losses


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_loss_and_gradients_hold_to_the_policy(
    loss: Loss, tied: bool, fused_losses: list[Tensor]
) -> None:
    ours = results(replaced(decoder(loss, tied=tied), WeightCopies()))
    assert len(fused_losses) == 1
    exact = results(decoder(loss, torch.float64, tied=tied))
    hold_to_policy(exact, results(decoder(loss, tied=tied)), ours)


@pytest.mark.parametrize("loss", MATERIALIZING.values(), ids=MATERIALIZING)
def test_other_uses_compute_exactly_the_original(loss: Loss, fused_losses: list[Tensor]) -> None:
    ours = results(replaced(decoder(loss)))
    assert not fused_losses
    theirs = results(decoder(loss))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_logits_are_computed_when_they_are_read() -> None:
    model = replaced(decoder(LOSSES["nanoGPT"]))
    expected, _ = decoder(LOSSES["nanoGPT"])(*batch())
    logits, _ = model(*batch())
    assert isinstance(logits, DeferredLogits)
    assert (logits.shape, logits.dtype, logits.ndim) == (expected.shape, torch.float32, 3)
    assert len(logits) == BATCH
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(torch.softmax(logits, -1), torch.softmax(expected, -1))
    assert torch.equal(2 * logits + logits, 3 * expected)
    assert bool((logits == expected).all())
    assert torch.equal(logits[0, 1], expected[0, 1])
    assert torch.equal(torch.cat([logits, expected]), torch.cat([expected, expected]))
    assert torch.equal(pickle.loads(pickle.dumps(logits.detach())), expected.detach())
    with torch.no_grad():
        assert model(*batch())[0].grad_fn is None
    logits, loss = model(*batch())
    (loss + logits.square().mean()).backward()
    plain = decoder(LOSSES["nanoGPT"])
    logits, loss = plain(*batch())
    (loss + logits.square().mean()).backward()
    gradients = [[one.grad for one in each.parameters()] for each in (model, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_logits_that_the_program_reads_are_no_longer_deferred(fused_losses: list[Tensor]) -> None:
    model = replaced(decoder(LOSSES["nanoGPT"]))
    for _ in range(6):
        logits, _ = model(*batch())
        logits.argmax(-1)
    assert len(fused_losses) < 4
    assert isinstance(model(*batch())[0], Tensor)


def test_reading_logits_after_the_weights_have_changed_raises() -> None:
    model = replaced(decoder(LOSSES["nanoGPT"]))
    logits, loss = model(*batch())
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="before the optimizer's step"):
        logits.sum()


def test_evaluation_and_a_forward_without_a_loss_are_the_original(
    fused_losses: list[Tensor],
) -> None:
    model, plain = replaced(decoder(LOSSES["nanoGPT"])), decoder(LOSSES["nanoGPT"])
    tokens, targets = batch()
    logits = model(tokens)
    assert isinstance(logits, Tensor)
    assert torch.equal(logits, plain(tokens))
    model.eval()
    for actual, expected in zip(model(tokens, targets), plain(tokens, targets), strict=True):
        assert isinstance(actual, Tensor)
        assert torch.equal(actual, expected)
    model.train()
    with torch.no_grad():
        assert isinstance(model(tokens, targets)[0], Tensor)
    assert not fused_losses


def test_hooks_on_the_head_get_tensors(fused_losses: list[Tensor]) -> None:
    model: Any = replaced(decoder(LOSSES["nanoGPT"]))
    seen: list[Any] = []
    handle = model.head.register_forward_hook(lambda *call: seen.append(call[-1]))
    model(*batch())
    assert isinstance(seen[0], Tensor)
    assert not fused_losses
    handle.remove()
    model(*batch())
    assert len(fused_losses) == 1


def test_weights_that_change_between_steps_and_copies(fused_losses: list[Tensor]) -> None:
    model = replaced(decoder(LOSSES["nanoGPT"]), WeightCopies())
    plain = decoder(LOSSES["nanoGPT"])
    for step in range(3):
        for one in (model, plain):
            with torch.no_grad():
                one.get_parameter("embedding.weight").mul_(1 + step / 10)
            one.zero_grad()
        ours, theirs = results(model), results(plain)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
    assert len(fused_losses) == 3


def test_a_copy_runs_its_own_weights() -> None:
    model = replaced(decoder(LOSSES["nanoGPT"]))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("embedding.weight").zero_()
    assert float(results(other)["loss"]) == pytest.approx(torch.tensor(VOCAB).log().item())
    assert model.get_parameter("embedding.weight").grad is None


def test_undo_is_the_removal_of_the_layers() -> None:
    model = decoder(LOSSES["nanoGPT"])
    before = {name: dict(vars(one)) for name, one in model.named_modules()}
    for layer in [add_layer(one.module, one.forward, None) for one in find(model, None)[0]]:
        layer.remove()
    assert {name: dict(vars(one)) for name, one in model.named_modules()} == before
    assert isinstance(model(*batch())[0], Tensor)


def test_torch_compile_runs_the_original(fused_losses: list[Tensor]) -> None:
    model = replaced(decoder(LOSSES["nanoGPT"]))
    expected = results(decoder(LOSSES["nanoGPT"]))
    compiled: Any = torch.compile(model, backend="eager")
    _, loss = compiled(*batch())
    torch.testing.assert_close(loss.detach(), expected["loss"])
    assert not fused_losses


@pytest.mark.parametrize("checkpointed", [False, True])
def test_under_autocast_the_loss_is_float32(checkpointed: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    half = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    losses = []
    for model in (replaced(decoder(LOSSES["nanoGPT"]), WeightCopies()), decoder(LOSSES["nanoGPT"])):
        with torch.autocast(DEVICE, half):
            if checkpointed:
                _, loss = checkpoint(model, *batch(), use_reentrant=False)
            else:
                _, loss = model(*batch())
        loss.backward()
        assert loss.dtype == torch.float32
        losses.append([loss.detach(), *[one.grad for one in model.parameters()]])
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-3)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        value = x * 1
        ctx.save_for_backward(value)
        return value.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (value,) = ctx.saved_tensors
        return grad * 2 * value / value.numel()


def test_a_custom_autograd_function_gets_tensors(fused_losses: list[Tensor]) -> None:
    def loss(logits: Tensor, _: Tensor) -> Tensor:
        return _Squares.apply(logits)  # type: ignore[no-any-return, no-untyped-call]

    plain, fused = results(decoder(loss)), results(replaced(decoder(loss)))
    torch.testing.assert_close(fused, plain)
    assert not fused_losses


def test_a_loss_outside_of_the_model(fused_losses: list[Tensor]) -> None:
    def train(model: Any, deferred: bool) -> list[Tensor]:
        def function() -> Tensor:
            logits = model(batch()[0])
            return functional.cross_entropy(
                logits.view(-1, VOCAB), batch()[1].view(-1), ignore_index=-1
            )

        loss = with_deferred_logits(model, function) if deferred else function()
        loss.backward()
        return [loss.detach(), *[one.grad for one in model.parameters()]]

    plain = train(decoder(LOSSES["nanoGPT"]), False)
    fused = train(replaced(decoder(LOSSES["nanoGPT"])), True)
    torch.testing.assert_close(fused, plain)
    assert len(fused_losses) == 1
    train(replaced(decoder(LOSSES["nanoGPT"])), False)
    assert len(fused_losses) == 1, "outside of the context logits are tensors"


def test_what_is_left_alone() -> None:
    class Low(nn.Linear):
        pass

    def reason(change: Callable[[Any], None]) -> str:
        model = decoder(LOSSES["nanoGPT"])
        change(model)
        replacements, (left,) = find(model, None)
        assert not replacements
        assert (left.piece, left.name) == ("head and loss", "head")
        return left.reason

    def config(**options: float) -> Callable[[Any], None]:
        return lambda model: setattr(model, "config", types.SimpleNamespace(**options))

    assert "Low" in reason(lambda model: setattr(model, "head", Low(D, VOCAB, bias=False)))
    assert "soft-capping" in reason(config(final_logit_softcapping=30.0))
    assert "scaled" in reason(config(logit_scale=0.0625))
    assert "scaled" in reason(config(logits_scaling=8.0))
    assert "replaced" in reason(lambda model: setattr(model, "forward", lambda *_: None))
    without, left = find(nn.Sequential(nn.Linear(4, 4)), None)
    assert not without
    assert not left
