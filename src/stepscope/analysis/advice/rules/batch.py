"""A larger batch."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from stepscope.analysis.advice.facts import MODEL_PHASES, Facts, PhaseWork
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, rule
from stepscope.analysis.advice.rules.memory import excluded_by, plan_lines, setting_of_plan

_MEMORY_SHARE = 0.9
_LEAST = 1.1
"""A batch that is larger by less is not worth another learning rate."""


def with_batch_times(facts: Facts, times: float) -> Facts:
    """Return the step with `times` as many samples.

    Launches, the update and the weight casts stay. Matmul time beyond the measured rate comes
    from partial tiles and waves, and stays too.
    """
    over = facts.matmuls_over_rate
    matmuls = (times + over - 1) / over
    once = facts.casts_ms if facts.dtype in ("bfloat16", "float16") else 0.0

    def more(work: PhaseWork) -> PhaseWork:
        scaled = work.scaled(dict.fromkeys(work.classes, times) | {"matmul": matmuls})
        if work.name in ("forward", "backward"):
            scaled = scaled.with_more("copy/cast", -(times - 1) * once)
        return replace(scaled, host_ms=times * work.host_ms)

    larger = facts.with_work(more, (*MODEL_PHASES, "outside"))
    return replace(larger, samples=times * facts.samples)


@rule("larger-batch", "twice the batch size, or the largest that fits")
def _larger_batch(facts: Facts) -> Change | Left | None:
    if not facts.on_gpu:
        return Left("the step runs on a CPU")
    if not facts.memory_bytes:
        return None
    free_bytes = facts.memory_bytes * _MEMORY_SHARE - facts.peak_bytes
    planned = facts.planned("batch")
    plan = None if planned is None else planned.plan
    larger = None if facts.batch is None else 2 * facts.batch
    times = 2.0
    if facts.saved_bytes > free_bytes and plan is None:
        no_plan = ", and no plan of its blocks fits" if planned is not None else ""
        most = planned.largest if planned is not None else 0
        # Its sizes are those of the model's input, of which a batch may have several.
        is_batch = planned is not None and planned.size == larger
        if facts.batch is None or not is_batch or most < _LEAST * facts.batch:
            fits = f"; the largest batch that fits is {most}" if most else ""
            return Left(f"the memory has no room for twice the activations{no_plan}{fits}")
        larger, times = most, most / facts.batch
    after = with_batch_times(facts, times)
    memory: dict[str, str] = {}
    excludes: tuple[str, ...] = ()
    how: tuple[str, ...] = ()
    needs, more_bytes = "", round((times - 1) * facts.saved_bytes)
    size = "twice the batch size" if times == 2 else f"batch {larger}, the largest that fits"
    less = "half as much" if times == 2 else f"{1 / times:.2g} times as much"
    if planned is not None and plan is not None:
        more_bytes = max(0, plan.peak - facts.peak_bytes)
        memory = setting_of_plan(planned)
        if memory:
            after = after.with_work(
                lambda work: work.with_more("matmul", 1e3 * (plan.again_s + plan.exposed_s)),
                ("backward",),
            )
            needs, how = f"; it fits with {plan.words}", plan_lines(facts)
            excludes = excluded_by(planned)
    return Change(
        title=f"{size}{', with a plan of what the blocks save' * bool(memory)}",
        after=replace(after, batch=larger),
        gain_bytes=-more_bytes,
        why=f"launches and the update cost {less} per sample; the gain is stated for the"
        f" current number of samples, and {free_bytes / 2**30:.3g} GiB are free{needs}",
        risk="optimization: another batch size needs another learning rate; memory",
        lines=(
            f"batch_size = {larger}" if larger else "batch_size = …  # twice the current one",
            *how,
        ),
        setting={"batch": str(larger)} | memory if larger else {},
        excludes=excludes,
        by_author="" if larger else "no DataLoader was found that sets the batch size",
    )


@setting("batch", without="no DataLoader has the batch size that was recorded")
def _enlarge(program: Program, value: str) -> None:
    """Give DataLoaders a batch size of `value`, if theirs is between half of it and that."""
    from torch.utils.data import DataLoader

    plain, size = DataLoader.__init__, int(value)

    def init(self: Any, dataset: Any, *arguments: Any, **keywords: Any) -> None:
        given = arguments[0] if arguments else keywords.get("batch_size", 1)
        if given is not None and given < size <= 2 * given:
            program.applied["batch"] += 1
            arguments = (size, *arguments[1:]) if arguments else arguments
            keywords |= {} if arguments else {"batch_size": size}
        plain(self, dataset, *arguments, **keywords)

    DataLoader.__init__ = init  # type: ignore[method-assign]
