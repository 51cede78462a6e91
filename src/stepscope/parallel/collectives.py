"""Collectives that were renamed between torch versions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# torch 2.13 renamed them; the old names emit a warning there.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
