"""Cases that need several ranks: processes of this machine, or those that torchrun started.

    torchrun --nproc-per-node 2 -m stepscope run ddp

Under torchrun every rank runs the same command. Only rank 0 has the store, the worker and the
page; the others follow it from case to case. Loads without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from stepscope.processes import own_command
from stepscope.training.case import Bench, Case, CaseSkipped

if TYPE_CHECKING:
    from stepscope.parallel import Crew, Limits

TIME_S = 420.0
"""Time after which a case takes no more rounds of samples, below the runner's default timeout."""
MAX_SECONDS = 86400.0
"""The runner's --timeout ends a case before."""
CHECK_STEPS = 3
"""Steps after which parameters are compared with those of one process."""
STEP_SECONDS = 180.0
BEAT_SECONDS = 30.0
"""Longest silence of a rank: loading GPU libraries, or a busy machine, can take seconds."""


class RankedCase(Case, frozen=True, kw_only=True):
    """A case that runs on several ranks."""

    ranks: int
    backend: str
    """Backend: gloo, nccl, or auto (nccl if every rank has a separate GPU)."""


def torchrun_size() -> int:
    """Number of ranks that torchrun started; 0 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def is_follower() -> bool:
    return torchrun_size() > 0 and os.environ["RANK"] != "0"


def default_ranks() -> tuple[int, ...]:
    return (torchrun_size() or 2,)


def follow() -> NoReturn:
    """Turn this process into a follower of rank 0."""
    os.execv(sys.executable, own_command("stepscope.runner.follower"))


@cache
def crew() -> Crew:
    from stepscope.parallel import Crew

    return Crew()


def patience() -> Limits:
    """Time limits for silent ranks of a case."""
    from stepscope.parallel import Limits

    return Limits(start=STEP_SECONDS, step=STEP_SECONDS, beat=BEAT_SECONDS, total=MAX_SECONDS)


def on_ranks(
    study: str, case: RankedCase, bench: Bench, function: Callable[..., Any], *more: Any
) -> list[Any]:
    """Run `function(world, case, *more)` on each rank of this case and return the results."""
    from stepscope.parallel import launch

    device = bench.device.kind
    if case.backend == "nccl" and device != "cuda":
        raise CaseSkipped("backend nccl needs GPUs")
    started = torchrun_size()
    if started and case.ranks != started:
        raise CaseSkipped(f"torchrun started {started} ranks, this case needs {case.ranks}")
    bench.progress(0, 1, f"{case.ranks} ranks")
    arguments, limits = (case, *more), patience()
    if not started:
        return launch(
            function,
            arguments,
            ranks=case.ranks,
            backend=case.backend,
            device=device,
            limits=limits,
        )
    if not is_follower():
        crew().announce({"study": study, "config": case.config, "device": device})
    return crew().run(function, arguments, backend=case.backend, device=device, limits=limits)
