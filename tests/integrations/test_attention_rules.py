"""Windows, packed documents, soft-capping and sinks of models of transformers after `accelerate`:
the same loss and gradients for every kind of mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from accelerated_models import COMPILED

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH, WINDOW = 200, 20, 7
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
}
ALTERNATE = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
NAIVE = {"attn_implementation": "eager"}
"""Earlier versions of transformers use SDPA by default, and ignore soft-capping there."""
LATER = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
GPT2 = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("ForCausalLM", SIZES | {"sliding_window": WINDOW}),
    "Qwen2": ("ForCausalLM", SIZES | LATER),
    "Gemma2": ("ForCausalLM", SIZES | ALTERNATE | NAIVE),
    "Gemma3": ("ForCausalLM", SIZES | ALTERNATE),
    "GptOss": (
        "ForCausalLM",
        SIZES | ALTERNATE | {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    # Its window is 0 by default, and a class of the model has experts in its name.
    "Qwen2Moe": ("ForCausalLM", SIZES | EXPERTS),
    "GPT2": ("LMHeadModel", GPT2),
}


def created(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    kind, sizes = FAMILIES[family]
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**sizes | options)
    model = getattr(transformers, family + kind)(config).train()
    with torch.no_grad():
        # Scores that differ: after the initialization all keys have nearly the same weight.
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj.w", "k_proj.w", "c_attn.w")):
                parameter.mul_(8)
    return model


def batch(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if kind == "all visible":
        inputs["attention_mask"] = torch.ones_like(tokens)
    if kind == "padded":
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][1, :5] = 0
    if kind == "packed":
        lengths = ((8, 12), (3, 17))
        rows = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
        inputs["position_ids"] = torch.stack(rows)
    return inputs


def gradients(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual[0], expected[0])
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_mask(family: str) -> None:
    model = created(family)
    kinds = ("plain", "all visible", "packed", "padded")
    expected = {kind: gradients(model, batch(kind)) for kind in kinds}
    report = stepscope.accelerate(model, compile=COMPILED)
    for kind in kinds:
        assert_same(gradients(model, batch(kind)), expected[kind])
    assert report.is_compiled
    assert not [left for left in report.left if "differ" in left.reason]


@pytest.mark.parametrize("family", ["Mistral", "Gemma2"])
def test_documents_that_the_collator_of_transformers_flattens(family: str) -> None:
    """With the lengths for other kernels, which the masks do not need."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (5, 11, 9)]
    inputs = collate([{"input_ids": one} for one in documents]) | {"use_cache": False}
    assert "cu_seq_lens_q" in inputs
    model = created(family)
    expected = gradients(model, inputs)
    stepscope.accelerate(model, compile=COMPILED)
    assert_same(gradients(model, inputs), expected)


def test_weights_that_the_caller_reads_are_returned() -> None:
    model = created("Gemma2")
    expected = model(**batch("plain"), output_attentions=True).attentions
    stepscope.accelerate(model, compile=COMPILED)
    gradients(model, batch("plain"))
    actual = model(**batch("plain"), output_attentions=True).attentions
    assert len(actual) == 2
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(reentrant: bool) -> None:
    model = created("Gemma2")
    expected = gradients(model, batch("plain"))
    stepscope.accelerate(model, compile=COMPILED)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same(gradients(model, batch("plain")), expected)
