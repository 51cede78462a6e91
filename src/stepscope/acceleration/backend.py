"""`torch.compile(model, backend="stepscope")`: Dynamo's graph, our passes, Inductor by region."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from stepscope.acceleration import torch_internals
from stepscope.acceleration.numbers import numbers_as_tensors
from stepscope.acceleration.passes import attention, head_loss
from stepscope.acceleration.passes.in_place import write_out_of_place
from stepscope.acceleration.passes.matching import Applied, Left, Outcome
from stepscope.acceleration.regions import ONE_REGION, Regions, compile_regions
from stepscope.errors import UsageError, one_line

_log = logging.getLogger(__name__)
_COMPILERS = {
    "inductor": torch_internals.compile_with_inductor,
    "aot_eager": torch_internals.compile_with_aot_eager,
}
PASSES = (head_loss.NAME, attention.NAME)
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

    Options: `compiler` ("inductor" or "aot_eager"), `passes` (False: none, or names of `PASSES`),
    `regions` (False: one), `kernels` (True or False: whether attention kernels are used, otherwise
    by device).
    """
    compiled, _ = compiled_graph(module, inputs, _checked(options or {}))
    return compiled


class Graphs:
    """The backend with fixed options, which collects what became of its graphs."""

    def __init__(self, **options: Any) -> None:
        self._options = _checked(options)
        self.passes = _names(options)
        self.reports: list[GraphReport] = []

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> torch_internals.Compiled:
        compiled, report = compiled_graph(module, inputs, self._options)
        self.reports.append(report)
        return compiled


def compiled_graph(
    module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]
) -> tuple[torch_internals.Compiled, GraphReport]:
    """Compile one graph, and return what became of it too."""
    compile_region = _COMPILERS[options.get("compiler", "inductor")]
    failure = torch_internals.why_not_retraced(module)
    if failure is None:
        try:
            compiled, report = _rewritten(module, inputs, options, compile_region)
        except torch_internals.RestartAnalysis:
            # Dynamo traces again, with a number as a constant.
            raise
        except Exception as error:
            # What cannot be traced again, rewritten or split is compiled as Dynamo gave it.
            failure = one_line(error)
    if failure is not None:
        compiled, report = compile_region(module, inputs), GraphReport(failure=failure)
    _reports.latest.append(report)
    _log.info("%s", report)
    return compiled, report


def _rewritten(
    module: GraphModule, inputs: Sequence[Any], options: dict[str, Any], compile_region: Any
) -> tuple[torch_internals.Compiled, GraphReport]:
    fakes = torch_internals.fake_inputs(module, inputs)
    traced = torch_internals.retraced(module, fakes)
    numbers_as_tensors(traced.graph)
    compile_region = torch_internals.without_numbers(compile_region, fakes)
    outcomes = tuple(run_passes(traced, options.get("kernels"), _names(options)))
    if options.get("regions", True):
        compiled, regions = compile_regions(traced, fakes, compile_region)
    else:
        leaves = [torch_internals.as_region_input(x) for x in fakes]
        compiled, regions = compile_region(traced, leaves), ONE_REGION
    return compiled, GraphReport(regions, outcomes)


def _names(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the passes to run."""
    passes = options.get("passes", True)
    if isinstance(passes, bool):
        return PASSES if passes else ()
    return tuple(passes)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _OPTIONS:
            raise UsageError(
                f"the backend has no option {name!r}", f"options: {', '.join(_OPTIONS)}"
            )
    if unknown := set(_names(options)) - set(PASSES):
        raise UsageError(f"passes={sorted(unknown)}", f"names: {', '.join(PASSES)}")
    compiler = options.get("compiler", "inductor")
    if compiler not in _COMPILERS:
        raise UsageError(f"compiler={compiler!r}", f"one of {', '.join(_COMPILERS)}")
    return options


def run_passes(
    module: GraphModule, kernels: bool | None = None, names: Collection[str] = PASSES
) -> list[Outcome]:
    """Rewrite a retraced graph, and return what each pass did and did not replace."""
    outcomes: list[Outcome] = []
    write_out_of_place(module.graph)
    if head_loss.NAME in names:
        outcomes += head_loss.fuse_head_and_loss(module.graph)
    if attention.NAME in names:
        outcomes += attention.fuse_attention(module.graph, kernels=kernels)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return outcomes
