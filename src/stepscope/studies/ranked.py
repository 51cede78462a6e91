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

from stepscope.records.schema import Record
from stepscope.studies.base import Bench, CaseSkipped

if TYPE_CHECKING:
    from stepscope.parallel import Crew, Limits

MOST_SECONDS = 540.0
STEP_SECONDS = 180.0
BEAT_SECONDS = 30.0
"""A rank that loads a GPU's libraries, or shares a busy machine, may be silent for seconds."""


def torchrun_size(variables: Mapping[str, str] = os.environ) -> int:
    """How many ranks torchrun started; 0 without it."""
    return int(variables["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in variables else 0


def is_follower(variables: Mapping[str, str] = os.environ) -> bool:
    return torchrun_size(variables) > 0 and variables["RANK"] != "0"


def default_ranks() -> tuple[int, ...]:
    return (torchrun_size() or 2,)


def rank_words(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks:,} ranks"


def backend_of(record: Record) -> str:
    """What the ranks talked through; a case may leave that choice open."""
    return record.notes.get("backend", str(record.config["backend"]))


def follow() -> NoReturn:
    """Become a process that takes part in what rank 0 measures."""
    os.execv(sys.executable, [sys.executable, "-m", "stepscope.studies.follower"])


@cache
def crew() -> Crew:
    from stepscope.parallel import Crew

    return Crew()


def patience() -> Limits:
    """How long the ranks of a case may be silent."""
    from stepscope.parallel import Limits

    return Limits(start=STEP_SECONDS, step=STEP_SECONDS, beat=BEAT_SECONDS, total=MOST_SECONDS)


def on_ranks(
    study: str,
    config: dict[str, Any],
    bench: Bench,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> list[Any]:
    """What `function(world, *arguments)` returned on each rank of this case."""
    from stepscope.parallel import launch

    ranks, backend, device = config["ranks"], config["backend"], bench.device.kind
    if backend == "nccl" and device != "cuda":
        raise CaseSkipped("backend nccl needs GPUs")
    started = torchrun_size()
    if started and ranks != started:
        raise CaseSkipped(f"torchrun started {started} ranks, this case needs {ranks}")
    bench.progress(0, 1, f"{ranks} ranks")
    limits = patience()
    if not started:
        return launch(
            function, arguments, ranks=ranks, backend=backend, device=device, limits=limits
        )
    if not is_follower():
        crew().announce({"study": study, "config": config, "device": device})
    return crew().run(function, arguments, backend=backend, device=device, limits=limits)
