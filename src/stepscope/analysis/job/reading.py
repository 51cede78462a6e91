"""Reading of a folder of traces, ranks in parallel, within the memory of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from stepscope.analysis.job.rank import RankTrace, read_rank
from stepscope.analysis.job.reader import read_in_processes
from stepscope.errors import StepscopeError

_SUFFIXES = (".json", ".json.gz", ".sqlite")
_UNPACKED = {".gz": 20.0}
"""Size of a trace over that of its file."""
_PER_BYTE = 2.0
"""Peak memory of a reader over the size of the trace."""
_PROCESS_BYTES = 120 << 20
_SHARE = 0.7
"""Share of the free memory that readers may use."""
_SMALL_BYTES = 16 << 20
"""Total size up to which starting processes takes longer than reading."""


def trace_files(folder: Path) -> tuple[Path, ...]:
    """Return the traces in a folder; subfolders are searched if it has none itself."""
    for pattern in ("*", "*/*"):
        found = sorted(
            path
            for path in folder.glob(pattern)
            if path.is_file() and path.name.endswith(_SUFFIXES) and path.stat().st_size
        )
        if found:
            return tuple(found)
    raise StepscopeError(
        f"{folder} has no traces", "expected .json, .json.gz or .sqlite files, one per rank"
    )


def read_ranks(
    files: Sequence[Path],
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[tuple[RankTrace, ...], dict[str, str]]:
    """Read the traces of a job; return the ranks in order, and why other files were not read."""
    workers = _workers(files) if workers is None else workers
    ranks: list[RankTrace] = []
    unread: dict[str, str] = {}

    def keep(path: Path, result: RankTrace | str) -> None:
        if isinstance(result, str):
            unread[path.name] = result
        else:
            ranks.append(result)
        if progress is not None:
            progress(len(ranks) + len(unread), len(files))

    if workers == 1:
        for path in files:
            keep(path, _read(path))
    else:
        # The largest first: at the end no reader is left alone with one of them.
        order = sorted(files, key=lambda path: -path.stat().st_size)
        for path, result in read_in_processes(order, min(workers, len(files))):
            keep(path, result)
    if not ranks:
        raise StepscopeError(next(iter(unread.values())))
    return _by_rank(ranks, unread), unread


def _read(path: Path) -> RankTrace | str:
    try:
        return read_rank(path)
    except StepscopeError as error:
        return str(error)


def _workers(files: Sequence[Path]) -> int:
    """Return how many files to read at once."""
    sizes = sorted(path.stat().st_size * _UNPACKED.get(path.suffix, 1.0) for path in files)
    if sum(sizes) < _SMALL_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    each = _PROCESS_BYTES + _PER_BYTE * sizes[-1]
    fitting = int(_SHARE * psutil.virtual_memory().available / each)
    return max(1, min(len(files), cores or 1, fitting))


def _by_rank(ranks: Sequence[RankTrace], unread: dict[str, str]) -> tuple[RankTrace, ...]:
    """Return one trace per rank, the last by file name; files without a rank come last."""
    ordered = sorted(ranks, key=lambda one: one.file)
    numbers = [one.rank for one in ordered if one.rank is not None]
    if len(set(numbers)) < len(ordered) and len(set(numbers)) <= 1:
        # The names of unrelated files may end with the same number.
        return tuple(replace(one, rank=index) for index, one in enumerate(ordered))
    by_rank: dict[int | None, RankTrace] = {}
    for one in ordered:
        earlier = by_rank.get(one.rank)
        if earlier is not None:
            unread[earlier.file] = f"{one.file} is a later trace of the same rank"
        by_rank[one.rank] = one
    return tuple(sorted(by_rank.values(), key=lambda one: (one.rank is None, one.rank or 0)))
