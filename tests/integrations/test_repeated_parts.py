"""Models of transformers: blocks are traced once, and the graph is that of a trace of everything,
also with several kinds of blocks, experts, dropout, tied weights and changing lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from repeated_parts import copies_of

transformers = pytest.importorskip("transformers")

VOCAB = 200
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}  # fmt: skip
SPANS = {
    "num_hidden_layers": 4, "sliding_window": 8, "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": VOCAB,
      "use_cache": False, "decoder_start_token_id": 0}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "LlamaForCausalLM": (SIZES, 2),
    "Gemma3ForCausalLM": (SIZES | SPANS, 3),
    "MixtralForCausalLM": (SIZES | EXPERTS, 2),
    "Qwen2MoeForCausalLM": (SIZES | EXPERTS, 2),
    "BertForMaskedLM": (SIZES, 2),
    "T5ForConditionalGeneration": (T5, 1),
}
"""Sizes, and how many parts are copied at least."""


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_traced_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, least = CASES[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes)).train()

    def loss(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    batches = [(torch.randint(3, VOCAB, (2, length)),) for length in (17, 12, 23)]
    with torch.autocast("cpu", torch.bfloat16):
        found = copies_of(loss, *batches, monkeypatch=monkeypatch)
    assert max(found) >= least
    torch._dynamo.reset()
