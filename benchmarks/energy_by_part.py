"""Energy of our fastest step by part: each part measured separately, and the full step.

    python benchmarks/energy_by_part.py
    python benchmarks/energy_by_part.py xl-512 2.7b-512 --out results/energy-by-part_h200.jsonl
    python benchmarks/energy_by_part.py 2.7b-2048 --attention sdpa_cudnn --layers 8
    python benchmarks/energy_by_part.py xl-512 --low-precision-grads

At its power cap a device takes as long for a step as the step's energy lasts, so the energy is the
cost of a part. Each part is a CUDA graph that is replayed for two seconds without a pause, after
the clock has settled. The parts run one after the other here: overlap and cache hits in the step
show as the difference between the sum and the full step. The GEMMs also run in the variant of the
baseline, which shows the gain of fused projections, stored copies and wide gradients. With --layers
fewer blocks run, and time and energy are scaled up by the work of each part. With --out, measured
races replace those in the file. About a minute per race on an H200.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from energy_parts import (
    ATTENTION,
    BASELINE_MATMULS,
    FULL_STEP,
    GEMMS,
    PASSES,
    UPDATES,
    Account,
    PartEnergy,
    accounts,
    to_whole,
)
from step_matmuls import step_matmuls
from step_parts import NARROW, Call, Setting, attention, gemms, passes, peers_gemms, updates
from step_race.energy import measure_energy
from step_race.measure import Field
from step_race.races import RACES as ALL_RACES
from step_race.races import Racer, racers

from stepscope.analysis.predict.plan import LOW_PRECISION_GRADS
from stepscope.errors import UsageError, first_cause
from stepscope.measure.device import Device, pick_device
from stepscope.measure.environment import describe
from stepscope.measure.timer import Phase
from stepscope.model.checkpointing import NONE
from stepscope.model.config import ModelConfig
from stepscope.training.captured import captured
from stepscope.training.workload import Workload

WINDOW_S = 2.0
RACES = tuple(
    name
    for name, spec in ALL_RACES.items()
    if spec.dtype == "bfloat16" and spec.checkpoint == NONE and not spec.fp8
)
OURS, NARROW_FORMATS = "stepscope", "low-precision"
USUAL = ("xl-512", "2.7b-512", "xl-2048", "2.7b-2048")


@dataclass(frozen=True)
class Part:
    name: str
    make: Callable[[Setting], Call]
    fused: bool | None = None
    """For GEMMs: True if projections with the same input are fused."""

    def flops(self, config: ModelConfig, tokens: int) -> int | None:
        if self.fused is None:
            return None
        return sum(one.flops for one in step_matmuls(config, tokens, fused_projections=self.fused))


PARTS = (
    Part(GEMMS, gemms, fused=True),
    Part(ATTENTION, attention),
    Part(UPDATES, updates),
    Part(PASSES, passes),
    Part(BASELINE_MATMULS, peers_gemms, fused=False),
)


class Bench(NamedTuple):
    """The interface that a race needs."""

    device: Device

    def progress(self, done: int, total: int, what: str) -> None:
        """Ignored: only one step is built, which takes seconds."""


def our_racer(
    name: str, attention: str = "auto", layers: int | None = None, side: str = OURS
) -> Racer:
    """Our first candidate on that side, with that attention and number of blocks."""
    first = next(racer for racer in racers(name) if racer.side == side)
    changed = msgspec.structs.replace(first.workload, attention=attention)
    blocks = changed.model().n_layers
    if layers is not None:
        if not 1 <= layers <= blocks:
            raise UsageError(f"{layers} layers of {name}", f"it has {blocks}: name 1 to {blocks}")
        changed = msgspec.structs.replace(changed, overrides={"n_layers": layers})
    return Racer(side, changed)


def setting_of(workload: Workload, device: Device) -> Setting:
    return Setting(
        workload.model(),
        workload.batch,
        device.torch_device,
        workload.attention,
        workload.activation_policy,
        NARROW if workload.optimizer == LOW_PRECISION_GRADS else torch.float32,
    )


def full_step(racer: Racer, device: Device) -> Call:
    return Field(racer, Bench(device)).entry(racer).step.run


def repeated(work: Call, device: Device) -> Call:
    """Capture the work as a CUDA graph, so that the host is idle; on a CPU return it unchanged."""
    if device.kind != "cuda":
        return work
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    device.synchronize()
    device.release()
    graph = captured([Phase("part", work)], device)

    def replay(kept_alive: Call = work) -> None:  # noqa: ARG001
        """Replay; the default argument keeps the tensors of the graph alive."""
        graph.replay()

    return replay


def measured(make: Callable[[], Call], device: Device, seconds: float) -> dict[str, Any]:
    """Cost of one run of a part, or the reason why it is not known."""
    try:
        energy = measure_energy(make(), device, seconds)
    except Exception as error:
        energy = first_cause(error)
        # The traceback refers to the frames that hold the tensors.
        del error
    device.release()
    if isinstance(energy, str):
        return {"lost": energy}
    return {
        "ms": energy.step_ms,
        "joules": energy.joules,
        "resolution": energy.resolution,
        "sm_clock_mhz": energy.sm_clock_mhz,
        "runs": energy.steps,
    }


def lines_of(
    name: str, racer: Racer, device: Device, seconds: float = WINDOW_S
) -> Iterator[dict[str, Any]]:
    """One line per part, scaled to the full model. `name` is the race's name in the lines."""
    work = racer.workload
    reduced, batch, context = work.model(), work.batch, work.context
    overrides = {field: value for field, value in work.overrides.items() if field != "n_layers"}
    full = msgspec.structs.replace(work, overrides=overrides).model()
    setting = setting_of(work, device)
    named = {
        "race": name,
        "form": racer.name.partition(": ")[2],
        "layers": reduced.n_layers,
        "of_layers": full.n_layers,
    }

    def line(part: str, make: Callable[[], Call], flops: int | None) -> dict[str, Any]:
        cost = measured(make, device, seconds)
        times = to_whole(part, full, reduced, batch, context)
        if "lost" not in cost:
            cost |= {key: times * cost[key] for key in ("ms", "joules", "resolution")}
        return named | {"part": part, "flops": flops, "scaled": times} | cost

    for part in PARTS:
        yield line(
            part.name,
            lambda part=part: repeated(part.make(setting), device),
            part.flops(full, setting.tokens),
        )
    yield line(FULL_STEP, lambda: full_step(racer, device), None)


def table(ledger: Account) -> Iterator[str]:
    yield (
        f"{'part':<24} {'ms':>9} {'J':>8} {'± J':>6} {'W':>6} {'MHz':>6} {'of the step':>12}"
        f" {'TFLOP/s':>8}"
    )
    for row in ledger.rows():
        yield _row(ledger, row)
    for part, reason in ledger.lost.items():
        yield f"{part:<24} {reason}"
    step, total, needed = ledger.taken.get(FULL_STEP), ledger.all_parts, ledger.needed
    if step and total:
        beyond = step.joules - total.joules
        than = "more" if beyond >= 0 else "less"
        yield f"The full step takes {abs(beyond):.2f} J {than} than the sum of its parts."
    if needed and (ms := ledger.lasts_ms(needed.joules)) is not None:
        yield (
            f"With {needed.part} the step would take {needed.joules:.2f} J: at least {ms:.1f} ms"
            f" at {ledger.limit_w:.0f} W."
        )


def _row(ledger: Account, row: PartEnergy) -> str:
    def cell(value: float | None, spec: str) -> str:
        return "" if value is None else format(value, spec)

    rate = None if row.rate is None else row.rate * 1e-12
    return (
        f"{row.part:<24} {row.ms:>9.3f} {row.joules:>8.3f} {cell(row.resolution, '.3f'):>6}"
        f" {row.watts:>6.0f} {cell(row.clock_mhz, '.0f'):>6}"
        f" {cell(ledger.of_the_step(row.joules), '.1%'):>12} {cell(rate, '.0f'):>8}"
    )


def others(out: Path | None, wanted: list[str]) -> list[dict[str, Any]]:
    """Lines of the file for races that are not measured now."""
    if out is None or not out.exists():
        return []
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [line for line in lines if line["race"] not in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "races", nargs="*", help=f"of {', '.join(RACES)}; {', '.join(USUAL)} by default"
    )
    parser.add_argument("--attention", default="auto", help="attention implementation (auto)")
    parser.add_argument(
        "--low-precision-grads",
        action="store_true",
        help="the variant whose gradients stay in the dtype of the GEMMs",
    )
    parser.add_argument("--layers", type=int, help="blocks to run; the result is scaled up")
    parser.add_argument("--seconds", type=float, default=WINDOW_S, help="seconds per part (2)")
    parser.add_argument("--out", type=Path, help="a JSON Lines file, one line per part")
    options = parser.parse_args()
    wanted = options.races or list(USUAL)
    unknown = [name for name in wanted if name not in RACES]
    if unknown:
        print(f"no race with parts: {', '.join(unknown)}; choose from {', '.join(RACES)}")
        return 2
    side = NARROW_FORMATS if options.low_precision_grads else OURS
    try:
        chosen = {
            name if side == OURS else f"{name}, low-precision gradients": our_racer(
                name, options.attention, options.layers, side
            )
            for name in wanted
        }
    except UsageError as error:
        print(error)
        return 2
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU with an energy counter")
        return 1
    device = pick_device("cuda")
    about = describe(device)
    here = {
        "device": device.name,
        "torch": torch.__version__,
        "commit": about.commit or "unknown",
        "power_limit_w": about.power_limit_w,
    }
    print(f"{device.name}, torch {torch.__version__}")
    written = others(options.out, list(chosen))
    for name, racer in chosen.items():
        lines = [line | here for line in lines_of(name, racer, device, options.seconds)]
        print(f"\n{name}: {summary(lines[0])}")
        (ledger,) = accounts(lines)
        print("\n".join(table(ledger)), flush=True)
        written += lines
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text("".join(json.dumps(line) + "\n" for line in written))
    return 0


def summary(line: dict[str, Any]) -> str:
    reduced, full = line["layers"], line["of_layers"]
    scaled = "" if reduced == full else f", scaled up from {reduced} of {full} blocks"
    return f"{line['form']}{scaled}"


if __name__ == "__main__":
    sys.exit(main())
