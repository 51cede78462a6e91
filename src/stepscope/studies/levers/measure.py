"""Measuring a lever: both forms checked against float64, then timed in turns."""

from __future__ import annotations

import importlib.util

from stepscope.records.schema import Quantity, quantities
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.levers.cases import LeverCase

FORMS = ("slow", "fast")
_MIB = {"cuda": 512, "cpu": 32}
_ROWS = {"cuda": 4096, "cpu": 512}


def measure_card(bench: Bench) -> Measurement:
    from stepscope.measure.device_properties import device_card

    facts, words = device_card(bench.device)
    return Measurement(quantities=quantities(facts), attachments={"card": words})


def measure_lever(case: LeverCase, bench: Bench) -> Measurement:
    from stepscope.measure.interleaved import time_interleaved
    from stepscope.measure.levers import make_pair
    from stepscope.measure.levers.pair import error

    device = bench.device
    if device.kind == "cuda" and importlib.util.find_spec("triton") is None:
        raise CaseSkipped("on a GPU both forms are Triton kernels, and Triton is not here")
    elements = (case.mib or _MIB[device.kind]) << 18
    pair = make_pair(case.lever, device, elements, case.rows or _ROWS[device.kind])
    found = [Quantity(name="work", value=pair.work, unit=pair.unit)]
    truth = pair.truth()
    for name, form in zip(FORMS, (pair.slow, pair.fast), strict=True):
        form.run()
        off = error(form.result(), truth)
        if off > form.tolerance:
            raise RuntimeError(
                f"the {name} form is wrong: off by {off:.2g}, at most {form.tolerance:.2g} is right"
            )
        facts = {"error": (off, "1"), "moved": (form.moved, "B"), "flops": (form.flops, "FLOP")}
        if form.kept is not None:
            facts["kept"] = (form.kept, "B")
        found += [
            Quantity(name=fact, variant=name, value=value, unit=unit)
            for fact, (value, unit) in facts.items()
        ]
    del truth
    timing = time_interleaved(
        {"slow": pair.slow.run, "fast": pair.fast.run},
        device,
        warmup=case.warmup or 0,
        rounds=case.rounds or 1,
        progress=lambda done, total: bench.progress(done, total, "rounds"),
    )
    return Measurement(
        series=timing.series,
        quantities=tuple(found),
        readings=timing.readings,
        notes={"elements": str(elements)},
        attachments={"dtypes": {"slow": pair.slow.format, "fast": pair.fast.format}},
    )
