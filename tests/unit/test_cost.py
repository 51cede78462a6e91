"""Cost model against the FLOPs that torch counts and the bytes that autograd saves."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bfloat16_on_cpu import Bfloat16InFloat32
from stepscope.attention import cost as attention_cost
from stepscope.attention import reference_attention
from stepscope.attention.api import attention_with
from stepscope.attention.cost import AttentionShape
from stepscope.errors import UsageError
from stepscope.model import (
    ModelConfig,
    Precision,
    TransformerLM,
    cost,
    cross_entropy,
    find_size,
    precision,
)
from stepscope.optim import AdamW

# All dimensions differ, so that no item of the cost model can be mistaken for another.
# Heads of 64 and 96 tokens: torch's kernels pad neither.
SHAPE = ModelConfig(d_model=128, d_ff=176, n_layers=3, n_heads=2, vocab=97, context=100)
BATCH, SEQ = 4, 96
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class SavedBytes:
    """Bytes of every storage that autograd saves, except known ones and scalars."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._saved: dict[int, torch.Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        # Some kernels save the RNG state of an unused dropout; only that is uint64.
        if tensor.dim() and tensor.dtype != torch.uint64 and address not in self._known:
            self._saved[address] = tensor
        return tensor

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._saved.values())


def saved_by_model(chosen: Precision, attention: str) -> int:
    model = TransformerLM(
        SHAPE,
        attention=attention_with(attention),
        device=DEVICE,
        dtype=getattr(torch, chosen.weights),
        narrow_stream=chosen.narrow_stream,
    )
    tokens, targets = (torch.randint(0, SHAPE.vocab, (BATCH, SEQ), device=DEVICE) for _ in range(2))
    compute = getattr(torch, chosen.compute)
    with (
        Bfloat16InFloat32(),
        SavedBytes([*model.parameters(), *model.buffers()]) as saved_bytes,
        torch.autocast(DEVICE, compute, enabled=chosen.autocast),
    ):
        loss = cross_entropy(model(tokens), targets)
    assert loss.requires_grad
    return saved_bytes.bytes


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "bfloat16-stream", "float16", "bfloat16-pure"]
)
@pytest.mark.parametrize("attention", ["auto", "reference", "tiled", "sdpa", "sdpa_math"])
def test_activation_bytes_match_what_autograd_saves(name: str, attention: str) -> None:
    chosen = precision(name)
    counted = cost.activation_bytes(SHAPE, BATCH, SEQ, chosen, attention, DEVICE)
    assert counted.total == saved_by_model(chosen, attention)


def test_weight_copies_of_autocast_are_a_separate_item() -> None:
    plain = cost.activation_bytes(SHAPE, BATCH, SEQ, precision("float32"), "sdpa")
    mixed = cost.activation_bytes(SHAPE, BATCH, SEQ, precision("bfloat16"), "sdpa")
    matrices = [p for p in TransformerLM(SHAPE, device="meta").parameters() if p.dim() == 2]
    embedding = SHAPE.vocab * SHAPE.d_model
    assert plain.weight_copies == 0
    assert mixed.weight_copies == 2 * (sum(p.numel() for p in matrices) - embedding)


def test_only_naive_attention_saves_quadratic_memory() -> None:
    def grown(attention: str) -> float:
        short, long = (
            cost.activation_bytes(SHAPE, BATCH, seq, precision("float32"), attention).per_block
            for seq in (1024, 4096)
        )
        return long / short

    assert grown("reference") > 8
    assert grown("sdpa") == 4


@pytest.mark.parametrize("size", ["tiny", "mini"])
def test_flops_match_what_torch_counts(size: str) -> None:
    config = find_size(size)
    model = TransformerLM(config, attention=reference_attention, device="meta")
    tokens = torch.zeros(2, 32, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    # Naive attention computes the masked half as well.
    counted = cost.flops(config, 2, 32, causal=False)
    assert counted.forward == forward
    assert counted.backward == counter.get_total_flops()
    assert counted.step == forward + counter.get_total_flops()


def test_causal_halves_only_attention() -> None:
    full = cost.flops(SHAPE, BATCH, 64, causal=False)
    half = cost.flops(SHAPE, BATCH, 64)
    assert half.forward_linear == full.forward_linear
    assert 2 * half.forward_attention == full.forward_attention == 4 * 4 * 64 * 64 * 128 * 3
    assert half.step == half.step_linear + 3 * half.forward_attention


def test_flops_of_a_published_size() -> None:
    # small: 85 M in the matmuls of the layers, 7.68 M in the head
    per_token = cost.flops(find_size("small"), 1, 512).forward_linear / 512
    assert per_token == 2 * (12 * (4 * 768 * 768 + 3 * 768 * 3072) + 768 * 10_000)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bfloat16-pure"])
def test_weights_gradients_and_optimizer_state(name: str) -> None:
    chosen = precision(name)
    model = TransformerLM(SHAPE, dtype=getattr(torch, chosen.weights))
    optimizer = AdamW(model.parameters())
    tokens = torch.randint(0, SHAPE.vocab, (1, 8))
    compute = getattr(torch, chosen.compute)
    with torch.autocast("cpu", compute, enabled=chosen.autocast):
        cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    state = [t for s in optimizer.state.values() for key, t in s.items() if key != "step"]
    gradients = [p.grad for p in model.parameters()]
    assert cost.weight_bytes(SHAPE, chosen) == sum(p.nbytes for p in model.parameters())
    assert cost.weight_bytes(SHAPE, chosen) == sum(g.nbytes for g in gradients if g is not None)
    assert cost.optimizer_bytes(SHAPE, chosen) == sum(t.nbytes for t in state)


def test_an_unknown_attention_has_no_activations() -> None:
    with pytest.raises(UsageError, match="attention 'flush' does not exist"):
        cost.activation_bytes(SHAPE, 4, 512, precision("bfloat16"), "flush")


def test_attention_flops_and_bytes() -> None:
    shape = AttentionShape(batch=2, heads=3, seq_q=5, seq_k=7, d_head=8)
    q, k, v = (torch.randn(2, 3, n, 8, device="meta", requires_grad=True) for n in (5, 7, 7))
    with FlopCounterMode(display=False) as counter:
        out = reference_attention(q, k, v)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert attention_cost.forward_flops(shape, causal=False) == forward
    assert 2 * forward == counter.get_total_flops()
    # One matmul more than the naive backward: the recomputed scores.
    five_matmuls = 5 * (2 * 2 * 3 * 5 * 7 * 8)
    assert attention_cost.kernel_backward_flops(shape, causal=False) == five_matmuls
    assert 2 * attention_cost.kernel_backward_flops(shape, causal=True) == five_matmuls

    log_sum_exp = torch.empty(2, 3, 5, device="meta")
    moved = [q, k, v, out, log_sum_exp]
    assert attention_cost.forward_bytes(shape, 4) == sum(t.nbytes for t in moved)
    moved += [out, q.grad, k.grad, v.grad]
    assert attention_cost.backward_bytes(shape, 4) == sum(t.nbytes for t in moved)
