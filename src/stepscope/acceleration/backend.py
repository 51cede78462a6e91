"""`torch.compile(model, backend="stepscope")`: Dynamo's graph, our passes, Inductor by region."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from stepscope.acceleration import torch_internals
from stepscope.acceleration.passes.attention import fuse_attention
from stepscope.acceleration.passes.head_loss import fuse_head_and_loss
from stepscope.acceleration.passes.matching import Applied, Left, Outcome
from stepscope.acceleration.regions import ONE_REGION, Regions, compile_regions
from stepscope.errors import UsageError

_log = logging.getLogger(__name__)
_COMPILERS = {
    "inductor": torch_internals.compile_with_inductor,
    "aot_eager": torch_internals.compile_with_aot_eager,
}
_OPTIONS = ("compiler", "kernels", "passes", "regions")
_MAX_REPORTS = 64


@dataclass(frozen=True)
class GraphReport:
    """What became of one graph."""

    regions: Regions = ONE_REGION
    outcomes: tuple[Outcome, ...] = ()
    failure: str | None = None
    """Why the graph was compiled as it is."""

    @property
    def applied(self) -> tuple[Applied, ...]:
        return tuple(x for x in self.outcomes if isinstance(x, Applied))

    @property
    def left(self) -> tuple[Left, ...]:
        return tuple(x for x in self.outcomes if isinstance(x, Left))

    def __str__(self) -> str:
        if self.failure is not None:
            return f"compiled without changes: {self.failure}"
        regions = self.regions
        lines = [f"{regions.count} regions, {regions.compiled} of them compiled"]
        lines += [f"{x.name}: {x.what} ({x.line or 'no line'})" for x in self.applied]
        lines += [f"{x.name} left: {x.reason} ({x.line or 'no line'})" for x in self.left]
        return "\n".join(lines)


@dataclass
class _Reports:
    latest: deque[GraphReport] = field(default_factory=lambda: deque(maxlen=_MAX_REPORTS))


_reports = _Reports()


def graph_reports() -> list[GraphReport]:
    """Return what became of the latest graphs, oldest first."""
    return list(_reports.latest)


def backend(
    module: GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> torch_internals.Compiled:
    """Compile one graph of Dynamo's: the backend that `torch.compile` calls.

    Options: `compiler` ("inductor" or "aot_eager"), `passes` (False: none), `regions` (False: one),
    `kernels` (True or False: whether attention kernels are used, otherwise by device).
    """
    settings = _checked(options or {})
    compile_region = _COMPILERS[settings.get("compiler", "inductor")]
    if reason := torch_internals.why_not_retraced(module):
        return _unchanged(module, inputs, compile_region, reason)
    fakes = torch_internals.fake_inputs(module, inputs)
    try:
        traced = torch_internals.retraced(module, fakes)
        outcomes = (
            run_passes(traced, settings.get("kernels")) if settings.get("passes", True) else []
        )
        if settings.get("regions", True):
            compiled, regions = compile_regions(traced, fakes, compile_region)
        else:
            leaves = [torch_internals.as_region_input(x) for x in fakes]
            compiled, regions = compile_region(traced, leaves), ONE_REGION
    except Exception as error:
        # What cannot be traced again, rewritten or split is compiled as Dynamo gave it.
        return _unchanged(module, inputs, compile_region, f"{type(error).__name__}: {error}")
    _add(GraphReport(regions, tuple(outcomes)))
    return compiled


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTIONS:
            raise UsageError(
                f"the backend has no option {name!r}", f"options: {', '.join(_OPTIONS)}"
            )
    compiler = options.get("compiler", "inductor")
    if compiler not in _COMPILERS:
        raise UsageError(f"compiler={compiler!r}", f"one of {', '.join(_COMPILERS)}")
    return options


def run_passes(module: GraphModule, kernels: bool | None = None) -> list[Outcome]:
    """Rewrite a retraced graph, and return what each pass did and did not replace."""
    outcomes = [*fuse_head_and_loss(module.graph), *fuse_attention(module.graph, kernels=kernels)]
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return outcomes


def _unchanged(
    module: GraphModule, inputs: Sequence[Any], compile_region: Any, reason: str
) -> torch_internals.Compiled:
    _add(GraphReport(failure=reason))
    compiled: torch_internals.Compiled = compile_region(module, inputs)
    return compiled


def _add(report: GraphReport) -> None:
    _reports.latest.append(report)
    _log.info("%s", report)
