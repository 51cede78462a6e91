"""Gradients set to None instead of filled with zeros."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from stepscope.analysis.advice.facts import Facts
from stepscope.analysis.advice.program import Program, setting
from stepscope.analysis.advice.rule import Change, Left, rule


@rule("set-to-none", "gradients set to None instead of zeroed")
def _set_to_none(facts: Facts) -> Change | Left | None:
    if not facts.cleared_ms:
        return Left("no gradient is filled with zeros")
    after = facts.with_work(lambda work: work.less(facts.cleared_ms), ("optimizer",))
    return Change(
        after=replace(after, cleared_ms=0.0),
        why=f"filling gradients with zeros takes {facts.cleared_ms:.3g} ms",
        risk="none, unless code reads .grad between steps",
        lines=("optimizer.zero_grad(set_to_none=True)",),
        setting={"gradients": "none"},
    )


@setting("gradients", switchable=True, without="zero_grad() does not fill gradients with zeros")
def _set_to_none_in(program: Program, value: str) -> None:  # noqa: ARG001
    import torch

    for class_ in (torch.optim.Optimizer, torch.nn.Module):
        plain = class_.zero_grad

        def zero_grad(self: Any, set_to_none: bool = True, plain: Any = plain) -> None:
            program.applied["gradients"] += not set_to_none
            plain(self, set_to_none=set_to_none or program.is_on("gradients"))

        class_.zero_grad = zero_grad  # type: ignore[method-assign]
