"""Criteria of FlashAttention, and the mistakes that explain a wrong result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.grading.criteria.accuracy import as_tf32, largest
from stepscope.grading.criteria.attempt import Attempt, Cause
from stepscope.grading.criteria.implementation import Attention
from stepscope.grading.criteria.interpreter import Launches

_BLOCKS = (16, 32, 64, 128, 256)
"""Tile sizes at whose edges a mistake is looked for."""
_D = 64


class Inputs(NamedTuple):
    """Inputs of one call; `grad` is the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    causal: bool

    @property
    def shown(self) -> str:
        shape = "×".join(map(str, self.q.shape))
        keys = "" if self.k.shape == self.q.shape else f", {self.k.shape[-2]} keys"
        dtype = str(self.q.dtype).removeprefix("torch.")
        return f"{shape}{keys}, {dtype}{', causal' if self.causal else ''}"

    def exactly(self) -> Inputs:
        return self.to(torch.float64)

    def baseline(self) -> Inputs:
        """Inputs of the reference whose error is the baseline."""
        if not self.q.is_cuda or self.q.dtype != torch.float32:
            return self
        q, k, v, grad = (as_tf32(x.detach()) for x in (self.q, self.k, self.v, self.grad))
        return Inputs(q, k, v, grad, self.causal)

    def to(self, dtype: torch.dtype) -> Inputs:
        q, k, v, grad = (x.detach().to(dtype) for x in (self.q, self.k, self.v, self.grad))
        return Inputs(q, k, v, grad, self.causal)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as leaves of a new graph."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return q, k, v


def inputs(
    queries: int,
    keys: int | None = None,
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    seed: int = 0,
    batch: tuple[int, ...] = (2,),
    size: float = 1.0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def drawn(length: int) -> Tensor:
        x = torch.randn(*batch, length, _D, generator=generator, dtype=torch.float32)
        return x.to(device=device, dtype=dtype)

    q, k, v, grad = map(drawn, (queries, keys or queries, keys or queries, queries))
    return Inputs(q * size, k * size, v, grad, causal)


class Results(NamedTuple):
    """Results of one call, as float64 where they are exact."""

    output: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def visible(given: Inputs, shift: int = 0, block: int = 0) -> Tensor:
    """True where a query sees a key; with `block`, positions are those of tiles of this size."""
    queries = torch.arange(given.q.shape[-2], device=given.q.device)[:, None]
    keys = torch.arange(given.k.shape[-2], device=given.q.device)[None, :]
    if block:
        queries, keys = queries // block, keys // block
    return keys <= queries + shift


def scores(given: Inputs, scale: float | None = None, seen: Tensor | None = None) -> Tensor:
    scale = given.q.shape[-1] ** -0.5 if scale is None else scale
    s = given.q @ given.k.transpose(-2, -1) * scale
    if seen is None and given.causal:
        seen = visible(given)
    return s if seen is None else s.masked_fill(~seen, -torch.inf)


def reference(given: Inputs) -> Results:
    """Attention operator by operator, in the dtype of the inputs."""
    leaves = given.leaves()
    q, k, v = leaves
    s = scores(given._replace(q=q, k=k))
    output = torch.softmax(s, -1) @ v
    gradients = torch.autograd.grad(output, leaves, given.grad)
    return Results(output.detach(), torch.logsumexp(s, -1).detach(), *gradients)


def grade(
    attempt: Attempt,
    attention: Attention,
    given: Inputs,
    *,
    what: str = "",
    may_refuse: bool = False,
    lse: bool = False,
) -> None:
    """Call the implementation once and compare its results."""
    what = what or given.shown
    with attempt.calling(what, may_refuse=may_refuse):
        leaves = given.leaves()
        output = attention.call(*leaves, given.causal)
        compare_forward(attempt, what, given, output, attention, lse=lse)
        if not attempt.faults:
            grads = torch.autograd.grad(output, leaves, given.grad, allow_unused=True)
            compare_gradients(attempt, what, given, grads)


def compare_forward(
    attempt: Attempt, what: str, given: Inputs, output: Any, attention: Attention, *, lse: bool
) -> None:
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        attempt.fault("wrong-type", f"the result is a {kind} instead of a tensor for {what}")
        return
    exact, near = reference(given.exactly()), reference(given.baseline())
    right = attempt.compare(
        "output",
        what,
        output,
        exact.output,
        near.output,
        mistakes(given),
        dtype=given.q.dtype,
    )
    if right and lse and attention.is_function:
        _compare_lse(attempt, what, given, output, exact.lse)


def _compare_lse(attempt: Attempt, what: str, given: Inputs, output: Tensor, exact: Tensor) -> None:
    saved = getattr(output.grad_fn, "saved_tensors", ()) or ()
    shape = given.q.shape[:-1]
    matching = [x for x in saved if isinstance(x, Tensor) and x.shape == shape]
    if len(matching) != 1:
        listed = ", ".join(str(tuple(x.shape)) for x in saved if isinstance(x, Tensor)) or "none"
        attempt.fault(
            "saved-lse",
            f"{len(matching)} saved tensors have the shape {tuple(shape)} of the log-sum-exp"
            f" instead of one (saved: {listed}); save it with ctx.save_for_backward",
            count=len(matching),
        )
        return
    near = torch.logsumexp(scores(given.baseline()), -1).detach()
    attempt.compare("lse", what, matching[0], exact, near, lse_causes(given.exactly()), None)


def compare_gradients(
    attempt: Attempt, what: str, given: Inputs, gradients: tuple[Tensor | None, ...]
) -> None:
    exact, near = reference(given.exactly()), reference(given.baseline())
    lse = max(1.0, largest(exact.lse))
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        causes = gradient_causes(given.exactly(), name, exact)
        attempt.compare(
            name,
            what,
            gradient,
            getattr(exact, name),
            getattr(near, name),
            causes,
            dtype=given.q.dtype,
            # The weights are recomputed from the log-sum-exp, whose rounding is a relative error
            # of each, and their gradients cancel where a query has one key.
            size=lse * max(largest(getattr(exact, name)), largest(exact.dv) / given.q.shape[-2]),
        )


def mistakes(given: Inputs) -> Iterator[Cause]:
    """Common wrong outputs."""
    given = given.exactly()
    d, n = given.q.shape[-1], given.k.shape[-2]

    def attended(s: Tensor, v: Tensor = given.v) -> Tensor:
        return torch.softmax(s, -1) @ v

    def seeing(seen: Tensor) -> Tensor:
        return attended(scores(given, seen=seen))

    for text, scale in (
        ("the scores are not scaled by 1/√d", 1.0),
        ("the scores are scaled by 1/d instead of 1/√d", 1 / d),
        ("the scores are multiplied by √d instead of divided", d**0.5),
    ):
        yield Cause("missing-scale", text, attended(scores(given, scale)))
    everything = torch.ones_like(visible(given))
    if given.causal:
        yield Cause("mask-ignored", "is_causal is ignored", seeing(everything))
        yield Cause(
            "causal-off-by-one",
            "the causal mask is off by one: a query sees the key after it",
            seeing(visible(given, 1)),
        )
        yield Cause(
            "causal-off-by-one",
            "the causal mask is off by one: a query does not see its own key",
            seeing(visible(given, -1)),
            slice(1, None),
        )
        for block in _BLOCKS:
            yield Cause(
                "causal-tile-edge",
                f"tiles of {block} at the diagonal are not masked within",
                seeing(visible(given, 0, block)),
            )
            yield Cause(
                "causal-tile-edge",
                f"the loop over keys stops before the diagonal tile of {block}",
                seeing(visible(given, -1, block)),
                slice(block, None),
            )
    else:
        yield Cause(
            "mask-always", "the causal mask is applied without is_causal", seeing(visible(given))
        )
    for block in _BLOCKS:
        whole, ragged = n - n % block, n % block
        if ragged and whole:
            seen = everything.clone()
            seen[:, whole:] = False
            if given.causal:
                seen &= visible(given)
            yield Cause(
                "last-block-ignored",
                f"the last {ragged} keys are ignored: they do not fill a block of {block}",
                seeing(seen),
            )
        if ragged:
            yield Cause(
                "padding-counted",
                f"{block - ragged} keys of zeros that fill the last block of {block} are counted",
                _padded(given, block - ragged),
            )
        if block < n:
            for text, also_sum in (
                ("the accumulator is not rescaled when the maximum changes", False),
                ("accumulator and sum are not rescaled when the maximum changes", True),
            ):
                yield Cause(
                    "not-rescaled",
                    f"{text} (blocks of {block})",
                    _not_rescaled(given, block, also_sum),
                )
    yield Cause(
        "not-normalized",
        "the output is not divided by the sum of the weights",
        torch.exp(scores(given) - scores(given).amax(-1, keepdim=True)) @ given.v,
    )


def _padded(given: Inputs, pad: int) -> Tensor:
    s = scores(given)
    total = torch.logsumexp(s, -1, keepdim=True)
    with_pad = torch.logaddexp(total, torch.full_like(total, math.log(pad)))
    return torch.exp(s - with_pad) @ given.v


def _not_rescaled(given: Inputs, block: int, also_sum: bool) -> Tensor:
    s = scores(given)
    shape = (*given.q.shape[:-1], 1)
    m, total = s.new_full(shape, -torch.inf), s.new_zeros(shape)
    out = torch.zeros_like(given.q)
    for keys in range(0, s.shape[-1], block):
        tile, v = s[..., keys : keys + block], given.v[..., keys : keys + block, :]
        new = torch.maximum(m, tile.amax(-1, keepdim=True))
        p = torch.exp(tile - new)
        kept = torch.ones_like(total) if also_sum else torch.exp(m - new)
        total = kept * total + p.sum(-1, keepdim=True)
        out, m = out + p @ v, new
    return out / total


def lse_causes(given: Inputs) -> Iterator[Cause]:
    s = scores(given)
    lse = torch.logsumexp(s, -1)
    top = s.amax(-1)
    total = torch.exp(s - top[..., None]).sum(-1)
    for text, value in (
        ("it is in units of log 2: exp2 was used, and it was not converted", lse / math.log(2)),
        ("it is the row maximum without the log of the sum", top),
        ("it is the log of the sum without the row maximum", total.log()),
        ("the sum was added without its log", top + total),
        ("it is the sum of the weights", total),
        ("its sign is wrong", -lse),
        ("it is of unscaled scores", torch.logsumexp(scores(given, 1.0), -1)),
    ):
        yield Cause("wrong-lse", text, value)


def gradient_causes(given: Inputs, name: str, exact: Results) -> Iterator[Cause]:
    """Wrong values of one gradient, of a right forward pass."""
    scale = given.q.shape[-1] ** -0.5
    s, lse = scores(given), exact.lse[..., None]
    dp = given.grad @ given.v.transpose(-2, -1)
    delta = (given.grad * exact.output).sum(-1, keepdim=True)

    def gradient(p: Tensor, minus: Tensor, times: float = scale) -> Tensor:
        ds = p * (dp - minus) * times
        if name == "dv":
            return p.transpose(-2, -1) @ given.grad
        return ds @ given.k if name == "dq" else ds.transpose(-2, -1) @ given.q

    p = torch.exp(s - lse)
    others = {"dq": exact.dq, "dk": exact.dk, "dv": exact.dv}
    for other, value in others.items():
        if other != name and value is not None and value.shape == others[name].shape:
            yield Cause("gradients-swapped", f"it is {other}", value)
    if name != "dv":
        yield Cause("gradient-scale", "it is not multiplied by 1/√d", gradient(p, delta, 1.0))
        yield Cause(
            "gradient-scale",
            "it is multiplied by 1/√d twice",
            gradient(p, delta, scale * scale),
        )
        yield Cause(
            "missing-delta",
            "the row sums of dO ∘ O are not subtracted from dP",
            gradient(p, torch.zeros_like(delta)),
        )
        yield Cause(
            "missing-delta",
            "the row sums of dO ∘ O are added to dP, not subtracted",
            gradient(p, -delta),
        )
    for shift, text in ((1, "a query sees the key after it"), (-1, "a query does not see its key")):
        if given.causal:
            q = torch.exp(scores(given, seen=visible(given, shift)) - lse)
            yield Cause(
                "causal-off-by-one",
                f"the mask of the backward is off by one: {text}",
                gradient(q, delta),
            )
    if given.causal:
        q = torch.exp(scores(given, seen=torch.ones_like(visible(given))) - lse)
        yield Cause("mask-ignored", "the backward ignores the causal mask", gradient(q, delta))
    # Rows of dk and dv belong to keys; what is summed for them, to queries.
    for block in _BLOCKS:
        for axis, kind in ((-2, "queries"), (-1, "keys")):
            size = p.shape[axis]
            rest = size % block or min(block, size)
            if rest == size:
                continue
            part = p.clone()
            part[
                ...,
                *(
                    (slice(size - rest, None), slice(None))
                    if axis == -2
                    else (slice(None), slice(size - rest, None))
                ),
            ] = 0.0
            yield Cause(
                "last-block-ignored",
                f"the last {rest} {kind} are ignored (blocks of {block})",
                gradient(part, delta),
            )
        if given.causal:
            seen = visible(given, 0, block)
            q = torch.exp(scores(given, seen=seen) - lse)
            yield Cause(
                "causal-tile-edge",
                f"tiles of {block} at the diagonal are not masked in the backward",
                gradient(q, delta),
            )
            late = torch.exp(scores(given, seen=visible(given, -1, block)) - lse)
            yield Cause(
                "causal-tile-edge",
                f"the backward leaves out the diagonal tiles of {block}",
                gradient(late, delta),
            )


def full(attempt: Attempt, attention: Attention, device: Any) -> None:
    grade(attempt, attention, inputs(128, device=device))


def causal(attempt: Attempt, attention: Attention, device: Any) -> None:
    grade(attempt, attention, inputs(128, causal=True, device=device))


def saved_lse(attempt: Attempt, attention: Attention, device: Any) -> None:
    if not attention.is_function:
        attempt.note("not a torch.autograd.Function: saved tensors are not checked")
        return
    for is_causal in (False, True):
        given = inputs(128, causal=is_causal, device=device)
        with attempt.calling(given.shown):
            leaves = given.leaves()
            output = attention.call(*leaves, given.causal)
            _compare_lse(attempt, given.shown, given, output, reference(given.exactly()).lse)


def second_call(attempt: Attempt, attention: Attention, device: Any) -> None:
    """Two forward passes before their backward passes, then other shapes and values."""
    first = inputs(128, device=device, seed=1)
    second = inputs(128, device=device, seed=2, causal=True)
    pending = []
    for given in (first, second):
        with attempt.calling(given.shown):
            leaves = given.leaves()
            pending.append((given, leaves, attention.call(*leaves, given.causal)))
    if attempt.faults:
        return
    for given, leaves, output in pending:
        trial = Attempt(attempt.folder)
        what = f"{given.shown}, one of two pending calls"
        with trial.calling(what):
            compare_forward(trial, what, given, output, attention, lse=False)
            grads = torch.autograd.grad(output, leaves, given.grad, allow_unused=True)
            if not trial.faults:
                compare_gradients(trial, what, given, grads)
        _stale(attempt, trial, given, attention)
    for seed, (length, batch) in enumerate(((64, 3), (256, 1), (128, 2)), start=3):
        if not attempt.faults:
            given = inputs(length, device=device, seed=seed, batch=(batch,))
            trial = Attempt(attempt.folder)
            grade(trial, attention, given, what=f"{given.shown}, after calls with other shapes")
            _stale(attempt, trial, given, attention)


def _stale(attempt: Attempt, trial: Attempt, given: Inputs, attention: Attention) -> None:
    """Report faults of a later call, as stale if the same call is right after a new import."""
    alone = Attempt(attempt.folder)
    if trial.faults:
        grade(alone, attention.fresh(), given)
    for fault in trial.faults:
        if alone.faults:
            attempt.faults.append(fault)
        else:
            why = "The same call alone is right: something is kept from call to call"
            attempt.fault("stale-result", f"{fault.text}. {why}", **fault.values)


def strides(attempt: Attempt, attention: Attention, device: Any) -> None:
    given = inputs(128, device=device)
    q, k, v = (
        x.transpose(-2, -1).contiguous().transpose(-2, -1) for x in (given.q, given.k, given.v)
    )
    grade(attempt, attention, given._replace(q=q, k=k, v=v), what="transposed inputs")
    both = torch.stack((given.q, given.k), -2)
    views = given._replace(q=both[..., 0, :], k=both[..., 1, :])
    if not attempt.faults:
        grade(attempt, attention, views, what="inputs that are views of one tensor")
    if not attempt.faults:
        # The gradient of output.sum(): strides of 0.
        ones = given.grad.new_ones(()).expand(given.grad.shape)
        grade(attempt, attention, given._replace(grad=ones), what="the gradient of a sum")


def large(attempt: Attempt, attention: Attention, device: Any) -> None:
    given = inputs(128, device=device, size=6.0)
    grade(attempt, attention, given, what="scores up to a few hundred")


def dtypes(attempt: Attempt, attention: Attention, device: Any) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        given = inputs(128, causal=True, dtype=dtype, device=device)
        with Launches() as launches:
            trial = Attempt(attempt.folder)
            grade(trial, attention, given, may_refuse=True)
        if dtype == torch.bfloat16 and launches.interpreted:
            attempt.note("bfloat16 is not graded: Triton's interpreter computes it incorrectly")
            continue
        attempt.faults += trial.faults
        attempt.notes += trial.notes


def lengths(attempt: Attempt, attention: Attention, device: Any) -> None:
    for queries, keys in ((64, 256), (256, 128)):
        grade(attempt, attention, inputs(queries, keys, device=device), may_refuse=True)


def ragged(attempt: Attempt, attention: Attention, device: Any) -> None:
    for length, is_causal in ((100, False), (100, True), (257, False), (1, True)):
        given = inputs(length, causal=is_causal, device=device)
        before = len(attempt.notes)
        grade(attempt, attention, given, may_refuse=True)
        if attempt.faults or len(attempt.notes) > before:
            return


def heads(attempt: Attempt, attention: Attention, device: Any) -> None:
    grade(attempt, attention, inputs(64, causal=True, device=device, batch=(2, 3)))


CRITERIA = {
    "full": full,
    "causal": causal,
    "lse": saved_lse,
    "second-call": second_call,
    "strides": strides,
    "large": large,
    "dtypes": dtypes,
    "lengths": lengths,
    "ragged": ragged,
    "heads": heads,
}
