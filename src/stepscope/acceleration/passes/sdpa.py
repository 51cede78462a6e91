"""Naive attention becomes the call of `scaled_dot_product_attention` that its author would write.

The pass `attention` uses what is fastest: kernels for windows and documents, cuDNN. This one is for
eager steps, in which the gain of that one call is measured. A mask is looked at when it is known:
if it is causal, the call says so instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from stepscope.acceleration.passes.in_place import write_out_of_place
from stepscope.acceleration.passes.masks import MaskRules
from stepscope.acceleration.passes.matching import (
    Applied,
    Left,
    Outcome,
    calls_of,
    line_of,
    value_of,
)
from stepscope.acceleration.passes.naive_attention import (
    BROADCAST,
    SOFTMAX,
    Call,
    naive_attention,
)
from stepscope.torch_tools.capturing import is_capturing
from stepscope.torch_tools.derivatives import transforms_active

NAME = "sdpa"
_MASKED_BELOW = -1e4
"""Scores to which less than this is added have no weight next to others."""
_MAX_INSPECTED = 32
"""Masks of one call that are inspected, which waits for the device: later ones are like them."""


def call_sdpa(module: GraphModule) -> list[Outcome]:
    """Replace each naive attention of a retraced graph."""
    graph = module.graph
    write_out_of_place(graph)
    outcomes: list[Outcome] = []
    for node in calls_of(graph, *SOFTMAX, torch.ops.aten.div.Tensor):
        found = naive_attention(graph, node, for_sdpa=True)
        if isinstance(found, str):
            outcomes.append(Left(NAME, found, line_of(node)))
        elif found is not None:
            outcomes.append(_rewrite(module, found))
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return outcomes


def _rewrite(module: GraphModule, call: Call) -> Outcome:
    line = line_of(call.out)
    q, k, v = (value_of(x).shape for x in (call.q, call.k, call.v))
    if not q[0] == k[0] == v[0] or k[1] != v[1] or q[1] % k[1]:
        return Left(NAME, BROADCAST, line)
    if call.softcap is not None:
        return Left(NAME, "its scores are capped", line)
    is_causal = call.rules == MaskRules(is_causal=True) and not call.is_opaque
    mask = None if is_causal else call.in_memory
    if mask is None and not is_causal and (call.is_opaque or call.mask is not None):
        return Left(NAME, "its mask is applied in a form that is not known", line)
    name = f"sdpa_{sum(node.op == 'call_module' for node in module.graph.nodes)}"
    module.add_submodule(name, Sdpa(is_causal, call.scale, call.dropout, call.hides_all))
    with module.graph.inserting_before(call.out):
        new = module.graph.call_module(name, (call.q, call.k, call.v, mask))
        new.meta = {key: x for key, x in call.out.meta.items() if key != "val"}
        last = call.layout.restore(module.graph, new)
        last.meta = dict(call.out.meta)
    call.out.replace_all_uses_with(last)
    module.graph.erase_node(call.out)
    return Applied(NAME, "causal" if is_causal else "no mask" if mask is None else "mask", line)


class _Settings(NamedTuple):
    is_causal: bool
    scale: float | None
    dropout: float
    hides_all: bool
    """A query without a visible key has an output of zeros; else it is the mean of all values."""


class Sdpa(nn.Module):
    """One call, with (batch, heads, seq, d) in and out."""

    def __init__(self, *settings: Any) -> None:
        super().__init__()
        self._settings = _Settings(*settings)
        self._inspected, self._all_causal = 0, True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if transforms_active():
            return _Mapped.apply(q, k, v, mask, self)  # type: ignore[no-any-return, no-untyped-call]
        is_causal, scale, dropout, hides_all = self._settings
        if mask is not None and self._is_causal(mask):
            is_causal, mask = True, None
        elif mask is not None and mask.dtype not in (torch.bool, q.dtype):
            mask = mask.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        if mask is None or mask.dtype != torch.bool or hides_all:
            return out
        mean = v.mean(-2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1)
        return torch.where(mask.any(-1, keepdim=True), out, mean.to(out.dtype))

    def _is_causal(self, mask: Tensor) -> bool:
        """Return whether the mask is causal: the kernel then skips half of the work."""
        rows, columns = mask.shape[-2:]
        if rows != columns or rows < 2 or mask.numel() != rows * columns or mask.requires_grad:
            return False
        enough = self._inspected >= _MAX_INSPECTED and self._all_causal
        if enough or is_capturing():
            return self._all_causal and self._inspected > 0
        self._inspected += 1
        lower = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
        mask = mask.reshape(rows, columns)
        parts = (mask,) if mask.dtype == torch.bool else (mask == 0, mask > _MASKED_BELOW)
        found = all(torch.equal(part, lower) for part in parts)
        self._all_causal &= found
        return found


class _Mapped(torch.autograd.Function):
    """The call within `vmap`, which would run the kernel once for each sample: the mapped dimension
    becomes one of its batch."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Sdpa) -> Tensor:
        return call(q, k, v, mask)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise NotImplementedError("the operators of the rule for vmap have their own backward")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        call: Sdpa,
    ) -> tuple[Tensor, int]:
        def flat(x: Tensor, dim: int | None) -> Tensor:
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        q, k, v = (flat(x, dim) for x, dim in zip((q, k, v), in_dims, strict=False))
        batch = q.shape[0] // info.batch_size
        dim = in_dims[3]
        if mask is not None and (dim is not None or mask.shape[:-3].numel() > 1):
            mask = mask[None] if dim is None else mask.movedim(dim, 0)
            while mask.dim() < 5:
                mask = mask.unsqueeze(1)
            mask = mask.expand(info.batch_size, batch, *mask.shape[2:]).flatten(0, 1)
        return call(q, k, v, mask).unflatten(0, (info.batch_size, batch)), 0
