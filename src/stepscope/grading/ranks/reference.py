"""The same training in one process, and the weights that common mistakes lead to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepscope.grading.ranks.scenarios import (
    LR,
    RANKS,
    STEPS,
    Net,
    Scenario,
    gradients,
    loss_of,
    optimized,
    optimizer_of,
    rate,
    state_of,
)
from stepscope.report.format import number

State = dict[str, Tensor]


def trained(
    model: Net,
    scenario: Scenario,
    *,
    sharded: bool,
    exact: bool,
    options: dict[str, Any] | None = None,
    updates: int = 1,
) -> list[State]:
    """Weights after each step of one process on the batches of all ranks, with other options of the
    optimizer, or several updates in a step."""
    model = copy.deepcopy(model)
    if exact:
        model = model.double()
    kind, right = optimizer_of(scenario)
    optimizer = kind(optimized(model, scenario), **(right if options is None else options))
    states = []
    for step in range(STEPS):
        if scenario.schedule:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
        optimizer.zero_grad()
        found = (
            gradients(model, state_of(model), step)
            if sharded
            else averaged(model, scenario, step, exact=exact)
        )
        for name, parameter in model.named_parameters():
            parameter.grad = found[name]
        for _ in range(updates):
            optimizer.step()
        states.append(state_of(model))
    return states


def averaged(model: Net, scenario: Scenario, step: int, *, exact: bool) -> dict[str, Tensor | None]:
    """Average gradients of all ranks; the baseline takes them as one process would."""
    if scenario.compute_dtype is not None and not exact:
        low = copy.deepcopy(model).to(scenario.compute_dtype)
        low.zero_grad()
        loss_of(low, step).backward()  # type: ignore[no-untyped-call]
        return {n: None if p.grad is None else p.grad.float() for n, p in low.named_parameters()}
    if not exact and "uneven" not in scenario.flags:
        return gradients(model, state_of(model), step)
    own = [gradients(model, state_of(model), step, rank) for rank in range(RANKS)]
    return {name: _mean([one[name] for one in own]) for name in own[0]}


def _mean(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.stack(present).sum(0) / len(parts) if present else None


class Wrong(NamedTuple):
    """A mistake and the weights that it leads to; parameters without an entry do not decide."""

    code: str
    text: str
    state: State


def wrong_averages(
    model: Net, scenario: Scenario, before: list[State], step: int, rank: int
) -> Iterator[Wrong]:
    """Weights after a step of SGD with wrong gradients. `before` has the exact weights before each
    step up to this one."""
    model = copy.deepcopy(model).double()
    here = before[step]

    def after(found: Mapping[str, Tensor | None]) -> State:
        return {
            name: here[name] if one is None or not _trained(model, name) else here[name] - LR * one
            for name, one in found.items()
        }

    parts = [gradients(model, here, step, one) for one in range(RANKS)]
    mean = {name: _mean([part[name] for part in parts]) for name in parts[0]}

    def scaled(found: Mapping[str, Tensor | None], factor: float) -> dict[str, Tensor | None]:
        return {name: None if one is None else factor * one for name, one in found.items()}

    # First: of equal explanations the first counts.
    if "tied" in scenario.flags:
        loose = copy.deepcopy(model)
        loose.fc3.weight = torch.nn.Parameter(loose.fc2.weight.detach().clone())
        found = gradients(loose, here | {"fc3.weight": here["fc2.weight"]}, step)
        for one in ("fc2.weight", "fc3.weight"):
            yield Wrong(
                "tied-apart",
                f"the tied weight gets the gradient of {one.split('.')[0]} alone: it is handled as"
                " two parameters",
                after(mean | {"fc2.weight": found[one]}),
            )
        yield Wrong(
            "tied-doubled",
            "the gradient of the tied weight counts twice: it is handled once for each use",
            after(mean | {"fc2.weight": scaled(mean, 2.0)["fc2.weight"]}),
        )
    own = parts[rank]
    yield Wrong("summed", "gradients are summed, not averaged", after(scaled(mean, RANKS)))
    yield Wrong(
        "divided-twice",
        "gradients are divided by the number of ranks twice",
        after(scaled(mean, 1 / RANKS)),
    )
    yield Wrong(
        "not-synchronized",
        "each rank uses its own gradients: they are not communicated, or not waited for",
        after(own),
    )
    yield Wrong(
        "not-synchronized",
        "each rank uses its own gradients, divided by the number of ranks: their sum is not"
        " received, or not waited for",
        after(scaled(own, 1 / RANKS)),
    )
    for other in range(RANKS):
        if other != rank:
            text = f"the gradients are those of rank {other} alone"
            yield Wrong("one-rank-only", text, after(parts[other]))
    halves: dict[str, Tensor | None] = {}
    for name, value in mean.items():
        shards = [part[name] for part in parts]
        halves[name] = value
        if value is not None and len(value) % RANKS == 0 and all(x is not None for x in shards):
            chunks = [x.chunk(RANKS)[at] for at, x in enumerate(shards) if x is not None]
            halves[name] = torch.cat(chunks)
    yield Wrong(
        "not-synchronized",
        "each rank updates its shard with its own gradients: they are not reduced over the ranks",
        after(halves),
    )
    yield Wrong("unchanged", "the step does not change them", dict(here))
    for earlier in range(step):
        for what, stale in _stale_states(before[earlier], here):
            parts = [gradients(model, stale(one), step, one) for one in range(RANKS)]
            yield Wrong(
                "stale-weights",
                f"its gradients are those of {what} before step {earlier + 1}: forward or backward"
                " use a copy that the optimizer step does not update",
                after({name: _mean([part[name] for part in parts]) for name in here}),
            )
        last = averaged(model, scenario, earlier, exact=True)
        total = {
            name: one if (old := last[name]) is None or one is None else one + old
            for name, one in mean.items()
        }
        yield Wrong(
            "accumulated", "gradients of an earlier step are still in the sum", after(total)
        )


def _stale_states(old: State, new: State) -> Iterator[tuple[str, Callable[[int], State]]]:
    """Weights of which a part is old: all, matrices (which an FSDP shards), or of those the shards
    of the other ranks. Each is a function of the rank."""
    matrices = {name: value for name, value in old.items() if value.ndim > 1}
    yield "the weights", lambda _: old
    yield "the matrices", lambda _: new | matrices

    def of_others(rank: int) -> State:
        return new | {
            name: torch.cat(
                [
                    (new[name] if at == rank else value).chunk(RANKS)[at]
                    for at in range(min(RANKS, len(value)))
                ]
            )
            for name, value in matrices.items()
        }

    yield "the shards of other ranks", of_others


def _trained(model: Net, name: str) -> bool:
    return dict(model.named_parameters())[name].requires_grad


def wrong_updates(
    model: Net, scenario: Scenario, before: list[State], step: int
) -> Iterator[Wrong]:
    """Weights after a step of a wrongly sharded optimizer."""
    _, options = optimizer_of(scenario)
    wrongly = partial(trained, model, scenario._replace(schedule=False), sharded=True, exact=True)
    twice = wrongly(updates=2)
    yield Wrong(
        "tied-doubled",
        "the tied weight is updated twice in a step: it is handled once for each use",
        {"fc2.weight": twice[step]["fc2.weight"]} if "tied" in scenario.flags else {},
    )
    yield Wrong("stale-shard", "", dict(before[step]))
    for text, changed in (
        ("the options of the optimizer are not passed on", {"lr": options["lr"]}),
        ("the learning rate is not passed on", {k: v for k, v in options.items() if k != "lr"}),
        ("no option of the optimizer is passed on", {}),
    ):
        yield Wrong("options-ignored", text, wrongly(options=changed)[step])
    if scenario.schedule:
        text = "a change of param_groups[i]['lr'] does not reach the optimizer of the shard"
        yield Wrong("schedule-ignored", text, wrongly()[step])
    if scenario.groups:
        flat = trained(model, scenario._replace(groups=False), sharded=True, exact=True)
        yield Wrong("groups-ignored", "the options of the groups are ignored", flat[step])
    yield Wrong("updated-twice", "they are updated twice in a step", twice[step])


def as_factor(actual: Tensor, exact: Tensor, before: Tensor) -> str:
    """A constant factor on the update that explains wrong weights, in words."""
    update, right = (before - actual).double(), before.double() - exact
    square = (right * right).sum()
    factor = ((update * right).sum() / square).item() if square else 0.0
    if factor and (update - factor * right).abs().max() <= 0.02 * (update - right).abs().max():
        return f"gradients are {number(factor)} times the average"
    return ""
