"""When FSDP2 gathers parameters, and when it frees them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import TIGHT, Change, Left, rule

_OTHER = Left("no parameters are sharded by fully_shard")
_NO_UNITS = "no model of the script has several units of fully_shard"
_AHEAD = 2
"""Units that are gathered ahead. With one the overlap is that of FSDP2 itself, issued earlier."""


def _exposed_gathers(facts: Facts, phase: str) -> float:
    """Time of gathers in a phase that is not overlapped: their share of all communication in it."""
    gathers, every = facts.gathers_ms.get(phase, 0.0), facts.collectives_ms.get(phase, 0.0)
    exposed = facts.class_ms("communication", among=(phase,))
    return exposed * gathers / every if every else 0.0


@rule("keep-gathered", "parameters that stay gathered after the forward pass")
def _keep_gathered(facts: Facts) -> Change | Left | None:
    sharing = facts.sharing
    if sharing is None or sharing.kind != "fsdp2":
        return _OTHER
    held = sharing.resharded_bytes
    if not held:
        return Left("its units keep their parameters after the forward pass")
    if facts.memory_bytes and facts.peak_bytes + held > TIGHT * facts.memory_bytes:
        return Left(f"the memory has no room for {held / 2**30:.3g} GiB of gathered parameters")
    exposed = _exposed_gathers(facts, "backward")
    copied = 2e3 * held / facts.bandwidth if facts.bandwidth else 0.0
    after = facts.with_less_communication({"backward": exposed}).with_work(
        lambda work: work.with_more("copy/cast", -copied), ("backward",)
    )
    return Change(
        after=replace(
            after,
            sharing=replace(sharing, resharded_bytes=0),
            gathers_ms=facts.gathers_ms | {"backward": 0.0},
            peak_bytes=facts.peak_bytes + held,
        ),
        gain_bytes=-held,
        why=f"the backward pass gathers {held / 2**20:.3g} MiB of parameters again;"
        f" {exposed:.3g} ms of that are not overlapped",
        risk="memory: the parameters of all units at once, in the dtype of the forward pass",
        lines=("fully_shard(block, reshard_after_forward=False)",),
        setting={"reshard": "no"},
    )


@rule("prefetch-units", "parameters gathered two units ahead")
def _prefetch(facts: Facts) -> Change | Left | None:
    sharing = facts.sharing
    if sharing is None or sharing.kind != "fsdp2":
        return _OTHER
    if not facts.on_gpu:
        return Left("on a CPU each gather ends before FSDP2 continues")
    if sharing.prefetches:
        return Left("its units name those that they prefetch")
    if sharing.units <= _AHEAD:
        return Left(f"there are {sharing.units} units")
    hidden = {phase: _could_hide(facts, phase, sharing.units) for phase in ("forward", "backward")}
    return Change(
        after=replace(
            facts.with_less_communication(hidden), sharing=replace(sharing, prefetches=True)
        ),
        why=f"{sum(hidden.values()):.3g} ms of gathering parameters could be overlapped with the"
        " computation of units before",
        risk="memory: the parameters of two more units at a time",
        lines=(
            "for at, unit in enumerate(units):",
            f"    unit.set_modules_to_forward_prefetch(units[at + 1 : at + {1 + _AHEAD}])",
            "    unit.set_modules_to_backward_prefetch(units[max(0, at - 2) : at][::-1])",
        ),
        setting={"prefetch": str(_AHEAD)},
    )


def _could_hide(facts: Facts, phase: str, units: int) -> float:
    """Exposed time of gathers in a phase beyond the least: the first one, or what the computation
    of the phase is too short for."""
    gathers = facts.gathers_ms.get(phase, 0.0)
    communicates = facts.class_ms("communication", among=(phase,))
    computes = facts.phase_ms(phase) - communicates
    return max(0.0, _exposed_gathers(facts, phase) - max(gathers / units, gathers - computes))


def _units(model: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [one for one in model.modules() if isinstance(one, FSDPModule)]


@setting("reshard", "no", without=_NO_UNITS)
def _without_resharding(program: Program, value: str) -> None:  # noqa: ARG001
    def keep(model: Any) -> int:
        units = _units(model)
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
        return len(units)

    program.with_models("reshard", keep)


@setting("prefetch", without=_NO_UNITS)
def _with_prefetch(program: Program, value: str) -> None:
    def prefetch(model: Any) -> int:
        units = _units(model)
        for at, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + int(value)])
            unit.set_modules_to_backward_prefetch(units[max(0, at - int(value)) : at][::-1])
        return max(0, len(units) - 1)

    program.with_models("prefetch", prefetch)
