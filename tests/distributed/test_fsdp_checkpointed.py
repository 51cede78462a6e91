"""Checkpointed segments under FSDP free as much as in one process and compute the same."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from ranked import LIMITS, adamw, max_difference
from stepscope.measure.flops import CountingFlops
from stepscope.measure.tensors import TensorBytes
from stepscope.model import SIZES, TransformerLM, cross_entropy, with_overrides
from stepscope.parallel import FSDP, World, launch

CONFIG = with_overrides(SIZES["tiny"]["tiny"], context=16, n_layers=2)


Facts = tuple[dict[str, Tensor], int, tuple[int, int]]


def trained(world: World, tokens: Tensor) -> list[Facts]:
    return [checkpointed(world, tokens, every, 2 * n) for n, every in enumerate(((), (1,)))]


def checkpointed(world: World, tokens: Tensor, every: tuple[int, ...], first: int) -> Facts:
    """Parameters after two steps, bytes that the first forward saves for its backward (in later
    ones a weight may have been prefetched), and the FLOPs of the last step."""
    torch.manual_seed(0)
    model = FSDP(TransformerLM(CONFIG, dtype=torch.float64, checkpoint=every))
    optimizer = adamw(model)
    row, saved_bytes = tokens[world.rank : world.rank + 1], 0
    for number in range(2):
        world.step(first + number)
        with TensorBytes(torch.device("cpu")) as counted:
            loss = cross_entropy(model(row[:, :-1]), row[:, 1:])
            gc.collect()
            saved_bytes = saved_bytes or counted.now
        with CountingFlops() as backward:
            loss.backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    flops = backward.counted
    return model.gather_full_params(), saved_bytes, (flops.total, flops.again)


def test_checkpointed_blocks_free_as_much_as_in_one_process() -> None:
    tokens = torch.randint(CONFIG.vocab, (2, 17), generator=torch.Generator().manual_seed(1))
    ranks = launch(trained, (tokens,), ranks=2, limits=LIMITS)
    saved_bytes = []
    for every in ((), (1,)):
        module = TransformerLM(CONFIG, dtype=torch.float64, checkpoint=every)
        with TensorBytes(torch.device("cpu")) as counted:
            loss = cross_entropy(module(tokens[:1, :-1]), tokens[:1, 1:])
            gc.collect()
            saved_bytes.append(counted.now)
        del loss
    freed = saved_bytes[0] - saved_bytes[1]
    assert freed > 0
    for (expected, all_bytes, once), (params, few_bytes, twice) in ranks:
        assert max_difference(params, expected) == 0.0
        assert all_bytes - few_bytes == pytest.approx(freed, rel=0.02)
        assert (once[0], once[1]) == (twice[0], 0)
        assert twice[1] > 0
