"""Every model of transformers, timm and torch as a tiny copy: two layers, a width of 32.

Sizes are set by the names of the fields of a configuration, whatever the family. What the library
refuses with these sizes is not built, and the reason is returned.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, LAYERS, IMAGE, PATCH, CLASSES = 96, 32, 4, 2, 32, 8, 5
SAMPLES = 4000
"""Of a waveform."""
MAX_PARAMETERS = 4_000_000
BATCH = 2
Batch = dict[str, Tensor]

_SIZES: tuple[tuple[str, Any], ...] = (
    (r"vocab_size(_.*)?|.*_vocab_size|n_vocab|num_embeddings|n_words", VOCAB),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|.*_num_key_value_heads", HEADS // 2),
    (r"num_attention_heads|n_heads?|num_heads|.*_attention_heads|attention_heads", HEADS),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|d_embed|model_dim|width"
     r"|emb_dim|.*_hidden_size|.*_embed_dim|.*hidden_dim|embedding_dim|token_dim|lru_width", WIDTH),
    (r"num_hidden_layers|n_layers?|num_layers|.*_layers|encoder_depth|decoder_depth|depth"
     r"|num_blocks", LAYERS),
    (r"qk_rope_head_dim|rotary_dim", WIDTH // HEADS // 2),
    (r"qk_nope_head_dim", WIDTH // HEADS // 2),
    (r"(attention_)?head_dim|d_kv|d_head|kv_channels|.*_head_dim", WIDTH // HEADS),
    (r"q_lora_rank|kv_lora_rank|.*_lora_rank|time_step_rank", 16),
    (r"(.*_)?intermediate_size|(.*_)?ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|d_inner"
     r"|ffn_size|mlp_hidden_size|dense_intermediate_size|ffn_intermediate_size"
     r"|.*_expert_intermediate_size", 2 * WIDTH),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|.*_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|num_selected_experts|top_k", 2),
    (r"n_group|topk_group", 1),
    (r"image_size|img_size|input_size", IMAGE),
    (r"patch_size", PATCH),
    (r"num_labels", CLASSES),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length", 64),
    (r"max_source_positions|max_target_positions", 64),
    (r"sliding_window|attention_window|local_attention", 6),
    (r"window_size", 4),
    (r"attention_chunk_size|chunk_size", 8),
    (r"block_size", 4),
    (r"ssm_state_size|state_size|mamba_d_state|d_state", 8),
    (r"mamba_num_heads|mamba_n_heads|ssm_num_heads", 4),
    (r"mamba_head_dim|mamba_d_head", 16),
    (r"pad_token_id", 0), (r"bos_token_id|decoder_start_token_id", 1), (r"eos_token_id", 2),
)  # fmt: skip
_SKIPPED = re.compile(r"use_.*|.*_token_index|.*_fusion_layers|first_k_dense_replace|num_hash.*")
_STAGES = re.compile(r"depths?|num_blocks|layers|num_layers|stage_layers")
_HEADS = re.compile(r"num_heads|num_attention_heads|num_head")
_LISTS = re.compile(r"(encoder_)?hidden_sizes|embed_dims?|dims?|stage_.*channels|channels|widths")


@dataclass(frozen=True)
class Tiny:
    """A tiny model and what it is trained on: `batch(step)` has another length in some steps."""

    name: str
    library: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module, int], Batch]


def shrink(config: Any, depth: int = 0) -> None:
    """Set the sizes of a configuration, and of those within it, by the names of its fields."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and depth < 3:
            shrink(value, depth + 1)
            continue
        small = _small(name, value)
        if small is not None:
            # Properties that are computed from other fields have no setter.
            with contextlib.suppress(AttributeError):
                setattr(config, name, small)
    _agree(config)
    layers = getattr(config, "num_hidden_layers", LAYERS)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and kinds and isinstance(layers, int):
            # One layer of each kind comes first.
            ordered = [*dict.fromkeys(kinds), *kinds]
            with contextlib.suppress(AttributeError):
                setattr(config, name, ordered[:layers])


def _agree(config: Any) -> None:
    """Set sizes that follow from others in some configurations."""
    known = vars(config)
    if "qk_rope_head_dim" in known and "head_dim" in known:
        config.head_dim = config.qk_rope_head_dim
        config.num_key_value_heads = config.num_attention_heads
    elif known.get("head_dim", 0) is None:
        config.head_dim = WIDTH // HEADS
    if {"expand", "num_heads", "head_dim"} <= known.keys():
        config.head_dim = config.expand * WIDTH // config.num_heads
    if "use_cache" in known:
        config.use_cache = False


def _small(name: str, value: Any) -> Any:
    if _SKIPPED.fullmatch(name) or isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
    if isinstance(value, list | tuple) and value and all(isinstance(x, int) for x in value):
        if _STAGES.fullmatch(name):
            return [1] * len(value)
        if _LISTS.fullmatch(name):
            return [WIDTH] * len(value)
        if _HEADS.fullmatch(name):
            return [2] * len(value)
        if name in ("image_size", "input_size"):
            return [IMAGE] * len(value)
    return None


def transformers_models() -> Iterator[Tiny]:
    """Yield one model for each type of configuration and head."""
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    heads = (
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, _causal),
        ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, _masked),
        ("seq2seq", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, _pairs),
        ("image", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, _images),
        ("audio", auto.MODEL_FOR_CTC_MAPPING_NAMES, _waveforms),
        ("audio classes", auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES, _waveforms),
        ("speech", auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, _speech),
    )
    for kind, mapping, batch in heads:
        for model_type, names in mapping.items():
            name = names if isinstance(names, str) else names[0]
            if not _has(transformers, name):
                continue

            def build(model_type: str = model_type, name: str = name) -> nn.Module:
                config = CONFIG_MAPPING[model_type]()
                kind = getattr(transformers, name)
                if not isinstance(config, kind.config_class):
                    config = config.get_text_config()
                shrink(config)
                config.num_labels = CLASSES
                for token, name_ in enumerate(("pad", "bos", "eos", "decoder_start")):
                    if getattr(config, f"{name_}_token_id", None) is None:
                        setattr(config, f"{name_}_token_id", min(token, 2))
                model: nn.Module = kind(config)
                return model

            yield Tiny(f"{model_type}/{kind}", "transformers", kind, build, batch)


def _has(library: Any, name: str) -> bool:
    """Return whether a library has a class, and what the class needs is installed."""
    try:
        return hasattr(library, name)
    except ImportError:
        return False


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


LENGTHS = (12, 12, 9, 16)
"""Of the sequences, by step."""


def _tokens(step: int, padded: bool = True) -> Batch:
    """Return token ids of another length in each step; a part of the second row is padding."""
    length = LENGTHS[step % len(LENGTHS)]
    tokens = torch.randint(3, VOCAB, (BATCH, length), generator=_generator(step))
    mask = torch.ones(BATCH, length, dtype=torch.long)
    if padded and step % 2:
        mask[1, length - 3 :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def _causal(model: nn.Module, step: int) -> Batch:
    del model
    batch = _tokens(step)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch | {"labels": labels}


def _masked(model: nn.Module, step: int) -> Batch:
    return _causal(model, step)


def _pairs(model: nn.Module, step: int) -> Batch:
    del model
    batch = _tokens(step)
    return batch | {"labels": torch.randint(3, VOCAB, (BATCH, 7), generator=_generator(step + 50))}


def _images(model: nn.Module, step: int) -> Batch:
    config: Any = model.config
    size = getattr(config, "image_size", IMAGE)
    size = size if isinstance(size, int) else IMAGE
    channels = getattr(config, "num_channels", 3)
    generator = _generator(step)
    return {
        "pixel_values": torch.randn(BATCH, channels, size, size, generator=generator),
        "labels": torch.randint(CLASSES, (BATCH,), generator=generator),
    }


def _features(model: nn.Module, step: int) -> Batch:
    """Return a waveform, or the features that the model takes in its place."""
    config: Any = model.config
    name = getattr(model, "main_input_name", "input_values")
    generator = _generator(step)
    if name == "input_features":
        bins = next((getattr(config, n) for n in ("num_mel_bins", "feature_projection_input_dim",
                     "input_feat_per_channel", "n_mels") if hasattr(config, n)), 80)  # fmt: skip
        frames = 2 * getattr(config, "max_source_positions", 32)
        shape = (BATCH, bins, frames) if "whisper" in config.model_type else (BATCH, frames, bins)
        return {name: torch.randn(*shape, generator=generator)}
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return {name: torch.randn(BATCH, config.max_length, config.num_mel_bins,
                                  generator=generator)}  # fmt: skip
    return {name: torch.randn(BATCH, SAMPLES, generator=generator)}


def _waveforms(model: nn.Module, step: int) -> Batch:
    labels = torch.randint(3, VOCAB, (BATCH, 3), generator=_generator(step + 50))
    if "CTC" not in type(model).__name__:
        labels = labels[:, 0] % CLASSES
    return _features(model, step) | {"labels": labels}


def _speech(model: nn.Module, step: int) -> Batch:
    labels = torch.randint(3, VOCAB, (BATCH, 7), generator=_generator(step + 50))
    return _features(model, step) | {"labels": labels}


def _timm_models() -> Iterator[Tiny]:
    """Yield one model of each module of timm: its smallest name."""
    try:
        import timm
    except ImportError:
        return
    for module in timm.list_modules():
        name = next(iter(sorted(timm.list_models(module=module), key=len)), None)
        if name is None:
            continue

        def build(name: str = name) -> nn.Module:
            return Classifier(timm.create_model(name, num_classes=CLASSES, img_size=IMAGE))

        yield Tiny(f"timm.{name}/image", "timm", "image", build, _labelled_images)


class Classifier(nn.Module):
    """A model of images with the loss of its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(pixel_values), labels)


def _labelled_images(model: nn.Module, step: int) -> Batch:
    del model
    generator = _generator(step)
    return {
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(CLASSES, (BATCH,), generator=generator),
    }


def all_models() -> Iterator[Tiny]:
    yield from transformers_models()
    yield from _timm_models()


def by_name(name: str) -> Tiny:
    return next(tiny for tiny in all_models() if tiny.name == name)


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Run a model on a batch; called in place of the model, so that its logits are not returned."""
    output = model(**batch)
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss
