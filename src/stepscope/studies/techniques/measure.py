"""Measure a technique: check both variants against float64, then time them interleaved."""

from __future__ import annotations

import importlib.util

from stepscope.records.schema import Quantity, quantities
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.techniques.cases import CARD, TechniqueCase

FORMS = ("slow", "fast")
_MIB = {"cuda": 512, "cpu": 32}
_ROWS = {"cuda": 4096, "cpu": 512}


def measure(case: TechniqueCase, bench: Bench) -> Measurement:
    return measure_card(bench) if case.technique == CARD else measure_technique(case, bench)


def measure_card(bench: Bench) -> Measurement:
    from stepscope.measure.device_properties import device_properties

    properties, descriptions = device_properties(bench.device)
    return Measurement(quantities=quantities(properties), attachments={"card": descriptions})


def measure_technique(case: TechniqueCase, bench: Bench) -> Measurement:
    from stepscope.measure.interleaved import time_interleaved
    from stepscope.measure.techniques import make_pair
    from stepscope.measure.techniques.pair import error

    device = bench.device
    if device.kind == "cuda" and importlib.util.find_spec("triton") is None:
        raise CaseSkipped("on a GPU both variants are Triton kernels, and Triton is not installed")
    elements = (case.mib or _MIB[device.kind]) << 18
    pair = make_pair(case.technique, device, elements, case.rows or _ROWS[device.kind])
    measured = [Quantity(name="work", value=pair.work, unit=pair.unit)]
    truth = pair.truth()
    for name, variant in zip(FORMS, (pair.slow, pair.fast), strict=True):
        variant.run()
        largest = error(variant.result(), truth)
        if largest > variant.tolerance:
            raise RuntimeError(
                f"the {name} variant is wrong: its error is {largest:.2g}, above the tolerance of"
                f" {variant.tolerance:.2g}"
            )
        values = {
            "error": (largest, "1"),
            "moved": (variant.moved, "B"),
            "flops": (variant.flops, "FLOP"),
        }
        if variant.kept is not None:
            values["kept"] = (variant.kept, "B")
        measured += [
            Quantity(name=quantity, variant=name, value=value, unit=unit)
            for quantity, (value, unit) in values.items()
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
        quantities=tuple(measured),
        readings=timing.readings,
        notes={"elements": str(elements)},
        attachments={"dtypes": {"slow": pair.slow.format, "fast": pair.fast.format}},
    )
