"""Criteria of FlashAttention, and the mistakes that explain a wrong result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from stepscope.grading.criteria.accuracy import as_tf32, largest
from stepscope.grading.criteria.attempt import Attempt, Cause
from stepscope.grading.criteria.implementation import Operator
from stepscope.grading.criteria.operator import (
    Call,
    Results,
    grade,
    grade_dtypes,
    grade_each,
    grade_later,
    grade_pending,
    grade_until_refused,
)

_BLOCKS = (16, 32, 64, 128, 256)
"""Tile sizes at whose edges a mistake is looked for."""
_D = 64


@dataclass(frozen=True)
class AttentionCall(Call):
    """Queries, keys and values, with or without a causal mask."""

    names = ("dq", "dk", "dv")

    @property
    def q(self) -> Tensor:
        return self.tensors[0]

    @property
    def k(self) -> Tensor:
        return self.tensors[1]

    @property
    def v(self) -> Tensor:
        return self.tensors[2]

    @property
    def causal(self) -> bool:
        return bool(self.option)

    @property
    def shown(self) -> str:
        shape, _, dtype = super().shown.partition(", ")
        keys = "" if self.k.shape == self.q.shape else f", {self.k.shape[-2]} keys"
        return f"{shape}{keys}, {dtype}{', causal' if self.causal else ''}"

    def baseline(self) -> Self:
        if not self.q.is_cuda or self.dtype != torch.float32:
            return self
        tensors = tuple(as_tf32(x.detach()) for x in self.tensors)
        return replace(self, tensors=tensors, grad=as_tf32(self.grad.detach()))

    def output(self, *tensors: Tensor) -> Tensor:
        """Return attention operator by operator, in the dtype of the inputs."""
        return torch.softmax(scores(self.with_tensors(*tensors)), -1) @ tensors[2]

    def size(self, name: str, exact: Results) -> float:
        # The weights are recomputed from the log-sum-exp, whose rounding is a relative error of
        # each, and their gradients cancel where a query has one key.
        lse = largest(torch.logsumexp(scores(self.to(torch.float64)), -1))
        of_values = largest(exact["dv"]) / self.q.shape[-2]
        return max(1.0, lse) * max(largest(exact[name]), of_values)

    def mistakes(self) -> Iterator[Cause]:
        given = self.to(torch.float64)
        d, n = given.q.shape[-1], given.k.shape[-2]
        everything = torch.ones_like(visible(given))

        def attended(s: Tensor) -> Tensor:
            return torch.softmax(s, -1) @ given.v

        def seeing(code: str, text: str, seen: Tensor, rows: slice = slice(None)) -> Cause:
            return Cause(code, text, attended(scores(given, seen=seen)), rows)

        for text, scale in (
            ("the scores are not scaled by 1/√d", 1.0),
            ("the scores are scaled by 1/d instead of 1/√d", 1 / d),
            ("the scores are multiplied by √d instead of divided", d**0.5),
        ):
            yield Cause("missing-scale", text, attended(scores(given, scale)))
        if given.causal:
            off = "the causal mask is off by one: a query"
            late, early = f"{off} sees the key after it", f"{off} does not see its own key"
            yield seeing("mask-ignored", "is_causal is ignored", everything)
            yield seeing("causal-off-by-one", late, visible(given, 1))
            yield seeing("causal-off-by-one", early, visible(given, -1), slice(1, None))
            for block in _BLOCKS:
                text = f"tiles of {block} at the diagonal are not masked within"
                yield seeing("causal-tile-edge", text, visible(given, 0, block))
                text = f"the loop over keys stops before the diagonal tile of {block}"
                rows = slice(block, None)
                yield seeing("causal-tile-edge", text, visible(given, -1, block), rows)
        else:
            text = "the causal mask is applied without is_causal"
            yield seeing("mask-always", text, visible(given))
        for block in _BLOCKS:
            ragged = n % block
            if ragged and ragged < n:
                seen = visible(given) if given.causal else everything.clone()
                seen[:, n - ragged :] = False
                text = f"the last {ragged} keys are ignored: they do not fill a block of {block}"
                yield seeing("last-block-ignored", text, seen)
            if ragged:
                pad = block - ragged
                text = f"{pad} keys of zeros that fill the last block of {block} are counted"
                yield Cause("padding-counted", text, _padded(given, pad))
            for also_sum in (False, True) if block < n else ():
                what = "accumulator and sum are" if also_sum else "the accumulator is"
                text = f"{what} not rescaled when the maximum changes (blocks of {block})"
                yield Cause("not-rescaled", text, _not_rescaled(given, block, also_sum))
        s = scores(given)
        yield Cause(
            "not-normalized",
            "the output is not divided by the sum of the weights",
            torch.exp(s - s.amax(-1, keepdim=True)) @ given.v,
        )

    def gradient_mistakes(self, name: str, exact: Results) -> Iterator[Cause]:
        scale = self.q.shape[-1] ** -0.5
        s = scores(self)
        lse = torch.logsumexp(s, -1, keepdim=True)
        p, dp = torch.exp(s - lse), self.grad @ self.v.transpose(-2, -1)
        delta = (self.grad * exact["output"]).sum(-1, keepdim=True)

        def wrong(
            code: str, text: str, p: Tensor = p, minus: Tensor = delta, times: float = scale
        ) -> Cause:
            ds = p * (dp - minus) * times
            if name == "dv":
                return Cause(code, text, p.transpose(-2, -1) @ self.grad)
            value = ds @ self.k if name == "dq" else ds.transpose(-2, -1) @ self.q
            return Cause(code, text, value)

        def seeing(code: str, text: str, seen: Tensor) -> Cause:
            return wrong(code, text, torch.exp(scores(self, seen=seen) - lse))

        for other in self.names:
            if other != name and exact[other].shape == exact[name].shape:
                yield Cause("gradients-swapped", f"it is {other}", exact[other])
        if name != "dv":
            rows = "the row sums of dO ∘ O are"
            yield wrong("gradient-scale", "it is not multiplied by 1/√d", times=1.0)
            yield wrong("gradient-scale", "it is multiplied by 1/√d twice", times=scale**2)
            yield wrong("missing-delta", f"{rows} not subtracted from dP", minus=0 * delta)
            yield wrong("missing-delta", f"{rows} added to dP, not subtracted", minus=-delta)
        if self.causal:
            off = "the mask of the backward is off by one: a query"
            text = "the backward ignores the causal mask"
            yield seeing("causal-off-by-one", f"{off} sees the key after it", visible(self, 1))
            yield seeing("causal-off-by-one", f"{off} does not see its key", visible(self, -1))
            yield seeing("mask-ignored", text, torch.ones_like(visible(self)))
        # Rows of dk and dv belong to keys; what is summed for them, to queries.
        for block in _BLOCKS:
            for axis, kind in ((-2, "queries"), (-1, "keys")):
                size = p.shape[axis]
                rest = size % block or min(block, size)
                if rest < size:
                    part = p.clone()
                    part.narrow(axis, size - rest, rest).zero_()
                    text = f"the last {rest} {kind} are ignored (blocks of {block})"
                    yield wrong("last-block-ignored", text, part)
            if self.causal:
                text = f"tiles of {block} at the diagonal are not masked in the backward"
                yield seeing("causal-tile-edge", text, visible(self, 0, block))
                text = f"the backward leaves out the diagonal tiles of {block}"
                yield seeing("causal-tile-edge", text, visible(self, -1, block))


def call_of(
    queries: int,
    keys: int | None = None,
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    seed: int = 0,
    batch: tuple[int, ...] = (2,),
    size: float = 1.0,
) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)

    def drawn(length: int) -> Tensor:
        x = torch.randn(*batch, length, _D, generator=generator, dtype=torch.float32)
        return x.to(device=device, dtype=dtype)

    q, k, v, grad = map(drawn, (queries, keys or queries, keys or queries, queries))
    return AttentionCall((q * size, k * size, v), grad, causal)


def visible(given: AttentionCall, shift: int = 0, block: int = 0) -> Tensor:
    """True where a query sees a key; with `block`, positions are those of tiles of this size."""
    queries = torch.arange(given.q.shape[-2], device=given.q.device)[:, None]
    keys = torch.arange(given.k.shape[-2], device=given.q.device)[None, :]
    if block:
        queries, keys = queries // block, keys // block
    return keys <= queries + shift


def scores(given: AttentionCall, scale: float | None = None, seen: Tensor | None = None) -> Tensor:
    scale = given.q.shape[-1] ** -0.5 if scale is None else scale
    s = given.q @ given.k.transpose(-2, -1) * scale
    if seen is None and given.causal:
        seen = visible(given)
    return s if seen is None else s.masked_fill(~seen, -torch.inf)


def _padded(given: AttentionCall, pad: int) -> Tensor:
    s = scores(given)
    total = torch.logsumexp(s, -1, keepdim=True)
    with_pad = torch.logaddexp(total, torch.full_like(total, math.log(pad)))
    return torch.exp(s - with_pad) @ given.v


def _not_rescaled(given: AttentionCall, block: int, also_sum: bool) -> Tensor:
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


def lse_causes(given: AttentionCall) -> Iterator[Cause]:
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


def _compare_lse(attempt: Attempt, given: AttentionCall, output: Tensor) -> None:
    tensors = getattr(output.grad_fn, "saved_tensors", ()) or ()
    saved = [x for x in tensors if isinstance(x, Tensor)]
    shape = given.q.shape[:-1]
    matching = [x for x in saved if x.shape == shape]
    if len(matching) != 1:
        listed = ", ".join(str(tuple(x.shape)) for x in saved) or "none"
        attempt.fault(
            "saved-lse",
            f"{len(matching)} saved tensors have the shape {tuple(shape)} of the log-sum-exp"
            f" instead of one (saved: {listed}); save it with ctx.save_for_backward",
            count=len(matching),
        )
        return
    exactly = given.to(torch.float64)
    exact, near = (torch.logsumexp(scores(one), -1) for one in (exactly, given.baseline()))
    attempt.compare("lse", given.shown, matching[0], exact, near, lse_causes(exactly), None)


def full(attempt: Attempt, attention: Operator, device: Any) -> None:
    grade(attempt, attention, call_of(128, device=device))


def causal(attempt: Attempt, attention: Operator, device: Any) -> None:
    grade(attempt, attention, call_of(128, causal=True, device=device))


def saved_lse(attempt: Attempt, attention: Operator, device: Any) -> None:
    if not attention.is_function:
        attempt.note("not a torch.autograd.Function: saved tensors are not checked")
        return
    for is_causal in (False, True):
        given = call_of(128, causal=is_causal, device=device)
        with attempt.calling(given.shown):
            output = attention.call(*given.leaves(), is_causal)
            _compare_lse(attempt, given, output)


def second_call(attempt: Attempt, attention: Operator, device: Any) -> None:
    """Two forward passes before their backward passes, then other shapes and values."""
    pending = [call_of(128, device=device, seed=seed, causal=seed == 2) for seed in (1, 2)]
    grade_pending(attempt, attention, pending)
    shapes = ((64, 3), (256, 1), (128, 2))
    later = (
        call_of(length, device=device, seed=seed, batch=(batch,))
        for seed, (length, batch) in enumerate(shapes, start=3)
    )
    grade_later(attempt, attention, later)


def strides(attempt: Attempt, attention: Operator, device: Any) -> None:
    given = call_of(128, device=device)
    transposed = (x.transpose(-2, -1).contiguous().transpose(-2, -1) for x in given.tensors)
    both = torch.stack((given.q, given.k), -2)
    views = given.with_tensors(both[..., 0, :], both[..., 1, :], given.v)
    calls = (
        ("transposed inputs", given.with_tensors(*transposed)),
        ("inputs that are views of one tensor", views),
        ("the gradient of a sum", given.with_grad_of_sum()),
    )
    grade_each(attempt, attention, calls)


def large(attempt: Attempt, attention: Operator, device: Any) -> None:
    given = call_of(128, device=device, size=6.0)
    grade(attempt, attention, given, what="scores up to a few hundred")


def dtypes(attempt: Attempt, attention: Operator, device: Any) -> None:
    kinds = (torch.float16, torch.bfloat16)
    calls = [("", call_of(128, causal=True, dtype=dtype, device=device)) for dtype in kinds]
    grade_dtypes(attempt, attention, calls)


def lengths(attempt: Attempt, attention: Operator, device: Any) -> None:
    for queries, keys in ((64, 256), (256, 128)):
        grade(attempt, attention, call_of(queries, keys, device=device), may_refuse=True)


def ragged(attempt: Attempt, attention: Operator, device: Any) -> None:
    shapes = ((100, False), (100, True), (257, False), (1, True))
    calls = (call_of(length, causal=masked, device=device) for length, masked in shapes)
    grade_until_refused(attempt, attention, calls)


def heads(attempt: Attempt, attention: Operator, device: Any) -> None:
    grade(attempt, attention, call_of(64, causal=True, device=device, batch=(2, 3)))


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
