"""Record what `stepscope.accelerate` replaces in each family of models, and write the table of
docs/accelerate.md.

    python scripts/acceleration_matrix.py           run every family, write record and table
    python scripts/acceleration_matrix.py --check   run every family, compare with the record

Every model has two blocks and random weights, and runs one training step under bfloat16 autocast:
each replacement is compared with its original in that step. The libraries are those that
`make test-integrations` installs; it takes less than a minute on a CPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from acceleration_page import PAGE, RECORD, Line, read, with_matrix
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
VOCAB, LENGTH, IMAGE, CLASSES = 200, 16, 32, 10
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = SIZES | {"num_key_value_heads": 2, "vocab_size": VOCAB, "use_cache": False}
WINDOWS = DECODER | {
    "head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "use_cache": False,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip

Batch = dict[str, Tensor]


class Family(NamedTuple):
    """A kind of model with its batches. The model returns its loss, or an object that has it."""

    library: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def create(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def batch_of(self, step: int) -> Batch:
        return self.batch(torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    output = model(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output[0]
    return loss


def _tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _pairs(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _images(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(2, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(CLASSES, (2,), generator=generator),
    }


def _hugging_face(
    name: str, kind: str, options: Mapping[str, Any], config_name: str = ""
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, config_name or f"{name}Config")(**options)
        model: nn.Module = getattr(transformers, name + kind)(config)
        return model

    return build


class Classifier(nn.Module):
    """A model of images with the loss of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(pixel_values), labels)


class Seq2Seq(nn.Module):
    """`nn.Transformer` between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.transformer = nn.Transformer(
            64, 4, 2, 2, 128, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(64, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        x = self.transformer(x, x, tgt_mask=mask, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return Classifier(timm.create_model(name, img_size=IMAGE, depth=2, num_classes=CLASSES))

    return build


def _nano_gpt() -> nn.Module:
    return import_module("examples.nano_gpt").GPT(2, 64, 4, LENGTH)  # type: ignore[no-any-return]


def _own_classes() -> nn.Module:
    sizes = {"vocab": VOCAB, "context": LENGTH, "width": 64, "layers": 2, "heads": 4, "hidden": 128}
    return import_module("examples.cs336_lm").LanguageModel(**sizes)  # type: ignore[no-any-return]


def _language_model(name: str, options: Mapping[str, Any], kind: str = "ForCausalLM") -> Family:
    return Family("transformers", _hugging_face(name, kind, options), _tokens)


FAMILIES = {
    "Llama": _language_model("Llama", DECODER | {"tie_word_embeddings": True}),
    "Mistral": _language_model("Mistral", DECODER),
    "Qwen2": _language_model("Qwen2", DECODER),
    "Qwen3": _language_model("Qwen3", DECODER | {"head_dim": 16}),
    "Gemma": _language_model("Gemma", DECODER | {"head_dim": 16}),
    "Gemma 2": _language_model("Gemma2", WINDOWS),
    "Gemma 3": Family(
        "transformers", _hugging_face("Gemma3", "ForCausalLM", WINDOWS, "Gemma3TextConfig"), _tokens
    ),
    "OLMo 2": _language_model("Olmo2", DECODER),
    "Phi": _language_model("Phi", DECODER),
    "Phi-3": _language_model("Phi3", DECODER | {"pad_token_id": 0}),
    "GPT-2": _language_model("GPT2", GPT2, "LMHeadModel"),
    "GPT-NeoX": _language_model("GPTNeoX", SIZES | {"vocab_size": VOCAB, "use_cache": False}),
    "BERT": _language_model("Bert", SIZES | NO_DROPOUT | {"vocab_size": VOCAB}, "ForMaskedLM"),
    "ViT": Family(
        "transformers",
        _hugging_face(
            "ViT",
            "ForImageClassification",
            SIZES | {"image_size": IMAGE, "patch_size": 8, "num_labels": CLASSES},
        ),
        _images,
    ),
    "timm ViT": Family("timm", _timm("vit_tiny_patch16_224"), _images),
    "timm ViT, rotary": Family("timm", _timm("vit_small_patch16_rope_224"), _images),
    "nanoGPT-like": Family("torch", _nano_gpt, _pairs),
    "own classes (CS336)": Family("torch", _own_classes, _pairs),
    "nn.Transformer": Family("torch", Seq2Seq, _pairs),
}


def prepare() -> None:
    """Make the examples importable."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))


def row(name: str) -> Line:
    """Accelerate one family, run one step, and return what was replaced and what was left."""
    import stepscope

    family = FAMILIES[name]
    model = family.create()
    report = stepscope.accelerate(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, family.batch_of(0))
    loss.backward()  # type: ignore[no-untyped-call]
    assert report.unchecked == 0, f"{name}: {report.unchecked} replacements were not compared"
    left: dict[tuple[str, str], int] = {}
    for one in report.left:
        left[one.piece, one.reason] = left.get((one.piece, one.reason), 0) + 1
    return {
        "family": name,
        "replaced": {piece: len(names) for piece, names in report.replaced.items()},
        "left": [
            {"piece": piece, "reason": reason, "count": count}
            for (piece, reason), count in left.items()
        ],
        "notes": report.notes,
    }


def main() -> int:
    prepare()
    rows = {name: row(name) for name in FAMILIES}
    if "--check" in sys.argv[1:]:
        recorded = {line["family"]: line for line in read(ROOT / "results")}
        changed = [
            name
            for name in {**recorded, **rows}
            if name not in rows or (recorded.get(name, {}) | rows[name]) != recorded.get(name)
        ]
        for name in changed:
            print(f"{name}: the record has {recorded.get(name)}, this run {rows.get(name)}")
        return 1 if changed else 0
    lines = [
        line | {"library": FAMILIES[name].library, "version": version(FAMILIES[name].library)}
        for name, line in rows.items()
    ]
    results, page = ROOT / "results", ROOT / PAGE
    text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    (results / RECORD).write_text(text)
    page.write_text(with_matrix(page.read_text(), results))
    print(f"wrote results/{RECORD} and the table of {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
