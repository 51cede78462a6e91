"""`stepscope.accelerate` on models of transformers: the same losses and gradients, also with
adapters, padding, dropout, caches, checkpointing and FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from accelerated_models import COMPILED
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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", SIZES | GROUPED),
    "Qwen3": ("ForCausalLM", SIZES | GROUPED | {"head_dim": 16}),
    "Phi": ("ForCausalLM", SIZES),
    "GPT2": ("LMHeadModel", GPT2),
    "Bert": ("ForMaskedLM", SIZES | NO_DROPOUT),
}


def created(family: str) -> Any:
    kind, sizes = CASES[family]
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
    report = stepscope.accelerate(model, compile=COMPILED)
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
    assert report.is_compiled
    assert not [left for left in report.left if "differ" in left.reason]
    assert list(model.state_dict()) == keys
    report.undo()
    assert torch.equal(gradients(model, autocast)[0], loss)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_the_same(reentrant: bool) -> None:
    model = created("Llama")
    loss, expected = gradients(model, autocast=False)
    report = stepscope.accelerate(model, compile=COMPILED)
    gradients(model, autocast=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        fused_loss, actual = gradients(model, autocast=False)
        torch.testing.assert_close(fused_loss, loss)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)
    assert report.is_compiled


def _gradients_of(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**batch)
    (output if isinstance(output, Tensor) else output.loss).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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
            report = stepscope.accelerate(model, compile=COMPILED)
        losses = [model(**_padded()).loss, gradients(model, autocast=False)[0]]
        output = model(**_padded(), use_cache=True) if family == "GPT2" else None
        if output is not None:
            layer = output.past_key_values.layers[1]
            losses += [layer.keys.square().sum(), layer.values.square().sum()]
        values.append([float(loss.detach()) for loss in losses])
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert report.is_compiled


@pytest.mark.parametrize("padded", [False, True])
def test_dropout_has_the_random_numbers_of_the_model(padded: bool) -> None:
    """Of GPT-2 as its configuration has it by default: of weights, outputs and embeddings."""
    torch.manual_seed(0)
    sizes = {name: value for name, value in GPT2.items() if not name.endswith("pdrop")}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()
    batch = _padded() if padded else {name: _padded()[name] for name in ("input_ids", "labels")}
    expected = _gradients_of(model, batch)
    report = stepscope.accelerate(model, compile=COMPILED)
    for _ in range(2):
        actual = _gradients_of(model, batch)
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)
    assert report.is_compiled


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(when: str) -> None:
    """Adapters that are added before or after the model is accelerated; frozen weights get no
    gradient and do not change."""
    peft = pytest.importorskip("peft")
    results = []
    for accelerate in (False, True):
        model = created("Llama")
        if accelerate and when == "after":
            stepscope.accelerate(model, compile=COMPILED)
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
        )
        adapted = peft.get_peft_model(model, config)
        if accelerate and when == "before":
            assert stepscope.accelerate(adapted, compile=COMPILED, sample=_padded()).is_compiled
        frozen = {n: p.detach().clone() for n, p in adapted.named_parameters() if "lora" not in n}
        learned = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=1e-2)
        losses = []
        for _ in range(4):
            loss = adapted(**_padded()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        for name, value in frozen.items():
            parameter = adapted.get_parameter(name)
            assert torch.equal(parameter, value)
            assert parameter.grad is None
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_a_model_that_is_saved_loaded_and_generates(tmp_path: Path) -> None:
    plain, model = created("Llama"), created("Llama")
    stepscope.accelerate(model, compile=COMPILED)
    model(**_padded()).loss.backward()
    model.save_pretrained(tmp_path)
    loaded: Any = type(model).from_pretrained(tmp_path).train()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert float(loaded(**_padded()).loss) == pytest.approx(float(plain(**_padded()).loss))
    tokens = _padded()["input_ids"]
    generated = [
        one.eval().generate(tokens, max_new_tokens=4, do_sample=False, use_cache=True)
        for one in (plain, model)
    ]
    assert torch.equal(*generated)


def test_a_llama_in_fp8_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_fp8(monkeypatch)
    monkeypatch.setattr("stepscope.acceleration.accelerate.unavailable", lambda *_: None)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES, **GROUPED, use_cache=False)
        models.append(transformers.LlamaForCausalLM(config).train())
    fused, plain = models
    report = stepscope.accelerate(fused, dtype="fp8", compile=COMPILED)
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
    assert "lm_head" in [left.name for left in report.left if left.piece == "fp8"]
    for (name, a), b in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad).norm() < 0.25 * b.grad.norm(), name
