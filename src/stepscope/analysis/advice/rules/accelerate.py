"""`stepscope.accelerate`: fused layers, loss and optimizer.

What it would replace is recorded with the step; the time of the replaced kernels comes from the
trace. On a CPU its layers run in plain PyTorch: there it is not advised as a whole, only the fused
loss for its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from msgspec.structs import replace

from stepscope.analysis.advice.facts import MODEL_PHASES, Facts, PhaseWork, PieceWork
from stepscope.analysis.advice.pieces import (
    ACCELERATE,
    ATTENTION,
    EMBEDDING,
    GROUPS,
    IN_BLOCKS,
    LINEAR,
    LOSS,
    MLP,
    NORM,
    OPTIMIZER,
    SDPA,
    excluded_pieces,
    group_of,
)
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, Stage, rule
from stepscope.analysis.advice.rules.attention import with_fused_attention
from stepscope.analysis.advice.rules.compile import as_compiled
from stepscope.analysis.advice.timeline import gain_ms
from stepscope.analysis.limits import ADAMW_BYTES

_WEIGHTS = {LINEAR: 1, MLP: 3, ATTENTION: 4}
"""Linear layers of a module of these pieces, whose casts are cached."""
COMPILED = Left("the model is compiled: torch.compile traces the original layers")
_NOTHING = Left("stepscope.accelerate replaces no such part of this model")
_NO_LOSS = Left("no cross-entropy loss is traced")
_ON_CPU = Left("on a CPU the replaced layers run in plain PyTorch")
_NO_GAIN = Left("stepscope.accelerate replaces no part that would gain")
_FUSED_LOSS = 0.6
"""Share of the time from logits to loss, forward and backward, that a chunked loss saves."""
_NEAR_BANDWIDTH = 1.1
"""Time of the update in one launch over that of moving its bytes once."""
_OTHER_ORDER = "numerics: another summation order"
NUMERICS = (
    f"{_OTHER_ORDER}; every replacement is compared with the original, outputs"
    " and gradients, in its first call"
)


_piece = partial(rule, stage=Stage.PIECES, whole="accelerate")
"""Registers a part of `accelerate`."""


def _found(facts: Facts, group: str) -> list[PieceWork]:
    return [one for one in facts.pieces or () if group_of(one.piece) == group]


def _with_fused(facts: Facts, pieces: Sequence[PieceWork]) -> Facts:
    """Return the step with the kernels of these pieces replaced by fused ones."""
    shares = [share for piece in pieces for share in piece.shares]

    def fused(work: PhaseWork) -> PhaseWork:
        for share in shares:
            if share.phase == work.name:
                removed = {
                    kind: max(0.0, ms - share.classes.get(kind, 0.0))
                    for kind, ms in work.classes.items()
                }
                launches = work.launches - share.launches + share.fused_launches
                work = replace(work, classes=removed, launches=max(0.0, launches))
                work = work.with_more("elementwise", min(share.ms, share.fused_ms))
        return work

    return replace(
        facts,
        phases=tuple(map(fused, facts.phases)),
        pieces=tuple(one for one in facts.pieces or () if one not in pieces),
        accelerated=facts.accelerated or any(group_of(p.piece) in IN_BLOCKS for p in pieces),
    )


def _with_layers(facts: Facts, group: str) -> Facts | Left | None:
    """Return the step with fused norms, MLPs or embeddings."""
    pieces = _found(facts, group)
    if not pieces:
        return _NOTHING
    return _with_fused(_without_casts(facts, pieces), pieces) if facts.on_gpu else _ON_CPU


def _with_linear(facts: Facts, group: str) -> Facts | Left | None:
    """Return the step without casts of the weights of linear layers that are in no other piece."""
    pieces = _found(facts, group)
    if not pieces:
        return Left("all linear layers are in other pieces, which cast no gradients either")
    if not facts.on_gpu:
        return _ON_CPU
    if not facts.autocast:
        return Left("no weight is cast: the matmuls run in the dtype of the weights")
    return _with_fused(_without_casts(facts, pieces), pieces)


def _with_attention(facts: Facts, group: str) -> Facts | Left | None:
    """Return the step with fused rotary positions, and SDPA in place of naive attention."""
    pieces = _found(facts, group)
    if not pieces:
        return _NOTHING
    names = {piece.piece for piece in pieces}
    if SDPA in names and facts.attention:
        facts = with_fused_attention(facts)
    elif not facts.on_gpu:
        return _ON_CPU
    return _with_fused(_without_casts(facts, pieces), pieces)


def _weights(pieces: Sequence[PieceWork]) -> int:
    """Number of weights of linear layers in these pieces."""
    return sum(
        piece.modules * _WEIGHTS.get(group_of(piece.piece), 0)
        for piece in pieces
        if piece.piece != SDPA
    )


def _without_casts(facts: Facts, pieces: Sequence[PieceWork]) -> Facts:
    """Return the step without casts of the gradients of the weights of these pieces, and in a CUDA
    graph without casts of the weights, which its update writes."""
    weights, every = _weights(pieces), _weights(facts.pieces or ())
    if not (weights and facts.autocast and facts.on_gpu):
        return facts
    cast_ms = facts.casts_ms * weights / every

    def without_casts(work: PhaseWork) -> PhaseWork:
        launches = max(0.0, work.launches - weights)
        return replace(work.with_more("copy/cast", -cast_ms), launches=launches)

    phases = ("forward", "backward") if facts.captured else ("backward",)
    after = facts.with_work(without_casts, phases)
    return replace(after, attention=facts.attention)


def _with_loss(facts: Facts, group: str) -> Facts | Left | None:
    if not _found(facts, group):
        return _NOTHING
    return _NO_LOSS if facts.loss_ms <= 0 else _with_fused_loss(facts)


def _with_fused_loss(facts: Facts) -> Facts:
    """Return the step with the head and the loss in chunks, without full logits. On a CPU that
    takes as long as before."""
    saved = _FUSED_LOSS * facts.loss_ms if facts.on_gpu else 0.0
    phases = [work.name for work in facts.phases if work.name in MODEL_PHASES and work.classes]
    after = facts.with_work(lambda work: work.less(saved / len(phases)), phases)
    return replace(after, loss_ms=0.0, logit_bytes=0)


def _with_optimizer(facts: Facts, group: str) -> Facts | Left | None:
    """Return the step with the update in one launch."""
    del group
    if not facts.on_gpu:
        return Left("the fused update is a GPU kernel")
    if facts.optimizer_name not in ("Adam", "AdamW"):
        return Left(f"{facts.optimizer_name or 'the optimizer'} is not torch.optim.AdamW or Adam")
    if facts.one_launch_optimizer:
        return Left("the update is one launch already")
    if not facts.bandwidth or not facts.parameters:
        return None
    least = _NEAR_BANDWIDTH * facts.parameters * ADAMW_BYTES / facts.bandwidth * 1e3

    def one_launch(work: PhaseWork) -> PhaseWork:
        return replace(work, classes={"optimizer": min(least, work.device_ms)}, launches=1.0)

    after = facts.with_work(one_launch, ("optimizer",))
    return replace(after, fused_optimizer=True, one_launch_optimizer=True)


_APPLY: dict[str, Callable[[Facts, str], Facts | Left | None]] = {
    NORM: _with_layers,
    MLP: _with_layers,
    LINEAR: _with_linear,
    ATTENTION: _with_attention,
    LOSS: _with_loss,
    EMBEDDING: _with_layers,
    OPTIMIZER: _with_optimizer,
}


def _compiled(facts: Facts, groups: Sequence[str]) -> Left | None:
    """Return the reason if these pieces are compiled already."""
    return COMPILED if facts.compiled and set(groups) & {*IN_BLOCKS} else None


def call_of(facts: Facts, groups: Collection[str]) -> str:
    """Return the call of `accelerate` that applies only these pieces."""
    left = excluded_pieces((piece.piece for piece in facts.pieces or ()), groups)
    optimizer = ", optimizer" if OPTIMIZER in groups else ""
    quoted = ", ".join(f'"{name}"' for name in left)
    # With a part left out, the other modules are replaced: a compiled model has no such parts.
    exclude = f", exclude=[{quoted}], compile=False" if left else ""
    return f"stepscope.accelerate(model{optimizer}{exclude})"


def _one(facts: Facts, group: str, why: Callable[[Facts, Facts], str]) -> Change | Left | None:
    """Predict one piece alone."""
    if facts.pieces is None:
        return None
    if reason := _compiled(facts, [group]):
        return reason
    after = _APPLY[group](facts, group)
    if not isinstance(after, Facts):
        return after
    return Change(
        after=after,
        gain_bytes=bytes_saved(facts, after),
        why=why(facts, after),
        risk=NUMERICS,
        lines=(call_of(facts, [group]),),
        setting={group: ACCELERATE},
        excludes=("compile",) if group in IN_BLOCKS else (),
    )


def bytes_saved(facts: Facts, after: Facts) -> int:
    fewer = facts.score_bytes - after.score_bytes + facts.logit_bytes - after.logit_bytes
    return facts.lower_peak(fewer) if fewer else 0


def _replaced_work(group: str, what: str) -> Callable[[Facts, Facts], str]:
    def why(facts: Facts, after: Facts) -> str:
        del after
        shares = [share for piece in _found(facts, group) for share in piece.shares]
        now, then = sum(s.ms for s in shares), sum(min(s.ms, s.fused_ms) for s in shares)
        launches = sum(s.launches for s in shares)
        return (
            f"{what} take {now:.3g} ms in {launches:.4g} kernels; one kernel each, which moves"
            f" their bytes once, takes about {then:.3g} ms"
        )

    return why


@_piece("accelerate-norms", "fused norms and residual adds (stepscope.accelerate)")
def _norms(facts: Facts) -> Change | Left | None:
    return _one(facts, NORM, _replaced_work(NORM, "norms"))


@_piece("accelerate-mlp", "fused gated MLPs (stepscope.accelerate)")
def _mlps(facts: Facts) -> Change | Left | None:
    return _one(facts, MLP, _replaced_work(MLP, "activations of the MLPs"))


@_piece("accelerate-linear", "linear layers without casts of gradients (stepscope.accelerate)")
def _linear(facts: Facts) -> Change | Left | None:
    return _one(
        facts,
        LINEAR,
        lambda facts, _: (
            "autocast casts every weight in the forward and its gradient in the backward:"
            f" {2 * facts.casts_ms:.3g} ms at the bandwidth measured here; gradients are written"
            " without a cast, and the update of a CUDA graph writes the casts of the weights"
        ),
    )


@_piece(
    "accelerate-attention",
    "fused projections, rotary positions and attention (stepscope.accelerate)",
)
def _attention(facts: Facts) -> Change | Left | None:
    if not facts.on_gpu:
        return Left(f"{_ON_CPU.reason}: see fused attention")

    def why(facts: Facts, after: Facts) -> str:
        del after
        naive = sum(work.device_ms for work in facts.attention)
        rotary = sum(s.ms for piece in _found(facts, ATTENTION) for s in piece.shares)
        parts = [f"naive attention takes {naive:.3g} ms"] if naive else []
        parts += [f"rotary positions and copies of the heads take {rotary:.3g} ms"]
        projected = any(p.piece != SDPA for p in _found(facts, ATTENTION))
        return ", ".join(parts) + ("; Q, K and V are separate matmuls" if projected else "")

    return _one(facts, ATTENTION, why)


@_piece("fused-loss", "fused linear cross-entropy (chunked, without full logits)")
def _fused_loss(facts: Facts) -> Change | Left | None:
    """The chunked loss, which `accelerate` applies where the model's forward computes the loss."""
    if facts.loss_ms <= 0:
        return _NO_LOSS
    after = _with_fused_loss(facts)
    change = Change(
        after=after,
        gain_bytes=bytes_saved(facts, after),
        why=f"from logits to loss, forward and backward, takes {facts.loss_ms:.3g} ms, and"
        f" {facts.logit_bytes / 2**20:.4g} MiB of logits are saved for backward",
        risk=_OTHER_ORDER,
        lines=(call_of(facts, [LOSS]),),
        setting={LOSS: ACCELERATE},
    )
    if _found(facts, LOSS):
        return change
    return replace(
        change,
        lines=(
            "from stepscope.kernels import linear_cross_entropy",
            "loss = linear_cross_entropy(hidden, head.weight, targets)",
        ),
        setting={},
        by_author="the loss function has to take the head's input instead of its logits",
    )


@_piece("accelerate-embedding", "fused gradient of the embedding (stepscope.accelerate)")
def _embedding(facts: Facts) -> Change | Left | None:
    return _one(facts, EMBEDDING, _replaced_work(EMBEDDING, "gradients of embeddings"))


@_piece("accelerate-optimizer", "optimizer in one launch (stepscope.accelerate)")
def _one_launch(facts: Facts) -> Change | Left | None:
    def why(facts: Facts, after: Facts) -> str:
        launches = sum(work.launches for work in facts.phases if work.name == OPTIMIZER)
        return (
            f"the update takes {facts.phase_ms(OPTIMIZER):.3g} ms in {launches:.4g} kernels; one"
            f" kernel takes about {after.phase_ms(OPTIMIZER):.3g} ms at the bandwidth measured here"
        )

    return _one(facts, OPTIMIZER, why)


def _paying(facts: Facts) -> tuple[list[str], Facts]:
    """Return the pieces that are predicted to gain time or memory, and the step with them. A fused
    loss counts even if it gains memory only."""
    groups: list[str] = []
    for group in GROUPS:
        after = _APPLY[group](facts, group)
        if isinstance(after, Facts) and gain_ms(facts, after) >= 0 and after != facts:
            groups.append(group)
            facts = after
    return groups, facts


def _compiled_with_passes(facts: Facts) -> tuple[list[str], Facts]:
    """Return the step of a model that `accelerate` compiles, with passes for its attention and its
    loss."""
    after = as_compiled(with_fused_attention(facts) if facts.attention else facts)
    if facts.loss_ms > 0:
        after = _with_fused_loss(after)
    groups: list[str] = [group for group in GROUPS if group != OPTIMIZER]
    updated = _with_optimizer(after, OPTIMIZER)
    return ([*groups, OPTIMIZER], updated) if isinstance(updated, Facts) else (groups, after)


def with_all_pieces(facts: Facts) -> tuple[list[str], Facts] | Left | None:
    """Return the pieces that `accelerate` is advised for, and the step with them."""
    if facts.pieces is None:
        return None
    if reason := _compiled(facts, GROUPS):
        return reason
    if not facts.on_gpu:
        return Left(f"{_ON_CPU.reason}: see fused attention and the fused loss")
    if facts.compiled_by_accelerate:
        return _compiled_with_passes(facts)
    groups, after = _paying(facts)
    if groups:
        # Not predicted, but they cost no time either, and may gain with another dtype.
        groups += [group for group in (LINEAR, EMBEDDING) if group not in groups]
    return (groups, after) if groups else _NO_GAIN


def what_is_fused(facts: Facts, groups: Sequence[str]) -> str:
    """Return what `accelerate` does, as the beginning of a sentence."""
    if facts.compiled_by_accelerate:
        more = " and one for the update" if OPTIMIZER in groups else ""
        return (
            "the model is compiled, with fused kernels for attention and for head and loss" + more
        )
    return f"fused kernels replace {_parts_of(groups)}"


def _parts_of(groups: Sequence[str]) -> str:
    words = {
        NORM: "norms",
        MLP: "gated MLPs",
        LINEAR: "weight casts",
        ATTENTION: "attention",
        LOSS: "head and loss",
        EMBEDDING: "the embedding's gradient",
        OPTIMIZER: "the update",
    }
    return ", ".join(words[group] for group in GROUPS if group in groups)


@rule(
    "accelerate",
    "stepscope.accelerate (fused layers, loss and optimizer)",
    stage=Stage.PIECES,
)
def _accelerate(facts: Facts) -> Change | Left | None:
    whole = with_all_pieces(facts)
    if not isinstance(whole, tuple):
        return whole
    groups, after = whole
    return Change(
        after=after,
        gain_bytes=bytes_saved(facts, after),
        why=f"{what_is_fused(facts, groups)}: fewer launches, and each tensor is read and"
        " written once",
        risk=NUMERICS,
        lines=("import stepscope", call_of(facts, groups)),
        setting=dict.fromkeys(groups, ACCELERATE),
        excludes=("compile",) if set(groups) & {*IN_BLOCKS} else (),
    )


def _make(program: Program, value: str, group: str) -> None:  # noqa: ARG001
    program.accelerate([group])


for _group in GROUPS:
    setting(_group, ACCELERATE, counted=False)(partial(_make, group=_group))
