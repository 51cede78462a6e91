"""Modules without dependencies load and work without torch."""

from __future__ import annotations

import pytest

from command_line import without_torch


@pytest.mark.parametrize(
    "module",
    [
        "stepscope.model",
        "stepscope.model.checkpointing",
        "stepscope.model.config",
        "stepscope.model.cost",
        "stepscope.model.sizes",
        "stepscope.attention",
        "stepscope.attention.cost",
        "stepscope.attention.registry",
        "stepscope.parallel",
        "stepscope.parallel.buckets",
    ],
)
def test_loads(module: str) -> None:
    done = without_torch(f"import {module}; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_costs_are_computed_without_torch() -> None:
    done = without_torch(
        """
        from stepscope.attention import IMPLEMENTATION_NAMES, implementation
        from stepscope.errors import UsageError
        from stepscope.model import find_size, precision
        from stepscope.model.cost import activation_bytes, flops

        config = find_size("xl")
        flops(config, 4, 512)
        for name in IMPLEMENTATION_NAMES:
            activation_bytes(config, 4, 512, precision("bf16"), name)
        try:
            implementation("flush")
        except UsageError as error:
            print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "attention 'flush' does not exist" in done.stdout


@pytest.mark.parametrize(
    "package", ["stepscope.model", "stepscope.attention", "stepscope.optim", "stepscope.parallel"]
)
def test_every_public_name_exists(package: str) -> None:
    module = __import__(package, fromlist=["__all__"])
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = module.nonsense
