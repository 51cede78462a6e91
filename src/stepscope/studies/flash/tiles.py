"""Measuring the tiles of one of our kernels: each is compiled, launched and timed, or does not fit.

The other kernels of a call keep their own tiles; the profiler gives the time of this one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stepscope.attention.tiles import Pass, Tile, tiles
from stepscope.records.schema import Quantity, Series
from stepscope.studies.attention_workload import AttentionStep
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.flash.cases import shape_of
from stepscope.studies.flash.launches import Facts, compiled_facts, tile_facts

CHOSEN = "chosen"
"""The series of the tile that the table of tiles gives, with its own warps."""


def measure_tiles(config: dict[str, Any], bench: Bench) -> Measurement:
    if bench.device.kind != "cuda":
        raise CaseSkipped("tiles are those of a GPU kernel, and this is a CPU")
    import torch

    which: Pass = config["pass"]
    step = AttentionStep(shape_of(config).workload("triton"), bench.device)
    capability = torch.cuda.get_device_capability(bench.device.torch_device)
    chosen = tiles(which, config["head"], 2, capability)[0]
    # The limit on registers is part of the choice and not of the size.
    wanted = {CHOSEN: chosen} | {
        f"{m}x{n}": chosen._replace(m=m, n=n, warps=config["warps"], registers=0)
        for m in config["sizes"]
        for n in config["sizes"]
    }
    series: list[Series] = []
    found_facts = _processor(torch.cuda.get_device_properties(bench.device.torch_device))
    refused: dict[str, str] = {}
    for done, (name, tile) in enumerate(wanted.items()):
        bench.progress(done, len(wanted), "tiles")
        found = measure_tile(which, tile, step.results, config["samples"], bench)
        if isinstance(found, str):
            refused[name] = found
            continue
        times, facts = found
        series.append(Series(name="step", variant=name, unit="ms", values=times, clock="device"))
        found_facts += [
            Quantity(name=fact, variant=name, value=v, unit=u) for fact, (v, u) in facts.items()
        ]
    return Measurement(
        series=tuple(series), quantities=tuple(found_facts), attachments={"refused": refused}
    )


def measure_tile(
    which: Pass, tile: Tile, run: Callable[[], object], samples: int, bench: Bench
) -> tuple[tuple[float, ...], Facts] | str:
    """Times and compiler's facts of a tile, or why there are none.

    Fewer stages of the pipeline need less shared memory, so they are tried before giving up.
    """
    from triton.runtime.errors import OutOfResources

    from stepscope.attention import triton_launch
    from stepscope.measure.kernels import profile_kernels

    def repeat() -> None:
        for _ in range(samples):
            run()

    why = ""
    for fewer in _with_fewer_stages(tile):
        with triton_launch.forced_tiles({which: fewer}):
            try:
                with triton_launch.recorded_launches() as launches:
                    run()
            except OutOfResources as error:
                why = f"does not fit: {error}"
                continue
            except Exception as error:
                # Some tiles are none that the compiler can lay out; the others are still measured.
                return f"does not compile: {type(error).__name__}: {_first_line(error)}"
            launch = next((held for held in launches if held.kind == which), None)
            if launch is None:
                return "was not launched"
            runs = profile_kernels(repeat, bench.device) or ()
        times = tuple(one.ms for one in runs if one.name == launch.kernel.name)
        if not times:
            return f"the profiler saw no {launch.kernel.name}"
        return times, tile_facts(launch.tile) | compiled_facts(launch.kernel)
    return why


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _with_fewer_stages(tile: Tile) -> Iterator[Tile]:
    for stages in range(tile.stages, 0, -1):
        yield tile._replace(stages=stages)


def _processor(properties: Any) -> list[Quantity]:
    """What one streaming multiprocessor has for all blocks that run on it at a time."""
    facts: Facts = {
        "registers": (_registers(properties), "registers"),
        "shared_bytes": (properties.shared_memory_per_multiprocessor, "B"),
        "threads": (properties.max_threads_per_multi_processor, "threads"),
        "count": (properties.multi_processor_count, "multiprocessors"),
    }
    return [Quantity(name=name, variant="sm", value=v, unit=u) for name, (v, u) in facts.items()]


def _registers(properties: Any) -> int:
    """Every GPU of the last ten years has the same; not every torch tells."""
    return int(getattr(properties, "regs_per_multiprocessor", 65536))
