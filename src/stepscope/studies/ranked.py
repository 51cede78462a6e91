"""Cases that need several ranks: processes of this machine, or those that torchrun started.

    torchrun --nproc-per-node 2 -m stepscope run ddp

Under torchrun every rank runs the same command. Rank 0 alone has the store, the worker and the
page; the others follow it from case to case. Loads without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from stepscope.studies.base import Bench, CaseSkipped

if TYPE_CHECKING:
    from stepscope.parallel import Crew

MOST_SECONDS = 540.0


def torchrun_size(variables: Mapping[str, str] = os.environ) -> int:
    """How many ranks torchrun started; 0 without it."""
    return int(variables["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in variables else 0


def is_follower(variables: Mapping[str, str] = os.environ) -> bool:
    return torchrun_size(variables) > 0 and variables["RANK"] != "0"


def default_ranks() -> tuple[int, ...]:
    return (torchrun_size() or 2,)


def follow() -> NoReturn:
    """Become a process that takes part in what rank 0 measures."""
    os.execv(sys.executable, [sys.executable, "-m", "stepscope.studies.follower"])


@cache
def crew() -> Crew:
    from stepscope.parallel import Crew

    return Crew()


def on_ranks(
    study: str,
    config: dict[str, Any],
    bench: Bench,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    step_s: float = 180.0,
) -> list[Any]:
    """What `function(world, *arguments)` returned on each rank of this case."""
    from stepscope.parallel import Limits, launch

    ranks, backend, device = config["ranks"], config["backend"], bench.device.kind
    if backend == "nccl" and device != "cuda":
        raise CaseSkipped("backend nccl needs GPUs")
    started = torchrun_size()
    if started and ranks != started:
        raise CaseSkipped(f"torchrun started {started} ranks, this case needs {ranks}")
    bench.progress(0, 1, f"{ranks} ranks")
    limits = Limits(start=step_s, step=step_s, total=MOST_SECONDS)
    if not started:
        return launch(
            function, arguments, ranks=ranks, backend=backend, device=device, limits=limits
        )
    if not is_follower():
        crew().announce({"study": study, "config": config, "device": device})
    return crew().run(function, arguments, backend=backend, device=device, limits=limits)
