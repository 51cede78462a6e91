"""The model with fused layers against the naive one: same parameters, loss and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accuracy import hold_to_policy, stacked_results
from stepscope.attention import reference_attention
from stepscope.kernels.triton import activation as triton_activation
from stepscope.kernels.triton import norm as triton_norm
from stepscope.model import ModelConfig, TransformerLM, cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = ModelConfig(d_model=32, d_ff=48, n_layers=2, n_heads=2, vocab=70, context=12)


def model(fused: bool, dtype: torch.dtype) -> TransformerLM:
    torch.manual_seed(0)
    transformer = TransformerLM(CONFIG, reference_attention, dtype=torch.float32, fused=fused)
    return transformer.to(DEVICE, dtype)


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CONFIG.vocab, (2, 2, 9), generator=generator).to(DEVICE)
    return tokens[0], tokens[1]


def loss_and_gradients(fused: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the results of several batches: the largest error of few values is up to chance."""
    batches = [batch(seed) for seed in range(1, 5)]
    return stacked_results(model(fused, dtype), batches, fused_loss=fused)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    for module in (triton_norm, triton_activation):

        def watched(*arguments, name=module.__name__, original=module.forward, **options):  # type: ignore[no-untyped-def]
            seen.append(name.rpartition(".")[2])
            return original(*arguments, **options)

        monkeypatch.setattr(module, "forward", watched)
    return seen


def test_same_loss_and_gradients(launches: list[str]) -> None:
    fused = loss_and_gradients(True, torch.float32)
    assert launches == (["norm", "norm", "activation"] * 2 + ["norm"]) * 4
    exact = loss_and_gradients(False, torch.float64)
    plain = loss_and_gradients(False, torch.float32)
    assert exact.keys() == fused.keys()
    hold_to_policy(exact, plain, fused)


def test_parameters_are_the_same() -> None:
    plain, fused = model(False, torch.float32), model(True, torch.float32)
    fused.load_state_dict(plain.state_dict())
    assert list(plain.state_dict()) == list(fused.state_dict())


def test_autocast_keeps_the_stream_in_float32_and_casts_matmul_inputs() -> None:
    subject = model(True, torch.float32)
    dtypes: list[tuple[torch.dtype, torch.dtype]] = []
    block = subject.blocks[1]
    block.feed_forward.register_forward_pre_hook(
        lambda _, inputs: dtypes.append((inputs[0].dtype, torch.float32))
    )
    block.register_forward_hook(lambda _, inputs, out: dtypes.append((inputs[0].dtype, out.dtype)))
    tokens, targets = batch()
    with torch.autocast(DEVICE, torch.float16):
        loss = subject(tokens, targets)
    assert dtypes == [(torch.float16, torch.float32), (torch.float32, torch.float32)]
    exact = cross_entropy(model(False, torch.float32)(tokens), targets)
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in subject.parameters())


def test_torch_compile_traces_the_naive_layers_in_one_graph(launches: list[str]) -> None:
    compiled = torch.compile(model(True, torch.float32), backend="aot_eager", fullgraph=True)
    tokens, targets = batch()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=False):
        loss = compiled(tokens, targets)
    assert launches == []
    loss.backward()
    exact = cross_entropy(model(False, torch.float64)(tokens), targets)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
