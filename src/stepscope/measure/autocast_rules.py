"""The rules of CUDA autocast, applied on any device.

Autocast decides by the name of an operator and the device of its inputs: CUDA and CPU have
different lists. The lists of CUDA are those of torch's reference ("CUDA Op-Specific Behavior", and
`autocast_mode.h`); `CudaAutocast` casts the inputs of every torch function by them, so that the
dtypes of a GPU can be recorded without one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.measure.dispatch import FunctionMode

_NARROW = """
    addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution einsum gru_cell linear lstm_cell matmul mm
    multi_dot mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
"""
_WIDE = """
    acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
    cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div
    l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss nll_loss norm normalize pdist poisson_nll_loss pow
    prod reciprocal renorm rpow rsqrt rtruediv sinh smooth_l1_loss soft_margin_loss
    softmax softmin softplus sum tan triplet_margin_loss
"""
_WIDEST = """
    addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot
"""
NARROW = frozenset(_NARROW.split())
"""Operators that run in the dtype of autocast."""
_NORM = "rms_norm"
# In the list of torch 2.13, not in that of 2.11.
_LISTED = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_NORM}", "AutocastCUDA")
WIDE = frozenset([*_WIDE.split(), *([_NORM] if _LISTED else [])])
"""Operators that run in float32."""
WIDEST = frozenset(_WIDEST.split())
"""Operators that run in the widest dtype of their inputs."""
_EXACT = (torch.float16, torch.bfloat16, torch.float32)


class CudaAutocast(FunctionMode):
    """Casts the inputs of torch functions as autocast does on CUDA."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def run(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        dtype = self.dtype_of(rule_name(function), (arguments, keywords))
        if dtype is not None:
            arguments, keywords = tree_map(
                lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, (arguments, keywords)
            )
        return function(*arguments, **keywords)

    def dtype_of(self, name: str, inputs: Any) -> torch.dtype | None:
        """The dtype in which an operator runs; None if it keeps that of its inputs."""
        if name in NARROW:
            return self.dtype
        if name in WIDE:
            return torch.float32
        if name in WIDEST:
            dtypes = [leaf.dtype for leaf in tree_leaves(inputs) if _is_cast(leaf)]
            return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)
        return None


def rule_name(function: Any) -> str:
    """The name in the lists: `__pow__` is `pow`."""
    name: str = getattr(function, "__name__", "")
    return name.strip("_")


def _is_cast(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in _EXACT
