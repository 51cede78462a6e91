from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepscope.measure.flops import CountingFlops, operator_flops

TOKENS, INPUT, HIDDEN = 3 * 4, 5, 7


def counted(model: nn.RNNBase, dtype: torch.dtype) -> tuple[int, int]:
    """FLOPs of the forward and of the backward over 3 sequences of 4 tokens."""
    model.to(dtype)
    tokens = torch.randn(3, 4, INPUT, dtype=dtype, requires_grad=True)
    # The initial state is multiplied like every other state.
    runs = model.num_layers * (2 if model.bidirectional else 1)
    state = torch.randn(runs, 3, HIDDEN, dtype=dtype, requires_grad=True)
    with CountingFlops() as forward:
        given = (state, state.clone()) if isinstance(model, nn.LSTM) else state
        loss = model(tokens, given)[0].sum()
    with CountingFlops() as backward:
        loss.backward()
    return forward.counted.total, backward.counted.total


def weights(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters() if one.dim() == 2)


@pytest.mark.parametrize(
    ("layers", "bidirectional"),
    [(1, False), (2, False), (1, True)],
    ids=["one", "two", "bidirectional"],
)
def test_a_recurrent_layer_multiplies_every_token_by_every_weight(
    layers: int, bidirectional: bool
) -> None:
    # float32 is one operator of oneDNN if the CPU supports it, float64 is split into matmuls.
    lstm = nn.LSTM(INPUT, HIDDEN, layers, batch_first=True, bidirectional=bidirectional)
    for dtype in (torch.float32, torch.float64):
        forward, backward = counted(lstm, dtype)
        assert forward == 2 * TOKENS * weights(lstm)
        assert backward == 2 * forward


def test_a_gru_is_counted_like_an_lstm() -> None:
    gru = nn.GRU(INPUT, HIDDEN, batch_first=True)
    forward, backward = counted(gru, torch.float32)
    assert (forward, backward) == (2 * TOKENS * weights(gru), 4 * TOKENS * weights(gru))


def test_the_recurrent_operators_of_cudnn_are_counted_from_their_arguments() -> None:
    gates, projected = 4 * HIDDEN, 3
    layer = [
        torch.empty(gates, INPUT),
        torch.empty(gates, projected),
        torch.empty(gates),
        torch.empty(gates),
        torch.empty(projected, HIDDEN),
    ]
    flops = 2 * TOKENS * (gates * INPUT + gates * projected + projected * HIDDEN)
    tokens, state = torch.empty(4, 3, INPUT), torch.empty(1, 3, projected)
    shape = (2, HIDDEN, projected, 1, False, 0.0, True, False)
    buffer = torch.empty(1000)

    forward = (tokens, layer, 5, buffer, state, state, *shape, [], None)
    ran = torch.ops.aten._cudnn_rnn.default
    assert operator_flops(ran, forward, {}, None) == flops

    packed = (tokens.flatten(0, 1), *forward[1:])
    assert operator_flops(ran, packed, {}, None) == flops

    output = torch.empty(4, 3, projected)
    backward = (
        tokens,
        layer,
        5,
        buffer,
        state,
        state,
        output,
        output,
        None,
        None,
        *shape,
        [],
        None,
        torch.empty(9),
        [True] * 4,
    )
    assert operator_flops(torch.ops.aten._cudnn_rnn_backward.default, backward, {}, None) == (
        2 * flops
    )


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["as is", "hooks", "reentrant"])
def test_recomputation_of_a_checkpoint_is_counted_separately(reentrant: bool | None) -> None:
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU())
    x = torch.randn(4, 8, requires_grad=True)
    with CountingFlops() as counting:
        result = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        result.sum().backward()
    forward = 2 * 4 * weights(block)
    assert counting.counted.total == 3 * forward
    assert counting.counted.again == (0 if reentrant is None else forward)


def test_recomputation_of_nested_checkpoints_is_counted_separately() -> None:
    inner = [nn.Linear(8, 8) for _ in range(2)]

    def outer(x: torch.Tensor) -> torch.Tensor:
        for layer in inner:
            x = checkpoint(layer, x, use_reentrant=False).relu()
        return x

    x = torch.randn(4, 8, requires_grad=True)
    with CountingFlops() as counting:
        checkpoint(outer, x, use_reentrant=False).sum().backward()
    assert counting.counted.total == 3 * 2 * 4 * sum(map(weights, inner))
    assert counting.counted.again > 0


def test_a_backward_that_is_differentiated_is_not_recomputation() -> None:
    model, x = nn.Linear(8, 1), torch.randn(4, 8, requires_grad=True)
    with CountingFlops() as counting:
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert counting.counted.again == 0


def test_causal_attention_counts_half() -> None:
    heads = torch.zeros(1, 2, 8, 4)
    for causal in (False, True):
        with CountingFlops() as mode:
            nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=causal)
        assert mode.counted.total == 2 * 2 * 2 * 8 * 8 * 4 // (2 if causal else 1)


@pytest.mark.parametrize(("precision", "name"), [("tf32", "tf32"), ("ieee", "float32")])
def test_the_dtype_of_float32_matmuls_where_a_program_sets_fp32_precision(
    precision: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with CountingFlops() as counting:
        torch.ones(4, 4) @ torch.ones(4, 4)
    try:
        matmul.fp32_precision = precision
        assert counting.counted.main_format() == name
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_of_fused_attention_is_twice_its_forward(causal: bool) -> None:
    q, k, v = (torch.randn(4, 4, 128, 48, requires_grad=True) for _ in range(3))
    with CountingFlops() as forward:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with CountingFlops() as backward:
        out.sum().backward()
    assert forward.counted.total == 4 * 4 * 4 * 128 * 128 * 48 // (2 if causal else 1)
    assert backward.counted.total == 2 * forward.counted.total


def test_different_head_dimensions_are_counted() -> None:
    q, k = (torch.empty(2, 3, 8, 16, device="meta") for _ in range(2))
    v = torch.empty(2, 3, 8, 32, device="meta")
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    given = (torch.empty_like(v), q, k, v, v, q, None, None, 8, 8, 0.0, False, q, q)
    expected = 2 * 2 * 3 * 8 * 8 * (2 * 16 + 2 * 32)
    assert operator_flops(backward, given, {}, None) == expected
