"""Rewrite the assertions of the test files once, not once per worker.

Every worker of pytest-xdist imports every test file, and all at the same time: without bytecode
files, in a new clone, each of them rewrites all files, which takes 7 s of CPU time.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def rewrite_share(config: pytest.Config, folder: Path) -> None:
    """Rewrite the share of this worker, if all tests are about to be imported."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args_source is not config.ArgsSource.TESTPATHS:
        return
    try:
        from _pytest.assertion.rewrite import (
            PYC_TAIL,
            _read_pyc,
            _rewrite_test,
            _write_pyc,
            assertstate_key,
            get_cache_dir,
        )
    except ImportError:  # names of another version of pytest
        return
    number = int(worker["workerid"].removeprefix("gw"))
    state = config.stash[assertstate_key]
    for path in sorted(folder.rglob("test_*.py"))[number :: worker["workercount"]]:
        cached = get_cache_dir(path) / f"{path.stem}{PYC_TAIL}"
        if _read_pyc(path, cached) is None:
            source_hash, code = _rewrite_test(path, config)
            cached.parent.mkdir(parents=True, exist_ok=True)
            _write_pyc(state, code, source_hash, cached)
