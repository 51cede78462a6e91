"""`stepscope.capture` and `stepscope.TrainStep` as real CUDA graphs, against eager steps."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from stepscope.acceleration.capture import Captured, NotCapturedWarning
from stepscope.optim import FusedAdamW, InBackwardAdamW

STEPS = 20
LR = 2**-8
"""A power of two: the learning rate in a graph is a float32."""

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "fused": lambda ps: torch.optim.AdamW(ps, lr=LR, fused=True),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=LR),
    "adam": lambda ps: torch.optim.Adam(ps, lr=LR, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9),
    "stepscope": lambda ps: FusedAdamW(ps, lr=LR, capturable=True),
    "in backward": lambda ps: InBackwardAdamW(ps, lr=LR),
}
EXACT = ("fused", "adam", "sgd", "stepscope", "in backward")
"""torch's foreach AdamW computes bias corrections in float32 if it is captured."""


class Training:
    """A model with dropout and its step, captured or eager."""

    def __init__(self, optimizer: str = "fused", dropout: float = 0.1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(256), nn.Linear(256, 8)
        ).cuda()
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        torch.cuda.manual_seed(1)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        if not isinstance(self.optimizer, InBackwardAdamW):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def batch(number: int, size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(number)
    x = torch.randn(size, 64, device="cuda", generator=generator)
    return x, torch.randn(size, 8, device="cuda", generator=generator)


def nothing(training: Training, number: int) -> None:
    del training, number


def compare(
    optimizer: str,
    act: Callable[[Training, int], None] = nothing,
    size: Callable[[int], int] = lambda _: 32,
    exact: bool = True,
    dropout: float = 0.1,
) -> Captured:
    """Train eagerly and captured, one after the other, and compare losses and weights."""
    runs = []
    captured: Captured | None = None
    for graph in (False, True):
        training = Training(optimizer, dropout)
        function: Any = training.step
        if graph:
            function = captured = stepscope.capture(training.step)
        losses = []
        for number in range(STEPS):
            act(training, number)
            losses.append(function(*batch(number, size(number))).detach().clone())
        runs.append((losses, list(training.model.parameters())))
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(runs[1][0], runs[0][0], **tolerance)
    torch.testing.assert_close(runs[1][1], runs[0][1], **tolerance)
    assert captured is not None
    return captured


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_equal_those_of_eager_steps(optimizer: str) -> None:
    captured = compare(optimizer, exact=optimizer in EXACT)
    assert captured.reasons == []
    assert captured.statistics.eager == 3
    assert captured.statistics.replayed == STEPS - 3


@pytest.mark.parametrize("optimizer", ["fused", "foreach", "stepscope", "in backward"])
def test_a_scheduled_learning_rate_reaches_the_graph(optimizer: str) -> None:
    def act(training: Training, number: int) -> None:
        training.optimizer.param_groups[0]["lr"] = LR * 2.0 ** -(number // 3)

    captured = compare(optimizer, act, exact=optimizer in EXACT)
    assert captured.statistics.captured == 1
    assert captured.statistics.replayed == STEPS - 3


@pytest.mark.parametrize("optimizer", ["fused", "stepscope", "in backward"])
def test_another_shape_has_its_own_graph(optimizer: str) -> None:
    captured = compare(optimizer, size=lambda number: 32 if number % 2 else 48)
    assert captured.graphs == 2
    # The first capture moves the step counts to the device, so the other shape warms up once more.
    assert captured.statistics.replayed in (STEPS - 6, STEPS - 7)


def test_eval_in_the_middle() -> None:
    def act(training: Training, number: int) -> None:
        training.model.train(not 6 <= number < 12)

    captured = compare("fused", act)
    assert captured.graphs == 2


@pytest.mark.parametrize("optimizer", ["fused", "stepscope"])
def test_weights_written_by_hand_are_honored(optimizer: str) -> None:
    def act(training: Training, number: int) -> None:
        if number in (7, 14):
            with torch.no_grad():
                training.model[0].weight.copy_(torch.full_like(training.model[0].weight, 0.01))

    captured = compare(optimizer, act)
    assert captured.statistics.captured == 2


def test_replaced_data_captures_again() -> None:
    def act(training: Training, number: int) -> None:
        if number == 8:
            weight = training.model[0].weight
            weight.data = torch.full_like(weight, 0.01)

    captured = compare("fused", act)
    assert captured.statistics.captured == 2


def test_loaded_optimizer_state_captures_again() -> None:
    def act(training: Training, number: int) -> None:
        if number == 8:
            training.optimizer.load_state_dict(training.optimizer.state_dict())

    assert compare("fused", act).statistics.captured == 2


def test_a_seed_set_between_steps_is_honored() -> None:
    def act(_: Training, number: int) -> None:
        if number in (5, 11):
            torch.manual_seed(number)

    assert compare("fused", act, dropout=0.5).statistics.captured == 1


def test_random_numbers_between_steps_follow_the_sequence_of_eager_steps() -> None:
    drawn: list[Tensor] = []

    def act(_: Training, number: int) -> None:
        del number
        drawn.append(torch.rand(4, device="cuda"))

    compare("fused", act, dropout=0.5)
    torch.testing.assert_close(drawn[:STEPS], drawn[STEPS:], rtol=0, atol=0)


def test_a_host_read_runs_eagerly_with_the_reason_and_leaves_the_device_sound() -> None:
    expected = Training()
    losses = [expected.step(*batch(number)).item() for number in range(STEPS)]
    training = Training()

    def reads(x: Tensor, y: Tensor) -> Tensor:
        loss = training.step(x, y)
        if loss.item() < 0:
            raise AssertionError("a square is not negative")
        return loss

    captured = stepscope.capture(reads)
    with pytest.warns(NotCapturedWarning, match="captur") as told:
        ours = [captured(*batch(number)).item() for number in range(STEPS)]
    assert ours == losses
    assert len(told) == 1
    assert captured.statistics.captured == 0
    # Random numbers, streams and later captures work.
    torch.rand(3, device="cuda")
    torch.cuda.synchronize()
    assert compare("fused").statistics.replayed == STEPS - 3


def test_a_data_dependent_shape_runs_eagerly() -> None:
    captured = stepscope.capture(lambda x: x[x > 0].sum())
    x = torch.randn(100, device="cuda")
    with pytest.warns(NotCapturedWarning, match="captur"):
        results = [captured(x) for _ in range(5)]
    assert all(torch.equal(result, x[x > 0].sum()) for result in results)


def test_an_exception_leaves_the_weights_and_later_steps_sound() -> None:
    training, reference = Training(), Training()

    def step(x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] != 64:
            raise ValueError("64 features expected")
        return training.step(x, y)

    captured = stepscope.capture(step)
    losses = [captured(*batch(number)) for number in range(6)]
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    with pytest.raises(ValueError, match="64 features"):
        captured(torch.ones(2, 3, device="cuda"), torch.ones(2, 8, device="cuda"))
    torch.testing.assert_close(list(training.model.parameters()), before, rtol=0, atol=0)
    losses += [captured(*batch(number)) for number in range(6, 10)]
    torch.cuda.manual_seed(1)
    expected = [reference.step(*batch(number)).detach() for number in range(10)]
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)


def test_results_are_not_overwritten_and_keep_no_history() -> None:
    training = Training()
    captured = stepscope.capture(training.step)
    results = [captured(*batch(number)) for number in range(8)]
    assert not any(result.requires_grad for result in results)
    assert len({result.item() for result in results}) == 8


def test_a_batch_on_the_host_is_refused_with_the_reason() -> None:
    training = Training()

    def step(x: Tensor, y: Tensor) -> Tensor:
        return training.step(x.cuda(), y.cuda())

    captured = stepscope.capture(step)
    x, y = batch(0)
    with pytest.warns(NotCapturedWarning, match="several devices"):
        captured(x.cpu(), y.cpu())


def test_memory_is_bounded_and_returned() -> None:
    training = Training()
    captured = stepscope.capture(training.step, pool_bytes=1)
    with pytest.warns(NotCapturedWarning, match="pool_bytes=1"):
        losses = [captured(*batch(number)) for number in range(6)]
    assert len(losses) == 6
    assert captured.graphs == 0
    del captured, training, losses
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        training = Training()
        captured = stepscope.capture(training.step)
        losses = [captured(*batch(number)) for number in range(6)]
        assert captured.held_bytes() > 0
        captured.reset()
        del captured, training, losses
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (8 << 20)


def test_an_exception_in_a_capture_leaves_later_captures_sound() -> None:
    """The device had no part in it, so that torch completes the graph of the failed capture."""

    def fails(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            x.sum()
            raise RuntimeError("not while capturing")
        return x + 1

    refused = stepscope.capture(fails)
    x = torch.ones(64, device="cuda")
    with pytest.warns(NotCapturedWarning, match="not while capturing"):
        _ = [refused(x) for _ in range(5)]
    for _ in range(2):
        training = Training()
        captured = stepscope.capture(training.step)
        for number in range(6):
            captured(*batch(number))
        assert captured.graphs == 1
    torch.cuda.empty_cache()


def test_failed_captures_do_not_hold_memory() -> None:
    def reads(x: Tensor) -> Tensor:
        large = x.repeat(1 << 20)
        return x + large.sum().item()

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            captured = stepscope.capture(reads)
            for _ in range(5):
                captured(torch.ones(64, device="cuda"))
            del captured
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (8 << 20)


def test_failed_captures_beside_other_graphs_do_not_hold_memory() -> None:
    def reads_if_long(x: Tensor) -> Tensor:
        large = x.repeat(1 << 20)
        return x + large.sum() if len(x) < 64 else x + large.sum().item()

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured = stepscope.capture(reads_if_long)
        for length in (32, 64, 32):
            for _ in range(5):
                out = captured(torch.ones(length, device="cuda"))
            assert torch.equal(out, torch.full((length,), 1.0 + (length << 20), device="cuda"))
        assert captured.graphs
        del captured, out
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (8 << 20)


def test_more_graphs_share_their_memory() -> None:
    training = Training()
    captured = stepscope.capture(training.step)
    for number in range(5):
        captured(*batch(number, 4096))
    first = captured.held_bytes()
    for size in (4000, 3500):
        for number in range(5):
            captured(*batch(number, size))
    assert captured.graphs == 3
    assert captured.held_bytes() < 2 * first


TRAIN_STEPS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 0.1},
    {"accumulate": 3, "max_grad_norm": 0.1},
    {"dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", TRAIN_STEPS, ids=str)
@pytest.mark.parametrize("optimizer", ["fused", "foreach", "sgd", "stepscope"])
def test_a_train_step_equals_itself_without_graphs(optimizer: str, options: dict[str, Any]) -> None:
    runs = []
    for graph in ("off", "on"):
        training = Training(optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            training.optimizer, lambda number: 2.0 ** -(number // 4)
        )
        step = stepscope.TrainStep(
            training.model,
            training.optimizer,
            loss_fn=lambda model, pair: (model(pair[0]) - pair[1]).square().mean(),
            scheduler=scheduler,
            graph=graph,  # type: ignore[arg-type]
            **options,
        )
        runs.append([step(batch(number)).clone() for number in range(36)])
    exact = {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(
        runs[1], runs[0], **exact if optimizer in EXACT else {"rtol": 1e-3, "atol": 1e-5}
    )
    assert step.captured.statistics.replayed > 10


@pytest.mark.parametrize("optimizer", ["fused", "sgd"])
def test_a_scaler_in_a_train_step(optimizer: str) -> None:
    runs = []
    for graph in ("off", "auto"):
        training = Training(optimizer)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=5)
        step = stepscope.TrainStep(
            training.model,
            training.optimizer,
            loss_fn=lambda model, pair: (model(pair[0]).float() - pair[1]).square().mean(),
            scaler=scaler,
            dtype=torch.float16,
            max_grad_norm=1.0,
            graph=graph,  # type: ignore[arg-type]
        )
        losses = []
        for number in range(STEPS):
            x, y = batch(number)
            if number == 9:
                x.fill_(float("inf"))
            losses.append(step((x, y)).clone())
        runs.append((losses, scaler.get_scale()))
    assert runs[0][1] == runs[1][1]
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-3, atol=1e-4, equal_nan=True)
    assert step.captured.statistics.replayed == STEPS - 3
    assert ("grad_scale" in step.explain()) == (optimizer == "sgd")


def test_a_batch_on_the_host_is_moved_by_the_train_step() -> None:
    training = Training()
    step = stepscope.TrainStep(
        training.model,
        training.optimizer,
        loss_fn=lambda model, pair: (model(pair[0]) - pair[1]).square().mean(),
        graph="on",
    )
    losses = [step(tuple(one.cpu() for one in batch(number))) for number in range(6)]
    assert losses[0].is_cuda
    assert step.captured.statistics.replayed == 3


def test_compiled_blocks_can_be_captured() -> None:
    def losses(graph: bool) -> list[Tensor]:
        training = Training(dropout=0.0)
        for block in training.model:
            block.compile()
        function: Any = stepscope.capture(training.step) if graph else training.step
        return [function(*batch(number)).detach() for number in range(8)]

    torch.testing.assert_close(losses(True), losses(False), rtol=1e-5, atol=1e-6)


def test_fused_model_with_weight_copies_trains_as_eagerly() -> None:
    from stepscope.attention import attention
    from stepscope.model import SIZES, TransformerLM, with_overrides

    config = with_overrides(SIZES["tiny"]["mini"], context=64)
    tokens = torch.randint(config.vocab, (STEPS, 2, 65), device="cuda")

    def run(graph: str, kind: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = TransformerLM(
            config, attention=attention, fused=True, fused_projections=True, device="cuda"
        )
        optimizer = kind(model.parameters(), copies=model.copies)
        step = stepscope.TrainStep(model, optimizer, dtype=torch.bfloat16, graph=graph)  # type: ignore[arg-type]
        losses = []
        for number, row in enumerate(tokens):
            if number == 12:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
            losses.append(step((row[:, :-1], row[:, 1:])))
        return losses

    for kind in (functools.partial(FusedAdamW, capturable=True), InBackwardAdamW):
        torch.testing.assert_close(run("on", kind), run("off", kind), rtol=2e-3, atol=2e-3)
