"""`stepscope.accelerate` on models of transformers: what is replaced, and the same gradients."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import vision
from torch import Tensor, nn

import stepscope
from fp8_on_cpu import pretend_fp8

transformers = pytest.importorskip("transformers")

VOCAB = 200
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
GROUPED = {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
DECODER = {
    "residual block": 2, "attention": 2, "attention mask": 1, "RMSNorm": 5, "head and loss": 2,
}  # fmt: skip
BLOCKS = {"residual block": 2, "MLP": 2, "attention mask": 1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "Llama": ("ForCausalLM", SIZES | GROUPED, DECODER | {"gated MLP": 2, "embedding": 1}),
    "Mistral": ("ForCausalLM", SIZES | GROUPED, DECODER | {"gated MLP": 2, "embedding": 1}),
    "Qwen2": ("ForCausalLM", SIZES | GROUPED, DECODER | {"gated MLP": 2, "embedding": 1}),
    "Qwen3": (
        "ForCausalLM",
        SIZES | GROUPED | {"head_dim": 16},
        DECODER | {"RMSNorm": 9, "gated MLP": 2, "embedding": 1},
    ),
    "Gemma": (
        "ForCausalLM",
        SIZES | GROUPED | {"head_dim": 16},
        DECODER | {"gated MLP": 2, "embedding": 1},
    ),
    "Phi": (
        "ForCausalLM",
        SIZES,
        BLOCKS | {"head and loss": 2, "attention": 2, "LayerNorm": 3, "embedding": 1},
    ),
    "GPTNeoX": (
        "ForCausalLM",
        SIZES,
        BLOCKS | {"head and loss": 2, "attention": 2, "LayerNorm": 5, "embedding": 1},
    ),
    "GPT2": (
        "LMHeadModel",
        GPT2,
        BLOCKS | {"head and loss": 2, "attention": 2, "LayerNorm": 5, "embedding": 2},
    ),
    "Bert": (
        "ForMaskedLM",
        SIZES | NO_DROPOUT,
        {
            "head and loss": 4,
            "attention mask": 1,
            "residual block": 4,
            "attention": 2,
            "LayerNorm": 6,
            "embedding": 3,
            "linear": 7,
        },
    ),
}


def created(family: str) -> nn.Module:
    kind, sizes, _ = CASES[family]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, family + kind)(
        getattr(transformers, f"{family}Config")(**sizes)
    )
    return model.train()


def gradients(model: nn.Module, autocast: bool) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", CASES)
def test_loss_and_gradients_are_those_of_the_original(family: str, autocast: bool) -> None:
    model = created(family)
    keys = list(model.state_dict())
    loss, expected = gradients(model, autocast)
    report = stepscope.accelerate(model)
    for _ in range(2):
        fused_loss, actual = gradients(model, autocast)
        assert actual.keys() == expected.keys()
        torch.testing.assert_close(fused_loss, loss, rtol=1e-3 if autocast else 1e-5, atol=0)
        for name, gradient in expected.items():
            size = gradient.norm().clamp_min(1e-12)
            if name.endswith("key.bias"):
                # It is zero but for rounding: softmax ignores a constant. Its query's is not.
                size = expected[name.replace("key", "query")].norm()
            error = (actual[name] - gradient).norm() / size
            assert error < (3e-2 if autocast else 1e-5), name
    # A linear layer alone gains from casts only.
    pieces = {name: n for name, n in CASES[family][2].items() if autocast or name != "linear"}
    assert {piece: len(names) for piece, names in report.replaced.items()} == pieces
    assert report.unchecked == 0
    assert list(model.state_dict()) == keys
    report.undo()
    assert torch.equal(gradients(model, autocast)[0], loss)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_the_same(reentrant: bool) -> None:
    model = created("Llama")
    loss, expected = gradients(model, autocast=False)
    report = stepscope.accelerate(model)
    gradients(model, autocast=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        fused_loss, actual = gradients(model, autocast=False)
        torch.testing.assert_close(fused_loss, loss)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)
    assert "residual block" in report.replaced


@pytest.mark.parametrize("family", ["Llama", "GPT2", "GPTNeoX"])
def test_a_mask_that_only_a_capture_builds_is_not_used(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import import_utils

    from stepscope.acceleration.pieces import attention_masks

    model = created(family)
    namespace = vars(sys.modules[type(model).__module__])
    create_mask = namespace["create_causal_mask"]
    stepscope.accelerate(model)
    loss, expected = gradients(model, autocast=False)
    masks: list[Any] = []
    attend = nn.functional.scaled_dot_product_attention

    def recorded(*args: Any, attn_mask: Any = None, **options: Any) -> Tensor:
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recorded)
    # As during a capture on a GPU. Earlier versions of transformers do not notice one.
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True, raising=False)
    monkeypatch.setattr(attention_masks, "is_capturing", lambda: True)
    captured_loss, actual = gradients(model, autocast=False)
    assert masks == [None, None]
    torch.testing.assert_close(captured_loss, loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient)
    # A mask of the caller stays: it may differ in the next batch.
    tokens = torch.randint(VOCAB, (2, 17))
    mask = torch.ones_like(tokens)
    mask[:, :5] = 0
    output = model(input_ids=tokens, labels=tokens, attention_mask=mask)
    assert all(mask is not None for mask in masks[2:])
    assert len(masks) == 4
    assert output.loss.isfinite()
    assert namespace["create_causal_mask"] is create_mask


def _gradients_of(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**batch)
    (output if isinstance(output, Tensor) else output.loss).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _other_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family != "timm":
        config = getattr(transformers, f"{family}Config")(**SIZES, **GROUPED, head_dim=16)
        model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
        return model
    timm = vision.require("timm")
    # With layer scale and stochastic depth.
    options = {"img_size": 32, "depth": 2, "init_values": 0.1, "drop_path_rate": 0.5}
    inner = timm.create_model("vit_tiny_patch16_224", num_classes=10, **options)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.inner(images), labels)

    return Classifier()


@pytest.mark.parametrize("family", ["Gemma2", "Starcoder2", "timm"])
def test_residual_blocks_of_other_forms(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms after the branches, LayerNorm with the names of Llama, layer scale and stochastic
    depth; also in later calls, in which adds are fused with the norms of the next block."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = _other_model(family).train()
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    if family == "timm":
        batch = {"images": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
    expected = _gradients_of(model, batch)
    report = stepscope.accelerate(model)
    for _ in range(3):
        actual = _gradients_of(model, batch)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (actual[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
            assert error < 1e-5, name
    assert len(report.replaced["residual block"]) == 2
    assert report.unchecked == 0


def _padded() -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


@pytest.mark.parametrize("family", ["GPT2", "Bert"])
def test_padding_and_a_cache_in_training(family: str) -> None:
    """Masks are passed to the model's attention function, and GPT-2 fills a cache in training."""
    values = []
    for accelerate in (False, True):
        model = created(family)
        if accelerate:
            report = stepscope.accelerate(model)
        losses = [model(**_padded()).loss, gradients(model, autocast=False)[0]]
        output = model(**_padded(), use_cache=True) if family == "GPT2" else None
        if output is not None:
            layer = output.past_key_values.layers[1]
            losses += [layer.keys.square().sum(), layer.values.square().sum()]
        values.append([float(loss.detach()) for loss in losses])
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert len(report.replaced["attention"]) == 2


def test_attention_with_returned_weights_is_left() -> None:
    options = {"output_attentions": True, "attn_implementation": "eager"}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | options))
    report = stepscope.accelerate(model)
    reasons = [one.reason for one in report.left if one.piece == "attention"]
    assert reasons == ["it returns attention weights"] * 2
    assert len(report.replaced["linear"]) == 4


@pytest.mark.parametrize("padded", [False, True])
def test_dropout_has_the_random_numbers_of_the_model(padded: bool) -> None:
    """Of GPT-2 as its configuration has it by default: of weights, outputs and embeddings."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in GPT2.items() if not name.endswith("pdrop")}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()
    batch = _padded() if padded else {name: _padded()[name] for name in ("input_ids", "labels")}
    expected = _gradients_of(model, batch)
    report = stepscope.accelerate(model)
    for _ in range(2):
        actual = _gradients_of(model, batch)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)
    assert len(report.replaced["attention"]) == 2
    assert len(report.replaced["MLP"]) == 2
    assert report.unchecked == 0


def test_cross_attention_is_left() -> None:
    """Its block is fused."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**GPT2, add_cross_attention=True)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens, encoded = _padded()["input_ids"], torch.randn(2, 3, 64)
    inputs = {"input_ids": tokens, "labels": tokens, "encoder_hidden_states": encoded}
    expected = model(**inputs).loss
    report = stepscope.accelerate(model)
    for _ in range(2):
        torch.testing.assert_close(model(**inputs).loss, expected)
    assert "attention" not in report.replaced
    assert len(report.replaced["residual block"]) == 2
    reasons = {left.reason for left in report.left if left.piece == "attention"}
    assert "its cache has tokens, or is one of an encoder and a decoder" in reasons, reasons
    plain = {"input_ids": tokens, "labels": tokens}
    expected = copy.deepcopy(model)(**plain).loss
    torch.testing.assert_close(model(**plain).loss, expected)


def test_a_llama_in_fp8_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_fp8(monkeypatch)
    monkeypatch.setattr("stepscope.acceleration.accelerate.unavailable", lambda *_: None)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES, **GROUPED, use_cache=False)
        models.append(transformers.LlamaForCausalLM(config).train())
    fused, plain = models
    report = stepscope.accelerate(fused, dtype="fp8")
    assert report.fp8 is not None
    report.fp8.always = True
    tokens = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = [fused(input_ids=tokens, labels=tokens).loss]
    with torch.autocast("cpu", torch.bfloat16):
        losses.append(plain(input_ids=tokens, labels=tokens).loss)
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.01)
    on = [name for name, why in report.fp8.decisions.items() if why is None]
    assert len(on) == 2 * 7
    assert [left.name for left in report.left if left.piece == "fp8"] == ["lm_head"]
    for (name, a), b in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad).norm() < 0.25 * b.grad.norm(), name
    assert report.unchecked == 0
