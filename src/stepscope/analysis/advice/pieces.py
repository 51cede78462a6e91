"""Changes that `stepscope.accelerate` and `stepscope.TrainStep` make: fused layers, loss and
optimizer, and the step as a CUDA graph.

What `accelerate` would replace is recorded with the step; the time of the replaced kernels comes
from the trace. On a CPU its layers run in plain PyTorch: there it is not advised as a whole, only
the fused loss for its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum

from msgspec.structs import replace

from stepscope.analysis.advice.facts import MODEL_PHASES, Facts, PhaseWork, PieceWork
from stepscope.analysis.advice.rule import Change, rule
from stepscope.analysis.advice.timeline import gain_ms, host_limits_ms, wall_ms
from stepscope.analysis.advice.work import with_fused_attention
from stepscope.analysis.limits import ADAMW_BYTES

ACCELERATE = "accelerate"
"""Value of a setting that `stepscope.accelerate` applies."""


class Group(StrEnum):
    """A setting of `stepscope.accelerate`: pieces that are one change. Together they are all of
    it."""

    NORM = "norm"
    MLP = "mlp"
    LINEAR = "linear"
    ATTENTION = "attention"
    LOSS = "loss"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"


NORM, MLP, LINEAR, ATTENTION, LOSS, EMBEDDING, OPTIMIZER = GROUPS = tuple(Group)
SDPA = "SDPA"
"""Entry among the recorded pieces: `accelerate` switches the model's attention to SDPA."""
ATTENTION_KERNEL = "attention kernel"
"""Entry among the recorded pieces: modules of which only naive attention is replaced."""
ROTARY = "rotary positions"
"""Entry among the recorded pieces: modules that rotate heads, and compute nothing else."""
_PARTS_OF_ATTENTION = (SDPA, ATTENTION_KERNEL, ROTARY)
"""Pieces that leave the projections as they are."""
STEP = "step"
"""Setting that runs the loop as a `TrainStep`."""
_GROUP_OF = {
    "RMSNorm": NORM,
    "LayerNorm": NORM,
    "residual block": NORM,
    "gated MLP": MLP,
    "MLP": MLP,
    "linear": LINEAR,
    "attention": ATTENTION,
    "attention mask": ATTENTION,
    ATTENTION_KERNEL: ATTENTION,
    ROTARY: ATTENTION,
    SDPA: ATTENTION,
    "head and loss": LOSS,
    "embedding": EMBEDDING,
    "patch embedding": EMBEDDING,
    "optimizer": OPTIMIZER,
}
"""The group of each piece, by the name that reports and records have."""
_WEIGHTS = {LINEAR: 1, MLP: 3, ATTENTION: 4}
"""Linear layers of a module of these pieces, whose casts are cached."""
IN_BLOCKS = (NORM, MLP, LINEAR, ATTENTION)
COMPILED = "the model is compiled: torch.compile traces the original layers"
_NOTHING = "stepscope.accelerate replaces no such part of this model"
_NO_LOSS = "no cross-entropy loss is traced"
_ON_CPU = "on a CPU the replaced layers run in plain PyTorch"
_FUSED_LOSS = 0.6
"""Share of the time from logits to loss, forward and backward, that a chunked loss saves."""
_NEAR_BANDWIDTH = 1.1
"""Time of the update in one launch over that of moving its bytes once."""
_GRAPH_SHOWS = 0.97
"""A graph must reduce the step to this share: otherwise the host is not what limits it."""
_OTHER_ORDER = "numerics: another summation order"
_NUMERICS = (
    f"{_OTHER_ORDER}; every replacement is compared with the original, outputs"
    " and gradients, in its first call"
)
_FIXED_SHAPES = "one graph for each shape; the Python code of the step does not run in a replay"


def group_of(piece: str) -> Group:
    """Return the group of a piece: linear layers and all that are not known belong to `LINEAR`."""
    return _GROUP_OF.get(piece, LINEAR)


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


def _with_layers(facts: Facts, group: str) -> Facts | str:
    """Return the step with fused norms, MLPs or embeddings."""
    pieces = _found(facts, group)
    if not pieces:
        return _NOTHING
    return _with_fused(_without_casts(facts, pieces), pieces) if facts.on_gpu else _ON_CPU


def _with_linear(facts: Facts, group: str) -> Facts | str:
    """Return the step without casts of the weights of linear layers that are in no other piece."""
    pieces = _found(facts, group)
    if not pieces:
        return "all linear layers are in other pieces, which cast no gradients either"
    if not facts.on_gpu:
        return _ON_CPU
    if not facts.autocast:
        return "no weight is cast: the matmuls run in the dtype of the weights"
    return _with_fused(_without_casts(facts, pieces), pieces)


def _with_attention(facts: Facts, group: str) -> Facts | str:
    """Return the step with fused rotary positions, and SDPA in place of naive attention."""
    pieces = _found(facts, group)
    if not pieces:
        return _NOTHING
    names = {piece.piece for piece in pieces}
    if names & {SDPA, ATTENTION_KERNEL} and facts.attention:
        facts = with_fused_attention(facts)
    elif names == {ATTENTION_KERNEL}:
        return "no naive attention is traced"
    elif not facts.on_gpu:
        return _ON_CPU
    return _with_fused(_without_casts(facts, pieces), pieces)


def _weights(pieces: Sequence[PieceWork]) -> int:
    """Number of weights of linear layers in these pieces."""
    return sum(
        piece.modules * _WEIGHTS.get(group_of(piece.piece), 0)
        for piece in pieces
        if piece.piece not in _PARTS_OF_ATTENTION
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


def _with_loss(facts: Facts, group: str) -> Facts | str:
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


def _with_optimizer(facts: Facts, group: str) -> Facts | str:
    """Return the step with the update in one launch."""
    del group
    if not facts.on_gpu:
        return "the fused update is a GPU kernel"
    if facts.optimizer_name not in ("Adam", "AdamW"):
        return f"{facts.optimizer_name or 'the optimizer'} is not torch.optim.AdamW or Adam"
    if facts.one_launch_optimizer:
        return "the update is one launch already"
    if not facts.bandwidth or not facts.parameters:
        return ""
    least = _NEAR_BANDWIDTH * facts.parameters * ADAMW_BYTES / facts.bandwidth * 1e3

    def one_launch(work: PhaseWork) -> PhaseWork:
        return replace(work, classes={"optimizer": min(least, work.device_ms)}, launches=1.0)

    after = facts.with_work(one_launch, ("optimizer",))
    return replace(after, fused_optimizer=True, one_launch_optimizer=True)


_APPLY: dict[str, Callable[[Facts, str], Facts | str]] = {
    NORM: _with_layers,
    MLP: _with_layers,
    LINEAR: _with_linear,
    ATTENTION: _with_attention,
    LOSS: _with_loss,
    EMBEDDING: _with_layers,
    OPTIMIZER: _with_optimizer,
}


def _not_applicable(facts: Facts, groups: Sequence[str]) -> str | None:
    """Return why `accelerate` cannot be predicted for the step; None if it can."""
    if facts.pieces is None:
        return ""
    if facts.compiled and set(groups) & {*IN_BLOCKS}:
        return COMPILED
    return None


def excluded_pieces(pieces: Iterable[str], groups: Collection[str]) -> list[str]:
    """Return what `exclude` of `accelerate` has, so that of these pieces only the groups are
    replaced. A linear layer of an excluded piece would be one of its own."""
    names = [ATTENTION if piece == SDPA else piece for piece in pieces]
    left = [name for name in dict.fromkeys(names) if group_of(name) not in groups]
    if left and LINEAR not in groups:
        left = [*(name for name in left if name != LINEAR), LINEAR]
    return left


def _call(facts: Facts, groups: Collection[str]) -> str:
    """Return the call of `accelerate` that applies only these pieces."""
    left = excluded_pieces((piece.piece for piece in facts.pieces or ()), groups)
    optimizer = ", optimizer" if OPTIMIZER in groups else ""
    quoted = ", ".join(f'"{name}"' for name in left)
    exclude = f", exclude=[{quoted}]" if left else ""
    return f"stepscope.accelerate(model{optimizer}{exclude})"


def _one(facts: Facts, group: str, why: Callable[[Facts, Facts], str]) -> Change | str:
    """Predict one piece alone."""
    reason = _not_applicable(facts, [group])
    if reason is not None:
        return reason
    after = _APPLY[group](facts, group)
    if isinstance(after, str):
        return after
    return Change(
        after=after,
        gain_bytes=_bytes(facts, after),
        why=why(facts, after),
        risk=_NUMERICS,
        lines=(_call(facts, [group]),),
        setting={group: ACCELERATE},
        excludes=("compile",) if group in IN_BLOCKS else (),
    )


def _bytes(facts: Facts, after: Facts) -> int:
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


@rule(
    "accelerate-norms", "fused norms and residual adds (stepscope.accelerate)", whole="accelerate"
)
def _norms(facts: Facts) -> Change | str:
    return _one(facts, NORM, _replaced_work(NORM, "norms"))


@rule("accelerate-mlp", "fused gated MLPs (stepscope.accelerate)", whole="accelerate")
def _mlps(facts: Facts) -> Change | str:
    return _one(facts, MLP, _replaced_work(MLP, "activations of the MLPs"))


@rule(
    "accelerate-linear",
    "linear layers without casts of gradients (stepscope.accelerate)",
    whole="accelerate",
)
def _linear(facts: Facts) -> Change | str:
    return _one(
        facts,
        LINEAR,
        lambda facts, _: (
            "autocast casts every weight in the forward and its gradient in the backward:"
            f" {2 * facts.casts_ms:.3g} ms at the bandwidth measured here; gradients are written"
            " without a cast, and the update of a CUDA graph writes the casts of the weights"
        ),
    )


@rule("accelerate-attention", "fused projections, rotary positions and attention"
      " (stepscope.accelerate)", whole="accelerate")  # fmt: skip
def _attention(facts: Facts) -> Change | str:
    if not facts.on_gpu:
        return f"{_ON_CPU}: see fused attention"

    def why(facts: Facts, after: Facts) -> str:
        del after
        naive = sum(work.device_ms for work in facts.attention)
        rotary = sum(s.ms for piece in _found(facts, ATTENTION) for s in piece.shares)
        parts = [f"naive attention takes {naive:.3g} ms"] if naive else []
        parts += [f"rotary positions and copies of the heads take {rotary:.3g} ms"]
        projected = any(p.piece not in _PARTS_OF_ATTENTION for p in _found(facts, ATTENTION))
        return ", ".join(parts) + ("; Q, K and V are separate matmuls" if projected else "")

    return _one(facts, ATTENTION, why)


@rule("fused-loss", "fused linear cross-entropy (chunked, without full logits)", whole="accelerate")
def _fused_loss(facts: Facts) -> Change | str:
    """The chunked loss, which `accelerate` applies where the model's forward computes the loss."""
    if facts.loss_ms <= 0:
        return _NO_LOSS
    after = _with_fused_loss(facts)
    change = Change(
        after=after,
        gain_bytes=_bytes(facts, after),
        why=f"from logits to loss, forward and backward, takes {facts.loss_ms:.3g} ms, and"
        f" {facts.logit_bytes / 2**20:.4g} MiB of logits are saved for backward",
        risk=_OTHER_ORDER,
        lines=(_call(facts, [LOSS]),),
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


@rule(
    "accelerate-embedding",
    "fused gradient of the embedding (stepscope.accelerate)",
    whole="accelerate",
)
def _embedding(facts: Facts) -> Change | str:
    return _one(facts, EMBEDDING, _replaced_work(EMBEDDING, "gradients of embeddings"))


@rule("accelerate-optimizer", "optimizer in one launch (stepscope.accelerate)", whole="accelerate")
def _one_launch(facts: Facts) -> Change | str:
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
        if isinstance(after, str):
            continue
        if gain_ms(facts, after) >= 0 and after != facts:
            groups.append(group)
            facts = after
    return groups, facts


def with_all_pieces(facts: Facts) -> tuple[list[str], Facts] | str:
    """Return the pieces that `accelerate` is advised for, and the step with them; or why none."""
    if (reason := _not_applicable(facts, GROUPS)) is not None:
        return reason
    if not facts.on_gpu:
        return f"{_ON_CPU}: see fused attention and the fused loss"
    groups, after = _paying(facts)
    if groups:
        # Not predicted, but they cost no time either, and may gain with another dtype.
        groups += [group for group in (LINEAR, EMBEDDING) if group not in groups]
    return (groups, after) if groups else "stepscope.accelerate replaces no part that would gain"


def _parts(groups: Sequence[str]) -> str:
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


@rule("accelerate", "stepscope.accelerate (fused layers, loss and optimizer)")
def _accelerate(facts: Facts) -> Change | str:
    whole = with_all_pieces(facts)
    if isinstance(whole, str):
        return whole
    groups, after = whole
    return Change(
        after=after,
        gain_bytes=_bytes(facts, after),
        why=f"fused kernels replace {_parts(groups)}: fewer launches, and each tensor is read and"
        " written once",
        risk=_NUMERICS,
        lines=("import stepscope", _call(facts, groups)),
        setting=dict.fromkeys(groups, ACCELERATE),
        excludes=("compile",) if set(groups) & {*IN_BLOCKS} else (),
    )


def _as_graph(facts: Facts) -> Facts | str:
    """Return the step as one CUDA graph."""
    if not facts.on_gpu:
        return "the step runs on a CPU"
    if facts.captured:
        return "the step is a CUDA graph already"
    if facts.ranks > 1:
        return "ranks that capture at different steps would wait for each other's collectives"
    phases = (*MODEL_PHASES, OPTIMIZER)
    after = facts.with_work(lambda work: replace(work, launches=0.0), phases)
    return replace(after, captured=True)


def _step_lines(facts: Facts) -> tuple[str, ...]:
    accumulate = f", accumulate={facts.micro_batches}" if facts.micro_batches > 1 else ""
    return (
        f"step = stepscope.TrainStep(model, optimizer{accumulate})"
        "  # and max_grad_norm=, scheduler=, loss_fn= as in your loop",
        "loss = step(batch)  # forward, backward, clipping, update and zero_grad()",
    )


def _step_setting(facts: Facts) -> tuple[dict[str, str], str]:
    if facts.micro_batches > 1:
        return {}, "the loop accumulates gradients: which calls make a step is yours to say"
    return {STEP: "graph"}, ""


@rule("train-step", "stepscope.TrainStep (the step as a CUDA graph)", last=True)
def _train_step(facts: Facts) -> Change | str:
    after = _as_graph(facts)
    if isinstance(after, str):
        return after
    if wall_ms(after) > _GRAPH_SHOWS * wall_ms(facts):
        return "the step does not wait for launches"
    setting, by_author = _step_setting(facts)
    return Change(
        after=after,
        why=f"the device waits {host_limits_ms(facts):.3g} ms for launches, and a graph is one"
        " launch",
        risk=_FIXED_SHAPES,
        lines=("import stepscope", *_step_lines(facts)),
        setting=setting,
        by_author=by_author,
    )


@rule("accelerate-step", "stepscope.accelerate and TrainStep (fused, as a CUDA graph)", parts=True)
def _accelerated_step(facts: Facts) -> Change | str:
    """Both together: fused kernels are so short that the host limits the step without a graph."""
    whole, graph = with_all_pieces(facts), _as_graph(facts)
    if isinstance(whole, str):
        return whole
    if isinstance(graph, str):
        return graph
    groups, fused = whole
    after = _as_graph(fused)
    assert isinstance(after, Facts)
    setting, by_author = _step_setting(facts)
    late = host_limits_ms(fused)
    return Change(
        after=after,
        gain_bytes=_bytes(facts, after),
        why=f"fused kernels replace {_parts(groups)}; the device would wait {late:.3g} ms for"
        " their launches, and a graph is one launch",
        risk=f"{_NUMERICS}; {_FIXED_SHAPES}",
        lines=("import stepscope", _call(facts, groups), *_step_lines(facts)),
        setting=dict.fromkeys(groups, ACCELERATE) | setting if setting else {},
        by_author=by_author,
        excludes=("compile",) if set(groups) & {*IN_BLOCKS} else (),
    )
