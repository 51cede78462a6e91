"""Former import paths that work with a warning for one version."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from stepscope.model.kernels import rms_norm
    from stepscope.model.kernels.linear_cross_entropy import linear_cross_entropy
import stepscope.kernels
assert rms_norm is stepscope.kernels.rms_norm
assert linear_cross_entropy is stepscope.kernels.linear_cross_entropy
print([str(one.message) for one in caught if one.category is DeprecationWarning
       and "stepscope" in str(one.message)])
"""


def test_the_former_package_of_the_kernels_imports_with_a_warning() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['stepscope.model.kernels is now stepscope.kernels']"
