"""`stepscope.accelerate`: the model compiled with our passes, and the optimizer in one launch.

On a CPU it leaves the model as it is by default: there it is not advised.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.facts import MODEL_PHASES, Facts, PhaseWork
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, Stage, rule
from stepscope.analysis.advice.rules.attention import with_fused_attention
from stepscope.analysis.advice.rules.compile import as_compiled
from stepscope.analysis.limits import ADAMW_BYTES

ACCELERATE = "accelerate"
"""Setting that `stepscope.accelerate` applies, and its value."""
OPTIMIZER = "optimizer"
COMPILED = Left("the model is compiled already, and cannot be compiled with passes within that")
_ON_CPU = Left(
    "on a CPU stepscope.accelerate leaves the model as it is by default: see torch.compile, fused"
    " attention and the fused loss"
)
_FUSED_LOSS = 0.6
"""Share of the time from logits to loss, forward and backward, that a chunked loss saves."""
_NEAR_BANDWIDTH = 1.1
"""Time of the update in one launch over that of moving its bytes once."""
_OTHER_ORDER = "numerics: another summation order"
NUMERICS = (
    f"{_OTHER_ORDER}; what is compiled is compared with the original, outputs and gradients, in"
    " its first call; compile time at the start"
)
CALL = "stepscope.accelerate(model, optimizer)"


def _with_fused_loss(facts: Facts) -> Facts:
    """Return the step with the head and the loss in chunks, without full logits. On a CPU that
    takes as long as before."""
    saved = _FUSED_LOSS * facts.loss_ms if facts.on_gpu else 0.0
    phases = [work.name for work in facts.phases if work.name in MODEL_PHASES and work.classes]
    after = facts.with_work(lambda work: work.less(saved / len(phases)), phases)
    return replace(after, loss_ms=0.0, logit_bytes=0)


def _with_one_launch(facts: Facts) -> Facts:
    """Return the step with the update in one launch, if the optimizer has a kernel for that."""
    known = facts.optimizer_name in ("Adam", "AdamW") and not facts.one_launch_optimizer
    if not (known and facts.bandwidth and facts.parameters):
        return facts
    least = _NEAR_BANDWIDTH * facts.parameters * ADAMW_BYTES / facts.bandwidth * 1e3

    def one_launch(work: PhaseWork) -> PhaseWork:
        return replace(work, classes={OPTIMIZER: min(least, work.device_ms)}, launches=1.0)

    after = facts.with_work(one_launch, (OPTIMIZER,))
    return replace(after, fused_optimizer=True, one_launch_optimizer=True)


def accelerated(facts: Facts) -> Facts | Left | None:
    """Return the step of a model that `accelerate` compiles, with passes for its attention and its
    loss, and the update in one launch."""
    if not facts.on_gpu:
        return _ON_CPU
    if not facts.compiled_by_accelerate:
        return None
    if facts.compiled:
        return COMPILED
    after = as_compiled(with_fused_attention(facts) if facts.attention else facts)
    if facts.loss_ms > 0:
        after = _with_fused_loss(after)
    return _with_one_launch(after)


def bytes_saved(facts: Facts, after: Facts) -> int:
    fewer = facts.score_bytes - after.score_bytes + facts.logit_bytes - after.logit_bytes
    return facts.lower_peak(fewer) if fewer else 0


def what_is_fused(facts: Facts, after: Facts) -> str:
    """Describe how the step is accelerated."""
    parts = ["memory-bound kernels are fused by torch.compile"]
    if facts.attention:
        parts.append("attention is one kernel")
    if facts.loss_ms > 0:
        parts.append("head and loss keep no logits in memory")
    if after.one_launch_optimizer and not facts.one_launch_optimizer:
        parts.append("the update is one launch")
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


@rule(
    "accelerate",
    "stepscope.accelerate (compiled with fused attention, loss and optimizer)",
    stage=Stage.PIECES,
)
def _accelerate(facts: Facts) -> Change | Left | None:
    after = accelerated(facts)
    if not isinstance(after, Facts):
        return after
    return Change(
        after=after,
        gain_bytes=bytes_saved(facts, after),
        why=f"{what_is_fused(facts, after)}: fewer launches, and each tensor is read and written"
        " once",
        risk=NUMERICS,
        lines=("import stepscope", CALL),
        setting={ACCELERATE: ACCELERATE},
        excludes=("attention", "compile", OPTIMIZER, "siblings"),
    )


@rule(
    "fused-loss",
    "fused linear cross-entropy (chunked, without full logits)",
    stage=Stage.PIECES,
    whole="accelerate",
)
def _fused_loss(facts: Facts) -> Change | Left:
    if facts.loss_ms <= 0:
        return Left("no cross-entropy loss is traced")
    after = _with_fused_loss(facts)
    return Change(
        after=after,
        gain_bytes=bytes_saved(facts, after),
        why=f"from logits to loss, forward and backward, takes {facts.loss_ms:.3g} ms, and"
        f" {facts.logit_bytes / 2**20:.4g} MiB of logits are saved for backward",
        risk=_OTHER_ORDER,
        lines=(
            "from stepscope.kernels import linear_cross_entropy",
            "loss = linear_cross_entropy(hidden, head.weight, targets)",
        ),
        by_author="the loss function has to take the head's input instead of its logits",
    )


@setting(ACCELERATE, counted=False)
def _make(program: Program, value: str) -> None:  # noqa: ARG001
    program.accelerate()
