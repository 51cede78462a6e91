"""`stepscope.accelerate` and `TrainStep` on models of transformers and timm: the same training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope

transformers = pytest.importorskip("transformers")

VOCAB, STEPS = 512, 12
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}


def _decoder(name: str, **how: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**_SIZES, **how)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=256, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=128,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _decoder("Llama", num_key_value_heads=2, tie_word_embeddings=True),
    "llama, eager attention": lambda: _decoder("Llama", attn_implementation="eager"),
    "mistral": lambda: _decoder("Mistral", num_key_value_heads=2, sliding_window=None),
    "qwen2": lambda: _decoder("Qwen2", num_key_value_heads=2),
    "qwen3": lambda: _decoder("Qwen3", num_key_value_heads=2, head_dim=64),
    "gemma": lambda: _decoder("Gemma", num_key_value_heads=2, head_dim=64),
    "gpt2": _gpt2,
}


def batches(steps: int) -> list[dict[str, Tensor]]:
    """A sequence in which every token follows from the one before: something to learn."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(VOCAB, (steps, 4, 1), generator=generator)
    tokens = (starts + 3 * torch.arange(64)) % VOCAB
    return [{"input_ids": batch.cuda(), "labels": batch.cuda()} for batch in tokens]


def losses(
    name: str, fused: bool, graph: str = "off", max_grad_norm: float | None = 1.0
) -> list[float]:
    torch.manual_seed(0)
    model = MODELS[name]().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-11, fused=True)
    if fused:
        stepscope.accelerate(model, optimizer)
    step = stepscope.TrainStep(model, optimizer, max_grad_norm=max_grad_norm, graph=graph)
    values = []
    for batch in batches(STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            values.append(step(batch))
    if graph == "auto":
        assert step.captured.statistics.replayed > 0, step.explain()
    return [float(value) for value in values]


@pytest.mark.parametrize("graph", ["off", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same(name: str, graph: str) -> None:
    plain, fused = losses(name, fused=False), losses(name, fused=True, graph=graph)
    assert plain[-1] < plain[0]
    assert fused == pytest.approx(plain, rel=5e-3)


@pytest.mark.parametrize("graph", ["off", "auto"])
def test_training_with_updates_in_the_backward_pass_is_the_same(graph: str) -> None:
    plain = losses("llama", fused=False, max_grad_norm=None)
    fused = losses("llama", fused=True, graph=graph, max_grad_norm=None)
    assert fused == pytest.approx(plain, rel=5e-3)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
def test_every_replacement_passes_its_comparison(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().cuda().train()
    with torch.autocast("cuda", torch.bfloat16):
        report = stepscope.accelerate(model, sample=batches(1)[0])
    assert report.unchecked == 0
    assert {left.reason for left in report.left} <= {"it computes something else"}
    assert {"residual block", "attention", "RMSNorm", "head and loss"} <= report.replaced.keys()


def test_a_captured_decoder_uses_the_causal_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.acceleration.pieces import attention

    captured: list[bool] = []
    attend = attention.attention

    def recorded(*args: Any, is_causal: bool, **options: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            captured.append(is_causal)
        return attend(*args, is_causal=is_causal, **options)

    monkeypatch.setattr(attention, "attention", recorded)
    losses("llama", fused=True, graph="auto")
    assert captured == [True, True]
