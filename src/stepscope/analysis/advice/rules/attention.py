"""Fused attention in place of naive attention."""

from __future__ import annotations

from msgspec.structs import replace

from stepscope.analysis.advice.facts import Facts, PhaseWork
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, Stage, rule
from stepscope.analysis.advice.rules.dtype import FUSED_OVER_NAIVE_MATMULS

_FUSED_OVER_NAIVE_ON_CPU = 1.3
_FUSED_LAUNCHES = 0.05
"""Launches of fused attention over those of naive attention."""
_OTHER_ORDER = "numerics: another summation order"


@rule("fused-attention", "fused attention", stage=Stage.KERNELS)
def _flash(facts: Facts) -> Change | Left | None:
    if not facts.attention:
        return _no_naive_attention(facts)
    matmuls = sum(work.classes.get("matmul", 0.0) for work in facts.attention)
    naive = sum(work.device_ms for work in facts.attention)
    takes = (
        f"{naive:.3g} ms, of which matmuls take {matmuls:.3g} ms; its scores are saved for backward"
    )
    change = Change(
        after=with_fused_attention(facts),
        gain_bytes=facts.lower_peak(facts.score_bytes),
        why=f"attention is naive: it takes {takes}",
        risk=_OTHER_ORDER,
        setting={"attention": "fused"},
        lines=(
            "out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
            "# set is_causal, attn_mask and dropout_p as in your attention",
        ),
    )
    return _on_fast_path(change, facts, takes) if facts.attention_called else change


def with_fused_attention(facts: Facts) -> Facts:
    """Return the step with its naive attention in fused kernels."""
    core = {work.name: work for work in facts.attention}

    def fused(work: PhaseWork) -> PhaseWork:
        part = core.get(work.name)
        if part is None:
            return work
        left = {kind: ms - part.classes.get(kind, 0.0) for kind, ms in work.classes.items()}
        attention_ms = _fused_over_naive(facts) * part.classes.get("matmul", 0.0)
        left["attention"] = left.get("attention", 0.0) + attention_ms
        launches = work.launches - part.launches * (1 - _FUSED_LAUNCHES)
        return replace(work, classes=left, launches=max(0.0, launches))

    saved = max(0, facts.saved_bytes - facts.score_bytes)
    return replace(facts.with_work(fused), attention=(), score_bytes=0, saved_bytes=saved)


def _no_naive_attention(facts: Facts) -> Left:
    if facts.class_ms("attention"):
        return Left("attention runs in a fused kernel already")
    if facts.compiled:
        return Left("the step is compiled: its kernels do not show which of them are attention")
    return Left(
        "the program has no attention that could be replaced: no module has a softmax between two"
        " batched matmuls"
    )


def _on_fast_path(change: Change, facts: Facts, takes: str) -> Change:
    """Advise on a call of PyTorch's attention. The fused GPU kernels support dropout."""
    causes = "need_weights=True, or a mask or a dtype that the fused kernels do not support"
    lines: tuple[str, ...] = (
        "attention(q, k, v, need_weights=False)",
        "# is_causal=True instead of a mask",
    )
    risk = _OTHER_ORDER
    if not facts.on_gpu:
        causes = f"dropout in training, {causes}"
        lines = ("layer.self_attn.dropout = 0.0", "# or dropout_p=0.0 where you call it", *lines)
        risk = f"dropout regularises: without it a model may overfit; {risk}"
    return replace(
        change,
        code="attention-fast-path",
        title="PyTorch's fused attention kernels",
        why="PyTorch's attention is called, but falls back to its naive implementation:"
        f" it takes {takes}. Likely causes: {causes}",
        risk=risk,
        setting={},
        by_author="only you know if the training can do without the option that prevents the fused"
        " kernels",
        lines=lines,
    )


def _fused_over_naive(facts: Facts) -> float:
    """Time of fused attention over that of the matmuls of naive attention."""
    if not facts.on_gpu:
        return _FUSED_OVER_NAIVE_ON_CPU
    if facts.dtype == "tf32":
        # The fused kernel runs on FP32 cores, while the matmuls that it replaces use TF32.
        now, wide = facts.rates.get("tf32"), facts.rates.get("float32")
        faster = now / wide if now and wide else 1.0
        return FUSED_OVER_NAIVE_MATMULS["float32"] * faster
    return FUSED_OVER_NAIVE_MATMULS.get(facts.dtype, _FUSED_OVER_NAIVE_ON_CPU)


@setting("attention", "fused", switchable=True, counted=False)
def _fuse(program: Program, value: str) -> None:  # noqa: ARG001
    program.fuse_attention()
