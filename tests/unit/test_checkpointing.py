"""Activation checkpointing: equal gradients, and the predicted number of recomputed blocks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UsageError
from stepscope.model import ModelConfig, TransformerLM
from stepscope.model.checkpointing import recomputed_blocks, saved_inputs, segment_sizes

LAYERS = 7
SHAPE = ModelConfig(d_model=16, d_ff=32, n_layers=LAYERS, n_heads=2, vocab=31, context=8)
STRATEGIES = ("1", "2", "3", "16", "4-1", "4-2", "3-2-1", "nested")


def gradients_and_runs(strategy: str) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = TransformerLM(SHAPE, checkpoint=segment_sizes(strategy, LAYERS))
    runs: Counter[int] = Counter()
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: runs.update([number]))
    model(torch.randint(SHAPE.vocab, (2, 8))).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], sum(runs.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_equal_and_blocks_run_as_often_as_predicted(strategy: str) -> None:
    plain, once = gradients_and_runs("no")
    gradients, runs = gradients_and_runs(strategy)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
    assert runs - once == recomputed_blocks(segment_sizes(strategy, LAYERS), LAYERS)


def test_without_gradients_the_output_is_unchanged() -> None:
    model = TransformerLM(SHAPE, checkpoint=(2,))
    plain = TransformerLM(SHAPE)
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(SHAPE.vocab, (1, 8))
    with torch.no_grad():
        assert torch.equal(model(tokens), plain(tokens))


def test_strategies_in_numbers() -> None:
    """For 32 blocks: segment sizes, maximum saved inputs, recomputed block forwards."""
    for strategy, sizes, saved, recomputed in (
        ("no", (), 0, 0),
        ("1", (1,), 32, 32),
        ("8", (8,), 4, 32),
        ("8-1", (8, 1), 11, 60),
        ("nested", (16, 8, 4, 2, 1), 6, 96),
    ):
        assert segment_sizes(strategy, 32) == sizes
        assert saved_inputs(sizes, 32) == saved
        assert recomputed_blocks(sizes, 32) == recomputed


@given(st.integers(1, 200))
def test_nested_saves_few_inputs_and_recomputes_often(layers: int) -> None:
    sizes = segment_sizes("nested", layers)
    depth = (layers - 1).bit_length()
    assert sizes[-1] == 1
    assert len(sizes) == max(1, depth)
    assert saved_inputs(sizes, layers) <= depth + 1
    assert recomputed_blocks(sizes, layers) <= layers * (depth + 1)


@pytest.mark.parametrize("strategy", ["", "0", "-1", "1-2", "2-2", "4-0", "half", "4.", "²"])
def test_an_invalid_strategy_raises(strategy: str) -> None:
    with pytest.raises(UsageError, match="checkpoint"):
        segment_sizes(strategy, 8)
