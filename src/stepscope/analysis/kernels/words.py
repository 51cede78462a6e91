"""Classes of kernels by the words in their names, for libraries that have no rules of their own.

cuDNN, MIOpen, Composable Kernel, apex, FBGEMM, vLLM, SGLang, TensorRT-LLM and Triton kernels of
users say what they do in plain words. The first line that matches decides: a norm that also
quantizes is a reduction, a convolution that also transposes is a convolution.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.analysis.kernels.names import Class

_WORDS: tuple[tuple[Class, tuple[str, ...]], ...] = (
    ("communication", ("allreduce", "all_reduce", "reduce_scatter", "reducescatter", "allgather",
                       "all_gather", "alltoall", "all_to_all", "nvshmem", "msccl")),
    ("attention", ("fmha", "sdpa", "_attn_", "_attention_", "flash_attn", "flashattn", "sage_fwd",
                   "sage_bwd", "sage_attn", "prefillwithpagedkv", "prefillwithraggedkv",
                   "decodewithpagedkv")),
    ("matmul", ("convol", "conv1d", "conv2d", "conv3d", "conv_fwd", "conv_bwd", "conv_depthwise",
                "asmconv", "miopenconv", "winograd", "igemm", "dgrad_", "dgrad2d_", "wgrad_",
                "wgrad2d_", "fprop")),
    ("optimizer", ("multi_tensor", "adam_", "adamw_", "_lamb_")),
    ("softmax", ("softmax",)),
    ("reduction", ("batchnorm", "batch_norm", "layernorm", "layer_norm", "rmsnorm", "rms_norm",
                   "groupnorm", "group_norm", "instance_norm", "lpnorm", "_norm_", "_bn_fw",
                   "_bn_bw", "_pool_", "pooling", "pool1d", "pool2d", "pool3d", "reduce_", "_sum_",
                   "topk")),
    ("copy/cast", ("transpose", "permute", "nchwtonhwc", "nhwctonchw", "im2col", "im2d2col",
                   "col2im", "reshape_and_cache", "kvcache", "kv_cache", "quant", "_cast", "_copy",
                   "memcpy", "concat")),
    ("elementwise", ("act_and_mul", "silu", "gelu", "swiglu", "relu", "rotary", "rope_",
                     "tensorop", "optensor", "op_tensor", "scalepackedtensor", "addtensor",
                     "pointwise", "elementwise", "activation", "dropout")),
)  # fmt: skip
"""In lower case; an underscore also stands for the beginning or the end of the name."""
_LIBRARIES = (
    ("cudnn", "cuDNN"), ("MIOpen", "MIOpen"), ("ck_tile", "Composable Kernel"),
    ("ck::", "Composable Kernel"), ("aiter", "AITER"), ("fbgemm", "FBGEMM"), ("vllm", "vLLM"),
    ("sgl_", "SGLang"), ("tensorrt_llm", "TensorRT-LLM"), ("flashinfer", "FlashInfer"),
)  # fmt: skip
_LENGTH = re.compile(r"\d+")
_ARGUMENT = re.compile(r"N?S\d*_(?=\d)")
_FRAME = ("kentry", "device_kernel", "kernel")
"""Functions that only run what their first template argument names."""


def word_class(plain: str) -> Class | None:
    """The class that the bare name of a function says; None where no word does."""
    text = f"_{plain.lower()}_"
    for kind, words in _WORDS:
        for word in words:
            if word in text:
                return kind
    return None


def library(name: str) -> str:
    return next((called for mark, called in _LIBRARIES if mark in name), "")


def demangled(name: str) -> str:
    """`scope::function` of a mangled C++ name: ROCm writes many of them as they are.

    Where the function only runs a template argument (`ck_tile::kentry`), the first of those.
    """
    at = 3 if name.startswith("_ZN") else 2
    parts: list[str] = []
    wanted = 0
    while (found := _LENGTH.match(name, at)) is not None:
        end = found.end() + int(found.group()[:6])
        parts.append(name[found.end() : end])
        at = end
        if name[at : at + 1] == "I" and parts[-1] in _FRAME:
            inner = _ARGUMENT.search(name, at)
            if inner is None:
                break
            at, wanted = inner.end(), len(parts)
    if wanted:
        parts = parts[: wanted - 1] + parts[wanted : wanted + 1]
    return "::".join(filter(None, parts)) or name
