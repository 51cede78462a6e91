"""Classes of operators by name, and of the kernels that Inductor fuses out of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.analysis.kernel_names import Class

MATMUL = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "addbmm", "mv", "addmv", "dot",
          "_scaled_mm", "_grouped_mm", "convolution", "_convolution", "mkldnn_convolution",
          "convolution_backward", "_int_mm", "einsum", "outer", "cudnn_convolution"}  # fmt: skip
SOFTMAX = {"softmax", "_softmax", "log_softmax", "_log_softmax", "_softmax_backward_data",
           "_log_softmax_backward_data", "_safe_softmax", "prepare_softmax_online"}  # fmt: skip
REDUCTION = {"sum", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "var", "std", "norm",
             "cumsum", "prod", "any", "all", "var_mean", "std_mean", "logsumexp", "sum_to_size",
             "native_layer_norm", "native_layer_norm_backward", "layer_norm", "rms_norm",
             "_fused_rms_norm", "_fused_rms_norm_backward", "native_batch_norm",
             "linalg_vector_norm",
             "nll_loss", "nll_loss_nd", "nll_loss_forward", "nll_loss_backward",
             "cross_entropy_loss", "embedding_dense_backward", "embedding_backward", "isfinite",
             "_local_scalar_dense", "item", "topk", "sort", "nonzero", "group_norm",
             "scatter_add", "scatter_add_", "index_add", "index_add_"}  # fmt: skip
COPY = {"copy_", "copy", "clone", "contiguous", "to", "_to_copy", "cat", "stack", "slice_backward",
        "index_select", "gather", "index", "embedding", "repeat", "pad", "constant_pad_nd", "roll",
        "flip", "scatter", "scatter_", "index_put_", "_index_put_impl_", "index_copy_", "split",
        "select_backward", "split_with_sizes_copy", "_chunk_cat", "resize_", "unfold_backward",
        "repeat_interleave"}  # fmt: skip
VIEWS = {"view", "t", "transpose", "permute", "expand", "reshape", "unsqueeze", "squeeze", "slice",
         "select", "as_strided", "_unsafe_view", "detach", "alias", "unbind", "chunk", "narrow",
         "flatten", "unflatten", "empty", "empty_like", "empty_strided", "_reshape_alias",
         "lift_fresh", "detach_", "new_empty", "result_type", "numpy_T", "mT", "adjoint",
         "requires_grad_", "set_", "split_with_sizes", "resolve_conj", "resolve_neg", "expand_as",
         "view_as", "is_nonzero", "new_empty_strided"}  # fmt: skip
_ATTENTION = re.compile(r"scaled_dot_product|flash_attention|efficient_attention|flex_attention")
_OPTIMIZER = re.compile(r"^_foreach_|^_fused_(adam|adamw|sgd|adagrad)|^_amp_")
_COMMUNICATION = re.compile(
    r"^(c10d|_c10d_functional|nccl|gloo|record_param_comms|_allgather_base_|all_?reduce)"
)
_INDUCTOR_NAMES = re.compile(r"^triton_\w{3}_fused_?(.*?)_?\d*$")
_KNOWN = sorted(MATMUL | SOFTMAX | REDUCTION | COPY | VIEWS, key=len, reverse=True)


def operator_class(name: str) -> Class | None:
    """The class of `aten::mm` and its like; None for what only contains other operators."""
    named = named_class(name)
    return "elementwise" if named is None and name.startswith("aten::") else named


def named_class(name: str) -> Class | None:
    """The class of an operator that is known by name; None for all others."""
    space, _, bare = name.rpartition("::")
    bare = bare.partition(".")[0]
    if _COMMUNICATION.match(name) or _COMMUNICATION.match(bare):
        return "communication"
    if _ATTENTION.search(bare) or "attention" in space:
        return "attention"
    if space == "stepscope" and "attention" in bare:
        return "attention"
    if _OPTIMIZER.match(bare):
        return "optimizer"
    if space != "aten":
        return None
    for names, kind in (
        (MATMUL, "matmul"),
        (SOFTMAX, "softmax"),
        (REDUCTION, "reduction"),
        (COPY | VIEWS, "copy/cast"),
    ):
        if bare in names:
            return kind  # type: ignore[return-value]
    return None


def inductor_parts(name: str) -> list[str]:
    """The operators that a fused kernel's name lists: `triton_poi_fused_add_mul_3` -> add, mul."""
    found = _INDUCTOR_NAMES.match(name)
    rest = found.group(1) if found else ""
    parts: list[str] = []
    while rest:
        known = next((k for k in _KNOWN if rest == k or rest.startswith(f"{k}_")), None)
        part = known or rest.partition("_")[0]
        if part:
            parts.append(part)
        rest = rest[len(part) + 1 :]
    return parts


def inductor_class(kind: str, parts: list[str]) -> Class:
    """By the form of the kernel (poi, red, per, tem, …) and what was fused into it."""
    joined = "_".join(parts)
    if kind == "tem":
        if "attention" in joined:
            return "attention"
        return "matmul" if MATMUL & set(parts) else "other"
    if "softmax" in joined:
        return "softmax"
    if kind in ("red", "per", "spl"):
        return "reduction"
    if kind == "for":
        return "optimizer"
    moved = COPY | VIEWS
    return "copy/cast" if parts and set(parts) <= moved else "elementwise"
