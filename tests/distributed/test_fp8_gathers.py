"""`accelerate(dtype="fp8", compile=True)` with FSDP2: weights are gathered in FP8."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import stepscope
from fp8_on_cpu import pretend_fp8
from sharded_cases import FIXED
from stepscope.acceleration import accelerate as acceleration
from stepscope.errors import StepscopeError
from stepscope.parallel import Limits, World, launch

LIMITS = Limits(start=120.0, step=300.0, beat=120.0, total=900.0)
WIDTH, HIDDEN, VOCAB, RANKS, STEPS = 32, 64, 48, 2, 12
MATRICES = 2 * WIDTH * HIDDEN + WIDTH * WIDTH
"""Numbers of a block that are gathered in FP8."""
OTHERS = 2 * WIDTH + 6 * WIDTH
"""Numbers of a block in bfloat16: a norm, and a layer whose shape FP8 does not take."""


_GATHER = "all_gather_into_tensor"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.odd = nn.Linear(WIDTH, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.down(functional.silu(self.up(x))) + self.odd(x).mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(VOCAB // 4, (2, 8), generator=generator)
    return tokens, tokens


class Sent:
    """What a rank gathers and reduces, by the names of the collectives."""

    def __init__(self) -> None:
        self.gathered: list[tuple[torch.dtype, int]] = []
        self.reduced: list[int] = []

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        reduce = dist.all_reduce
        # Its name in torch 2.13, or in 2.11.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else _GATHER
        gather = getattr(dist, name)

        def watched_gather(*tensors: Tensor, **words: Any) -> Any:
            output = words["output_tensor"] if "output_tensor" in words else tensors[0]
            self.gathered.append((output.dtype, output.nbytes))
            return gather(*tensors, **words)

        def watched_reduce(tensor: Tensor, *words: Any, **more: Any) -> Any:
            if more.get("op", words[0] if words else None) == dist.ReduceOp.MAX:
                self.reduced.append(tensor.numel())
            return reduce(tensor, *words, **more)

        patch.setattr(dist, name, watched_gather)
        patch.setattr(dist, "all_reduce", watched_reduce)


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"mp_policy": POLICY},
    "kept": {"mp_policy": POLICY, "reshard_after_forward": False},
    "autocast": {},
    "checkpointed": {"mp_policy": POLICY, "checkpoints": True},
}


def sharded(checkpoints: bool = False, **options: Any) -> Any:
    model = Model()
    for at, block in enumerate(model.blocks):
        if checkpoints:
            model.blocks[at] = block = checkpoint_wrapper(block)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def steps(model: Any, optimizer: Any, world: World, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        world.step(number)
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*batch(2 * number + part, world.rank)) / 2
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def emulate() -> pytest.MonkeyPatch:
    patch = pytest.MonkeyPatch()
    os.environ.pop("TRITON_INTERPRET", None)
    pretend_fp8(patch)
    patch.setattr(acceleration, "unavailable", lambda *_: None)
    return patch


def train_all(world: World) -> dict[str, list[list[float]]]:
    """Train each form in bfloat16 and in FP8."""
    emulate()
    found: dict[str, list[list[float]]] = {}
    for name, options in FORMS.items():
        for dtype in (torch.bfloat16, "fp8"):
            model = sharded(**options)
            optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
            report = stepscope.accelerate(model, optimizer, dtype=dtype, compile=FIXED)
            if report.fp8 is not None:
                report.fp8.always = True
            losses = steps(model, optimizer, world, range(STEPS))
            found.setdefault(name, []).append(losses)
    return found


@pytest.mark.skipif(not os.environ.get("STEPSCOPE_TEST_ALL"), reason="STEPSCOPE_TEST_ALL=1")
def test_all_forms_train_as_in_bfloat16() -> None:
    for rank in launch(train_all, ranks=RANKS, limits=LIMITS):
        for name, (expected, losses) in rank.items():
            assert losses == pytest.approx(expected, rel=0.04), name


def train(world: World) -> dict[str, Any]:
    patch = emulate()
    plain = sharded(**FORMS["bfloat16"])
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), 3e-3), world, range(STEPS))
    model = sharded(**FORMS["bfloat16"])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    report = stepscope.accelerate(model, optimizer, dtype="fp8", compile=FIXED)
    assert report.fp8 is not None
    report.fp8.always = True
    losses = steps(model, optimizer, world, range(STEPS - 1))
    model.load_state_dict(model.state_dict())
    sent = Sent()
    with patch.context() as watched:
        sent.watch(watched)
        losses += steps(model, optimizer, world, range(STEPS - 1, STEPS))
    text = str(report)
    weight = model.blocks[0].up.weight
    whole = weight.full_tensor().detach()
    model.blocks[0].unshard()
    gathered = model.blocks[0].up.weight.detach().clone()
    model.blocks[0].reshard()
    report.undo()
    model.blocks[0].unshard()
    exact = torch.equal(model.blocks[0].up.weight, whole.bfloat16())
    model.blocks[0].reshard()
    again = stepscope.accelerate(model, dtype="fp8", compile=FIXED)
    weight._local_tensor = weight._local_tensor.detach().view_as(weight._local_tensor)
    with pytest.raises(StepscopeError, match="were replaced"):
        model(*batch(0, world.rank))
    del again
    return {
        "expected": expected, "losses": losses, "report": text, "gathered": sent.gathered,
        "reduced": sent.reduced, "fp8": gathered, "whole": whole, "exact": exact,
    }  # fmt: skip


def test_weights_are_gathered_in_fp8_by_scales_that_ranks_share() -> None:
    ranks = launch(train, ranks=RANKS, limits=LIMITS)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(rank["expected"], rel=0.03)
        assert rank["losses"][-1] < 0.9 * rank["losses"][0]
        assert "fp8 all-gather        6 weights" in rank["report"]
        assert "fp8                   3 × a linear layer" in rank["report"]
        blocks = [sent for sent in rank["gathered"] if sent[0] == torch.uint8]
        # Two blocks, in the forward and the backward pass of two micro-batches.
        assert len(blocks) == 8
        assert {size for _, size in blocks} == {MATRICES + 2 * OTHERS}
        # One all-reduce for the scales of all weights, in the first micro-batch only.
        assert rank["reduced"] == [6]
        difference = (rank["fp8"].float() - rank["whole"]).abs()
        assert bool((difference <= rank["whole"].abs() / 16 + 1e-3).all())
        assert len(rank["fp8"].unique()) < 254
        assert rank["exact"]
        assert torch.equal(rank["fp8"], ranks[0]["fp8"])
