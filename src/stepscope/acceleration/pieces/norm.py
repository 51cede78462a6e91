"""RMSNorm and LayerNorm in one kernel each way, together with the residual add before them.

A norm is recognized by what it computes: a module with a weight, and perhaps a bias, and no
children is compared with `rms_norm` and `layer_norm` in float32, on inputs so small that its
epsilon decides the result.

The last add of a block and the norm that reads its result, that of the next block or the one after
all blocks, are one kernel too: a `Sum` remembers the norm that read its result in the call before.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from stepscope.acceleration.forward_registry import forward_below
from stepscope.acceleration.replacement import Found, Left, Replacement, has_hooks
from stepscope.attention.inputs import autocast_dtype
from stepscope.kernels.norm import (
    MAX_COLUMNS,
    Computed,
    normed_sum,
    plain_layer_norm,
    plain_rms_norm,
    sum_before_norm,
)
from stepscope.kernels.weight_copies import WeightCopies
from stepscope.torch_tools.saved_tensors import saved_tensors_are_hooked

PIECE, LAYER_NORM = "RMSNorm", "LayerNorm"
_SCALES = (1.0, 1e-3)
"""Scale of the inputs that are compared; with the second, the epsilon is as large as the mean."""
_TOLERANCE = 1e-4
_EPSILONS = ("eps", "variance_epsilon", "epsilon")
_USUAL = (1e-5, 1e-6, 1e-12)
"""Epsilons of LayerNorms that have no attribute for it."""
_OTHER_NORMS = ("batch", "group", "instance")
_SUMS: Any = WeakTensorKeyDictionary()
"""The `Sum` that returned a stream."""


class Formula(NamedTuple):
    """What a norm computes: an RMSNorm, or a LayerNorm if it is `centered`."""

    epsilon: float
    offset: float = 0.0
    """Constant that is added to the weight; Gemma adds 1."""
    centered: bool = False

    def plain(self, x: Tensor, norm: Any) -> Tensor:
        if self.centered:
            return plain_layer_norm(x, norm.weight, getattr(norm, "bias", None), self.epsilon)
        return plain_rms_norm(x, norm.weight + self.offset, self.epsilon)


class _Early(NamedTuple):
    """The norm of a stream, computed by the add before it."""

    stream: weakref.ref[Tensor]
    state: object
    norm: Computed

    def is_of(self, x: Tensor, state: object) -> bool:
        return self.stream() is x and self.state == state


class Norm:
    """A norm of a model, computed by the fused kernel."""

    def __init__(self, module: Any, formula: Formula, copies: WeightCopies) -> None:
        self.module, self.formula, self._copies = module, formula, copies
        self._original = forward_below(module)
        self._dtypes: dict[Any, torch.dtype] = {}
        self._dtype: torch.dtype | None = None
        self._early: _Early | None = None
        self._missed = False
        """True if the last norm that was computed early was not read."""

    @property
    def piece(self) -> str:
        return LAYER_NORM if self.formula.centered else PIECE

    @property
    def is_dense(self) -> bool:
        """True unless the weight is sharded."""
        return type(self.module.weight) in (Tensor, nn.Parameter)

    def declines(self, *_: Any, **__: Any) -> str:
        return "" if self.is_dense else "its weight is sharded"

    def forward(self, _: nn.Module, x: Tensor) -> Tensor:
        return self.read(x, self.output_dtype(x.dtype))[1]

    def of_sum(
        self,
        x: Tensor,
        branch: Tensor | None,
        dtype: torch.dtype,
        computed: Computed | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return x + branch, or x, and its norm. The kernel adds the gradients of both."""
        stream, normed = normed_sum(
            x,
            branch,
            self.module.weight,
            self.formula.epsilon,
            dtype,
            through=True,
            computed=computed,
            **self._options,
        )
        return stream, normed.value

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "bias": getattr(self.module, "bias", None),
            "offset": self.formula.offset,
            "centered": self.formula.centered,
            "amax": self._copies.notes_amax,
        }

    def read(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return x and its norm, which the add before may have computed already."""
        early, self._early, self._dtype = self._early, None, dtype
        # What is recomputed in the backward pass runs without the add before.
        alone = saved_tensors_are_hooked()
        if early is not None and not alone and early.is_of(x, self._state(x, dtype)):
            return self.of_sum(x, None, dtype, early.norm)
        self._missed = early is not None
        if x in _SUMS and not alone:
            _SUMS[x].reader = self
        return self.of_sum(x, None, dtype)

    def read_early(self, x: Tensor, branch: Tensor) -> Tensor | None:
        """Return x + branch and keep its norm for the next `read`; None if that is not possible or
        the last one was not read."""
        missed = self._missed or self._early is not None
        self._early, self._missed = None, False
        weight, dtype = self.module.weight, self._dtype
        if (
            missed
            or dtype is None
            or type(weight) is not nn.Parameter
            or not weight.shape[0] == x.shape[-1] == branch.shape[-1]
            or x.shape != branch.shape
            or saved_tensors_are_hooked()
        ):
            return None
        stream, computed = sum_before_norm(
            x, branch, weight, self.formula.epsilon, dtype, **self._options
        )
        self._early = _Early(weakref.ref(stream), self._state(stream, dtype), computed)
        return stream

    def _state(self, x: Tensor, dtype: torch.dtype) -> object:
        learned = (self.module.weight, getattr(self.module, "bias", None))
        version = None if x.is_inference() else x._version
        return dtype, version, [(id(p), p._version) for p in learned if p is not None]

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the original's output for an input of that dtype: what autocast makes
        of it is up to torch, and depends on the device."""
        weight = self.module.weight
        key = dtype, weight.dtype, weight.device.type, autocast_dtype(weight)
        if key not in self._dtypes:
            with torch.no_grad():
                probe = torch.zeros(1, weight.shape[0], dtype=dtype, device=weight.device)
                self._dtypes[key] = self._original(probe).dtype
        return self._dtypes[key]


class Sum:
    """The last residual add of a block, fused with the norm that reads its result."""

    def __init__(self) -> None:
        self.reader: Norm | None = None

    def __call__(self, x: Tensor, branch: Tensor) -> Tensor:
        if self.reader is not None:
            total = self.reader.read_early(x, branch)
            if total is not None:
                return total
            self.reader = None
        total = x + branch
        _SUMS[total] = self
        return total


def find(model: nn.Module, norms: dict[nn.Module, Norm]) -> Found:
    replacements, left = [], []
    for name, module in model.named_modules():
        if module in norms:
            fused = norms[module]
            replacements.append(
                Replacement(fused.piece, name, module, fused.forward, fused.declines)
            )
        elif _may_be_norm(module):
            reason = "it has hooks" if has_hooks(module) else "it computes something else"
            left.append(Left(LAYER_NORM if _has_bias(module) else PIECE, name, reason))
    return replacements, left


def matched_norms(model: nn.Module, copies: WeightCopies) -> dict[nn.Module, Norm]:
    """Return the norms that the kernels can compute. Those with hooks are not compared: a copy of
    them would have the hooks."""
    candidates = (one for one in model.modules() if _may_be_norm(one) and not has_hooks(one))
    formulas = ((module, _matched(module)) for module in candidates)
    return {
        module: Norm(module, formula, copies) for module, formula in formulas if formula is not None
    }


def is_called_norm(module: nn.Module) -> bool:
    """Return whether a module has the name of a norm over the last dimension."""
    kind = type(module).__name__.lower()
    return "norm" in kind and not any(other in kind for other in _OTHER_NORMS)


def _may_be_norm(module: nn.Module) -> bool:
    if not is_called_norm(module):
        return False
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    return (
        parameters.keys() <= {"weight", "bias"}
        and weight is not None
        and weight.dim() == 1
        and weight.shape[0] <= MAX_COLUMNS
        and not any(True for _ in module.children())
    )


def _has_bias(module: nn.Module) -> bool:
    return isinstance(getattr(module, "bias", None), Tensor)


def _candidates(module: nn.Module) -> list[Formula]:
    known = [float(v) for n in _EPSILONS if isinstance(v := getattr(module, n, None), float)]
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        known = [torch.finfo(torch.float32).eps]
    epsilons = dict.fromkeys((*known, *_USUAL))
    centered = [Formula(epsilon, centered=True) for epsilon in epsilons]
    if _has_bias(module):
        return centered
    return [Formula(epsilon, offset) for epsilon in known for offset in (0.0, 1.0)] + centered


@torch.no_grad()
def _matched(module: nn.Module) -> Formula | None:
    """Return the formula that the module computes in float32; None if there is none."""
    probe: Any = copy.deepcopy(module).float().cpu()
    generator = torch.Generator().manual_seed(0)
    for parameter in probe.parameters():
        # Distinct values: a fresh norm has ones, which would hide an offset or a missing weight.
        parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    size = (2, 3, probe.weight.shape[0])
    inputs = [(torch.randn(size, generator=generator) + 0.1) * scale for scale in _SCALES]
    try:
        outputs = [probe(x) for x in inputs]
    except Exception:
        # It is not a function of one tensor.
        return None
    # Without the bias, next to which the rest may be small.
    bias = probe.bias if _has_bias(probe) else torch.zeros(())
    for formula in _candidates(module):
        expected = [formula.plain(x, probe) for x in inputs]
        if all(
            isinstance(actual, Tensor)
            and actual.shape == exact.shape
            and (actual - exact).norm() <= _TOLERANCE * (exact - bias).norm()
            for actual, exact in zip(outputs, expected, strict=True)
        ):
            return formula
    return None
