"""`stepscope inspect`: what an existing training script does in a step, without a change to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from stepscope.cli.common import Place, parse, write_text
from stepscope.cli.scripts import split_words
from stepscope.errors import StepscopeError, UsageError, no_such_file
from stepscope.records.jsonl import write_records
from stepscope.studies.inspected.order import Order

_OTHER_RANKS_WITHIN_S = 60.0


class InspectOptions(Place, frozen=True, kw_only=True):
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT [ARGUMENTS …]")] = ""
    """The training script, and what it is given."""
    page: Path | None = None
    """The page to write; NAME.html in the folder of the reports where it is not given."""
    warmup: int = 5
    """Steps left out at the beginning."""
    timed: int = 10
    """Steps timed as they are."""
    traced: int = 3
    """Steps under the profiler."""
    memory: bool = True
    """One step in which every tensor is counted. It resets CUDA's peak statistics."""
    stop: bool = False
    """End the script with exit code 0 once its steps are recorded."""
    keep: bool = False
    """Keep the traces and snapshots beside the page."""
    module: bool = False
    """What follows is a module, as for `python -m` (also: -m)."""


def main(words: list[str]) -> int:
    own, target, rest = split_words(words, InspectOptions)
    options = parse(
        InspectOptions,
        own,
        "inspect",
        "Run a training script as it is and record a few of its steps: where their time and\n"
        "memory go, what limits them, which parts take the most. The script's output and exit\n"
        "code are its own. Options of inspect stand before the script, the script's after it.\n"
        "Under torchrun: one page for all ranks of the machine.",
        (
            "stepscope inspect train.py --batch-size 8",
            "stepscope inspect --stop --page first.html train.py config/small.yaml",
            "stepscope inspect -m mylab.train --steps 100",
            "torchrun --nproc-per-node 2 -m stepscope inspect train.py",
        ),
    )
    if target is None:
        raise UsageError("there is no script to inspect", "stepscope inspect [options] script.py")
    order = _order(options, target, rest)
    folder, leads = _folder()
    page = options.page or options.out / f"{Path(order.name).stem}.html"
    try:
        return _run(order, folder, page if leads else None, keep=options.keep)
    finally:
        if leads:
            shutil.rmtree(folder, ignore_errors=True)


def _order(options: InspectOptions, target: str, words: list[str]) -> Order:
    if not options.module and not Path(target).is_file():
        raise no_such_file(target, "script", "a module is named after -m")
    if options.timed < 1 or options.traced < 1 or options.warmup < 0:
        raise UsageError(
            f"warmup {options.warmup}, timed {options.timed} and traced {options.traced} make no"
            " recording",
            "at least one step must be timed and one traced",
        )
    return Order(
        target=target, module=options.module, words=tuple(words), warmup=options.warmup,
        timed=options.timed, traced=options.traced, memory=options.memory, stop=options.stop,
    )  # fmt: skip


def _folder() -> tuple[Path, bool]:
    """Where the ranks of this machine leave their parts, and whether this one makes the page."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return Path(tempfile.mkdtemp(prefix="stepscope-inspect-")), True
    # All ranks have the same parent, torchrun, and it has one address for them to meet.
    name = f"stepscope-inspect-{os.getuid()}-{os.getppid()}-{os.environ.get('MASTER_PORT', '')}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder, os.environ.get("LOCAL_RANK") == "0"


def _run(order: Order, folder: Path, page: Path | None, *, keep: bool) -> int:
    from stepscope.studies.inspected.child import Child, describe_end, end_alike
    from stepscope.studies.inspected.gather import parts
    from stepscope.studies.inspected.progress import CHILD_STEPPED, read_progress, why_nothing

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    written = False

    def write_when_there() -> None:
        nonlocal written
        if page is not None and not written and len(parts(folder)) == ranks:
            written = True
            _write(folder, page, keep=keep)

    text = msgspec.json.encode(order).decode()
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    child = Child([sys.executable, *flags, "-m", "stepscope.scope.launch", str(folder), text])
    status = child.wait(write_when_there)
    if page is not None and not written:
        _wait_for_parts(folder, ranks)
        if parts(folder):
            _write(folder, page, keep=keep)
        else:
            stepped = (folder / CHILD_STEPPED).exists()
            _say(why_nothing(read_progress(folder), order.name, describe_end(status), stepped))
    return end_alike(status)


def _wait_for_parts(folder: Path, ranks: int) -> None:
    """Other ranks may still be writing theirs."""
    from stepscope.studies.inspected.gather import parts

    deadline = time.monotonic() + (_OTHER_RANKS_WITHIN_S if ranks > 1 and parts(folder) else 0.0)
    while len(parts(folder)) < ranks and time.monotonic() < deadline:
        time.sleep(0.1)


def _write(folder: Path, page: Path, *, keep: bool) -> None:
    """The page and the records; whatever fails here is said and takes nothing from the script."""
    from stepscope.report.html import html_page
    from stepscope.studies.inspected.gather import gather
    from stepscope.studies.page import make_page

    try:
        records = gather(folder)
        write_text(page, html_page(make_page(records)))
        write_records(records, page.with_suffix(".jsonl"))
        if keep:
            for path in (*folder.glob("*.trace.json.gz"), *folder.glob("*.pickle")):
                shutil.copy(path, page.with_name(f"{page.stem}.{path.name}"))
    except StepscopeError as error:
        _say(str(error))
    else:
        _say(f"page: {page.resolve()}")


def _say(text: str) -> None:
    """Not on standard output, which is the script's."""
    print(f"stepscope: {text}", file=sys.stderr, flush=True)
