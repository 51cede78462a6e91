"""Pre-norm blocks of Hugging Face decoders: each residual add and the norm after it in one kernel,
also from one block to the next, and norms in the dtype of the matmuls that read them.

A block has exactly the parts `input_layernorm`, `self_attn`, `post_attention_layernorm` and `mlp`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepscope.acceleration.pieces.norm import matched_norm
from stepscope.acceleration.replacement import Found, Left, Replacement, has_hooks
from stepscope.attention.inputs import matmul_dtype
from stepscope.kernels.norm import normed_sum
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.saved_tensors import saved_tensors_are_hooked

PIECE = "residual block"
_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_NORMS = ("input_layernorm", "post_attention_layernorm")


def find(model: nn.Module, copies: WeightCopies) -> Found:
    replacements, left = [], []
    blocks: dict[nn.Module, _Block] = {}
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        parts = dict(module.named_children())
        if not parts.keys() >= _PARTS:
            continue
        first, second = (_Norm.of(parts[norm]) for norm in _NORMS)
        if parts.keys() != _PARTS or first is None or second is None:
            left.append(Left(PIECE, name, "it has other parts than two RMSNorms, attention, MLP"))
        elif any(map(has_hooks, module.modules())):
            left.append(Left(PIECE, name, "it has hooks"))
        else:
            blocks[module] = _Block(module, first, second, copies)
    for module, following in _consecutive(model):
        if module in blocks and following in blocks:
            blocks[module].following = blocks[following]
    for module, block in blocks.items():
        replacements.append(Replacement(PIECE, names[module], module, block.forward))
    return replacements, left


def _consecutive(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the modules of each list with the one after them."""
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList):
            yield from zip(list(modules), list(modules)[1:], strict=False)


class _Norm(NamedTuple):
    module: Any
    eps: float
    offset: float

    @classmethod
    def of(cls, module: nn.Module) -> _Norm | None:
        """Return the norm that a module computes; None if it computes something else."""
        match = matched_norm(module)
        return None if match is None else cls(module, *match)

    def of_sum(
        self, x: Tensor, branch: Tensor | None, dtype: torch.dtype, amax: bool
    ) -> tuple[Tensor, Tensor]:
        """Return x + branch, or x, and its norm. `amax` is for layers in FP8."""
        weight = self.module.weight
        weight = weight + self.offset if self.offset else weight
        stream, normed = normed_sum(x, branch, weight, self.eps, dtype, amax=amax)
        return stream, normed.value


class _Normed(NamedTuple):
    """The norm of a stream, computed by the block before."""

    stream: weakref.ref[Tensor]
    version: int
    dtype: torch.dtype
    value: Tensor


class _Block:
    """The fused forward of one block."""

    def __init__(self, module: Any, first: _Norm, second: _Norm, copies: WeightCopies) -> None:
        self._module, self._original = module, module.forward
        self._copies = copies
        self._first, self._second = first, second
        self._normed: _Normed | None = None
        self.following: _Block | None = None

    def forward(self, module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or has_hooks(self._first.module) or has_hooks(self._second.module):
            return self._original(hidden_states, *args, **kwargs)
        dtype = matmul_dtype(hidden_states)
        amax = self._copies.fp8 is not None and self._copies.fp8.notes_amax
        read = self._take_normed(hidden_states, dtype)
        if read is None:
            _, read = self._first.of_sum(hidden_states, None, dtype, amax)
        branch, _ = module.self_attn(hidden_states=read, **kwargs)
        stream, read = self._second.of_sum(hidden_states, branch, dtype, amax)
        branch = module.mlp(read)
        following = self.following
        if following is None or not following.can_be_normed_early():
            return stream + branch
        stream, read = following._first.of_sum(stream, branch, dtype, amax)
        following._normed = _Normed(weakref.ref(stream), stream._version, dtype, read)
        return stream

    def can_be_normed_early(self) -> bool:
        """Return whether the block before may compute the first norm: nothing comes between, the
        weight is not sharded, and the forward pass is not recomputed in the backward pass, where
        the blocks run alone."""
        norm = self._first.module
        return not (
            has_hooks(self._module)
            or has_hooks(norm)
            or type(norm.weight) is not nn.Parameter
            or saved_tensors_are_hooked()
        )

    def _take_normed(self, stream: Tensor, dtype: torch.dtype) -> Tensor | None:
        normed, self._normed = self._normed, None
        if normed is None or saved_tensors_are_hooked():
            return None
        same = normed.stream() is stream and normed.version == stream._version
        return normed.value if same and normed.dtype == dtype else None
