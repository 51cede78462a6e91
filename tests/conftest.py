"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before any test loads
them."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
