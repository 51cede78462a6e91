"""Steps in bfloat16 on a CPU, for tests in which only the sizes of tensors matter."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class Bfloat16InFloat32(TorchDispatchMode):
    """Compute matmuls of bfloat16 tensors in float32, with results of the same size and dtype: a
    CPU without instructions for bfloat16 is 25 times as fast."""

    ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    SLOW = (
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        ATTENTION,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.SLOW or args[0].dtype != torch.bfloat16 or args[0].is_cuda:
            return func(*args, **kwargs)
        out = func(*(one.float() if torch.is_tensor(one) else one for one in args), **kwargs)
        if func is self.ATTENTION:
            out, lse = out
            return out.bfloat16(), lse
        return tree_map(torch.Tensor.bfloat16, out)
