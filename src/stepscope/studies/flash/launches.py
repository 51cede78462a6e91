"""What the compiler made of our kernels: registers, spills and shared memory of each launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepscope.records.schema import Quantity


def launch_facts(run: Callable[[], object]) -> dict[str, Quantity]:
    """Of each kernel of ours that `run` launches, by the pass it is for."""
    from stepscope.attention import triton_launch

    with triton_launch.recorded_launches() as launches:
        run()
    facts: dict[str, Quantity] = {}
    for launch in launches:
        held = tile_facts(launch.tile) | compiled_facts(launch.kernel)
        facts |= {f"{launch.kind}.{name}": quantity for name, quantity in held.items()}
    return facts


def tile_facts(tile: Any) -> dict[str, Quantity]:
    """The delta kernel has rows and no tile."""
    if tile is None:
        return {}
    return {
        "tile_m": Quantity(value=tile.m, unit="rows"),
        "tile_n": Quantity(value=tile.n, unit="rows"),
        "warps": Quantity(value=tile.warps, unit="warps"),
        "stages": Quantity(value=tile.stages, unit="stages"),
    }


def compiled_facts(kernel: Any) -> dict[str, Quantity]:
    """Triton's interpreter compiles nothing, so there are none."""
    if kernel is None:
        return {}
    return {
        "registers": Quantity(value=kernel.n_regs, unit="registers"),
        "spills": Quantity(value=kernel.n_spills, unit="registers"),
        "shared_bytes": Quantity(value=kernel.metadata.shared, unit="B"),
    }
