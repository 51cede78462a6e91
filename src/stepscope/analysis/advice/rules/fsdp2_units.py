"""Which modules are units of FSDP2: what is gathered at once."""

from __future__ import annotations

import functools
from typing import Any

from msgspec.structs import replace

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rehearsed import exposed_with_units
from stepscope.analysis.advice.rule import Change, Left, rule

_OTHER = Left("no parameters are sharded by fully_shard")
_GATHERED = 2
"""Units that are gathered at a time."""
_PAIRS = "2"
_NO_CALL = "the script shards no model with repeated blocks by fully_shard"


@rule("shard-blocks", "each block a unit of FSDP2")
def _blocks(facts: Facts) -> Change | Left | None:
    sharing = facts.sharing
    if sharing is None or sharing.kind != "fsdp2":
        return _OTHER
    if sharing.units > 1:
        return Left(f"it has {sharing.units} units")
    if facts.blocks < 2:
        return Left("the model has no repeated blocks")
    units = facts.blocks + 1
    width = 2 if facts.dtype in ("bfloat16", "float16") else 4
    held = int(width * facts.parameters * max(0.0, 1 - _GATHERED / units))
    gathered = f"{width * facts.parameters / 2**20:.3g} MiB of parameters"
    return _with_units(
        facts,
        units,
        "blocks",
        gain_bytes=held,
        why=f"all {gathered} are gathered at once, before the first block computes",
        lines=("for block in model.layers:", "    fully_shard(block)", "fully_shard(model)"),
    )


@rule("larger-units", "two blocks per unit of FSDP2")
def _pairs(facts: Facts) -> Change | Left | None:
    sharing = facts.sharing
    if sharing is None or sharing.kind != "fsdp2":
        return _OTHER
    if sharing.units - 1 != facts.blocks or facts.blocks < 4:
        return Left("its units are not the blocks of the model")
    if sharing.prefetches:
        return Left("its units name those that they prefetch")
    if not facts.on_gpu:
        return Left("on a CPU each gather ends before FSDP2 continues")
    each = facts.parameters / sharing.units
    return _with_units(
        facts,
        1 + -(-facts.blocks // 2),
        _PAIRS,
        gain_bytes=-int(4 * _GATHERED * each),
        why=f"a unit gathers {each / 1e6:.3g} million parameters, so that latency is a large share"
        " of what a collective takes",
        lines=("for pair in zip(blocks[::2], blocks[1::2]):", "    fully_shard(list(pair))"),
        # The two modules of a pair are one unit with two names.
        excludes=("prefetch",),
    )


def _with_units(
    facts: Facts,
    units: int,
    value: str,
    *,
    gain_bytes: int,
    why: str,
    lines: tuple[str, ...],
    excludes: tuple[str, ...] = (),
) -> Change | Left:
    sharing = facts.sharing
    assert sharing is not None
    before, after = (exposed_with_units(facts, n) for n in (sharing.units, units))
    gain = 0.0
    if facts.on_gpu:
        if not before or after is None:
            return Left("the trace does not show what its gathers and reductions take")
        gain = facts.exposed_ms * (1 - after / before)
    communicates = {
        phase: facts.class_ms("communication", among=(phase,)) for phase in ("forward", "backward")
    }
    every = sum(communicates.values()) or 1.0
    changed = facts.with_less_communication(
        {phase: gain * ms / every for phase, ms in communicates.items()}
    )
    return Change(
        after=replace(changed, sharing=replace(sharing, units=units)),
        gain_bytes=gain_bytes,
        why=why,
        risk="names of parameters stay; a module outside of all units belongs to that of the model",
        lines=lines,
        setting={"units": value},
        excludes=excludes,
    )


@setting("units", "blocks", without=_NO_CALL)
def _with_blocks(program: Program, value: str) -> None:  # noqa: ARG001
    from torch import nn
    from torch.distributed import fsdp

    plain: Any = fsdp.fully_shard

    @functools.wraps(plain)
    def fully_shard(module: Any, **options: Any) -> Any:
        modules = module.modules() if isinstance(module, nn.Module) else ()
        blocks = [
            block
            for one in modules
            if isinstance(one, nn.ModuleList | nn.Sequential) and len({*map(type, one)}) == 1
            for block in one
            if len(one) > 1
        ]
        # Of lists within blocks, the outermost.
        within = {id(x) for block in blocks for x in block.modules() if x is not block}
        for block in blocks:
            if id(block) not in within and not isinstance(block, fsdp.FSDPModule):
                plain(block, **options)
                program.applied["units"] += 1
        return plain(module, **options)

    fsdp.fully_shard = fully_shard


@setting("units", _PAIRS, without=_NO_CALL)
def _with_pairs(program: Program, value: str) -> None:  # noqa: ARG001
    """Shard modules of one class in pairs, but the first: it may be the only one, as a model is.
    A last one without another waits for the call with the model."""
    from torch import nn
    from torch.distributed import fsdp

    plain: Any = fsdp.fully_shard
    seen: set[type] = set()
    waiting: list[tuple[Any, dict[str, Any]]] = []

    def shard_waiting() -> None:
        while waiting:
            module, options = waiting.pop()
            plain(module, **options)

    @functools.wraps(plain)
    def fully_shard(module: Any, **options: Any) -> Any:
        kind = type(module)
        if waiting and type(waiting[0][0]) is kind:
            first, _ = waiting.pop()
            plain([first, module], **options)
            program.applied["units"] += 1
            return module
        shard_waiting()
        if kind in seen and isinstance(module, nn.Module):
            waiting.append((module, options))
            return module
        seen.add(kind)
        return plain(module, **options)

    fsdp.fully_shard = fully_shard
