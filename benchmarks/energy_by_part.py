"""Where the joules of our fastest step go: its parts on their own, and the whole step.

    python benchmarks/energy_by_part.py
    python benchmarks/energy_by_part.py xl-512 2.7b-512 --out results/energy-by-part_h200.jsonl
    python benchmarks/energy_by_part.py 2.7b-2048 --attention sdpa_cudnn --layers 8
    python benchmarks/energy_by_part.py xl-512 --as-made

At its power cap a device takes as long for a step as the step's energy lasts, so joules say what a
part costs. Each part is a CUDA graph that is replayed for two seconds without a pause, after its
clock has settled. The parts of a step run one after the other here: what the step hides behind
something else, and what finds its input in a cache there, is the difference between their sum and
the whole. The products also run in the peer's form, for what joining, kept copies and wide
gradients save. With --layers fewer blocks run, and time and joules are scaled up by the work of
each part. With --out, races that are measured take the place of those in the file. About a minute
for each race on an H200.
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
from parts_of_a_step import (
    NARROW,
    Call,
    Setting,
    attention,
    passes,
    peers_products,
    products,
    updates,
)

from stepscope.analysis.energy_parts import (
    ATTENTION,
    PASSES,
    PEERS_PRODUCTS,
    PRODUCTS,
    UPDATES,
    WHOLE,
    Account,
    Taken,
    accounts,
    to_whole,
)
from stepscope.analysis.matmuls import step_products
from stepscope.errors import UsageError, first_cause
from stepscope.measure.device import Device, pick_device
from stepscope.measure.energy import measure_energy
from stepscope.measure.environment import describe
from stepscope.measure.timer import Phase
from stepscope.model.checkpointing import NONE
from stepscope.model.config import ModelConfig
from stepscope.studies.step.race import Field
from stepscope.studies.step.races import RACES as ALL_RACES
from stepscope.studies.step.races import Racer, racers
from stepscope.studies.training.captured import captured
from stepscope.studies.training.flags import AS_MADE
from stepscope.studies.training.workload import Workload

WINDOW_S = 2.0
RACES = tuple(
    name for name, spec in ALL_RACES.items() if spec.dtype == "bfloat16" and spec.checkpoint == NONE
)
OURS, NARROW_FORMATS = "ours", "narrow"
USUAL = ("xl-512", "2.7b-512", "xl-2048", "2.7b-2048")


@dataclass(frozen=True)
class Part:
    name: str
    make: Callable[[Setting], Call]
    joined: bool | None = None
    """Of products: whether those that read the same input are one."""

    def flops(self, config: ModelConfig, tokens: int) -> int | None:
        if self.joined is None:
            return None
        return sum(one.flops for one in step_products(config, tokens, joined=self.joined))


PARTS = (
    Part(PRODUCTS, products, joined=True),
    Part(ATTENTION, attention),
    Part(UPDATES, updates),
    Part(PASSES, passes),
    Part(PEERS_PRODUCTS, peers_products, joined=False),
)


class Bench(NamedTuple):
    """What a race asks for."""

    device: Device

    def progress(self, done: int, total: int, what: str) -> None:
        """One step is built, which takes seconds."""


def our_racer(
    name: str, attention: str = "auto", layers: int | None = None, side: str = OURS
) -> Racer:
    """The first of our forms on that side, with that attention and so many blocks."""
    first = next(racer for racer in racers(name) if racer.side == side)
    changed = msgspec.structs.replace(first.workload, attention=attention)
    whole = changed.model().n_layers
    if layers is not None:
        if not 1 <= layers <= whole:
            raise UsageError(f"{layers} layers of {name}", f"it has {whole}: name 1 to {whole}")
        changed = msgspec.structs.replace(changed, overrides={"n_layers": layers})
    return Racer(side, changed)


def setting_of(workload: Workload, device: Device) -> Setting:
    return Setting(
        workload.model(), workload.batch, device.torch_device, workload.attention, workload.keep,
        NARROW if workload.optimizer == AS_MADE else torch.float32,
    )  # fmt: skip


def whole_step(racer: Racer, device: Device) -> Call:
    return Field(racer, Bench(device)).entry(racer).step.run


def repeated(work: Call, device: Device) -> Call:
    """As a CUDA graph, for which the host has nothing to do; elsewhere as it is."""
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

    def replay(held: Call = work) -> None:  # noqa: ARG001
        """Holds what the graph reads."""
        graph.replay()

    return replay


def measured(make: Callable[[], Call], device: Device, seconds: float) -> dict[str, Any]:
    """Of one part: what a run of it takes, or why that is not known."""
    try:
        found = measure_energy(make(), device, seconds)
    except Exception as error:
        found = first_cause(error)
        # The traceback holds the frames that hold the tensors.
        del error
    device.release()
    if isinstance(found, str):
        return {"lost": found}
    return {
        "ms": found.step_ms, "joules": found.joules, "resolution": found.resolution,
        "sm_clock_mhz": found.sm_clock_mhz, "runs": found.steps,
    }  # fmt: skip


def lines_of(
    name: str, racer: Racer, device: Device, seconds: float = WINDOW_S
) -> Iterator[dict[str, Any]]:
    """A line for each part, of the whole model. `name` is what the race is called in them."""
    work = racer.workload
    some, batch, context = work.model(), work.batch, work.context
    kept = {field: value for field, value in work.overrides.items() if field != "n_layers"}
    whole = msgspec.structs.replace(work, overrides=kept).model()
    setting = setting_of(work, device)
    named = {
        "race": name, "form": racer.name.partition(": ")[2], "layers": some.n_layers,
        "of_layers": whole.n_layers,
    }  # fmt: skip

    def line(part: str, make: Callable[[], Call], flops: int | None) -> dict[str, Any]:
        found = measured(make, device, seconds)
        times = to_whole(part, whole, some, batch, context)
        if "lost" not in found:
            found |= {key: times * found[key] for key in ("ms", "joules", "resolution")}
        return named | {"part": part, "flops": flops, "scaled": times} | found

    for part in PARTS:
        yield line(
            part.name,
            lambda part=part: repeated(part.make(setting), device),
            part.flops(whole, setting.tokens),
        )
    yield line(WHOLE, lambda: whole_step(racer, device), None)


def table(account: Account) -> Iterator[str]:
    yield (
        f"{'part':<24} {'ms':>9} {'J':>8} {'± J':>6} {'W':>6} {'MHz':>6} {'of the step':>12}"
        f" {'TFLOP/s':>8}"
    )
    for row in account.rows():
        yield _row(account, row)
    for part, why in account.lost.items():
        yield f"{part:<24} {why}"
    whole, total, needed = account.taken.get(WHOLE), account.all_parts, account.needed
    if whole and total:
        beyond = whole.joules - total.joules
        than = "more" if beyond >= 0 else "less"
        yield f"The whole step takes {abs(beyond):.2f} J {than} than its parts together."
    if needed and (ms := account.lasts_ms(needed.joules)) is not None:
        yield (
            f"With {needed.part} left it would take {needed.joules:.2f} J: not less than"
            f" {ms:.1f} ms at {account.limit_w:.0f} W."
        )


def _row(account: Account, row: Taken) -> str:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    rate = None if row.rate is None else row.rate * 1e-12
    return (
        f"{row.part:<24} {row.ms:>9.3f} {row.joules:>8.3f} {cell(row.resolution, '.3f'):>6}"
        f" {row.watts:>6.0f} {cell(row.clock_mhz, '.0f'):>6}"
        f" {cell(account.of_the_step(row.joules), '.1%'):>12} {cell(rate, '.0f'):>8}"
    )


def others(out: Path | None, wanted: list[str]) -> list[dict[str, Any]]:
    """What the file has of races that are not measured now."""
    if out is None or not out.exists():
        return []
    held = [json.loads(line) for line in out.read_text().splitlines()]
    return [line for line in held if line["race"] not in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("races", nargs="*", help=f"of {', '.join(RACES)}; {', '.join(USUAL)}"
                        " if none is named")  # fmt: skip
    parser.add_argument("--attention", default="auto", help="the implementation (auto)")
    parser.add_argument(
        "--as-made", action="store_true",
        help="the form whose gradients stay in the format of the products",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, help="blocks that run; the result is scaled up")
    parser.add_argument("--seconds", type=float, default=WINDOW_S, help="of each part (2)")
    parser.add_argument("--out", type=Path, help="a file of JSON Lines, one for each part")
    options = parser.parse_args()
    wanted = options.races or list(USUAL)
    unknown = [name for name in wanted if name not in RACES]
    if unknown:
        print(f"no race with parts: {', '.join(unknown)}; there are {', '.join(RACES)}")
        return 2
    side = NARROW_FORMATS if options.as_made else OURS
    try:
        chosen = {
            name if side == OURS else f"{name}, as made":
            our_racer(name, options.attention, options.layers, side)
            for name in wanted
        }  # fmt: skip
    except UsageError as error:
        print(error)
        return 2
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU: its energy counter is read, and its power decides")
        return 1
    device = pick_device("cuda")
    about = describe(device)
    here = {
        "device": device.name, "torch": torch.__version__, "commit": about.commit or "unknown",
        "power_limit_w": about.power_limit_w,
    }  # fmt: skip
    print(f"{device.name}, torch {torch.__version__}")
    kept = others(options.out, list(chosen))
    for name, racer in chosen.items():
        lines = [line | here for line in lines_of(name, racer, device, options.seconds)]
        print(f"\n{name}: {told(lines[0])}")
        (account,) = accounts(lines)
        print("\n".join(table(account)), flush=True)
        kept += lines
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return 0


def told(line: dict[str, Any]) -> str:
    some, whole = line["layers"], line["of_layers"]
    scaled = "" if some == whole else f", scaled up from {some} of {whole} blocks"
    return f"{line['form']}{scaled}"


if __name__ == "__main__":
    sys.exit(main())
