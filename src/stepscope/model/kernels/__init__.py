"""Deprecated alias of `stepscope.kernels`; it will be removed in the next version."""

from __future__ import annotations

import sys
import warnings

from stepscope import kernels
from stepscope.kernels import cross_entropy

warnings.warn("stepscope.model.kernels is now stepscope.kernels", DeprecationWarning, stacklevel=2)
sys.modules[f"{__name__}.linear_cross_entropy"] = cross_entropy
for _name in kernels.__all__:
    globals()[_name] = getattr(kernels, _name)
