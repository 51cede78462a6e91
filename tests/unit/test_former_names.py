"""Former names that work with a warning for one version."""

from __future__ import annotations

import pytest

from command_line import python
from stepscope.cli.common import with_new_names
from stepscope.torch_tools.renamed import renamed_arguments

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
    done = python("-c", CODE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['stepscope.model.kernels is now stepscope.kernels']"


def test_former_names_of_arguments_work_with_a_warning() -> None:
    @renamed_arguments(joined="fused_projections")
    def build(size: int, fused_projections: bool = False) -> tuple[int, bool]:
        return size, fused_projections

    with pytest.warns(DeprecationWarning, match="joined is now fused_projections"):
        assert build(3, joined=True) == (3, True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="pass only fused_projections"):
        build(3, fused_projections=True, joined=True)  # type: ignore[call-arg]
    assert build(3, fused_projections=True) == (3, True)


@pytest.mark.parametrize(
    ("command", "former", "new"),
    [
        ("predict", "--keep=gates", "--activation-policy=gates"),
        ("run step", "joined", "fused-projections"),
        ("run step", "--searched", "--autotune-gemms"),
        ("run", "stepscope-as-made", "stepscope-low-precision-grads"),
    ],
)
def test_former_flags_and_values_work_with_a_warning(
    command: str, former: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert with_new_names([former, "other"], command) == [new, "other"]
    warning = capsys.readouterr().err
    assert f"{former.partition('=')[0]} is now {new.partition('=')[0]};" in warning
