"""Lines that cost more than they have to, and what to write instead.

A rule looks at the facts of a loop or of a line. A loop is named in place of the lines in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from stepscope.analysis.lines.facts import Lines, Loading, Loop, Place, Site
from stepscope.analysis.verdict import CostlyLine

_LOOP_FROM, _LINE_FROM, _COPY_FROM = 0.03, 0.01, 0.05
"""Share of the step from which a loop, a line or a copy into another layout is named."""
_OPERATORS_FROM = 12
"""Operators of a loop per step, below which its launches do not matter."""
_SMALL_MS = {True: 0.1, False: 1.0}
"""Mean time of an operator on a GPU, or on a CPU, above which a loop is not about launches."""
_CHAIN_FROM = 0.5
"""Share of a loop's operators that depend on an earlier iteration, from which it is a chain."""
_SCAN_FROM = 8
"""Iterations of a chain from which it is a loop over positions."""
_IGNORED_FROM, _UNUSED_FROM, _PADDING_FROM = 0.25, 0.25, 0.2
_LOADING_FROM, _LOADER_LINE_FROM = 0.05, 0.1
_OVERLAP = 0.5
"""Share of a loop's cost in an inner named loop, from which the inner one alone is named."""


class _Words(NamedTuple):
    """What a loop is over, by the names in its header, and what to write instead."""

    code: str
    names: str
    title: str
    advice: str


_HEADS = _Words(
    "loop_over_heads", r"head",
    "loop over heads",
    "give the heads a dimension, q.view(B, T, heads, d).transpose(1, 2), and call"
    " F.scaled_dot_product_attention once",
)  # fmt: skip
_INDEPENDENT = (
    _HEADS,
    _Words(
        "loop_over_experts", r"expert|moe",
        "loop over experts",
        "stack the weights of the experts and use one torch.bmm, or a grouped matmul of tokens"
        " sorted by expert",
    ),
    _Words(
        "loop_over_samples", r"sample|batch|example|image|row|item|sequence|sentence",
        "loop over samples",
        "run all samples as one batch (pad them if their sizes differ), or use torch.func.vmap",
    ),
    _Words(
        "loop_over_positions", r"time|step|seq|pos|token|frame|len|\bt\b|\bT\b|shape\[1\]",
        "loop over positions",
        "run the operators once on all positions: no iteration needs the one before",
    ),
)  # fmt: skip
_OTHER = _Words(
    "loop_of_small_operators", "",
    "loop of independent operators",
    "stack the inputs and run the operators once, with one more dimension",
)  # fmt: skip
_MODULES = _Words(
    "loop_over_modules", "",
    "loop over independent modules",
    "stack their weights and use one torch.bmm, or make them one larger layer",
)  # fmt: skip
_PARAMETERS = _Words(
    "loop_over_parameters", "",
    "loop over parameters",
    "use torch._foreach_ functions on the list of tensors, or an optimizer of torch.optim with"
    " fused=True; clip with torch.nn.utils.clip_grad_norm_",
)  # fmt: skip
_RECURRENT = _Words(
    "loop_over_time", "",
    "loop over time steps",
    "use nn.LSTM, nn.GRU or nn.RNN, which run all steps in one"
    " call, take the matmuls of the inputs out of the loop, or compile its body with torch.compile",
)  # fmt: skip
_SCAN = _Words(
    "loop_scan", "",
    "loop in which each iteration needs the one before",
    "use torch.cumsum or torch.cumprod where they fit, or compile the loop with torch.compile",
)  # fmt: skip

_CAST_CALLS = {"to", "float", "half", "bfloat16", "double", "type", "type_as", "int", "long"}
_WAITS = {
    "item": "keep the value on the device, and read it only when it is printed",
    "print": "print every n steps only, and of values that were read before",
    "tolist": "keep the values on the device, or read them once per epoch",
    "cpu": "copy with non_blocking=True into pinned memory, or every n steps only",
    "to": "copy with non_blocking=True into pinned memory, or every n steps only",
    "nonzero": "use torch.where with three arguments, or multiply by the mask",
    "masked_select": "use torch.where with three arguments, or multiply by the mask",
    "[]": "use torch.where with three arguments, or multiply by the mask",
    "unique": "compute it in the data loader, or bound its size",
}
_CONDITION = "compute both sides and use torch.where, or test every n steps only"


def costly_lines(lines: Lines, *, everything: bool = False) -> tuple[CostlyLine, ...]:
    """The lines to change, the most costly first; with `everything`, also those that cost
    little."""
    if lines.step_ms <= 0:
        return ()
    loops = dict(_loops(lines, everything))
    found = [*loops.values()]
    for rule in _LINE_RULES:
        for least, one, sites in rule(lines):
            # A copy in a loop that is named is part of its cost.
            in_loop = rule is _copies and any(not loops.keys().isdisjoint(s.loops) for s in sites)
            if everything or (one.share >= least and not in_loop):
                found.append(one)
    return tuple(sorted(found, key=lambda one: -one.ms))


def _loops(lines: Lines, everything: bool) -> Iterator[tuple[int, CostlyLine]]:
    """The loops to change, with their indices. The innermost one is named, unless most of the cost
    of an outer one is elsewhere."""
    named: list[int] = []
    cost = [
        sum(site.cost_ms for site in lines.sites if index in site.loops)
        for index in range(len(lines.loops))
    ]
    depth = {
        index: max((s.loops.index(index) for s in lines.sites if index in s.loops), default=0)
        for index in range(len(lines.loops))
    }
    for index in sorted(depth, key=lambda index: -depth[index]):
        loop = lines.loops[index]
        sites = [site for site in lines.sites if index in site.loops]
        launched = sum(site.operators + site.backward for site in sites)
        words = _words(loop, lines.places[loop.place])
        if words is None or loop.trains or not any(site.own for site in sites):
            continue
        if launched < _OPERATORS_FROM or cost[index] > launched * _SMALL_MS[lines.on_device]:
            continue
        inner = sum(s.cost_ms for s in sites if any(other in named for other in s.loops))
        if inner >= _OVERLAP * cost[index]:
            continue
        if everything or cost[index] >= _LOOP_FROM * lines.step_ms:
            named.append(index)
            yield index, _costly(
                lines, words.code, lines.places[loop.place], loop.iterations, cost[index],
                f"{words.title}, {launched:,} operators", words.advice, sites,
            )  # fmt: skip


def _words(loop: Loop, place: Place) -> _Words | None:
    """What a loop is over; None for a loop that is as it should be, such as one over layers."""
    each = loop.iterations / max(1, loop.entries)
    if each < 2 or not loop.operators:
        return None
    shared = loop.parameter_reads >= 2 * loop.parameters * loop.entries
    tensors = max(loop.gradients, 0 if shared else loop.parameters)
    if not loop.matmuls and tensors >= each / 2:
        return _PARAMETERS
    if _is_chain(loop):
        if loop.parameters and shared and each >= _SCAN_FROM / 2:
            return _RECURRENT
        return _SCAN if not loop.parameters and each >= _SCAN_FROM else None
    if attends(loop):
        return _HEADS
    for words in _INDEPENDENT:
        if re.search(words.names, place.code, re.IGNORECASE):
            return words
    return _MODULES if loop.parameters >= each and not shared else _OTHER


def attends(loop: Loop) -> bool:
    """Return True if each iteration is an attention."""
    return loop.softmaxes >= loop.iterations and loop.matmuls >= 2 * loop.iterations


def _is_chain(loop: Loop) -> bool:
    """Return True if most operators depend on an earlier iteration, where there is one: those of
    the first iteration do not."""
    later = loop.operators * (1 - loop.entries / max(1, loop.iterations))
    return loop.carried >= _CHAIN_FROM * later


def module_loops(lines: Lines) -> Iterator[tuple[Loop, int]]:
    """Yield the loops in which no iteration needs the one before and each has its own parameters,
    with their operators in the backward."""
    for index, loop in enumerate(lines.loops):
        shared = loop.parameter_reads >= 2 * loop.parameters * max(1, loop.entries)
        several = loop.iterations >= 2 * loop.entries and loop.parameters >= loop.iterations
        if several and not (loop.trains or shared or _is_chain(loop)):
            sites = (site for site in lines.sites if index in site.loops)
            yield loop, sum(site.backward for site in sites)


_Named = Iterator[tuple[float, CostlyLine, Sequence[Site]]]
"""The share of the step from which a line is named, the line, and where its cost comes from."""


def _waiting(lines: Lines) -> _Named:
    """Lines that wait for the GPU because the CPU reads a value."""
    for place, sites in _by_place(lines, lambda site: site.waits > 0):
        call = sites[0].call
        title = f"waits for the GPU ({_call_text(call)})"
        cost, times = sum(site.cost_ms for site in sites), sum(site.waits for site in sites)
        advice = _WAITS.get(call, _CONDITION)
        yield _LINE_FROM, _costly(lines, "waits", place, times, cost, title, advice, sites), sites


def _call_text(call: str) -> str:
    if call == "[]":
        return "index with a mask"
    return f"{call}()" if call in _WAITS else "a value decides what runs"


def _constants(lines: Lines) -> _Named:
    """Lines that compute or copy the same values in every step."""
    advice = "do it once: in __init__ with register_buffer, or before the loop"
    for place, sites in _by_place(lines, lambda site: site.same > 0):
        verb = "copies to the GPU" if any(site.uploads for site in sites) else "computes"
        title = f"{verb} the same values in every step"
        cost, times = sum(site.same_ms for site in sites), max(site.runs for site in sites)
        named = _costly(lines, "constant", place, times, cost, title, advice, sites)
        yield _LINE_FROM, named, sites


def _copies(lines: Lines) -> _Named:
    """Casts and copies into another layout that the line itself asks for."""
    title = "casts to another dtype"
    advice = "make the tensor in this dtype, or cast once and not in each step or call"
    for place, sites in _by_place(lines, lambda site: site.casts > 0 and site.call in _CAST_CALLS):
        cost, times = sum(site.copy_ms for site in sites), sum(site.casts for site in sites)
        yield _LINE_FROM, _costly(lines, "casts", place, times, cost, title, advice, sites), sites
    title = "copies into another memory layout"
    advice = "use the tensor with its strides, or compute it in the layout that is needed"
    for place, sites in _by_place(lines, lambda s: s.layouts > 0 and s.call == "contiguous"):
        cost, times = sum(site.copy_ms for site in sites), sum(site.layouts for site in sites)
        yield _COPY_FROM, _costly(lines, "layout", place, times, cost, title, advice, sites), sites


def _ignored_labels(lines: Lines) -> _Named:
    """Losses on logits of positions without a label."""
    advice = "select the positions with a label before the head: hidden[labels != ignore_index]"
    for labels in lines.labels:
        share = labels.ignored / max(1, labels.labels)
        loss = lines.sites[labels.site]
        sites = [loss, *([lines.sites[labels.head]] if labels.head >= 0 else [])]
        place = lines.place(loss)
        if share < _IGNORED_FROM or place is None or not all(one.own for one in sites):
            continue
        title = f"{_percent(share)} of the labels are ignored, and their logits thrown away"
        cost = share * sum(one.cost_ms for one in {id(one): one for one in sites}.values())
        named = _costly(lines, "ignored_labels", place, loss.runs, cost, title, advice, [loss])
        yield _LINE_FROM, named, sites


def _unused_rows(lines: Lines) -> _Named:
    """Matmuls of positions that are not used, such as logits that no loss is computed for."""
    advice = "select the positions that are used before this line, as in self.head(x[:, -1])"
    for place, sites in _by_place(lines, lambda site: site.unused > 0):
        share = sum(site.unused for site in sites) / sum(site.computed for site in sites)
        if share < _UNUSED_FROM:
            continue
        title = f"{_percent(share)} of the rows that it computes are not used"
        cost, times = share * sum(site.cost_ms for site in sites), max(s.runs for s in sites)
        named = _costly(lines, "unused_rows", place, times, cost, title, advice, sites)
        yield _LINE_FROM, named, sites


def _padding(lines: Lines) -> _Named:
    """Batches with much padding."""
    most = max(lines.padding, key=lambda one: one.padding, default=None)
    place = None if most is None else lines.place(lines.sites[most.site])
    if most is None or place is None or most.padding < _PADDING_FROM * most.tokens:
        return
    share, site = most.padding / most.tokens, lines.sites[most.site]
    title = f"{_percent(share)} of the tokens are padding"
    advice = (
        "put samples of similar length into a batch, or pack several samples into one row with a"
        " mask between them"
    )
    model = sum(one.cost_ms for one in lines.sites if one.backward)
    named = _costly(lines, "padding", place, site.runs, share * model, title, advice, [site])
    yield _LINE_FROM, named, [site]


def _loading(lines: Lines) -> _Named:
    """Functions of the dataset for which the step waits, by their slowest lines."""
    if lines.loading_ms < _LOADING_FROM * lines.step_ms:
        return
    functions: dict[tuple[str, str], list[Loading]] = {}
    for one in lines.loading:
        place = lines.places[one.place]
        functions.setdefault((place.file, place.function), []).append(one)
    for several in functions.values():
        most = max(several, key=lambda one: one.samples)
        place = lines.places[most.place]
        share = sum(one.samples for one in several) / max(1, most.total)
        if share < _LOADER_LINE_FROM:
            continue
        whose = "the DataLoader's workers" if most.in_worker else "loading"
        how = "use more workers" if most.in_worker else "load with num_workers > 0"
        title = f"{place.function} takes {_percent(share)} of the time of {whose}, most of it here"
        advice = f"compute it before the training or on whole arrays, or {how}"
        cost = share * lines.loading_ms
        yield 0.0, _costly(lines, "slow_loading", place, 0, cost, title, advice, []), []


_LINE_RULES = (_waiting, _constants, _copies, _ignored_labels, _unused_rows, _padding, _loading)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _by_place(
    lines: Lines, wanted: Callable[[Site], bool]
) -> Iterator[tuple[Place, Sequence[Site]]]:
    """The sites of the user's own calls that are wanted, by line."""
    groups: dict[int, list[Site]] = {}
    for site in lines.sites:
        if site.own and site.stack and wanted(site):
            groups.setdefault(site.stack[-1], []).append(site)
    for index, sites in groups.items():
        yield lines.places[index], sites


def _costly(
    lines: Lines,
    code: str,
    place: Place,
    times: int,
    cost: float,
    title: str,
    advice: str,
    sites: Sequence[Site],
) -> CostlyLine:
    return CostlyLine(
        code=code,
        where=place.where,
        source=place.code,
        times=times,
        ms=cost,
        share=cost / lines.step_ms,
        title=title,
        advice=advice,
        host_ms=sum(site.host_ms for site in sites),
        device_ms=sum(site.device_ms for site in sites),
        wait_ms=sum(site.wait_ms for site in sites),
        operators=sum(site.operators + site.backward for site in sites),
        copied_bytes=sum(site.copied_bytes for site in sites),
        allocated_bytes=sum(site.allocated_bytes for site in sites),
    )
