"""Stepscope in torchtitan, through its overrides: nothing in torchtitan changes.

    PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train \
        --module llama3 --config llama3_8b --compile.no-enable --training.disable-cuda-graphs \
        --parallelism.spmd-backend partial_dtensor \
        --override.imports torchtitan_stepscope.accelerated torchtitan_stepscope.observed

torchtitan builds its optimizers when its model is sharded: there `accelerated` compiles each block
within FSDP's hooks, in place of torchtitan's own compilation. `observed` writes, on every rank,
what `stepscope trace stepscope-out/observer` reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override
from torchtitan.tools.logging import logger

import stepscope


class AcceleratedOptimizers(OptimizersContainer):
    """torchtitan's optimizer, of a model that is accelerated with it."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        compile: dict[str, Any] = field(default_factory=dict)
        """Options of `stepscope.accelerate(compile=…)`."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        # Of pipeline stages, and of several kinds of optimizers, it would have more.
        (model,), (optimizer,) = model_parts, self.optimizers
        self.report = stepscope.accelerate(model, optimizer, compile=config.compile or True)


class ObservedMetrics(MetricsProcessor):
    """torchtitan's metrics, with an observer from the first step on."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        folder: str = "stepscope-out/observer"

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self.observer = stepscope.Observer(config.folder)

    def close(self) -> None:
        self.observer.close()
        report = getattr(self.optimizers, "report", None)
        if report is not None and torch.distributed.get_rank() == 0:
            logger.info(str(report))
        super().close()


@override(target=OptimizersContainer.Config, description="stepscope.accelerate")
def accelerated(cfg: OptimizersContainer.Config, **options: Any) -> AcceleratedOptimizers.Config:
    return derive(cfg, AcceleratedOptimizers.Config, **options)


@override(target=MetricsProcessor.Config, description="stepscope.Observer")
def observed(cfg: MetricsProcessor.Config, **options: Any) -> ObservedMetrics.Config:
    return derive(cfg, ObservedMetrics.Config, **options)
