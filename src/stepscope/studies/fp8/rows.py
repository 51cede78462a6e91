"""Rows of the FP8 study: the examined layers of a model and its pairs of trainings. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median, stdev

import msgspec

from stepscope.kernels.fp8.recipe import E4M3, TENSORWISE
from stepscope.studies.base import Result, results_of
from stepscope.studies.fp8.cases import (
    GEMMS,
    Fp8Case,
    LayerProbe,
    LeftOut,
    Probes,
    TensorsCase,
    TrainingCase,
)
from stepscope.views.builders import grouped

TOO_MUCH = 0.1
"""Relative error of a GEMM from which on its layer should stay in bfloat16. Rounding alone gives
0.03 to 0.04 with e4m3 operands and 0.06 with an e5m2 one; more means that values were lost."""
SAME_LOSS = 0.005
"""Relative difference of the final losses that counts as the same training."""
_DIVERGED = 0.2
"""Relative difference of the final losses that counts as divergence."""
_LAST = 0.1
"""Share of the steps, at its end, whose mean is the final loss."""


class Layer:
    """One linear layer over all probes of a training."""

    def __init__(self, probes: Sequence[LayerProbe]) -> None:
        self.name = probes[0].layer
        self.probes = probes

    @property
    def last(self) -> LayerProbe:
        return self.probes[-1]

    def gemm_error(self, gemm: str, scaling: str = TENSORWISE, dtype: str = E4M3) -> float:
        """Largest error of a GEMM over the probes."""
        dtype = E4M3 if gemm == "forward" else dtype
        return max(probe.gemms[gemm].fp8[dtype][scaling] for probe in self.probes)

    def bf16_error(self, gemm: str) -> float:
        return max(probe.gemms[gemm].bf16 for probe in self.probes)

    def kernel_error(self) -> float | None:
        """Largest error of its three GEMMs with the kernels of the device."""
        errors = [
            gemm.kernel
            for probe in self.probes
            for gemm in probe.gemms.values()
            if gemm.kernel is not None
        ]
        return max(errors, default=None)

    def error(self, scaling: str = TENSORWISE, dtype: str = E4M3) -> float:
        """Largest error of its three GEMMs."""
        return max(self.gemm_error(gemm, scaling, dtype) for gemm in GEMMS)

    def worst_gemm(self) -> str:
        return max(GEMMS, key=self.gemm_error)

    def underflow(self, role: str, scaling: str = TENSORWISE, dtype: str = E4M3) -> float:
        return max(probe.casts[role][dtype][scaling].underflow for probe in self.probes)

    def saturated(self) -> float:
        """Largest share of saturated values under delayed scaling."""
        return max(max(probe.saturated.values()) for probe in self.probes)

    @property
    def noise(self) -> float | None:
        return self.last.noise


class Examined:
    """The layers of a model in one bfloat16 training."""

    def __init__(self, result: Result[TensorsCase]) -> None:
        self.record, self.case = result
        probes = self.record.attachment("probes", Probes) or ()
        by_layer = grouped(probes, lambda probe: probe.layer)
        self.layers = [Layer(members) for members in by_layer.values()]
        self.left_out = self.record.attachment("left_out", LeftOut) or {}
        self.steps = tuple(dict.fromkeys(probe.step for probe in probes))

    @property
    def ranked(self) -> list[Layer]:
        """All layers, the one with the largest error first."""
        return sorted(self.layers, key=lambda layer: -layer.error())

    def flagged(self, scaling: str = TENSORWISE, dtype: str = E4M3) -> list[Layer]:
        """The layers that should stay in bfloat16 with this recipe."""
        return [layer for layer in self.ranked if layer.error(scaling, dtype) > TOO_MUCH]

    def typical(self, value: Callable[[Layer], float]) -> float:
        return median(value(layer) for layer in self.layers)


class Pair:
    """A training in bfloat16 and in FP8 from the same weights on the same data."""

    def __init__(self, result: Result[TrainingCase]) -> None:
        self.record, self.case = result

    def losses(self, variant: str) -> tuple[float, ...]:
        series = self.record.find("loss", variant=variant)
        return series.values if series is not None else ()

    def final(self, variant: str) -> float | None:
        """Mean loss of the last steps; None if it became infinite or NaN before."""
        losses = self.losses(variant)
        if not losses or self.record.quantity("diverged_at", variant=variant) is not None:
            return None
        return fmean(losses[-max(1, round(_LAST * len(losses))) :])

    @property
    def change(self) -> float | None:
        """Difference of FP8's final loss from bfloat16's, relative to it."""
        fp8, bf16 = self.final("fp8"), self.final("bf16")
        return None if fp8 is None or not bf16 else (fp8 - bf16) / abs(bf16)

    @property
    def diverged(self) -> bool:
        """True if FP8 diverges where bfloat16 does not."""
        if self.final("bf16") is None:
            return False
        return self.change is None or self.change > _DIVERGED

    @property
    def emulated(self) -> bool:
        return self.record.notes.get("arithmetic") != "kernels"


class Trained:
    """All pairs of one model with one recipe."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        self.case = pairs[0].case
        self.recipe = self.case.recipe()

    @property
    def diverged(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.diverged]

    def mean(self, variant: str) -> float | None:
        """Mean of the final losses over the seeds."""
        return _mean(pair.final(variant) for pair in self.pairs)

    @property
    def change(self) -> float | None:
        """Mean relative change of the final loss over the seeds."""
        return _mean(pair.change for pair in self.pairs)

    @property
    def spread(self) -> float | None:
        """Standard deviation of bfloat16's final loss over seeds, relative to its mean."""
        finals = [loss for pair in self.pairs if (loss := pair.final("bf16")) is not None]
        return stdev(finals) / abs(fmean(finals)) if len(finals) > 1 and any(finals) else None

    @property
    def same(self) -> bool:
        change = self.change
        within = max(SAME_LOSS, self.spread or 0.0)
        return not self.diverged and change is not None and abs(change) <= within


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class Subject:
    """One model: what its layers lose and how it trains."""

    def __init__(self, results: Sequence[Result[Fp8Case]]) -> None:
        examined = [Examined(r) for r in results_of(results, TensorsCase) if _done(r, "probes")]
        pairs = [Pair(r) for r in results_of(results, TrainingCase) if r.record.status == "ok"]
        complete = [pair for pair in pairs if pair.losses("bf16")]
        self.examined = next((each for each in examined if each.layers), None)
        self.trained = [
            Trained(members)
            for members in grouped(complete, lambda pair: str(pair.case.recipe())).values()
        ]
        case = results[0].case
        year = f"{case.table} " if case.table != "2025" else ""
        self.name = case.own or f"{year}{case.size}"


def _done(result: Result[TensorsCase], attachment: str) -> bool:
    return result.record.status == "ok" and attachment in result.record.attachments


def subjects(results: Sequence[Result[Fp8Case]]) -> list[Subject]:
    def model(result: Result[Fp8Case]) -> str:
        return str(msgspec.json.encode([getattr(result.case, name) for name in _OF_MODEL]))

    return [Subject(members) for members in grouped(results, model).values()]


_OF_MODEL = ("size", "table", "context", "batch", "overrides", "own")
