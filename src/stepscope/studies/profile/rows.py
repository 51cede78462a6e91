"""Traced training steps, grouped by step, and the numbers for tables and findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from stepscope.analysis.effects import Effect, part, quotient
from stepscope.analysis.kernels.classes import CLASSES
from stepscope.analysis.limits import median_ms
from stepscope.analysis.predict.plan import MODES, Mode
from stepscope.analysis.trace.summary import Summary, Use
from stepscope.model.config import precision
from stepscope.model.cost import parameters
from stepscope.records.schema import Clock, Record
from stepscope.records.stats import Summary as Stats
from stepscope.records.stats import summarize
from stepscope.studies.base import Result
from stepscope.studies.profile.cases import ProfileCase
from stepscope.training.settings import unusual_settings
from stepscope.training.workload import Workload
from stepscope.views.trace.findings import top_kernels

AGREES_WITHIN = 0.1
"""Largest relative difference at which the profiler's and the timer's forward agree."""

SOFTMAX_FLOPS = 5
"""FLOPs per score: find the maximum, subtract it, exponentiate, add up, divide."""
_GRAPH_HELPS = 0.9
"""Ratio of replay to step below which launches limited the step."""
_BATCH_IS_FREE = 0.75
"""Same for a larger batch, relative to its multiplier."""


class Traced(NamedTuple):
    """One mode of a training step."""

    record: Record
    workload: ProfileCase
    summary: Summary

    def timer_ms(self, phase: str) -> float | None:
        """Time without the profiler; the step from start to idle by the CPU's clock."""
        timed = self.timed(phase)
        return timed.median if timed else None

    def timed(self, phase: str) -> Stats | None:
        if phase == "step":
            return self._summary("step", "host")
        if phase == "forward" and self.workload.mode == "forward":
            return self._summary("step")
        return self._summary(phase)

    def traced_ms(self, phase: str) -> float | None:
        return self.summary.wall_ms if phase == "step" else self.summary.phases.get(phase)

    @property
    def overhead(self) -> float | None:
        """Overhead of the profiler, as a share of the step."""
        bare = self.timer_ms("step")
        return None if not bare else self.summary.wall_ms / bare - 1

    def issue_ms(self) -> float | None:
        """Time that the CPU takes to issue the step without the profiler; None without a GPU."""
        return median_ms(self.record, "issue", "host")

    def host_share(self) -> float:
        return self.summary.idle_of("CPU") / self.summary.wall_ms

    @property
    def idle_without_profiler(self) -> float | None:
        """Share of the timed step that the traced kernels do not fill.

        The profiler slows the host down and leaves kernels unchanged, so a trace has more idle time
        than the step without the profiler.
        """
        bare = self.timer_ms("step")
        return None if not bare else max(0.0, 1 - self.summary.busy_ms / bare)

    def host_limits(self, least: float) -> bool:
        """Verdict of the trace by its launches, of the timed step by its idle share, and of the
        experiments where there are any."""
        bare = self.idle_without_profiler
        return (
            self.summary.on_device
            and self.host_share() >= least
            and (bare is None or bare >= least)
            and self.experiments_say() is not False
        )

    def experiments(self) -> list[Effect]:
        """Fewer launches and more work per launch, each compared with the ratio below which the CPU
        limits the step; empty if neither was run."""
        graph, larger, times = self._graph(), self._larger(), self.larger_batch()
        return [
            *([] if graph is None else [graph.against(_GRAPH_HELPS)]),
            *([] if larger is None or times is None else [larger.against(_BATCH_IS_FREE * times)]),
        ]

    def experiments_say(self) -> bool | None:
        """Verdict of the experiments; None if none was run or none shows anything."""
        shown = [one for one in self.experiments() if one.shown]
        return any(one.below for one in shown) if shown else None

    def host_effects(self) -> list[Effect]:
        """What shows that the CPU limits the step: an experiment, or else idle time of the timed
        step, or else of the traced one."""
        if proof := [one for one in self.experiments() if one.below]:
            return proof
        bare = self._summary("step", "host")
        if bare is not None:
            return [part((self.idle_without_profiler or 0.0) * bare.median, bare)]
        return [part(self.summary.idle_of("CPU"), summarize(self.summary.steps))]

    def _summary(self, name: str, clock: Clock | None = None) -> Stats | None:
        series = self.record.find(name, clock)
        return summarize(series.values) if series is not None and series.values else None

    def _graph(self) -> Effect | None:
        replay = self._summary("graph_replay")
        phases = ("step",) if self.workload.mode == "forward" else ("forward", "loss", "backward")
        series = [self.record.find(phase) for phase in phases]
        sums = [sum(parts) for parts in zip(*(one.values for one in series if one), strict=False)]
        if replay is None or not all(series) or not sums:
            return None
        medians = sum(summarize(one.values).median for one in series if one)
        return quotient(replay, summarize(sums))._replace(value=replay.median / medians)

    def _larger(self) -> Effect | None:
        larger, step = self._summary("larger_batch"), self._summary("step")
        return quotient(larger, step) if larger and step else None

    def graph_ratio(self) -> float | None:
        """Time of a graph replay without the optimizer, over the same phases launched eagerly."""
        effect = self._graph()
        return effect.value if effect else None

    def larger_batch_ratio(self) -> float | None:
        effect = self._larger()
        return effect.value if effect else None

    def larger_batch(self) -> float | None:
        batch = self.record.quantity("larger_batch")
        return None if batch is None else batch / self.workload.batch


class Group(NamedTuple):
    """The traced modes of one training step."""

    workload: ProfileCase
    modes: dict[Mode, Traced]

    def key(self) -> tuple[str, int, int, str, str]:
        w = self.workload
        return w.size, w.context, w.batch, w.dtype, variant(w)

    def fullest(self) -> Traced:
        """The mode with the most phases."""
        return next(
            self.modes[m] for m in ("train-step", "forward-backward", "forward") if m in self.modes
        )

    @property
    def forward(self) -> Traced:
        """The forward pass alone, or else the forward phase of a longer step."""
        return self.modes.get("forward") or self.fullest()

    @property
    def name(self) -> str:
        return self.workload.name

    def element_bytes(self) -> int:
        """Bytes per element that the softmax reads: autocast computes it in float32."""
        return 2 if precision(self.workload.dtype).weights == "bfloat16" else 4


def variant(w: Workload) -> str:
    """Description of everything but size, context, batch and dtype."""
    settings = unusual_settings(
        w,
        *("table", "attention", "compile", "optimizer", "compile_mode", "loss"),
        *("fused", "fused_projections", "autotune_gemms", "activation_policy", "graph"),
    )
    return ", ".join((*settings, *(f"{k} {value}" for k, value in sorted(w.overrides.items()))))


def groups(results: Sequence[Result[ProfileCase]]) -> list[Group]:
    by_key: dict[tuple[str, int, int, str, str], Group] = {}
    for record, case in results:
        if record.status == "ok" and "profile" in record.attachments:
            group = Group(case, {})
            traced = Traced(record, case, record.required("profile", Summary))
            by_key.setdefault(group.key(), group).modes[case.mode] = traced
    ordered = sorted(by_key.values(), key=_order)
    return [Group(g.workload, {m: g.modes[m] for m in MODES if m in g.modes}) for g in ordered]


def leading(all_groups: Sequence[Group]) -> Group:
    """The group that is shown in full: the longest of those traced in the most modes."""
    return max(all_groups, key=lambda group: (len(group.modes), _wall(group)))


def _order(group: Group) -> tuple[Any, ...]:
    """Sort key: small models, short contexts, large batches; then dtypes and compiled ones."""
    w = group.workload
    total = parameters(w.shape).total if w.shape else 0
    return total, w.size, w.context, -w.batch, group.key()[-1], w.dtype != "float32", w.dtype


def comparison_pairs(all_groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Groups that differ only in the dtype or in compilation: for each size, and for each of the
    two, the pair with the longest step."""
    chosen: dict[tuple[str, ...], tuple[Group, Group]] = {}
    for index, first in enumerate(all_groups):
        for second in all_groups[index + 1 :]:
            apart = _differ_in(first.workload, second.workload)
            key = (first.workload.size, *apart)
            if (
                apart in (["dtype"], ["compile"])
                and set(first.modes) & set(second.modes)
                and (key not in chosen or _wall(first) > _wall(chosen[key][0]))
            ):
                chosen[key] = (first, second)
    return list(chosen.values())


def _wall(group: Group) -> float:
    return group.fullest().summary.wall_ms


def _differ_in(first: Workload, second: Workload) -> list[str]:
    return [
        name
        for name in Workload.__struct_fields__
        if name != "mode" and getattr(first, name) != getattr(second, name)
    ]


class TopKernel(NamedTuple):
    kernel: str
    unit: str
    share: float
    calls: float
    story: str
    """Its calls, explained by parts of the model."""
    also_first_in_backward: bool | None


class AttentionCore(NamedTuple):
    """Scores, softmax and weighted values of all layers in one forward pass."""

    matmul_ms: float
    softmax_ms: float
    mask_ms: float
    rest_ms: float
    """The scale, and casts between dtypes."""
    matmul_flops: float
    softmax_flops: float
    softmax_bytes: float

    @property
    def softmax_rate(self) -> float | None:
        """Bytes per second that the softmax moves."""
        return self.softmax_bytes / (self.softmax_ms / 1e3) if self.softmax_ms else None


def top_kernel(group: Group) -> TopKernel | None:
    """The longest kernel of the forward pass, its number of calls and their explanation."""
    traced = group.forward
    ranked = top_kernels(traced.summary, "forward")
    total = sum(ms for _, ms, _ in ranked)
    if total <= 0:
        return None
    name, ms, calls = ranked[0]
    about = next(row for row in traced.summary.kernels if row.kernel == name)
    fuller = group.modes.get("forward-backward") or group.modes.get("train-step")
    same = None if fuller is None else top_kernels(fuller.summary)[0][0] == name
    story = count_story(traced.summary, name, group.workload.layers)
    return TopKernel(name, about.unit, ms / total, calls, story, same)


def count_story(summary: Summary, kernel: str, layers: int) -> str:
    """Explain a count: `12 blocks × 7 (attention/projections 4, feed-forward 3) + 1 (head)`; if
    blocks differ, the total of all of them."""
    blocks: dict[str, float] = {}
    rest: dict[str, float] = {}
    for use in summary.uses:
        if use.kernel == kernel and use.phase == "forward":
            first, _, part = use.module.partition("/")
            within = first == "block *"
            counts, name = (blocks, part) if within else (rest, use.module or "no range")
            counts[name or "block"] = counts.get(name or "block", 0.0) + use.count
    terms = []
    if blocks:
        alike = all(calls % layers == 0 for calls in blocks.values())
        each = {part: calls / layers if alike else calls for part, calls in blocks.items()}
        parts = ", ".join(f"{part} {calls:g}" for part, calls in each.items())
        total = f"{sum(each.values()):g}"
        times = f"{layers} blocks × {total}" if alike else f"{total} in {layers} blocks"
        terms.append(f"{times} ({parts})")
    terms += [f"{calls:g} ({name})" for name, calls in rest.items()]
    return " + ".join(terms)


def other_kernels(traced: Traced) -> Iterator[tuple[str, float, float]]:
    """Kernels other than matmuls, longest first: name, share of all kernel time, calls."""
    classes = {row.kernel: row.kind for row in traced.summary.kernels}
    total = sum(row.ms for row in traced.summary.kernels)
    for name, ms, calls in top_kernels(traced.summary):
        if classes[name] != "matmul":
            yield name, ms / total if total else 0.0, calls


def matmul_share(traced: Traced | None) -> float | None:
    """Share of matmuls in the busy time."""
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
    kind = max(changes, key=lambda kind: changes[kind])
    return kind, changes[kind]


def attention_core(group: Group) -> AttentionCore | None:
    """Times within attention; None if it is one kernel, or if no range marks it."""
    model, w = group.workload.shape, group.workload
    if model is None:
        return None
    traced = group.forward
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
    """Role of a use in the forward attention: matmul, softmax, mask or rest; else empty.

    The cast that autocast puts before a softmax is not part of it, so that the softmax's bytes are
    the same as without autocast.
    """
    _, inside, part = use.module.rpartition("attention/core")
    if not inside or use.phase != "forward":
        return ""
    if part == "/mask":
        return "mask"
    own = {"/scores": "matmul", "/values": "matmul", "/softmax": "softmax"}.get(part, use.kind)
    return use.kind if use.kind == own and own in ("matmul", "softmax") else "rest"
