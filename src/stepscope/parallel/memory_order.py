"""Memory order of the tensors that ranks exchange, and of the gradients that optimizers read.

A message has the values of a tensor in its logical order, contiguous and without the lazy bits of
`conj()` and `imag`: a rank's strides then do not matter to the others. A gradient has the strides
of its parameter, as autograd makes it: torch's fused optimizers pair their elements by address.
"""

from __future__ import annotations

import torch
from torch import Tensor


def in_logical_order(tensor: Tensor) -> Tensor:
    """The tensor as a message: contiguous and resolved; the tensor itself if it is both."""
    return tensor.contiguous().resolve_conj().resolve_neg()


def in_order_of(parameter: Tensor, values: Tensor) -> Tensor:
    """The values with the strides of the parameter; `values` itself if it has them."""
    same = values.stride() == parameter.stride() or (
        values.is_contiguous() and parameter.is_contiguous()
    )
    if same and not (values.is_conj() or values.is_neg()):
        return values
    return torch.empty_like(parameter, dtype=values.dtype).copy_(values)


def as_real(tensor: Tensor) -> Tensor:
    """A view of a complex tensor as pairs of real numbers, which every backend can send; any other
    tensor itself."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
