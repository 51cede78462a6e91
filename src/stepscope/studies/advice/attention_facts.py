"""What a record says of attention that does not run as one kernel: its time and its scores."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import prod

from stepscope.analysis.advice.facts import Work
from stepscope.analysis.trace.summary import Summary, Use
from stepscope.records.memory import SAVED, PhasePeak, SavedTensor
from stepscope.studies.memory.rows import Account

_SOFTMAX, _OF_TORCH = "softmax", "attention"
"""Words of the names of operators. Torch's attention is one of them, whatever it runs inside."""
_WRITTEN_OUT_BY_TORCH = "_scaled_dot_product_attention_math"
_PRODUCTS = ("matmul", "bmm", "einsum", _OF_TORCH)
"""Operators that also keep queries, keys and values."""
_NAME = re.compile(r"[./]?[^./]*$")


def attention_work(summary: Summary, phases: Sequence[Work]) -> tuple[Work, ...]:
    """By phase, what runs beside a softmax that has products beside it."""
    core = _core(summary)
    found = []
    for phase in dict.fromkeys(use.phase for use in core):
        own = [use for use in core if use.phase == phase]
        classes: dict[str, float] = {}
        for use in own:
            classes[use.kind] = classes.get(use.kind, 0.0) + use.ms
        launches = sum(use.count for use in own) if summary.on_device else 0.0
        runs = next((work.runs for work in phases if work.name == phase), None)
        found.append(Work(name=phase, classes=classes, launches=launches, runs=runs))
    return tuple(found)


def is_called(summary: Summary, account: Account | None) -> bool:
    """Whether that is torch's attention on its written-out path. A trace of operators names it;
    kernels do not, and then what keeps the scores does."""
    if any(use.kernel.endswith(_WRITTEN_OUT_BY_TORCH) for use in _core(summary)):
        return True
    scores = _scores(account.saved) if account else []
    return bool(scores) and all(_OF_TORCH in tensor.operator for tensor in scores)


def _core(summary: Summary) -> list[Use]:
    """Linear layers are modules of their own, and their products have a role. Where the softmax is
    a module too, what is beside it is in the part of the model around it."""
    uses = [use for use in summary.uses if use.module and use.phase in ("forward", "backward")]
    core: list[Use] = []
    for module in dict.fromkeys(use.module for use in uses if use.kind == "softmax"):
        around = module.rpartition("/")[0]
        for own in (
            [use for use in uses if use.module == module],
            [use for use in uses if around and use.module.startswith(f"{around}/")],
        ):
            if any(use.kind == "matmul" and not use.role for use in own):
                core += [use for use in own if not use.role and use not in core]
                break
    return core


def score_bytes(account: Account) -> int:
    """Of the scores that are kept for backward at one time. Every micro-batch saves its own, so
    the lines of a peak say how much is live; scores have the part of an operator's lines that they
    have of all that it saves."""
    every, scores = map(_by_operator, (account.saved, _scores(account.saved)))
    shares = {operator: scores[operator] / every[operator] for operator in scores}
    return round(max((_live(peak, shares) for peak in account.phases), default=0.0))


def _by_operator(saved: Sequence[SavedTensor]) -> Counter[str]:
    found: Counter[str] = Counter()
    for tensor in saved:
        found[tensor.operator] += tensor.bytes * tensor.times
    return found


def _live(peak: PhasePeak, shares: dict[str, float]) -> float:
    return sum(
        size * shares.get(line.rpartition(", ")[2], 0.0)
        for line, size in peak.lines.items()
        if line.startswith(SAVED)
    )


def _scores(saved: Sequence[SavedTensor]) -> list[SavedTensor]:
    """What a softmax has kept that has a row and a column for each position, and what is as large
    and beside it: what a dropout left of it, the dropout's mask, a copy for the product."""
    square = [one for one in saved if _is_square(one)]
    softmaxes = [one for one in square if _is_softmax(one)]
    beside = {(_around(one, saved), _size(one)) for one in softmaxes}
    return [
        one
        for one in square
        if one in softmaxes
        or (
            (_OF_TORCH in one.operator or any(_is_in(one, *place) for place in beside))
            and _tells_scores(one, saved)
        )
    ]


def _is_square(tensor: SavedTensor) -> bool:
    return len(tensor.shape) >= 3 and tensor.shape[-1] == tensor.shape[-2] > 1


def _is_softmax(tensor: SavedTensor) -> bool:
    """Not the loss's."""
    return _SOFTMAX in tensor.operator and "log" not in tensor.operator


def _size(tensor: SavedTensor) -> tuple[int, int]:
    """The same with heads and samples in one dimension or in two."""
    return prod(tensor.shape), tensor.shape[-1]


def _is_in(tensor: SavedTensor, part: str, size: tuple[int, int]) -> bool:
    within = not part or tensor.module == part or tensor.module.startswith((f"{part}.", f"{part}/"))
    return within and _size(tensor) == size


def _around(softmax: SavedTensor, saved: Sequence[SavedTensor]) -> str:
    """The part of the model that its scores are in: where the softmax is a module, the one around
    it; empty for the whole model."""
    alone = all(_is_softmax(one) for one in saved if one.module == softmax.module)
    return _NAME.sub("", softmax.module) if alone else softmax.module


def _tells_scores(tensor: SavedTensor, saved: Sequence[SavedTensor]) -> bool:
    """Heads that are as wide as there are positions make queries, keys and values look alike."""
    if not any(word in tensor.operator for word in _PRODUCTS):
        return True
    alike = [one for one in saved if (one.module, one.operator) == (tensor.module, tensor.operator)]
    return any(len(one.shape) >= 3 and not _is_square(one) for one in alike)
