"""Fit the costs by which `auto` chooses an attention implementation to recorded times.

    python scripts/fit_attention_rule.py             regret on each run of a fit to the other runs
    python scripts/fit_attention_rule.py --print     `COSTS` of a fit to all runs

Reads `results/attention-regret_h200.jsonl`. The parameters minimize the errors of predicted ratios
of two implementations, and with less weight those of predicted times; both are logarithmic, with a
loss that grows linearly beyond 5 %, since identical calls differ by up to 14 %. The table is
entered into `src/stepscope/attention/preference.py` by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from attention_regret import (
    FAR_BEHIND,
    Shape,
    hopper_runs,
    quantiles,
    rivals_of,
    ruled_regrets,
    was_timed,
)

from stepscope.attention.preference import (
    COSTS,
    LEFT_TO_TORCH,
    Costs,
    Rate,
    entry_of,
    kind_of,
    largest_of,
    work_of,
)

FITTED = (0, 1, 2)
"""Seeds of the runs that the rule is fitted to; later ones measure it."""
RECORD = Path(__file__).resolve().parents[1] / "results" / "attention-regret_h200.jsonl"
LONG_US = 1000
"""Time from which few calls suffice: the host does not limit them."""
TIMES_WEIGHT = 0.2
FAR_WEIGHT = 0.1
"""Weight of the ratio to an implementation that is far behind."""
LINEAR_FROM = 0.05
NAMES = ("triton", "hopper", "sdpa")
START = {"matmul": 5.0, "rows": 100.0, "tail": 0.3, "grouped_rows": 20.0}
"""Values from which parameters start; `matmul` of float32 from ten times as much."""

Key = tuple[str, int]


class Fields(NamedTuple):
    """Indices of the parameters of a predicted time."""

    matmul: int
    rows: int
    tail: int
    grouped_rows: int


class Sample(NamedTuple):
    key: Key
    fields: Fields
    work: tuple[float, float, float]
    us: float


class Parameters:
    """Logarithms of the parameters. Those that `COSTS` has as 0 stay 0; its other values are not
    used."""

    def __init__(self) -> None:
        self._index: dict[tuple[object, ...], int] = {}
        self.logs: list[float] = []

    def index(self, name: str, key: Key, head_dim: int = 0, *, used: bool = True) -> int:
        full = (name, *key, head_dim) if used else ("none",)
        if full not in self._index:
            self._index[full] = len(self.logs)
            start = START[name] * (10.0 if name == "matmul" and key[1] == 4 else 1.0)
            self.logs.append(math.log(start if used else 1e-9))
        return self._index[full]

    def value(self, name: str, key: Key, head_dim: int = 0) -> float:
        return float(f"{math.exp(self.logs[self.index(name, key, head_dim)]):.3g}")

    def fields(self, key: Key, largest: int, *, grouped: bool) -> Fields:
        costs = COSTS[key]
        return Fields(
            self.index("matmul", key, largest),
            self.rows(key, largest),
            self.index("tail", key, used=costs.tail > 0),
            self.index("grouped_rows", key, used=grouped and costs.grouped_rows > 0),
        )

    def rows(self, key: Key, largest: int) -> int:
        """Return the index of `Rate.rows`; float32 has too few shapes for each head dimension."""
        return self.index("rows", key, 0 if key[1] == 4 else largest)

    def costs(self, hosts: Mapping[Key, float]) -> dict[Key, Costs]:
        def rate(key: Key, largest: int) -> Rate:
            rows = 0 if key[1] == 4 else largest
            return Rate(self.value("matmul", key, largest), self.value("rows", key, rows))

        return {
            key: costs._replace(
                by_head_dim={largest: rate(key, largest) for largest in costs.by_head_dim},
                host=float(round(hosts[key])),
                tail=self.value("tail", key) if costs.tail else 0.0,
                grouped_rows=self.value("grouped_rows", key) if costs.grouped_rows else 0.0,
            )
            for key, costs in COSTS.items()
        }


def samples_of(line: dict[str, Any], parameters: Parameters) -> dict[str, Sample]:
    """Return the implementations whose times are those of many calls, or long."""
    shape, us = Shape(**line["shape"]), rivals_of(line)
    sizes, element_bytes = shape.sizes(), shape.element_bytes()
    found: dict[str, Sample] = {}
    if kind_of(sizes, element_bytes) in LEFT_TO_TORCH:
        return found
    for name in [one for one in NAMES if one in us]:
        key = entry_of(name, sizes, element_bytes)
        largest = largest_of(COSTS[key], sizes.head_dim)
        if largest is None or (name == "hopper" and not hopper_runs(sizes)):
            continue
        if name == line["chosen"] or was_timed(line, name, us) or us[name] > LONG_US:
            fields = parameters.fields(key, largest, grouped=shape.heads != shape.key_heads)
            found[name] = Sample(key, fields, work_of(COSTS[key], sizes), us[name])
    return found


def shortest(lines: Iterable[dict[str, Any]]) -> dict[Key, float]:
    """Return the shortest time of each implementation: that of the host."""
    found: dict[Key, float] = {}
    for line in lines:
        shape = Shape(**line["shape"])
        for name, us in rivals_of(line).items():
            if name in NAMES:
                key = entry_of(name, shape.sizes(), shape.element_bytes())
                found[key] = min(us, found.get(key, us))
    return found


def predicted_logs(logs: Tensor, fields: Tensor, work: Tensor, host: Tensor) -> Tensor:
    """Return the logarithms of predicted times, as `preference.squared_time` computes them."""
    matmul, rows, tail, grouped_rows = logs[fields].exp().unbind(1)
    multiply_adds, longest, thousand_rows = work.unbind(1)
    on_gpu = matmul * (multiply_adds + tail * longest) + (rows + grouped_rows) * thousand_rows
    return (on_gpu**2 + host**2).log() / 2


def fit(lines: Sequence[dict[str, Any]]) -> dict[Key, Costs]:
    parameters, hosts = Parameters(), shortest(lines)
    samples: list[Sample] = []
    pairs: list[tuple[int, int, float]] = []
    for line in lines:
        found = samples_of(line, parameters)
        positions = {name: len(samples) + number for number, name in enumerate(found)}
        samples += found.values()
        pairs += [
            (positions[name], positions["sdpa"],
             1.0 if one.us < FAR_BEHIND * found["sdpa"].us else FAR_WEIGHT)
            for name, one in found.items()
            if name != "sdpa" and "sdpa" in found
        ]  # fmt: skip
    double = torch.float64
    logs = torch.tensor(parameters.logs, dtype=double, requires_grad=True)
    fields = torch.tensor([one.fields for one in samples])
    work = torch.tensor([one.work for one in samples], dtype=double)
    host = torch.tensor([hosts[one.key] for one in samples], dtype=double)
    measured = torch.tensor([one.us for one in samples], dtype=double).log()
    ours, torchs, weights = (torch.tensor(column) for column in zip(*pairs, strict=True))
    optimizer = torch.optim.LBFGS([logs], max_iter=1000, line_search_fn="strong_wolfe")

    def loss_of(errors: Tensor) -> Tensor:
        zeros = torch.zeros_like(errors)
        return torch.nn.functional.huber_loss(errors, zeros, reduction="none", delta=LINEAR_FROM)

    def closure() -> Tensor:
        optimizer.zero_grad()
        errors = predicted_logs(logs, fields, work, host) - measured
        of_ratios = weights * loss_of(errors[ours] - errors[torchs])
        loss = of_ratios.sum() + TIMES_WEIGHT * loss_of(errors).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    parameters.logs = logs.tolist()
    return parameters.costs(hosts)


def source(costs: dict[Key, Costs]) -> str:
    """Return `COSTS` as Python source."""
    return "\n".join(f"    {key!r}: {value!r}," for key, value in costs.items())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--read", type=Path, default=RECORD, help="record of attention_regret.py")
    parser.add_argument("--print", action="store_true", help="print the costs of a fit to all runs")
    args = parser.parse_args(words)
    lines = [json.loads(line) for line in args.read.read_text().splitlines()]
    lines = [line for line in lines if line["seed"] in FITTED]
    if args.print:
        print(source(fit(lines)))
        return
    for seed in sorted({line["seed"] for line in lines}):
        costs = fit([line for line in lines if line["seed"] != seed])
        found = ruled_regrets([line for line in lines if line["seed"] == seed], costs)
        print(f"seed {seed}, fitted to the others, {len(found)} shapes: {quantiles(found)}")


if __name__ == "__main__":
    main()
