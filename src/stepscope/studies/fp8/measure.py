"""Examine the tensors of a training, and train in bfloat16 and FP8 from the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from stepscope.records.schema import Quantity, Series
from stepscope.studies.base import Bench, CaseSkipped, Measurement
from stepscope.studies.fp8.cases import Fp8Case, TensorsCase, TrainingCase
from stepscope.training.factory import make_step
from stepscope.training.subject import TrainingStep
from stepscope.training.text import TextBatches
from stepscope.training.workload import Workload

if TYPE_CHECKING:
    from stepscope.measure.device import Device
    from stepscope.studies.fp8.layers import Linears


def measure(case: Fp8Case, bench: Bench) -> Measurement:
    if isinstance(case, TensorsCase):
        return _tensors(case, bench)
    return _training(case, bench)


def _tensors(case: TensorsCase, bench: Bench) -> Measurement:
    from stepscope.studies.fp8.layers import Observer

    trained = _Trained(case, bench.device, seed=0)
    observer = Observer(trained.linears.eligible)
    probed = case.probed_steps()
    losses = []
    for step in range(1, case.steps + 1):
        with observer.step(step, examine=step in probed):
            losses.append(trained.train(step))
        bench.progress(step, case.steps, "steps of training")
    return Measurement(
        series=(Series(name="loss", unit="nats", values=tuple(losses), variant="bf16"),),
        quantities=trained.quantities(),
        notes=trained.notes(),
        attachments={
            "probes": observer.probes,
            "left_out": trained.linears.left_out,
        },
    )


def _training(case: TrainingCase, bench: Bench) -> Measurement:
    from stepscope.studies.fp8.layers import use_fp8

    series = []
    notes: dict[str, str] = {}
    diverged: tuple[Quantity, ...] = ()
    for at, variant in enumerate(("bf16", "fp8")):
        trained = _Trained(case, bench.device, seed=case.seed)
        if variant == "fp8":
            notes["arithmetic"] = use_fp8(
                trained.linears.eligible, case.recipe(), bench.device.torch_device
            )
        losses = []
        for step in range(1, case.steps + 1):
            loss = trained.train(step)
            if not math.isfinite(loss):
                diverged += (
                    Quantity(name="diverged_at", value=step, unit="steps", variant=variant),
                )
                break
            losses.append(loss)
            bench.progress(at * case.steps + step, 2 * case.steps, f"steps in {variant}")
        series.append(Series(name="loss", unit="nats", values=tuple(losses), variant=variant))
        bench.device.release()
    return Measurement(
        series=tuple(series),
        quantities=(*trained.quantities(), *diverged),
        notes=notes | trained.notes(),
        attachments={"left_out": trained.linears.left_out},
    )


class _Trained:
    """A model that is trained from the weights and on the data of a seed."""

    def __init__(self, case: Workload, device: Device, seed: int) -> None:
        from stepscope.studies.fp8.layers import emulate_bf16, linears_of

        self._seed = seed
        self.emulates_bf16 = "bfloat16-units" in device.lacks()
        if self.emulates_bf16:
            case = msgspec.structs.replace(case, dtype="float32")
        self.step = make_step(case, device, seed=seed)
        self._load = _loader(case, self.step, device, seed)
        self._load(0)
        self.linears: Linears = linears_of(self.step.model, self._forward)
        if not self.linears.eligible:
            reasons = ", ".join(f"{name}: {why}" for name, why in self.linears.left_out.items())
            raise CaseSkipped(f"no linear layer can use FP8 ({reasons or 'there is none'})")
        if self.emulates_bf16:
            emulate_bf16(self.linears.eligible)

    def _forward(self) -> None:
        self.step.reset()
        self.step.passes()[0].run()

    def train(self, index: int) -> float:
        """Run one step on the batch of that index and return its loss."""
        import torch

        # Data and dropout depend on the seed and the index only: both trainings draw the same.
        torch.manual_seed(self._seed * 1_000_003 + index)
        self._load(index)
        self.step.run()
        assert self.step.loss is not None
        return float(self.step.loss.detach())

    def notes(self) -> dict[str, str]:
        return {"bfloat16": "emulated"} if self.emulates_bf16 else {}

    def quantities(self) -> tuple[Quantity, ...]:
        parameters = sum(p.numel() for p in self.step.model.parameters())
        in_fp8 = sum(layer.weight.numel() for layer in self.linears.eligible.values())
        return (
            Quantity(name="parameters", value=parameters, unit="parameters"),
            Quantity(name="fp8_parameters", value=in_fp8, unit="parameters"),
            Quantity(name="layers", value=len(self.linears.eligible), unit="layers"),
        )


def _loader(case: Workload, step: TrainingStep, device: Device, seed: int) -> Callable[[int], None]:
    """Return a function that gives the step the batch of an index."""
    from stepscope.training.transformer import TransformerStep
    from stepscope.training.user_step import UserStep

    if isinstance(step, UserStep):
        return lambda _: step.next_batch()
    assert isinstance(step, TransformerStep)
    batches = TextBatches(case.batch, case.context, seed, device.torch_device)

    def load(index: int) -> None:
        tokens, targets = batches(index)
        step.tokens.copy_(tokens)
        step.targets.copy_(targets)

    return load
