"""The models that `acceleration.py` and `fp8_step.py` train, and batches that they can learn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DRAWN = 50
"""Batches of tokens that are drawn at once."""
MISLABELED = 0.25
"""Share of images with a random label: the loss falls to about 1, and not to rounding errors."""
MASKED = 0.3
"""Share of tokens that an encoder has to find."""
BRANCHES = 4
"""Successors of a token in the Markov chain: the loss falls to about log 4."""
SEED = 0


class Shape(NamedTuple):
    batch: int
    length: int
    vocab: int


class Row(NamedTuple):
    """One model with its batch."""

    name: str
    family: str
    build: Callable[[bool], nn.Module]
    """Create the model; True for the size of a CPU."""
    shape: Shape
    tiny: Shape = Shape(2, 16, 64)


def decoder(name: str, **sizes: int) -> Callable[[bool], nn.Module]:
    """Return what creates a decoder of transformers; all have the same layers if they are tiny."""

    def build(tiny: bool) -> nn.Module:
        import transformers

        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
                 **{option: 8 for option in ("head_dim", "sliding_window") if option in sizes},
                 **{option: x for option, x in sizes.items() if option.endswith("_token_id")},
                 }  # fmt: skip
        options = {"max_position_embeddings": 4096} | (small if tiny else sizes)
        # Gemma 3 has a configuration for images, too.
        config_name = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
        config = getattr(transformers, config_name)(
            **options, tie_word_embeddings=True, use_cache=False
        )
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return model

    return build


def gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64} if tiny else {}
    # Pre-training of this size commonly uses no dropout.
    config = GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def pythia(tiny: bool) -> nn.Module:
    """GPT-NeoX with a quarter of each head rotated, and parallel residuals."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "vocab_size": 64}
        if tiny
        else {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
              "num_attention_heads": 12, "vocab_size": 50_304}
    )  # fmt: skip
    config = GPTNeoXConfig(**sizes, use_cache=False, attn_implementation="sdpa")
    return GPTNeoXForCausalLM(config)  # type: ignore[no-any-return]


def modernbert(tiny: bool) -> nn.Module:
    """An encoder with local attention in two of three layers."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    sizes = (
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
        if tiny
        else {}
    )  # fmt: skip
    return ModernBertForMaskedLM(ModernBertConfig(**sizes, attn_implementation="sdpa"))  # type: ignore[no-any-return]


def whisper(tiny: bool) -> nn.Module:
    """An encoder and decoder that draw whether to skip a layer on the host, in each step."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, layers, heads = (32, 2, 4) if tiny else (768, 12, 12)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 64,
               "decoder_start_token_id": 1, "max_source_positions": 16}  # fmt: skip
    config = WhisperConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, use_cache=False,
        **(special if tiny else {}),
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)  # type: ignore[no-any-return]


def x_transformers(tiny: bool) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    vocab, width, layers, heads = (64, 32, 2, 4) if tiny else (50_257, 768, 12, 12)
    layers = Decoder(
        dim=width, depth=layers, heads=heads, attn_dim_head=width // heads, rotary_pos_emb=True,
        ff_glu=True, ff_swish=True, ff_no_bias=True, use_rmsnorm=True, attn_flash=True,
    )  # fmt: skip
    return TransformerWrapper(  # type: ignore[no-any-return]
        num_tokens=vocab, max_seq_len=1024, attn_layers=layers, use_abs_pos_emb=False
    )


def timm_vit(tiny: bool) -> nn.Module:
    import timm

    name = "vit_tiny_patch16_224" if tiny else "vit_base_patch16_224"
    options = {"img_size": 32, "depth": 2} if tiny else {}
    return timm.create_model(name, **options)  # type: ignore[no-any-return]


def cs336(tiny: bool) -> nn.Module:
    """A model of classes of its own that returns its loss."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    from cs336_lm import SIZES, LanguageModel

    return LanguageModel(**(SIZES["tiny"] | {"vocab": 64} if tiny else SIZES["real"]))  # type: ignore[no-any-return]


def own_decoder(tiny: bool) -> nn.Module:
    from own_decoder import Decoder

    return Decoder(64, 32, 2, 4) if tiny else Decoder(65_536, 768, 12, 6)


def linear_decoder(tiny: bool) -> nn.Module:
    from linear_decoder import Decoder

    return Decoder(64, 64, 128, 2, 4) if tiny else Decoder(10_000, 2560, 10_240, 32, 32)


def own(size: str) -> Callable[[bool], nn.Module]:
    def build(tiny: bool) -> nn.Module:
        from stepscope.attention.api import attention_with
        from stepscope.model import TransformerLM

        return TransformerLM(own_config(size, tiny), attention=attention_with("sdpa"))

    return build


def own_config(size: str, tiny: bool) -> Any:
    from stepscope.model import find_size, with_overrides

    if tiny:
        return with_overrides(find_size("tiny"), d_model=32, d_ff=96, context=16, vocab=64)
    return with_overrides(find_size(size), context=512)


LLAMA_1B = decoder(
    "Llama", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128_256,
)  # fmt: skip
LLAMA_D1024 = decoder(
    "Llama", hidden_size=1024, intermediate_size=3072, num_hidden_layers=12,
    num_attention_heads=16, num_key_value_heads=8, vocab_size=32_000,
)  # fmt: skip
QWEN2 = decoder(
    "Qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
    num_attention_heads=14, num_key_value_heads=2, vocab_size=151_936,
)  # fmt: skip
GEMMA3 = decoder(
    "Gemma3", hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
    num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512,
    vocab_size=65_536,
)  # fmt: skip
SMOLLM3 = decoder(
    "SmolLM3", hidden_size=960, intermediate_size=2560, num_hidden_layers=32,
    num_attention_heads=15, num_key_value_heads=5, vocab_size=49_152, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
WINDOWS = {
    name: decoder(
        name, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, head_dim=128, vocab_size=32_000,
        sliding_window=1024, max_position_embeddings=8192,
    )
    for name in ("Mistral", "Gemma2")
}  # fmt: skip
"""Decoders with a sliding window: in every layer, and in every second one with soft-capping."""
ROWS = {
    row.name: row
    for row in (
        Row("hf_llama_1b", "hf", LLAMA_1B, Shape(4, 2048, 128_256)),
        Row("hf_llama_1b_short", "hf", LLAMA_1B, Shape(1, 512, 128_256)),
        Row("hf_llama_d1024", "hf", LLAMA_D1024, Shape(8, 512, 32_000)),
        Row("own_small", "own", own("small"), Shape(4, 512, 10_000)),
        Row("own_xl", "own", own("xl"), Shape(4, 512, 10_000)),
        Row("gpt2", "hf", gpt2, Shape(8, 1024, 50_257)),
        Row("pythia_160m", "hf", pythia, Shape(8, 1024, 50_304)),
        Row("qwen2_0.5b", "hf", QWEN2, Shape(4, 2048, 151_936)),
        Row("hf_mistral_window", "hf", WINDOWS["Mistral"], Shape(1, 8192, 32_000)),
        Row("hf_gemma2", "hf", WINDOWS["Gemma2"], Shape(1, 4096, 32_000)),
        Row("hf_gemma3", "hf", GEMMA3, Shape(4, 2048, 65_536)),
        Row("hf_smollm3", "hf", SMOLLM3, Shape(4, 2048, 49_152)),
        Row("modernbert", "masked", modernbert, Shape(16, 512, 50_368)),
        Row("whisper_small", "speech", whisper, Shape(8, 256, 51_865)),
        Row("x_transformers", "logits", x_transformers, Shape(8, 1024, 50_257)),
        Row("own_decoder", "pairs", own_decoder, Shape(8, 2048, 65_536)),
        Row("linear_2.7b", "pairs", linear_decoder, Shape(4, 2048, 10_000)),
        Row("cs336_medium", "pairs", cs336, Shape(8, 512, 10_000)),
        Row("timm_vit_b16", "vit", timm_vit, Shape(128, 224, 1000), Shape(2, 32, 1000)),
    )
}


class Data:
    """Batches that a model can learn: a Markov chain of tokens, or images with a class pattern.
    `tokens` are the distinct tokens of the chain, all of the vocabulary by default."""

    def __init__(
        self, row: Row, shape: Shape, device: torch.device, tokens: int | None = None
    ) -> None:
        self._family, self._shape, self._device = row.family, shape, device
        self._count = min(tokens or shape.vocab, shape.vocab)
        self._drawn: tuple[int, Tensor] = (-1, torch.empty(0))
        generator = torch.Generator().manual_seed(SEED)
        if row.family == "vit":
            classes = 8
            self._table = torch.randn(classes, 3, 8, 8, generator=generator).to(device)
        else:
            size = (self._count, BRANCHES)
            self._table = torch.randint(self._count, size, generator=generator)

    def batch(self, number: int) -> Any:
        if self._family == "vit":
            return self._images(number)
        tokens = self._tokens(number).to(self._device)
        if self._family in ("own", "pairs", "logits"):
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        tokens = tokens[:, :-1].contiguous()
        if self._family == "masked":
            return self._masked(tokens, number)
        if self._family == "speech":
            return {"input_features": self._spectrograms(number), "labels": tokens}
        return {"input_ids": tokens, "labels": tokens}

    def _masked(self, tokens: Tensor, number: int) -> dict[str, Tensor]:
        """Hide some tokens; the labels are the hidden ones."""
        generator = torch.Generator(self._device).manual_seed(number + 1)
        draws = torch.rand(tokens.shape, generator=generator, device=self._device)
        is_hidden = draws < MASKED
        return {
            "input_ids": tokens.masked_fill(is_hidden, self._shape.vocab - 1),
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens.masked_fill(~is_hidden, -100),
        }

    def _spectrograms(self, number: int) -> Tensor:
        frames = 32 if self._shape.vocab < 1000 else 3000
        generator = torch.Generator(self._device).manual_seed(number + 1)
        size = (self._shape.batch, 80, frames)
        return torch.randn(size, generator=generator, device=self._device)

    def _tokens(self, number: int) -> Tensor:
        """Return a batch of the chain. Many are drawn at once: it is a loop over positions."""
        together, index = divmod(number, DRAWN)
        if self._drawn[0] != together:
            generator = torch.Generator().manual_seed(together + 1)
            self._drawn = together, self._chains(DRAWN * self._shape.batch, generator)
        return self._drawn[1].unflatten(0, (DRAWN, -1))[index]

    def _chains(self, count: int, generator: torch.Generator) -> Tensor:
        length = self._shape.length
        tokens = torch.empty(length + 1, count, dtype=torch.long)
        tokens[0] = torch.randint(self._count, (count,), generator=generator)
        choices = torch.randint(BRANCHES, (length, count), generator=generator)
        for position in range(length):
            tokens[position + 1] = self._table[tokens[position], choices[position]]
        return tokens.T.contiguous()

    def _images(self, number: int) -> tuple[Tensor, Tensor]:
        count, size, _ = self._shape
        generator = torch.Generator(self._device).manual_seed(number + 1)
        random = {"generator": generator, "device": self._device}
        labels = torch.randint(len(self._table), (count,), **random)
        patterns = nn.functional.interpolate(self._table[labels], size=(size, size))
        images = patterns + torch.randn(count, 3, size, size, **random)
        wrong = torch.rand(count, **random) < MISLABELED
        return images, torch.where(
            wrong, torch.randint(len(self._table), (count,), **random), labels
        )
