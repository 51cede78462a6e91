"""Windows, packed documents, soft-capping and sinks of models of transformers after `accelerate`:
the same loss and gradients, computed by the rules of their masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stepscope
from stepscope.acceleration.accelerate import replaceable, replaces_whole_blocks
from stepscope.acceleration.pieces import attention as rotary
from stepscope.acceleration.pieces import mask_rules, packed_attention

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
W, D, CAP, SINKS = "window", "documents", "softcap", "sinks"
Names = tuple[str, ...]
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[Names, Names]]] = {
    # Rules of both layers without packed documents.
    "Mistral": ("ForCausalLM", SIZES | {"sliding_window": WINDOW}, ((W,), (W,))),
    "Qwen2": ("ForCausalLM", SIZES | LATER, ((), (W,))),
    "Gemma2": ("ForCausalLM", SIZES | ALTERNATE | NAIVE, ((W, CAP), (CAP,))),
    "Gemma3": ("ForCausalLM", SIZES | ALTERNATE, ((W,), ())),
    "GptOss": (
        "ForCausalLM",
        SIZES | ALTERNATE | {"num_local_experts": 2, "num_experts_per_tok": 1},
        ((W, SINKS), (SINKS,)),
    ),
    # Its window is 0 by default, and a class of the model has experts in its name.
    "Qwen2Moe": ("ForCausalLM", SIZES | EXPERTS, ((), ())),
    "GPT2": ("LMHeadModel", GPT2, ((), ())),
}
WITHOUT_POSITIONS = ("GptOss",)
"""Models whose masks do not depend on positions."""


def created(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    kind, sizes, _ = FAMILIES[family]
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


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Names]:
    """Names of the rules of each call of `attention`."""
    calls: list[Names] = []

    def recorded(*args: Any, rules: Any = None, **options: Any) -> Tensor:
        calls.append(() if rules is None else rules.names)
        return stepscope.attention.attention(*args, rules=rules, **options)

    for piece in (rotary, packed_attention):
        monkeypatch.setattr(piece, "attention", recorded)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return calls


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["GPT2", "Qwen2"])
def test_blocks_are_known_with_any_attention(family: str, attention: str) -> None:
    """Naive attention becomes SDPA before it is replaced; to look at it changes nothing."""
    model = created(family, attn_implementation=attention, use_sliding_window=False)
    assert replaces_whole_blocks(model)
    assert "attention" in replaceable(model)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_become_rules(family: str, attended: list[Names]) -> None:
    model = created(family)
    kinds = ("plain", "all visible", "packed", "padded")
    expected = {kind: gradients(model, batch(kind)) for kind in kinds}
    report = stepscope.accelerate(model)
    gradients(model, batch("plain"))
    plain = list(FAMILIES[family][2])
    packed = [tuple(sorted((*names, D), key=_order)) for names in plain]
    used = dict.fromkeys(kinds, plain) | {"padded": []}
    if family not in WITHOUT_POSITIONS:
        used["packed"] = packed
    for kind in kinds:
        for _ in range(2):
            attended.clear()
            assert_same(gradients(model, batch(kind)), expected[kind])
            assert attended == used[kind], kind
    assert len(report.replaced["attention"]) == 2
    assert not [left for left in report.left if left.piece == "attention"]


def test_soft_capping_that_sdpa_ignores_is_kept(
    monkeypatch: pytest.MonkeyPatch, attended: list[Names]
) -> None:
    """Earlier versions of transformers claim that Gemma 2 supports SDPA, and drop it there."""
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    model = created("Gemma2", attn_logit_softcapping=0.1)
    expected = gradients(model, batch("plain"))
    report = stepscope.accelerate(model)
    for _ in range(2):
        assert_same(gradients(model, batch("plain")), expected)
    assert model.config._attn_implementation == "eager"
    assert attended[-2:] == [(W, CAP), (CAP,)]
    assert report.unchecked == 0
    without = created("Gemma2", attn_logit_softcapping=None)
    stepscope.accelerate(without)
    assert without.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["Mistral", "Gemma2"])
def test_documents_that_the_collator_of_transformers_flattens(
    family: str, attended: list[Names]
) -> None:
    """With the lengths for other kernels, which the masks do not need."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (5, 11, 9)]
    inputs = collate([{"input_ids": one} for one in documents]) | {"use_cache": False}
    assert "cu_seq_lens_q" in inputs
    model = created(family)
    expected = gradients(model, inputs)
    stepscope.accelerate(model)
    for _ in range(2):
        attended.clear()
        assert_same(gradients(model, inputs), expected)
    assert [D in names for names in attended] == [True, True]
    # The same as each document alone.
    alone = [model(input_ids=torch.tensor([one])).logits.detach() for one in documents]
    together = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits.detach()
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


def _order(name: str) -> int:
    from stepscope.attention.rules import NAMES

    return NAMES.index(name)


def test_weights_that_the_caller_reads_are_returned(attended: list[Names]) -> None:
    model = created("Gemma2")
    expected = model(**batch("plain"), output_attentions=True).attentions
    stepscope.accelerate(model)
    gradients(model, batch("plain"))
    attended.clear()
    actual = model(**batch("plain"), output_attentions=True).attentions
    assert len(actual) == 2
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not attended


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(reentrant: bool, attended: list[Names]) -> None:
    model = created("Gemma2")
    expected = gradients(model, batch("plain"))
    stepscope.accelerate(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    for _ in range(2):
        assert_same(gradients(model, batch("plain")), expected)
    assert (W, CAP) in attended or reentrant


def test_dropout_of_attention_is_that_of_torch(attended: list[Names]) -> None:
    """The same random numbers as before: the mask of a window stays in memory."""
    model = created("Mistral", attention_dropout=0.5)
    expected = {}
    for seed in (0, 1):
        torch.manual_seed(seed)
        expected[seed] = gradients(model, batch("plain"))
    assert not torch.equal(expected[0][0], expected[1][0])
    report = stepscope.accelerate(model)
    gradients(model, batch("plain"))
    for seed, values in expected.items():
        torch.manual_seed(seed)
        assert_same(gradients(model, batch("plain")), values)
    assert not attended
    assert len(report.replaced["attention"]) == 2


def test_a_mask_that_is_not_what_its_arguments_say_has_no_rules(
    attended: list[Names], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a version of the library that counts a window differently."""
    from transformers import masking_utils

    plain = masking_utils.sliding_window_overlay
    monkeypatch.setattr(masking_utils, "sliding_window_overlay", lambda n: plain(n + 1))
    model = created("Mistral")
    expected = gradients(model, batch("plain"))
    report = stepscope.accelerate(model)
    for _ in range(2):
        assert_same(gradients(model, batch("plain")), expected)
    assert not attended
    assert len(report.replaced["attention"]) == 2


def test_a_mask_that_the_model_writes_to_has_no_rules(
    attended: list[Names], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a model that hides some tokens itself."""
    model = created("Gemma2")
    layer_class = type(model.model.layers[0])
    forward = layer_class.forward

    def written(self: Any, hidden: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        if attention_mask._version == 0:
            attention_mask[..., 4:, 3] = torch.finfo(attention_mask.dtype).min
        return forward(self, hidden, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(layer_class, "forward", written)
    expected = gradients(model, batch("plain"))
    report = stepscope.accelerate(model)
    for _ in range(2):
        # In the first call, a block that does not write to its mask was compared, and taken back.
        attended.clear()
        assert_same(gradients(model, batch("plain")), expected)
    assert not attended
    assert len(report.replaced["attention"]) == 2


def test_masks_of_a_capture_have_rules_of_the_eager_calls(
    attended: list[Names], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.acceleration.pieces import attention_masks

    model = created("Mistral")
    expected = {kind: gradients(model, batch(kind)) for kind in ("plain", "packed", "all visible")}
    stepscope.accelerate(model)
    gradients(model, batch("plain"))
    for module in (attention_masks, mask_rules):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    for kind, rules in (("plain", [(W,)] * 2), ("packed", []), ("all visible", [])):
        # Packed documents were not compared before; padding cannot be read in a capture.
        attended.clear()
        assert_same(gradients(model, batch(kind)), expected[kind])
        assert attended == rules, kind


@pytest.mark.usefixtures("attended")
def test_masks_of_a_capture_are_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.acceleration.pieces import attention_masks

    model = created("Mistral")
    stepscope.accelerate(model)
    gradients(model, batch("plain"))
    model.config.sliding_window = WINDOW // 2
    expected = gradients(model, batch("plain"))
    for module in (attention_masks, mask_rules):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    assert_same(gradients(model, batch("plain")), expected)


def test_masks_that_are_no_tensors_have_no_rules() -> None:
    """Such as those of FlexAttention, or several in a dictionary."""
    from stepscope.acceleration.pieces import attention_masks

    class Decoder(nn.Module):
        def forward(self, input_ids: Tensor) -> Any:
            return masks.create("create_masks", lambda: {"all": input_ids})

    decoder = Decoder()
    masks = attention_masks._Masks(decoder)
    tokens = torch.zeros(2, 3)
    assert masks.forward(decoder, tokens)["all"] is tokens
