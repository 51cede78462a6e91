"""FLOPs of cuDNN's recurrent layers, which run as one operator, are counted from its arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stepscope.measure.flops import CountingFlops


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_flops_are_tokens_times_weights(kind: type[nn.RNNBase], bidirectional: bool) -> None:
    model = kind(32, 64, 2, batch_first=True, bidirectional=bidirectional).cuda()
    tokens = torch.randn(4, 8, 32, device="cuda", requires_grad=True)
    with CountingFlops() as forward:
        loss = model(tokens)[0].sum()
    with CountingFlops() as backward:
        loss.backward()
    weights = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    assert forward.counted.total == 2 * 4 * 8 * weights
    assert backward.counted.total == 2 * forward.counted.total
