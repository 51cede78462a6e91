"""Criteria by which a changed script counts as faster at the same training. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from stepscope.advisor.judge.evidence import GRADIENTS, PROBES, Evidence, Samples
from stepscope.advisor.patch.apply import Gain
from stepscope.analysis.advice.rule import WORTH
from stepscope.records.stats import judge
from stepscope.report.format import count, duration, percent

GRADIENT_ERROR = {"float64": 1e-3, "float32": 1e-3, "tf32": 2e-2, "float16": 5e-2}
GRADIENT_ERROR |= {"bfloat16": 5e-2, "float8_e4m3fn": 0.25, "float8_e5m2": 0.25}
"""Largest relative error of the gradients, by the dtype of the matmuls."""
DEFAULT_DTYPE = "bfloat16"
"""Lowest dtype of the policy: a lower one has the error of this one."""
_FLOPS_WITHIN = 0.01
_FLOATS_WITHIN = 0.02
_UPDATE_WITHIN = 0.25
_SAME_NOISE = 2.0
_NOISY = 0.02
"""Relative differences of gradients between seeds from which a model counts as random."""
_ACROSS_SEEDS = 1.5
_MOST_SHOWN = 1e6
_SMALL = 1e-3
"""Share of the gradient's norm below which a parameter's own error is rounding."""
_BLOCKED_SHARE = 0.05
_WIDTH = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}

Result = Literal["pass", "fail", "unknown"]
Outcome = Literal["faster", "refused", "not faster", "cannot tell"]


class Criterion(msgspec.Struct, frozen=True):
    """One criterion, with what was found."""

    name: str
    result: Result
    text: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the changed script counts as faster."""

    outcome: Outcome
    criteria: tuple[Criterion, ...]
    gain: Gain | None = None

    @property
    def failed(self) -> list[str]:
        return [one.name for one in self.criteria if one.result == "fail"]

    @property
    def sentence(self) -> str:
        wanted = {"refused": "fail", "cannot tell": "unknown", "not faster": "fail"}
        decided = [c.text for c in self.criteria if c.result == wanted.get(self.outcome)]
        if self.outcome == "faster":
            return f"The changed script counts as faster: {self.criteria[-1].text}."
        heads = {
            "refused": "The changed script does not count as faster",
            "not faster": "The changed script is not faster",
            "cannot tell": "Cannot tell",
        }
        return f"{heads[self.outcome]}: {'; '.join(decided)}."


def same_training(original: Evidence, changed: Evidence, lowest: str) -> list[Criterion]:
    """Judge all that does not need the times."""
    checks: list[Callable[[], Criterion]] = [
        lambda: _steps(original, changed),
        lambda: _samples(original, changed),
        lambda: _model(original, changed),
        lambda: _flops(original, changed),
        lambda: _randomness(original, changed),
        lambda: _gradients(original, changed, lowest),
        lambda: _updates(original, changed),
    ]
    return [check() for check in checks]


def _steps(original: Evidence, changed: Evidence) -> Criterion:
    ended = changed.ended and changed.steps < original.steps
    text = f"the changed script ends after {changed.steps} of {original.steps} steps"
    return Criterion("steps", "fail" if ended else "pass", text if ended else "as many steps")


def _samples(original: Evidence, changed: Evidence) -> Criterion:
    steps = sorted(original.samples.keys() & changed.samples.keys())
    if not steps:
        missing = "original" if not original.samples else "changed script"
        result: Result = "unknown" if not original.samples else "fail"
        return Criterion("samples", result, f"no batch reaches the model of the {missing}")
    for step in steps:
        why = _unlike(original.samples[step], changed.samples[step])
        if why:
            return Criterion("samples", "fail", f"in step {step} {why}")
    return Criterion("samples", "pass", f"the same samples in {len(steps)} steps")


def _unlike(one: Samples, other: Samples) -> str:
    """Return how the samples of a step differ; empty if they are the same."""
    if one.count != other.count:
        return f"{other.count} samples reach the model instead of {one.count}"
    if one.elements != other.elements:
        each = (s.elements / max(1, s.count) for s in (other, one))
        return "a sample has {:.4g} elements instead of {:.4g}".format(*each)
    different = len(set(one.exact) - set(other.exact))
    if not different:
        for before, after in zip(one.projections, other.projections, strict=False):
            a, b = np.array(before), np.array(after)
            far = np.abs(a - b) > _FLOATS_WITHIN * (float(np.sqrt((a * a).mean())) + 1e-12)
            different = max(different, int(far.sum()))
    return f"{different} of {one.count} samples are others" if different else ""


def _model(original: Evidence, changed: Evidence) -> Criterion:
    if changed.unlike:
        sizes = [
            (len(e.parameters), sum(int(np.prod(p.shape)) for p in e.parameters))
            for e in (changed, original)
        ]
        text = "the model has {} parameters of {:,} entries instead of {} of {:,}"
        return Criterion("model", "fail", text.format(*sizes[0], *sizes[1]))
    narrower = [
        (one.dtype, other.dtype)
        for one, other in zip(original.parameters, changed.parameters, strict=False)
        if _WIDTH.get(other.dtype, 8) < _WIDTH.get(one.dtype, 8)
    ]
    if narrower:
        text = f"{len(narrower)} parameters are in {narrower[0][1]} instead of {narrower[0][0]}"
        return Criterion("model", "fail", text)
    return Criterion("model", "pass", "the same parameters")


def _flops(original: Evidence, changed: Evidence) -> Criterion:
    if original.replays or changed.replays:
        return Criterion("flops", "unknown", "FLOPs of replayed CUDA graphs cannot be counted")
    if not original.flops or changed.flops is None:
        text = "the FLOPs of a step could not be counted"
        return Criterion("flops", "fail" if original.flops else "unknown", text)
    ratio = changed.flops / original.flops
    text = f"a step has {count(changed.flops)} model FLOPs instead of {count(original.flops)}"
    same = abs(ratio - 1) <= _FLOPS_WITHIN
    return Criterion("flops", "pass" if same else "fail", f"{text} ({percent(ratio)})")


def _randomness(original: Evidence, changed: Evidence) -> Criterion:
    one, other = original.noise, changed.noise
    if one is None or other is None:
        return Criterion("randomness", "pass", "the model's randomness was not compared")
    text = f"gradients differ by {percent(other)} between seeds instead of {percent(one)}"
    larger, smaller = max(one, other), min(one, other)
    differs = larger > _NOISY and larger > _SAME_NOISE * smaller
    return Criterion("randomness", "fail" if differs else "pass", text)


def _loaded(evidence: Evidence) -> dict[str, Any]:
    with np.load(evidence.file(GRADIENTS)) as found:
        return dict(found)


def _each(original: Evidence, changed: Evidence, kind: str) -> Iterator[list[tuple[str, Any, Any]]]:
    """For each probe: name and both values of each parameter that the original has one for."""
    before, after = _loaded(original), _loaded(changed)
    for probe in range(1, PROBES + 1):
        keys = (
            (parameter.name, f"{kind}.{probe}.{index}")
            for index, parameter in enumerate(original.parameters)
        )
        yield [(name, before[key], after.get(key)) for name, key in keys if key in before]


def _gradients(original: Evidence, changed: Evidence, lowest: str) -> Criterion:
    known = GRADIENT_ERROR
    floor = max(known[lowest], known.get(original.dtype, 0.0))
    bound = min(floor, max(known.get(e.dtype, floor) for e in (original, changed)))
    error, without = _error(original, changed, "gradient")
    if without:
        return Criterion("gradients", "fail", f"`{without}` has no gradient")
    if error is None:
        return Criterion("gradients", "unknown", "no gradient of the original was observed")
    noise = max(original.noise or 0.0, changed.noise or 0.0)
    what = "gradients on the same batch and weights"
    if error > bound and noise > _NOISY and error <= bound + _ACROSS_SEEDS * noise:
        # Their random masks differ, so the gradients without dropout decide.
        quiet, _ = _error(original, changed, "quiet")
        if quiet is None:
            return Criterion("gradients", "unknown", f"{what} are random: {percent(error)}")
        error, what = quiet, f"{what}, without dropout,"
    dtypes = " and ".join(dict.fromkeys(filter(None, (original.dtype, changed.dtype))))
    text = f"{what} differ by {percent(min(error, _MOST_SHOWN))} (at most {percent(bound)} for"
    return Criterion("gradients", "pass" if error <= bound else "fail", f"{text} {dtypes})")


def _error(original: Evidence, changed: Evidence, kind: str) -> tuple[float | None, str]:
    """Largest relative error of the gradients of a probe, and a parameter that lacks its own."""
    worst: float | None = None
    for pairs in _each(original, changed, kind):
        norms = [float(np.linalg.norm(one)) for _, one, _ in pairs]
        total = float(np.linalg.norm(norms))
        if not total:
            continue
        apart = 0.0
        for (name, one, other), norm in zip(pairs, norms, strict=True):
            missing = other is None or other.shape != one.shape or not np.any(other)
            if missing and norm > _SMALL * total:
                return None, name.partition(".")[2]
            apart += float(np.square(one - (0.0 if missing else other)).sum())
        error = math.sqrt(apart) / total if math.isfinite(apart) else math.inf
        worst = max(worst or 0.0, error)
    return worst, ""


def _updates(original: Evidence, changed: Evidence) -> Criterion:
    """Compare the lengths of the updates, of all parameters and of each."""
    for pairs in _each(original, changed, "update"):
        total = float(np.sqrt(sum(float(one) ** 2 for _, one, _ in pairs)))
        other_total = float(np.sqrt(sum(float(two or 0.0) ** 2 for _, _, two in pairs)))
        if total and abs(other_total / total - 1) > _UPDATE_WITHIN:
            text = f"an update moves the weights {percent(other_total / total)} as far"
            return Criterion("updates", "fail", text)
        still = [n for n, a, b in pairs if float(a) > _SMALL * total and not float(b or 0.0)]
        if still:
            return Criterion("updates", "fail", f"`{still[0][2:]}` is not updated")
    return Criterion("updates", "pass", "updates move the weights as far")


def with_times(
    criteria: Sequence[Criterion], gain: Gain, base: Sequence[float], new: Sequence[float],
    original: Evidence, changed: Evidence,
) -> Verdict:  # fmt: skip
    """Judge losses and times, and conclude."""
    losses = gain.losses
    found: dict[str, Result] = {"alike": "pass", "differ": "fail", "cannot tell": "unknown"}
    text = losses.why or (
        f"losses over {losses.steps} steps differ by {percent(losses.value)}"
        f" [{percent(losses.low)}, {percent(losses.high)}]"
    )
    every = [*criteria, Criterion("losses", found[losses.outcome], text)]
    every.append(_waits(gain, base, new, original, changed))
    ratio = gain.times.ratio
    took = (
        f"{duration(gain.changed_ms)} instead of {duration(gain.base_ms)} a step,"
        f" {1 / ratio.value:.2f}x as fast [{1 / ratio.high:.2f}, {1 / ratio.low:.2f}]"
    )
    every.append(Criterion("time", _time(gain), took))
    return conclude(every, gain)


def _time(gain: Gain) -> Result:
    """Not faster is what would gain too little at best; a wider interval leaves it open."""
    if gain.times.outcome == "faster":
        return "pass"
    return "fail" if gain.times.ratio.low > 1.0 - WORTH else "unknown"


def _waits(
    gain: Gain, base: Sequence[float], new: Sequence[float], original: Evidence, changed: Evidence
) -> Criterion:
    """A gain must not be time in which the original's loop did nothing."""
    less = (original.blocked_ms or 0.0) - (changed.blocked_ms or 0.0)
    if gain.times.outcome != "faster" or less <= _BLOCKED_SHARE * gain.base_ms:
        return Criterion("waits", "pass", "the loops wait alike")
    left = [max(1e-6, one - less) for one in base]
    if judge(left, new, "paired").outcome == "faster":
        return Criterion("waits", "pass", "it is faster without the original's waits, too")
    text = (
        f"the original is blocked for {duration(original.blocked_ms or 0.0)} of a step, outside of"
        f" its loader and the device (changed: {duration(changed.blocked_ms or 0.0)}), and without"
        " that it is as fast"
    )
    return Criterion("waits", "fail", text)


def conclude(criteria: Sequence[Criterion], gain: Gain | None = None) -> Verdict:
    results = {one.name: one.result for one in criteria}
    time = results.pop("time", "pass")
    outcome: Outcome = "faster"
    if "fail" in results.values():
        outcome = "refused"
    elif time == "fail":
        outcome = "not faster"
    elif "unknown" in (*results.values(), time):
        outcome = "cannot tell"
    return Verdict(outcome=outcome, criteria=tuple(criteria), gain=gain)
