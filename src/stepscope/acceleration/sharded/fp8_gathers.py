"""Weights of FSDP2 that are gathered in FP8: half the bytes of bfloat16.

    shard -> FP8, by a scale that all ranks share -> gathered bytes -> weight in its own dtype
                                                                  `-> operand of FP8 GEMMs

FSDP2 asks the local tensor of a parameter for what it sends (`fsdp_pre_all_gather`) and what it
makes of what it gets (`fsdp_post_all_gather`). The tensors are sent as bytes, which every backend
can. One all-reduce per update finds the largest magnitudes of all weights; scales are powers of
two, so that the gathered weight in bfloat16 or float32 has exactly the values in FP8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from stepscope.acceleration.sharded.units import is_unit, parameter_groups
from stepscope.errors import StepscopeError
from stepscope.kernels.fp8.casts import Quantized
from stepscope.kernels.fp8.recipe import E4M3, LARGEST, Recipe
from stepscope.kernels.fp8.reference import DTYPES, scale_of
from stepscope.kernels.weight_copies import WeightCopies

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_ALIGNED = 4
"""Numbers between two scales: GEMMs load them from multiples of 16 bytes."""


def why_not_gathered(parameter: Any, group: Any) -> str | None:
    """Return why a parameter of an FSDP2 group cannot be gathered in FP8; None if it can."""
    if parameter.offload_to_cpu:
        return "its shards are in host memory"
    if parameter.is_dtensor or parameter.sharded_param.ndim != 2:
        return "it is sharded in more than one way"
    if parameter.fsdp_placement.dim != 0 or (
        parameter.padded_sharded_param_size != parameter.sharded_size
    ):
        return "its rows are not divided evenly among the ranks"
    if group.post_forward_mesh_info not in (None, group.mesh_info):
        return "it is resharded to fewer ranks after the forward pass"
    return None


class Fp8Gathers(WeightCopies):
    """The weights of a model in FSDP2 that are gathered in FP8, until `undo()`."""

    def __init__(self, chosen: Sequence[tuple[Any, Any]]) -> None:
        """`chosen` are parameters of FSDP2, each with its group."""
        super().__init__(keep=False)
        self._weights = [_Gathered(parameter, group, self) for parameter, group in chosen]
        self._by_gathered: dict[int, _Gathered] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def owner(self, weight: Tensor) -> Tensor | None:
        found = self._find(weight)
        return None if found is None else found.parameter.sharded_param

    def quantized(
        self,
        weights: Sequence[Tensor],
        recipe: Recipe,
        transposed: bool = False,
        *,
        cached: bool = True,
    ) -> Quantized:
        found = self._find(weights[0]) if len(weights) == 1 and not transposed else None
        if found is None:
            return super().quantized(tuple(weights), recipe, transposed, cached=cached)
        return Quantized((found.values, found.inverse), None)

    def require(self) -> None:
        """Raise if something has replaced the tensors that FSDP2 asks: it would take bytes for
        weights."""
        for one in self._weights:
            if not hasattr(one.local, _PRE):
                raise StepscopeError(
                    "the shards of weights that are gathered in FP8 were replaced",
                    "call undo() of the report before a model is moved or its parameters are"
                    " assigned, then accelerate it again",
                )

    def undo(self) -> None:
        for one in self._weights:
            one.detach()
        self._weights.clear()

    def _find(self, weight: Tensor) -> _Gathered | None:
        known = self._by_gathered.get(id(weight))
        if known is None or known.gathered is not weight:
            self._by_gathered = {id(one.gathered): one for one in self._weights}
            known = self._by_gathered.get(id(weight))
        return known

    @torch.no_grad()
    def update_scales(self) -> None:
        """Find the scales of all weights, in one all-reduce of each group of ranks."""
        for group, weights in self._by_group():
            shards = [one.local for one in weights]
            largest = torch.stack([*torch._foreach_norm(shards, float("inf"))]).float()
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
            scales = scale_of(largest, E4M3).log2().floor().exp2()
            inverses = (1.0 / scales)[:, None].repeat(1, _ALIGNED)
            for one, scale, inverse in zip(weights, scales, inverses, strict=True):
                one.scale, one.inverse, one.version = scale, inverse[0], one.version_now

    def _by_group(self) -> Iterator[tuple[Any, list[_Gathered]]]:
        groups: dict[Any, list[_Gathered]] = {}
        for one in self._weights:
            groups.setdefault(one.process_group, []).append(one)
        yield from groups.items()


class _Gathered:
    """A weight that is gathered in FP8."""

    scale: Tensor
    inverse: Tensor
    version: int | None = None
    """The version of the weight that the scale belongs to."""

    def __init__(self, parameter: Any, group: Any, every: Fp8Gathers) -> None:
        self.parameter, self._every = parameter, every
        self.process_group = group.mesh_info.shard_process_group
        self._attached = self.local
        setattr(self._attached, _PRE, self._pre_all_gather)
        setattr(self._attached, _POST, self._post_all_gather)
        self._forget_gathered()

    def detach(self) -> None:
        for name in (_PRE, _POST):
            delattr(self._attached, name)
        self._forget_gathered()

    def _forget_gathered(self) -> None:
        """Let FSDP2 allocate its buffers again, for what it gathers from now on."""
        parameter = self.parameter
        parameter.all_gather_outputs = []
        vars(parameter).pop("_unsharded_param", None)
        parameter._init_extensions()

    @property
    def local(self) -> Tensor:
        found: Tensor = self.parameter.sharded_param._local_tensor
        return found

    @property
    def version_now(self) -> int:
        """A number that changes with the weight: an optimizer writes the whole or its shard."""
        return int(self.parameter.sharded_param._version + self.local._version)

    @property
    def gathered(self) -> Tensor | None:
        return getattr(self.parameter, "_unsharded_param", None)

    @property
    def values(self) -> Tensor:
        """The gathered weight in FP8, in a buffer of FSDP2."""
        outputs: Tensor
        (outputs,) = self.parameter.all_gather_outputs
        return outputs.view(DTYPES[E4M3]).view(self.parameter._orig_size)

    def _pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        del mesh, outer_size, outer_stride, module, mp_policy
        if self.version != self.version_now:
            self._every.update_scales()
        bound = LARGEST[E4M3]
        values = (self.local.detach().float() * self.scale).clamp_(-bound, bound)
        return (values.to(DTYPES[E4M3]).view(torch.uint8),), self.inverse

    def _post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        inverse: Tensor,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (values,) = outputs
        if values.dtype != torch.uint8:
            raise StepscopeError(f"weights were gathered as {values.dtype}, not as bytes")
        whole = values.view(DTYPES[E4M3])
        if out is None:
            made = whole.to(dtype) * inverse.to(dtype)
            return made, (made,)
        with _unsafe_preserve_version_counter(out):
            torch.mul(whole.to(dtype), inverse.to(dtype), out=out.detach())
        return None


def gather_in_fp8(model: nn.Module, weights: dict[int, str]) -> tuple[Fp8Gathers, dict[str, str]]:
    """Gather these weights of a model in FP8, by the identity of the parameter; return also why
    some are not, by name."""
    chosen, left = [], {}
    for unit in filter(is_unit, model.modules()):
        for group in parameter_groups(unit):
            unit.reshard()  # type: ignore[operator]
            for one in group.fsdp_params:
                name = weights.get(id(one.sharded_param))
                if name is None:
                    continue
                if (reason := why_not_gathered(one, group)) is not None:
                    left[name] = reason
                else:
                    chosen.append((one, group))
    return Fp8Gathers(chosen), left
