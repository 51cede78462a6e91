"""Naive attention in a record (matmul, softmax, matmul of one module): its time and its scores.

The softmax is one operator, or computed from elementary operations: exp of the scores minus their
maximum, divided by its sum.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import prod

from stepscope.analysis.advice.facts import PhaseWork
from stepscope.analysis.trace.summary import Summary, Use
from stepscope.records.memory import PhasePeak, SavedTensor, saved_line
from stepscope.views.memory import Account

_SOFTMAX, _OF_TORCH = "softmax", "attention"
"""Substrings of operator names and kernel classes. PyTorch's attention is one operator, whatever it
runs inside."""
_EXP = "exp"
_ELEMENTARY = (
    frozenset((_EXP,)),
    frozenset(("max", "amax", "maxnan")),
    frozenset(("sum", "reduce_kernel")),
    frozenset(("div",)),
)
"""Operations of an elementary softmax, as operators and as kernels are named: the functor of `amax`
is `MaxNanFunctor`, and a kernel that sums names none. The difference is an `add` kernel."""
_BATCHED = frozenset(("bmm", "baddbmm", "addbmm"))
_WRAPPERS = frozenset(("aten::matmul", "aten::einsum"))
"""Operators that call a batched matmul and take almost no time themselves."""
_POINTWISE = frozenset(("softmax", "elementwise", "copy/cast", "other"))
_TORCH_MATH_PATH = "_scaled_dot_product_attention_math"
_MATMULS = ("matmul", "bmm", "einsum", _OF_TORCH)
"""Operators that also save queries, keys and values for backward."""
_NAME = re.compile(r"[./]?[^./]*$")
_NAME_WORDS = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")


def attention_work(
    summary: Summary, phases: Sequence[PhaseWork], account: Account | None = None
) -> tuple[PhaseWork, ...]:
    """Work of naive attention in each phase: batched matmuls, the softmax between them, masks."""
    core = _core(summary, account)
    phases_work = []
    for phase in dict.fromkeys(use.phase for use in core):
        own = [use for use in core if use.phase == phase]
        classes: dict[str, float] = {}
        for use in own:
            classes[use.kind] = classes.get(use.kind, 0.0) + use.ms
        launches = sum(use.count for use in own) if summary.on_device else 0.0
        runs = next((work.runs for work in phases if work.name == phase), None)
        phases_work.append(PhaseWork(name=phase, classes=classes, launches=launches, runs=runs))
    return tuple(phases_work)


def is_called(summary: Summary, account: Account | None) -> bool:
    """Return True if the naive attention is the math path of PyTorch's own attention. Operator
    traces name it; kernels do not, and then the operator that saved the scores is checked."""
    if any(_is_math_path(use) for use in _core(summary, account)):
        return True
    scores = _scores(account.saved) if account else []
    return bool(scores) and all(_OF_TORCH in tensor.operator for tensor in scores)


def _core(summary: Summary, account: Account | None) -> list[Use]:
    """Uses of every module that computes naive attention. If the softmax is a separate module
    (`nn.Softmax`), the matmuls are in the module that contains it."""
    uses = [use for use in summary.uses if use.module and use.phase in ("forward", "backward")]
    by_module: dict[str, list[Use]] = {}
    for use in uses:
        by_module.setdefault(use.module, []).append(use)
    core: list[Use] = []
    for module, own in by_module.items():
        if not _has_softmax(own) or not _may_be_scores(module, account):
            continue
        around = module.rpartition("/")[0]
        for part in (own, [*own, *_pointwise_children(uses, around)] if around else []):
            if _is_naive_attention(part, summary.on_device):
                core += [use for use in part if _belongs(use, summary.on_device)]
                break
    return list(dict.fromkeys(core))


def _pointwise_children(uses: Sequence[Use], around: str) -> list[Use]:
    """Uses of a module itself and of its children with only pointwise operations and softmax: a
    dropout or a mask, not a projection or a norm."""
    matches = [use for use in uses if use.module == around]
    children = {use.module for use in uses if use.module.rpartition("/")[0] == around}
    for child in children:
        own = [use for use in uses if use.module == child]
        if not {use.kind for use in own} - _POINTWISE:
            matches += own
    return matches


def _is_naive_attention(uses: Sequence[Use], on_device: bool) -> bool:
    """Return True for two batched matmuls per softmax in the forward and no fused attention. A
    module that uses top-k is a router, or attention that no fused kernel computes."""
    forward = [use for use in uses if use.phase == "forward"]
    if any("topk" in use.kernel.lower() for use in forward):
        return False
    fused = any(use.kind == _OF_TORCH for use in forward)
    if fused and not any(_is_math_path(use) for use in forward):
        return False
    # A CPU trace lists `softmax` and the `_softmax` that it calls.
    softmaxes = max((use.count for use in forward if _is_softmax_use(use)), default=0.0)
    softmaxes = softmaxes or _elementary_softmaxes(forward)
    matmuls = sum(use.count for use in forward if _is_batched(use, on_device))
    return softmaxes > 0 and matmuls >= 2 * softmaxes


def _is_softmax_use(use: Use) -> bool:
    """Return True for a softmax that is not a loss's log-softmax. GPU kernel names do not
    distinguish the two."""
    return use.kind == _SOFTMAX and "log_softmax" not in use.kernel


def _has_softmax(uses: Sequence[Use]) -> bool:
    forward = [use for use in uses if use.phase == "forward"]
    return any(map(_is_softmax_use, uses)) or _elementary_softmaxes(forward) > 0


def _elementary_softmaxes(forward: Sequence[Use]) -> float:
    """Number of softmaxes that these elementary operations may compute."""
    return min(
        sum(use.count for use in forward if _operation(use) in names) for names in _ELEMENTARY
    )


def _operation(use: Use) -> str:
    """Operation of an operator (`aten::exp_`) or of a kernel (`elementwise_kernel · exp`)."""
    return use.kernel.removeprefix("aten::").rpartition(" · ")[2].rstrip("_").lower()


def _is_batched(use: Use, on_device: bool) -> bool:
    """Return True for a batched matmul. Matmuls of linear layers have a role in the forward;
    operators are also checked by name."""
    if use.kind != "matmul" or use.role:
        return False
    return on_device or use.kernel.removeprefix("aten::") in _BATCHED


def _belongs(use: Use, on_device: bool) -> bool:
    """Return False for a linear layer called as a function; its backward has no role on a CPU."""
    matmul = use.kind == "matmul" and use.kernel not in _WRAPPERS
    return not use.role and (not matmul or _is_batched(use, on_device))


def _is_math_path(use: Use) -> bool:
    return use.kernel.endswith(_TORCH_MATH_PATH)


def _may_be_scores(module: str, account: Account | None) -> bool:
    """Return False if every softmax saved by the module has fewer than three dimensions: scores
    have rows and columns for each sample, a router has one row per token. Likewise if no
    exponentials that it saves are those of a softmax."""
    saved = account.saved if account else ()
    own = [one for one in saved if words_of(one.module) == words_of(module)]
    softmaxes = [one for one in own if _is_softmax(one)]
    if not softmaxes:
        exponentials = [one for one in own if one.operator == _EXP]
        softmaxes = [one for one in exponentials if _becomes_probabilities(one, saved)]
        return not exponentials or any(len(one.shape) >= 3 for one in softmaxes)
    return any(len(one.shape) >= 3 for one in softmaxes)


def words_of(module: str) -> str:
    """Module name without indices, which traces and memory ledgers write differently."""
    return " ".join(_NAME_WORDS.findall(module))


def score_bytes(account: Account) -> int:
    """Bytes of the scores saved for backward at one time. Every micro-batch saves its own, so the
    lines of a peak show how much is live; the scores' share of a line is their share of everything
    saved in it."""
    every, scores = map(_by_line, (account.saved, _scores(account.saved)))
    shares = {line: scores[line] / every[line] for line in scores}
    return round(max((_live(peak, shares) for peak in account.phases), default=0.0))


def _by_line(saved: Sequence[SavedTensor]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for tensor in saved:
        sizes[saved_line(tensor.module, tensor.operator)] += tensor.bytes * tensor.times
    return sizes


def _live(peak: PhasePeak, shares: dict[str, float]) -> float:
    return sum(size * shares.get(line, 0.0) for line, size in peak.lines.items())


def _scores(saved: Sequence[SavedTensor]) -> list[SavedTensor]:
    """Saved outputs or exponentials of a softmax with a row and a column per position, and tensors
    of the same size next to them: the dropout's output, its mask, a copy for the matmul."""
    square = [one for one in saved if _is_square(one)]
    softmaxes = [one for one in square if _is_softmax(one) or _becomes_probabilities(one, saved)]
    locations = {(_around(one, saved), _size(one)) for one in softmaxes}
    return [
        one
        for one in square
        if one in softmaxes
        or (
            (_OF_TORCH in one.operator or any(_is_in(one, *location) for location in locations))
            and _is_distinguishable(one, saved)
        )
    ]


def _is_square(tensor: SavedTensor) -> bool:
    return len(tensor.shape) >= 3 and tensor.shape[-1] == tensor.shape[-2] > 1


def _is_softmax(tensor: SavedTensor) -> bool:
    """Return True for a softmax that is not part of the loss."""
    return _SOFTMAX in tensor.operator and "log" not in tensor.operator


def _becomes_probabilities(tensor: SavedTensor, saved: Sequence[SavedTensor]) -> bool:
    """Return True for the exponentials of an elementary softmax: a matmul next to them saves the
    probabilities, a tensor of the same size. That of a loss has no matmul."""
    if tensor.operator != _EXP:
        return False
    part = _around(tensor, saved)
    return any(_is_matmul(one) and _is_in(one, part, _size(tensor)) for one in saved)


def _size(tensor: SavedTensor) -> tuple[int, int]:
    """Size that is the same whether heads and samples share a dimension or not."""
    return prod(tensor.shape), tensor.shape[-1]


def _is_in(tensor: SavedTensor, part: str, size: tuple[int, int]) -> bool:
    within = not part or tensor.module == part or tensor.module.startswith((f"{part}.", f"{part}/"))
    return within and _size(tensor) == size


def _around(softmax: SavedTensor, saved: Sequence[SavedTensor]) -> str:
    """Module that contains the scores: if the softmax is a separate module, its parent; empty for
    the entire model."""
    own = [one for one in saved if one.module == softmax.module]
    elementary = softmax.operator == _EXP
    alone = not any(map(_is_matmul, own)) if elementary else all(map(_is_softmax, own))
    return _NAME.sub("", softmax.module) if alone else softmax.module


def _is_matmul(tensor: SavedTensor) -> bool:
    return any(word in tensor.operator for word in _MATMULS)


def _is_distinguishable(tensor: SavedTensor, saved: Sequence[SavedTensor]) -> bool:
    """Return True if the tensor is distinguishable from queries, keys and values, which have the
    same shape if the head dimension equals the number of positions."""
    if not _is_matmul(tensor):
        return True
    alike = [one for one in saved if (one.module, one.operator) == (tensor.module, tensor.operator)]
    return any(len(one.shape) >= 3 and not _is_square(one) for one in alike)
