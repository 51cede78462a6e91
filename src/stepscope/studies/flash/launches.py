"""What the compiler made of our kernels: registers, spills and shared memory of each launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepscope.records.schema import Quantity

Facts = dict[str, tuple[float, str]]
"""Values with their units."""


def launch_facts(run: Callable[[], object]) -> tuple[Quantity, ...]:
    """Of each kernel of ours that `run` launches; the variant is the pass it is for."""
    from stepscope.attention import triton_launch

    with triton_launch.recorded_launches() as launches:
        run()
    facts = {one.kind: tile_facts(one.tile) | compiled_facts(one.kernel) for one in launches}
    return tuple(
        Quantity(name=name, variant=kind, value=value, unit=unit)
        for kind, held in facts.items()
        for name, (value, unit) in held.items()
    )


def tile_facts(tile: Any) -> Facts:
    """The delta kernel has rows and no tile."""
    if tile is None:
        return {}
    return {
        "tile_m": (tile.m, "rows"),
        "tile_n": (tile.n, "rows"),
        "warps": (tile.warps, "warps"),
        "stages": (tile.stages, "stages"),
    }


def compiled_facts(kernel: Any) -> Facts:
    """Triton's interpreter compiles nothing, so there are none."""
    if kernel is None:
        return {}
    return {
        "registers": (kernel.n_regs, "registers"),
        "spills": (kernel.n_spills, "registers"),
        "shared_bytes": (kernel.metadata.shared, "B"),
    }
