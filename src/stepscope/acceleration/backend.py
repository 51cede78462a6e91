"""`torch.compile(model, backend="stepscope")`: Dynamo's graph, our passes, Inductor by region."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.fx import GraphModule

from stepscope.acceleration import torch_internals
from stepscope.acceleration.comparison import Comparison
from stepscope.acceleration.numbers import numbers_as_tensors
from stepscope.acceleration.passes import (
    activations,
    attention,
    embedding,
    gelu,
    head_loss,
    linears,
    norms,
    patch_embedding,
)
from stepscope.acceleration.passes.gradients_off import detach_values
from stepscope.acceleration.passes.in_place import remove_idle_dropout, write_out_of_place
from stepscope.acceleration.passes.linears import Weights, copied_inputs
from stepscope.acceleration.passes.matching import Applied, Left, Outcome
from stepscope.acceleration.regions import (
    ONE_REGION,
    Regions,
    compile_regions,
    hoist_views,
    repeated_blocks,
)
from stepscope.acceleration.repeated_parts import retraced
from stepscope.acceleration.sharded.unit_calls import defer_masks, require_no_calls
from stepscope.errors import UsageError, one_line

_log = logging.getLogger(__name__)
_COMPILERS: dict[str, Callable[..., torch_internals.Compiled]] = {
    "inductor": torch_internals.compile_with_inductor,
    "inductor-cudagraphs": partial(torch_internals.compile_with_inductor, cudagraphs=True),
    "aot_eager": torch_internals.compile_with_aot_eager,
}
PASSES = (head_loss.NAME, attention.NAME, patch_embedding.NAME, embedding.NAME, *linears.NAMES,
          norms.NAME, activations.NAME, gelu.NAME)  # fmt: skip
_OPTIONS = ("compiler", "kernels", "passes", "regions", "copies", "fp8")
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

    Options: `compiler` ("inductor", "inductor-cudagraphs" or "aot_eager"), `passes` (False: none,
    or names of `PASSES`), `regions` (False: one), `kernels` (True or False: whether attention
    kernels are used, otherwise by device), `copies` (`WeightCopies` that an optimizer writes) and
    `fp8` (`Fp8Layers`).
    """
    return compiled_graph(module, inputs, _checked(options or {}))[0]


class Graphs:
    """The backend with fixed options, which collects what became of its graphs."""

    def __init__(self, **options: Any) -> None:
        self._options = _checked(options)
        self.passes = _names(options)
        self.reports: list[GraphReport] = []
        self._differences: list[str] | None = None

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> torch_internals.Compiled:
        compiled, report, comparison = compiled_graph(module, inputs, self._options)
        self.reports.append(report)

        def run(*given: Any) -> Any:
            if self._differences is not None:
                self._differences += comparison.differences(given)
            return compiled(*given)

        return run

    @contextmanager
    def compared(self) -> Iterator[list[str]]:
        """Compare the regions of each graph that is called; yields how they differ."""
        self._differences = []
        try:
            yield self._differences
        finally:
            self._differences = None


def compiled_graph(
    module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]
) -> tuple[torch_internals.Compiled, GraphReport, Comparison]:
    """Compile one graph; return what became of it too, and what it is to be compared with."""
    compile_region = _COMPILERS[options.get("compiler", "inductor")]
    failure = torch_internals.why_not_retraced(module)
    if failure is None:
        try:
            compiled, report, comparison = _rewritten(module, inputs, options, compile_region)
        except torch_internals.RestartAnalysis:
            # Dynamo traces again, with a number as a constant.
            raise
        except Exception as error:
            # What cannot be traced again, rewritten or split is compiled as Dynamo gave it.
            failure = one_line(error)
    if failure is not None:
        require_no_calls(module, failure)
        compiled, report = compile_region(module, inputs), GraphReport(failure=failure)
        comparison = Comparison.of_one(module, compiled, inputs)
    _reports.latest.append(report)
    _log.info("%s", report)
    return compiled, report, comparison


def _rewritten(
    module: GraphModule, inputs: Sequence[Any], options: dict[str, Any], compile_region: Any
) -> tuple[torch_internals.Compiled, GraphReport, Comparison]:
    fakes = torch_internals.fake_inputs(module, inputs)
    traced = retraced(module, fakes)
    remove_idle_dropout(traced.graph)
    hoist_views(traced)
    defer_masks(traced)
    torch_internals.note_names(traced)
    original = GraphModule(traced, copy.deepcopy(traced.graph))
    numbers_as_tensors(traced.graph)
    compile_region = torch_internals.without_numbers(compile_region, fakes)
    placeholders = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    tensors = dict(zip(placeholders, inputs, strict=True))
    weights = Weights(tensors, options.get("copies"), options.get("fp8"))
    outcomes = tuple(run_passes(traced, options.get("kernels"), _names(options), weights))
    compiled, regions, comparison = compile_regions(
        traced,
        original,
        fakes,
        compile_region,
        by_block=options.get("regions", True),
        copied=copied_inputs(traced.graph),
    )
    return compiled, GraphReport(regions, outcomes), comparison


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
    module: GraphModule,
    kernels: bool | None = None,
    names: Collection[str] = PASSES,
    weights: Weights | None = None,
) -> list[Outcome]:
    """Rewrite a retraced graph, and return what each pass did and did not replace."""
    outcomes: list[Outcome] = []
    detach_values(module.graph)
    write_out_of_place(module.graph)
    if head_loss.NAME in names:
        outcomes += head_loss.fuse_head_and_loss(module.graph)
    if attention.NAME in names:
        outcomes += attention.fuse_attention(module.graph, kernels=kernels)
    if patch_embedding.NAME in names:
        outcomes += patch_embedding.use_matmuls(module.graph)
    if embedding.NAME in names:
        outcomes += embedding.use_kernel(module.graph, kernels=kernels)
    if weights is not None and {*linears.NAMES} & {*names}:
        outcomes += linears.copy_weights(module.graph, weights, names)
    blocks = repeated_blocks(list(module.graph.nodes))
    if norms.NAME in names:
        outcomes += norms.fuse_norms(module.graph, blocks, kernels)
    if activations.NAME in names:
        outcomes += activations.fuse_activations(module.graph, blocks, kernels)
    if gelu.NAME in names:
        outcomes += gelu.use_formula(module.graph)
    module.graph.eliminate_dead_code()
    torch_internals.rename_replacements(module)
    module.graph.lint()
    module.recompile()
    return outcomes
