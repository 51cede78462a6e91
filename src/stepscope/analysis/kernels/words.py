"""Classes of kernels by words in their names, for libraries without specific rules.

cuDNN, MIOpen, Composable Kernel, apex, FBGEMM, vLLM, SGLang, TensorRT-LLM and user-written Triton
kernels say what they do in plain words. The first matching line decides: a norm that also quantizes
is a reduction, a convolution that also transposes is a convolution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stepscope.analysis.kernels.classes import Class

_WORDS: dict[Class, str] = {
    "communication": (
        "allreduce all_reduce reduce_scatter reducescatter allgather all_gather alltoall"
        " all_to_all nvshmem msccl"
    ),
    "attention": (
        "fmha sdpa _attn_ _attention_ flash_attn flashattn sage_fwd sage_bwd sage_attn"
        " prefillwithpagedkv prefillwithraggedkv decodewithpagedkv"
    ),
    "matmul": (
        "convol conv1d conv2d conv3d conv_fwd conv_bwd conv_depthwise asmconv miopenconv winograd"
        " igemm dgrad_ dgrad2d_ wgrad_ wgrad2d_ fprop"
    ),
    "optimizer": "multi_tensor adam_ adamw_ _lamb_",
    "softmax": "softmax",
    "reduction": (
        "batchnorm batch_norm layernorm layer_norm rmsnorm rms_norm groupnorm group_norm"
        " instance_norm lpnorm _norm_ _bn_fw _bn_bw _pool_ pooling pool1d pool2d pool3d reduce_"
        " _sum_ topk"
    ),
    "copy/cast": (
        "transpose permute nchwtonhwc nhwctonchw im2col im2d2col col2im reshape_and_cache kvcache"
        " kv_cache quant _cast _copy memcpy concat"
    ),
    "elementwise": (
        "act_and_mul silu gelu swiglu relu rotary rope_ tensorop optensor op_tensor"
        " scalepackedtensor addtensor pointwise elementwise activation dropout"
    ),
}
"""Lower-case words; an underscore also matches the beginning or the end of the name."""
_LIBRARIES = (
    ("cudnn", "cuDNN"),
    ("MIOpen", "MIOpen"),
    ("ck_tile", "Composable Kernel"),
    ("ck::", "Composable Kernel"),
    ("aiter", "AITER"),
    ("fbgemm", "FBGEMM"),
    ("vllm", "vLLM"),
    ("sgl_", "SGLang"),
    ("tensorrt_llm", "TensorRT-LLM"),
    ("flashinfer", "FlashInfer"),
)
_LENGTH = re.compile(r"\d+")
_ARGUMENT = re.compile(r"N?S\d*_(?=\d)")
_FRAME = ("kentry", "device_kernel", "kernel")
"""Functions that only run what their first template argument names."""


def word_class(plain: str) -> Class | None:
    """Return the class that a bare function name states; None if no word matches."""
    return class_in(f"_{plain.lower()}_", _WORDS)


def class_in(text: str, words: Mapping[Class, str]) -> Class | None:
    """Return the first class of which a word is in the text; None if no word is."""
    return next((kind for kind, of in words.items() if any(w in text for w in of.split())), None)


def library(name: str) -> str:
    """Return the library of a kernel; empty if unknown."""
    return next((called for mark, called in _LIBRARIES if mark in name), "")


def demangled(name: str) -> str:
    """Return `scope::function` of a mangled C++ name, as ROCm writes many of them.

    If the function only runs a template argument (`ck_tile::kentry`), return the first argument.
    """
    at = 3 if name.startswith("_ZN") else 2
    parts: list[str] = []
    wanted = 0
    while (length := _LENGTH.match(name, at)) is not None:
        end = length.end() + int(length.group()[:6])
        parts.append(name[length.end() : end])
        at = end
        if name[at : at + 1] == "I" and parts[-1] in _FRAME:
            inner = _ARGUMENT.search(name, at)
            if inner is None:
                break
            at, wanted = inner.end(), len(parts)
    if wanted:
        parts = parts[: wanted - 1] + parts[wanted : wanted + 1]
    return "::".join(filter(None, parts)) or name
