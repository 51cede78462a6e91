"""The questions that a profile answers, each as numbers of one training step."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from stepscope.analysis.kernel_names import CLASSES
from stepscope.analysis.trace.summary import Summary, Use
from stepscope.report.format import count, percent
from stepscope.studies.profile.rows import Group, Traced
from stepscope.studies.trace_findings import top_kernels

AGREES_WITHIN = 0.1
"""The profiler's and the timer's forward agree if they differ by less than this."""

SOFTMAX_FLOPS = 5
"""For each score: find the largest, subtract it, exponentiate, add up, divide."""


class TopKernel(NamedTuple):
    kernel: str
    unit: str
    share: float
    calls: float
    story: str
    """Its calls, explained by the parts of the model."""
    also_first_in_backward: bool | None


class AttentionCore(NamedTuple):
    """The scores, their softmax and the weighted values, of all layers in one forward."""

    matmul_ms: float
    softmax_ms: float
    mask_ms: float
    rest_ms: float
    """The scale, and casts between formats."""
    matmul_flops: float
    softmax_flops: float
    softmax_bytes: float

    @property
    def softmax_rate(self) -> float | None:
        """Bytes per second that the softmax moves."""
        return self.softmax_bytes / (self.softmax_ms / 1e3) if self.softmax_ms else None


def top_kernel(group: Group) -> TopKernel | None:
    """Which kernel takes most of the forward, how often it runs and why so often."""
    traced = group.modes.get("forward") or group.fullest()
    ranked = top_kernels(traced.summary, "forward")
    total = sum(one[1] for one in ranked)
    if total <= 0:
        return None
    name, ms, calls = ranked[0]
    about = next(row for row in traced.summary.kernels if row.kernel == name)
    fuller = group.modes.get("forward-backward") or group.modes.get("train-step")
    same = None if fuller is None else top_kernels(fuller.summary)[0][0] == name
    story = count_story(traced.summary, name, group.layers())
    return TopKernel(name, about.unit, ms / total, calls, story, same)


def count_story(summary: Summary, kernel: str, layers: int) -> str:
    """`12 blocks × 7 (attention/projections 4, feed-forward 3) + 1 (head)`; where blocks differ,
    what all of them have."""
    blocks: dict[str, float] = {}
    rest: dict[str, float] = {}
    for use in summary.uses:
        if use.kernel == kernel and use.phase == "forward":
            first, _, part = use.module.partition("/")
            within = first == "block *"
            held, name = (blocks, part) if within else (rest, use.module or "no range")
            held[name or "block"] = held.get(name or "block", 0.0) + use.count
    told = []
    if blocks:
        alike = all(calls % layers == 0 for calls in blocks.values())
        each = {part: calls / layers if alike else calls for part, calls in blocks.items()}
        parts = ", ".join(f"{part} {calls:g}" for part, calls in each.items())
        total = f"{sum(each.values()):g}"
        times = f"{layers} blocks × {total}" if alike else f"{total} in {layers} blocks"
        told.append(f"{times} ({parts})")
    told += [f"{calls:g} ({name})" for name, calls in rest.items()]
    return " + ".join(told)


def others(group: Group, most: int = 3) -> str:
    """The first kernels that are no matrix products, with their share of all kernel time."""
    summary = group.fullest().summary
    classes = {row.kernel: row.kind for row in summary.kernels}
    total = sum(row.ms for row in summary.kernels)
    ranked = [one for one in top_kernels(summary) if classes[one[0]] != "matmul"]
    return ", ".join(
        f"{name} {percent(ms / total)} ({count(calls)}×)" for name, ms, calls in ranked[:most]
    )


def matmul_share(traced: Traced | None) -> float | None:
    """Of the time in which something runs."""
    if traced is None or traced.summary.busy_ms <= 0:
        return None
    return traced.summary.class_ms("matmul") / traced.summary.busy_ms


def grew_instead(less: Traced | None, more: Traced | None) -> tuple[str, float] | None:
    """The class whose share of the work grew most from one mode to a fuller one."""
    if less is None or more is None or less is more:
        return None
    if less.summary.busy_ms <= 0 or more.summary.busy_ms <= 0:
        return None
    changes = {
        kind: more.summary.class_ms(kind) / more.summary.busy_ms
        - less.summary.class_ms(kind) / less.summary.busy_ms
        for kind in CLASSES
        if kind != "matmul"
    }
    kind = max(changes, key=lambda one: changes[one])
    return kind, changes[kind]


def attention_core(group: Group) -> AttentionCore | None:
    """None where the attention is one kernel, or where no range says what belongs to it."""
    model, w = group.workload.shape, group.workload
    if model is None:
        return None
    traced = group.modes.get("forward") or group.fullest()
    times: dict[str, float] = defaultdict(float)
    for use in traced.summary.uses:
        times[_core_part(use)] += use.ms
    if not (times["matmul"] and times["softmax"]):
        return None
    scores = w.batch * model.n_heads * w.context**2 * model.n_layers
    return AttentionCore(
        times["matmul"],
        times["softmax"],
        times["mask"],
        times["rest"],
        matmul_flops=2 * 2 * scores * model.d_head,
        softmax_flops=SOFTMAX_FLOPS * scores,
        softmax_bytes=2 * scores * group.element_bytes(),
    )


def _core_part(use: Use) -> str:
    """Of the forward's attention: its matmul, softmax, mask or rest; empty for anything else.

    The cast that autocast puts before a softmax is no part of it, so that its bytes stay what they
    are without one.
    """
    _, inside, part = use.module.rpartition("attention/core")
    if not inside or use.phase != "forward":
        return ""
    if part == "/mask":
        return "mask"
    own = {"/scores": "matmul", "/values": "matmul", "/softmax": "softmax"}.get(part, use.kind)
    return use.kind if use.kind == own and own in ("matmul", "softmax") else "rest"
