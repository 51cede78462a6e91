"""Description of a kernel from its name: library, class, hardware unit, tile.

Names are parsed as the libraries write them and nothing is guessed: a field that the name does not
contain is empty. `describe` takes the name of a kernel, `describe_operator` that of an operator
(`aten::mm`), which stands for a kernel in a CPU trace.
"""

from __future__ import annotations

import functools
import re
from typing import Literal, NamedTuple

from stepscope.analysis.kernels.classes import Class
from stepscope.analysis.kernels.matmuls import matmul
from stepscope.analysis.kernels.operators import inductor_class, inductor_parts, operator_class
from stepscope.analysis.kernels.words import class_in, demangled, library, word_class

FILL = "Memset"
Role = Literal["", "forward", "backward", "dX", "dW"]


class Description(NamedTuple):
    """Properties of a kernel stated by its name; empty if the name does not contain them."""

    short: str
    """Readable name for tables."""
    library: str
    kind: Class
    unit: str = ""
    tile: str = ""
    layout: str = ""
    alignment: str = ""
    role: Role = ""


_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
_RETURN = re.compile(r"^(?:static )?(?:void|float|int)\s+")
_ITERATOR = "(at::TensorIterator"
_LAMBDA = re.compile(r"(\w+?)(?:_kernel_cuda|_kernel_impl|_kernel)$")
_FUNCTORS = (
    re.compile(r"CUDAFunctor(?:OnSelf|OnOther)?_(\w+)"),
    re.compile(
        r"native::(?:binary_internal::)?(?!(?:Binary|AUnary|BUnary)Functor)(\w+?)(?:Functor|Ops)\b"
    ),
)
_TRITON = re.compile(r"^triton_(poi|red|per|tem|for|spl)_fused(?:_|$)")
_FLASH_TILE = re.compile(
    r"kernel_traits<\s*(?:\(int\))?\d+,\s*(?:\(int\))?(\d+),\s*(?:\(int\))?(\d+)"
)
_TILE = re.compile(r"(?<![\dx])(\d+x\d+(?:x\d+)?)(?![\dx])")
_OWN: dict[str, tuple[Class, Role]] = {
    "forward_kernel": ("attention", "forward"),
    "delta_kernel": ("attention", "backward"),
    "split_kernel": ("attention", ""),
    "key_value_kernel": ("attention", "backward"),
    "query_kernel": ("attention", "backward"),
    "specialized_forward_kernel": ("attention", "forward"),
    "norm_forward_kernel": ("reduction", ""),
    "norm_backward_kernel": ("reduction", ""),
    "norm_weight_kernel": ("reduction", ""),
    "norm_scaled_kernel": ("elementwise", ""),
    "activation_forward_kernel": ("elementwise", ""),
    "activation_backward_kernel": ("elementwise", ""),
    # Names in earlier records.
    "gather_heads_kernel": ("elementwise", ""),
    "rms_norm_forward_kernel": ("reduction", ""),
    "rms_norm_backward_kernel": ("reduction", ""),
    "rms_norm_weight_kernel": ("reduction", ""),
    "rms_norm_scaled_kernel": ("elementwise", ""),
    "swiglu_forward_kernel": ("elementwise", ""),
    "swiglu_backward_kernel": ("elementwise", ""),
    "rotary_turn_kernel": ("elementwise", ""),
    "rotary_gather_kernel": ("elementwise", ""),
    "cross_entropy_rows_kernel": ("softmax", ""),
    "cross_entropy_short_rows_kernel": ("softmax", ""),
    "cross_entropy_count_kernel": ("reduction", ""),
    "cross_entropy_mean_kernel": ("reduction", ""),
    "scale_unless_one_kernel": ("elementwise", ""),
    "fp8_amax_kernel": ("reduction", ""),
    "fp8_scale_kernel": ("reduction", ""),
    "fp8_row_scales_kernel": ("reduction", ""),
    "fp8_delayed_kernel": ("reduction", ""),
    "fp8_cast_kernel": ("copy/cast", ""),
    "transpose_bytes_kernel": ("copy/cast", ""),
    "token_places_kernel": ("reduction", ""),
    "embedding_backward_kernel": ("reduction", ""),
    "adamw_table_kernel": ("optimizer", ""),
    "adamw_one_kernel": ("optimizer", ""),
    "compare_casts_kernel": ("reduction", ""),
    "recast_kernel": ("copy/cast", ""),
}
_AROUND_CUDNN = re.compile(r"cudnn::fusion::(?:compute_dot_do_o|convert_dq_to_16bits)")
"""Kernels before and after the matmuls of cuDNN's backward pass."""
_HALF_UNITS = {"bf16": "BF16 tensor cores", "f16": "FP16 tensor cores"}
_FLASH = re.compile(r"flash_(?:fwd|bwd)|FlashAttn(?:Fwd|Bwd)|flash::")
_FMHA_CUTLASS = re.compile(r"fmha_cutlass([FB])_(bf16|f16|f32)_(aligned|notaligned)_(\d+x\d+)")
_ATEN_MARKS = (
    "at::",
    "(anonymous namespace)",
    "<unnamed>",
    "cunn_",
    "CatArray",
    "cub::",
    "thrust::",
)
_ATEN: dict[Class, str] = {
    "softmax": "softmax SoftMax Softmax softMax",
    "optimizer": "multi_tensor_apply FusedAdam fused_adam _amp_",
    "copy/cast": (
        "CatArrayBatchedCopy _copy_kernel split_with_sizes index_select indexSelect gather_kernel"
        " scatter_gather index_elementwise index_put chunk_cat"
    ),
    "reduction": (
        "reduce_kernel layer_norm rms_norm Rowwise GammaBeta nll_loss embedding_ cross_entropy"
        " _norm_ partials_per_segment sum_and_scatter tensor_kernel_scan _scan_ max_pool avg_pool"
        " average_pool batch_norm groupnorm InternalGradients FusedParams"
    ),
    "elementwise": "elementwise triu_tril fill arange distribution dropout kernelPointwise",
}
"""Searched in the full name: template arguments say what an elementwise kernel does."""


@functools.lru_cache(maxsize=16384)
def describe(name: str) -> Description:
    """Describe a kernel, a copy or a fill on the device by its name."""
    if name.startswith(("Memcpy", "Memset", "[CUDA mem")):
        # A copy from pageable memory is staged and blocks the CPU, so it has its own name.
        pageable = ", pageable" if "Pageable" in name else ""
        return Description(name.partition(" (")[0] + pageable, "CUDA", "copy/cast")
    plain = _readable(name)
    return (
        _communication(plain)
        or _own(plain)
        or _attention(name, plain)
        or _inductor(name)
        or _matmul(name, plain)
        or _aten(name, plain)
        or _by_word(name, plain)
    )


def describe_operator(name: str) -> Description:
    """Describe an operator by its name; it stands for a kernel in a CPU trace."""
    kind = operator_class(name)
    library = name.partition("::")[0] if "::" in name else ""
    return Description(name, {"aten": "ATen"}.get(library, library), kind or "other")


def linear_role(described: Description, phase: str, operator: str) -> Role:
    """Return the role of a matmul in a linear layer: forward, dX or dW.

    A linear layer is x Wᵀ in row-major terms, which BLAS sees as `tn`; then dX is `nn` and dW `nt`.
    Batched matmuls (attention) have other layouts in every phase, so they get no role.
    """
    if described.kind != "matmul":
        return described.role
    if operator not in ("aten::mm", "aten::addmm", "aten::linear"):
        return ""
    if phase == "forward":
        return "forward"
    roles: dict[str, Role] = {"nn": "dX", "nt": "dW"}
    return roles.get(described.layout, "") if phase == "backward" else ""


def _communication(plain: str) -> Description | None:
    if plain.startswith(("ncclDevKernel", "ncclKernel", "ncclSymk")):
        return Description(plain, "NCCL", "communication")
    if "cross_device_reduce" in plain or plain.startswith(
        ("multimem_all", "two_shot_all", "one_shot_all")
    ):
        return Description(plain, "", "communication")
    return None


def _own(plain: str) -> Description | None:
    if plain not in _OWN:
        return None
    kind, role = _OWN[plain]
    return Description(plain, "Stepscope", kind, role=role)


def _attention(name: str, plain: str) -> Description | None:
    if "cudnn" in name:
        if _AROUND_CUDNN.search(name):
            return Description(plain, "cuDNN", "attention", role="backward")
        if plain.startswith("cudnn_generated_fort_native_sdpa"):
            return _cudnn_attention(plain)
    if plain.startswith("fmha_cutlass"):
        match = _FMHA_CUTLASS.match(plain)
        if match is None:
            return Description(plain, "CUTLASS", "attention")
        return Description(
            plain,
            "CUTLASS",
            "attention",
            unit=_HALF_UNITS.get(match.group(2), ""),
            tile=match.group(4),
            alignment=match.group(3),
            role="forward" if match.group(1) == "F" else "backward",
        )
    if ("flash" in name or "FlashAttn" in name) and _FLASH.search(name):
        tile = _FLASH_TILE.search(name)
        dtype = re.search(r"cutlass::(bfloat16_t|half_t)", name)
        backward = re.search(r"flash_bwd|FlashAttnBwd|Bwd", name) is not None
        unit = "" if dtype is None else ("BF16" if dtype.group(1) == "bfloat16_t" else "FP16")
        return Description(
            _flash_name(name, plain),
            "FlashAttention",
            "attention",
            unit=f"{unit} tensor cores" if unit else "",
            tile=f"{tile.group(1)}x{tile.group(2)}" if tile else "",
            role="backward" if backward else "forward",
        )
    return None


def _by_word(name: str, plain: str) -> Description:
    """Describe a kernel of any other library."""
    kind = word_class(plain) or "other"
    role: Role = ""
    if kind == "attention" and (side := re.search(r"fwd|forward|bwd|backward", plain.lower())):
        role = "forward" if side.group().startswith("f") else "backward"
    return Description(plain, library(name), kind, role=role)


def _cudnn_attention(plain: str) -> Description:
    tile = _TILE.search(plain)
    # cuDNN writes f16 for both 16-bit dtypes.
    return Description(
        plain.removeprefix("cudnn_generated_fort_native_"),
        "cuDNN",
        "attention",
        unit="FP16/BF16 tensor cores" if "_f16_" in plain else "",
        tile=tile.group(1) if tile else "",
        role="backward" if "bprop" in plain else "forward",
    )


def _flash_name(name: str, plain: str) -> str:
    match = re.search(r"flash_\w+|FlashAttn\w+", name.replace("pytorch_flash", ""))
    return match.group() if match else plain


def _inductor(name: str) -> Description | None:
    if not name.startswith("triton_"):
        return None
    match = _TRITON.match(name)
    if match is None:
        return None
    return Description(name, "Inductor", inductor_class(match.group(1), inductor_parts(name)))


def _matmul(name: str, plain: str) -> Description | None:
    parsed = matmul(name, plain)
    if parsed is None:
        return None
    return Description(
        parsed.short,
        parsed.library,
        "matmul",
        parsed.unit,
        parsed.tile,
        parsed.layout,
        parsed.alignment,
    )


def _aten(name: str, plain: str) -> Description | None:
    if not any(mark in name for mark in _ATEN_MARKS):
        return None
    if kind := class_in(name, _ATEN):
        operation = _operation(name)
        known = operation and operation not in plain
        return Description(f"{plain} · {operation}" if known else plain, "ATen", kind)
    if "at::native" in name or "at::cuda" in name:
        return Description(plain, "ATen", "other")
    if "cub::" in name or "thrust::" in name:
        return Description(plain, "CUB", "other")
    return None


def _operation(name: str) -> str:
    """Return the first operation among the template arguments; empty if none is named."""
    matches = [match for pattern in _FUNCTORS if (match := pattern.search(name)) is not None]
    operations = [(match.start(), match[1]) for match in matches]
    end = name.find(_ITERATOR)
    if end >= 0 and (match := _LAMBDA.search(name, max(0, end - 80), end)) is not None:
        operations.append((match.start(), match[1]))
    return min(operations)[1] if operations else ""


def _readable(name: str) -> str:
    """Return the bare function name: no return type, template arguments, scopes or parameters."""
    name = name.strip()
    bare = demangled(name) if name.startswith("_Z") else name
    if bare.startswith("std::enable_if"):
        bare = bare.partition("::type ")[2] or bare
    bare = _ANONYMOUS.sub("", bare)
    bare = bare.partition("<")[0].partition("(")[0]
    return _RETURN.sub("", bare).rpartition("::")[2].strip() or name[:80]
